"""The tuners that peft builds, by their names under ``tuner_type``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
SET_HERE = ("task_type", "total_step", "rank_pattern", "peft_type", "inference_mode", "base_model_name_or_path")


def config_type(tuner: str) -> Any:
    """peft's dataclass of a tuner."""
    import peft

    return getattr(peft, CONFIGS[tuner])


def field_names(tuner: str) -> list[str]:
    """The fields of it that a user may set."""
    return [one.name for one in dataclasses.fields(config_type(tuner)) if one.name not in SET_HERE]


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
