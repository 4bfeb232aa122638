"""Keys of ``backend: megatron``: what each becomes, and what is refused before any process starts."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
import re
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import peft  # noqa: F401  (it sets a variable of the environment when it is first imported)
import pytest
import torch
from transformers import AutoConfig

from rayhelper import ConfigError, DeviceGroups, RayHelper
from rayhelper.planning.model_shape import ModelShape
from tests.conftest import without_runtime
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.megatron import fields as megatron_fields
from trainers.backends.megatron import layers
from trainers.backends.megatron.architectures import architecture_mistakes
from trainers.backends.megatron.fields import (
    AUX,
    BALANCING,
    ELSEWHERE,
    OF_BACKEND,
    OF_MODEL,
    UNREAD,
    Z,
    check_fields,
    divided,
    known_fields,
)
from trainers.backends.megatron.layers import implementation
from trainers.backends.megatron.settings import MegatronSettings, layout_mistakes, setting_mistakes
from trainers.backends.own_code import own_code_mistake
from trainers.cli import load_config
from trainers.configuration.megatron import MegatronConfig
from trainers.configuration.megatron_checks import check_megatron, models_of, shape_of
from trainers.configuration.shared import TrainConfig, megatron_settings
from trainers.dpo.config import DPOConfig
from trainers.dpo.trainer import DPOTrainer
from trainers.gkd.config import GKDConfig
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.parts.engine import build_engine
from trainers.parts.model_checks import check_vision_model, check_whole, configuration_of
from trainers.parts.models import build_backend, num_shards
from trainers.ppo.config import PPOConfig
from trainers.sft.config import SFTConfig
from trainers.sft.trainer import SFTTrainer

DENSE = {
    **{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 97},
    **{"num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 96},
}
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 41}
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"


def config(kind: type[Any] = TrainConfig, **keys: Any) -> Any:
    return kind(**{"model": "m", "dataset": "d", "backend": "megatron", **keys})


def folder(tmp_path: Path, shape: dict[str, Any], name: str = "model") -> str:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(shape))
    return str(tmp_path / name)


def gpus(roles: str, num_workers: int = 8) -> DeviceGroups:
    return DeviceGroups.single(roles.split(), "GPU", num_workers)


# What keys become


def test_every_key_but_the_mapping_reaches_the_setting_of_its_name() -> None:
    keys: dict[str, Any] = {
        **{TP: 2, PP: 3, VPP: 4, FIRST: 8, LAST: 4, CP: 5, EP: 6, ETP: 7, "sequence_parallel": True},
        **{"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        **{"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True, "moe_layer_recompute": True},
        **{"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        **{"param_offload": True, "grad_offload": True, "optimizer_offload": True, "infer_batch_size": 9},
    }
    settings = megatron_settings(config(**keys))
    found = {name: getattr(settings, name) for name in keys}
    assert found == {**keys, "recompute_modules": ("core_attn", "mlp")}
    full = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    assert {name: getattr(megatron_settings(config(**full)), name) for name in full} == full
    assert pickle.loads(pickle.dumps(settings)) == settings
    names = {one.name for one in dataclasses.fields(MegatronSettings)} - {"transformer", "ddp", "optimizer"}
    assert names == {one.name for one in dataclasses.fields(MegatronConfig)} - {"megatron", "async_save"} | {
        "optimizer_offload"
    }
    assert names == {*keys, *full}


def test_the_defaults_of_settings_are_those_of_keys() -> None:
    assert megatron_settings(config()) == MegatronSettings()


# keys, and fields of TransformerConfig that they set
TRANSFORMER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {TP: 1, PP: 1, VPP: None, CP: 1, EP: 1, "sequence_parallel": False, "recompute_granularity": None}),
    ({TP: 2}, {TP: 2, "sequence_parallel": True}),
    ({TP: 2, "sequence_parallel": False}, {TP: 2, "sequence_parallel": False}),
    ({PP: 2}, {PP: 2, VPP: None, "overlap_p2p_comm": False, "batch_p2p_comm": True}),
    ({PP: 2, VPP: 1}, {PP: 2, VPP: None, "batch_p2p_comm": True}),
    ({PP: 2, VPP: 2}, {PP: 2, VPP: 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}),
    (
        {PP: 4, FIRST: 1, LAST: 3},
        {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3},
    ),
    ({PP: 2, FIRST: 1, LAST: 7}, {"num_layers_in_first_pipeline_stage": 1}),
    ({CP: 4}, {CP: 4}),
    ({TP: 2, EP: 2, ETP: 1}, {EP: 2, ETP: 1, "moe_token_dispatcher_type": "alltoall"}),
    ({"moe_token_dispatcher_type": "allgather"}, {"moe_token_dispatcher_type": "allgather"}),
    ({"moe_grouped_gemm": True}, {"moe_grouped_gemm": True}),
    (
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    (
        {"gradient_checkpointing": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    (
        {"gradient_checkpointing": True, "recompute_granularity": "full", "recompute_num_layers": 2},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    ),
    (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
    ),
    (
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"], "recompute_num_layers": None},
    ),
    (
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
    ),
    ({"moe_layer_recompute": True}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    (
        {"moe_layer_recompute": True, "recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    ),
    (
        {"megatron": {"moe_expert_capacity_factor": 1.5, "deallocate_pipeline_outputs": True}},
        {"moe_expert_capacity_factor": 1.5, "deallocate_pipeline_outputs": True},
    ),
]


def with_mapping(of: TrainConfig) -> MegatronSettings:
    return dataclasses.replace(megatron_settings(of), **divided(of.megatron))


@pytest.mark.parametrize(("keys", "expected"), TRANSFORMER, ids=lambda value: str(value)[:70])
def test_megatron_cores_own_configuration_takes_what_keys_become(
    keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = with_mapping(config(**keys))
    sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "num_moe_experts": 8}
    dtypes = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}  # grouped products' too
    others = {"add_bias_linear": False, "ffn_hidden_size": 96}
    made = TransformerConfig(**sizes, **dtypes, **others, **settings.transformer_fields)
    assert {name: getattr(made, name) for name in expected} == expected


def test_ddp_and_optimizer_take_what_keys_become() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    more = {"bucket_size": 10, "check_for_nan_in_grad": True, "apply_wd_to_qk_layernorm": True}
    settings = with_mapping(config(**overlapped, megatron=more))
    ddp = DistributedDataParallelConfig(**settings.ddp_fields)
    assert (ddp.use_distributed_optimizer, ddp.overlap_grad_reduce, ddp.overlap_param_gather) == (True, True, True)
    assert (ddp.bucket_size, ddp.check_for_nan_in_grad) == (10, True)
    optimizer = OptimizerConfig(**settings.optimizer_fields)
    assert (optimizer.use_distributed_optimizer, optimizer.overlap_param_gather) == (True, True)
    assert optimizer.apply_wd_to_qk_layernorm
    plain = megatron_settings(config(use_distributed_optimizer=False))
    assert not DistributedDataParallelConfig(**plain.ddp_fields).use_distributed_optimizer
    assert not OptimizerConfig(**plain.optimizer_fields).use_distributed_optimizer


def test_the_sizes_are_those_that_plans_reckon_with() -> None:
    sizes = megatron_settings(config(**{TP: 2, PP: 2, VPP: 2, EP: 2})).sizes(16)
    assert (sizes.tensor, sizes.pipeline, sizes.context, sizes.data) == (2, 2, 1, 4)
    assert (sizes.expert, sizes.expert_tensor, sizes.virtual_pipeline, sizes.sequence) == (2, 2, 2, True)


# Values that break each other

KEY_MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({TP: 0}, [f"{TP} must be at least 1, got 0"]),
    ({"infer_batch_size": 0}, ["infer_batch_size must be at least 1"]),
    ({"recompute_num_layers": 0}, ["recompute_num_layers must be at least 1"]),
    ({"backend": "megatorn"}, ["backend must be one of fsdp, megatron", "Did you mean 'megatron'?"]),
    ({"moe_token_dispatcher_type": "deepep"}, ["must be one of alltoall, allgather, flex"]),
    ({"moe_token_dispatcher_type": "flex"}, ["TransformerEngine", "DeepEP", "Write alltoall or allgather"]),
    ({"recompute_method": "uniform"}, ["recompute_method is uniform", "recompute_granularity is null", "full"]),
    ({"recompute_granularity": "selective", "recompute_num_layers": 1}, ["recompute_num_layers is 1", "selective"]),
    ({"recompute_granularity": "full", "recompute_method": "recompute"}, ["must be one of uniform, block"]),
    ({"recompute_granularity": "full", "recompute_method": "block"}, ["block needs recompute_num_layers"]),
    ({"recompute_modules": ["mlp"]}, ["recompute_modules is ['mlp']", "Write recompute_granularity: selective"]),
    ({"recompute_granularity": "selective", "recompute_modules": ["attn"]}, ["core_attn, layernorm, mlp", "['attn']"]),
    ({"recompute_granularity": "selective", "recompute_modules": []}, ["none of them"]),
    ({"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, ["must be among", "mla_up_proj"]),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, ["moe_act", "moe_grouped_gemm: true"]),
    ({"recompute_granularity": "full", "moe_layer_recompute": True}, ["moe_layer_recompute", "Remove one"]),
    ({"gradient_checkpointing": True, "moe_layer_recompute": True}, ["Remove moe_layer_recompute"]),
    ({"gradient_checkpointing": True, "recompute_granularity": "selective"}, ["gradient_checkpointing", "Remove one"]),
    ({"overlap_param_gather": True}, ["overlap_grad_reduce: true; got true and false"]),
    (
        {"overlap_param_gather": True, "overlap_grad_reduce": True, "use_distributed_optimizer": False},
        ["use_distributed_optimizer: true", "got false and true"],
    ),
    ({"token_budget": "auto"}, ["token_budget: auto", "backend: fsdp", "Write a number"]),
    ({"infer_batch_size": 4, "token_budget": 99}, ["infer_batch_size is 4", "token_budget", "Remove one"]),
    ({"optim": "adafactor"}, ["optim is adafactor", "adamw_torch, sgd"]),
    ({"optim": "adamw_torch_fused"}, ["optim is adamw_torch_fused", "adamw_torch, sgd"]),
    ({"optim": "sgd"}, ["optim: sgd", "use_distributed_optimizer: false"]),
    ({"optim_kwargs": {"amsgrad": True}}, ["optim_kwargs holds amsgrad", "adamw_torch"]),
    (
        {"optim": "sgd", "use_distributed_optimizer": False, "optim_kwargs": {"nesterov": True}},
        ["optim_kwargs holds nesterov", "takes momentum"],
    ),
    ({"fsdp_offload_params": True}, ["fsdp_offload_params is True", "backend is megatron"]),
    ({"fsdp_sharding_strategy": "no_shard"}, ["fsdp_sharding_strategy is 'no_shard'", "backend is megatron"]),
    ({"torch_compile": True}, ["torch_compile is True", "backend is megatron"]),
    (
        {"torch_compile": False, "activation_memory_budget": 0.5},
        ["activation_memory_budget is 0.5", "backend is megatron"],
    ),
    ({"model_init_kwargs": {"attn_implementation": "eager"}}, ["model_init_kwargs", "builds the model itself"]),
]


@pytest.mark.parametrize(("keys", "told"), KEY_MISTAKES, ids=lambda value: str(value)[:70])
def test_keys_that_break_each_other_are_told_with_what_to_write(keys: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config(**keys)
    for words in told:
        assert words in str(error.value)


def test_what_is_legal_has_no_mistake() -> None:
    config(optim="sgd", use_distributed_optimizer=False, optim_kwargs={"momentum": 0.9}, padding_free=False)
    config(padding_free=True, tuner_type="lora", gradient_checkpointing=True, recompute_granularity="full")
    hf = {"reward_funcs": ["format"], "model_init_kwargs": {"attn_implementation": "eager"}}
    config(GRPOConfig, **hf)  # the hf engine's model is transformers'
    for keys, _ in TRANSFORMER:
        assert list(setting_mistakes(megatron_settings(config(**keys)))) == []


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(MegatronConfig)])
def test_no_key_of_megatron_is_passed_over_by_fsdp(name: str) -> None:
    other: dict[str, Any] = {"moe_token_dispatcher_type": "allgather", "use_distributed_optimizer": False}
    other |= {"recompute_granularity": "full", "recompute_method": "block", "recompute_modules": ["mlp"]}
    other |= {"megatron": {"bucket_size": 1}}
    default = getattr(MegatronConfig(), name)
    value = other.get(name, True if default is False or name == "sequence_parallel" else 2)
    with pytest.raises(ConfigError, match=rf"^{name} is .*, but backend is fsdp.*Set backend: megatron"):
        config(backend="fsdp", **{name: value})


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(MegatronConfig)])
def test_a_key_of_megatron_in_a_file_has_its_type_under_fsdp_too(name: str, tmp_path: Path) -> None:
    file, value = tmp_path / "x.yaml", "[[xxxx]]" if name == "recompute_modules" else "xxxx"
    for written in ("model: m\n", "model: m\nbackend: fsdp\n"):
        file.write_text(f"{written}dataset: d\n{name}: {value}\n")
        with pytest.raises(ConfigError, match=rf"^{re.escape(str(file))}: {name} must be [^\n]*got [^\n]*xxxx[^\n]*$"):
            load_config(SFTConfig, ["--config", str(file)])


# Workers and models

LAYOUT_MISTAKES: list[tuple[dict[str, Any], dict[str, Any], int, list[str]]] = [
    ({TP: 2, PP: 2}, DENSE, 6, [f"{TP} 2 x {PP} 2 x {CP} 1 = 4 does not divide the 6 workers of role 'train'"]),
    (
        {TP: 2},
        DENSE,
        1,
        ["the 1 workers of role 'train'", "multiple of 2 workers (torchrun --nproc-per-node, or use_ray"],
    ),
    ({CP: 16}, DENSE, 8, ["= 16 does not divide the 8 workers", "multiple of 16"]),
    ({TP: 8}, DENSE, 8, ["num_key_value_heads 4", "among 1, 2, 4"]),
    ({TP: 2}, {**DENSE, "intermediate_size": 95}, 8, ["intermediate_size 95", "among 1, 5, 19, 95"]),
    ({PP: 8}, {**DENSE, "num_hidden_layers": 12}, 8, ["num_hidden_layers 12", "among 1, 2, 3, 4, 6, 12"]),
    ({PP: 4, VPP: 4}, DENSE, 8, [f"{VPP} 4", "num_hidden_layers 8"]),
    ({VPP: 2}, DENSE, 8, [f"{VPP} 2", f"{PP} is 1", "Remove it"]),
    ({"sequence_parallel": True}, DENSE, 8, ["sequence_parallel", f"{TP} is 1", "Remove it"]),
    ({TP: 2, "sequence_parallel": False}, MOE, 8, ["mixture of experts", "Write sequence_parallel: true"]),
    ({TP: 2, ETP: 1}, MOE, 8, [f"{ETP} 1", f"{EP} is 1", "reduces the experts' gradients over the wrong workers"]),
    ({EP: 16}, MOE, 8, [f"{EP} 16", "does not divide the 8 workers", "among 1, 2, 4, 8"]),
    ({EP: 4}, {**MOE, "num_experts": 6}, 8, ["num_experts 6", "among 1, 2, 3, 6"]),
    ({EP: 2, ETP: 3}, MOE, 6, ["moe_intermediate_size 32", "among 1, 2, 4, 8, 16, 32"]),
    ({TP: 2, EP: 2, ETP: 1}, SHARED, 8, ["shared_expert_intermediate_size 41", "among 1, 41"]),
    ({EP: 2}, DENSE, 8, [f"{EP} 2", "the model has none", "Remove it"]),
    ({ETP: 1}, DENSE, 8, [f"{ETP}: fields of experts", "no model of backend: megatron has experts"]),
    ({"moe_grouped_gemm": True}, DENSE, 8, ["moe_grouped_gemm: fields of experts"]),
    ({"moe_token_dispatcher_type": "allgather"}, DENSE, 8, ["moe_token_dispatcher_type: fields of experts"]),
    ({"moe_layer_recompute": True}, DENSE, 8, ["moe_layer_recompute: fields of experts"]),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, DENSE, 8, ["recompute_modules moe"]),
    ({"megatron": {"moe_expert_capacity_factor": 1.0}}, DENSE, 8, ["moe_expert_capacity_factor: fields of experts"]),
    ({PP: 4, "recompute_granularity": "full", "recompute_num_layers": 3}, DENSE, 8, ["the 2 layers of a stage"]),
    (
        {PP: 4, FIRST: 1, "recompute_granularity": "full", "recompute_num_layers": 4},
        {**DENSE, "num_hidden_layers": 10},
        8,
        ["the 3 layers of a stage"],
    ),
    ({PP: 4, FIRST: 1}, DENSE, 8, [f"{FIRST} 1", "leave 7", "num_hidden_layers 8", "the other 3", "a multiple of 3"]),
    (
        {"disable_dropout": False},
        {**DENSE, "attention_dropout": 0.1},
        8,
        ["attention_dropout", "disable_dropout: true"],
    ),
    ({}, {**DENSE, "model_type": "gemma3_text"}, 8, ["'gemma3_text'", "llama, mistral, qwen2", "Write backend: fsdp"]),
]


@pytest.mark.parametrize(
    ("keys", "shape", "num_workers", "told"), LAYOUT_MISTAKES, ids=[str(one[0])[:70] for one in LAYOUT_MISTAKES]
)
def test_what_workers_or_the_model_do_not_allow_is_told_before_anything_starts(
    keys: dict[str, Any], shape: dict[str, Any], num_workers: int, told: list[str], tmp_path: Path
) -> None:
    run = config(SFTConfig, model=folder(tmp_path, shape), output_dir=str(tmp_path / "out"), **keys)
    with pytest.raises(ConfigError) as error:
        SFTTrainer.check(run, gpus("train", num_workers))
    for words in told:
        assert words in str(error.value)
    assert not (tmp_path / "out").exists()


LEGAL: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({TP: 2, PP: 2, CP: 2}, DENSE, 8),
    ({TP: 2, PP: 2, VPP: 2, "sequence_parallel": False}, DENSE, 8),
    ({TP: 2, EP: 2, ETP: 1}, MOE, 8),
    ({TP: 2, EP: 4}, MOE, 8),
    ({TP: 2}, MOE, 8),
    ({CP: 2, EP: 8}, MOE, 8),
    ({EP: 2, ETP: 2}, MOE, 4),
    ({PP: 2, EP: 2, "moe_grouped_gemm": True, "moe_layer_recompute": True}, MOE, 4),
    ({TP: 4}, {**MOE, "intermediate_size": 95}, 4),  # no layer is dense
]


@pytest.mark.parametrize(("keys", "shape", "num_workers"), LEGAL, ids=[str(one[0])[:70] for one in LEGAL])
def test_layouts_that_work_are_not_refused(
    keys: dict[str, Any], shape: dict[str, Any], num_workers: int, tmp_path: Path
) -> None:
    SFTTrainer.check(config(SFTConfig, model=folder(tmp_path, shape), **keys), gpus("train", num_workers))


def test_weights_in_another_format_are_refused_before_anything_starts(tmp_path: Path) -> None:
    run = config(SFTConfig, model=folder(tmp_path, DENSE), disable_dropout=False)  # the model has none
    SFTTrainer.check(run, gpus("train"))
    (Path(run.model) / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(ConfigError, match=r"has only pytorch_model\*\.bin\. Load and save it once with transformers"):
        SFTTrainer.check(run, gpus("train"))
    (Path(run.model) / "model.safetensors").touch()
    SFTTrainer.check(run, gpus("train"))


def test_all_mistakes_of_a_layout_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check_megatron(config(model=folder(tmp_path, DENSE), **{TP: 8, EP: 2, VPP: 2}), gpus("train"))
    for words in (f"{TP} 8", f"{EP} 2", f"{VPP} 2"):
        assert words in str(error.value)


def test_every_role_is_checked_with_its_own_workers_and_model(tmp_path: Path) -> None:
    keys = {"model": folder(tmp_path, DENSE), "ref_model": folder(tmp_path, {**DENSE, "num_key_value_heads": 1}, "r")}
    groups = DeviceGroups.parse({"default": {"gpus": 4}, "reference": {"gpus": 3}})
    with pytest.raises(ConfigError, match="does not divide the 3 workers of role 'reference'"):
        DPOTrainer.check(config(DPOConfig, **{**keys, TP: 2}), groups)
    groups = DeviceGroups.parse({"default": {"gpus": 4}, "reference": {"gpus": 2}})
    with pytest.raises(ConfigError, match="of role 'reference' does not divide the model's num_key_value_heads 1"):
        DPOTrainer.check(config(DPOConfig, **{**keys, TP: 2}), groups)


def test_the_critic_is_checked_as_the_model_that_it_starts_from(tmp_path: Path) -> None:
    policy = folder(tmp_path, DENSE)
    short = folder(tmp_path, {**DENSE, "num_hidden_layers": 2}, "short")
    told = f"{PP} 4 of role 'critic' does not divide the model's num_hidden_layers 2"
    for keys, refused in (
        ({"reward_model": short}, True),
        ({"value_model": short}, True),
        ({"reward_model": short, "value_model": policy}, False),
    ):
        run = config(PPOConfig, model=policy, reward_funcs=["format"], **keys, **{PP: 4})
        with pytest.raises(ConfigError, match=told) if refused else nullcontext():
            check_megatron(run, gpus("train critic reference reward rollout", 4))


OF_EXPERTS: list[dict[str, Any]] = [
    *({"moe_grouped_gemm": True}, {"moe_token_dispatcher_type": "allgather"}, {"moe_layer_recompute": True}),
    *({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, {"megatron": {AUX: 1e-3}}),
]


@pytest.mark.parametrize("keys", OF_EXPERTS, ids=str)
def test_keys_of_experts_are_read_if_any_role_has_experts(keys: dict[str, Any], tmp_path: Path) -> None:
    dense, experts = folder(tmp_path, DENSE), folder(tmp_path, MOE, "experts")
    groups = gpus("train teacher rollout")
    for models in ((experts, dense), (dense, experts), (dense, "no/such-model")):  # nobody knows the last
        student, teacher = models
        check_megatron(config(GKDConfig, model=student, teacher_model=teacher, gkd_logits_topk=8, **keys), groups)
    ppo = {"model": experts, "value_model": dense, "reward_funcs": ["format"], **keys}
    check_megatron(config(PPOConfig, **ppo), gpus("train critic reference reward rollout"))
    with pytest.raises(ConfigError, match="fields of experts, but no model of backend: megatron has experts") as error:
        check_megatron(config(GKDConfig, model=dense, teacher_model=dense, gkd_logits_topk=8, **keys), groups)
    assert "several" not in str(error.value)  # it is said once, not of every role


def test_experts_that_are_divided_have_no_dense_model_beside_them(tmp_path: Path) -> None:
    models = {"model": folder(tmp_path, MOE), "teacher_model": folder(tmp_path, DENSE, "dense")}
    run = config(GKDConfig, **models, gkd_logits_topk=8, **{EP: 2})
    with pytest.raises(ConfigError, match=f"{EP} 2 of role 'teacher' .* a dense model cannot share workers with"):
        check_megatron(run, gpus("train teacher rollout"))


def test_roles_that_have_a_model_of_the_backend() -> None:
    ppo = config(PPOConfig, reward_funcs=["format"], reward_model="r")
    three = [("train", ppo.model), ("critic", "r"), ("reference", ppo.model)]
    assert list(models_of(ppo, gpus("train critic reference reward rollout"))) == three
    assert list(models_of(ppo, None)) == three  # one process has them all
    assert ppo.critic_model == "r"
    assert list(models_of(config(SFTConfig), None)) == [("train", "m")]
    assert list(models_of(config(TrainConfig), None)) == [("train", "m")]  # whose roles are not declared
    gkd = config(GKDConfig, teacher_model="t", gkd_logits_topk=8)
    assert list(models_of(gkd, gpus("train teacher rollout"))) == [("train", "m"), ("teacher", "t")]
    asked = dataclasses.replace(gkd, teacher_engine="vllm")
    assert list(models_of(asked, gpus("train teacher rollout"))) == list(models_of(asked, None)) == [("train", "m")]
    assert list(models_of(gkd, None)) == [("train", "m"), ("teacher", "t")]


def test_a_model_that_nobody_has_seen_yet_is_left_to_the_workers() -> None:
    check_megatron(config(model="no/such-model", **{TP: 8}), gpus("train"))
    assert list(layout_mistakes("role 'train'", MegatronSettings(tensor_model_parallel_size=8), 8, None)) == []


def test_a_model_with_code_of_its_own_is_read_as_workers_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = folder(tmp_path, {**DENSE, "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}})
    code = "from transformers import Qwen3Config\n\n\nclass OwnConfig(Qwen3Config):\n    pass\n"
    (Path(model) / "configuration_own.py").write_text(code)
    run = config(model=model, trust_remote_code=True, **{PP: 3})
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size 3"):
        check_megatron(run, gpus("train", 3))
    check_megatron(dataclasses.replace(run, **{PP: 2}), gpus("train", 2))


def test_without_gpus_there_is_nothing_to_compute_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = DeviceGroups.single(["train"], "CPU", 2)
    with pytest.raises(ConfigError, match="role 'train' is on a CPU"):
        check_megatron(config(), cpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # as the plugin of tests does
    check_megatron(config(), cpus)


def test_without_megatron_core_the_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_fields, "_is_installed", lambda module: module != "megatron.core")
    with pytest.raises(ConfigError, match=r"not installed. Run pip install 'rayhelper\[megatron\]'"):
        check_megatron(config(), gpus("train"))


# Fields of megatron-core


def refused(name: str, value: Any = 1) -> str:
    with pytest.raises(ConfigError) as error:
        check_fields({name: value})
    return str(error.value)


def test_the_tables_of_fields_name_fields_and_keys_that_exist() -> None:
    known = known_fields()
    tables = [*ELSEWHERE, *OF_MODEL, *OF_BACKEND, AUX, Z, BALANCING, *UNREAD]
    assert sorted(set(tables) - known.keys()) == []
    assert len(tables) == len(set(tables))
    assert set(ELSEWHERE.values()) <= {one.name for one in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("moe_permut_fusion", "no field 'moe_permut_fusion' in its configurations (did you mean moe_permute_fusion?)"),
        (TP, f"{TP} is a separate key. Write it as a separate key"),
        ("recompute_granularity", "is a separate key"),
        ("hidden_size", "follows from the model's config.json"),
        ("num_moe_experts", "follows from the model's config.json"),
        ("mtp_num_layers", "follows from the model's config.json"),
        ("lr", "is set by the key learning_rate"),
        ("bf16", "is set by the key dtype"),
        ("clip_grad", "is set by the key max_grad_norm"),
        ("adam_eps", "is set by the key adam_epsilon"),
        ("attention_dropout", "is set by the key disable_dropout"),
        ("optimizer_cpu_offload", "is set by the key optimizer_offload"),
        ("fine_grained_activation_offloading", "is set by the key recompute_granularity"),
        ("overlap_p2p_comm", "is set by the backend"),
        ("calculate_per_token_loss", "is set by the backend"),
        ("fp32_residual_connection", "is set by the backend"),
        ("microbatch_group_size_per_vp_stage", "is set by the backend"),
        ("overlap_p2p_comm_warmup_flush", "is set by the backend"),  # stages would wait for each other's lengths
        ("fsdp_double_buffer", "is set by the backend"),
    ],
)
def test_a_field_that_something_else_decides_is_refused_with_what_does(name: str, told: str) -> None:
    assert told in refused(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8_param", True),
        ("fp8_dot_product_attention", True),
        ("fp4", "e2m1"),
        ("tp_comm_overlap", True),
        ("apply_rope_fusion", True),
        ("use_precision_aware_optimizer", True),
        ("cuda_graph_impl", "local"),
        ("persist_layer_norm", True),
    ],
)
def test_a_field_of_layers_that_are_not_used_is_refused(name: str, value: Any) -> None:
    default = next(iter(known_fields()[name].values()))
    check_fields({name: default})  # as it is anyway
    assert f"{name} belongs to layers of TransformerEngine or apex" in refused(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("fp8", "hybrid"),
            ("num_layers_at_end_in_bf16", 2),
            ("moe_permute_fusion", True),
            ("moe_router_fusion", True),
        ],
        ("transformer_impl", "transformer_engine"),
    ],
)
def test_without_transformer_engine_its_layers_and_their_fields_are_refused(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "why_no_engine", lambda: "TransformerEngine is not installed")
    told = refused(name, value)
    assert name in told
    assert "needs layers of TransformerEngine, but TransformerEngine is not installed. Remove it" in told
    assert implementation({}, own_only=False) == "local"
    check_fields({"transformer_impl": "local"})


def test_with_transformer_engine_fields_of_its_layers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "why_no_engine", lambda: None)
    fp8 = {"fp8": "hybrid", "fp8_recipe": "mxfp8"}
    check_fields(fp8 | {"moe_permute_fusion": True, "first_last_layers_bf16": True})
    check_fields({"transformer_impl": "transformer_engine"})
    for adapter, further, told in (
        (False, {"transformer_impl": "apex"}, "transformer_impl must be one of local, transformer_engine"),
        (False, {"transformer_impl": "inference_optimized"}, "transformer_impl must be transformer_engine or local"),
        (False, {**fp8, "transformer_impl": "local"}, "fp8 needs layers of TransformerEngine, but transformer_impl is"),
        (True, fp8, "an adapter is added to megatron-core's own layers"),
        (True, {"transformer_impl": "transformer_engine"}, "transformer_impl: transformer_engine needs layers"),
        (False, {"fp8": "e5m2"}, "fp8 must be one of e4m3, hybrid, got 'e5m2'"),
        (False, {"fp8": "e4m3"}, "fp8_recipe must be one of tensorwise, blockwise, mxfp8; it is 'delayed'"),
        (False, {"fp8_recipe": "mxfp8"}, "fp8_recipe is of fp8. Also write fp8: hybrid"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            check_fields(further, has_adapter=adapter)
    assert implementation({}, own_only=False) == "transformer_engine"
    assert implementation({}, own_only=True) == implementation({"transformer_impl": "local"}, own_only=False)


def test_fp8_asks_for_widths_that_it_can_multiply() -> None:
    shape = ModelShape.of(MOE | {"mlp_only_layers": [0]})
    for sizes, further, told in (
        ({TP: 2}, {"fp8_recipe": "blockwise"}, None),
        ({TP: 2}, {"fp8_recipe": "mxfp8"}, "These are not: moe_intermediate_size 16, intermediate_size 48. Remove fp8"),
        (
            {TP: 4},
            {"fp8_recipe": "blockwise"},
            "These are not: moe_intermediate_size 8, intermediate_size 24. Remove fp8",
        ),
    ):
        settings = MegatronSettings(**sizes, transformer={"fp8": "hybrid", **further})
        mistakes = list(layout_mistakes("role 'train'", settings, 4, shape))
        assert [mistake for mistake in mistakes if told is None or told not in mistake] == []
        assert bool(mistakes) == (told is not None)


def test_gradients_are_added_in_one_product_without_apex_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "gradient_accumulation_fusion"
    monkeypatch.setattr(megatron_fields, "_is_installed", lambda module: False)
    for value in (True, False):
        check_fields({name: value})
        assert MegatronSettings(transformer={name: value}).transformer_fields[name] is value


def test_a_field_that_nothing_reads_is_refused_unless_it_is_as_it_is_anyway() -> None:
    named = {"pipeline_model_parallel_comm_backend": "nccl", "moe_flex_dispatcher_backend": "hybridep"}
    for name in UNREAD:
        default = next(iter(known_fields()[name].values()))
        other = not default if isinstance(default, bool) else named.get(name) or (default or 0) + 1
        assert f"{name} has no effect in the backend. Remove it" in refused(name, other)
        check_fields({name: default})


@pytest.mark.parametrize(
    ("further", "told"),
    [
        ({BALANCING: "global_aux_loss", AUX: 1e-3}, "needs the experts that a whole step chooses"),
        ({BALANCING: "sinkhorn"}, "to other experts in training than in scoring. Write one of aux_loss, seq_aux_loss"),
        ({BALANCING: ["aux_loss"], AUX: [1e-3]}, f"{BALANCING} must be one of aux_loss, seq_aux_loss, none"),
        ({AUX: -1.0}, f"{AUX} must be a number, 0 or above, got -1.0"),
        ({Z: "1e-3"}, f"{Z} must be a number, 0 or above, got '1e-3'"),
        ({BALANCING: "none", AUX: 1e-3}, f"{BALANCING} is none, but {AUX} 0.001"),
        ({BALANCING: "seq_aux_loss"}, f"seq_aux_loss has no effect without {AUX}"),
    ],
)
def test_losses_that_balance_experts_in_another_way_are_refused(further: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_fields(further)
    assert told in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("moe_input_jitter_eps", 0.01), ("moe_router_force_load_balancing", True)])
def test_fields_that_make_scores_random_are_refused(name: str, value: Any) -> None:
    assert f"megatron: {name} sends tokens to random experts, also in scoring" in refused(name, value)
    check_fields({name: known_fields()[name]["transformer"]})


def test_losses_that_balance_experts_are_fields_of_the_model(tmp_path: Path) -> None:
    for further in ({AUX: 1e-3}, {AUX: 1, BALANCING: "seq_aux_loss", Z: 1e-3}, {BALANCING: "none"}, {Z: None}):
        check_fields(further)
        assert divided(further)["transformer"] == further
    run = config(SFTConfig, model=folder(tmp_path, DENSE), megatron={AUX: 1e-3})
    with pytest.raises(ConfigError, match=f"{AUX}: fields of experts, but no model of backend: megatron has experts"):
        SFTTrainer.check(run, gpus("train"))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("bias_dropout_fusion", "yes", "bias_dropout_fusion must be true or false, got 'yes'"),
        ("qk_clip_alpha", True, "qk_clip_alpha must be a number, got True"),
        ("moe_deepep_num_sms", 1.5, "moe_deepep_num_sms must be a whole number, got 1.5"),
        ("bucket_size", "40M", "bucket_size must be a whole number, got '40M'"),  # by default null
        ("moe_expert_capacity_factor", "1.5", "moe_expert_capacity_factor must be a number, got '1.5'"),
        ("moe_router_dtype", "float32", "moe_router_dtype must be one of fp32, fp64, got 'float32'"),
        ("moe_token_drop_policy", None, "moe_token_drop_policy must be one of probs, position, got None"),
    ],
)
def test_a_field_has_a_type_that_it_is_declared_with(name: str, value: Any, told: str) -> None:
    assert told in refused(name, value)


def test_a_field_takes_each_of_its_types() -> None:
    check_fields({"bucket_size": None, "moe_expert_capacity_factor": 2, "moe_router_dtype": "fp64"})


def test_further_fields_go_to_the_configurations_that_have_them() -> None:
    further = {"bias_dropout_fusion": True, "bucket_size": 5, "apply_wd_to_qk_layernorm": True}
    further |= {"barrier_with_L1_time": True}
    check_fields(further)
    assert divided(further) == {
        "transformer": {"bias_dropout_fusion": True, "barrier_with_L1_time": True},
        "ddp": {"bucket_size": 5},
        "optimizer": {"apply_wd_to_qk_layernorm": True, "barrier_with_L1_time": True},
    }


def test_a_wrong_field_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"megatron: .*bukket_size.*did you mean bucket_size"):
        SFTTrainer.check(config(SFTConfig, output_dir=str(tmp_path), megatron={"bukket_size": 1}), gpus("train"))


def test_what_megatron_core_itself_refuses_is_told_before_anything_starts(tmp_path: Path) -> None:
    fields = {"distribute_saved_activations": True}
    keys = {"model": folder(tmp_path, MOE), "recompute_granularity": "full", "recompute_num_layers": 1}
    keys |= {"recompute_method": "uniform", TP: 2}
    with pytest.raises(
        ConfigError, match=r"megatron-core refuses the model of role 'train' .*: distribute_saved_activations"
    ):
        SFTTrainer.check(config(SFTConfig, **keys, megatron=fields), gpus("train", 2))
    SFTTrainer.check(config(SFTConfig, **keys, megatron={"moe_expert_capacity_factor": 1.0}), gpus("train", 2))


@pytest.mark.parametrize(
    ("shape", "keys", "told"),
    [
        (SHARED, {"moe_token_dispatcher_type": "allgather"}, "overlap only works with alltoall"),
        (
            SHARED,
            {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
            "shared_experts recompute cannot work with",
        ),
        # there are none to overlap with
        (MOE, {}, None),
        (MOE | {"shared_expert_intermediate_size": 32}, {"moe_token_dispatcher_type": "allgather"}, None),
    ],
)
def test_the_model_that_is_checked_is_the_one_that_workers_build(
    shape: dict[str, Any], keys: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    run = config(SFTConfig, model=folder(tmp_path, shape), megatron={"moe_shared_expert_overlap": True}, **keys)
    with pytest.raises(ConfigError, match=f"the model of role 'train' .*{told}") if told else nullcontext():
        SFTTrainer.check(run, gpus("train", 2))


def test_megatron_core_is_asked_where_there_are_no_further_fields(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds = megatron_fields._configurations()

    def refuse(**fields: Any) -> None:
        raise ValueError(f"{fields['num_layers']} layers of {fields['params_dtype']}")

    monkeypatch.setattr(megatron_fields, "_configurations", lambda: {**kinds, "transformer": refuse})
    with pytest.raises(ConfigError, match=r"the model of role 'train' with these keys: 8 layers of torch\.float32"):
        SFTTrainer.check(config(SFTConfig, model=folder(tmp_path, DENSE), dtype="float32"), gpus("train"))


def test_gradients_do_not_wait_for_an_output_layer_that_is_not_megatron_cores() -> None:
    name = "defer_embedding_wgrad_compute"
    assert f"{name} belongs to megatron-core's output layer, but the backend has its own head" in refused(name, True)


def test_experts_are_not_padded_to_a_capacity_as_workers_have_other_numbers_of_tokens() -> None:
    with pytest.raises(ConfigError, match=r"moe_pad_expert_input_to_capacity exchanges.*documents of any length"):
        check_fields({"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0})


# What the trainers make of it


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every backend that would be built."""
    arguments: list[dict[str, Any]] = []

    class MegatronBackend:
        shard = (0, 1, True)

        def __init__(self, model: str, **given: Any) -> None:
            arguments.append({"model": model, **given})

    module = ModuleType("trainers.backends.megatron.backend")
    module.MegatronBackend = MegatronBackend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(RayHelper, "init_process_group", lambda: None)
    return arguments


def test_the_backend_is_built_with_its_settings_and_what_every_backend_is_told(built: list[dict[str, Any]]) -> None:
    run = config(learning_rate=3e-4, max_grad_norm=0.5, megatron={"bucket_size": 7}, infer_batch_size=2, **{TP: 2})
    build_backend(run, "the-model", num_training_steps=5, head="value", values_at="target")
    (given,) = built
    assert (given["model"], given["head"], given["values_at"]) == ("the-model", "value", "target")
    assert (given["learning_rate"], given["max_grad_norm"], given["num_training_steps"]) == (3e-4, 0.5, 5)
    assert given["settings"] == MegatronSettings(
        tensor_model_parallel_size=2, infer_batch_size=2, ddp={"bucket_size": 7}
    )
    of_fsdp = set(inspect.signature(FsdpBackend).parameters)
    of_sharding = {"sharding", "reshard_after_forward", "offload_params", "torch_compile", "gradient_checkpointing"}
    of_sharding |= {"activation_memory_budget", "cuda_graphs"}
    in_settings = {"optimizer_offload"}
    others = {"padding_free", "model_init_kwargs", "device", "num_labels", "router_aux_loss_coef"}
    others |= {"neftune_noise_alpha", "tuner", "quantization", "sequence_parallel_size", "pooling"}
    assert given.keys() == (of_fsdp | {"settings", "async_save"}) - of_sharding - in_settings - others


def test_a_role_that_only_scores_has_no_learning_rate(built: list[dict[str, Any]]) -> None:
    build_backend(config(tuner_type="lora"), "m", num_training_steps=None)
    assert (built[0]["learning_rate"], built[0]["num_training_steps"], built[0]["lora"]) == (None, 0, None)


def test_workers_that_hold_one_model_count_once_before_it_is_built() -> None:
    run = config(**{TP: 2})
    with without_runtime(), pytest.raises(ConfigError, match="2 workers work on one slice together, but there"):
        num_shards(run)
    assert num_shards(config()) == 1


def test_a_generation_is_planned_for_shards_not_workers() -> None:
    keys = {"reward_funcs": ["exact_answer"], "num_generations": 8, "per_device_train_batch_size": 4}
    groups = gpus("train rollout reference teacher reward", 4)
    with pytest.raises(ConfigError, match="4 completions must be a multiple of num_generations=8"):
        GRPOTrainer.check(config(GRPOConfig, **keys, **{TP: 4}), groups)
    GRPOTrainer.check(config(GRPOConfig, **keys, **{TP: 2}), groups)  # two shards of 4
    sorting = {"loss_type": ["aot"], "per_device_train_batch_size": 4}
    with pytest.raises(ConfigError, match="sorts all pairs of an optimizer step"):
        DPOTrainer.check(config(DPOConfig, **sorting), gpus("default reference", 2))
    DPOTrainer.check(config(DPOConfig, **sorting, **{TP: 2}), gpus("default reference", 2))  # one shard
    with pytest.raises(ConfigError, match="Remove packing"):
        DPOTrainer.check(config(DPOConfig, **sorting, packing=True, **{TP: 2}), gpus("default reference", 2))


def test_the_hf_engine_has_a_model_of_its_own_beside_megatron(tmp_path: Path) -> None:
    model = save_tiny(tmp_path)
    run = config(GRPOConfig, model=model, reward_funcs=["format"])
    backend: Any = None  # nothing of it is asked
    engine = build_engine(run, model, tiny_tokenizer(), backend)
    beside: Any = object()
    assert build_engine(run, model, tiny_tokenizer(), beside).shares_weights is engine.shares_weights is False


# Architectures


QWEN3 = {"model_type": "qwen3", "hidden_act": "silu", "rope_parameters": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gemma2"}, "architecture 'gemma2' is not known (known: llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"model_type": "mistral"}, "sliding window"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope', but supported are default, linear, llama3, yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "'dynamic'"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized (fp8)"),
    ],
)
def test_what_the_backend_would_leave_out_of_a_model_is_refused(changes: dict[str, Any], told: str) -> None:
    assert not list(architecture_mistakes(QWEN3))
    (mistake,) = architecture_mistakes(QWEN3 | changes)
    assert told in mistake


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_a_mixture_that_megatron_core_cannot_route_is_refused(kind: str) -> None:
    one = {"model_type": kind, "num_experts": 4, "num_experts_per_tok": 1}
    assert not list(architecture_mistakes(one))
    (mistake,) = architecture_mistakes(one | {"norm_topk_prob": True})
    assert "norm_topk_prob is true with num_experts_per_tok 1, which megatron-core's router refuses" in mistake
    (mistake,) = architecture_mistakes({"model_type": kind, "num_experts": 0})
    assert "its num_experts is 0" in mistake


def test_a_mixture_without_what_its_family_has_is_not_known() -> None:
    assert not list(architecture_mistakes({"model_type": "qwen2_moe"}))
    (mistake,) = architecture_mistakes({"model_type": "qwen2_moe", "qkv_bias": False})
    assert "its qkv_bias is false" in mistake
    (mistake,) = architecture_mistakes({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 0})
    assert "its shared_expert_intermediate_size is 0" in mistake


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"lora_kwargs": {"use_dora": True}}, "does not support .*use_dora"),
        ({"lora_target_modules": ["lm_head"]}, "target_modules has 'lm_head'"),
        ({"lora_kwargs": {"modules_to_save": ["vit", "aligner"]}}, "has vit, but the model .* has no vision tower"),
        ({"lora_kwargs": {"modules_to_save": ["norm"]}}, "has 'norm', but with backend: megatron an adapter has only"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_before_anything_starts(
    keys: dict[str, Any], told: str, tmp_path: Path
) -> None:
    run = config(SFTConfig, model=folder(tmp_path, DENSE), tuner_type="lora", **keys)
    with pytest.raises(ConfigError, match=told):
        SFTTrainer.check(run, gpus("train"))


@pytest.mark.parametrize("sizes", [{TP: 2, EP: 2, ETP: 1}, {TP: 2}, {EP: 2, "moe_grouped_gemm": True}])
def test_experts_however_they_lie_may_have_an_adapter(sizes: dict[str, Any], tmp_path: Path) -> None:
    stacks = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    keys = {"model": folder(tmp_path, MOE), "tuner_type": "lora", "lora_target_modules": [], "lora_kwargs": stacks}
    SFTTrainer.check(config(SFTConfig, **keys, **sizes), gpus("train", 2))


DELTA = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 300,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize("seeing", [False, True])
def test_heads_of_states_are_divided_or_refused(seeing: bool, tmp_path: Path) -> None:
    model = folder(tmp_path, {"model_type": "qwen3_5", "text_config": DELTA} if seeing else DELTA)
    run = config(SFTConfig, model=model, **{TP: 4})
    with pytest.raises(ConfigError, match=r"4 of role 'train' does not divide.*linear_num_key_heads 2\. Choose among"):
        SFTTrainer.check(run, gpus("train", 4))
    SFTTrainer.check(config(SFTConfig, model=model, **{TP: 2, CP: 2}), gpus("train", 4))


def test_layers_of_states_are_megatron_cores_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layers, "why_no_engine", lambda: None)
    model = folder(tmp_path, DELTA)
    for fields, told in (
        ({"transformer_impl": "transformer_engine"}, "layers of qwen3_5_text are megatron-core's own. Write transf"),
        (
            {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
            "fp8 needs layers of TransformerEngine, but the layers of qwen3",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            SFTTrainer.check(config(SFTConfig, model=model, megatron=fields), gpus("train"))
    SFTTrainer.check(config(SFTConfig, model=model), gpus("train"))


def test_a_model_that_also_sees_is_judged_by_its_language_model() -> None:
    assert not list(architecture_mistakes({"model_type": "qwen3_5", "text_config": DELTA}))
    (mistake,) = architecture_mistakes({"model_type": "qwen3_5", "text_config": DELTA | {"attention_bias": True}})
    assert "attention_bias" in mistake
    (mistake,) = architecture_mistakes(DELTA | {"linear_num_value_heads": 5})
    assert "its linear_num_value_heads 5 are not a multiple of its linear_num_key_heads 2" in mistake
    (mistake,) = architecture_mistakes({"model_type": "qwen3_5_moe_text", "num_experts_per_tok": 1})
    assert "num_experts_per_tok 1" in mistake


def test_of_a_model_that_speaks_the_thinker_is_judged() -> None:
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {"num_experts_per_tok": 1}}}
    (mistake,) = architecture_mistakes(whole)
    assert "norm_topk_prob is true with num_experts_per_tok 1" in mistake
    assert not list(architecture_mistakes({"model_type": "internvl", "text_config": {"model_type": "qwen3"}}))
    (mistake,) = architecture_mistakes({"model_type": "internvl", "text_config": {"model_type": "gpt_oss"}})
    assert "architecture 'gpt_oss' is not known" in mistake
    (mistake,) = architecture_mistakes({"model_type": "qwen3_vl_moe_text", "norm_topk_prob": False})
    assert "its norm_topk_prob is false" in mistake


@pytest.mark.parametrize(("name", "instead"), [("InternVL3-8B", "-hf"), ("InternVL3_5-30B-A3B", "-HF")])
def test_a_model_with_its_own_code_is_refused_with_the_name_of_the_other_form(
    name: str, instead: str, tmp_path: Path
) -> None:
    code = {"AutoConfig": "configuration.Configuration"}
    model = folder(tmp_path, {"model_type": "internvl_chat", "auto_map": code}, name)
    told = re.escape("has its own code, which RayHelper does not run. The hub also has its weights for the class of")
    for asked in (shape_of, partial(configuration_of, trust_remote_code=False)):
        with pytest.raises(ConfigError, match=rf"{told}.* Write model: {model}{instead}$"):
            asked(model)
    assert "model_type: internvl" in str(own_code_mistake("InternVL3-2B-Pretrained", {"model_type": "internvl_chat"}))


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_model_that_speaks_is_trained_by_megatron_on_given_answers_alone(kind: str) -> None:
    whole = AutoConfig.for_model(kind)
    check_whole(whole, "m", "megatron")
    check_vision_model(config(SFTConfig, model="m"), whole)
    with pytest.raises(ConfigError, match="no engine completes prompts for such a model"):
        check_vision_model(config(GRPOConfig, model="m", reward_funcs=["format"]), whole)


def test_a_mistral_without_a_window_is_known() -> None:
    assert not list(architecture_mistakes({"model_type": "mistral", "sliding_window": None}))
