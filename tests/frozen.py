"""The heap of imported modules, frozen: no collection goes through it again, neither ours nor one of a library.

Modules are most of a heap. A fork that collects garbage pays for all of them, and copies the memory that they lie in.
"""

from __future__ import annotations

import gc

_freeze = gc.freeze


def freeze_heap() -> None:
    """Freezes what is there. Libraries can no longer freeze or unfreeze: vLLM unfreezes all as an engine ends."""
    gc.collect()
    _freeze()
    vars(gc).update(freeze=_nothing, unfreeze=_nothing)


def _nothing() -> None: ...
