"""How verl divides, offloads and recomputes the policy, in ours."""

from __future__ import annotations

from typing import Any

from rayhelper import ConfigError
from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.images import sees, tower
from trainers.translate.verl.names import ACTOR, MEGATRON, MODEL, REF, STAGES, TRANSFORMER, ULYSSES


def on_megatron(theirs: Theirs) -> bool:
    """Whether the policy trains with Megatron: its strategy, its configuration or its parallel sizes say so."""
    named = str(theirs.take("--config-name", ""))
    sizes = theirs.below(f"{MEGATRON}.tensor_model_parallel_size")
    return theirs.take(f"{ACTOR}.strategy") == "megatron" or "megatron" in named or bool(sizes)


def backend(theirs: Theirs, ours: Ours) -> None:
    """The backend, and how it divides and offloads models."""
    strategy = theirs.take(f"{ACTOR}.strategy")
    if on_megatron(theirs):
        if sees(theirs):
            ours.refuse("data.image_key", "the translation takes pictures only with the strategy fsdp. Write that")
        _megatron(theirs, ours)
        return
    if sees(theirs) or f"{ACTOR}.freeze_vision_tower" in theirs:
        tower(theirs, ours)
    if strategy not in ("fsdp", "fsdp2"):
        ours.refuse(f"{ACTOR}.strategy", f"{strategy} is not built (known: fsdp, fsdp2, megatron)")
    ours.say("backend", "fsdp", theirs, f"{ACTOR}.strategy")
    if (ranks := theirs.take(ULYSSES, 1)) > 1:
        ours.say("sequence_parallel_size", ranks, theirs, ULYSSES)
    config = f"{ACTOR}.fsdp_config"
    for key, name in (("offload_model", "param_offload"), ("offload_optimizer", "optimizer_offload")):
        ours.say(
            key, bool(theirs.take(f"{config}.{name}")), theirs, f"{config}.{name}", note="while an engine generates"
        )
    if theirs.take(f"{config}.offload_policy"):
        ours.say("fsdp_offload_params", True, theirs, f"{config}.offload_policy")
    frees = theirs.take(f"{config}.reshard_after_forward")
    ours.say("fsdp_reshard_after_forward", bool(frees), theirs, f"{config}.reshard_after_forward")
    ours.drop(theirs, [f"{config}.grad_offload"], "there are no gradients while the engine generates")
    checkpoints = f"{MODEL}.enable_gradient_checkpointing"
    ours.say("gradient_checkpointing", bool(theirs.take(checkpoints)), theirs, checkpoints)
    ours.say("padding_free", bool(theirs.take(f"{MODEL}.use_remove_padding")), theirs, f"{MODEL}.use_remove_padding")


def _megatron(theirs: Theirs, ours: Ours) -> None:
    ours.say("backend", "megatron", theirs, f"{ACTOR}.strategy")
    ours.drop(theirs, [ULYSSES], "megatron divides sequences by context_parallel_size")
    for name in (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    ):
        if (value := theirs.take(f"{MEGATRON}.{name}")) is not None:
            ours.say(name, value, theirs, f"{MEGATRON}.{name}")
        if (other := theirs.values.get(f"{REF}.megatron.{name}", value)) not in (value, 1, None):
            ours.without[f"{REF}.megatron.{name}"] = f"the reference is placed like the policy ({other} there)"
        theirs.taken.add(f"{REF}.megatron.{name}")
    for name in ("param_offload", "grad_offload", "optimizer_offload", "use_distributed_optimizer"):
        if (value := theirs.take(f"{MEGATRON}.{name}")) is not None:
            ours.say(name, value, theirs, f"{MEGATRON}.{name}")
    if f"{MEGATRON}.sequence_parallel" in theirs:
        theirs.take(f"{MEGATRON}.sequence_parallel")
        ours.without[f"{MEGATRON}.sequence_parallel"] = (
            f"{theirs.system} does not read it: it is on with tensor parallelism"
        )
    if (seed := theirs.take(f"{MEGATRON}.seed")) is not None:
        ours.say("seed", seed, theirs, f"{MEGATRON}.seed")
    fields = theirs.below(TRANSFORMER)
    own = {
        **{f"recompute_{name}": f"recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")},
        **STAGES,
    }
    for name, key in own.items():
        if fields.get(name) is not None:
            ours.say(key, fields.pop(name), theirs, f"{TRANSFORMER}{name}")
        fields.pop(name, None)
    checkpoints = f"{MODEL}.enable_gradient_checkpointing"
    recomputes = any(line.key == "recompute_granularity" for line in ours.lines)
    if theirs.take(checkpoints) and not recomputes:
        ours.say("gradient_checkpointing", True, theirs, checkpoints)
    for name in ("moe_token_dispatcher_type", "moe_grouped_gemm"):
        if fields.get(name) == "flex":
            ours.without[f"{TRANSFORMER}{name}"] = "flex needs TransformerEngine and DeepEP; alltoall sends the tokens"
            del fields[name]
        elif name in fields:
            ours.say(name, fields.pop(name), theirs, f"{TRANSFORMER}{name}")
    fields |= theirs.below(f"{MEGATRON}.override_ddp_config.")
    if fields:
        _fields(fields, theirs, ours)
    ours.drop(theirs, [f"{MODEL}.use_remove_padding"], "backend: megatron never pads")
    sharding = [name for name in theirs.left() if name.startswith(f"{ACTOR}.fsdp_config")]
    ours.drop(theirs, sharding, "the strategy is megatron")


def _fields(fields: dict[str, Any], theirs: Theirs, ours: Ours) -> None:
    """Fields of megatron-core: those that it has, and that the backend does not set itself."""
    from trainers.backends.megatron.fields import check_fields

    kept = {}
    for name, value in fields.items():
        try:
            check_fields({name: value})
            kept[name] = value
        except ConfigError as error:
            ours.without[f"{TRANSFORMER}{name}"] = str(error).removeprefix("megatron: ")
    if kept:
        ours.say("megatron", kept, theirs, *(f"{TRANSFORMER}{name}" for name in kept))
