"""Memory of a GPU in segments that grow, while a model learns.

Rows of other lengths leave torch's allocator with free blocks that fit nothing. In segments that grow (``expandable_
segments`` of PyTorch's memory management) neighbours of any size join. But such memory can be no part of the pool that
vLLM puts to sleep, and other processes open it slowly or not at all; so outside of a step none is taken. What a step
leaves free in such segments is for the next one, until torch's cache is emptied: they are for models that empty it
between, as they make room for an engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch._functorch import config as functorch_config

from trainers.backends.patches import set_allocator

OPTION = "expandable_segments"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # of users, for the allocator


@contextlib.contextmanager
def growing_segments(device: torch.device) -> Iterator[None]:
    """Inside, memory of the device is taken in segments that grow, unless the user has said whether it should be."""
    given = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    if device.type != "cuda" or OPTION in given:
        yield
        return
    _set(given, True)
    try:
        yield
    finally:
        _set(given, False)


@contextlib.contextmanager
def memory_settings(
    activation_memory_budget: float, growing: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    """Inside ``growing``, compiled layers keep such a share of their activations.

    It counts for layers that run for the first time, and are compiled then.
    """
    with contextlib.ExitStack() as stack:
        if activation_memory_budget < 1:
            stack.enter_context(functorch_config.patch(activation_memory_budget=activation_memory_budget))
        stack.enter_context(growing)
        yield


def _set(given: str, grows: bool) -> None:
    """The allocator reads its options as a whole: those that are not said are as they are by default."""
    set_allocator(",".join(filter(None, [given, f"{OPTION}:{grows}"])))
