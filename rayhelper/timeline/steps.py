"""Marks of the steps of a loop in the timeline of a run."""

from __future__ import annotations

from rayhelper.roles.runtime import state
from rayhelper.timeline.recording import Recording
from rayhelper.timeline.trace import NO_CALL, STEP


def mark_step(step: int, begun_ns: int | None) -> None:
    """Marks a step that the driver began at ``begun_ns`` (``time.time_ns()``) and that ends now; None: nothing began.

    Without a trace it does nothing. Busy shares are of the time from the first to the last mark: they leave start-up
    out.
    """
    recording = getattr(state.active, "recording", None)
    if isinstance(recording, Recording) and begun_ns is not None:
        recording.span(STEP, f"step {step}", begun_ns, NO_CALL)
