"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

from functools import partial
from typing import Any

LARGE = 2**20  # numbers of a weight, from which on starting a kernel of our own takes less time than it saves


def sums_by_kernel(weight: Any) -> None:
    """FSDP2's parameter ``weight`` adds its bfloat16 gradients to their float32 sum by ``gradient_kernels.py``.

    PyTorch (2.11 to 2.13) adds two dtypes by a kernel that loads number after number: 2.7 TB/s on an H200 where the
    other has 3.9 (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``accumulate_unsharded_grad_if_needed``; where a
    version has no such method nothing changes). Delete when ``float32 += bfloat16`` is as fast as a copy.
    """
    if hasattr(weight, "accumulate_unsharded_grad_if_needed") and weight.sharded_param.numel() >= LARGE:
        weight.accumulate_unsharded_grad_if_needed = partial(_accumulate, weight)


def _accumulate(weight: Any) -> None:
    from trainers.backends.fsdp import gradient_kernels

    total, part = weight.unsharded_accumulated_grad, weight.unsharded_param.grad
    if total is not None and part is not None:
        gradient_kernels.add(total, part)
        weight.unsharded_param.grad = None
