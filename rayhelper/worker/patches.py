"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations


def abort_process_group() -> None:
    """torch's default group is gone, and its other members, which may wait for this process, are freed.

    PyTorch (2.9 to 2.13) waits in ``destroy_process_group`` for what NCCL has under way, and the function that does not
    wait is private (torch/distributed/distributed_c10d.py, ``_abort_process_group``). Where a version has none, it
    waits. Delete when there is a public one.
    """
    import torch.distributed as dist

    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    (abort or dist.destroy_process_group)()
