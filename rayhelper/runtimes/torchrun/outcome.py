"""What a call came to on each process of a torchrun run, and what is wrong when the processes do not agree."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

from rayhelper.errors import DeadlineError, RoleError
from rayhelper.roles.parts import Record
from rayhelper.runtimes.torchrun.exchange import Watch
from rayhelper.values.contents import Contents
from rayhelper.values.reply import Changes
from rayhelper.values.shards import Reports
from rayhelper.worker.failures import Failure


@dataclass(frozen=True)
class Outcome:
    """What a call came to on one process, as the others are told."""

    call: str
    value: Any = None
    failure: Failure | None = None
    shards: Reports = field(default_factory=dict)  # that the process reported since the last call
    changes: Changes | None = None  # that the call has made to objects, where other processes do not host them
    parts: tuple[Record, ...] = ()  # of the object that was constructed
    given: str = ""  # how many arguments and items
    contents: Contents | None = None  # of the arguments; None: they are not compared in this call
    left: bool = False  # it left its process group, to free those that waited for it
    depth: int = 0  # the constructors within which the call was made


def some_failed_before(outcomes: list[Outcome]) -> bool:
    """Whether a constructor failed on some process before it came to a call that others make within it."""
    outermost = min(other.depth for other in outcomes)
    failed = any(other.failure is not None for other in outcomes if other.depth == outermost)
    return failed and any(other.depth > outermost for other in outcomes)


def check_same_call(outcomes: list[Outcome]) -> None:
    """Raises RoleError if the processes do not make one call."""
    if len({other.call for other in outcomes}) > 1:
        told = ", ".join(f"rank {rank} {other.call}" for rank, other in enumerate(outcomes[:8]))
        raise RoleError(
            f"under torchrun every process runs the driver's code and must make the same calls, but now came "
            f"{told}. Look for a branch, an order or a random number that differs between processes."
        )


def check_same_arguments(outcomes: list[Outcome]) -> None:
    """Raises RoleError if they pass it different numbers of arguments or items, or others."""
    if len({other.given for other in outcomes}) > 1:
        told = ", ".join(f"rank {rank} {other.given}" for rank, other in enumerate(outcomes[:8]))
        raise RoleError(
            f"{outcomes[0].call}: {told}: under torchrun every process must call with the same arguments, and takes "
            "its own slice of them. Look for data that is read, shuffled or divided differently on each process."
        )
    here = outcomes[0].contents
    for rank, other in enumerate(outcomes):
        if here is None or other.contents is None or here.equals(other.contents):
            continue
        what = "the same items in another order" if here.is_reordered(other.contents) else "other contents"
        raise RoleError(
            f"{outcomes[0].call}: rank {rank} passes {what} than rank 0: under torchrun every process must call with "
            "the same arguments. Each takes its own slice of them. Look for a DataLoader, a shuffle or a new model "
            "without a seed: call torch.manual_seed(...) in main, or give a DataLoader "
            "generator=torch.Generator().manual_seed(...). Do not give it a DistributedSampler. "
            "A time, a path or the order of a set is known to one process only. Get it "
            "in a method of group 'driver' with execute='first'. If a role changes the argument in place, only its "
            "own process has the change: return the value."
        )


def deadline_error(call: str, watch: Watch, late: str) -> DeadlineError:
    """The error for a call that was not made everywhere in time."""
    return DeadlineError(f"{call} did not finish on every process within {watch.limit_s:g} s; {late}")


def in_collective(error: Exception | None) -> bool:
    """Whether torch.distributed raised it: the group is broken then, and others wait for this process as well."""
    if error is None or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed")
