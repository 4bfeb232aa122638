"""What a helper module of test_stale.py calls."""

from __future__ import annotations

SCALE = 2.0


def set_scale(value: float) -> None:
    """As a project's own way to set a global."""
    global SCALE
    SCALE = value


def scale() -> float:
    return SCALE
