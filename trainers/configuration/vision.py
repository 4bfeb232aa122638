"""The keys of vision models: their pictures, and which of their parts learn. Names and meanings are ms-swift's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rayhelper import ConfigError
from trainers.configuration.tuners import trained_parts


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision model has a vision tower (vit), a language model (llm), and between them what fits one to the other
    (the aligner: a projector or merger). A language model has the llm alone, and these keys change nothing in it."""

    SCORES: ClassVar[bool] = False
    """Whether the model is a sequence classifier, which gives numbers and no tokens."""

    # Vision models
    max_pixels: int | None = None
    """Largest number of pixels (width x height). Larger pictures are made smaller. null: the limit of the model's
    processor."""
    image_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model's image processor, for all roles, such as max_pixels for Qwen."""
    video_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model's video processor, for all roles, such as fps, max_frames and size."""
    image_urls: bool = False
    """Download pictures and videos from http addresses. false: rows with an address count as broken."""
    freeze_vit: bool | None = None
    """The vision tower is not trained, and gets no adapter. null: true with an adapter or with backend: megatron, else
    false."""
    freeze_aligner: bool | None = None
    """The aligner is not trained, and gets no adapter. null: the same rule as for freeze_vit."""
    freeze_llm: bool = False
    """The language model is not trained, and gets no adapter."""
    vit_lr: float | None = None
    """Learning rate of the vision tower, if it is not frozen. null: ``learning_rate``."""
    aligner_lr: float | None = None
    """Learning rate of the aligner, if it is not frozen. null: ``learning_rate``."""


def vision_settings(config: Any, *, trains: bool = True) -> dict[str, Any]:
    """What the backend is told: how pictures and videos are processed; where it ``trains``, the parts that do not learn
    and the learning rates of the others."""
    processing = {"processing": config.image_processor_kwargs, "videos": config.video_processor_kwargs}
    if not trains:
        return processing
    unsaid = not trained_parts(config) and (config.has_adapter or config.backend == "megatron")
    frozen = {
        "vit": unsaid if config.freeze_vit is None else config.freeze_vit,
        "aligner": unsaid if config.freeze_aligner is None else config.freeze_aligner,
        "llm": config.freeze_llm,
    }
    rates = {"vit": config.vit_lr, "aligner": config.aligner_lr}
    return {
        **processing,
        "frozen": [part for part, is_frozen in frozen.items() if is_frozen],
        "rates": {part: rate for part, rate in rates.items() if rate is not None},
    }


def check_vision(config: VisionConfig) -> None:
    """Raises ConfigError for values that have no meaning."""
    for name in ("vit_lr", "aligner_lr"):
        value = getattr(config, name)
        if value is not None and value < 0:
            raise ConfigError(f"{name} must be at least 0; got {value}")
    if config.max_pixels is not None and config.max_pixels < 1:
        raise ConfigError(f"max_pixels must be at least 1; got {config.max_pixels}")
    if trained_parts(config) and (config.freeze_vit or config.freeze_aligner):
        raise ConfigError(
            "lora_kwargs: modules_to_save has vit and aligner, but freeze_vit or freeze_aligner is true. "
            "Remove one of the two settings."
        )
    told = vision_settings(config)
    for part in told["rates"]:
        if part not in told["frozen"]:
            continue
        is_said = getattr(config, f"freeze_{part}") is not None
        why = f"freeze_{part} is true" if is_said else "that part is frozen by default with an adapter or with megatron"
        raise ConfigError(
            f"{part}_lr is {told['rates'][part]}, but {why}. Write freeze_{part}: false, or remove {part}_lr."
        )
    if len(told["frozen"]) == 3:
        raise ConfigError(
            "freeze_llm is true, and the vision tower and the aligner are frozen too: nothing would learn. Set "
            "freeze_vit: false or freeze_aligner: false."
        )


def vision_mistake(config: VisionConfig, *, sees: bool) -> str | None:
    """What is wrong with the keys for a model that ``sees`` pictures, or for a language model."""
    if not sees and config.freeze_llm:
        return "freeze_llm is true, but the model has no vision tower: nothing would learn. Remove it"
    return None
