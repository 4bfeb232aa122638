"""Which keys of the correction for the engine, and of the rejection of its tokens, go together. Imports no torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rayhelper import ConfigError


def check_correction(config: Any) -> None:
    """Raises ConfigError for bounds of a correction that is not there."""
    defaults = {one.name: one.default for one in fields(config)}
    if config.rollout_correction is None:
        for name in ("mode", "clip_max", "clip_min"):
            name = f"rollout_importance_sampling_{name}"
            if getattr(config, name) != defaults[name]:
                raise ConfigError(f"{name} is set, but rollout_importance_sampling_correction is not. Set both.")


def check_rejection(config: Any) -> None:
    """Raises ConfigError for bounds that are missing, that nothing reads, or that nothing lies between."""
    kind, low, high = config.rollout_rejection, config.rollout_rejection_min, config.rollout_rejection_max
    if kind is None:
        if low is not None or high is not None:
            raise ConfigError(
                "rollout_rejection_min and _max are bounds of rollout_rejection, which is not set. Set it."
            )
        return
    if high is None:
        raise ConfigError(
            f"rollout_rejection={kind} needs rollout_rejection_max, the largest value that stays. Set it."
        )
    if not kind.endswith("_k1") and low is not None:
        raise ConfigError(f"rollout_rejection_min is only for k1; {kind} is never negative. Remove it.")
    if high <= 0 or (low is not None and low <= 0):
        raise ConfigError("rollout_rejection_min and rollout_rejection_max must be positive")
    if kind.endswith("_k1") and (1 / high if low is None else low) > high:
        raise ConfigError(
            f"rollout_rejection_max={high} leaves nothing above rollout_rejection_min="
            f"{'1 / rollout_rejection_max' if low is None else low}: a correct engine has ratios of 1"
        )
