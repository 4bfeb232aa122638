"""What ``packing: true`` says to trainers whose batch sizes then count packs of rows. Imports no torch.

A pack is some rows that have ``max_length`` tokens together at most; ``data/packs.py`` fills packs. SFT and pretraining
are not meant here: they join rows to longer rows.
"""

from __future__ import annotations

from typing import Any, Literal

from rayhelper import ConfigError


def pack_length(config: Any) -> int | None:
    """Tokens of a pack at most; None: batch sizes count rows. ``config``: a TrainConfig."""
    length: int | None = config.max_length if getattr(config, "packing", False) and not config.JOINS_ROWS else None
    return length


def micro_batch_tokens(config: Any) -> int | Literal["auto"] | None:
    """Tokens of a micro-batch at most: ``token_budget``, or those of per_device_train_batch_size packs; None: any."""
    length: int | None = pack_length(config)
    if config.token_budget is not None or length is None:
        return config.token_budget  # type: ignore[no-any-return]
    return config.per_device_train_batch_size * length  # type: ignore[no-any-return]


def check_packing(config: Any) -> None:
    """Raises ConfigError for keys that have no meaning beside ``packing: true``."""
    if getattr(config, "packing", False) and config.max_length is None:
        raise ConfigError("packing needs max_length, the tokens of a pack")
    if pack_length(config) is None:
        return
    for name in ("infer_batch_size", "precompute_ref_batch_size"):
        if (value := getattr(config, name, None)) is not None:
            raise ConfigError(
                f"{name} is {value}, but with packing: true a micro-batch holds the tokens of "
                "per_device_train_batch_size packs. This also holds for rows that are only scored. Remove one of the "
                "two keys."
            )
