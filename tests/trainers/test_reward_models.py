"""A reward model scores what TRL's trainers score with it, texts with their end, whatever the size of its batches."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from rayhelper import ConfigError
from tests.e2e.runs import grpo_config, ppo_config
from tests.golden.tiny import save_tiny, tiny_model, tiny_tokenizer
from trainers.grpo.trainer import GRPOTrainer
from trainers.plugins import MODELS
from trainers.ppo.trainer import PPOTrainer
from trainers.rewards.functions import resolve_rewards, score
from trainers.rewards.models import RewardModel, check_reward_model, model_name, names_reward_model
from trainers.sampling.config import SamplingConfig
from trainers.sampling.trainer import SamplingTrainer

TEXTS = ["a", "the sea", "a bee sees two deer near the sea", "", "no one ever was there before, so they all rest"]
PROMPTS = ["two words: ", "one: ", "a tale: ", "nothing: ", "a longer tale, please: "]
CHATS = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}] for prompt in PROMPTS]
ANSWERS = [[{"role": "assistant", "content": text}] for text in TEXTS]


def save_reward_model(folder: Path, seed: int = 3) -> str:
    """A two-layer sequence classifier of one label, random but for a head that tells texts apart."""
    fields = tiny_model().config.to_dict() | {"num_labels": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForSequenceClassification(Qwen3Config(**fields)).float().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_reward_model(tmp_path_factory.mktemp("models") / "judge")


def trl_scores(folder: str, prompts: list[Any], completions: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What TRL's GRPOTrainer gives: its method, called on the few things it reads."""
    import trl  # here, as tests of whole runs, and the workers that they start, import this file
    from trl.trainer import grpo_trainer

    monkeypatch.setattr(grpo_trainer, "profiling_context", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(trl.GRPOTrainer.__mro__[1], "_prepare_inputs", lambda self, inputs: inputs, raising=False)
    module = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    module.config.pad_token_id = tiny_tokenizer().pad_token_id
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    settings = {
        "accelerator": SimpleNamespace(device=torch.device("cpu"), gather=lambda value: value),
        "reward_funcs": [module],
        "reward_processing_classes": [tiny_tokenizer()],
        "reward_func_names": ["judge"],
        "chat_template_kwargs": {},
        "environments": None,
        "state": None,
        "_log_completion_extra": None,
        "_log_metric": None,
    }
    vars(trainer).update(settings)
    inputs = [{"prompt": prompt} for prompt in prompts]
    rewards = trl.GRPOTrainer._calculate_rewards.__wrapped__(
        trainer, inputs, prompts, completions, [[] for _ in prompts]
    )
    return [float(value) for value in rewards[:, 0]]


@pytest.mark.parametrize(("prompts", "completions"), [(PROMPTS, TEXTS), (CHATS, ANSWERS)], ids=["texts", "chats"])
def test_it_scores_what_trl_scores(
    prompts: list[Any], completions: list[Any], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts with the end of sequence, which TRL's RewardTrainer puts behind them and its GRPOTrainer does not."""
    eos = tiny_tokenizer().eos_token
    ended = [text + eos if isinstance(text, str) else text for text in completions]
    expected = trl_scores(folder, prompts, ended, monkeypatch)
    assert len({round(value, 3) for value in expected}) == 5
    assert RewardModel(folder).score(prompts, completions) == pytest.approx(expected, abs=1e-6)
    assert RewardModel(folder).score(prompts, ended) == pytest.approx(expected, abs=1e-6)  # an end is put there once


@pytest.mark.parametrize(("prompts", "completions"), [(PROMPTS, TEXTS), (CHATS, ANSWERS)], ids=["texts", "chats"])
def test_the_size_of_batches_does_not_matter(prompts: list[Any], completions: list[Any], folder: str) -> None:
    alone = RewardModel(folder, batch_size=1).score(prompts, completions)
    for size in (2, 64):
        assert RewardModel(folder, batch_size=size).score(prompts, completions) == pytest.approx(alone, abs=1e-5)
    assert RewardModel(folder).score([], []) == []


def test_trainers_hand_their_template_variables_to_it(tmp_path: Path) -> None:
    folder, tokenizer = save_reward_model(tmp_path / "judge"), tiny_tokenizer()
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = "{%- if loud -%}loud{%- endif -%}" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    loud: dict[str, Any] = {"chat_template_kwargs": {"loud": True}}
    expected = RewardModel(folder, **loud).score(CHATS, ANSWERS)
    assert RewardModel(folder).score(CHATS, ANSWERS) != pytest.approx(expected, abs=1e-3)
    policy = save_tiny(tmp_path / "policy")
    grpo = GRPOTrainer(grpo_config(policy, tmp_path / "grpo", reward_model=[folder], reward_weights=None, **loud))
    grpo.rewarder.build([folder])
    assert grpo.rewarder.judge(CHATS, ANSWERS)[:, 0] == pytest.approx(expected, abs=1e-5)
    ppo = PPOTrainer(ppo_config(policy, tmp_path / "ppo", reward_model=folder, reward_weights=None, **loud))
    ppo.rewarder.build([folder])
    assert ppo.rewarder.judge(CHATS, ANSWERS)[:, 0] == pytest.approx(expected, abs=1e-5)


def test_it_is_a_reward_function_under_the_name_of_its_folder(folder: str) -> None:
    model = RewardModel(folder)
    (pair,), _ = resolve_rewards([model])
    assert pair[1] == "judge"
    rewards = score([pair], PROMPTS, TEXTS, [[1]] * 5, {"answer": ["x"] * 5})
    assert rewards[:, 0].tolist() == pytest.approx(model.score(PROMPTS, TEXTS), abs=1e-6)


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a reward model: its checkpoint lacks \['score.weight'\]"):
        RewardModel(save_tiny(tmp_path))


def test_a_classifier_of_several_labels_is_no_reward_model(tmp_path: Path) -> None:
    fields = tiny_model().config.to_dict() | {"num_labels": 3}
    Qwen3ForSequenceClassification(Qwen3Config(**fields)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not a reward model"):
        RewardModel(tmp_path)


def test_a_model_is_told_from_a_function_by_its_name(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS.entries, "built", SimpleNamespace(value=None))
    models = (folder, "built", "hub/name", "./rm")
    functions = ("exact_answer", "module:function", "package.module.function", {"name": "exact_answer"}, len)
    assert [names_reward_model(spec) for spec in (*models, *functions)] == [True] * 4 + [False] * 5


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("runs/judge/final", "judge"),
        ("runs/critic/checkpoint-12/", "critic"),
        ("runs/critic/checkpoint-12/final", "critic"),
        ("runs/finals", "finals"),
        ("org/judge", "judge"),
    ],
)
def test_a_trained_model_goes_by_the_folder_of_its_run(model: str, name: str) -> None:
    assert model_name(model) == name


def test_a_model_in_the_working_folder_goes_by_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judge").mkdir()
    monkeypatch.chdir(tmp_path / "judge")
    assert model_name("final") == "judge"


def test_a_score_that_is_no_number_is_refused_by_model_and_row(folder: str) -> None:
    model = RewardModel(folder)
    with torch.no_grad():
        model.module.score.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"reward model 'judge' gave nan for row 0, 'a': rewards must be finite"):
        model.score(PROMPTS, TEXTS)


PRM = {  # of Qwen2.5-Math-PRM-7B
    "architectures": ["Qwen2ForProcessRewardModel"],
    "auto_map": {
        "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
        "AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel",
    },
}
OWN = {"architectures": ["MyRewards"], "auto_map": {"AutoModelForSequenceClassification": "mine.MyRewards"}}


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (PRM, "is a Qwen2ForProcessRewardModel, but reward models are loaded as AutoModelForSequenceClassification"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is a Qwen3ForCausalLM, but .* file of external_plugins"),
        (OWN, r"has its own code \(mine.MyRewards\). Set trust_remote_code: true"),
    ],
)
def test_a_model_that_cannot_give_rewards_is_told_before_anything_starts(
    held: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(held))
    config = SamplingConfig(model="m", dataset="d", prm_model=str(folder), output_dir=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=f"^prm_model: .*{why}") as error:
        SamplingTrainer.check(config, None)
    assert "\n" not in str(error.value)
    policy = save_tiny(tmp_path / "policy")
    grpo = grpo_config(policy, tmp_path / "grpo", reward_model=[str(folder)], reward_weights=None)
    ppo = ppo_config(policy, tmp_path / "ppo", reward_model=str(folder), reward_weights=None)
    for trainer, one in ((GRPOTrainer, grpo), (PPOTrainer, ppo)):
        with pytest.raises(ConfigError, match=f"^reward_model: .*{why}"):
            trainer.check(one, None)


def test_models_of_which_a_folder_does_not_say_what_they_are_are_left_to_be_loaded(folder: str, tmp_path: Path) -> None:
    check_reward_model(folder, trust_remote_code=False)
    check_reward_model("org/on-the-hub", trust_remote_code=False)
    (tmp_path / "config.json").write_text(json.dumps(OWN))
    check_reward_model(tmp_path, trust_remote_code=True)
    (tmp_path / "config.json").write_text("{}")
    check_reward_model(tmp_path, trust_remote_code=False)
