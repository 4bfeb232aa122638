"""The replies of a group's workers, and the first moment at which it is known that they will not all come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from rayhelper.device_groups.group import CALL_S
from rayhelper.errors import DeadlineError, WorkerError
from rayhelper.ranks import runs
from rayhelper.runtimes.ray.calls_under_way import Sent, unfinished_ranks
from rayhelper.runtimes.ray.recovery import Recovery
from rayhelper.watch.watchdog import Call, Watched
from rayhelper.worker.failures import Failure, raise_failures
from rayhelper.worker.side_door import told_stacks

_FAST_S = 0.1  # so long all are waited for together, which costs least
STEP_S = 0.5  # so often a waiting driver looks whether the group is still usable
SAME_S = 0.1  # failures of other ranks within this time are told together
_ANSWER_S = 1.0  # for a worker's door, when another has failed
_DEATH_S = 3.0  # after which Ray knows that a worker which no longer answers is dead


class Deadline:
    """When a call is late: ``limit_s`` after it began. What ``paused_s`` says of the time since then does not count."""

    def __init__(self, limit_s: float, paused_s: Callable[[float], float]) -> None:
        self.limit_s, self.paused_s = limit_s, paused_s
        self.restart()

    def restart(self) -> None:
        """It begins again, as the call does."""
        self.began = time.monotonic()
        self.at = self.began + self.limit_s

    def left_s(self) -> float:
        return self.at - time.monotonic()

    def has_passed(self) -> bool:
        if self.left_s() > 0:
            return False
        self.at = self.began + self.limit_s + self.paused_s(time.monotonic() - self.began)
        return self.left_s() <= 0


def _never_paused(last_s: float) -> float:
    return 0.0


def unanswered(call: Sent) -> list[int]:
    """The ranks that have not answered a call."""
    return [rank for rank, _ in unfinished_ranks(call.refs)]


def attended(recovery: Recovery, what: str, waiting: Callable[[], list[int]]) -> Call:
    """What reports where the ranks are that a call is ``waiting`` for, after ``warn_s()`` seconds without an answer."""
    group = recovery.calls.group

    def where() -> str:
        ranks = waiting()
        told = f" from ranks {', '.join(runs(ranks))}. Where they are:\n"
        return told + told_stacks(recovery.crew.ask("stacks"), ranks) if ranks else ""

    title = f"{what} on group {group.name!r} (roles {', '.join(group.roles)})"
    return Call(title, where=where, paused_s=recovery.calls.paused_s)


def replies_of(recovery: Recovery, what: str, call: Sent, timeout_s: float | None) -> list[Any]:
    """The replies to a call, in order of rank.

    Args:
        what: The call, for messages.
        timeout_s: Seconds; None: the group's own, or CALL_S.

    Raises:
        What a worker raised, as soon as one did; the others are stopped.
        WorkerDiedError: a process ended and may not be replaced.
        DeadlineError: with the Python stacks of all ranks.
    """
    recovery.calls.check_usable(what)
    limit_s = (recovery.calls.group.timeout_s or CALL_S) if timeout_s is None else timeout_s
    deadline = Deadline(limit_s, recovery.calls.paused_s if timeout_s is None else _never_paused)
    try:
        replies = ray.get(call.refs, timeout=min(_FAST_S, limit_s))
    except (GetTimeoutError, RayActorError, ObjectLostError, RayTaskError):
        with Watched(attended(recovery, what, lambda: unanswered(call))):
            replies = _one_by_one(recovery, what, call, deadline, timeout_s is None)
    raise_failures(replies)
    return replies


def replies_as_they_come(recovery: Recovery, call: Sent, ranks: Iterable[int]) -> Iterator[tuple[int, Any]]:
    """(rank, reply) of these ranks of a call, in the order in which they finish. Raises as ``replies_of`` does."""
    what, limit_s = call.title, recovery.calls.group.timeout_s or CALL_S
    left = set(ranks)
    with Watched(attended(recovery, what, lambda: unanswered(call))):
        yield from _as_they_come(recovery, what, call, left, limit_s)


def _as_they_come(
    recovery: Recovery, what: str, call: Sent, left: set[int], limit_s: float
) -> Iterator[tuple[int, Any]]:
    while left:
        recovery.calls.check_usable(what)
        rank_of = {call.refs[rank]: rank for rank in left}
        deadline = Deadline(limit_s, recovery.calls.paused_s)
        while not (ready := ray.wait(list(rank_of), num_returns=1, timeout=STEP_S)[0]):
            recovery.calls.check_usable(what)
            if deadline.has_passed():
                _past_deadline(recovery, call, what, limit_s, True)
                break  # replaced workers run it again
        if not ready:
            continue
        try:
            reply = ray.get(ready[0])
        except (RayActorError, ObjectLostError) as error:
            recovery.died(error, what, call, rank_of[ready[0]])
            continue  # the references of the call may be others now
        except RayTaskError as error:
            raise not_sent(recovery, rank_of[ready[0]], what, error) from None
        if isinstance(reply, Failure):
            told = _with_failures(recovery, what, call, {ready[0]: reply})
            if told is None:
                continue
            raise_failures(told)
        left.discard(rank_of[ready[0]])
        yield rank_of[ready[0]], reply


def not_sent(recovery: Recovery, rank: int, what: str, error: RayTaskError) -> WorkerError:
    """The error for a value that does not pickle."""
    return WorkerError(
        f"the value of {what} on {recovery.crew.describe(rank)} could not be sent back: {error.cause or error}"
    )


def _one_by_one(
    recovery: Recovery,
    what: str,
    call: Sent,
    deadline: Deadline,
    is_groups_limit: bool,
) -> list[Any]:
    refs = call.refs  # the references change when workers are replaced
    replies: dict[Any, Any] = {}  # by reference
    while any(ref not in replies for ref in refs):
        recovery.calls.check_usable(what)
        waiting = [ref for ref in refs if ref not in replies]
        left_s = min(STEP_S, deadline.left_s())
        ready = ray.wait(waiting, num_returns=1, timeout=max(0.0, left_s))[0]
        if ready and len(waiting) > 1:
            ready = ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        for ref in ready:
            try:
                replies[ref] = ray.get(ref)
            except (RayActorError, ObjectLostError) as error:
                recovery.died(error, what, call, refs.index(ref))
                if is_groups_limit:
                    deadline.restart()
                break  # the references of the call may be others now
            except RayTaskError as error:
                raise not_sent(recovery, refs.index(ref), what, error) from None
        replies = {ref: reply for ref, reply in replies.items() if ref in refs}
        if any(isinstance(reply, Failure) for reply in replies.values()):
            told = _with_failures(recovery, what, call, replies)
            if told is not None:
                return told
            if is_groups_limit:
                deadline.restart()
            continue
        if not ready and deadline.has_passed():
            _past_deadline(recovery, call, what, deadline.limit_s, is_groups_limit)
            deadline.restart()
    return [replies[ref] for ref in refs]


def _with_failures(recovery: Recovery, what: str, call: Sent, replies: dict[Any, Any]) -> list[Any] | None:
    """The replies that are there shortly after one failed; workers that still run are stopped.

    None where a worker that the failed ones share a process group with has died, and was replaced: that made their
    collectives fail, and they run again.

    Raises:
        WorkerDiedError: such a worker died and may not be replaced.
    """
    refs = call.refs
    waiting = [ref for ref in refs if ref not in replies]
    if waiting:
        ray.wait(waiting, num_returns=len(waiting), timeout=SAME_S)
        joined = recovery.crew.ask("joined", timeout_s=_ANSWER_S)
        ready, late = ray.wait(waiting, num_returns=len(waiting), timeout=0)  # while that took its time, too
        failed = [rank for rank, ref in enumerate(refs) if isinstance(replies.get(ref), Failure)]
        silent = [ref for ref in late if refs.index(ref) not in joined]
        if silent and any(joined.get(rank) for rank in failed):  # the end of a process is noticed with some delay
            ready += ray.wait(silent, num_returns=len(silent), timeout=_DEATH_S)[0]
            late = [ref for ref in late if ref not in ready]
        for ref in ready:
            try:
                replies[ref] = ray.get(ref)
            except (RayActorError, ObjectLostError) as error:
                if any(joined.get(rank) for rank in failed):
                    recovery.died(error, what, call, refs.index(ref))
                    return None
            except RayTaskError:
                continue  # the failure that was noticed first is the one to tell
        if late:
            recovery.stop((refs.index(ref), ref) for ref in late)
    return list(replies.values())


def _past_deadline(recovery: Recovery, call: Sent, what: str, limit_s: float, is_groups_limit: bool) -> None:
    """Returns once the workers that are late have been replaced, and run the call again.

    Raises:
        DeadlineError: they cannot be replaced; the call is given up if the deadline was the group's.
    """
    late = unfinished_ranks(call.refs)
    told = told_stacks(recovery.crew.ask("stacks"), range(len(recovery.crew.actors)))
    if is_groups_limit and recovery.hung(what, call, limit_s, told):
        return
    raise late_error(recovery, late, what, limit_s, is_groups_limit, told)


def late_error(
    recovery: Recovery, late: list[tuple[int, Any]], what: str, limit_s: float, is_groups_limit: bool, told: str = ""
) -> DeadlineError:
    """For a call that these ranks still run, behind these references; it is given up if the deadline was the group's.

    ``told``: where all ranks are, if that was asked already.
    """
    told = told or told_stacks(recovery.crew.ask("stacks"), range(len(recovery.crew.actors)))
    remedy = "The call was given up. Raise timeout_s of the group" if is_groups_limit else "Wait longer"
    if is_groups_limit:
        recovery.stop(late)
    ranks = ", ".join(runs([rank for rank, _ in late]))
    return DeadlineError(
        f"{what} on group {recovery.calls.group.name!r} did not finish within {limit_s:g} s; still running on ranks "
        f"{ranks}. {remedy} if it needs longer. Where each rank of the group is:\n{told}"
    )
