"""Episodes of several turns: whose tokens they hold, who waits for whom, and what tools answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import warm
from tests.golden.tiny import tiny_tokenizer
from trainers.batch import Prompts, Ragged, Rollouts
from trainers.parts.completion_metrics import rollout_metrics
from trainers.plugins import ENVIRONMENTS, TOOLS
from trainers.rollout.base import Completion, Sampling
from trainers.rollout.environments import Reply, Rewritten, resolve_environment
from trainers.rollout.episodes import Episode, Stage, Turn, reply_ids
from trainers.rollout.tool_call_forms import between
from trainers.rollout.tools import ToolEnvironment, resolve_tools

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
Row = dict[str, Any]


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


class ScriptedEngine:
    """Writes what ``answer`` makes of the text so far; notes the texts of every call."""

    version = 7

    def __init__(self, answer: Callable[[str], str], ends: bool = True) -> None:
        self.answer, self.ends = answer, ends
        self.calls: list[list[str]] = []
        self.seeds: list[int] = []

    def generate(self, prompts: Prompts, sampling: Sampling, *, seed: int) -> Rollouts:
        texts = TOKENIZER.batch_decode(list(prompts.prompt_ids))
        self.calls.append(texts)
        self.seeds += [seed] if prompts.numbers is None else prompts.numbers.tolist()
        limit = sampling.max_completion_length
        whole = [ids(self.answer(text)) + [END] * self.ends for text in texts]
        cut = Ragged.of([row[:limit] for row in whole], np.int64)
        logps = Ragged.split(-np.arange(len(cut.values), dtype=np.float32), cut.lengths)
        return Rollouts(prompts.prompt_ids, cut, logps, np.array([len(row) > limit or not self.ends for row in whole]))

    def load_weights(self, named_weights: Any) -> None:
        raise NotImplementedError


class SteppingEngine(ScriptedEngine):
    """The same a token at a time; prompts enter in between, with the seed that their tokens' log-probabilities show."""

    shares_weights = False

    def __init__(self, answer: Callable[[str], str], ends: bool = True) -> None:
        super().__init__(answer, ends)
        self.running: dict[int, tuple[Rollouts, int]] = {}
        self.events: list[str] = []
        self.number = 0

    def submit(self, prompts: Prompts, sampling: Sampling, *, seed: int) -> range:
        rollouts = self.generate(prompts, sampling, seed=seed)
        self.running[self.number] = (rollouts, 0)
        self.events.append(f"{seed} enters")
        self.number += 1
        return range(self.number - 1, self.number)

    def advance(self) -> list[Completion]:
        done = []
        for number, (rollouts, length) in list(self.running.items()):
            self.running[number] = (rollouts, length + 1)
            if length + 1 == len(rollouts.completion_ids[0]):
                del self.running[number]
                prompt, row = rollouts.prompt_ids[0], rollouts.completion_ids[0]
                logps, truncated = rollouts.rollout_logps[0], bool(rollouts.truncated[0])
                done.append(Completion(number, prompt, row, logps, np.full(len(row), self.version), truncated))
                self.events.append(f"{self.seeds[number]} leaves")
        return done

    def abort(self) -> None:
        self.running.clear()

    @property
    def num_running(self) -> int:
        return len(self.running)

    def kv_cache_usage(self) -> float:
        return len(self.running) / 8

    def all_agree(self, is_so: bool) -> bool:
        return is_so


def test_with_a_continuous_engine_no_episode_waits_for_a_long_turn_of_another() -> None:
    def answer(text: str) -> str:
        number = after_the_last_mark(text)
        return number if "3?" in text else "0" * 60 + number

    rows = [{"prompt": [user("1?")]}, {"prompt": [user("3?")]}]
    engine = SteppingEngine(answer)
    stage = Stage(Countdown, TOKENIZER)
    rollouts = stage.play(engine, rows, Sampling(200), seed_of)
    assert rollouts.kv_cache_usage is not None
    assert rollouts.kv_cache_usage.tolist() == [0.25, 0.25]
    assert engine.events == [
        *("0 enters", "10 enters", "10 leaves", "11 enters", "11 leaves", "12 enters"),
        *("12 leaves", "0 leaves"),
    ]
    alike = play(Countdown, rows, engine=ScriptedEngine(answer))
    assert rollouts.completion_ids == alike.completion_ids
    assert rollouts.is_sampled == alike.is_sampled
    assert rollouts.policy_versions == alike.policy_versions
    assert rollouts.transcripts == alike.transcripts
    assert rollouts.truncated.tolist() == alike.truncated.tolist()


def test_an_episode_is_given_out_as_soon_as_it_is_over() -> None:
    rows: list[Row] = [{"prompt": [user("3?")]}, {"prompt": "1?"}]
    engine = SteppingEngine(after_the_last_mark)
    given: list[tuple[int, Any, list[int]]] = []

    def finished(*episode: Any) -> None:
        engine.events.append(f"{episode[0]} is over")
        given.append(episode)

    rollouts = Stage(Countdown, TOKENIZER).play(
        engine, rows, Sampling(200), lambda episode, turn: 10 * episode + turn, finished=finished
    )
    assert engine.events.index("1 is over") < engine.events.index("2 leaves") < engine.events.index("0 is over")
    assert rollouts.transcripts is not None
    for number, transcript, ids in given:
        assert transcript == rollouts.transcripts[number]
        assert ids == rollouts.completion_ids[number].tolist()


def test_with_a_continuous_engine_nothing_runs_on_behind_an_episode_that_failed() -> None:
    class Fails(Countdown):
        def step(self, text: str) -> Reply:
            raise ValueError("no such number")

    engine = SteppingEngine(lambda text: "0" * 10_000 if "long" in text else "1")
    rows = [{"prompt": "long"}, {"prompt": "1?"}]
    with pytest.raises(ValueError, match="no such number"):
        Stage(Fails, TOKENIZER).play(engine, rows, Sampling(20_000), lambda episode, turn: 0)
    assert not engine.running
    assert "0 leaves" not in engine.events[3:]

    def refuses(*_: Any, **__: Any) -> range:
        raise RuntimeError("the engine sleeps")

    engine.submit = refuses  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        Stage(Countdown, TOKENIZER).play(engine, rows, Sampling(20), lambda episode, turn: 0)


class Countdown:
    """Answers a number with the one below it, until that is 0."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.last = row.get("last", "bye")

    def step(self, text: str) -> Reply:
        number = int(text) - 1
        if number == 0:
            return Reply(done=True, reward=1.0)
        return Reply(f"{number}?", reward=0.25)


def after_the_last_mark(text: str) -> str:
    """The number that was asked for last."""
    said = text.replace("<|im_end|>", " ").replace("<|im_start|>", " ").replace("\n", " ").replace("?", " ")
    return next(word for word in reversed(said.split()) if word.isdigit())


def play(
    environment: Any, rows: Sequence[Row], *, engine: Any = None, max_completion_length: int = 200, **keys: Any
) -> Rollouts:
    engine = engine or ScriptedEngine(after_the_last_mark)
    return Stage(environment, TOKENIZER, **keys).play(engine, rows, Sampling(max_completion_length), seed_of)


def seed_of(episode: int, turn: int) -> int:
    return 10 * episode + turn


def test_a_completion_holds_the_turns_and_the_answers_between_them() -> None:
    engine = ScriptedEngine(after_the_last_mark)
    rollouts = play(Countdown, [{"prompt": [user("3?")]}, {"prompt": [user("1?")]}], engine=engine)
    between = [f"\n<|im_start|>user\n{number}?<|im_end|>\n<|im_start|>assistant\n" for number in (2, 1)]
    parts = ["3<|im_end|>", between[0], "2<|im_end|>", between[1], "1<|im_end|>"]
    assert rollouts.completion_ids[0].tolist() == [token for part in parts for token in ids(part)]
    assert rollouts.is_sampled is not None
    assert rollouts.is_sampled[0].tolist() == [k % 2 == 0 for k, part in enumerate(parts) for _ in ids(part)]
    assert TOKENIZER.decode(rollouts.prompt_ids[0]) == "<|im_start|>user\n3?<|im_end|>\n<|im_start|>assistant\n"
    assert rollouts.completion_ids[1].tolist() == ids("1<|im_end|>")
    assert [len(call) for call in engine.calls] == [2, 1, 1]
    assert engine.calls[2] == [TOKENIZER.decode([*rollouts.prompt_ids[0], *rollouts.completion_ids[0][:-2]])]
    assert engine.seeds == [0, 10, 1, 2]  # of episodes and turns, whatever is completed beside them
    assert rollouts.num_turns is not None
    assert rollouts.environment_rewards is not None
    assert rollouts.num_turns.tolist() == [3, 1]
    assert rollouts.environment_rewards.tolist() == [1.5, 1.0]
    assert rollouts.truncated.tolist() == [False, False]
    roles = ["assistant", "user", "assistant", "user", "assistant"]
    contents = ["3", "2?", "2", "1?", "1"]
    assert rollouts.transcripts is not None
    assert rollouts.transcripts[0] == [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]


def test_only_what_the_model_wrote_is_learned() -> None:
    rollouts = play(Countdown, [{"prompt": "3?"}, {"prompt": "1?"}])
    assert rollouts.transcripts == ["32?21?1", "1"]
    samples = rollouts.samples()
    targets = samples.input_ids.values[samples.target_mask.values]
    assert TOKENIZER.decode(targets) == "3<|im_end|>2<|im_end|>1<|im_end|>1<|im_end|>"
    assert samples.rollout_logps is not None
    assert samples.rollout_logps.lengths.tolist() == [6, 2]
    assert samples.rollout_logps[0].tolist() == [0, -1, 0, -1, 0, -1]  # each as its turn's engine call gave them
    metrics = rollout_metrics(rollouts).values()
    assert metrics["completions/mean_length"] == 4.0
    assert metrics["num_turns"] == 2.0


def test_an_episode_ends_where_its_room_or_its_turns_end() -> None:
    rows = [{"prompt": "9?"}]
    by_turns = play(Countdown, rows, turn_limit=2)
    assert by_turns.transcripts == ["98?8"]
    assert by_turns.truncated.tolist() == [False]
    without_room = play(Countdown, rows, max_completion_length=4)  # "9", end and "8?" fill it: no turn would follow
    assert without_room.transcripts == ["9"]
    assert without_room.truncated.tolist() == [True]
    cut = play(Countdown, rows, engine=ScriptedEngine(lambda text: "123"), max_completion_length=2)
    assert cut.transcripts == ["12"]
    assert cut.truncated.tolist() == [True]


def test_what_reset_says_follows_the_prompt() -> None:
    class Opening(Countdown):
        async def reset(self, row: Mapping[str, Any]) -> Any:  # type: ignore[override]
            return [user(row["opening"])] if row["opening"] else None

    rows = [{"prompt": [user("count")], "opening": "1?"}, {"prompt": [user("1?")], "opening": ""}]
    rollouts = play(Opening, rows)
    shown = TOKENIZER.decode(rollouts.prompt_ids[0])
    assert shown == "<|im_start|>user\ncount<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"


def test_a_slow_environment_holds_up_no_other() -> None:
    """The slow one waits for what the last of the others does."""
    others_are_done = asyncio.Event()

    class Waiting(Countdown):
        num_open = 0

        def reset(self, row: Mapping[str, Any]) -> None:
            self.is_slow = row["prompt"] == "2?"
            Waiting.num_open += not self.is_slow

        async def step(self, text: str) -> Reply:  # type: ignore[override]
            if self.is_slow:
                await asyncio.wait_for(others_are_done.wait(), timeout=60)
            reply = super().step(text)
            if not self.is_slow and reply.done:
                Waiting.num_open -= 1
                if not Waiting.num_open:
                    others_are_done.set()
            return reply

    engine = ScriptedEngine(after_the_last_mark)
    rollouts = play(Waiting, [{"prompt": f"{number}?"} for number in (2, 4, 3)], engine=engine)
    assert rollouts.transcripts == ["21?1", "43?32?21?1", "32?21?1"]  # in the order of the rows
    assert [len(call) for call in engine.calls] == [3, 2, 2, 1, 1]
    assert engine.calls[-1] == ["2?2<|im_end|>1?"]


def test_an_error_of_an_environment_rises() -> None:
    class Broken(Countdown):
        def step(self, text: str) -> Reply:
            raise KeyError("no such room")

    with pytest.raises(KeyError, match="no such room"):
        play(Broken, [{"prompt": "1?"}, {"prompt": "2?"}])
    with pytest.raises(TypeError, match="step must return a Reply, got str"):
        play(lambda: type("Wrong", (Countdown,), {"step": lambda self, text: "2"})(), [{"prompt": "1?"}])


@pytest.mark.parametrize("reward", [float("nan"), float("-inf")])
def test_a_reward_that_is_no_number_is_refused_by_environment_and_row(reward: float) -> None:
    class Dividing(Countdown):
        def step(self, text: str) -> Reply:
            return Reply(reward=reward)

    with pytest.raises(ValueError, match=rf"Dividing.step gave the reward {reward} in turn 1 of row 0: .*Give None"):
        play(Dividing, [{"prompt": "1?"}])


@pytest.mark.parametrize("where", ["__init__", "reset", "step"])
def test_an_environment_cannot_end_the_run_as_if_it_had_ended_well(where: str) -> None:
    def leave(self: Any, *_: Any) -> None:
        sys.exit(0)

    async def leave_later(self: Any, *_: Any) -> None:
        leave(self)

    leaving = leave_later if where == "step" else leave
    leaves = type("Leaves", (), {"reset": lambda self, row: None, "step": None, where: leaving})
    with pytest.raises(RuntimeError, match=r"called sys.exit\(0\)"):
        play(leaves, [{"prompt": "1?"}])


def test_no_rows_are_no_episodes() -> None:
    assert len(play(Countdown, [])) == 0


def test_replies_are_what_the_template_puts_behind_a_turn() -> None:
    """The whole conversation, tokenized at once, has them there."""
    row = {"prompt": [user("a question")]}
    messages = [{"role": "tool", "content": "42"}, user("so?")]
    whole = TOKENIZER.apply_chat_template(
        [user("a question"), {"role": "assistant", "content": "hm"}, *messages],
        add_generation_prompt=True,
        return_dict=False,
    )
    found = reply_ids(row, messages, ids("hm<|im_end|>"), TOKENIZER, {})
    assert whole[-len(found) :] == found
    assert whole[: -len(found)][-3:] == ids("hm<|im_end|>")
    unfinished = reply_ids(row, messages, ids("hm"), TOKENIZER, {})
    assert unfinished == [END, *found]


# Tools


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


async def slow_echo(text: str) -> str:
    """Says it again.

    Args:
        text: What to say.
    """
    await asyncio.sleep(0)
    return text


def leave() -> None:
    """Ends the process."""
    sys.exit(3)


def called(*calls: str) -> Reply:
    text = "hm" + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    return asyncio.run(ToolEnvironment(resolve_tools([add, slow_echo, leave])).step(text))


def test_tools_answer_the_calls_of_a_turn() -> None:
    reply = called(
        '{"name": "add", "arguments": {"a": 2, "b": 3}}', '{"name": "slow_echo", "arguments": {"text": "x"}}'
    )
    assert [(message["role"], message["content"]) for message in reply.messages] == [("tool", "5"), ("tool", "x")]  # type: ignore[index]
    assert (reply.num_tool_calls, reply.num_tool_failures, reply.done) == (2, 0, False)
    assert called().done


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ('{"name": "subtract"}', "there is no tool 'subtract'; there are add, slow_echo, leave"),
        ('{"name": "add", "arguments": {"a": 1}}', "missing 1 required positional argument: 'b'"),
        ("no json", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('{"name": "leave", "arguments": {}}', "SystemExit: 3"),
    ],
)
def test_what_goes_wrong_in_a_tool_is_told_to_the_model(call: str, told: str) -> None:
    reply = called(call)
    assert told in reply.messages[0]["content"]  # type: ignore[index]
    assert (reply.num_tool_calls, reply.num_tool_failures, reply.done) == (1, 1, False)


class Counted(str):
    """A text that counts the characters that ``find`` looks at."""

    looked_at = 0

    def find(self, sought: str, start: int = 0) -> int:  # type: ignore[override]
        found = super().find(sought, start)
        Counted.looked_at += (len(self) if found < 0 else found + len(sought)) - start
        return found


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        ("<tool_call>" * 3000, 0),
        ("<tool_call>" * 3000 + "</tool_call>" * 3000, 1),
        ("<tool_call>{}</tool_call>" * 3000, 3000),
        ("</tool_call>" * 3000 + "<tool_call>", 0),
    ],
)
def test_calls_are_found_in_one_pass_however_often_a_model_begins_one(text: str, num_calls: int) -> None:
    Counted.looked_at = 0
    assert len(list(between(Counted(text), "<tool_call>", "</tool_call>"))) == num_calls
    assert Counted.looked_at <= 2 * len(text)


def test_environments_and_tools_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS.entries, "countdown", type("Entry", (), {"value": Countdown}))
    monkeypatch.setitem(TOOLS.entries, "plus", type("Entry", (), {"value": add}))
    assert isinstance(resolve_environment("countdown")(), Countdown)
    assert isinstance(resolve_environment({"name": f"{__name__}:Countdown"})(), Countdown)
    assert resolve_tools(["plus", f"{__name__}.slow_echo"]).keys() == {"add", "slow_echo"}
    with pytest.raises(ValueError, match=r"unknown environment 'countdwn'.*Did you mean 'countdown'"):
        resolve_environment("countdwn")
    with pytest.raises(ValueError, match=r"cannot be built with \{'speed': 2\}"):
        resolve_environment({"name": "countdown", "speed": 2})
    with pytest.raises(ValueError, match="has no method step"):
        resolve_environment(type("Half", (), {"reset": lambda self, row: None}))
    with pytest.raises(ValueError, match="tool 'undocumented' cannot be described to a model"):
        resolve_tools([lambda_named("undocumented")])


def lambda_named(name: str) -> Callable[..., Any]:
    def function(a: int) -> int:
        return a

    function.__name__ = name
    return function


ROOT = Path(__file__).resolve().parents[2]
HANGING = """
import faulthandler
import time
from tests.trainers.test_episodes import *

def block():
    while True:
        time.sleep(0.05)  # not 600: a signal that comes just before a sleep is acted on after it

class Hangs:
    def reset(self, row):
        pass

    {step}

faulthandler.dump_traceback_later(45, exit=True)  # where it is, if it does not end
engine = {engine}(lambda text: "1")
row = {{"prompt": [user("1?")]}}
Stage(Hangs, TOKENIZER).play(engine, [row, row], Sampling(200), seed_of)
"""


@pytest.mark.parametrize("engine", ["ScriptedEngine", "SteppingEngine"])
@pytest.mark.parametrize(
    "step",
    [
        'def step(self, text):\n        print("step", flush=True)\n        block()',
        'async def step(self, text):\n        print("step", flush=True)\n        block()',
        'async def step(self, text):\n        print("step", flush=True)\n        await asyncio.sleep(600)',
    ],
    ids=["plain", "async that blocks", "async"],
)
def test_the_first_ctrl_c_ends_a_step_that_hangs(engine: str, step: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HANGING.format(step=step, engine=engine))
    program, env = [warm.python(), str(tmp_path / "program.py")], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "step\n"
        run.send_signal(signal.SIGINT)
        try:
            _, told = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == -signal.SIGINT, told
    assert told.rstrip().endswith("KeyboardInterrupt")


def test_what_was_put_behind_a_rewritten_turn_for_a_further_one_is_taken_back() -> None:
    episode, turn = Episode(prompt_ids=[1]), Turn([5, 6], [-0.5, -0.25], [3, 3], False)
    episode.add_turn(turn, "56")
    episode.rewrite(turn, Rewritten([5, 7, 8], 1, [True, False, False], "578", continues=True))
    episode.end_without_room()
    assert (episode.ids, episode.is_sampled, episode.logps, episode.versions) == ([5], [True], [-0.5], [3])
    assert episode.truncated
