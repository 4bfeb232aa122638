"""What a process is while it is a worker: which roles it hosts, who it is, and what its instances may call.

A Ray worker is one for its whole life (``host.py``); in process and under torchrun a process is one while it runs the
body of a worker's method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rayhelper.device_groups import DRIVER
from rayhelper.errors import RoleError
from rayhelper.roles import RoleMethod, not_constructed
from rayhelper.runtime import Route, Shard, WorkerInfo


@dataclass(frozen=True)
class Joined:
    """How the process joined torch.distributed's default group."""

    backend: str
    timeout_s: float


class HostedPlacement:
    """The roles of one instance that this worker hosts."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self.runtime = runtime
        self.constructing = True
        self.shards: dict[str, Shard] = {}
        self.unreported: set[str] = set()

    def route(self, method: RoleMethod[..., Any]) -> Route:
        if method.role in self.runtime.info.roles:
            return "here"
        if self.constructing:
            return "skip"
        info = self.runtime.info
        if method.role == DRIVER:
            raise RoleError(f"{method} runs on the driver only, and was called on {self.runtime.describe()}.")
        raise RoleError(
            f"{method} was called on {self.runtime.describe()}, which does not host role {method.role!r} (it hosts "
            f"{', '.join(info.roles)}). Call it from the driver, or let one device group host both roles."
        )

    def run(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.runtime.inside(self, method.role):
            return method.call(target, args, kwargs)

    def submit(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError("a call on a worker never goes to a group")

    def take_reports(self) -> dict[str, Shard]:
        """The shards that were reported since the last time, by role."""
        reported = {role: self.shards[role] for role in self.unreported}
        self.unreported.clear()
        return reported

    def __reduce__(self) -> Any:
        raise RoleError("a trainer cannot be sent to another process; send what it computed instead")


class WorkerRuntime:
    """What this process is: one worker of a device group."""

    def __init__(self, info: WorkerInfo, node: str) -> None:
        self.info = info
        self.node = node
        self.context: list[tuple[HostedPlacement, str | None]] = []
        self.joined: Joined | None = None

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        placement = HostedPlacement(self)
        object.__setattr__(instance, "_rayhelper", placement)
        with self.inside(placement, None):
            init(instance, *args, **kwargs)
        placement.constructing = False

    def placement(self, method: RoleMethod[..., Any], target: Any) -> HostedPlacement:
        if isinstance(target, type) or method.kind != "method":
            placement = HostedPlacement(self)
            placement.constructing = False
            return placement
        raise not_constructed(method, target)

    def current(self) -> WorkerInfo:
        if not self.context:
            return self.info
        placement, role = self.context[-1]
        shards = placement.shards
        known = shards.get(role) if role else next(iter(shards.values()), None)
        return replace(self.info, shard=known) if known else self.info

    def report_shard(self, shard: Shard) -> None:
        if not self.context:
            raise RoleError("RayHelper.shard(...) was called outside any method of a trainer")
        placement, role = self.context[-1]
        for name in [role] if role else self.info.roles:
            placement.shards[name] = shard
            placement.unreported.add(name)

    @contextlib.contextmanager
    def inside(self, placement: HostedPlacement, role: str | None) -> Iterator[None]:
        """Inside, code of the placement's instance runs, for a role or (None) its constructor."""
        self.context.append((placement, role))
        try:
            yield
        finally:
            self.context.pop()

    def describe(self) -> str:
        """Who this is, for messages."""
        return f"rank {self.info.rank} of group {self.info.group!r} on node {self.node}"

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        """Joins the workers of the group in torch.distributed's default group, if the process is in none."""
        self.joined = Joined(join_process_group(self.info, backend, timeout_s), timeout_s)

    def teardown(self) -> None:
        raise RoleError(f"RayHelper.teardown() belongs on the driver, and was called on {self.describe()}.")


def join_process_group(info: WorkerInfo, backend: str | None, timeout_s: float, store: Any = None) -> str:
    """The backend through which this process now is in the default group; it may have been before.

    ``store``: where the members meet; None: what the environment names, or nowhere for a group of one.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return str(dist.get_backend())
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if info.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    elif backend == "nccl":
        torch.cuda.set_device(info.local_rank)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    return backend
