"""Schedulers written for ms-swift: they play the episodes that it makes of them, and what cannot be is refused."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayhelper import ConfigError
from tests.conftest import registries_restored
from tests.e2e.runs import final_bytes, gkd_config, grpo_config, lines
from tests.golden.ms_swift.record_turns import row_of
from tests.golden.tiny import save_tiny
from tests.trainers.test_episodes import END, TOKENIZER, ScriptedEngine, SteppingEngine, ids, user
from trainers.batch import Ragged, Rollouts
from trainers.cli import load_config
from trainers.gkd.config import GKDConfig
from trainers.gkd.trainer import GKDTrainer, completed_samples
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.plugins import load_plugins
from trainers.rewards.texts import last_turn_text
from trainers.rollout import openenv
from trainers.rollout.base import Sampling
from trainers.rollout.environments import Reply
from trainers.rollout.episodes import Stage
from trainers.rollout.games import MOST_TOKENS, MathEnv
from trainers.rollout.schedulers import MultiTurnScheduler, Scheduled, environment_named

RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "ms_swift" / "turns.json").read_text(encoding="utf-8"))
MORE = "more: "
PLUGIN = """
from swift.infer_engine.protocol import RolloutInferRequest
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import MultiTurnScheduler, OpenEnvScheduler, multi_turns
from swift.template import Messages

class Again(MultiTurnScheduler):
    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn >= 2

    async def on_turn_end(self, infer_request, response_choice, current_turn):
        return {"rollout_infos": {"total_reward": 0.25 * current_turn}}

    def step(self, infer_request: RolloutInferRequest, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "more: "})
        return {"infer_request": infer_request, "rollout_infos": {"asked": current_turn}}

class Replayed(Env):
    async def reset(self, config):
        self.answers = iter(config.data_dict["answers"])
        return config.data_dict["opening"], {}, config.data_dict["system"]

    async def step(self, action: Messages):
        observation, reward, done = next(self.answers)
        return observation, reward, done, {}

    async def close(self):
        pass

class Whole(MultiTurnScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        return None

class Game(Env):
    async def reset(self, config):
        return "go: ", {}, ""

    async def step(self, action):
        return "on: ", 0.25, False, {}

    async def close(self):
        pass

class Open(OpenEnvScheduler):
    async def on_trajectory_start(self, requests):
        from swift.rollout.multi_turn import Messages  # as ms-swift's example does

        await super().on_trajectory_start(requests)

    def format_observation(self, observation):
        return observation["messages"][0]["content"]

multi_turns["again"] = Again
multi_turns["open"] = Open
multi_turns["whole"] = Whole
envs["replayed"] = Replayed
envs["game"] = Game
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "of_ms_swift.py"
    file.write_text(PLUGIN)
    with registries_restored():
        load_plugins([file])
        yield str(file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def played(spec: Any, said: list[str], row: Mapping[str, Any], max_turns: int | None = None, **stage: Any) -> Rollouts:
    """One episode, with an engine that writes what is ``said``, turn by turn."""
    texts = iter(said)
    made = environment_named(spec, max_turns=max_turns, tokenizer=TOKENIZER)
    engine = ScriptedEngine(lambda _: next(texts))
    return Stage(made, TOKENIZER, max_turns, **stage).play(engine, [row], Sampling(2000), lambda *_: 0)


def one(column: Any) -> Any:
    assert len(column) == 1
    return column[0].tolist() if isinstance(column, Ragged) else column[0]


@pytest.mark.parametrize("case", RECORDED, ids=[f"{k} {case['scheduler']}" for k, case in enumerate(RECORDED)])
def test_ms_swifts_schedulers_play_the_episodes_that_they_play_there(case: dict[str, Any], plugin: str) -> None:
    row, spec = row_of(case), case["scheduler"]
    infos = case["rollout_infos"]
    messages, size = case["messages"], 1
    if spec == "gym_scheduler":
        size, spec = 2, {"name": spec, "gym_env": "replayed"}
        seen = [message["content"] for message in messages[2:] if message["role"] == "user"]
        done = [False] * (len(infos["step_rewards"]) - 1) + [infos["gym_done"]]
        answers = zip([*seen, "the last"], infos["step_rewards"], done, strict=True)
        row |= {"answers": list(answers), "opening": messages[1]["content"], "system": messages[0]["content"]}
    rollouts = played(spec, case["said"], row, case["max_turns"])
    assert one(rollouts.transcripts) == messages[size:]
    prompt = TOKENIZER.apply_chat_template(messages[:size], add_generation_prompt=True, return_dict=False)
    assert one(rollouts.prompt_ids) == prompt
    written, mask = one(rollouts.completion_ids), one(rollouts.is_sampled)
    (last,) = case["response_token_ids"]
    assert written[-len(last) - 1 :] == [*last, END]  # where a turn is continued, all of them
    assert mask[-len(last) - 1 :] == [*map(bool, *case["response_loss_mask"]), True]
    if size == 1:
        assert len(written) == len(last) + 1
    else:
        assert sum(mask) == sum(len(ids(text)) + 1 for text in case["said"][: infos["num_turns"]])
    assert one(rollouts.rollout_infos) == infos
    assert np.isnan(rollouts.environment_rewards) or one(rollouts.environment_rewards) == infos["total_reward"]


def test_a_scheduler_of_a_plugin_puts_messages_behind_a_turn_and_says_when_it_is_over(plugin: str) -> None:
    rollouts = played("again", ["one", "two", "three"], {"prompt": [user("say: ")]})
    assert one(rollouts.transcripts) == [
        {"role": "assistant", "content": "one"},
        user(MORE),
        {"role": "assistant", "content": "two"},
    ]
    assert one(rollouts.rollout_infos) == {"asked": 1, "num_turns": 2, "total_reward": 0.5}
    assert one(rollouts.environment_rewards) == 0.5
    assert sum(one(rollouts.is_sampled)) == len("onetwo") + 2
    assert last_turn_text(one(rollouts.transcripts)) == "two"


class Rewrites(MultiTurnScheduler):
    """What a step does is what the test says."""

    change: Any = None

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        return {"infer_request": infer_request, **(type(self).change(infer_request, response_choice) or {})}


def rewriting(change: Any) -> Any:
    class Kind(Rewrites):
        pass

    Kind.change = staticmethod(change)
    return Scheduled("rewrites", Kind).episodes(max_turns=2, tokenizer=TOKENIZER)


def test_sampled_tokens_are_learned_as_response_loss_mask_says() -> None:
    def change(request: Any, choice: Any) -> dict[str, Any]:
        request.messages.append(user(MORE))
        return {"response_token_ids": choice.token_ids, "response_loss_mask": [0, 1, 0]}

    texts = iter(["abc", "d"])
    engine = ScriptedEngine(lambda _: next(texts))
    stage = Stage(rewriting(change), TOKENIZER, 2)
    rollouts = stage.play(engine, [{"prompt": [user("x")]}], Sampling(200), lambda *_: 0)
    assert one(rollouts.completion_ids)[:4] == [*ids("abc"), END]
    assert one(rollouts.is_sampled)[:4] == [False, True, False, False]
    assert one(rollouts.is_sampled)[-2:] == [True, True]


def changes_text(request: Any, _: Any) -> None:
    request.messages[-1]["content"] += "!"


def changes_history(request: Any, _: Any) -> None:
    request.messages[0]["content"] = "else"


def writes_for_the_model(request: Any, _: Any) -> None:
    request.messages += [user("a"), {"role": "assistant", "content": "b"}]


REFUSED: list[tuple[Any, str]] = [
    (changes_text, "gave no response_token_ids"),
    (changes_history, "changed messages before the model's last turn"),
    (writes_for_the_model, "wrote a turn of the assistant"),
    (lambda *_: {"response_token_ids": ids("zz")}, "did not sample, from place 0"),
    (lambda _, choice: {"response_token_ids": choice.token_ids, "response_loss_mask": [1]}, "of 1 for 3"),
    (lambda _, choice: {"response_token_ids": choice.token_ids, "response_loss_mask": [0.5, 1, 1]}, "0 or 1 for each"),
    (lambda *_: {"rollout_logprobs": [-5.0]}, "not the engine's"),
    (lambda *_: {"rollout_infos": {"images": ["x.png"]}}, "has other images than the request"),
    (lambda *_: {"rollout_infos": {"audios": ["x.wav"]}}, "audios, which schedulers cannot pass"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_a_step_cannot_do_is_refused_by_name(change: Any, words: str) -> None:
    stage = Stage(rewriting(change), TOKENIZER, 2)
    with pytest.raises(ValueError, match=words) as error:
        stage.play(ScriptedEngine(lambda _: "abc"), [{"prompt": [user("x")]}], Sampling(200), lambda *_: 0)
    assert "Kind" in str(error.value)


class Client:
    """OpenEnv's client: ``GenericEnvClient(base_url=...).sync()``, with a game of two moves."""

    def __init__(self, base_url: str) -> None:
        self.base_url, self.moves = base_url, []

    def sync(self) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        CLOSED.append((self.base_url, self.moves))

    def _shown(self, text: str, reward: float, done: bool) -> Any:
        return SimpleNamespace(observation={"messages": [{"content": text}]}, reward=reward, done=done)

    def reset(self, **options: Any) -> Any:
        return self._shown(f"begin {options['seed']}: ", 0.0, False)

    def step(self, action: Any) -> Any:
        self.moves.append(action)
        return self._shown("next: ", 0.5, len(self.moves) == 2)


CLOSED: list[Any] = []


@pytest.mark.parametrize("max_turns", [None, 1])
def test_a_game_of_openenv_is_played_on_its_server(
    max_turns: int | None, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actions are JSON, fenced or not, or the text as a message; the connection is closed whoever ends the game."""
    CLOSED.clear()
    for name in ("openenv", "openenv.core", "openenv.core.generic_client"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["openenv.core.generic_client"], "GenericEnvClient", Client, raising=False)
    monkeypatch.setattr(openenv, "is_installed", lambda: True)
    row = {"prompt": [user("Play")], "env_config": {"base_url": "http://x", "reset_kwargs": {"seed": 3}}}
    row["env_config"] |= {"system_message": "rules"}
    said = ['```json\n{"move": 1}\n```', "up"]
    rollouts = played("open", said, row, max_turns)
    assert "begin 3: " in TOKENIZER.decode(one(rollouts.prompt_ids))
    moves = [{"move": 1}, {"message": "up"}][:max_turns]
    assert [("http://x", moves)] == CLOSED
    assert one(rollouts.environment_rewards) == 0.5 * len(moves)
    assert [message["content"] for message in one(rollouts.transcripts)] == [said[0], "next: ", said[1]][
        : 2 * len(moves) - 1
    ]
    assert "swift" not in sys.modules


def test_a_server_of_openenv_is_asked_again_before_the_episode_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    game, tries = openenv.OpenEnvGame({"base_url": "http://x"}), []
    monkeypatch.setattr(openenv.time, "sleep", lambda _: None)

    def connected() -> Any:
        tries.append(1)
        raise OSError("refused")

    monkeypatch.setattr(game, "_connected", connected)
    with pytest.raises(ConnectionError, match="the OpenEnv server at http://x gave no reset: refused"):
        game.reset()
    assert len(tries) == openenv.TRIES


def test_math_env_asks_again_until_the_answer_is_right_or_the_conversation_long(plugin: str) -> None:
    """Texts, rewards and ends are those of ms-swift's SimpleMathEnv."""
    answers = iter(["It is $5$.", "<answer>4</answer>"])
    made = environment_named({"name": "gym_scheduler", "gym_env": "math_env"}, max_turns=5, tokenizer=TOKENIZER)
    rows = [{"prompt": [user("2 + 2?")], "solution": "$4$"}]
    rollouts = Stage(made, TOKENIZER, 5).play(
        ScriptedEngine(lambda _: next(answers)), rows, Sampling(999), lambda *_: 0
    )
    said = one(rollouts.transcripts)
    wrong = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."
    assert [message["content"] for message in said] == ["It is $5$.", wrong, "<answer>4</answer>"]
    assert one(rollouts.environment_rewards) == 1.0
    shown = TOKENIZER.decode(one(rollouts.prompt_ids))
    assert "A conversation between User and Assistant.\n        The user asks a question" in shown
    assert "2 + 2?" in shown
    game = MathEnv({})
    game.solution, game.tokenizer = "$4$", TOKENIZER
    for length, ends in ((10, False), (MOST_TOKENS, True)):
        _, reward, done, infos = asyncio.run(game.step([user("?"), {"role": "assistant", "content": "$" * length}]))
        assert (reward, done, "stop_reason" in infos) == (0.0, ends, ends)


def test_a_scheduler_that_plays_the_turns_itself_and_an_unknown_game_are_refused(plugin: str) -> None:
    with pytest.raises(ValueError, match="multi_turn_scheduler 'whole': Whole has a run of its own"):
        environment_named("whole", max_turns=None)
    with pytest.raises(ValueError, match="'open' uses servers of OpenEnv, whose client is not installed"):
        environment_named("open", max_turns=None)
    with pytest.raises(
        ValueError, match=r"gym_env 'lake' is not in the registry envs \(known: game, math_env, replayed\)"
    ):
        environment_named({"name": "gym_scheduler", "gym_env": "lake"}, max_turns=None)


def test_a_turn_that_was_cut_is_answered_where_the_game_goes_on(plugin: str) -> None:
    """As in ms-swift, where the game decides; each turn has as many tokens."""
    made = environment_named("game", max_turns=3)
    stage = Stage(made, TOKENIZER, 3, limits_each_turn=True)
    engine = ScriptedEngine(lambda _: "0123456789")
    rollouts = stage.play(engine, [{"prompt": [user("?")]}], Sampling(4), lambda *_: 0)
    assert [message["content"] for message in one(rollouts.transcripts)] == ["0123", "on: ", "0123", "on: ", "0123"]
    assert one(rollouts.environment_rewards) == 0.75
    assert rollouts.truncated.all()


def test_the_engines_length_limits_episodes_whose_turns_are_limited(plugin: str) -> None:
    class Short(SteppingEngine):
        max_model_len = 100

    made = environment_named("game", max_turns=50)
    stage = Stage(made, TOKENIZER, 50, limits_each_turn=True)
    rollouts = stage.play(Short(lambda _: "0123456789"), [{"prompt": [user("?")]}], Sampling(6), lambda *_: 0)
    whole = len(one(rollouts.prompt_ids)) + len(one(rollouts.completion_ids))
    assert 100 - 50 < whole <= 100
    assert rollouts.truncated.all()
    assert one(rollouts.is_sampled)[-1]
    clipped = Stage(made, TOKENIZER, 50).play(
        Short(lambda _: "0123456789"), [{"prompt": [user("?")]}], Sampling(200, clips=True), lambda *_: 0
    )
    assert len(one(clipped.prompt_ids)) + len(one(clipped.completion_ids)) <= 100


@pytest.mark.parametrize(("kind", "file"), [(GRPOConfig, "gym_env: game"), (GKDConfig, "lmbda: 1\nteacher_model: m")])
def test_a_file_of_ms_swift_limits_each_turn_as_there(kind: type[Any], file: str, tmp_path: Path) -> None:
    text = f"model: m\ndataset: d\nmulti_turn_scheduler: gym_scheduler\nmax_turns: 2\n{file}\n"
    (tmp_path / "x.yaml").write_text(text)
    config: Any = load_config(kind, ["--config", str(tmp_path / "x.yaml")])
    assert config.completion_length_limit_scope == "per_round"
    assert config.environment == ("game" if kind is GRPOConfig else "gym_scheduler")
    (tmp_path / "x.yaml").write_text(f"{text}completion_length_limit_scope: total\n")
    config = load_config(kind, ["--config", str(tmp_path / "x.yaml")])
    assert config.completion_length_limit_scope == "total"


# Runs


class AskedAgain:
    """``again`` as an environment."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.num_turns = 0

    def step(self, text: str) -> Reply:
        self.num_turns += 1
        return Reply(MORE, done=self.num_turns == 2, goes_on=True, reward=0.25)


def turns_and_length(completions: list[Any], rollout_infos: list[Any] | None = None, **_: Any) -> list[float]:
    """Half the length of the last turn; of a scheduler's episodes the run is told how often it asked."""
    assert rollout_infos is None or all(infos["asked"] == 1 and infos["num_turns"] == 2 for infos in rollout_infos)
    return [len(last_turn_text(completion)) / 2 for completion in completions]


SHARED = {
    "max_turns": 3,
    "completion_length_limit_scope": "per_round",
    "max_completion_length": 5,
    "eval_dataset": None,
    "max_steps": 2,
}


@pytest.mark.parametrize("environment_reward", [True, False])
def test_grpo_learns_from_a_scheduler_what_it_learns_from_an_environment(
    plugin: str, model: str, tmp_path: Path, environment_reward: bool
) -> None:
    keys: dict[str, Any] = {
        **SHARED,
        "dataset": [{"prompt": [user(text)]} for text in "abcdef"],
        "reward_funcs": ["tests.trainers.test_schedulers.turns_and_length"],
        "reward_weights": None,
        "environment_reward": environment_reward,
    }
    for name, environment in (("one", "again"), ("other", AskedAgain)):
        config = grpo_config(model, tmp_path / name, **keys, environment=environment, external_plugins=[plugin])
        GRPOTrainer.check(config, None)
        GRPOTrainer(config).train()
    assert len(lines(tmp_path / "one")) == 2
    assert lines(tmp_path / "one") == lines(tmp_path / "other")
    assert final_bytes(tmp_path / "one") == final_bytes(tmp_path / "other")
    (line, _) = lines(tmp_path / "one")
    assert line["num_turns"] == 2.0
    assert line["reward_std"] > 0
    assert ("rewards/environment/mean" in line) is environment_reward


def test_rewards_in_processes_are_refused_with_a_scheduler(plugin: str, model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {**SHARED, "environment": "again", "external_plugins": [plugin], "reward_weights": None}
    config = grpo_config(model, tmp_path, **keys, reward_processes=1)
    with pytest.raises(ConfigError, match="reward_processes is not supported with a scheduler"):
        GRPOTrainer.check(config, None)


def test_gkd_learns_from_a_schedulers_turns_and_from_no_word_of_it(plugin: str, model: str, tmp_path: Path) -> None:
    teacher = save_tiny(tmp_path / "teacher", seed=1)
    keys: dict[str, Any] = {
        **SHARED,
        "dataset": [{"prompt": [user(text)]} for text in "abcdef"],
        "teacher_model": teacher,
        "lmbda": 1.0,
        "sft_alpha": 0.0,
    }
    for name, environment in (("one", "again"), ("other", AskedAgain), ("single", None)):
        alone = {"max_turns": None, "completion_length_limit_scope": "total"}
        own = keys | {"environment": environment} | (alone if environment is None else {})
        config = gkd_config(model, tmp_path / name, **own, external_plugins=[plugin])
        GKDTrainer.check(config, None)
        GKDTrainer(config).train()
    assert len(lines(tmp_path / "one")) == 2
    assert lines(tmp_path / "one") == lines(tmp_path / "other")
    assert final_bytes(tmp_path / "one") == final_bytes(tmp_path / "other") != final_bytes(tmp_path / "single")
    assert lines(tmp_path / "one")[0]["num_turns"] == 2.0


def test_gkds_targets_are_what_the_student_wrote() -> None:
    case = next(case for case in RECORDED if case["rollout_infos"]["num_turns"] == 2)
    rollouts = played("math_tip_trick", case["said"], row_of(case), 2)
    samples = completed_samples([], rollouts, None, images=None)
    assert one(samples.input_ids) == [*one(rollouts.prompt_ids), *one(rollouts.completion_ids)]
    targets = [token for token, kept in zip(one(samples.input_ids), one(samples.target_mask), strict=True) if kept]
    assert TOKENIZER.decode(targets, skip_special_tokens=True) == "".join(case["said"])


def test_gkd_leaves_out_rows_whose_prompts_are_too_long(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "dataset": [{"prompt": text} for text in ("abc", "abcdefgh", "ab", "abcdef")],
        "eval_dataset": None,
        "teacher_model": model,
        "lmbda": 1.0,
        "sft_alpha": 0.0,
        "max_prompt_length": 6,
        "drop_long_prompts": True,
    }
    trainer = GKDTrainer(gkd_config(model, tmp_path, **keys))
    assert trainer.rows["prompt"] == ["abc", "ab", "abcdef"]
    with pytest.raises(ConfigError, match="drop_long_prompts only drops prompts"):
        gkd_config(model, tmp_path, **keys | {"lmbda": 0.5})
