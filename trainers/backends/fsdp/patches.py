"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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


def sharded_weights(part: Any) -> list[Any]:
    """What FSDP2 itself keeps of each weight of ``part``, an FSDPModule; none where a version keeps it elsewhere.

    PyTorch (2.11 to 2.13) gives it out nowhere (torch/distributed/fsdp/_fully_shard/_fsdp_state.py,
    ``_fsdp_param_group``). Delete with what takes it.
    """
    state = part._get_fsdp_state() if hasattr(part, "_get_fsdp_state") else None
    group = getattr(state, "_fsdp_param_group", None)
    return list(getattr(group, "fsdp_params", ()))


def holds_gradients(weight: Any) -> bool:
    """Whether ``take_gradient`` and ``forget_gradients`` know FSDP2's parameter ``weight`` as this version has it."""
    return all(hasattr(weight, name) for name in ("unsharded_accumulated_grad", "sharded_param", "to_sharded_dtensor"))


def take_gradient(weight: Any) -> None:
    """The gradient that was added up whole becomes that of the shard of FSDP2's parameter ``weight``.

    PyTorch (2.11 to 2.13) would copy it on a single rank, where a shard is as large
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``foreach_reduce``). Where ``holds_gradients`` is false
    none is added up whole: every micro-batch is reduced. Delete when FSDP2 takes them as they are on a single rank.
    """
    gradient, weight.unsharded_accumulated_grad = weight.unsharded_accumulated_grad, None
    if gradient is not None:
        weight.sharded_param.grad = weight.to_sharded_dtensor(gradient)


def forget_gradients(weight: Any) -> None:
    """Gradients that a step which failed left in FSDP2's parameter ``weight`` are gone.

    PyTorch 2.13 forgets all else of such a step (``FSDPModule.reset_iter_state``), but not these
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Where ``holds_gradients`` is false no step follows one that
    failed. Delete when it forgets them too.
    """
    if holds_gradients(weight):
        weight.unsharded_accumulated_grad = None
    if hasattr(weight, "_unsharded_param"):
        weight._unsharded_param.grad = None


def tell_single_documents(are_single: Callable[[], bool]) -> None:
    """While ``are_single`` says so, transformers does not look whether rows hold several documents: that would wait.

    transformers (5.19) asks the GPU for it in each forward pass, also of rows that are one document each, and has no
    argument that says so (transformers/masking_utils.py, ``find_packed_sequence_indices``). The function is replaced
    for the whole process, so ``are_single`` must tell threads apart. Where a version has no such function, or one that
    is called otherwise, transformers looks. Delete when a model can be told.
    """
    from transformers import masking_utils

    find = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find is not None and list(inspect.signature(find).parameters) == ["position_ids"]:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None if are_single() else find(position_ids)


def _accumulate(weight: Any) -> None:
    from trainers.backends.fsdp import gradient_kernels

    total, part = weight.unsharded_accumulated_grad, weight.unsharded_param.grad
    if total is not None and part is not None:
        gradient_kernels.add(total, part)
        weight.unsharded_param.grad = None
