"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def sharded_weights(part: Any) -> list[Any]:
    """What FSDP2 itself keeps of each weight of ``part``, an FSDPModule; none where a version keeps it elsewhere.

    PyTorch (2.11 to 2.13) gives it out nowhere (torch/distributed/fsdp/_fully_shard/_fsdp_state.py,
    ``_fsdp_param_group``). Delete with what takes it.
    """
    state = part._get_fsdp_state() if hasattr(part, "_get_fsdp_state") else None
    group = getattr(state, "_fsdp_param_group", None)
    return list(getattr(group, "fsdp_params", ()))


def holds_gradients(weight: Any) -> bool:
    """Whether ``forget_gradients`` knows FSDP2's parameter ``weight`` as this version has it."""
    return all(hasattr(weight, name) for name in ("unsharded_accumulated_grad", "sharded_param", "to_sharded_dtensor"))


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
