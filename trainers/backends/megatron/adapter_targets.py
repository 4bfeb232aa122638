"""Which weights of a model have an adapter, by fields of peft's LoraConfig.

Gates of shared experts, convolutions, embedding and head get none, and routers where they are named. "all-linear" is
attention, gated delta-rule layers, dense MLPs and shared experts. In qwen3_moe and qwen3_next, where names of an MLP
mean experts to peft, it has no MLP. Experts get an adapter where they are named. ``modules_to_save`` trains embedding
and head themselves.

Needs neither weights nor megatron-core: mistakes are found before a process starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rayhelper import ConfigError
from trainers.backends.fsdp.vision.parts import VISUAL
from trainers.backends.megatron.tensors.sources import Source
from trainers.backends.megatron.tensors.table import EMBEDDING, HEAD, block_sources

FIELDS = ("r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "use_rslora", "modules_to_save")
ROUTER = "mlp.gate.weight"  # what peft calls a router's weight, in target_parameters
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # what peft calls the experts of a layer
IN_STACKS = ("gate_proj", "up_proj", "down_proj")  # and what it called them when they were layers of their own
LINEAR = re.compile(r"(_proj|\.in_proj_\w+)\.weight$")  # layers of a checkpoint that can have an adapter
MLP_IS_EXPERTS = (
    "qwen3_moe",
    "qwen3_next",
)  # where peft takes the names of an MLP of any kind for those of the experts


def chosen_targets(config: Any, settings: Mapping[str, Any], *, num_stages: int = 1) -> set[str]:
    """Names, in a checkpoint, of the weights that get an adapter by ``settings``, fields of peft's LoraConfig.

    ``num_stages``: of the pipeline, each of which must have some.

    Raises:
        ConfigError: a field, or a layer, that can have no adapter here.
    """
    if unknown := sorted(settings.keys() - set(FIELDS)):
        raise ConfigError(f"lora: backend: megatron does not support {unknown}; of peft's fields it has {list(FIELDS)}")
    whole_names(config, settings)
    known, in_experts = _adaptable(config), names_in_experts(config)
    wanted = settings.get("target_modules", "all-linear")
    chosen = set(in_experts) if _takes_experts(config, settings, bool(in_experts)) else set()
    if ROUTER in (settings.get("target_parameters") or ()):
        chosen |= {
            name for layer in linear_layers(config, 1) for one in layer for name in one.tensors if is_router(name)
        }
    if wanted in ("all-linear", ["all-linear"]):
        return known | chosen
    if isinstance(wanted, str):
        raise ConfigError(f"lora: target_modules is {wanted!r}; write all-linear or a list of names, not a pattern")
    if "all-linear" in wanted:
        raise ConfigError(
            f"lora: target_modules has {sorted(set(wanted) - {'all-linear'})} beside all-linear, but with backend: "
            "megatron no other layer can have an adapter. Write only all-linear."
        )
    lasts = sorted({_last(name) for name in known})
    for target in wanted:
        if in_experts and names_in_stacks(config, {"target_modules": [target]}):
            continue
        meant = {name for name in known if _means(target, name)}
        if any(_means(target, name) for name in in_experts):
            longer = sorted({".".join(name.split(".")[-3:-1]) for name in meant})
            raise ConfigError(
                f"lora: target_modules has {target!r}, which experts also have, but stacked and not as separate "
                f"layers. Write {longer}, which are not in experts, and for the experts lora_kwargs: "
                f"{{target_parameters: {list(STACKS)}}}."
            )
        if not meant:
            raise ConfigError(
                f"lora: target_modules has {target!r}, but with backend: megatron only these layers of a "
                f"{config.model_type} model can have an adapter: {', '.join(lasts)}"
            )
        chosen |= meant
    layers = [
        {name for source in layer for name in source.tensors} | expert_names(config, number)
        for number, layer in enumerate(linear_layers(config, 1), start=1)
    ]
    if bare := [k for k, names in enumerate(layers) if num_stages > 1 and not names & chosen]:
        raise ConfigError(
            f"lora: target_modules {list(wanted)} leave layers {bare[:3]} without an adapter. With "
            "pipeline_model_parallel_size every layer must have one: add a layer of the attention"
        )
    return chosen


def whole_names(config: Any, settings: Mapping[str, Any]) -> set[str]:
    """Names, in a checkpoint, of the weights that ``modules_to_save`` trains themselves, beside the adapter.

    Raises:
        ConfigError: a module that is neither embedding nor head, or one whose weight both have.
    """
    known = {_last(name): name for name in (EMBEDDING, HEAD)}
    wanted = [one for one in settings.get("modules_to_save") or () if one not in VISUAL]
    for asked in wanted:
        if not any(_means(asked, name) for name in known.values()):
            raise ConfigError(
                f"lora_kwargs: modules_to_save has {asked!r}, but with backend: megatron an adapter has only "
                f"{' and '.join(known)} beside it. Remove it, or write backend: fsdp."
            )
    if wanted and config.tie_word_embeddings:
        raise ConfigError(
            f"lora_kwargs: modules_to_save has {', '.join(wanted)}, but the model ties {' and '.join(known)}, and "
            "backend: megatron trains no tied weight together with an adapter. Remove it, or write backend: fsdp and "
            "lora_kwargs: {ensure_weight_tying: true} too."
        )
    return {name for name in known.values() if any(_means(asked, name) for asked in wanted)}


def peft_fields(config: Any, settings: Mapping[str, Any], targets: set[str]) -> dict[str, Any]:
    """Fields of peft's LoraConfig that say the same: last parts of names where these mean no other layer."""
    in_experts = names_in_experts(config)
    routers = {name for name in targets if is_router(name)}
    layers = targets - in_experts - routers
    shared = {_last(name) for name in (_adaptable(config) - layers) | in_experts}
    found: dict[str, Any] = {
        "target_modules": sorted(
            {name.removesuffix(".weight") if _last(name) in shared else _last(name) for name in layers}
        )
    }
    if routers:
        found["target_parameters"] = [ROUTER]
    if not targets & in_experts:
        return found
    found["target_parameters"] = [*found.get("target_parameters", ()), *STACKS]
    if names_in_stacks(config, settings):
        both = r".*\.gate_up_proj"
        found["rank_pattern"] = {both: 2 * settings.get("r", 8)}
        found["alpha_pattern"] = {both: 2 * settings.get("lora_alpha", 8)}
    return found


def linear_layers(config: Any, num_ranks: int) -> list[list[Source]]:
    """Of each layer of the model, those of its parts that can have an adapter, its router among them."""
    blocks = [_block(config, block, num_ranks) for block in range(1, config.num_hidden_layers + 1)]
    attention_only = config.model_type in MLP_IS_EXPERTS
    return [
        [
            source
            for source in block.plain
            if is_router(source.key)
            or (all(LINEAR.search(name) for name in source.tensors) and not (attention_only and ".mlp." in source.key))
        ]
        for block in blocks
    ]


def names_in_experts(config: Any) -> set[str]:
    """Names of the weights of all experts."""
    return {name for number in range(1, config.num_hidden_layers + 1) for name in expert_names(config, number)}


def expert_names(config: Any, number: int) -> set[str]:
    """Names of the weights of the experts of a layer."""
    return {name for sources in _block(config, number, 1).experts for source in sources for name in source.tensors}


def names_in_stacks(config: Any, settings: Mapping[str, Any]) -> set[str]:
    """Those of ``IN_STACKS`` that target modules name, where peft takes them for experts."""
    wanted = settings.get("target_modules", "all-linear")
    if config.model_type not in MLP_IS_EXPERTS or isinstance(wanted, str):
        return set()
    return {name for name in IN_STACKS for target in wanted if f".{target}".endswith(f".{name}")}


def _block(config: Any, block: int, num_ranks: int) -> Any:
    return block_sources(config, block, num_ranks=num_ranks, num_expert_ranks=1, num_padded=0)


def _adaptable(config: Any) -> set[str]:
    """Names of the weights, but those of experts and routers, that can have an adapter."""
    names = {name for layer in linear_layers(config, 1) for source in layer for name in source.tensors}
    return {name for name in names if not is_router(name)}


def is_router(name: str) -> bool:
    """Whether the weight of that name in a checkpoint sends tokens to experts."""
    return name.endswith(f".{ROUTER}")


def _takes_experts(config: Any, settings: Mapping[str, Any], has_experts: bool) -> bool:
    """Whether the experts get an adapter. Raises ConfigError where one part of them would, and another not."""
    named, stacks = names_in_stacks(config, settings), list(settings.get("target_parameters") or ())
    if not has_experts:
        if stacks:
            raise ConfigError(
                f"lora: target_parameters belong to experts, but this {config.model_type} model has none."
            )
        return False
    stacks = [name for name in stacks if name != ROUTER]
    if unknown := [name for name in stacks if not any(f".{stack}".endswith(f".{name}") for stack in STACKS)]:
        raise ConfigError(f"lora: target_parameters has {unknown[0]!r}; backend: megatron accepts {[ROUTER, *STACKS]}")
    if not named and not stacks:
        return False
    if settings.get("lora_dropout"):
        raise ConfigError("lora: peft has no dropout for experts, as they are stacked. Write lora_dropout: 0.")
    if missing := [name for name in IN_STACKS if named and name not in named]:
        raise ConfigError(
            f"lora: target_modules has {sorted(named)}, which are experts of this model, but not {missing}. Write all "
            f"of {list(IN_STACKS)}."
        )
    if not named and len({_last(f"{name}.weight") for name in stacks}) < len(STACKS):
        raise ConfigError(f"lora: target_parameters has {stacks}. Write both: {list(STACKS)}.")
    return True


def _last(name: str) -> str:
    """q_proj of model.layers.0.self_attn.q_proj.weight."""
    return name.split(".")[-2]


def _means(target: str, name: str) -> bool:
    """Whether peft takes the layer of the weight ``name`` for the target."""
    return f".{name}".endswith(f".{target}.weight")
