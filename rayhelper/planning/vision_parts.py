"""The parts of a vision model in a plan: how large they are, which learn, and what an adapter has beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayhelper.planning.adapter import ALL, numbers_of
from rayhelper.planning.model_shape import ModelShape
from rayhelper.planning.refusals import counted_parts

TOWER = ("vit", "aligner")
CONFIGS = ("vision_config", "audio_config", "thinker_config")  # of a config.json whose model sees or hears


def with_tower(shape: ModelShape, model: str | Mapping[str, Any]) -> tuple[ModelShape, bool]:
    """The shape with vision tower and aligner, and whether all parts of the folder's model are counted.

    transformers builds the model without weights, which also tells whether the language model is counted exactly.
    """
    if isinstance(model, Mapping):
        return shape, not any(model.get(name) for name in CONFIGS)
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    config = json.loads(file.read_text(encoding="utf-8"))
    if not any(config.get(name) for name in CONFIGS):
        return shape, True
    parts = counted_parts(str(file.parent)) if file.name == "config.json" else None
    if parts is None:
        return shape, False
    size = parts["llm"].num_parameters
    tied = replace(shape, tie_word_embeddings=not shape.tie_word_embeddings)  # said beside text_config
    shape = tied if tied.num_language_parameters == size else shape
    is_exact = shape.num_language_parameters == size
    return replace(shape, vit=parts["vit"], aligner=parts["aligner"], is_exact=is_exact), True


def whole_parts(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Parts that learn themselves beside an adapter: those in ``modules_to_save``."""
    kwargs = settings.get("lora_kwargs")
    asked = kwargs.get("modules_to_save") if isinstance(kwargs, Mapping) else None
    return tuple(part for part in TOWER if isinstance(asked, list) and part in asked)


def frozen_parts(settings: Mapping[str, Any], *, is_megatron: bool) -> tuple[str, ...]:
    """Parts that do not learn, and get no adapter."""
    has_adapter = settings.get("tuner_type", "full") != "full"
    unsaid = not whole_parts(settings) and (has_adapter or is_megatron)
    said = {part: settings.get(f"freeze_{part}") for part in (*TOWER, "llm")}
    return tuple(part for part, value in said.items() if (unsaid and part != "llm" if value is None else value is True))


def beside_tower(shape: ModelShape, settings: Mapping[str, Any], rank: int, targets: list[str], tuner: str) -> int:
    """Numbers of an adapter beside the linear layers of tower and aligner, where these get one."""
    kwargs = settings.get("tuner_kwargs")
    numbers = numbers_of(tuner, rank, kwargs if isinstance(kwargs, Mapping) else {})
    names = {target.rpartition(".")[2] for target in targets}
    left = {*frozen_parts(settings, is_megatron=False), *whole_parts(settings)}
    return sum(
        numbers(inputs, outputs)
        for part in TOWER
        if part not in left
        for name, inputs, outputs in getattr(shape, part).linear
        if name in names or ALL in names
    )
