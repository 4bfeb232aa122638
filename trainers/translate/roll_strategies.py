"""How ROLL's sections train, score and complete: strategies, their sizes and offloading, and device mappings."""

from __future__ import annotations

import ast
import re
from typing import Any

from rayhelper import ConfigError
from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.names import STAGES

SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
)
OF_MEGATRON = (
    *("sequence_parallel", "use_distributed_optimizer", "recompute_granularity", "recompute_method"),
    *("recompute_num_layers", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_layer_recompute"),
    "overlap_grad_reduce",
)
WITHOUT_OF_FSDP = {
    "efsdp_size": "it divides experts, which ep_size 1 leaves whole",
    "param_dtype": "dtype is the type of the forward pass",
    "reduce_dtype": "gradients are added in float32",
    "wrap_policy": "FSDP2 wraps layers",
    "moe_use_grouped_mm": "it saves time alone",
    "apply_expert_patch": "it saves memory alone",
    "apply_tiled_mlp": "it saves memory alone",
    "tiled_num_shards": "it saves memory alone",
    "use_batched_model_update": "weight_bucket_mb is the size of each message",
}
TRAIN = {"megatron_train": "megatron", "fsdp2_train": "fsdp", "deepspeed_train": "fsdp"}


def training_arguments(theirs: Theirs, ours: Ours) -> None:
    """Batches of a data-parallel rank, and the optimizer."""
    arguments = "actor_train.training_args"
    for name, default in (
        *(("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1)),
        *(("learning_rate", 5e-5), ("weight_decay", 0.0), ("num_train_epochs", None)),
        *(("lr_scheduler_type", "linear"), ("adam_beta1", 0.9), ("adam_beta2", 0.999)),
    ):
        if (value := theirs.take(f"{arguments}.{name}", default)) is not None:
            ours.say(name, float(value) if name == "weight_decay" else value, theirs, f"{arguments}.{name}")
    ours.say("warmup_steps", theirs.take(f"{arguments}.warmup_steps", 0), theirs, f"{arguments}.warmup_steps")


def strategies(theirs: Theirs, ours: Ours) -> None:
    """How the policy is trained, and how completions are drawn where the file has actor_infer."""
    name = theirs.take("actor_train.strategy_args.strategy_name")
    if name is None:
        ours.refuse("actor_train.strategy_args.strategy_name", "it is missing, and decides how the policy is trained")
        return
    config = theirs.below("actor_train.strategy_args.strategy_config.")
    preset = theirs.take("actor_train.strategy_args.strategy_config")
    if name not in TRAIN:
        ours.refuse("actor_train.strategy_args.strategy_name", f"{name} is not built (known: {', '.join(TRAIN)})")
        return
    ours.say("backend", TRAIN[name], theirs, "actor_train.strategy_args.strategy_name")
    if name == "deepspeed_train":
        _deepspeed(preset, ours)
    elif name == "fsdp2_train":
        _fsdp(config, theirs, ours)
    for key in (*SIZES, *OF_MEGATRON, *STAGES) if TRAIN[name] == "megatron" else ():
        if config.get(key) is not None:
            source = f"actor_train.strategy_args.strategy_config.{key}"
            ours.say(STAGES.get(key, key), config.pop(key), theirs, source)
    for key in ("use_flash_attn", *SIZES, *OF_MEGATRON, *STAGES):
        config.pop(key, None)
    if TRAIN[name] == "megatron" and config:
        ours.say("megatron", config, theirs, *(f"actor_train.strategy_args.strategy_config.{key}" for key in config))
    if (size := theirs.take("actor_train.infer_batch_size")) is not None and TRAIN[name] == "megatron":
        ours.say("infer_batch_size", size, theirs, "actor_train.infer_batch_size")
    dtype = theirs.take("actor_train.model_args.dtype")
    names = {"bf16": "bfloat16", "fp32": "float32", "bfloat16": "bfloat16", "float32": "float32"}
    if dtype is not None and dtype not in names:
        ours.refuse("actor_train.model_args.dtype", f"{dtype} is not offered. Write bf16")
    elif dtype is not None:
        ours.say("dtype", names[dtype], theirs, "actor_train.model_args.dtype")
    off = theirs.take("actor_train.model_args.disable_gradient_checkpointing", False)
    if not any(line.key in ("recompute_granularity", "moe_layer_recompute") for line in ours.lines):
        source = "actor_train.model_args.disable_gradient_checkpointing"
        ours.say("gradient_checkpointing", not off, theirs, source, note="the other way round")
    _adapter(theirs, ours)
    if "actor_infer.strategy_args.strategy_name" in theirs:
        _engine(theirs, ours)
    for role in ("reference", "actor_infer", "actor_train"):
        left = [one for one in theirs.left() if one.startswith(f"{role}.")]
        told = (
            "the reference has the placement of the policy" if role == "reference" else "the policy's keys hold for it"
        )
        same = ("model_args", "data_args", "strategy_args", "infer_batch_size")
        if role != "actor_train":
            ours.drop(theirs, [one for one in left if one.split(".")[1] in same], told)


def _fsdp(config: dict[str, Any], theirs: Theirs, ours: Ours) -> None:
    """The fields of roll/distributed/strategy/fsdp2_strategy.py."""
    beginning = "actor_train.strategy_args.strategy_config"
    if (size := config.pop("ep_size", 1)) != 1:
        ours.refuse(
            f"{beginning}.ep_size",
            f"{size}: experts are divided only by backend: megatron. Write strategy_name: megatron_train, with "
            "expert_model_parallel_size",
        )
    frees = f"{beginning}.reshard_after_forward"
    ours.say("fsdp_reshard_after_forward", bool(config.pop("reshard_after_forward", True)), theirs, frees)
    if config.pop("offload_policy", False):
        ours.say("fsdp_offload_params", True, theirs, f"{beginning}.offload_policy")
    devices = ranks_of(theirs.take("actor_train.device_mapping"))
    if (size := config.pop("fsdp_size", 1)) not in (1, len(devices)):
        ours.without[f"{beginning}.fsdp_size"] = f"weights are sharded over all {len(devices)} workers, not {size}"
    for key in config:
        if reason := WITHOUT_OF_FSDP.get(key.partition(".")[0]):
            ours.without[f"{beginning}.{key}"] = reason
        else:
            ours.refuse(f"{beginning}.{key}", f"it has no known meaning (known: {', '.join(WITHOUT_OF_FSDP)})")
    if (ranks := theirs.take("actor_train.model_args.ulysses_size", 1)) > 1:
        ours.say("sequence_parallel_size", ranks, theirs, "actor_train.model_args.ulysses_size")


def own_devices(theirs: Theirs, ours: Ours) -> None:
    """Devices of roles that only train and score."""
    for role, ours_role in (("actor_train", "train"), ("reference", "reference")):
        if ranks := ranks_of(theirs.take(f"{role}.device_mapping")):
            ours.say(ours_role, {"gpus": len(ranks)}, theirs, f"{role}.device_mapping")


def _deepspeed(preset: Any, ours: Ours) -> None:
    stage = re.fullmatch(r"\$\{deepspeed_(zero\d?)(_cpuoffload)?\}", str(preset))
    kinds = {"zero": ("no_shard", None), "zero2": ("full_shard", False), "zero3": ("full_shard", True)}
    if stage is None or stage[1] not in kinds:
        ours.refuse("actor_train.strategy_args.strategy_config", f"{preset} is no preset that is known: write fsdp_*")
        return
    strategy, frees = kinds[stage[1]]
    source = "from actor_train.strategy_args.strategy_config"
    ours.add("fsdp_sharding_strategy", strategy, source)
    if frees is not None:
        ours.add("fsdp_reshard_after_forward", frees, source)
    if stage[2]:
        ours.add("fsdp_offload_params", True, source)


def _adapter(theirs: Theirs, ours: Ours) -> None:
    arguments = "actor_train.model_args"
    rank = theirs.take(f"{arguments}.lora_rank")
    if rank is None:
        return
    ours.add("tuner_type", "lora", f"from {arguments}.lora_rank")
    ours.say("lora_rank", rank, theirs, f"{arguments}.lora_rank")
    target = theirs.take(f"{arguments}.lora_target", "all-linear")
    names = ["all-linear"] if target in ("all", "all-linear") else str(target).split(",")
    ours.say("lora_target_modules", names, theirs, f"{arguments}.lora_target")
    for name, default in (("lora_alpha", 2 * rank), ("lora_dropout", 0.0)):
        ours.say(name, theirs.take(f"{arguments}.{name}", default), theirs, f"{arguments}.{name}")


def _engine(theirs: Theirs, ours: Ours) -> None:
    name = theirs.take("actor_infer.strategy_args.strategy_name")
    note = "" if name in ("vllm", "hf_infer") else f"{name} is not implemented; vLLM completes instead"
    ours.say(
        "rollout_engine",
        "hf" if name == "hf_infer" else "vllm",
        theirs,
        "actor_infer.strategy_args.strategy_name",
        note=note,
    )
    config = theirs.below("actor_infer.strategy_args.strategy_config.")
    renamed = {"tensor_parallel_size": "vllm_tensor_parallel_size"}
    further: dict[str, Any] = {}
    for key, value in config.items() if name == "vllm" else ():
        source = f"actor_infer.strategy_args.strategy_config.{key}"
        if key in ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "enforce_eager", "enable_prefix_caching"):
            ours.say(f"vllm_{key}", value, theirs, source)
        elif key in renamed:
            ours.say(renamed[key], value, theirs, source)
        elif key == "load_format":
            ours.without[source] = "the engine gets the policy's weights"
        else:
            further[key] = value
    if further:
        ours.add("vllm_engine_kwargs", further, "from actor_infer.strategy_args.strategy_config")
    if name not in ("vllm", "hf_infer"):
        ours.without["actor_infer.strategy_args"] = note
    arguments = "actor_infer.generating_args"
    for key in ("temperature", "top_p", "top_k"):
        if (value := theirs.take(f"{arguments}.{key}")) is not None:
            ours.say(key, max(0, value) if key == "top_k" else value, theirs, f"{arguments}.{key}")
    if theirs.take(f"{arguments}.num_beams", 1) != 1:
        ours.refuse(f"{arguments}.num_beams", "completions are drawn, not searched for. Write 1")
    theirs.taken |= {f"{arguments}.max_new_tokens", f"{arguments}.num_return_sequences"}


def ranks_of(mapping: Any) -> list[int]:
    """The ranks of a device_mapping: ``list(range(0, 4))``, a list, several of them with ``+``, or text that holds one.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return [] if mapping is None else _listed(ast.parse(str(mapping).strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        raise ConfigError(f"device_mapping {mapping} is not a list of ranks, such as list(range(0, 4))") from None


def _listed(node: ast.expr) -> list[int]:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_listed(left), *_listed(right)]
        case ast.Call(
            func=ast.Name("list"), args=[ast.Call(func=ast.Name("range"), args=ends, keywords=[])], keywords=[]
        ):
            return list(range(*map(ast.literal_eval, ends)))
        case ast.Call(func=ast.Name("list"), args=[ast.List() as inner], keywords=[]):
            return _listed(inner)
        case ast.List(elts=elements):
            return [int(ast.literal_eval(one)) for one in elements]
    raise ValueError
