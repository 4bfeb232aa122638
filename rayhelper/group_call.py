"""A call that runs on a group: what stands behind its future, and how futures become arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from rayhelper.collect import join, join_first
from rayhelper.dispatch import Balanced
from rayhelper.errors import DeadlineError, DispatchError
from rayhelper.futures import Finished, Future
from rayhelper.host import FuturePart, LateCall
from rayhelper.roles import RoleMethod

if TYPE_CHECKING:
    from rayhelper.worker_group import WorkerGroup

_STEP_S = 0.5


class GroupCall:
    """A call that runs on a group: what stands behind its future."""

    def __init__(
        self,
        group: WorkerGroup,
        instance_id: int,
        method: RoleMethod[..., Any],
        refs: list[Any],
        leaders: tuple[int, ...],
        order: list[int] | None,
    ) -> None:
        self.group = group
        self.instance_id = instance_id
        self.method = method
        self.refs = refs
        self.leaders = leaders
        self.order = order
        self.outcome: Finished | None = None

    def done(self) -> bool:
        if self.group.stopped:
            return True
        return self.outcome is not None or len(ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[1]) == 0

    def result(self, timeout_s: float | None) -> Any:
        if self.outcome is None:
            try:
                replies = self.group.get(self.refs, str(self.method), timeout_s)
            except DeadlineError:
                raise  # it may still finish
            except Exception as error:
                self.outcome = Finished.failed(error)
                raise
            self.outcome = Finished(lambda: self._collect(replies))
        return self.outcome.result(None)

    def _collect(self, replies: list[Any]) -> Any:
        values = [self.group.note_shards(self.instance_id, rank, reply) for rank, reply in enumerate(replies)]
        if self.method.execute == "first":
            return join_first(self.method.collect, values[0], where=self.group.where(self.method))
        return join(
            self.method.collect,
            [values[rank] for rank in self.leaders],
            order=self.order,
            where=self.group.where(self.method),
        )

    def parts(self) -> Iterator[Any]:
        waiting = {self.refs[rank]: rank for rank in self.leaders}
        while waiting:
            ready = ray.wait(list(waiting), num_returns=1, timeout=_STEP_S)[0]
            for ref in ready:
                rank = waiting.pop(ref)
                reply = self.group.get([ref], str(self.method))[0]
                yield self.group.note_shards(self.instance_id, rank, reply)

    def wait_any(self, others: Sequence[Any]) -> int:
        while True:
            for position, other in enumerate(others):
                if other.done():
                    return position
            refs = [ref for other in others if isinstance(other, GroupCall) for ref in other.refs]
            pending = ray.wait(refs, num_returns=len(refs), timeout=0)[1]
            ray.wait(pending, num_returns=1, timeout=_STEP_S)


def future_refs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    return [
        ref
        for value in (*args, *kwargs.values())
        if isinstance(value, Future) and isinstance(value._pending, GroupCall)
        for ref in value._pending.refs
    ]


def late_calls(
    method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], num_shards: int, where: str
) -> list[LateCall]:
    """The arguments for each shard when some are futures: the workers put the values in and divide them.

    Raises:
        DispatchError: a balanced dispatch, which needs to see the values.
    """
    if isinstance(method.dispatch, Balanced):
        raise DispatchError(
            f"{where}: a balanced dispatch needs to see the values, and an argument is a Future. Pass its .result()."
        )
    start = 0
    replaced = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Future):
            pending = value._pending
            if isinstance(pending, GroupCall):
                stop = start + len(pending.refs)
                source = pending.method
                first = source.execute == "first"
                value = FuturePart(
                    start, stop, source.collect, first, pending.leaders, pending.order, pending.group.where(source)
                )
                start = stop
            else:
                value = value.result()
        replaced.append(value)
    late_args = tuple(replaced[: len(args)])
    late_kwargs = dict(zip(kwargs, replaced[len(args) :], strict=True))
    dispatch = "all" if method.execute == "first" else method.dispatch
    return [
        LateCall(late_args, late_kwargs, dispatch, num_shards, index, parameter_names(method), where)
        for index in range(num_shards)
    ]


@functools.cache
def parameter_names(method: RoleMethod[..., Any]) -> tuple[str, ...]:
    """The names of the positional parameters, as a caller sees them; for messages."""
    code = inspect.unwrap(method.function).__code__
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return names if method.kind == "static" else names[1:]
