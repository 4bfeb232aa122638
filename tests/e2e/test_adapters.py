"""With LoRA every trainer exports the model that it trained: the adapter merged says what model and adapter say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.batches import samples_of
from tests.e2e.runs import grpo_config, ppo_config, sft_config
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.grpo.trainer import GRPOTrainer
from trainers.ppo.trainer import PPOTrainer
from trainers.sft.trainer import SFTTrainer

LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 4, "max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0}
RUNS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, sft_config),
    "grpo": (GRPOTrainer, grpo_config),
    "ppo": (PPOTrainer, ppo_config),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_merged_model_scores_as_the_adapted_one(name: str, tmp_path: Path) -> None:
    trainer_type, config = RUNS[name]
    start = save_tiny(tmp_path / "model")
    trainer = trainer_type(config(start, tmp_path / "out", **LORA))
    trainer.train()
    trained: FsdpBackend = trainer.policy.backend

    def scores(backend: FsdpBackend) -> np.ndarray:
        return backend.token_logps(samples_of(), micro_batch_size=4).values

    assert np.abs(scores(trained) - scores(FsdpBackend(start))).max() > 1e-3, "the adapter has learned something"
    np.testing.assert_allclose(scores(FsdpBackend(tmp_path / "out" / "final")), scores(trained), atol=1e-5)
