"""Changes to the interpreter. One function a patch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def stop_at_breakpoints(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``breakpoint()`` calls this hook; the one before.

    ``sys.breakpointhook`` is public and there to be replaced (PEP 553, Python 3.7). It stays.
    """
    before, sys.breakpointhook = sys.breakpointhook, hook
    return before
