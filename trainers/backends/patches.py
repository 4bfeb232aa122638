"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

import torch


def set_allocator(options: str) -> None:
    """Tells torch's allocator of GPU memory its options, as PYTORCH_ALLOC_CONF has them.

    PyTorch (2.9 to 2.13) reads the variable once, and has no public function that changes the options afterwards. Where
    a version has neither of the two private ones, they stay as they are. Delete when there is a public one.
    """
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # since torch 2.10
    tell = tell or getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if tell is not None:
        tell(options)
