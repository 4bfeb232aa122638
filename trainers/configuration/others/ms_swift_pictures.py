"""What a file of ms-swift means for a model that sees: how large pictures become.

    MAX_PIXELS=1003520            image_processor_kwargs: {min_pixels: 3136, max_pixels: 1003520}
    IMAGE_MAX_TOKEN_NUM=1024      of Qwen3-VL: {min_pixels: 4096, max_pixels: 1048576}
    sleep_level: 2                of Megatron, where the tower is frozen: sleep_level: 1

Only Qwen's models read the sizes. There they are those of qwen_vl_utils, whatever the model's own processor says.

Source: ms-swift's ``swift/model/models/qwen.py`` (compat_qwen_vl_utils, patch_qwen_vl_utils).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainers.configuration.reading.given_keys import GivenKeys, plain
from trainers.data.images.processor import is_vision, seeing_part

KEY = "image_processor_kwargs"
FAMILY = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen2_5_omni", "qwen3_omni_moe"),
)
TOKENS = {"min": 4, "max": 16384}  # of a picture, where nobody says


def pictures_as_there(given: GivenKeys) -> None:
    """Puts our keys in ``given`` for a model that sees pictures; others, and those not there yet, are left alone."""
    if KEY not in given.known:
        return
    config = configuration_of(given)
    if config is None or not is_vision(config):
        return
    _keep_frozen_parts(given)
    if KEY in given.values or config.model_type not in FAMILY:
        return
    vision = seeing_part(config).vision_config
    side = vision.patch_size * vision.spatial_merge_size
    factor, said, sizes = side * side, _said(given), {}
    for bound, default in TOKENS.items():
        tokens, pixels = said.get(f"image_{bound}_token_num"), said.get(f"{bound}_pixels")
        count = tokens if tokens is not None else default if pixels is None else pixels // factor
        sizes[f"{bound}_pixels"] = count * factor
    given.values[KEY] = sizes
    given.where[KEY] = given.where["model"]


def _keep_frozen_parts(given: GivenKeys) -> None:
    """An engine beside Megatron drops no weights while it sleeps, where it gets those alone that learn."""
    is_whole = all(given.get(key) is False for key in ("freeze_vit", "freeze_aligner"))
    drops = "sleep_level" in given.known and given.get("sleep_level") == 2
    if drops and given.get("backend") == "megatron" and not is_whole:
        given.values["sleep_level"] = 1
        given.notes["sleep_level"] = "it is 1: vLLM keeps the frozen parts of the model in the memory of the host"


def _said(given: GivenKeys) -> dict[str, int]:
    """Names in small letters, and whole numbers; ``model_kwargs`` wins over the environment."""
    inner = given.get("model_kwargs")
    both = [*os.environ.items(), *(inner.items() if isinstance(inner, Mapping) else ())]
    names = {f"image_{bound}_token_num" for bound in TOKENS} | {f"{bound}_pixels" for bound in TOKENS}
    found: dict[str, Any] = {str(name).lower(): plain(value) for name, value in both if str(name).lower() in names}
    return {name: value for name, value in found.items() if type(value) is int}


def configuration_of(given: GivenKeys) -> Any:
    """The configuration of the model; None: it is not there yet."""
    from transformers import AutoConfig

    if not isinstance(given.values.get("model"), str):
        return None
    try:
        return AutoConfig.from_pretrained(given.values["model"])
    except (OSError, ValueError):  # who loads the model says what is wrong with it
        return None
