"""What a file of ms-swift means for a model that sees: how large pictures become, and what completes its prompts.

    MAX_PIXELS=1003520            image_processor_kwargs: {min_pixels: 3136, max_pixels: 1003520}
    IMAGE_MAX_TOKEN_NUM=1024      of Qwen3-VL: {min_pixels: 4096, max_pixels: 1048576}

Qwen's models alone read them. Their sizes there are those of qwen_vl_utils, whatever the model's own processor says.
``use_vllm: true`` asks for speed. No vLLM sees here yet, so that the policy itself completes, or a copy of it with
``backend: megatron``. There vLLM still completes texts for Qwen3.5.

Source: ms-swift's ``swift/model/models/qwen.py`` (compat_qwen_vl_utils, patch_qwen_vl_utils).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rayhelper.device_groups.keys import SHARE_KEY
from trainers.backends.megatron.architectures import READ_BY_VLLM
from trainers.configuration.reading.given_keys import GivenKeys, plain

KEY = "image_processor_kwargs"
FAMILY = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
TOKENS = {"min": 4, "max": 16384}  # of a picture, where nobody says


def pictures_as_there(given: GivenKeys) -> None:
    """Puts our keys in ``given`` for a model that sees pictures; others, and those not there yet, are left alone."""
    if KEY not in given.known:
        return
    config, is_megatron = _configuration(given), given.get("backend") == "megatron"
    if config is None:
        return
    if not (is_megatron and config.model_type in READ_BY_VLLM):
        _without_vllm(given)
    if KEY in given.values or config.model_type not in FAMILY:
        return
    side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    factor, said, sizes = side * side, _said(given), {}
    for bound, default in TOKENS.items():
        tokens, pixels = said.get(f"image_{bound}_token_num"), said.get(f"{bound}_pixels")
        count = tokens if tokens is not None else default if pixels is None else pixels // factor
        sizes[f"{bound}_pixels"] = count * factor
    given.values[KEY] = sizes
    given.where[KEY] = given.where["model"]


def _said(given: GivenKeys) -> dict[str, int]:
    """Names in small letters, and whole numbers; ``model_kwargs`` wins over the environment."""
    inner = given.get("model_kwargs")
    both = [*os.environ.items(), *(inner.items() if isinstance(inner, Mapping) else ())]
    names = {f"image_{bound}_token_num" for bound in TOKENS} | {f"{bound}_pixels" for bound in TOKENS}
    found: dict[str, Any] = {str(name).lower(): plain(value) for name, value in both if str(name).lower() in names}
    return {name: value for name, value in found.items() if type(value) is int}


def _configuration(given: GivenKeys) -> Any:
    """That of the model; None: it sees nothing, or is not there yet."""
    from transformers import AutoConfig

    from trainers.data.images.processor import is_vision

    if not isinstance(given.values.get("model"), str):
        return None
    try:
        config = AutoConfig.from_pretrained(given.values["model"])
    except (OSError, ValueError):  # who loads the model says what is wrong with it
        return None
    return config if is_vision(config) else None


def _without_vllm(given: GivenKeys) -> None:
    """A vLLM of the run makes room for the policy itself, or for a copy of it where role rollout has own devices."""
    is_of_run = given.get("vllm_mode") in (None, "colocate")
    if "rollout_engine" not in given.known or given.get("use_vllm") is not True or not is_of_run:
        return
    groups = given.get("device_groups")
    if isinstance(groups, Mapping) and groups.get("rollout") == {SHARE_KEY: "train"}:
        if set(groups) != {"train", "rollout"}:
            return
        both = dict.fromkeys(("train", "rollout"), groups["train"])
        given.values["device_groups"] = {"colocate_groups": [["train", "rollout"]], **both}
    given.values["use_vllm"] = False
    given.values.pop("sleep_level", None)
    given.notes["use_vllm"] = "no vLLM sees pictures here yet: the policy completes by itself (rollout_engine: hf)"
