"""What a file of ms-swift means for a model that sees: how large pictures and videos become.

    MAX_PIXELS=1003520            image_processor_kwargs: {min_pixels: 3136, max_pixels: 1003520}
    FPS_MAX_FRAMES=12             video_processor_kwargs: {fps: 2.0, min_frames: 4, max_frames: 12, ...}
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

KEY, VIDEO_KEY = "image_processor_kwargs", "video_processor_kwargs"
FAMILY = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen2_5_omni", "qwen3_omni_moe"),
)
TOKENS = {"min": 4, "max": 16384}  # of a picture, where nobody says
VIDEO_TOKENS = {"min": 128, "max": 768}  # of a frame of a video
FRAMES = {"fps": 2.0, "fps_min_frames": 4, "fps_max_frames": 768}  # of a video
ALL_TOKENS, OF_ALL, PER_TOKEN = 128000, 0.9, 2  # of a video: a share of the context, and two frames are one token


def pictures_as_there(given: GivenKeys) -> None:
    """Puts our keys in ``given`` for a model that sees pictures; others, and those not there yet, are left alone."""
    if KEY not in given.known:
        return
    config = configuration_of(given)
    if config is None or not is_vision(config):
        return
    _keep_frozen_parts(given)
    if config.model_type not in FAMILY:
        return
    vision = seeing_part(config).vision_config
    factor, said = (vision.patch_size * vision.spatial_merge_size) ** 2, _said(given)
    found: dict[str, Any] = {
        KEY: {f"{bound}_pixels": count * factor for bound, count in _tokens(said, TOKENS, factor).items()}
    }
    if VIDEO_KEY in given.known and "omni" not in config.model_type:
        found[VIDEO_KEY] = _of_videos(said, factor, is_third=config.model_type.startswith("qwen3"))
    for key, value in found.items():
        if key not in given.values:
            given.values[key], given.where[key] = value, given.where["model"]


def _of_videos(said: Mapping[str, Any], factor: int, *, is_third: bool) -> dict[str, Any]:
    """The arguments of the video processor; ``factor``: pixels of a token. ``is_third``: of Qwen3-VL and Qwen3.5,
    whose sizes are of all frames together."""
    fps, least, most = (said.get(name, default) for name, default in FRAMES.items())
    tokens = _tokens(said, VIDEO_TOKENS, factor, of="video_")
    total = said.get("video_total_pixels", int(ALL_TOKENS * factor * OF_ALL))
    told = {"fps": fps, "min_frames": least, "max_frames": most, "cap_pixels_per_frame": True}
    size = {"shortest_edge": tokens["min"] * factor}
    if is_third:
        size["longest_edge"] = PER_TOKEN * total
        return told | {"size": size, "max_video_tokens": tokens["max"]}
    size["longest_edge"] = tokens["max"] * factor
    return told | {"size": size, "max_video_tokens": round(total / OF_ALL / factor)}


def _tokens(said: Mapping[str, Any], defaults: Mapping[str, int], factor: int, of: str = "") -> dict[str, int]:
    """The least and the most tokens of a picture, or of a frame (``of``)."""
    found = {}
    for bound, default in defaults.items():
        tokens, pixels = said.get(f"{of or 'image_'}{bound}_token_num"), said.get(f"{of}{bound}_pixels")
        found[bound] = tokens if tokens is not None else default if pixels is None else pixels // factor
    return found


def _keep_frozen_parts(given: GivenKeys) -> None:
    """An engine beside Megatron drops no weights while it sleeps, where it gets those alone that learn."""
    is_whole = all(given.get(key) is False for key in ("freeze_vit", "freeze_aligner"))
    drops = "sleep_level" in given.known and given.get("sleep_level") == 2
    if drops and given.get("backend") == "megatron" and not is_whole:
        given.values["sleep_level"] = 1
        given.notes["sleep_level"] = "it is 1: vLLM keeps the frozen parts of the model in the memory of the host"


def _said(given: GivenKeys) -> dict[str, Any]:
    """Names in small letters, and numbers; ``model_kwargs`` wins over the environment."""
    inner = given.get("model_kwargs")
    both = [*os.environ.items(), *(inner.items() if isinstance(inner, Mapping) else ())]
    names = {f"{kind}_{bound}_token_num" for bound in TOKENS for kind in ("image", "video")}
    names |= {f"{of}{bound}_pixels" for bound in TOKENS for of in ("", "video_")} | {*FRAMES, "video_total_pixels"}
    found: dict[str, Any] = {str(name).lower(): plain(value) for name, value in both if str(name).lower() in names}
    return {name: value for name, value in found.items() if type(value) in ((int, float) if name == "fps" else (int,))}


def configuration_of(given: GivenKeys) -> Any:
    """The configuration of the model; None: it is not there yet."""
    from transformers import AutoConfig

    if not isinstance(given.values.get("model"), str):
        return None
    try:
        return AutoConfig.from_pretrained(given.values["model"])
    except Exception:  # of any kind, by what the folder holds; whoever loads the model says it
        return None
