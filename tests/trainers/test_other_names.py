"""What users of ms-swift write means the same here, or is refused by name with what to write instead."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import peft  # noqa: F401  (it sets a variable of the environment when it is first imported)
import pytest

from benchmarks.tiny.architectures import save
from rayhelper import ConfigError
from trainers.cli import load_config
from trainers.configuration.others.other_names import (
    ALIASES,
    ANY,
    ELSEWHERE,
    HINTS,
    NEUTRAL,
    REFUSED,
    TRANSLATED,
)
from trainers.configuration.reading.folders import configurations
from trainers.cpo.config import CPOConfig, ORPOConfig
from trainers.data.sources import read_source
from trainers.dpo.config import DPOConfig
from trainers.gkd.config import GKDConfig
from trainers.grpo.config import GRPOConfig
from trainers.kto.config import KTOConfig
from trainers.ppo.config import PPOConfig
from trainers.reward.config import RewardConfig
from trainers.sampling.config import SamplingConfig
from trainers.sft.config import PretrainConfig, SFTConfig

KINDS: list[type[Any]] = list(dict.fromkeys(configurations().values()))
KEYS = {field.name for kind in KINDS for field in dataclasses.fields(kind)}


def load(kind: type[Any], text: str, tmp_path: Path, *argv: str) -> Any:
    """The configuration of a YAML text beside the keys that must be given."""
    rewards = "reward_funcs: [format]\n" if kind in (GRPOConfig, PPOConfig) and "reward_funcs" not in text else ""
    whose = "" if "defaults:" in text else "defaults: trl\n"  # test_defaults.py is of those
    (tmp_path / "x.yaml").write_text(f"model: m\ndataset: d\n{whose}{rewards}{text}\n")
    return load_config(kind, ["--config", str(tmp_path / "x.yaml"), *argv])


def told(kind: type[Any], text: str, tmp_path: Path, *argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(kind, text, tmp_path, *argv)
    return str(error.value)


COSINE = {"name": "cosine_scaled", "max_len": 9, "min_value_wrong": -0.5, "max_value_wrong": 0.0}
COSINE |= {"min_value_correct": 0.5, "max_value_correct": 2.0}
VLLM, GPU, KWARGS = {"rollout_engine": "vllm"}, "vllm_gpu_memory_utilization", "vllm_engine_kwargs"
MEGATRON = {"backend": "megatron"}
SAME: list[tuple[type[Any], str, dict[str, Any]]] = [  # what is written, and our keys that say it
    (DPOConfig, "packing: true\ntruncation_strategy: left", {"packing": True, "truncation_mode": "keep_end"}),
    (SFTConfig, "torch_dtype: bfloat16", {"dtype": "bfloat16"}),
    (SFTConfig, "bf16: true", {"dtype": "bfloat16"}),
    (SFTConfig, "bf16: 'false'\nfp16: false", {"dtype": "float32"}),
    (SFTConfig, "bf16: true\ntorch_dtype: bfloat16", {"dtype": "bfloat16"}),
    (SFTConfig, "attn_impl: eager", {"model_init_kwargs": {"attn_implementation": "eager"}}),
    (GRPOConfig, "attention_backend: flash", {"model_init_kwargs": {"attn_implementation": "sdpa"}}),
    (GRPOConfig, "attention_backend: unfused", {"model_init_kwargs": {"attn_implementation": "eager"}}),
    (GRPOConfig, "attention_backend: auto", {}),
    (
        SFTConfig,
        "attn_impl: sdpa\nmodel_init_kwargs: {a: 1}",
        {"model_init_kwargs": {"a": 1, "attn_implementation": "sdpa"}},
    ),
    (SFTConfig, "lr: 1e-4\nmin_lr: 1e-4", {"learning_rate": 1e-4, "lr_scheduler_type": "constant_with_warmup"}),
    (
        SFTConfig,
        "lr: 1e-4\nmin_lr: 1e-5\nlr_warmup_fraction: 0.05",
        {"learning_rate": 1e-4, "warmup_ratio": 0.05, "lr_scheduler_type": "cosine_with_min_lr"}
        | {"lr_scheduler_kwargs": {"min_lr": 1e-5}},
    ),
    (
        SFTConfig,
        "lr: 1e-4\nmin_lr: 1e-5\nlr_decay_style: linear",
        {
            "learning_rate": 1e-4,
            "lr_scheduler_type": "polynomial",
            "lr_scheduler_kwargs": {"lr_end": 1e-5, "power": 1.0},
        },
    ),
    (SFTConfig, "min_lr: 0", {}),
    (SFTConfig, "lr_decay_style: cosine", {"lr_scheduler_type": "cosine"}),
    (SFTConfig, "lr_decay_style: constant\nmin_lr: 1e-6", {"lr_scheduler_type": "constant_with_warmup"}),
    (SFTConfig, "deepspeed: zero3", {}),
    (SFTConfig, "deepspeed: zero2", {"fsdp_reshard_after_forward": False}),
    (SFTConfig, "deepspeed: zero0", {"fsdp_sharding_strategy": "no_shard"}),
    (SFTConfig, "deepspeed: zero3_offload", {"fsdp_offload_params": True}),
    (
        SFTConfig,
        "recompute_granularity: full\nrecompute_method: uniform\nrecompute_num_layers: 1",
        {"gradient_checkpointing": True},
    ),
    (SFTConfig, "recompute_granularity: none", {"gradient_checkpointing": False}),
    (
        SFTConfig,
        "train_type: lora\ntarget_modules: q_proj k_proj",
        {"tuner_type": "lora", "lora_target_modules": ["q_proj", "k_proj"]},
    ),
    (SFTConfig, "target_modules: all-linear", {}),
    (
        SFTConfig,
        "tuner_type: lora\nuse_rslora: true\nuse_dora: false\ninit_weights: true",
        {"tuner_type": "lora", "lora_kwargs": {"use_rslora": True}},
    ),
    (
        SFTConfig,
        "train_type: adalora\nadalora_init_r: 16\nadalora_deltaT: 2\nboft_dropout: 0.1\nmodules_to_save: lm_head",
        {"tuner_type": "adalora", "tuner_kwargs": {"init_r": 16, "deltaT": 2, "modules_to_save": ["lm_head"]}},
    ),
    (SFTConfig, "tuner_type: boft\nboft_block_size: 8", {"tuner_type": "boft", "tuner_kwargs": {"boft_block_size": 8}}),
    (
        SFTConfig,
        "tuner_type: bone\nreft_rank: 6\ninit_weights: bat",
        {"tuner_type": "miss", "tuner_kwargs": {"r": 6, "init_weights": "bat"}},
    ),
    (
        SFTConfig,
        "tuner_type: vera\nvera_rank: 16\nvera_d_initial: 0.2",
        {"tuner_type": "vera", "tuner_kwargs": {"r": 16, "d_initial": 0.2}},
    ),
    (
        SFTConfig,
        "tuner_type: lora\nquant_method: bnb\nquant_bits: 4\ndtype: bfloat16\nbnb_4bit_compute_dtype: bfloat16\n"
        "bnb_4bit_use_double_quant: true\nbnb_4bit_quant_storage: bfloat16\ndeepspeed: zero2",
        {"load_in_4bit": True, "use_bnb_nested_quant": True, "fsdp_sharding_strategy": "no_shard"}
        | {"tuner_type": "lora", "dtype": "bfloat16"},
    ),
    (
        SFTConfig,
        "tuner_type: lora\nquant_method: bnb\nquant_bits: 8",
        {"tuner_type": "lora", "load_in_8bit": True},
    ),
    (
        SFTConfig,
        "tuner_type: lora\nmodules_to_save: embed_tokens lm_head",
        {"tuner_type": "lora", "lora_kwargs": {"modules_to_save": ["embed_tokens", "lm_head"]}},
    ),
    (
        SFTConfig,
        "backend: megatron\ntuner_type: lora\nmodules_to_save: word_embeddings output_layer",
        MEGATRON | {"tuner_type": "lora", "lora_kwargs": {"modules_to_save": ["embed_tokens", "lm_head"]}},
    ),
    (
        SFTConfig,
        "tuner_type: lora_llm\nfreeze_vit: true\nlora_dropout: 0.1\nvit_lr: 1.0e-5\ndefaults: trl",
        {"tuner_type": "lora", "lora_kwargs": {"modules_to_save": ["vit", "aligner"]}, "vit_lr": 1e-5},
    ),
    (
        SFTConfig,
        "backend: megatron\ntuner_type: lora\ntarget_modules: all-linear all-router\ndefaults: trl",
        MEGATRON | {"tuner_type": "lora", "lora_kwargs": {"target_parameters": ["mlp.gate.weight"]}},
    ),
    (
        SFTConfig,
        "backend: megatron\ntuner_type: lora_llm\nlora_dropout: 0.1\ndefaults: trl",
        MEGATRON | {"tuner_type": "lora", "lora_kwargs": {"modules_to_save": ["vit", "aligner"]}, "lora_dropout": 0.1},
    ),
    (SFTConfig, "model_kwargs: {max_pixels: 1003520, FPS_MAX_FRAMES: 12}", {}),  # a language model sees nothing
    (SFTConfig, "model_kwargs: {}", {}),
    (SFTConfig, "modules_to_save: [lm_head]", {}),  # every weight is trained
    (SFTConfig, "modules_to_save: []\ndecoder_first_pipeline_num_layers: null", {}),
    (SFTConfig, "truncation_strategy: left", {"truncation_mode": "keep_end"}),
    (SFTConfig, "truncation_strategy: right", {}),
    (PretrainConfig, "truncation_strategy: split", {}),
    (GRPOConfig, "truncation_strategy: left\nmax_length: 64", {"max_prompt_length": 64}),
    *(
        (kind, "truncation_strategy: delete\nmax_length: 64", {"max_prompt_length": 64, "drop_long_prompts": True})
        for kind in (GRPOConfig, PPOConfig)
    ),
    (RewardConfig, "truncation_strategy: delete", {}),
    *(
        (kind, "truncation_strategy: delete", {"truncation_mode": "drop"})
        for kind in (SFTConfig, DPOConfig, KTOConfig, CPOConfig, ORPOConfig)
    ),
    (SamplingConfig, "max_length: 64\nmax_new_tokens: 9", {"max_prompt_length": 64, "max_completion_length": 9}),
    (SFTConfig, "eval_steps: 10\nsplit_dataset_ratio: 0.0", {}),
    (SFTConfig, "eval_steps: 10\nsplit_dataset_ratio: 0\nval_dataset: e", {"eval_steps": 10, "eval_dataset": "e"}),
    (SFTConfig, "eval_strategy: 'no'\neval_steps: 10", {}),
    (SFTConfig, "save_strategy: no\nsave_steps: 10", {"save_strategy": "no"}),
    (SFTConfig, "save_strategy: steps\nsave_steps: 10\neval_strategy: steps", {"save_steps": 10}),
    (SFTConfig, "save_strategy: epoch\nsave_steps: 10\neval_strategy: epoch", {"save_strategy": "epoch"}),
    (
        SFTConfig,
        "eval_dataset: e\neval_strategy: epoch\neval_steps: 5\nsave_strategy: best\nload_best_model_at_end: true",
        {"eval_dataset": "e", "eval_strategy": "epoch", "save_strategy": "best"}
        | {"load_best_model_at_end": True, "metric_for_best_model": "loss"},
    ),
    (SFTConfig, "max_epochs: 5\nmax_steps: 9\ndefaults: trl", {"max_steps": 9, "end_after_epochs": 5}),
    (SFTConfig, "finetune: true\nno_save_optim: true\nno_save_rng: true", {}),
    (SFTConfig, "dataset_shuffle: false\ndata_seed: 42\npacking_length: 1024", {"shuffle_dataset": False}),
    (SamplingConfig, "data_seed: 7", {"dataset_seed": 7}),
    (SFTConfig, "enable_dft_loss: true", {"loss_type": "dft"}),
    (SFTConfig, "model_author: swift\nmodel_name: swift-bot", {"model_author": ["swift"], "model_name": ["swift-bot"]}),
    (SFTConfig, "deepspeed: zero1", {"fsdp_reshard_after_forward": False}),
    (SFTConfig, "split_dataset_ratio: 0.01", {"split_dataset_ratio": 0.01}),
    (GRPOConfig, "tensor_model_parallel_size: 2", {"backend": "megatron", "tensor_model_parallel_size": 2}),
    (SFTConfig, "eval_dataset: a.x b.x", {"eval_dataset": ["a.x", "b.x"]}),
    (GRPOConfig, "enable_thinking: false", {"chat_template_kwargs": {"enable_thinking": False}}),
    (GRPOConfig, "overlong_filter: true\ntau_pos: 1.0", {"mask_truncated_completions": True}),
    (
        GRPOConfig,
        "micro_batch_size: 2\nglobal_batch_size: 16\nsteps_per_generation: 4",
        {"per_device_train_batch_size": 2, "global_batch_size": 16, "generation_batch_size": 64},
    ),
    (
        GRPOConfig,
        "per_device_train_batch_size: 2\nglobal_batch_size: 16\nsteps_per_generation: 4",
        {"per_device_train_batch_size": 2, "global_batch_size": 16, "steps_per_generation": 4},
    ),
    (
        GRPOConfig,
        "reward_funcs: format soft_overlong\nmax_completion_length: 9\nsoft_cache_length: 3",
        {"max_completion_length": 9}
        | {"reward_funcs": ["format", {"name": "soft_overlong", "soft_max_length": 9, "soft_cache_length": 3}]},
    ),
    (
        GRPOConfig,
        "reward_funcs: [cosine]\ncosine_max_len: 9\ncosine_min_len_value_correct: 2.0",
        {"reward_funcs": [COSINE]},
    ),
    (GRPOConfig, "gym_env: lake\nuse_gym_env: true\nmulti_turn_scheduler: gym_scheduler", {"environment": "lake"}),
    (GRPOConfig, "multi_turn_scheduler: s", {"environment": "s", "environment_reward": False}),
    (GRPOConfig, "multi_turn_scheduler: s\nuse_gym_env: true", {"environment": "s", "environment_reward": True}),
    (
        GRPOConfig,
        "multi_turn_scheduler: s\ngym_env: lake\nmax_turns: 3",
        {"environment": {"name": "s", "gym_env": "lake"}, "max_turns": 3},
    ),
    (GKDConfig, "multi_turn_scheduler: math_tip_trick", {"environment": "math_tip_trick"}),
    (
        GKDConfig,
        "truncation_strategy: delete\nlmbda: 1\nmax_prompt_length: 9",
        {"drop_long_prompts": True, "lmbda": 1.0, "max_prompt_length": 9},
    ),
    (GRPOConfig, "rlhf_type: grpo", {}),
    (RewardConfig, "rlhf_type: rm", {}),
    (DPOConfig, "rlhf_type: dpo\nrpo_alpha: 0.1\nlora_rank: 8", {"rpo_alpha": 0.1}),
    (
        GKDConfig,
        "rlhf_type: gkd\nteacher_model: t\noffload_teacher_model: true",
        {"teacher_model": "t", "offload_teacher_model": True},
    ),
    (
        SFTConfig,  # Megatron's words for what fsdp does, and for what it does anyway
        "sequence_parallel: true\nuse_distributed_optimizer: false\noverlap_param_gather: true\n"
        "recompute_method: uniform",
        {},
    ),
    (SFTConfig, "recompute_granularity: null\ngradient_checkpointing: true", {"gradient_checkpointing": True}),
    (SFTConfig, "backend: megatron\nrecompute_granularity: full", MEGATRON | {"recompute_granularity": "full"}),
    (SFTConfig, "backend: megatron\nrecompute_granularity: none", MEGATRON),
    (SFTConfig, "backend: megatron\nsequence_parallel: true\nattention_backend: flash", MEGATRON),
    (
        SFTConfig,
        "backend: megatron\nmoe_router_fusion: true\nmegatron: {bucket_size: 1}",
        MEGATRON | {"megatron": {"bucket_size": 1, "moe_router_fusion": True}},
    ),
    (
        SFTConfig,  # Megatron's products in fp8
        "backend: megatron\nfp8_format: e4m3\nfp8_recipe: blockwise\nfp8_param_gather: true\n"
        "fp8_amax_history_len: 4\ndefaults: trl",
        MEGATRON | {"megatron": {"fp8": "e4m3", "fp8_recipe": "blockwise"}},
    ),
    (
        SFTConfig,  # without a format nothing is in fp8, and nothing predicts further tokens
        "backend: megatron\nfp8_recipe: blockwise\nmtp_num_layers: null\nlinear_decoupled_in_proj: true\ndefaults: trl",
        MEGATRON,
    ),
    (
        SFTConfig,
        "backend: megatron\ntuner_type: lora\ntarget_modules: [linear_qkv, linear_proj, mlp.gate_proj]\ndefaults: trl",
        MEGATRON
        | {"tuner_type": "lora", "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate_proj"]},
    ),
    (SFTConfig, "backend: megatron\nmegatron: null", MEGATRON | {"megatron": {}}),
    (
        SFTConfig,
        "backend: megatron\nmegatron:\nmoe_router_fusion: true",
        MEGATRON | {"megatron": {"moe_router_fusion": True}},
    ),
    (
        SFTConfig,
        "strategy_args: {strategy_name: megatron_train, strategy_config: {pipeline_model_parallel_size: 2}}",
        MEGATRON | {"pipeline_model_parallel_size": 2},
    ),
    (GRPOConfig, "use_vllm: true", {"rollout_engine": "vllm"}),
    (PPOConfig, "use_vllm: 'true'\nvllm_mode: colocate\nvllm_gpu_memory_utilization: 0.4", VLLM | {GPU: 0.4}),
    (GRPOConfig, "use_vllm: false\nrollout_engine: hf", {}),
    (GRPOConfig, "rollout_engine: transformers", {}),
    (
        GRPOConfig,  # what is none of our keys goes to vLLM under its own name
        "use_vllm: true\nvllm_kv_cache_dtype: fp8\nvllm_max_num_batched_tokens: '4096'\nvllm_max_num_seqs: 8",
        VLLM | {KWARGS: {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 4096}, "vllm_max_num_seqs": 8},
    ),
    (
        GRPOConfig,
        "rollout_engine: vllm\nvllm_engine_kwargs: '{\"a\": 1}'\n"
        "vllm_limit_mm_per_prompt: '{\"image\": 0}'\nvllm_quantization: null",
        VLLM | {KWARGS: {"a": 1, "limit_mm_per_prompt": {"image": 0}}},
    ),
    (GRPOConfig, "use_vllm: true\nvllm_engine_kwargs: null\nvllm_enable_prefix_caching: null", VLLM),
    (GRPOConfig, "use_vllm: true\nvllm_max_model_length: 640", VLLM | {"vllm_max_model_len": 640}),
    (GRPOConfig, "use_vllm: true\nvllm_enable_sleep_mode: true", VLLM | {"sleep_level": 2}),
    (
        GKDConfig,
        "offload_model: true\noffload_optimizer: true\nsleep_level: 1",
        {"offload_model": True, "offload_optimizer": True, "sleep_level": 1},
    ),
    (GRPOConfig, "async_generate: true", {"max_staleness": 1}),
    (GKDConfig, "async_generate: true", {"max_staleness": 1}),
    (
        SamplingConfig,
        'sampler_engine: client\nengine_kwargs: \'{"base_url": "http://h/v1", "seed": null}\'',
        {"sampler_engine": "client", "base_url": "http://h/v1", "engine_kwargs": {"seed": None}},
    ),
]


@pytest.mark.parametrize(("kind", "text", "keys"), SAME, ids=[text.replace("\n", ", ")[:60] for _, text, _ in SAME])
def test_others_keys_say_what_ours_say(kind: type[Any], text: str, keys: dict[str, Any], tmp_path: Path) -> None:
    if "use_vllm: true" in text and kind is GRPOConfig:
        keys = {"rollout_importance_sampling_correction": True} | keys  # as TRL's use_vllm means
    found = load(kind, text, tmp_path)
    if hasattr(found, "token_budget"):  # by default these follow from other keys: test_defaults.py
        keys = {name: getattr(found, name) for name in ("token_budget", "gradient_checkpointing")} | keys
    assert found == dataclasses.replace(load(kind, "", tmp_path), **keys)


def test_sampling_of_ms_swift_has_its_engine_and_its_reward(tmp_path: Path) -> None:
    found = load(SamplingConfig, "sampler_engine: vllm\norm_model: math", tmp_path)
    assert (found.engine, found.orm_model) == ("vllm", "ms_swift_math")
    assert "must be one of" not in told(SamplingConfig, "sampler_engine: lmdeploy", tmp_path)
    (tmp_path / "own.py").write_text("orms['math'] = object\n")
    own = load(SamplingConfig, f"orm_model: math\nexternal_plugins: {tmp_path}/own.py", tmp_path)
    assert own.orm_model == "math"


def test_a_file_may_hold_the_system_message(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be brief.\n")
    assert load(GRPOConfig, f"system: {tmp_path}/system.txt", tmp_path).system == "Be brief.\n"
    assert "there is no file" in told(GRPOConfig, f"system: {tmp_path}/sistem.txt", tmp_path)


def test_the_command_line_wins_over_what_the_file_means(tmp_path: Path) -> None:
    text = "attn_impl: flash_attn\nbf16: true\nmicro_batch_size: 2\nglobal_batch_size: 16\nsteps_per_generation: 4"
    found = load(GRPOConfig, text, tmp_path, "--model_init_kwargs.attn_implementation=eager", "--dtype=float32")
    assert (found.model_init_kwargs, found.dtype) == ({"attn_implementation": "eager"}, "float32")
    assert load(GRPOConfig, "dtype: float32", tmp_path, "--bf16", "true").dtype == "bfloat16"
    assert load(GRPOConfig, text, tmp_path, "--global_batch_size", "8").generation_batch_size == 32
    assert load(GRPOConfig, "use_vllm: true", tmp_path, "--rollout_engine", "hf").rollout_engine == "hf"
    assert load(GRPOConfig, "rollout_engine: hf", tmp_path, "--use_vllm", "true").rollout_engine == "vllm"
    text = "tuner_type: lora\nvllm_enable_lora: true\nuse_vllm: true\nvllm_quantization: fp8"
    quantized = load(GRPOConfig, text, tmp_path, "--vllm_quantization", "awq")
    assert quantized.vllm_engine_kwargs == {"quantization": "awq"}


def test_without_vllm_its_keys_do_not_matter_and_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "use_vllm: true\nvllm_max_model_len: 64\nvllm_kv_cache_dtype: fp8\n"
    text += "vllm_mode: server\nvllm_engine_kwargs: {a: 1}"
    with caplog.at_level(logging.INFO):
        assert load(GRPOConfig, text, tmp_path, "--use_vllm", "false") == load(GRPOConfig, "", tmp_path)
    told_of = "vllm_max_model_len, vllm_kv_cache_dtype, vllm_mode, vllm_engine_kwargs (use_vllm is false)"
    assert told_of in caplog.text


REFUSALS: list[tuple[type[Any], str, str]] = [
    (SFTConfig, "neftune_noise_alpha: 5\nbackend: megatron", "but backend megatron adds no noise to embeddings"),
    (SFTConfig, "neftune_noise_alpha: 5\npacking: true", "Set padding_free: true, or per_device_train_batch_size: 1"),
    (DPOConfig, "neftune_noise_alpha: 5", "only SFT and pretraining add noise to embeddings"),
    (SFTConfig, "fp16: true", "float16 is not offered. Write dtype: bfloat16"),
    (SFTConfig, "bf16: true\ndtype: float32", "bf16 means dtype: bfloat16, but dtype is float32; remove one"),
    (
        SFTConfig,
        "attn_impl: sdpa\nmodel_init_kwargs: {attn_implementation: eager}",
        "but attn_implementation there is eager",
    ),
    (SFTConfig, "lr: 1e-5\nmin_lr: 1e-4", "min_lr 0.0001 is above learning_rate 1e-05"),
    (SFTConfig, "min_lr: low", "min_lr must be a number, got 'low'"),
    (
        SFTConfig,
        "min_lr: 1e-6\nlr_scheduler_type: inverse_sqrt",
        "min_lr is not supported with lr_scheduler_type inverse_sqrt",
    ),
    (SFTConfig, "deepspeed: {a: 1}", "or the fsdp_* keys themselves"),
    (
        SFTConfig,
        "quant_method: hqq\nquant_bits: 4\nhqq_axis: 1",
        "hqq_axis: quant_method hqq is not supported, because",
    ),
    (SFTConfig, "quant_method: bnb", "quant_method bnb needs quant_bits: 4 or 8, got None"),
    (
        SFTConfig,
        "tuner_type: lora\nquant_method: bnb\nquant_bits: 4\ndtype: float32\nbnb_4bit_compute_dtype: bfloat16",
        "bnb_4bit_compute_dtype is bfloat16, but products are computed in dtype, which is float32",
    ),
    (SamplingConfig, "quant_method: bnb", "quant_method is not supported: nothing is trained here"),
    (SFTConfig, "tuner_type: llamapro", "tuner_type llamapro is not supported: of tuners there are lora, adalora,"),
    (SFTConfig, "train_type: longlora", "train_type longlora is not supported: of tuners there are lora, adalora,"),
    (SFTConfig, "tuner_type: qlora", "Write tuner_type: lora and load_in_4bit: true"),
    (SFTConfig, "use_galore: true", "use_galore is not supported: of tuners there are lora, adalora"),
    (SFTConfig, "lisa_activated_layers: 2", "lisa_activated_layers is not supported: of tuners there are lora"),
    (SFTConfig, "tuner_type: lora\ninit_weights: lora-ga", "lora-ga is not supported: it is no initialization of peft"),
    (
        SFTConfig,
        "tuner_type: lorra",
        "tuner_type must be one of full, lora, adalora, boft, fourierft, ia3, miss, vera, got 'lorra' (did you mean",
    ),
    (
        SFTConfig,
        "eval_dataset: e\neval_steps: 0.5\nmax_steps: 100",
        "write the number of optimizer steps; 0.5 of max_steps 100 is 50",
    ),
    (SFTConfig, "save_steps: 0.25\nmax_steps: 10", "0.25 of max_steps 10 is 3"),  # rounded up, as in transformers
    (SFTConfig, "logging_steps: 0.1", "logging_steps 0.1 is a share of the run, which is not supported"),
    (SFTConfig, "rlhf_type: no_such", "Write rayhelper rlhf (of ms-swift's commands: swift rlhf or megatron"),
    (SFTConfig, "backend: megatron\ndeepspeed: zero3", "deepspeed zero3 is of backend: fsdp"),
    (SFTConfig, "backend: megatron\nsequence_parallel_size: 2", "Write context_parallel_size: 2 in its place"),
    (SamplingConfig, "sequence_parallel_size: 2", "nothing is trained or scored by a backend here. Remove it"),
    (SFTConfig, "use_dist_checkpointing: true", "weights are converted by the backend itself"),
    (
        SFTConfig,
        "backend: megatron\nqk_clip: true",
        "unknown key qk_clip; fields of megatron-core belong into megatron: {",
    ),
    (SFTConfig, "backend: megatron\nmtp_num_layers: 1", "layers that predict further tokens are not trained"),
    (SFTConfig, "fp8_format: hybrid", "fp8_format is not supported: it is a setting of Megatron's"),
    (SFTConfig, "backend: megatron\nqk_clop: true", "unknown key qk_clop; --help"),  # no field of megatron-core either
    (
        SFTConfig,
        "backend: megatron\nrouter_aux_loss_coef: 0.01",
        "router_aux_loss_coef is 0.01, but backend is megatron. Write megatron: {",
    ),
    (SFTConfig, "tuner_type: lora\nmodules_to_save: all-embedding", "all-embedding is a word of ms-swift's"),
    (
        SFTConfig,
        "model_kwargs: {reasoning_effort: high}",
        "model_kwargs is not supported: RayHelper accepts only model_kwargs for",
    ),
    (
        SamplingConfig,
        "decoder_first_pipeline_num_layers: 3",
        "decoder_first_pipeline_num_layers is not supported: nothing is trained or scored by a backend here",
    ),
    (
        SFTConfig,
        "packing: true\nmax_length: 8\ntruncation_strategy: left",
        "is not supported: write right (rows keep their start)",
    ),
    (GRPOConfig, "truncation_strategy: delete", "drop_long_prompts needs max_prompt_length"),
    *(
        (kind, "completion_length_limit_scope: per_round", "only GRPO and GKD have completions of several turns")
        for kind in (PPOConfig, SFTConfig, DPOConfig, SamplingConfig)
    ),
    (GRPOConfig, "truncation_strategy: right", "write left: long rows are cut at the beginning of their prompt"),
    (SFTConfig, "save_strategy: epochs", "save_strategy must be one of steps, epoch, best, no, got 'epochs' (did you"),
    (SFTConfig, "save_strategy: best", "save_strategy best saves the best model so far. Set metric_for_best_model"),
    (
        SFTConfig,
        "split_dataset_ratio: 0.1\nsave_strategy: best\nmetric_for_best_model: loss\nearly_stop_interval: 2",
        "early_stop_interval counts checkpoints that are not better, and save_strategy best saves none of them",
    ),
    (
        SFTConfig,
        "split_dataset_ratio: 0.1\nload_best_model_at_end: true\neval_strategy: epoch",
        "save_strategy and eval_strategy must be the same; got steps and epoch",
    ),
    (SFTConfig, "data_seed: 7", "seed is also the seed of the data"),
    (SFTConfig, "enable_thinking: false", "Write a chat_template"),
    (SFTConfig, "max_new_tokens: 3", "another name of max_completion_length, which is not a key of this trainer"),
    (SFTConfig, "dataset_shufle: true", "did you mean dataset_shuffle?"),
    (SFTConfig, "recompute_granlarity: full", "did you mean recompute_granularity?"),
    (GRPOConfig, "soft_cache_length: 3", "it belongs to the reward soft_overlong. Name that in reward_funcs"),
    (GRPOConfig, "repetition_n_grams: 3", "ms-swift's reward counts repeated words, TRL's repeated tokens"),
    (GRPOConfig, "stop_words: [x]", "a completion ends with a token, not with text: write stop_token_ids"),
    (PPOConfig, "stop: [x]", "write stop_token_ids, a list of ids of the tokenizer"),
    (GRPOConfig, "multi_turn_scheduler: math_tip_trick\nenvironment: lake", "not together with environment"),
    (GKDConfig, "multi_turn_scheduler: thinking_tips_scheduler", "it makes a sample of each turn"),
    (PPOConfig, "multi_turn_scheduler: math_tip_trick", "GRPO and GKD have it"),
    (GRPOConfig, "use_gym_env: true", "write environment: name"),
    (
        GRPOConfig,
        "rlhf_type: gkd",
        "rlhf_type is gkd, but this is rayhelper grpo. Write rayhelper rlhf",
    ),
    (SFTConfig, "rlhf_type: dpo", "rlhf_type is dpo, but this is rayhelper sft"),
    (GRPOConfig, "use_vllm: 'yes'", "use_vllm must be true or false, got 'yes'"),
    (GRPOConfig, "use_vllm: true\nrollout_engine: hf", "use_vllm means rollout_engine: vllm, but rollout_engine is hf"),
    (GRPOConfig, "use_vllm: true\nvllm_mode: server", "give rollout its own device group"),
    (GRPOConfig, "use_vllm: true\nvllm_server_host: h\nvllm_server_port: [1]", "vllm_server_host and vllm_server_port"),
    (GRPOConfig, "use_vllm: true\nvllm_data_parallel_size: 2", "every vllm_tensor_parallel_size workers"),
    (GRPOConfig, "vllm_kv_cache_dtype: fp8", "vllm_kv_cache_dtype needs rollout_engine: vllm, which is use_vllm: true"),
    (GRPOConfig, "vllm_max_num_seqs: 8", "vllm_max_num_seqs needs rollout_engine: vllm, but it is hf"),
    (
        GRPOConfig,
        "use_vllm: true\nvllm_quantization: fp8\nvllm_engine_kwargs: {quantization: awq}",
        "vllm_quantization means vllm_engine_kwargs: {quantization: fp8}, but quantization there is awq",
    ),
    (GRPOConfig, "vllm_enable_sleep_mode: true\nsleep_level: 1", "vllm_enable_sleep_mode means sleep_level: 2, but"),
    (
        GRPOConfig,
        "async_generate: true\nmax_staleness: 2",
        "async_generate means max_staleness: 1, but max_staleness is 2",
    ),
    (PPOConfig, "async_generate: true", "completions are drawn by the policy as it is"),
    (GKDConfig, "vllm_importance_sampling_mode: token_mask", "another name of rollout_importance_sampling_mode"),
    (SFTConfig, "use_vllm: true", "vLLM completes prompts only in GRPO, PPO and GKD"),
    (
        GRPOConfig,
        "backend: fsdp\ntensor_model_parallel_size: 2",
        "fsdp_sharding_strategy: full_shard shards weights",
    ),
    (GRPOConfig, "tensor_model_parallel_size: true", "tensor_model_parallel_size must be a whole number, got true"),
    (SFTConfig, "vllm_max_model_len: 9\nvllm_x: 1", "vllm_max_model_len and vllm_x are not supported: vLLM completes"),
    (GRPOConfig, "moe_grouped_gemm: true", "moe_grouped_gemm is True, but backend is fsdp"),
    (GRPOConfig, "moe_permute_fusion: true", "it is a setting of Megatron's"),
    (SFTConfig, "lora_bias: all", 'lora_bias is not supported: what is done here is "none". Write that'),
    (GRPOConfig, "actor_rollout_ref: {actor: {optim: {lr: 1}}}", "translate FILE --from verl"),
    (SamplingConfig, "sampler_engine: lmdeploy", "sampler_engine lmdeploy is not supported: write vllm, or hf"),
    (SamplingConfig, "orm_model: toolbench", "register a function of yours in a file of external_plugins"),
]


@pytest.mark.parametrize(
    ("kind", "text", "words"), REFUSALS, ids=[text.replace("\n", ", ")[:60] for _, text, _ in REFUSALS]
)
def test_what_has_no_meaning_is_refused_with_what_to_write(
    kind: type[Any], text: str, words: str, tmp_path: Path
) -> None:
    if "dataset:" in text:
        (tmp_path / "x.yaml").write_text(f"model: m\n{text}\n")
        with pytest.raises(ConfigError) as error:
            load_config(kind, ["--config", str(tmp_path / "x.yaml")])
        assert words in str(error.value)
    else:
        assert words in told(kind, text, tmp_path)


@pytest.mark.parametrize(
    ("kind", "key"),
    [(kind, "truncation_strategy") for kind in (SFTConfig, PretrainConfig, DPOConfig)] + [(SFTConfig, "deepspeed")],
)
def test_a_refused_value_names_all_that_are_accepted_and_no_other(kind: type[Any], key: str, tmp_path: Path) -> None:
    candidates = ["left", "right", "delete", "split", *(f"zero{n}{end}" for n in range(5) for end in ("", "_offload"))]
    accepted = []
    for value in candidates:
        try:
            load(kind, f"{key}: {value}", tmp_path)
        except ConfigError:
            continue
        accepted.append(value)
    named = set(re.findall(r"\w+", told(kind, f"{key}: other", tmp_path).lower().partition("write ")[2]))
    assert accepted
    assert [value for value in candidates if value in named] == accepted


def test_modules_to_save_are_saved_where_an_adapter_is_ms_swifts_default(tmp_path: Path) -> None:
    config = load(SFTConfig, "defaults: ms-swift\nmodules_to_save: [lm_head]", tmp_path)
    assert (config.tuner_type, config.lora_kwargs) == ("lora", {"modules_to_save": ["lm_head"]})


@pytest.mark.parametrize("kind", [SFTConfig, GRPOConfig])
def test_a_neutral_value_changes_nothing_and_is_not_spoken_of(
    kind: type[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {field.name for field in dataclasses.fields(kind)}
    given = {name: True if values is ANY else values[0] for name, values in NEUTRAL.items() if name not in keys}
    with caplog.at_level(logging.INFO):
        for argv in ([], [f"--{name}={'null' if value is None else value}" for name, value in given.items()]):
            text = "" if argv else "\n".join(f"{name}: {_yaml(value)}" for name, value in given.items())
            assert load(kind, text, tmp_path, *argv) == load(kind, "", tmp_path)
    assert caplog.text == ""


def _yaml(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def test_hints_change_nothing_and_are_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {field.name for field in dataclasses.fields(GRPOConfig)}
    with caplog.at_level(logging.INFO):
        found = load(GRPOConfig, "\n".join(f"{name}: 4" for name in HINTS if name not in keys), tmp_path)
    assert found == load(GRPOConfig, "", tmp_path)
    (record,) = caplog.records
    assert [name for name in HINTS if name not in keys and name not in record.getMessage()] == []
    assert "no_save_optim, no_save_rng, save_only_model (checkpoints hold" in record.getMessage()


def test_all_refused_keys_are_told_at_once_each_by_its_name(tmp_path: Path) -> None:
    keys = {field.name for field in dataclasses.fields(SFTConfig)}
    placeholders = {"model_name", "model_author"}  # refused with the dataset that has some
    translated = {"enable_dft_loss"}
    unread = {"eval_iters"}  # without eval_dataset
    unread |= {name for name in REFUSED if name.startswith(("muon_", "sgd_"))}  # with another optimizer
    written = [name for name in REFUSED if name not in keys | placeholders | translated | unread]
    message = told(SFTConfig, "\n".join(f"{name}: 7" for name in written), tmp_path)
    assert [name for name in written if name not in message] == []
    assert "unknown key" not in message


def test_no_name_is_in_two_tables_and_every_alias_names_a_key() -> None:
    assert set(ALIASES.values()) <= KEYS
    assert {*ELSEWHERE, *ELSEWHERE.values()} - {"data_seed"} <= KEYS
    assert not set(ALIASES) & {*KEYS, *NEUTRAL, *HINTS, *REFUSED, *TRANSLATED}
    assert not set(HINTS) & {*REFUSED, *TRANSLATED}  # one whose default asks for what is done needs no line there


def test_the_table_of_equivalents_knows_every_alias_and_every_key_that_it_names() -> None:
    text = (Path(__file__).parents[2] / "docs" / "equivalents.md").read_text()
    ms_swift = text[text.index("## ms-swift") : text.index("## ROLL")]
    vllm = {name for name in ALIASES if name.startswith("vllm_importance_sampling_")}  # one row for all
    assert [
        name for name in {*ALIASES, *ELSEWHERE} - vllm - {"lora_r", "eval_before_train"} if f"`{name}" not in ms_swift
    ] == []
    groups = {"device_groups", "ranks", "nproc_per_node", "nnodes"}  # placement, and what is no key
    words = {"apo_zero", "sigmoid_norm", "soft_overlong", "cosine_scaled", "repetition_penalty", "device_mapping"}
    words |= {"ms_swift_accuracy", "drop", "accuracy"}
    for row in (line.split("|")[2] for line in text.splitlines() if line.startswith("| `")):
        for name in re.findall(r"`([a-z_]+)(?::[^`]*)?`", row):
            assert name in KEYS | groups | words | NAMES_OF_VALUES, row


NAMES_OF_VALUES = {  # that stand in the column of our keys
    *("gpg", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "sequence_truncate", "sequence_mean_k3"),
    *("true", "false", "float32", "keep_end", "megatron", "vllm", "sglang", "gae", "seed"),
}


@pytest.mark.parametrize(("name", "is_left_out"), [("nemotron_h", True), ("qwen3_moe", False), ("qwen3", False)])
def test_a_loss_that_a_class_lacks_and_ms_swift_ignores_is_left_out_with_a_line(
    name: str, is_left_out: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save(name, tmp_path)
    keys = f"model: {model}\ndataset: d\nrouter_aux_loss_coef: 0.01\n"
    for whose, coef in (("trl", 0.01), ("ms-swift", 0.0 if is_left_out else 0.01)):
        (tmp_path / "x.yaml").write_text(f"{keys}defaults: {whose}\n")
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert load_config(SFTConfig, ["--config", str(tmp_path / "x.yaml")]).router_aux_loss_coef == coef
        assert ("NemotronHForCausalLM of transformers adds no such loss" in caplog.text) == (coef == 0)


def test_so_many_rows_of_a_dataset_are_drawn_without_repetition_and_alike_in_every_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"text": "{k}"}}\n' for k in range(5)))
    three = read_source(f"{file}#3")["text"]
    assert len(set(three)) == 3
    assert read_source(f"{file}#3")["text"] == three
    twelve = read_source(f"{file}#12")["text"]
    assert sorted(twelve.count(str(k)) for k in range(5)) == [2, 2, 2, 3, 3]
    with pytest.raises(ConfigError, match=r"there is no file .*row\.jsonl.*Did you mean .*rows\.jsonl"):
        SFTConfig(model="m", dataset=f"{tmp_path}/row.jsonl#3")
