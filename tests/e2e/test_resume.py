"""A run that was stopped and resumed equals one that never stopped, bit for bit."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayhelper import ConfigError, WorkerDiedError
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import (
    TEXTS,
    dpo_config,
    final_bytes,
    grpo_config,
    interrupted_after,
    lines,
    pair_rows,
    sft_config,
    signalled_in,
    together,
    worker_killed_after,
)
from tests.golden.tiny import save_tiny
from tests.rayhelper.strangers import Payload
from trainers.checkpoint import resolve_resume
from trainers.cli import run
from trainers.dpo.trainer import DPOTrainer
from trainers.grpo.trainer import GRPOTrainer
from trainers.manifest import write_manifest
from trainers.run.going_on import going_on
from trainers.run.stopping import Stopped
from trainers.sft.trainer import SFTTrainer

CASES: dict[str, tuple[Any, Any, int, int, dict[str, Any]]] = {  # trainer, config, steps, interrupted after, keys
    "sft with dropout": (
        SFTTrainer,
        sft_config,
        9,
        5,
        {"save_steps": 4, "disable_dropout": False, "neftune_noise_alpha": 5.0},
    ),
    "sft packed": (SFTTrainer, sft_config, 9, 7, {"save_steps": 3, "packing": True, "max_length": 64, "max_steps": 9}),
    "grpo": (GRPOTrainer, grpo_config, 12, 9, {"save_steps": 4, "eval_steps": 4, "val_before_train": True}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), attention_dropout=0.1)


@pytest.fixture(scope="module")
def wholes(model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, float]]]:
    """By the name of a case: the folder of its run that never stopped, and what ``train`` returned."""

    @functools.cache
    def whole(name: str) -> tuple[Path, dict[str, float]]:
        trainer, config, _, _, keys = CASES[name]
        folder = tmp_path_factory.mktemp("whole")
        return folder, trainer(config(model, folder, **keys)).train()

    return whole


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_one_that_never_stopped(
    name: str, model: str, wholes: Callable[[str], tuple[Path, dict[str, float]]], tmp_path: Path
) -> None:
    trainer, config, num_steps, stop, keys = CASES[name]
    (whole, numbers), parted = wholes(name), tmp_path / "parted"
    with interrupted_after(stop), pytest.raises(KeyboardInterrupt):
        trainer(config(model, parted, **keys)).train()
    assert lines(parted)[-1]["step"] == stop
    assert not (parted / "final").exists()

    resumed = trainer(config(model, parted, **keys, resume_from_checkpoint="auto")).train()

    assert lines(whole)[-1]["step"] == num_steps
    assert len({line["loss"] for line in lines(whole) if "loss" in line}) == num_steps  # it did learn something
    assert lines(parted) == lines(whole)
    assert final_bytes(parted) == final_bytes(whole)
    assert resumed.keys() <= numbers.keys()  # not what only evaluations before it had


OTHER_ROWS: dict[str, tuple[Any, Any, list[dict[str, Any]]]] = {
    "sft": (SFTTrainer, sft_config, [{"text": text} for text in TEXTS]),
    "grpo": (GRPOTrainer, grpo_config, [{"prompt": text} for text in TEXTS[:6]]),
    "dpo": (DPOTrainer, dpo_config, pair_rows()),
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_a_run_does_not_go_on_with_as_many_other_rows(name: str, model: str, tmp_path: Path) -> None:
    trainer, config, rows = OTHER_ROWS[name]
    step = 4 if name == "grpo" else 1  # a checkpoint is saved between generations
    keys: dict[str, Any] = {"dataset": rows, "max_steps": step + 1, "save_steps": step, "eval_strategy": "no"}
    trainer(config(model, tmp_path, **keys)).train()
    keys |= {"resume_from_checkpoint": str(tmp_path / f"checkpoint-{step}"), "max_steps": step + 2}
    other = {"dataset": [*rows[:-1], rows[0]]}
    with pytest.raises(ConfigError, match=r"^resume_from_checkpoint: [^\n]*fingerprint of the rows was [^\n]*$"):
        trainer(config(model, tmp_path / "other", **keys | other)).train()
    trainer(config(model, tmp_path / "same", **keys)).train()
    assert lines(tmp_path / "same")[-1]["step"] == step + 2
    state_file = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
    state = json.loads(state_file.read_text())
    del state["order"]["fingerprint of the rows"]  # as an earlier version wrote it
    state_file.write_text(json.dumps(state))
    write_manifest(tmp_path / f"checkpoint-{step}")
    trainer(config(model, tmp_path / "old", **keys | other)).train()
    assert lines(tmp_path / "old")[-1]["step"] == step + 2


def test_two_workers_resume_bit_for_bit(model: str, tmp_path: Path, ray_session: RaySession) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    keys: dict[str, Any] = {"save_steps": 2, "disable_dropout": False, "neftune_noise_alpha": 5.0}
    with ray_session(together(2)):
        SFTTrainer(sft_config(model, whole, **keys)).train()
        with interrupted_after(5), pytest.raises(KeyboardInterrupt):
            SFTTrainer(sft_config(model, parted, **keys)).train()
        SFTTrainer(sft_config(model, parted, **keys, resume_from_checkpoint=True)).train()
    assert {path.name for path in (whole / "checkpoint-8").glob("rng_state_*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    assert lines(parted) == lines(whole)
    assert final_bytes(parted) == final_bytes(whole)


LEARNERS = {"cpus": {"device": "CPU", "ranks": 2, "workers": ["train"]}}


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_whose_worker_dies_goes_on_by_itself(
    model: str, tmp_path: Path, ray_session: RaySession, caplog: pytest.LogCaptureFixture
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    keys: dict[str, Any] = {"save_steps": 2, "disable_dropout": False}
    with ray_session(together(2)):
        SFTTrainer(sft_config(model, whole, **keys)).train()
    SFTTrainer(sft_config(model, parted, **keys, max_steps=4, learning_rate=1e-4)).train()  # leaves other checkpoints
    on_ray = {**keys, "use_ray": True, "device_groups": LEARNERS, "resume_on_failure": 2}
    with without_runtime(), worker_killed_after(1), worker_killed_after(5):
        run(SFTTrainer, sft_config(model, parted, **on_ray))
    told = [record.getMessage() for record in caplog.records if "resume_on_failure" in record.getMessage()]
    assert [line.partition(": rank 1 of group 'cpus'")[0] for line in told] == [
        "resume_on_failure: the run begins again, because it has no checkpoint yet, 1 resumes left",
        f"resume_on_failure: the run continues from {parted / 'checkpoint-4'}, 0 resumes left",
    ]
    assert lines(parted)[-1]["step"] == 9
    assert final_bytes(parted) == final_bytes(whole)


def test_a_run_whose_worker_dies_more_often_than_it_may_ends(model: str, tmp_path: Path) -> None:
    keys = {"use_ray": True, "device_groups": LEARNERS, "resume_on_failure": 2, "max_steps": 3}
    starts: list[Any] = []

    def die(config: Any) -> dict[str, float]:
        starts.append(config)
        raise WorkerDiedError("rank 1 of group 'cpus' died")

    with pytest.raises(WorkerDiedError) as raised:
        going_on(sft_config(model, tmp_path / "run", **keys), die)
    assert "resume_on_failure: all 2 resumes were used" in "".join(raised.value.__notes__)
    assert len(starts) == 3


def test_a_checkpoint_that_asks_for_code_ends_the_run_with_its_name(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"save_steps": 2, "max_steps": 3}
    SFTTrainer(sft_config(model, tmp_path / "run", **keys)).train()
    spoilt = tmp_path / "run" / "checkpoint-2" / "rng_state_0.pth"
    torch.save({"python": Payload(tmp_path / "made")}, spoilt)
    write_manifest(spoilt.parent)  # as a stranger would who wants it to be taken
    config = sft_config(model, tmp_path / "run", **keys, resume_from_checkpoint=str(spoilt.parent))
    with pytest.raises(ConfigError) as raised:
        SFTTrainer(config).train()
    assert str(raised.value).startswith(f"{spoilt} is not read: it asks for ")
    assert not (tmp_path / "made").exists()


SIGNALLED: dict[str, tuple[str, int, int]] = {  # signal, sent in step, stopped after step
    "sft packed": ("SIGTERM", 4, 4),
    "sft with dropout": ("SIGHUP", 4, 4),  # which a checkpoint was due at
    "grpo": ("SIGUSR1", 5, 6),  # a generation is learned from to its end
}


@pytest.mark.parametrize("name", SIGNALLED)
def test_a_signal_saves_after_the_step_and_a_resumed_run_equals_one_that_never_stopped(
    name: str,
    model: str,
    wholes: Callable[[str], tuple[Path, dict[str, float]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer, config, _, _, keys = CASES[name]
    sent, during, stop = SIGNALLED[name]
    (whole, _), parted = wholes(name), tmp_path / "parted"
    keys = keys | {"save_steps": 4 if name == "sft with dropout" else 0}
    with signalled_in(during, getattr(signal, sent)), pytest.raises(Stopped) as ended:
        trainer(config(model, parted, **keys)).train()
    assert ended.value.code == 143
    written = {"config.yaml", "metrics.jsonl", "run.json", "report.html"}
    assert {path.name for path in parted.iterdir()} == {*written, f"checkpoint-{stop}"}
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "stopped by" in line]
    assert f"stopped by {sent} after step {stop} of" in told
    assert told.endswith("--resume_from_checkpoint auto")

    trainer(config(model, parted, **keys, resume_from_checkpoint="auto")).train()

    assert lines(parted) == lines(whole)
    assert final_bytes(parted) == final_bytes(whole)


def test_a_signal_to_the_driver_saves_on_ray_too(model: str, tmp_path: Path, ray_session: RaySession) -> None:
    with ray_session(together(2)):
        with signalled_in(3, signal.SIGTERM), pytest.raises(Stopped) as ended:
            SFTTrainer(sft_config(model, tmp_path)).train()
        assert ended.value.code == 143
        found = resolve_resume("auto", tmp_path)
        assert found == tmp_path / "checkpoint-3"
        assert {path.name for path in found.glob("rng_state_*")} == {"rng_state_0.pth", "rng_state_1.pth"}
