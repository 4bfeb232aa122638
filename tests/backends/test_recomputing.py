"""``gradient_checkpointing: auto``: on where activations of a micro-batch have no room on a GPU, else off."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from rayhelper import ConfigError
from rayhelper.planning.memory import Work
from rayhelper.planning.parallel_sizes import ParallelSizes
from tests.backends.batches import largest_difference, samples_of, weighted_loss, weights_of
from tests.golden.tiny import save_tiny
from trainers.backends.recomputing import recomputes
from trainers.configuration.shared import TrainConfig
from trainers.grpo.config import GRPOConfig
from trainers.parts import models
from trainers.sft.config import SFTConfig

GIB = 2**30
QWEN3_8B = {
    **{"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151_936},
}


@pytest.fixture
def large(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("rows", "length", "num_workers", "memory", "expected"),
    [
        (8, 4096, 8, 80 * GIB, True),  # of 8 B parameters
        (1, 1024, 8, 80 * GIB, False),
        (1, 1024, 1, 80 * GIB, True),  # whose states alone are 128 GB
        (8, 4096, 8, None, False),  # a CPU
    ],
)
def test_what_the_plan_counts_decides(
    rows: int, length: int, num_workers: int, memory: int | None, expected: bool, large: str
) -> None:
    work, sizes = Work(micro_batch=rows, length=length), ParallelSizes(data=num_workers)
    assert recomputes(large, sizes, work, memory=memory, trust_remote_code=False) is expected


def test_a_model_of_an_unknown_shape_keeps_its_activations(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    found = recomputes(str(tmp_path), ParallelSizes(), Work(length=10**9), memory=1, trust_remote_code=False)
    assert found is False


def one_step(folder: str, checkpointing: Any) -> tuple[bool, dict[str, torch.Tensor]]:
    keys: dict[str, Any] = {"model": folder, "dataset": "d", "max_length": 64, "adam_epsilon": 1e-4}
    keys["gradient_checkpointing"] = checkpointing
    backend: Any = models.build_backend(SFTConfig(**keys), folder, num_training_steps=4)
    samples = samples_of()
    count = int(samples.target_mask.values.sum())
    backend.step(samples, lambda *given: weighted_loss(count, *given), micro_batch_size=4)
    return backend.module.is_gradient_checkpointing, weights_of(backend.module)


def test_a_run_recomputes_where_there_is_no_room_and_its_numbers_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(tmp_path)
    is_on, weights = one_step(folder, False)
    assert not is_on
    for memory, expected in ((1000, True), (GIB * 80, False), (None, False)):
        monkeypatch.setattr(models, "device_memory", lambda memory=memory: memory)
        with caplog.at_level(logging.INFO):
            is_on, found = one_step(folder, "auto")
        assert is_on is expected
        told = f"gradient_checkpointing: {str(expected).lower()}" in caplog.text
        assert told == (memory is not None), "a CPU has chosen nothing"
        caplog.clear()
        assert largest_difference(found, weights) <= (1e-7 if expected else 0.0)  # logits are in other chunks then


def test_the_longest_sequence_is_what_the_keys_say() -> None:
    base: dict[str, Any] = {"model": "m", "dataset": "d"}
    grpo = GRPOConfig(**base, reward_funcs=["exact_answer"], max_prompt_length=100, max_completion_length=20)
    assert models.longest_sequence(grpo) == 120
    assert models.longest_sequence(SFTConfig(**base, max_length=77)) == 77
    assert models.longest_sequence(SFTConfig(**base, max_length=None)) is None


def test_megatron_wants_it_said() -> None:
    keys: dict[str, Any] = {"model": "m", "dataset": "d", "backend": "megatron", "gradient_checkpointing": "auto"}
    with pytest.raises(
        ConfigError, match=r"gradient_checkpointing: auto works only with backend: fsdp\. Write true or false"
    ):
        TrainConfig(**keys)
