"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group that nobody else has, by NCCL, whose collectives wait so long.

    PyTorch (2.9 to 2.13) makes groups apart from its own list only so, and their timeout is a private field of the
    options (torch/distributed/distributed_c10d.py sets it, ``_new_process_group_helper``). Where a version has no such
    field, PyTorch's own timeout holds. Delete when the constructor takes one.
    """
    import torch.distributed as dist

    options: Any = dist.ProcessGroupNCCL.Options()
    if hasattr(options, "_timeout"):
        options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """As ``nccl_group``, by gloo, which listens on ``address`` of this machine.

    PyTorch (2.9 to 2.13) keeps the options in private names (``ProcessGroupGloo._Options``). Where a version has none,
    gloo chooses where it listens. Delete when the constructor takes an address.
    """
    import torch.distributed as dist

    kind: Any = getattr(dist.ProcessGroupGloo, "_Options", None)
    options: Any = None if kind is None else kind()
    if not (hasattr(options, "_timeout") and hasattr(options, "_devices")):
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)
