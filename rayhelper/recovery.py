"""What a group does when something went wrong: stop the other workers of a call, replace a worker that died.

A call is stopped in three steps: the workers' main threads are interrupted; those that sit in a collective are freed by
their peers leaving the process group, which all then join anew; what still runs after that is waited for by the next
call. A worker is replaced only where the device group has ``restarts``: its instances are constructed again, and the
parts of calls that it had not answered run again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from rayhelper.errors import WorkerDiedError
from rayhelper.failures import Failure, raise_first
from rayhelper.waiting import answered

if TYPE_CHECKING:
    from rayhelper.group_call import GroupCall
    from rayhelper.worker_group import WorkerGroup

_log = logging.getLogger(__name__)

_TOLD_WITHIN_S = 0.6  # the caller learns of a failure after this time, even if workers still run
_INTERRUPTED_S = 1.0
_FREED_S = 5.0
_REJOINED_S = 60.0


class Recovery:
    """The troubles of one group."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.dead: WorkerDiedError | None = None  # why the group cannot be used any more
        self.restarts_left = group.group.restarts
        self.stopping: threading.Thread | None = None

    def finish(self) -> None:
        """Returns when a call that is being stopped has stopped."""
        if self.stopping is not None:
            self.stopping.join()
            self.stopping = None

    def stop_call(self, call: GroupCall, ranks: list[int]) -> None:
        """Gives up a call on these ranks."""
        self.stop_refs({rank: call.refs[rank] for rank in ranks})

    def stop_refs(self, late: Mapping[int, Any]) -> None:
        """Gives up what runs behind these references, by rank. Returns soon; the rest happens beside."""
        self.finish()
        self.stopping = threading.Thread(target=self._stop, args=(dict(late),), name="rayhelper-stop", daemon=True)
        self.stopping.start()
        self.stopping.join(_TOLD_WITHIN_S)

    def _stop(self, late: dict[int, Any]) -> None:
        crew = self.group.crew
        with contextlib.suppress(Exception):  # the group may be torn down meanwhile
            runs = crew.ask("stop", {rank: [ref.task_id().hex()] for rank, ref in late.items()})
            refs = [ref for rank, ref in late.items() if runs.get(rank)]  # the others wait their turn, and give up then
            if not refs or not ray.wait(refs, num_returns=len(refs), timeout=_INTERRUPTED_S)[1]:
                return
            left = crew.ask("leave")
            waiting = ray.wait(refs, num_returns=len(refs), timeout=_FREED_S)[1]
            if any(left.values()) and not waiting:
                ray.get([actor.rejoin.remote() for actor in crew.actors], timeout=_REJOINED_S)
            if waiting:
                ranks = [rank for rank, ref in late.items() if ref in waiting]
                _log.warning("group %r: ranks %s did not stop; the next call waits for them", crew.group.name, ranks)

    def died(self, error: RayActorError, what: str, call: GroupCall | None, called: int) -> None:
        """Replaces a worker that died, or whose death failed this call; every open call is sent to it again.

        ``called``: the rank whose part of the call failed. Its worker may have been replaced since.

        Raises:
            WorkerDiedError: the group has no restarts (left).
        """
        with self.group.lock:
            rank = self.group.crew.rank_of(getattr(error, "actor_id", None))
            if rank is not None:
                self._replace(rank, error, what, call)
            elif call is not None and call.sources:
                self._send_with_new_sources(call)
            elif call is not None and self.group.group.restarts:
                call.send([called])
            else:
                raise self._for_good(None, error, what)

    def _replace(self, rank: int, error: RayActorError, what: str, call: GroupCall | None) -> None:
        if self.restarts_left <= 0 or call is None:
            raise self._for_good(rank, error, what)
        self.restarts_left -= 1
        crew, group = self.group.crew, self.group
        together = any(crew.ask("joined").values())  # its peers wait for it in collectives, or would
        ranks = list(range(len(crew.actors))) if together else [rank]
        again = {other: _to_repeat(other, ranks, together) for other in group.open.values()}
        _log.warning(
            "%s died during %s; %s constructed anew, %d calls run again, %d restarts left",
            crew.describe(rank),
            what,
            f"all {len(ranks)} workers, which share a process group, are" if together else "it is",
            len(again),
            self.restarts_left,
        )
        try:
            crew.replace(ranks)
            for instance_id, construction in group.constructions.items():
                refs = [crew.actors[one].construct.remote(instance_id, construction) for one in ranks]
                self._constructed(instance_id, ranks, ray.get(refs))
        except RayActorError as next_error:
            next_rank = crew.rank_of(getattr(next_error, "actor_id", None))
            self._replace(rank if next_rank is None else next_rank, next_error, what, call)
        for other, lost in again.items():
            other.send(lost)

    def _constructed(self, instance_id: int, ranks: list[int], replies: list[Any]) -> None:
        failures = [reply for reply in replies if isinstance(reply, Failure)]
        if failures:
            raise_first(failures)
        for rank, reply in zip(ranks, replies, strict=True):
            self.group.note_shards(instance_id, rank, reply)

    def _send_with_new_sources(self, call: GroupCall) -> None:
        """Sends a call again whose argument was lost with a worker of another group, which is replaced first."""
        for source in call.sources:
            source.wait()
            if source.outcome is not None:
                source.outcome.result(None)
        call.send(rank for rank, ref in enumerate(call.refs) if not answered(ref))

    def _for_good(self, rank: int | None, error: RayActorError, what: str) -> WorkerDiedError:
        crew = self.group.crew
        who = f"a worker of group {crew.group.name!r}" if rank is None else crew.describe(rank)
        spent = f" (all {crew.group.restarts} restarts were used)" if crew.group.restarts else ""
        self.dead = WorkerDiedError(f"{who} died during {what}{spent}: {error}")
        running = {rank: ref for call in self.group.open.values() for rank, ref in enumerate(call.refs)}
        late = set(ray.wait(list(running.values()), num_returns=len(running), timeout=0)[1]) if running else set()
        if late:
            self.stop_refs({rank: ref for rank, ref in running.items() if ref in late})
        return self.dead


def _to_repeat(call: GroupCall, ranks: list[int], together: bool) -> list[int]:
    """The ranks among those replaced whose part of the call must run again."""
    called = [rank for rank in ranks if rank < len(call.refs)]
    return called if together else [rank for rank in called if not answered(call.refs[rank])]
