"""With an adapter every trainer exports the model that it trained: merged it says what model and adapter say."""

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

STEPS: dict[str, Any] = {"max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0}
LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 4, **STEPS}
ADALORA = {"tuner_type": "adalora", "tuner_kwargs": {"init_r": 4, "target_r": 2}, "learning_rate": 0.1}
RUNS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (SFTTrainer, sft_config, LORA),
    "grpo": (GRPOTrainer, grpo_config, LORA),
    "ppo": (PPOTrainer, ppo_config, LORA),
    "sft, adalora": (SFTTrainer, sft_config, STEPS | ADALORA),
    "grpo, ia3, its reference without": (GRPOTrainer, grpo_config, STEPS | {"tuner_type": "ia3", "beta": 0.1}),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_merged_model_scores_as_the_adapted_one(name: str, tmp_path: Path) -> None:
    trainer_type, config, keys = RUNS[name]
    start = save_tiny(tmp_path / "model")
    trainer = trainer_type(config(start, tmp_path / "out", **keys))
    trainer.train()
    trained: FsdpBackend = trainer.policy.backend

    def scores(backend: FsdpBackend) -> np.ndarray:
        return backend.token_logps(samples_of(), micro_batch_size=4).values

    assert np.abs(scores(trained) - scores(FsdpBackend(start))).max() > 1e-3, "the adapter has learned something"
    np.testing.assert_allclose(scores(FsdpBackend(tmp_path / "out" / "final")), scores(trained), atol=1e-5)
