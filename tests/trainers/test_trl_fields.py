"""Every field of TRL's and of transformers' configurations is read here, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.trl_fields import outcomes
from rayhelper import ConfigError
from trainers.cli import load_config
from trainers.dpo.config import DPOConfig
from trainers.grpo.config import GRPOConfig
from trainers.sft.config import SFTConfig


def test_fields_of_the_installed_trl() -> None:
    found = list(outcomes(shared_once=True))
    assert len(found) > 300
    wrong = [one for one in found if one.at_default in ("refused", "unknown") or one.at_other in ("unknown", "silent")]
    assert not wrong, [(one.owner, one.field, one.at_default, one.at_other, one.told) for one in wrong]


def load(kind: type[Any], text: str, tmp_path: Path) -> Any:
    (tmp_path / "x.yaml").write_text(text)
    return load_config(kind, ["--config", str(tmp_path / "x.yaml")])


BASE = "model_name_or_path: m\ndataset_name: rows\n"
MEANT: list[tuple[type[Any], str, dict[str, Any]]] = [
    (SFTConfig, "", {"model": "m", "dataset": "rows", "eval_dataset": None}),
    (SFTConfig, "dataset_config: main", {"dataset": {"path": "rows", "name": "main"}}),
    (
        SFTConfig,
        "eval_strategy: steps\nlogging_steps: 7\ndataset_test_split: dev",
        {"eval_dataset": "rows", "eval_dataset_split": "dev", "eval_steps": 7},
    ),
    (SFTConfig, "shuffle_dataset: false", {"shuffle_dataset": True}),  # whose sampler draws an order anyway
    (SFTConfig, "train_sampling_strategy: sequential", {"shuffle_dataset": False}),
    (
        SFTConfig,
        "dataset_streaming: true\nmax_steps: 5",
        {"streaming": True, "shuffle_dataset": False},
    ),
    (
        SFTConfig,
        "use_peft: true",
        {"tuner_type": "lora", "lora_rank": 16, "lora_dropout": 0.05, "lora_target_modules": ["auto"]},
    ),
    (SFTConfig, "lora_r: 16\nlora_alpha: 32\nlora_dropout: 0.05", {"tuner_type": "full", "lora_rank": 8}),
    (SFTConfig, "fsdp: shard_grad_op offload", {"fsdp_reshard_after_forward": False, "fsdp_offload_params": True}),
    (SFTConfig, "accelerate_config: multi_gpu", {"fsdp_sharding_strategy": "no_shard"}),
    (SFTConfig, "warmup_steps: 0.25", {"warmup_ratio": 0.25, "warmup_steps": 0}),
    (DPOConfig, "optim: sgd\noptim_args: momentum=0.9", {"optim_kwargs": {"momentum": 0.9}}),
    (SFTConfig, "train_sampling_strategy: group_by_length", {"group_by_length": True, "shuffle_dataset": True}),
    (
        GRPOConfig,
        "reward_model_name_or_path: judge\nreward_funcs: [exact_answer]\nreward_weights: [2.0, 1.0]",
        {"reward_model": ["judge"], "reward_weights": [1.0, 2.0]},  # theirs has the model first
    ),
    (
        GRPOConfig,
        "reward_funcs: [exact_answer]\nvllm_gpu_memory_utilization: 0.3\nvllm_server_port: 8000\nvllm_mode: colocate",
        {"rollout_engine": "hf", "vllm_gpu_memory_utilization": None},
    ),
]


@pytest.mark.parametrize(("kind", "text", "meant"), MEANT, ids=[text or "names" for _, text, _ in MEANT])
def test_what_trl_writes_means_the_same(kind: type[Any], text: str, meant: dict[str, Any], tmp_path: Path) -> None:
    found = load(kind, BASE + text, tmp_path)
    assert {name: getattr(found, name) for name in meant} == meant


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (SFTConfig, "load_in_4bit: true", "quantized weights are not trained themselves, and tuner_type is full"),
        (SFTConfig, "use_peft: true\nload_in_4bit: true\nload_in_8bit: true", "cannot both be true. Remove one"),
        (SFTConfig, "use_peft: true\nbnb_4bit_quant_type: fp4", "bnb_4bit_quant_type is 'fp4', but load_in_4bit is"),
        (DPOConfig, "dataset_streaming: true", "SFT and pretraining stream"),
        (SFTConfig, "dataset_streaming: true", "set max_steps"),
        (
            GRPOConfig,
            "reward_funcs: [exact_answer]\ntrain_sampling_strategy: group_by_length",
            "write random or sequential",
        ),
        (SFTConfig, "optim_args: amsgrad=True", "does not read amsgrad of optim_args with optim: adamw_torch"),
        (SFTConfig, "optim: sgd\noptim_args: foreach=True", "Remove it, or write optim_kwargs: {foreach: True}"),
        (SFTConfig, "fsdp: hybrid_shard", "fsdp hybrid_shard is not supported"),
        (SFTConfig, "datasets: [{path: a, fraction: 1.0}, {path: b}]", "fraction is given for only some"),
        (SFTConfig, "datasets: [{path: a, weight: 1.0}]", "a has weight, but only path"),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_reason(kind: type[Any], text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        load(kind, BASE + text, tmp_path)
