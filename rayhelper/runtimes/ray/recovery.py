"""What a group does when something went wrong: stop the other workers of a call, replace a worker that died.

A worker that does not answer in time is replaced as if it had died.

A call is stopped in three steps: the workers' main threads are interrupted; those that sit in a collective are freed by
their peers leaving the process group, which all then join anew; what still runs after that is waited for by the next
call. A worker is replaced only where the device group has ``restarts``: its instances are constructed again, and the
parts of calls that it had not answered run again. Workers that share a process group are replaced together; a part that
was answered runs again only where the ranks that did not answer may need it in a collective.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError

from rayhelper.device_groups.group import CONSTRUCTION_S
from rayhelper.errors import PlacementError, WorkerDiedError
from rayhelper.ranks import runs
from rayhelper.runtimes.ray.calls_under_way import (
    CallsUnderWay,
    Sent,
    answered,
    unfinished,
    unfinished_ranks,
)
from rayhelper.runtimes.ray.placement import NodeLostError
from rayhelper.worker.failures import raise_failures

Died = RayActorError | ObjectLostError  # a process is gone, or a node with a value that it kept
_log = logging.getLogger(__name__)

_TOLD_WITHIN_S = 0.6  # the caller learns of a failure after this time, even if workers still run
_INTERRUPTED_S = 1.0
_FREED_S = 5.0
_REJOINED_S = 60.0
_FREED_AGAIN_S = 5.0  # until the cluster knows that what a group had is free


class Recovery:
    """The troubles of one group."""

    def __init__(self, calls: CallsUnderWay, wait_s: float) -> None:
        self.calls = calls
        self.crew = calls.crew
        self.wait_s = max(wait_s, _FREED_AGAIN_S)
        self.restarts_left = calls.group.restarts
        self.stopping: threading.Thread | None = None

    def finish(self) -> None:
        """Returns when a call that is being stopped has stopped."""
        stopping = self.stopping  # another thread may stop a call meanwhile
        if stopping is not None:
            stopping.join()
            self.stopping = None

    def stop(self, running: Iterable[tuple[int, Any]]) -> None:
        """Gives up what runs on these ranks behind these references. Returns soon; the rest happens beside."""
        self.finish()
        stopping = threading.Thread(target=self._stop, args=(list(running),), name="rayhelper-stop", daemon=True)
        stopping.start()
        self.stopping = stopping
        stopping.join(_TOLD_WITHIN_S)

    def _stop(self, given_up: list[tuple[int, Any]]) -> None:
        crew = self.crew
        tasks: dict[int, list[str]] = {}
        for rank, ref in given_up:
            tasks.setdefault(rank, []).append(ref.task_id().hex())
        with contextlib.suppress(Exception):  # the group may be torn down meanwhile
            stopped = crew.ask("stop", tasks)  # by rank: the task that was running; the others will not begin
            refs = [ref for rank, ref in given_up if stopped.get(rank) == ref.task_id().hex()]
            if not unfinished(refs, _INTERRUPTED_S):
                return
            left = crew.ask("leave")
            waiting = unfinished(refs, _FREED_S)
            if any(left.values()) and not waiting:
                ray.get([actor.rejoin.remote() for actor in crew.actors], timeout=_REJOINED_S)
            if waiting:
                ranks = [rank for rank, ref in given_up if ref in waiting]
                _log.warning("group %r: ranks %s did not stop; the next call waits for them", crew.group.name, ranks)

    def died(self, error: Died, what: str, call: Sent | None, called: int) -> None:
        """Replaces a worker that died, or whose death failed this call; every open call is sent to it again.

        ``called``: the rank whose part of the call failed. Its worker may have been replaced since.

        Raises:
            WorkerDiedError: the group has no restarts (left).
            PlacementError: its node is lost, and no other had room in time.
        """
        with self.calls.lock:
            actor_id = getattr(error, "actor_id", None)
            rank = called if actor_id is None else self.crew.rank_of(actor_id)
            if rank is not None:
                self._replace({rank}, error, f"died during {self._running(rank) or what}", what)
            elif call is not None and call.sources:
                self._send_with_new_sources(call)
            elif call is not None and self.calls.group.restarts:
                call.send([called])
            else:
                raise self._for_good(None, error, what)

    def hung(self, what: str, call: Sent, limit_s: float, stacks: str) -> bool:
        """Replaces the workers that have not answered a call in time, as if they had died. ``stacks``: where they are.

        False where that cannot be: the group has too few restarts left, or the call waits for another group.

        Raises:
            WorkerDiedError: a replacement could not be constructed.
        """
        with self.calls.lock:
            ranks = {rank for rank, _ in unfinished_ranks(call.refs)}
            waits_for_others = any(unfinished(source.refs) for source in call.sources)
            if call.is_construction or not ranks or waits_for_others or self.restarts_left <= 0:
                return False
            _log.warning("%s did not finish within %g s. Where each rank of the group is:\n%s", what, limit_s, stacks)
            return self._replace(ranks, None, f"did not finish {what} within {limit_s:g} s", what)

    def _replace(self, ranks: set[int], error: Died | None, did: str, what: str) -> bool:
        """Replaces these ranks, and those that must be replaced with them; ``did`` says what befell the first.

        ``error``: of the worker that died; None: they are alive, and stay if there are too few restarts: False.

        Raises:
            WorkerDiedError: there are too few restarts, or a constructor failed.
        """
        crew, under_way = self.crew, list(self.calls)
        replaced: set[int] = set()
        is_paid = False  # whether the restart that is at work has been counted
        lost: dict[Sent, set[int]] = {other: set() for other in under_way}
        while True:  # until no further worker dies meanwhile
            displaced = crew.is_displaced()
            together = any(crew.ask("joined").values())  # its peers wait for it in collectives, or would
            price = 0 if is_paid else 1 if together or displaced else len(ranks)
            if price > self.restarts_left:
                if error is None:
                    return False
                raise self._for_good(min(ranks), error, what)
            self.restarts_left -= price
            is_paid = False
            first, ranks = min(ranks), set(range(len(crew.actors))) if together or displaced else ranks
            replaced |= ranks
            done = {other: _ranks_that_answered(other) for other in under_way}  # once: the living go on answering
            again = self._answered_again(done) if together else {}
            for other in under_way:
                called = {rank for rank in ranks if rank < len(other.refs)}
                lost[other] |= called if other in again or other.is_construction else called - done[other]
            self._log_replacement(first, did, sorted(ranks), displaced, sum(map(bool, lost.values())))
            self._log_repeated(again)
            try:
                self._construct_anew(sorted(replaced))
                break
            except NodeLostError:  # that of the worker that died, which was noticed before its node's end
                ranks, is_paid = {first}, True
            except RayActorError as next_error:
                next_rank = crew.rank_of(getattr(next_error, "actor_id", None))
                ranks, error = {first if next_rank is None else next_rank}, next_error
                did = f"died during {what}"
            except Exception as failed:  # as its constructor may
                raise self._for_good(first, failed, what) from failed
        for other in under_way:
            other.send(sorted(lost[other]))
        return True

    def _answered_again(self, done: Mapping[Sent, set[int]]) -> dict[Sent, set[int]]:
        """Of the calls, with the ranks that answered: those that these ranks must run once more, as others wait there.

        That is known to be needless of a call that all have answered, and of one that those who answered ran without a
        collective.
        """
        found = {}
        for call, ranks in done.items():
            if not call.is_construction and 0 < len(ranks) < len(call.refs):
                tasks = {rank: [call.refs[rank].task_id().hex()] for rank in ranks}
                apart = self.crew.ask("apart", {rank: tasks.get(rank, []) for rank in range(len(self.crew.actors))})
                known = [apart[rank] == tasks[rank] for rank in ranks if rank in apart]  # the dead do not say
                if not known or not all(known):
                    found[call] = ranks
        return found

    def _construct_anew(self, ranks: list[int]) -> None:
        crew = self.crew
        crew.replace(ranks, self.wait_s)
        limit_s = max(CONSTRUCTION_S, crew.group.timeout_s or 0.0)
        for address, payload in self.calls.constructions.items():
            if address in self.calls.constructing or address in self.calls.abandoned:
                continue
            started = [crew.actors[rank].construct.remote(address, payload) for rank in ranks]
            replies = ray.get(started, timeout=limit_s)
            raise_failures(replies)
            for rank, reply in zip(ranks, replies, strict=True):
                self.calls.note_shards(rank, reply)

    def _running(self, rank: int) -> str | None:
        """The call in which a worker died: the first that it has not answered."""
        for call in self.calls.open.values():
            if rank < len(call.refs) and not answered(call.refs[rank]):
                return call.title
        return None

    def _log_replacement(self, rank: int, did: str, ranks: list[int], displaced: bool, num_calls: int) -> None:
        if displaced:
            which = f"its node is lost: all {len(ranks)} workers of the group are placed and"
        elif ranks == [rank]:
            which = "it is"
        else:
            which = f"all {len(ranks)} workers, which share a process group, are"
        _log.warning(
            "%s %s; %s constructed again, %d calls run again, %d restarts left",
            self.crew.describe(rank),
            did,
            which,
            num_calls,
            self.restarts_left,
        )

    def _log_repeated(self, again: Mapping[Sent, set[int]]) -> None:
        for call, ranks in again.items():
            _log.warning(
                "%s: ranks %s had answered, and run it again with its side effects. Ranks without an answer may need "
                "them in collectives",
                self.calls.where(call.title),
                ", ".join(runs(sorted(ranks))),
            )

    def _send_with_new_sources(self, call: Sent) -> None:
        """Sends a call again whose argument was lost with a worker of another group, which is replaced first."""
        for source in call.sources:
            source.wait()
            if source.outcome is not None:
                source.outcome.result(None)
        call.send(rank for rank, ref in enumerate(call.refs) if not answered(ref))

    def _for_good(self, rank: int | None, error: Exception, what: str) -> WorkerDiedError | PlacementError:
        crew = self.crew
        who = f"a worker of group {crew.group.name!r}" if rank is None else crew.describe(rank)
        dead = f"{who} died before or during {what}"
        if isinstance(error, PlacementError):
            told = (
                f"{dead}, and the group could not be placed again: {error} {' '.join(getattr(error, '__notes__', ()))}"
            )
            self.calls.dead = PlacementError(told)
        elif isinstance(error, Died):
            then = f" (all {crew.group.restarts} restarts were used)" if crew.group.restarts else ""
            remedy = " Give the group restarts: N to have workers replaced." if not crew.group.restarts else ""
            self.calls.dead = WorkerDiedError(f"{dead}{then}: {_cause(error)}{remedy}")
        else:
            self.calls.dead = WorkerDiedError(f"{dead} and could not be constructed again: {error}")
        self.stop(item for call in self.calls for item in unfinished_ranks(call.refs))
        return self.calls.dead


def _ranks_that_answered(call: Sent) -> set[int]:
    return {rank for rank, ref in enumerate(call.refs) if answered(ref)}


def _cause(error: Exception) -> str:
    """What Ray knows about a death, without its advice."""
    text = " ".join(str(error).split())
    detail = text.partition("Worker exit detail: ")[2] or text
    return detail.partition(" Some common causes")[0][:300]
