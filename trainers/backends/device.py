"""Where a process computes, and what it does there with memory that is free again."""

from __future__ import annotations

import ctypes
import os

import torch

# Of glibc's mallopt(3): what each parameter is called there, and bytes
TRIM_THRESHOLD, KEPT_BYTES = -1, 1 << 30
MMAP_THRESHOLD, LARGE_BYTES = -3, 32 << 20  # the largest that it takes
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")  # of users


def default_device() -> torch.device:
    """The GPU of this process if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def keep_freed_memory() -> bool:
    """Whether this process keeps up to 1 GiB of freed memory for its next tensors, for as long as it runs.

    By default glibc gives the activations of every step back to the system. The next step then pays for new pages, as
    the system clears them one by one: a fifth of the time of a small model's step on a CPU. False: the C library is
    another one, or the user has set its limits.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(os.environ.get(name) for name in VARIABLES):
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGE_BYTES) and mallopt(TRIM_THRESHOLD, KEPT_BYTES))
