"""KTO, CPO, SimPO and ORPO: the same numbers however cut, placed and resumed; and they learn what is preferred."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from rayhelper import ConfigError, DeviceGroups, RayHelper
from tests.conftest import RaySession
from tests.e2e import runs
from tests.e2e.runs import final_bytes, interrupted_after, kto_config, lines, separate, together
from tests.e2e.test_pairs import (
    CUTS,
    FOLLOWED,
    TAUGHT,
    Step,
    assert_same_step,
    preferences,
    successors,
)
from tests.golden.tiny import save_tiny
from trainers.cli import load_config, placement, run
from trainers.commands import command_named
from trainers.cpo.trainer import CPOTrainer, counts_of
from trainers.data.batches import Batches
from trainers.data.packs import packed
from trainers.dpo.trainer import DPOTrainer
from trainers.dpo.trainer import counts_of as dpo_counts_of
from trainers.kto.trainer import KTOTrainer, with_margins
from trainers.parts.frozen import Reference
from trainers.plugins import load_plugins
from trainers.reward.trainer import RewardTrainer

CASES: dict[str, tuple[int, dict[str, Any]]] = {  # rows, keys; four workers get 2, 2, 2, 1 of seven and 1, 1, 1, 0
    "kto": (7, {"desirable_weight": 0.6}),
    "kto of three rows": (3, {"kl_batch_size": 2, "beta": 0.5}),
    "kto, apo_zero_unpaired": (7, {"loss_type": "apo_zero_unpaired"}),
    "cpo": (7, {"label_smoothing": 0.1}),
    "simpo": (7, {"alpha": 0.05, "beta": 0.5}),
    "orpo": (7, {"beta": 0.8}),
    "orpo of three pairs": (3, {"max_length": 30}),
}
CUTS_OF: dict[str, list[str]] = {  # each trainer has every cut once, and each loss those that it might feel
    "kto": ["one pair at a time", "padding-free", "by tokens", "by packs", "computed twice"],
    "kto of three rows": ["by packs"],
    "kto, apo_zero_unpaired": ["by tokens, padding-free"],
    "cpo": ["by packs", "computed twice"],
    "simpo": ["two pairs at a time"],
    "orpo": ["one pair at a time", "by tokens, padding-free"],
    "orpo of three pairs": ["by tokens"],
}


# One pack in a micro-batch; a step of two packs holds two to five pairs, or three to seven completions
PACKED: dict[str, Any] = {"packing": True, "max_length": 100, "global_batch_size": 2, "per_device_train_batch_size": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("reference"), seed=1)


@pytest.fixture(scope="module")
def alone(model: str, reference: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Step]:
    """One step of each case in this process, all rows at once."""
    return {case: one_step(case, model, reference, tmp_path_factory.mktemp("alone")) for case in CASES}


def config_of(name: str, model: str, folder: Path, **keys: Any) -> Any:
    return getattr(runs, f"{name}_config")(model, folder, **keys)


def trainer_of(config: Any) -> Any:
    trainers: dict[str, Any] = {"KTOConfig": KTOTrainer, "DPOConfig": DPOTrainer, "RewardConfig": RewardTrainer}
    return trainers.get(type(config).__name__, CPOTrainer)(config)


def one_step(case: str, model: str, reference: str, folder: Path, **cut: Any) -> Step:
    """One optimizer step from the weights of ``model``, over the workers there are, and an evaluation after it."""
    num_rows, keys = CASES[case]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "warmup_steps": 0,
        "adam_epsilon": 1e-4,
        **keys,
        **cut,
    }
    name = case.split()[0].rstrip(",")
    if name == "kto":
        trainer = KTOTrainer(kto_config(model, folder, ref_model=reference, **settings))
        trainer.reference.build(reference)
        trainer.policy.build(model, 10)
        judged = trainer.with_reference(trainer.rows[np.arange(num_rows)], None, 2)
        metrics = with_margins(trainer.policy.step(judged, len(judged)))
        assert metrics.values()["kl"] > 0 or "apo" in case
        trainer.policy.export(folder)
        evaluation = trainer.evaluate()
    else:
        learner = CPOTrainer(config_of(name, model, folder, **settings))
        learner.policy.build(model, 10)
        pairs = learner.pairs[np.arange(num_rows)]
        metrics = learner.policy.step(pairs, counts_of(pairs))
        learner.policy.export(folder)
        evaluation = learner.evaluate()
    return metrics.values(), load_file(folder / "model.safetensors"), evaluation


@pytest.mark.parametrize("case", CASES)
def test_no_way_of_cutting_a_step_changes_it(
    case: str, alone: dict[str, Step], model: str, reference: str, tmp_path: Path
) -> None:
    untrained = load_file(Path(model) / "model.safetensors")
    assert max(float((weight - untrained[name]).abs().max()) for name, weight in alone[case][1].items()) > 1e-3
    for name in CUTS_OF[case]:
        assert_same_step(one_step(case, model, reference, tmp_path, **CUTS[name]), alone[case], name)


def test_a_step_over_four_workers_is_the_step_of_one(
    alone: dict[str, Step], model: str, reference: str, tmp_path: Path, ray_session: RaySession
) -> None:
    with ray_session(together(4)):
        for case in ("kto of three rows", "orpo of three pairs"):
            found = one_step(case, model, reference, tmp_path, per_device_train_batch_size=2)
            assert_same_step(found, alone[case], f"{case} on four workers")


def test_ray_equals_ray_off_bit_for_bit_with_the_reference_on_its_own_group(
    model: str, tmp_path: Path, ray_session: RaySession
) -> None:
    KTOTrainer(kto_config(model, tmp_path / "off", **FOLLOWED, **PACKED)).train()
    groups = {"cpus": {"device": "CPU", "ranks": 1, "workers": ["default", "reference", "train"]}}
    with RayHelper.session(groups, runtime="inprocess"):
        KTOTrainer(kto_config(model, tmp_path / "inprocess", **FOLLOWED, **PACKED)).train()
    with ray_session(separate()):
        KTOTrainer(kto_config(model, tmp_path / "ray", **FOLLOWED, **PACKED)).train()
    for found in ("inprocess", "ray"):
        assert lines(tmp_path / found) == lines(tmp_path / "off")
        assert final_bytes(tmp_path / found) == final_bytes(tmp_path / "off")


# Packs


@pytest.mark.parametrize("kind", ["kto", "dpo"])
def test_a_packed_run_learns_what_its_rows_teach_without_packing(
    kind: str, model: str, reference: str, tmp_path: Path, ray_session: RaySession
) -> None:
    """Beside a plain loop over the same rows, which lie padded in micro-batches of two."""
    keys: dict[str, Any] = {"max_steps": 3, "adam_epsilon": 1e-4, "warmup_steps": 0}
    keys["ref_model"] = reference
    trainer = trainer_of(config_of(kind, model, tmp_path / "packed", **keys, **PACKED))
    trainer.train()
    assert (trainer.policy.built.token_budget, trainer.policy.built.padding_free) == (100, True)
    with ray_session(together(2)):
        trainer_of(config_of(kind, model, tmp_path / "workers", **keys, **PACKED)).train()

    plain = trainer_of(config_of(kind, model, tmp_path / "plain", **keys, max_length=100))
    data = plain.rows if kind == "kto" else plain.pairs
    lengths = 2 * data.sequence_lengths(100) if kind == "kto" else data.unpadded_lengths()
    packs = packed(lengths, 100)
    order = Batches(len(packs), 2, seed=7)
    plain.reference.build(reference)
    plain.policy.build(model, 3)
    num_rows, kl = set(), 0.0
    for step, line in enumerate(lines(tmp_path / "packed")[:3]):
        rows = data[np.concatenate([packs[pack] for pack in order[step]])]
        num_rows.add(len(rows))
        if kind == "kto":
            batch = plain.with_reference(rows, None, 2)
            numbers: Any = len(rows)
        else:
            batch, numbers = plain.with_reference(rows, 2), dpo_counts_of(rows)
        found = plain.policy.step(batch, numbers).values()
        kl += found.get("kl", 0.0)
        assert {name: line[name] for name in ("loss", "grad_norm")} == pytest.approx(
            {name: found[name] for name in ("loss", "grad_norm")}, rel=1e-5
        )
    assert len(num_rows) > 1, "every step has as many rows, as without packing"
    assert kl > 0 or kind != "kto", "the KL says nothing"
    plain.policy.export(tmp_path / "plain" / "final")
    expected = load_file(tmp_path / "plain" / "final" / "model.safetensors")
    for folder in ("packed", "workers"):
        weights = load_file(tmp_path / folder / "final" / "model.safetensors")
        assert max(float((weights[name] - weight).abs().max()) for name, weight in expected.items()) < 1e-6, folder


def test_a_run_that_is_gone_on_with_keeps_its_packs(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"save_steps": 2, "loss_type": "apo_zero_unpaired", "global_batch_size": 2, "max_steps": 4}
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        KTOTrainer(kto_config(model, tmp_path, **keys)).train()
    packed_keys = PACKED | keys | {"resume_from_checkpoint": "auto"}
    with pytest.raises(ConfigError, match="tokens a pack was None and is 100"):
        KTOTrainer(kto_config(model, tmp_path, **packed_keys)).train()


# The reference


@pytest.mark.parametrize("case", [{}, PACKED], ids=["kto", "packed"])
def test_references_computed_beforehand_change_nothing(
    case: dict[str, Any], model: str, reference: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"ref_model": reference, "eval_steps": 2, "adam_epsilon": 1e-4, **case}
    keys |= {"shuffle_dataset": False}
    KTOTrainer(kto_config(model, tmp_path / "each", **keys)).train()
    trainer = KTOTrainer(kto_config(model, tmp_path / "before", **keys, precompute_ref_log_probs=True))
    trainer.train()
    assert trainer.reference.backend is None, "the reference model was not freed"
    for found, expected in zip(lines(tmp_path / "before"), lines(tmp_path / "each"), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


# Resuming

RESUMED: dict[str, tuple[str, dict[str, Any]]] = {  # a reference that follows, and adapters: test_pairs.py
    "references computed beforehand": (
        "kto",
        {"precompute_ref_log_probs": True, "shuffle_dataset": False, "save_steps": 2, "eval_steps": 3},
    ),
    "without a reference": ("orpo", {"save_steps": 2}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_one_that_never_stopped(
    name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    build = Reference.build
    monkeypatch.setattr(Reference, "build", lambda self, model: (built.append(model), build(self, model)))
    (kind, keys), whole, parted = RESUMED[name], tmp_path / "whole", tmp_path / "parted"
    trainer_of(config_of(kind, model, whole, **keys)).train()
    with interrupted_after(5), pytest.raises(KeyboardInterrupt):
        trainer_of(config_of(kind, model, parted, **keys)).train()
    built.clear()
    trainer_of(config_of(kind, model, parted, **keys, resume_from_checkpoint="auto")).train()
    assert not built, "a reference was loaded again"
    assert lines(parted) == lines(whole)
    assert final_bytes(parted) == final_bytes(whole)


# Learning


@pytest.mark.parametrize("kind", ["kto", "cpo", "orpo"])
def test_what_comes_next_becomes_likelier_than_what_does_not(kind: str, model: str, tmp_path: Path) -> None:
    """KTO takes the pairs apart."""
    trainer_of(config_of(kind, model, tmp_path / "out", **TAUGHT)).train()
    before, after = preferences(Path(model)), preferences(tmp_path / "out" / "final")
    assert after.mean() > before.mean() + 1
    assert len(after) == len(successors())


# The examples


@pytest.mark.parametrize("name", ["kto/quickstart", "cpo/quickstart", "cpo/simpo", "cpo/orpo"])
def test_an_example_is_placed_and_trains_two_steps(
    name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of device groups: test_examples.py."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    (addition,) = load_plugins(["examples/grpo/addition.py"])
    monkeypatch.setattr(addition, "NUM_TEST_PROBLEMS", 50)
    folder, _, file = name.partition("/")
    command = command_named(file if folder == "cpo" and file != "quickstart" else folder)
    trainer, config_type = command.trainer, command.config_type
    small = [f"--model={model}", f"--output_dir={tmp_path}", "--max_steps=2", "--global_batch_size=4"]
    config = load_config(config_type, ["--config", f"examples/{name}.yaml", *small, "--val_before_train=false"])
    assert not config.use_ray
    assert set(placement(trainer, config).roles) == set(trainer.__rayhelper_roles__)
    last = run(trainer, config)
    assert len([line for line in lines(tmp_path) if "loss" in line]) == 2
    assert "eval_rewards/margins" in last


# Before anything starts


def test_a_step_of_one_row_has_no_kl_to_estimate(model: str, tmp_path: Path) -> None:
    groups = DeviceGroups.single(["default", "reference"], "CPU", 1)
    KTOTrainer.check(kto_config(model, tmp_path, global_batch_size=1, loss_type="apo_zero_unpaired"), groups)
    with pytest.raises(ConfigError, match=r"a step has one row. Raise global_batch_size"):
        KTOTrainer.check(kto_config(model, tmp_path, global_batch_size=1), groups)
    with pytest.raises(ConfigError, match=r"a step is one pack, which may be one row. Raise global_batch_size"):
        KTOTrainer.check(kto_config(model, tmp_path, global_batch_size=1, packing=True), groups)
