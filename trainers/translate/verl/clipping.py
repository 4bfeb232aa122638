"""How far the ratio to the old policy may go, in verl's keys."""

from __future__ import annotations

from typing import Any

from trainers.translate.table import Theirs
from trainers.translate.verl.names import ACTOR


def clip_range(theirs: Theirs) -> tuple[tuple[Any, str], tuple[Any, str]]:
    """The lower and the upper range, each with the key that it comes from: its own, or the one of both."""
    both = f"{ACTOR}.clip_ratio"
    low, high = (name if name in theirs else both for name in (f"{both}_low", f"{both}_high"))
    return (theirs.take(low), low), (theirs.take(high), high)
