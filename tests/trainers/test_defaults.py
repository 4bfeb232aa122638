"""Whose defaults hold: found from a file's keys, told in one line, shown by --print_config, and overridden by a key."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.tiny.architectures import save
from rayhelper import ConfigError
from trainers.cli import load_config, run, save_config
from trainers.configuration.others.ms_swift_only import MS_SWIFT_ONLY
from trainers.configuration.reading.command_line import read_config
from trainers.configuration.reading.folders import configurations
from trainers.cpo.config import CPOConfig, ORPOConfig, SimPOConfig
from trainers.dpo.config import DPOConfig
from trainers.gkd.config import GKDConfig
from trainers.grpo.config import GRPOConfig
from trainers.kto.config import KTOConfig
from trainers.sampling.config import SamplingConfig
from trainers.sft.config import PretrainConfig, SFTConfig

THEIRS = "attn_impl: sdpa\n"  # a key that only ms-swift has, and that says nothing of training


def load(kind: type[Any], text: str, tmp_path: Path, *argv: str) -> Any:
    rewards = "reward_funcs: [exact_answer]\n" if kind is GRPOConfig and "reward_funcs" not in text else ""
    (tmp_path / "x.yaml").write_text(f"model: m\ndataset: d\n{rewards}{text}")
    return load_config(kind, ["--config", str(tmp_path / "x.yaml"), *argv])


SWIFT: list[tuple[type[Any], str, dict[str, Any]]] = [
    (
        SFTConfig,
        "",
        {"tuner_type": "lora", "lora_dropout": 0.05, "learning_rate": 1e-4, "weight_decay": 0.1, "adam_beta2": 0.95}
        | {"lr_scheduler_type": "cosine", "gradient_checkpointing": True, "logging_steps": 5, "loss_scale": "default"}
        | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "per_device_eval_batch_size": 1}
        | {"max_length": None, "truncation_mode": "drop", "disable_dropout": False},
    ),
    (SFTConfig, "tuner_type: bone\nlora_rank: 16", {"tuner_type": "miss", "tuner_kwargs": {"r": 4}, "lora_rank": 8}),
    (SFTConfig, "train_type: adalora", {"tuner_kwargs": {}, "lora_dropout": 0.05, "learning_rate": 1e-4}),
    (
        SFTConfig,
        "tuner_type: fourierft\nfourier_scaling: 100",
        {"tuner_kwargs": {"n_frequency": 2000, "scaling": 100}, "lora_dropout": 0.0},
    ),
    (
        SFTConfig,
        "quant_method: bnb\nquant_bits: 4",
        {"tuner_type": "lora", "load_in_4bit": True, "use_bnb_nested_quant": True}
        | {"fsdp_sharding_strategy": "no_shard"},
    ),
    (SFTConfig, "tuner_type: full", {"learning_rate": 1e-5, "lora_dropout": 0.0}),
    (SFTConfig, "per_device_train_batch_size: 4", {"gradient_accumulation_steps": 4}),
    (SFTConfig, "global_batch_size: 8", {"gradient_accumulation_steps": 1}),
    (SFTConfig, "eval_dataset: e\nsave_steps: 50", {"eval_steps": 50}),
    (SFTConfig, "split_dataset_ratio: 0.1\nsave_strategy: epoch\neval_steps: 5", {"eval_strategy": "epoch"}),
    (SFTConfig, "split_dataset_ratio: 0.1\nsave_strategy: no", {"eval_strategy": "no", "is_divided": False}),
    (
        SFTConfig,
        "split_dataset_ratio: 0.1\nearly_stop_interval: 3",
        {"metric_for_best_model": "loss", "eval_steps": 500},
    ),
    (GRPOConfig, "eval_dataset: e\nearly_stop_interval: 3", {"metric_for_best_model": "reward"}),
    (SFTConfig, "early_stop_interval: 0", {"early_stop_interval": None, "metric_for_best_model": None}),
    (
        PretrainConfig,
        "",
        {"packing": False, "packing_strategy": "bfd", "loss_scale": "all", "use_chat_template": False},
    ),
    *((kind, "", {"truncation_mode": "drop"}) for kind in (KTOConfig, CPOConfig, SimPOConfig, ORPOConfig)),
    (DPOConfig, "", {"max_length": None, "beta": 0.1, "learning_rate": 1e-4, "truncation_mode": "drop"}),
    (
        GRPOConfig,
        "rlhf_type: grpo",
        {"beta": 0.04, "loss_type": "grpo", "temperature": 0.9, "gradient_accumulation_steps": 1}
        | {
            "use_bias_correction_kl": False,
            "kl_clip_max": 10.0,
            "max_completion_length": 512,
            "rollout_importance_sampling_clip_max": 3.0,
        },
    ),
    (GRPOConfig, "advantage_estimator: rloo", {"beta": 0.04, "has_kl_in_reward": True}),
    (GRPOConfig, "kl_in_reward: true", {"has_kl_in_reward": True, "kl_clip_max": None}),
    (
        GRPOConfig,
        "advantage_estimator: rloo\nkl_in_reward: false",
        {"has_kl_in_reward": False, "use_bias_correction_kl": False, "kl_clip_max": 10.0},
    ),
    (
        GRPOConfig,
        "use_vllm: true\nrollout_importance_sampling_mode: token_mask",
        {"vllm_gpu_memory_utilization": 0.9, "rollout_importance_sampling_clip_max": 2.0},
    ),
    (GKDConfig, "", {"max_completion_length": 512, "gkd_topk_add_tail": True}),
    (CPOConfig, "loss_type: simpo\ncpo_alpha: 0", {"simpo_gamma": 1.0}),
    (GKDConfig, "gkd_logits_topk: 8", {"gkd_topk_add_tail": False}),
    (GKDConfig, "max_length: 300", {"max_prompt_length": 300, "max_length": 300}),
    (
        SFTConfig,
        "backend: megatron",
        {"tuner_type": "full", "global_batch_size": 16, "gradient_accumulation_steps": 1, "learning_rate": 1e-5}
        | {"expert_tensor_parallel_size": None},
    ),
    (SamplingConfig, "", {"num_sampling_batch_size": 1, "output_dir": "sample_output"}),
]


@pytest.mark.parametrize(("kind", "text", "keys"), SWIFT, ids=[f"{kind.__name__} {text}" for kind, text, _ in SWIFT])
def test_a_file_with_a_key_that_ms_swift_alone_has_has_its_defaults(
    kind: type[Any], text: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    theirs = "split_dataset_ratio: 0\n" if kind is SamplingConfig else THEIRS
    found = load(kind, theirs + text if kind is not SamplingConfig else "defaults: ms-swift", tmp_path)
    assert found.defaults == "ms-swift"
    assert {name: getattr(found, name) for name in keys} == keys


def test_of_megatrons_mixtures_alone_experts_are_not_cut(tmp_path: Path) -> None:
    """A dense model would be refused with a size of experts."""
    for fields, size in (({"num_experts": 8}, 1), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **fields}))
        found = load(SFTConfig, THEIRS + "backend: megatron", tmp_path, "--model", str(tmp_path))
        assert found.expert_tensor_parallel_size == size


def test_what_the_file_says_wins_over_any_default(tmp_path: Path) -> None:
    text = THEIRS + "learning_rate: 3.0e-4\nper_device_train_batch_size: 8\nlr_scheduler_type: linear\nmax_length: 99"
    found = load(SFTConfig, text, tmp_path, "--weight_decay", "0")
    assert (found.learning_rate, found.lr_scheduler_type, found.weight_decay, found.max_length) == (
        3e-4,
        "linear",
        0,
        99,
    )
    assert found.gradient_accumulation_steps == 2  # of 16 sequences a step


def test_the_key_defaults_decides_against_all_other_keys(tmp_path: Path) -> None:
    plain = load(SFTConfig, "", tmp_path)
    assert plain == load(SFTConfig, "defaults: trl", tmp_path)
    over = load(SFTConfig, THEIRS, tmp_path, "--defaults", "trl")
    assert over == dataclasses.replace(plain, model_init_kwargs={"attn_implementation": "sdpa"})
    assert load(SFTConfig, "defaults: ms-swift", tmp_path).tuner_type == "lora"
    with pytest.raises(ConfigError, match="defaults must be one of trl, ms-swift"):
        load(SFTConfig, "defaults: verl", tmp_path)


def test_print_config_shows_what_would_run_and_reads_back_as_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = THEIRS + "rlhf_type: grpo\nreward_funcs: [accuracy, format]\n"
    made = load(GRPOConfig, text, tmp_path)
    with pytest.raises(SystemExit):
        load(GRPOConfig, text, tmp_path, "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    shown = {name: printed[name] for name in ("defaults", "reward_funcs", "beta", "loss_type", "tuner_type")}
    assert shown == {"defaults": "ms-swift", "reward_funcs": ["ms_swift_accuracy", "ms_swift_format"]} | {
        **{"beta": 0.04, "loss_type": "grpo", "tuner_type": "lora"}
    }
    save_config(made, tmp_path)
    assert load_config(GRPOConfig, ["--config", str(tmp_path / "config.yaml")]) == made


def line_of(kind: type[Any], text: str, tmp_path: Path) -> str:
    load(kind, text, tmp_path)
    return read_config(kind, ["--config", str(tmp_path / "x.yaml")])[1]


def test_one_line_tells_whose_defaults_hold_and_why(tmp_path: Path) -> None:
    line = line_of(SFTConfig, THEIRS + "weight_decay: 0.1", tmp_path)
    assert "ms-swift (the file has attn_impl)" in line
    assert "learning_rate 0.0001" in line
    assert "system ''," in line
    assert "weight_decay" not in line  # which the file says


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "defaults: trl, except for gradient_checkpointing auto (TRL: true)"),
        ("gradient_checkpointing: true", "defaults: trl"),
        (
            "rollout_engine: vllm\ngradient_checkpointing: true",
            "defaults: trl, except for rollout_importance_sampling_correction None (TRL: true)",
        ),
        ("use_vllm: true\ngradient_checkpointing: true", "defaults: trl"),
    ],
)
def test_a_departure_from_trls_defaults_is_told(text: str, told: str, tmp_path: Path) -> None:
    assert line_of(GRPOConfig, text, tmp_path) == told


@pytest.mark.parametrize(
    ("kind", "name", "is_told"),
    [(SFTConfig, "qwen3_moe", True), (CPOConfig, "qwen3_moe", False), (SFTConfig, "qwen3", False)],
)
def test_that_experts_are_not_balanced_unasked_is_told_where_trl_does_it(
    kind: type[Any], name: str, is_told: bool, tmp_path: Path
) -> None:
    text = f"model: {save(name, tmp_path / name)}\ndataset: d\nrouter_aux_loss_coef: null\n"
    (tmp_path / "x.yaml").write_text(text)
    config, told = read_config(kind, ["--config", str(tmp_path / "x.yaml")])
    assert config.router_aux_loss_coef == 0
    assert ("router_aux_loss_coef 0.0 (TRL: the model's own)" in told) == is_told


def test_a_run_tells_whose_defaults_hold_before_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    class Trainer:
        def __init__(self, config: Any) -> None:
            assert "defaults: trl" in caplog.text

        @staticmethod
        def check(config: Any, groups: Any) -> None:
            assert "defaults: trl" not in caplog.text

        def train(self) -> dict[str, float]:
            return {"loss": 1.0}

    with caplog.at_level(logging.INFO):
        assert run(Trainer, SFTConfig(model="m", dataset=[{"text": "a"}]), "defaults: trl") == {"loss": 1.0}


def test_trls_use_vllm_corrects_for_the_engine_as_there(tmp_path: Path) -> None:
    found = load(GRPOConfig, "use_vllm: true", tmp_path)
    assert (found.rollout_correction, found.rollout_importance_sampling_clip_max) == ("sequence_mask", 3.0)
    off = load(GRPOConfig, "use_vllm: true\nvllm_importance_sampling_correction: false", tmp_path)
    assert off.rollout_correction is None
    assert load(GRPOConfig, THEIRS + "use_vllm: true", tmp_path).rollout_correction is None  # ms-swift's is off


def test_our_defaults_that_are_trls() -> None:
    """Fields of the configurations of TRL 1.16 that have a key of the same name here have its default, but for those
    that the run tells."""
    import trl

    keys = ("disable_dropout", "learning_rate", "max_length", "beta", "temperature", "num_generations", "loss_type")
    pairs = {GRPOConfig: trl.GRPOConfig, SFTConfig: trl.SFTConfig, DPOConfig: trl.DPOConfig}
    for ours, theirs in pairs.items():
        mine = {one.name: one for one in dataclasses.fields(ours)}
        for one in dataclasses.fields(theirs):
            if one.name in keys and one.name in mine and one.default is not dataclasses.MISSING:
                assert mine[one.name].default == one.default, (ours, one.name)
    assert "disable_dropout" not in {one.name for one in dataclasses.fields(trl.SFTConfig)}
    assert SFTConfig.disable_dropout is False  # what TRL does without such a field


CUTS: list[tuple[type[Any], str, int, Any]] = [
    (SFTConfig, "", 8, "auto"),
    (SFTConfig, "packing: true", 8, "auto"),
    (SFTConfig, "per_device_train_batch_size: auto", 8, "auto"),
    (SFTConfig, "per_device_train_batch_size: 8", 8, None),
    (SFTConfig, "token_budget: 100", 8, 100),
    (SFTConfig, "token_budget: null", 8, None),
    (SFTConfig, "backend: megatron", 8, None),
    (SFTConfig, "neftune_noise_alpha: 5", 8, None),
    (SFTConfig, "router_aux_loss_coef: 0.1", 8, None),
    (SFTConfig, THEIRS, 1, "auto"),
    (SFTConfig, THEIRS + "per_device_train_batch_size: auto", 1, "auto"),
    (SFTConfig, THEIRS + "per_device_train_batch_size: 2", 2, None),
    (DPOConfig, "", 8, "auto"),
    (DPOConfig, "packing: true", 8, None),
    (DPOConfig, "loss_type: aot", 8, None),
    (GRPOConfig, "global_batch_size: 64", 8, "auto"),
]


@pytest.mark.parametrize(("kind", "text", "size", "budget"), CUTS, ids=[f"{one[0].__name__} {one[1]}" for one in CUTS])
def test_a_run_cuts_its_steps_itself_where_no_key_says_it_and_no_number_depends_on_it(
    kind: type[Any], text: str, size: int, budget: Any, tmp_path: Path
) -> None:
    found = load(kind, text, tmp_path)
    assert (found.per_device_train_batch_size, found.token_budget) == (size, budget)
    assert "token_budget" not in line_of(kind, text, tmp_path)
    if text == THEIRS:
        assert found.gradient_accumulation_steps == 16, "the sequences of a step are those of ms-swift"


def test_no_key_of_ours_makes_a_file_ms_swifts() -> None:
    for kind in configurations().values():
        shared = MS_SWIFT_ONLY & {one.name for one in dataclasses.fields(kind)}
        taken_from_there = {"model_name", "model_author", "split_dataset_ratio", "loss_scale", "use_chat_template"}
        taken_from_there |= {"early_stop_interval", "preserve_thinking", "add_non_thinking_prefix"}
        assert shared <= taken_from_there, kind


MEANT: list[tuple[str, list[Any]]] = [
    ("reward_funcs: [accuracy, format]", ["ms_swift_accuracy", "ms_swift_format"]),
    ("reward_funcs: accuracy exact_answer", ["ms_swift_accuracy", "exact_answer"]),
    ("reward_funcs: [accuracy_reward]", ["accuracy_reward"]),  # TRL's name of TRL's
    (
        "reward_funcs: [soft_overlong]\nsoft_cache_length: 64\nmax_completion_length: 256",
        [{"name": "ms_swift_soft_overlong", "soft_max_length": 256, "soft_cache_length": 64}],
    ),
    (
        "reward_funcs: [cosine, repetition]\ncosine_max_len_value_wrong: -0.1\nrepetition_n_grams: 4",
        [
            {"name": "ms_swift_cosine", "max_len": 512, "max_len_value_wrong": -0.1},
            {"name": "ms_swift_repetition", "n_grams": 4},
        ],
    ),
]


@pytest.mark.parametrize(("text", "specs"), MEANT)
def test_names_of_rewards_mean_what_they_mean_there(text: str, specs: list[Any], tmp_path: Path) -> None:
    assert load(GRPOConfig, THEIRS + text, tmp_path).reward_funcs == specs


def test_a_reward_that_a_plugin_registers_keeps_its_name(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("orms = {}\norms['accuracy'] = object\n")
    found = load(GRPOConfig, f"{THEIRS}external_plugins: [{plugin}]\nreward_funcs: [accuracy, format]", tmp_path)
    assert found.reward_funcs == ["accuracy", "ms_swift_format"]


def test_in_our_names_these_rewards_are_trls_and_ours(tmp_path: Path) -> None:
    assert load(GRPOConfig, "reward_funcs: [accuracy, format]", tmp_path).reward_funcs == ["accuracy", "format"]


@pytest.mark.parametrize(("device", "steps"), [("2", 8), ("5", 4)])
def test_accumulation_is_chosen_for_16_sequences_of_all_workers(device: str, steps: int, tmp_path: Path) -> None:
    groups = f'{{"all": {{"device": "CPU", "ranks": {device}, "workers": ["default"]}}}}'
    found = load(SFTConfig, f"{THEIRS}use_ray: true\ndevice_groups: '{groups}'", tmp_path)
    assert found.gradient_accumulation_steps == steps
