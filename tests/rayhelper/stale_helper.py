"""A helper module of test_stale.py, whose globals its functions read, count and keep."""

from __future__ import annotations

import logging
import threading
from typing import Any

from tests.rayhelper import stale_helper_inner

OFFSET = 1.0
COUNT = 0
NUM_INSIDE = 0
LOCK = threading.Lock()
log = logging.getLogger(__name__)
_cached: Any = None


def scaled(x: float) -> float:
    with LOCK:
        logged("scaled")
        return x * stale_helper_inner.scale()


def count() -> int:
    global COUNT
    COUNT += 1
    return COUNT


def logged(words: str) -> None:
    global _cached, log
    if _cached is None:
        _cached = words
    log = logging.getLogger(f"{__name__}.{words}")
    log.debug(_cached)


class Counter:
    """Counts in its module, as a method of a role does by way of an object."""

    def count(self) -> int:
        global NUM_INSIDE
        NUM_INSIDE += 1
        return NUM_INSIDE
