"""DPO and reward models: the same numbers however cut, placed and resumed; and they learn what is preferred."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rayhelper import ConfigError, DeviceGroups, RayHelper
from tests.conftest import RaySession
from tests.e2e.runs import (
    dpo_config,
    final_bytes,
    interrupted_after,
    lines,
    pair_rows,
    reward_config,
    separate,
    together,
)
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.cli import load_config, placement, run
from trainers.dpo.config import DPOConfig
from trainers.dpo.trainer import DPOTrainer, counts_of, with_chosen_accuracy
from trainers.parts.frozen import Reference
from trainers.plugins import load_plugins
from trainers.reward.config import RewardConfig
from trainers.reward.trainer import RewardTrainer
from trainers.rewards.models import RewardModel

Step = tuple[dict[str, float], dict[str, torch.Tensor], dict[str, float]]  # metrics, weights after it, evaluation
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # pairs, keys; four workers get 2, 2, 2, 1 of seven and 1, 1, 1, 0
    "dpo": (7, {}),
    "dpo of three pairs": (3, {"loss_type": ["ipo"], "ld_alpha": 0.5}),
    "dpo with sft": (7, {"loss_type": ["sigmoid", "apo_zero"], "loss_weights": [0.5, 2.0], "rpo_alpha": 0.7}),
    "dpo weighted": (7, {"use_weighting": True}),
    "reward": (7, {"center_rewards_coefficient": 0.1}),
    "reward of three pairs": (3, {}),
}
CUTS: dict[str, dict[str, Any]] = {
    "one pair at a time": {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1},
    "two pairs at a time": {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2},
    "padding-free": {"per_device_train_batch_size": 3, "padding_free": True},
    "by tokens": {"token_budget": 90},
    "by packs": {"packing": True, "per_device_train_batch_size": 1},
    "by tokens, padding-free": {"token_budget": 90, "padding_free": True},
    "computed twice": {"gradient_checkpointing": True},
}
CUTS_OF: dict[str, list[str]] = {  # each trainer has every cut once, and each loss those that it might feel
    "dpo": ["one pair at a time", "padding-free", "by tokens", "by packs", "computed twice"],
    "dpo of three pairs": ["two pairs at a time"],
    "dpo with sft": ["by tokens, padding-free"],
    "dpo weighted": ["by packs"],
    "reward": ["one pair at a time", "by packs"],
    "reward of three pairs": ["by tokens, padding-free"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("reference"), seed=1)


@pytest.fixture(scope="module")
def alone(model: str, reference: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Step]:
    """One step of each case in this process, all pairs at once."""
    return {case: one_step(case, model, reference, tmp_path_factory.mktemp("alone")) for case in CASES}


@pytest.fixture(scope="module")
def off(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole runs of both trainers in this process."""
    folder = tmp_path_factory.mktemp("off")
    DPOTrainer(dpo_config(model, folder / "dpo", **FOLLOWED)).train()
    RewardTrainer(reward_config(model, folder / "reward", eval_steps=2)).train()
    return folder


FOLLOWED: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 2, "eval_steps": 3, "save_steps": 2}


def one_step(case: str, model: str, reference: str, folder: Path, **cut: Any) -> Step:
    """One optimizer step from the weights of ``model``, over the workers there are, and an evaluation after it."""
    num_pairs, keys = CASES[case]
    # Adam divides gradients by their own size: an epsilon above their rounding errors keeps those from growing
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "warmup_steps": 0,
        "adam_epsilon": 1e-4,
        **keys,
        **cut,
    }
    if case.startswith("reward"):
        scorer = RewardTrainer(reward_config(model, folder, **settings))
        scorer.build(10)
        metrics = scorer.policy.step(scorer.pairs[np.arange(num_pairs)], num_pairs)
        scorer.policy.export(folder)
        evaluation = scorer.evaluate()
    else:
        trainer = DPOTrainer(dpo_config(model, folder, ref_model=reference, **settings))
        trainer.prepare_reference()
        trainer.policy.build(model, 10)
        pairs = trainer.with_reference(trainer.pairs[np.arange(num_pairs)], 2)
        metrics = with_chosen_accuracy(trainer.policy.step(pairs, counts_of(pairs)))
        trainer.policy.export(folder)
        evaluation = trainer.evaluate()
    return metrics.values(), load_file(folder / "model.safetensors"), evaluation


def assert_same_step(found: Step, expected: Step, where: str) -> None:
    """Metrics, weights and evaluation equal to 1e-6, those of weights that were trained."""
    assert found[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-6), where
    assert found[2] == pytest.approx(expected[2], rel=1e-5, abs=1e-5), where
    furthest = {name: float((found[1][name] - weight).abs().max()) for name, weight in expected[1].items()}
    assert max(furthest.values()) < 1e-6, f"{where}: {furthest}"


@pytest.mark.parametrize("case", CASES)
def test_no_way_of_cutting_a_step_changes_it(
    case: str, alone: dict[str, Step], model: str, reference: str, tmp_path: Path
) -> None:
    untrained = load_file(Path(model) / "model.safetensors")
    moved = [(weight - untrained[name]).abs().max() for name, weight in alone[case][1].items() if name in untrained]
    assert max(moved) > 1e-3
    for name in CUTS_OF[case]:
        assert_same_step(one_step(case, model, reference, tmp_path, **CUTS[name]), alone[case], name)


def test_a_step_over_four_workers_is_the_step_of_one(
    alone: dict[str, Step], model: str, reference: str, tmp_path: Path, ray_session: RaySession
) -> None:
    with ray_session(together(4)):
        for case in ("dpo of three pairs", "reward of three pairs"):
            found = one_step(case, model, reference, tmp_path, per_device_train_batch_size=2)
            assert_same_step(found, alone[case], f"{case} on four workers")


def test_two_workers_and_a_reference_that_follows_them_are_as_one(
    model: str, tmp_path: Path, ray_session: RaySession
) -> None:
    keys = FOLLOWED | {"adam_epsilon": 1e-4, "max_steps": 5}
    DPOTrainer(dpo_config(model, tmp_path / "off", **keys)).train()
    with ray_session(together(2)):
        DPOTrainer(dpo_config(model, tmp_path / "ray", **keys)).train()
    for line, expected in zip(lines(tmp_path / "ray"), lines(tmp_path / "off"), strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_ray_equals_ray_off_bit_for_bit_with_the_reference_on_its_own_group(
    off: Path, model: str, tmp_path: Path, ray_session: RaySession
) -> None:
    """The reference follows the policy by weights that go from one worker to the other."""
    with ray_session(separate()):
        assert_same_runs(off, model, tmp_path)


def test_a_worker_that_hosts_policy_and_reference_gives_the_same(off: Path, model: str, tmp_path: Path) -> None:
    groups = {"cpus": {"device": "CPU", "ranks": 1, "workers": ["default", "reference", "train"]}}
    with RayHelper.session(groups, runtime="inprocess"):
        assert_same_runs(off, model, tmp_path)


def assert_same_runs(off: Path, model: str, folder: Path) -> None:
    DPOTrainer(dpo_config(model, folder / "dpo", **FOLLOWED)).train()
    RewardTrainer(reward_config(model, folder / "reward", eval_steps=2)).train()
    for name in ("dpo", "reward"):
        assert lines(folder / name) == lines(off / name)
        assert final_bytes(folder / name) == final_bytes(off / name)


# The reference


def test_references_computed_beforehand_change_nothing(model: str, reference: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"ref_model": reference, "eval_steps": 2, "adam_epsilon": 1e-4}
    DPOTrainer(dpo_config(model, tmp_path / "each", **keys)).train()
    trainer = DPOTrainer(dpo_config(model, tmp_path / "before", **keys, precompute_ref_log_probs=True))
    trainer.train()
    assert trainer.reference.backend is None, "the reference model was not freed"
    for found, expected in zip(lines(tmp_path / "before"), lines(tmp_path / "each"), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_without_its_adapter_the_policy_is_the_reference(model: str, tmp_path: Path) -> None:
    own = DPOTrainer(dpo_config(model, tmp_path / "own", tuner_type="lora"))
    own.train()
    assert own.reference.backend is None
    DPOTrainer(dpo_config(model, tmp_path / "other", tuner_type="lora", ref_model=model)).train()
    assert lines(tmp_path / "own") == lines(tmp_path / "other")
    assert final_bytes(tmp_path / "own") == final_bytes(tmp_path / "other")
    assert lines(tmp_path / "own")[-1]["eval_loss"] != pytest.approx(np.log(2), rel=0.01)


def test_a_policy_with_its_adapter_merged_scores_as_before(model: str, tmp_path: Path) -> None:
    trainer = DPOTrainer(dpo_config(model, tmp_path / "adapted", tuner_type="lora"))
    before = trainer.train()
    keys = {"ref_model": model, "learning_rate": 0.0, "max_steps": 1}
    merged = DPOTrainer(dpo_config(str(tmp_path / "adapted" / "final"), tmp_path / "merged", **keys)).train()
    for name in ("eval_loss", "eval_rewards/margins", "eval_logps/chosen", "eval_entropy"):
        assert merged[name] == pytest.approx(before[name], rel=1e-4, abs=1e-5), name


def test_without_a_reference_none_is_loaded(model: str, tmp_path: Path) -> None:
    trainer = DPOTrainer(dpo_config(model, tmp_path, reference_free=True))
    last = trainer.train()
    assert trainer.reference.backend is None
    assert last["rewards/chosen"] == pytest.approx(0.1 * last["logps/chosen"])


# Resuming

RESUMED: dict[str, dict[str, Any]] = {  # references that were computed beforehand: test_judged.py
    "the reference follows": FOLLOWED,
    "an adapter": {"tuner_type": "lora", "lora_dropout": 0.1, "disable_dropout": False, "save_steps": 4},
}


@pytest.fixture
def references_built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models of which a reference was built."""
    built: list[str] = []
    build = Reference.build
    monkeypatch.setattr(Reference, "build", lambda self, model: (built.append(model), build(self, model)))
    return built


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_one_that_never_stopped(
    name: str, model: str, tmp_path: Path, references_built: list[str]
) -> None:
    keys, whole, parted = RESUMED[name], tmp_path / "whole", tmp_path / "parted"
    numbers = DPOTrainer(dpo_config(model, whole, **keys)).train()
    with interrupted_after(5), pytest.raises(KeyboardInterrupt):
        DPOTrainer(dpo_config(model, parted, **keys)).train()
    references_built.clear()
    resumed = DPOTrainer(dpo_config(model, parted, **keys, resume_from_checkpoint="auto")).train()
    assert bool(references_built) == (name == "the reference follows"), "a reference was loaded again"
    assert lines(parted) == lines(whole)
    assert final_bytes(parted) == final_bytes(whole)
    assert resumed.keys() == numbers.keys()


def test_a_resumed_reward_model_equals_one_that_never_stopped(model: str, tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    RewardTrainer(reward_config(model, whole, save_steps=2)).train()
    with interrupted_after(5), pytest.raises(KeyboardInterrupt):
        RewardTrainer(reward_config(model, parted, save_steps=2)).train()
    RewardTrainer(reward_config(model, parted, save_steps=2, resume_from_checkpoint="auto")).train()
    assert lines(parted) == lines(whole)
    assert final_bytes(parted) == final_bytes(whole)


def test_references_of_other_pairs_are_not_taken_for_these(
    model: str, reference: str, tmp_path: Path, references_built: list[str]
) -> None:
    keys: dict[str, Any] = {"precompute_ref_log_probs": True, "save_steps": 2, "max_steps": 3}
    DPOTrainer(dpo_config(model, tmp_path, **keys)).train()
    other = DPOTrainer(dpo_config(model, tmp_path, **keys, ref_model=reference, resume_from_checkpoint="auto"))
    other.prepare_reference()
    assert references_built == [model, reference]


# Learning

LETTERS = "abcdefghijkl"


def successors() -> list[dict[str, str]]:
    """After a letter comes the next one of the alphabet, and not the one before."""
    return [
        {"prompt": f"{'-' * (k % 3)}{LETTERS[k]}", "chosen": LETTERS[k + 1], "rejected": LETTERS[k - 1]}
        for k in range(1, len(LETTERS) - 1)
    ]


def preferences(folder: Path) -> np.ndarray:
    """log p(chosen) - log p(rejected) of the letter after each prompt, by transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer()
    differences = []
    for row in successors():
        with torch.no_grad():
            logits_V = model(**tokenizer(row["prompt"], return_tensors="pt")).logits[0, -1]
        chosen, rejected = (tokenizer(row[name])["input_ids"][0] for name in ("chosen", "rejected"))
        differences.append(float(logits_V[chosen] - logits_V[rejected]))
    return np.array(differences)


TAUGHT: dict[str, Any] = {
    "dataset": successors(),
    "eval_dataset": None,
    "global_batch_size": 10,
    "per_device_train_batch_size": 10,
    "max_steps": 25,
    "learning_rate": 1e-3,
}


def test_dpo_learns_what_comes_next(model: str, tmp_path: Path) -> None:
    DPOTrainer(dpo_config(model, tmp_path / "out", **TAUGHT)).train()
    before, after = preferences(Path(model)), preferences(tmp_path / "out" / "final")
    assert after.min() > 3
    assert after.mean() > before.mean() + 4.5


def test_a_reward_model_learns_what_comes_next_and_loads_with_transformers(model: str, tmp_path: Path) -> None:
    keys = TAUGHT | {"eval_dataset": successors(), "seed": 0}
    last = RewardTrainer(reward_config(model, tmp_path / "out", **keys)).train()
    tokenizer = tiny_tokenizer()
    scorer, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out" / "final", output_loading_info=True
    )
    assert not report["missing_keys"]
    rows = successors()
    texts = [row["prompt"] + row[name] + tokenizer.eos_token for name in ("chosen", "rejected") for row in rows]
    with torch.no_grad():
        scores_B = scorer(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
    chosen, rejected = scores_B[: len(rows)], scores_B[len(rows) :]
    assert bool((chosen > rejected + 1).all())
    assert float((chosen - rejected).mean()) == pytest.approx(last["eval_margin"], rel=1e-4)
    assert float(scores_B.mean()) == pytest.approx(last["eval_mean_reward"], rel=1e-4, abs=1e-5)


def test_a_reward_model_whose_padding_is_the_end_scores_where_transformers_looks(model: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = reward_config(model, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), max_steps=2)
    last = RewardTrainer(config).train()
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "final")
    texts = [row["prompt"] + row[name] + tokenizer.eos_token for row in pair_rows(3) for name in ("chosen", "rejected")]
    with torch.no_grad():
        scores_B = scorer(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
    assert float(scores_B.mean()) == pytest.approx(last["eval_mean_reward"], rel=1e-4, abs=1e-6)
    assert float(scores_B.max()) == pytest.approx(last["eval_max_reward"], rel=1e-4, abs=1e-6)


def is_as_it_was(tokenizer: Any) -> None:
    pass


def ends_with_padding(tokenizer: Any) -> None:
    tokenizer.pad_token = tokenizer.eos_token


def begins_with_a_special_token(tokenizer: Any) -> None:
    start = "<|im_start|>"
    post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, 1)])
    tokenizer.backend_tokenizer.post_processor = post_processor


@pytest.mark.parametrize(
    ("conversations", "change"),
    [(True, is_as_it_was), (False, ends_with_padding), (False, begins_with_a_special_token)],
    ids=["conversations", "ends with padding", "begins with a special token"],
)
def test_a_reward_model_rewards_as_it_was_trained_to(
    conversations: bool, change: Any, model: str, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer()
    change(tokenizer)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows: list[dict[str, Any]] = successors()
    if conversations:
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        rows = [{name: [{"role": roles[name], "content": row[name]}] for name in row} for row in rows]
    keys = TAUGHT | {"dataset": rows, "eval_dataset": rows, "tokenizer": str(tmp_path / "tokenizer"), "max_steps": 8}
    last = RewardTrainer(reward_config(model, tmp_path / "out", **keys)).train()
    judge, prompts = RewardModel(tmp_path / "out" / "final", batch_size=4), [row["prompt"] for row in rows]
    chosen, rejected = (np.array(judge.score(prompts, [row[name] for row in rows])) for name in ("chosen", "rejected"))
    assert (chosen - rejected).mean() == pytest.approx(last["eval_margin"], rel=1e-4)
    assert np.mean([chosen, rejected]) == pytest.approx(last["eval_mean_reward"], rel=1e-4, abs=1e-5)
    assert np.max([chosen, rejected]) == pytest.approx(last["eval_max_reward"], rel=1e-4, abs=1e-5)
    assert abs(last["eval_margin"]) > 0.01


# The examples


@pytest.mark.parametrize(
    ("trainer", "config_type"), [(DPOTrainer, DPOConfig), (RewardTrainer, RewardConfig)], ids=["dpo", "reward"]
)
def test_an_example_is_placed_and_trains_two_steps(
    trainer: Any, config_type: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of device groups: test_examples.py."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    (addition,) = load_plugins(["examples/grpo/addition.py"])
    monkeypatch.setattr(addition, "NUM_TEST_PROBLEMS", 50)
    kind = "dpo" if trainer is DPOTrainer else "reward"
    small = [f"--model={model}", f"--output_dir={tmp_path}", "--max_steps=2", "--global_batch_size=4"]
    config = load_config(
        config_type, ["--config", f"examples/{kind}/quickstart.yaml", *small, "--val_before_train=false"]
    )
    assert not config.use_ray
    assert set(placement(trainer, config).roles) == set(trainer.__rayhelper_roles__)
    last = run(trainer, config)
    assert len([line for line in lines(tmp_path) if "loss" in line]) == 2
    assert last["eval_rewards/accuracies" if kind == "dpo" else "eval_accuracy"] >= 0


# Before anything starts


@pytest.mark.parametrize(
    ("keys", "num_workers"), [({}, 2), ({"global_batch_size": 9}, 1), ({"token_budget": 100}, 1)], ids=str
)
def test_losses_that_sort_want_the_whole_step_in_one_micro_batch(
    keys: dict[str, Any], num_workers: int, model: str, tmp_path: Path
) -> None:
    groups = DeviceGroups.single(["default", "reference"], "CPU", num_workers)
    settings: dict[str, Any] = {"loss_type": ["aot"], "per_device_train_batch_size": 8, "global_batch_size": 8}
    DPOTrainer.check(dpo_config(model, tmp_path, **settings), DeviceGroups.single(["default"], "CPU", 1))
    with pytest.raises(ConfigError, match="aot sorts all pairs"):
        DPOTrainer.check(dpo_config(model, tmp_path, **settings | keys), groups)


def test_an_evaluation_of_losses_that_sort_takes_each_micro_batch_alone(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"loss_type": ["aot"], "per_device_train_batch_size": 4, "max_steps": 1, "warmup_steps": 0}
    trainer = DPOTrainer(dpo_config(model, tmp_path, **keys))
    trainer.train()
    whole, pairs = trainer.evaluate(), trainer.eval_pairs
    assert pairs is not None
    total = 0.0
    for rows in (np.arange(2), np.arange(2, 3)):  # as per_device_eval_batch_size cuts them
        trainer.eval_pairs = pairs[rows]
        total += trainer.evaluate()["eval_loss"] * len(rows)
    assert whole["eval_loss"] == pytest.approx(total / 3, rel=1e-5)


def test_the_shift_of_bco_is_the_mean_reward_of_all_steps_so_far_also_after_a_resume(
    model: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"loss_type": ["bco_pair"], "bco_shift": True, "eval_dataset": None, "warmup_steps": 0}
    keys |= {"max_steps": 4, "learning_rate": 1e-2}
    DPOTrainer(dpo_config(model, tmp_path / "whole", **keys, save_steps=2)).train()
    steps = [line for line in lines(tmp_path / "whole") if "loss" in line]
    rewards = [(line["rewards/chosen"] + line["rewards/rejected"]) / 2 for line in steps]
    expected = [np.mean(rewards[: k + 1]) for k in range(4)]
    assert [line["bco_shift"] for line in steps] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert abs(steps[-1]["bco_shift"]) > 1e-3
    keys["resume_from_checkpoint"] = str(tmp_path / "whole" / "checkpoint-2")
    DPOTrainer(dpo_config(model, tmp_path / "resumed", **keys)).train()
    assert final_bytes(tmp_path / "resumed") == final_bytes(tmp_path / "whole")
