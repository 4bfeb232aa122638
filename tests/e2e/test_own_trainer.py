"""The trainers of examples/own_trainer: equal on every runtime, resumed. Two processes: test_torchrun_trainers.py."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper import ConfigError, RayHelper
from rayhelper.named_class import class_named
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import TEXTS, begin_torchrun_of_one, final_bytes, interrupted_after, lines, separate, together
from tests.golden.tiny import save_tiny
from trainers.batch import Ragged, Sequences
from trainers.cli import load_config, placement, run
from trainers.commands import command_named
from trainers.data.preferences import Preferences
from trainers.losses.preference import Completions, preference_loss
from trainers.metrics import Metrics
from trainers.parts import read_prompts

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "examples/own_trainer"
EXAMPLES = {"raft": f"{FOLDER}/raft.py:RaftTrainer", "online_dpo": f"{FOLDER}/online_dpo.py:OnlineDPOTrainer"}
SMALL: dict[str, Any] = {
    "dataset": [{"prompt": text} for text in TEXTS[:6]],
    "eval_dataset": [{"prompt": text} for text in TEXTS[6:8]],
    "external_plugins": [],
    "reward_funcs": ["tests.e2e.runs.evenness"],
    "max_completion_length": 8,
    "global_batch_size": 4,
    "per_device_train_batch_size": 2,
    "max_steps": 2,
    "eval_steps": None,
    "val_before_train": False,
    "warmup_steps": 0,
    "dtype": "float32",
}


def needs_gold(completions: Sequence[Any], gold: Sequence[str]) -> list[float]:
    return [0.0] * len(completions)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def trainer_of(name: str) -> Any:
    return class_named(str(ROOT / EXAMPLES[name]))


def file_of(name: str) -> Any:
    """The example's module."""
    return sys.modules[trainer_of(name).__module__]


def configured(name: str, model: str, folder: Path, **keys: Any) -> Any:
    """The example's configuration file, made small."""
    config_type = command_named(EXAMPLES[name]).config_type
    config = load_config(config_type, ["--config", str(ROOT / FOLDER / f"{name}.yaml")])
    return dataclasses.replace(config, **{**SMALL, "model": model, "output_dir": str(folder), **keys})


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_losses_are_the_same_off_in_process_under_torchrun_and_on_ray(
    name: str, model: str, tmp_path: Path, ray_session: RaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(name)
    with without_runtime():
        run(trainer, configured(name, model, tmp_path / "off"))
        with RayHelper.session(together(1), runtime="inprocess", strict=True):
            trainer(configured(name, model, tmp_path / "in process")).train()
        with monkeypatch.context() as environment:
            begin_torchrun_of_one(environment)
            with RayHelper.session(together(1), runtime="torchrun"):
                trainer(configured(name, model, tmp_path / "torchrun")).train()
    for kind, groups in (("one worker", together(1)), ("roles apart", separate())):
        with ray_session(groups):
            trainer(configured(name, model, tmp_path / kind)).train()
    expected = lines(tmp_path / "off")
    assert [line["step"] for line in expected if "loss" in line] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in expected if "loss" in line)
    assert "eval_rewards/evenness/mean" in expected[-1]
    for kind in ("in process", "torchrun", "one worker", "roles apart"):
        assert lines(tmp_path / kind) == expected, kind
        assert final_bytes(tmp_path / kind) == final_bytes(tmp_path / "off"), kind


def test_a_resumed_run_equals_one_that_never_stopped(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "eval_steps": 1, "log_completions": True}
    trainer = trainer_of("raft")
    trainer(configured("raft", model, tmp_path / "whole", **keys)).train()
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        trainer(configured("raft", model, tmp_path / "parted", **keys)).train()
    trainer(configured("raft", model, tmp_path / "parted", **keys, resume_from_checkpoint="auto")).train()
    assert lines(tmp_path / "parted") == lines(tmp_path / "whole")
    assert final_bytes(tmp_path / "parted") == final_bytes(tmp_path / "whole")
    assert list((tmp_path / "whole" / "completions").glob("*.parquet"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_needs_no_device_group_lives_with_train(name: str, model: str, tmp_path: Path) -> None:
    named = {
        "policy": {"device": "CPU", "ranks": 1, "workers": ["train"]},
        "actors": {"device": "CPU", "ranks": 1, "workers": ["rollout"]},
    }
    groups = placement(trainer_of(name), configured(name, model, tmp_path, use_ray=True, device_groups=named))
    guests = {"raft": ["reward"], "online_dpo": ["reference", "reward"]}[name]
    assert [sorted(group.roles) for group in groups.groups] == [sorted(["train", *guests]), ["rollout"]]


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        ("raft", {"num_kept": 9}, "num_kept is 9, more than num_generations=8"),
        ("raft", {"reward_funcs": ["evennes"]}, "reward_funcs: unknown reward 'evennes'"),
        ("raft", {"reward_funcs": []}, "nothing rewards completions"),
        ("raft", {"reward_funcs": ["exact_answer"]}, "reward_funcs: exact_answer compares with column 'answer'"),
        ("online_dpo", {"reward_funcs": [needs_gold]}, "reward_funcs: .*'needs_gold' needs 'gold', but dataset has"),
        (
            "raft",
            {"reward_funcs": [needs_gold], "dataset": [{"prompt": "a", "gold": "b"}]},
            "'needs_gold' needs 'gold', but eval_dataset has no such column",
        ),
        ("online_dpo", {"generation_kwargs": {"typical": 1}}, "no field 'typical'"),
        ("online_dpo", {"resume_from_checkpoint": "nowhere"}, "there is no folder 'nowhere'"),
    ],
)
def test_a_mistake_is_an_error_before_a_model_is_loaded(
    name: str, keys: dict[str, Any], told: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainers.parts.policy.build_backend", lambda *_, **__: pytest.fail("a model was built"))
    with pytest.raises(ConfigError, match=told):
        run(trainer_of(name), configured(name, model, tmp_path, **keys))


def test_a_column_that_a_trainer_adds_itself_may_be_missing_in_the_file(model: str, tmp_path: Path) -> None:
    config = configured("raft", model, tmp_path, reward_funcs=[needs_gold])
    with pytest.raises(ConfigError, match="needs 'gold'"):
        read_prompts(config, config.dataset, config.dataset_split)
    rows = read_prompts(config, config.dataset, config.dataset_split, added_columns=["gold"])
    assert rows.column_names == ["prompt"]


def test_a_trainer_that_forgets_to_say_that_the_policy_has_learned_is_told_so(model: str, tmp_path: Path) -> None:
    """Where engines have weights of their own they would continue with old ones, and nobody would notice."""
    trainer = trainer_of("raft")(configured("raft", model, tmp_path))
    trainer.generator.learned = lambda: None
    with pytest.raises(RuntimeError, match=r"1 optimizer steps, but generator.learned\(\) was called after 0"):
        trainer.train()


# Their mathematics


def test_the_best_completions_of_each_prompt_are_kept() -> None:
    best_of = file_of("raft").best_of
    totals_B = np.array([0.0, 2.0, 1.0, 2.0, np.nan, 0.0, -1.0, 0.0])
    assert best_of(totals_B, 4, 2).tolist() == [1, 3, 5, 7]
    assert best_of(totals_B, 4, 1).tolist() == [1, 5]
    assert best_of(totals_B, 2, 1).tolist() == [1, 3, 5, 7]


def test_the_better_completion_is_chosen_and_equal_ones_make_no_pair() -> None:
    found = file_of("online_dpo").paired(four_sequences(), LOGPS, np.array([1.0, 0.0, 0.5, 0.5]))
    assert found == Preferences.of(four_sequences(), np.array([0]), np.array([1]), LOGPS)
    found = file_of("online_dpo").paired(four_sequences(), LOGPS, np.array([0.0, 1.0, np.nan, 0.5]))
    assert [row.tolist() for row in found.chosen_ids] == [[3, 4]]
    assert [row.tolist() for row in found.ref_rejected_logps] == [[-1.0, -2.0]]


def test_the_loss_is_that_of_dpo() -> None:
    pairs = Preferences.of(four_sequences(), np.array([0, 2]), np.array([1, 3]), LOGPS)
    logps_BT = torch.tensor([[-0.5, -1.0], [-2.0, -0.1], [-3.0, torch.nan], [-1.5, torch.nan]], requires_grad=True)
    mask_BT = torch.tensor([[True, True], [True, True], [True, False], [True, False]])
    ref_BT = torch.tensor([[-1.0, -2.0], [-0.5, -0.5], [-1.0, 0.0], [-2.0, 0.0]])
    config = file_of("online_dpo").OnlineDPOConfig(model="m", dataset="d", beta=0.3)
    arguments = (logps_BT, torch.zeros(4, 2), mask_BT, pairs, Metrics())
    loss = file_of("online_dpo").online_dpo_loss(config, 5, *arguments)
    sides = [Completions(logps_BT[half], mask_BT[half], ref_BT[half]) for half in (slice(0, 2), slice(2, 4))]
    expected, _ = preference_loss(*sides, num_pairs=5, beta=0.3)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logps_BT.grad is not None
    assert bool(logps_BT.grad.isfinite().all())


LOGPS = Ragged.of([[-1.0, -2.0], [-1.0], [-0.5, -0.5], [-2.0]], np.float32)


def four_sequences() -> Sequences:
    """Completions of two, one, two and one tokens."""
    return Sequences(
        Ragged.of([[1, 2], [3, 4], [5, 6], [7, 8]], np.int64),
        Ragged.of([[True, True], [False, True], [True, True], [False, True]], bool),
    )
