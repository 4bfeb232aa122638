"""Whole runs of all trainers over workers that share rows: the numbers of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayhelper import ConfigError, DeviceGroups
from tests.conftest import RaySession
from tests.e2e.runs import (
    TEXTS,
    classification_config,
    dpo_config,
    final_weights,
    gkd_config,
    grpo_config,
    kto_config,
    lines,
    ppo_config,
    reward_config,
    sft_config,
    together,
)
from tests.golden.tiny import save_tiny
from tests.rayhelper.test_torchrun import torchrun
from trainers.classification.trainer import ClassificationTrainer
from trainers.cli import run
from trainers.dpo.trainer import DPOTrainer
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.trainer import GRPOTrainer
from trainers.kto.trainer import KTOTrainer
from trainers.ppo.trainer import PPOTrainer
from trainers.reward.trainer import RewardTrainer
from trainers.sft.trainer import SFTTrainer

pytestmark = pytest.mark.xdist_group("ray_trainers")

ROOT = Path(__file__).resolve().parents[2]
LABELLED = {"dataset": [{"text": text, "label": k % 3} for k, text in enumerate(TEXTS)], "num_labels": 3}
CLASSES: dict[str, Any] = {"per_device_train_batch_size": 2, "global_batch_size": 4}
LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 4, "learning_rate": 1e-2}
# How rows are cut and losses are read off, with each trainer once whose batch or loss is its own
CASES: dict[str, tuple[Any, Callable[..., Any], dict[str, Any]]] = {
    "sft of whole weights": (SFTTrainer, sft_config, {"fsdp_sharding_strategy": "no_shard", "token_budget": 50}),
    "classification": (ClassificationTrainer, classification_config, {**LABELLED, **CLASSES}),
    "dpo of packs": (DPOTrainer, dpo_config, {"packing": True, "max_length": 100, "use_weighting": True}),
    "kto": (KTOTrainer, kto_config, {"padding_free": True}),
    "reward": (RewardTrainer, reward_config, {"eval_steps": 2}),
    "grpo": (GRPOTrainer, grpo_config, {"val_before_train": True, "entropy_coef": 0.01}),
    "grpo of an adapter": (GRPOTrainer, grpo_config, {**LORA, "padding_free": True, "gradient_checkpointing": True}),
    "gkd": (GKDTrainer, gkd_config, {"lmbda": 1.0, "sft_alpha": 0.0}),
    "gkd of top tokens": (GKDTrainer, gkd_config, {"lmbda": 1.0, "sft_alpha": 0.0, "gkd_logits_topk": 5}),
    "ppo": (PPOTrainer, ppo_config, {}),
}
APART: dict[str, Any] = {
    "learners": {"device": "CPU", "ranks": 2, "workers": ["default", "train"]},
    "others": {"device": "CPU", "ranks": 2, "workers": ["reference", "rollout", "teacher", "critic", "reward"]},
}
OF_RAY = ["sft of whole weights", "classification", "kto", "reward", "grpo of an adapter", "gkd"]
OF_TORCHRUN = ["dpo of packs"]
WITH_OTHERS_APART = ["ppo", "gkd of top tokens"]  # where the same workers share rows


def config_of(case: str, model: str, folder: Path, size: int) -> Any:
    """Two steps of a case. Of an epsilon above the rounding errors of gradients, which Adam would let grow."""
    _, config, keys = CASES[case]
    more = {"teacher_model": str(Path(model).parent / "teacher")} if case.startswith("gkd") else {}
    told = {"max_steps": 2, "adam_epsilon": 1e-4, "sequence_parallel_size": size}
    return config(model, folder / case, **keys, **more, **told)


def torchrun_cases(model: str, folder: Path) -> None:
    """Of two processes of torchrun: every process comes here."""
    for case in OF_TORCHRUN:
        run(CASES[case][0], config_of(case, model, folder, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "teacher", seed=1, hidden_size=96)
    return save_tiny(folder / "policy")


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs in this process, without shared rows."""
    folder = tmp_path_factory.mktemp("alone")
    for case, (trainer, *_) in CASES.items():
        trainer(config_of(case, model, folder, 1)).train()
    return folder


def assert_same_run(found: Path, expected: Path, model: str) -> None:
    """All metrics, and the weights in the end, which were trained."""
    for line, other in zip(lines(found), lines(expected), strict=True):
        assert line == pytest.approx(other, abs=1e-5, rel=1e-4)
    weights, others = final_weights(found), final_weights(expected)
    assert weights.keys() == others.keys()
    assert max(float((weights[name] - weight).abs().max()) for name, weight in others.items()) < 1e-5


@pytest.mark.parametrize("case", OF_RAY)
def test_two_workers_that_share_rows_run_as_one_process(
    case: str, model: str, alone: Path, tmp_path: Path, ray_session: RaySession
) -> None:
    with ray_session(together(2)):
        CASES[case][0](config_of(case, model, tmp_path, 2)).train()
    assert_same_run(tmp_path / case, alone / case, model)


def test_four_workers_in_pairs_run_as_one_process(
    model: str, alone: Path, tmp_path: Path, ray_session: RaySession
) -> None:
    with ray_session(together(4)):
        GRPOTrainer(config_of("grpo", model, tmp_path, 2)).train()
    assert_same_run(tmp_path / "grpo", alone / "grpo", model)


@pytest.mark.parametrize("case", WITH_OTHERS_APART)
def test_models_on_workers_of_their_own_share_rows_too(
    case: str, model: str, alone: Path, tmp_path: Path, ray_session: RaySession
) -> None:
    """Two workers learn, two others score or judge, and engines on these get the weights of what is learned."""
    with ray_session(APART):
        CASES[case][0](config_of(case, model, tmp_path, 2)).train()
    assert_same_run(tmp_path / case, alone / case, model)


def test_processes_of_torchrun_share_rows_too(model: str, alone: Path, tmp_path: Path) -> None:
    done = torchrun(2, "-m", __name__, model, str(tmp_path), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-8000:]
    for case in OF_TORCHRUN:
        assert_same_run(tmp_path / case, alone / case, model)


def test_workers_that_share_rows_count_once_in_a_step(model: str, tmp_path: Path, ray_session: RaySession) -> None:
    keys: dict[str, Any] = {"global_batch_size": None, "gradient_accumulation_steps": 2, "max_steps": 1}
    with ray_session(together(4)):
        trainer = SFTTrainer(sft_config(model, tmp_path, **keys, sequence_parallel_size=2))
        trainer.train()
        assert trainer.policy.num_shards() == 2
    assert lines(tmp_path)[0]["epoch"] == 0.5  # of 11 rows; a step has 2 rows x 2 micro-batches x 2 shards


WRONG: dict[str, tuple[int | None, dict[str, Any], dict[str, Any], str]] = {
    "workers": (
        3,
        {},
        {},
        "lets this number of workers share rows, but role train has 3 of them. Start a multiple of 2",
    ),
    "alone": (None, {}, {}, "role train has 1 of them"),
    "heads": (3, {"sequence_parallel_size": 3}, {}, "role train: sequence_parallel_size 3 does not divide the 4"),
    "rope": (2, {}, {"rope_scaling": {"rope_type": "longrope"}}, "is of type longrope"),
    "dropout": (2, {"disable_dropout": False}, {"attention_dropout": 0.1}, "Write disable_dropout: true"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_shared_is_refused_before_the_start(case: str, tmp_path: Path) -> None:
    num_workers, keys, fields, told = WRONG[case]
    if "rope_scaling" in fields:
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
        fields = {"rope_scaling": fields["rope_scaling"] | factors}
    folder = save_tiny(tmp_path / "model", **fields)
    config = sft_config(folder, tmp_path, **{"sequence_parallel_size": 2} | keys)
    groups = None if num_workers is None else DeviceGroups.parse(together(num_workers))
    with pytest.raises(ConfigError, match=told):
        SFTTrainer.check(config, groups)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"torch_compile": True}, "torch_compile is True, but sequence_parallel_size is 2"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef is 0.1"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is 5.0"),
        ({"backend": "megatron", "fsdp_sharding_strategy": "full_shard"}, "Write context_parallel_size: 2"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size must be at least 1"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(model: str, tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        sft_config(model, tmp_path, **{"sequence_parallel_size": 2} | keys)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torchrun_cases(sys.argv[1], Path(sys.argv[2]))
