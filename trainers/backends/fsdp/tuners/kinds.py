"""The tuners that peft builds, by their names under ``tuner_type``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rayhelper import ConfigError

CONFIGS = {  # names of peft's dataclasses
    "lora": "LoraConfig",  # arXiv 2106.09685
    "adalora": "AdaLoraConfig",  # arXiv 2303.10512
    "boft": "BOFTConfig",  # arXiv 2311.06243
    "fourierft": "FourierFTConfig",  # arXiv 2405.03003
    "ia3": "IA3Config",  # arXiv 2205.05638
    "miss": "MissConfig",  # arXiv 2409.15371, which was called Bone
    "vera": "VeraConfig",  # arXiv 2310.11454
}
DROPOUTS = {"lora": "lora_dropout", "adalora": "lora_dropout", "boft": "boft_dropout", "vera": "vera_dropout"}
DROPOUTS |= {"miss": "miss_dropout"}
# What IA3 scales the input of, and not the output: layers of the feed-forward part, by their whole name
FEED_FORWARD = r".*\.(mlp|feed_forward|ffn|block_sparse_moe)\..*"
SET_HERE = (
    *("task_type", "total_step", "rank_pattern", "peft_type", "inference_mode", "base_model_name_or_path"),
    *("auto_mapping", "peft_version", "revision", "megatron_config", "megatron_core"),
)


def config_type(tuner: str) -> Any:
    """peft's dataclass of a tuner."""
    import peft

    return getattr(peft, CONFIGS[tuner])


def field_names(tuner: str) -> list[str]:
    """The fields of it that a user may set."""
    return [one.name for one in dataclasses.fields(config_type(tuner)) if one.name not in SET_HERE]


def fits(tuner: str, field: str, value: Any) -> bool:
    """Whether a value is of the type that peft declares of a field."""
    return _is_of(value, get_type_hints(config_type(tuner))[field])


def _is_of(value: Any, hint: Any) -> bool:
    """Whole numbers are numbers, and tuples are lists; of types of peft's own nothing is known."""
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, member) for member in members)
    if origin is Literal:  # some end in a number: pissa_niter_[number of iters]
        return isinstance(value, str) and any(value.startswith(str(member).partition("[")[0]) for member in members)
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(_is_of(one, members[0]) for one in value)
    if origin is dict or hint is dict:
        return isinstance(value, Mapping)
    if hint in (int, float):
        kind = int if hint is int else (int, float)
        return isinstance(value, kind) and not isinstance(value, bool) and abs(value) < math.inf
    return isinstance(value, hint) if hint in (bool, str, NoneType) else True


def fields_mistake(module: Any, fields: Mapping[str, Any]) -> str | None:
    """Why peft builds no LoRA adapter of these fields for a model without weights, which it changes; None if it
    does."""
    from peft import get_peft_model

    try:
        config = config_type("lora")(**fields)
        config.init_lora_weights = False  # others read the weights
        get_peft_model(module, config, low_cpu_mem_usage=True)
    except Exception as error:  # of any kind, by what is given
        return " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return None


def peft_config(tuner: str, fields: Mapping[str, Any], *, num_training_steps: int, task_type: str | None = None) -> Any:
    """peft's configuration of a tuner with these ``fields``; AdaLoRA divides its ranks over ``num_training_steps``.

    Raises ConfigError for values that peft refuses, and for those that end AdaLoRA in an error at its first step.
    """
    fields = dict(fields)
    if tuner == "adalora":
        fields["total_step"] = num_training_steps
        first, last = fields.get("init_r", 12), fields.get("target_r", 8)
        if not first > last:
            raise ConfigError(f"adalora: init_r is {first}, which must be above target_r, {last}: the ranks decrease")
    elif tuner == "ia3":
        fields.setdefault("feedforward_modules", FEED_FORWARD)
    try:
        return config_type(tuner)(task_type=task_type, **fields)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"tuner_type: {tuner}: peft refuses {_shown(fields)}: {' '.join(str(error).split())}"
        ) from None


def _shown(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "target_modules"}
