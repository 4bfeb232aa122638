"""The first thing in which two runs of a program differ: call, rank, argument, tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np

from rayhelper.prove.causes import Case, Cause, argument_of_error, cause_of, of_calls, of_error
from rayhelper.prove.evidence import Evidence
from rayhelper.prove.held import Held, Signatures, Unlike
from rayhelper.prove.watching import Seen


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs of a program differ."""

    runs: tuple[str, str]
    call: int  # the number of the call, or of the construction, from 1
    title: str
    what: str
    cause: str
    kind: str = ""  # of the cause, in a few words
    rank: int | None = None  # None: all ranks, or none can be named
    argument: str = ""  # the name of the argument, if it lies in one
    tensor: str = ""  # where the number, text or tensor lies: "value['loss']", "Trainer.weight"
    size: float = 0.0  # of real numbers: relative to their size
    is_error: bool = True  # False: real numbers were added up in another order

    def __str__(self) -> str:
        one, other = self.runs
        word = "Likely cause" if self.is_error else "No mistake"
        return f"{one} | {other}: call {self.call}, {self.title}: {self.what.removesuffix('.')}. {word}: {self.cause}"


@dataclass
class Ended:
    """What a run came to: its calls, and what ended it."""

    seen: list[Seen]
    error: Exception | None
    rank: int | None = None  # which raised the error

    @property
    def how(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


Watch = Callable[[int], Evidence]  # what the code of a call, by its number, reads as it runs


def differences(
    runs: tuple[str, str], one: Ended, other: Ended, tolerance: float, watch: Watch, *, is_apart: bool = False
) -> Iterator[Difference]:
    """The first difference that is a mistake, and before it the first that is rounding, if there are any.

    ``is_apart``: the other run has roles on workers of their own. Then a class may make further calls, such as those
    that send weights, and each worker holds the state of its own roles.
    """
    has_rounding = False
    pairs = [(k, k) for k in range(min(len(one.seen), len(other.seen)))]
    if is_apart:
        pairs = _made_in_both(one.seen, other.seen)
    parts = is_apart and [seen.title for seen in one.seen] != [seen.title for seen in other.seen]
    for k, j in pairs:
        number = k + 1
        for found in _of_call(one.seen[k], other.seen[j], tolerance, is_apart=is_apart):
            if parts and _is_a_choice(found, one.seen[k]):
                continue
            is_rounding = found.unlike is not None and found.unlike.how == "rounding"
            if is_rounding and has_rounding:
                continue
            calls = one.seen[:number], other.seen[: j + 1]
            difference = _told(runs, number, *calls, found, tolerance, watch, is_apart=is_apart)
            yield difference
            if difference.is_error:
                return
            has_rounding = True
    number = min(len(one.seen), len(other.seen))
    if (one.error is None) != (other.error is None):
        yield _of_error(runs, one, other)
    elif not is_apart and len(one.seen) != len(other.seen):
        more = (one.seen if len(one.seen) > len(other.seen) else other.seen)[number].title
        cause = of_calls()
        yield Difference(runs, number + 1, more, "only one of the runs makes this call", cause.told, cause.kind)


def _made_in_both(one: Sequence[Seen], other: Sequence[Seen]) -> list[tuple[int, int]]:
    """The calls that both runs make, in order: the number of each in either run, from 0."""
    titles = [seen.title for seen in one], [seen.title for seen in other]
    blocks = SequenceMatcher(None, *titles, autojunk=False).get_matching_blocks()
    return [(block.a + k, block.b + k) for block in blocks for k in range(block.size)]


def _is_a_choice(found: Found, here: Seen) -> bool:
    """Whether a value that differs is a word, a flag or None, by which the driver knows which calls to make."""
    if found.place != "value" or found.unlike is None or here.value is None:
        return False
    leaf = here.value.leaves.get(found.unlike.path)
    return leaf is not None and leaf.kind in ("bool", "str", "NoneType")


def _of_error(runs: tuple[str, str], one: Ended, other: Ended) -> Difference:
    """The difference of two runs, one of which ended with an error."""
    name, failed, whole = (runs[0], one, other) if one.error is not None else (runs[1], other, one)
    number = len(failed.seen)
    if (not failed.seen or not failed.seen[-1].raised) and number < len(whole.seen):
        number += 1  # it was raised before the call was made
    title = whole.seen[number - 1].title if 0 < number <= len(whole.seen) else "the program"
    cause, argument = of_error(failed.how, (*one.seen, *other.seen)), argument_of_error(failed.how)
    what = f"{name} ended with {failed.how}"
    return Difference(runs, number, title, what, cause.told, cause.kind, failed.rank, argument)


class Found(NamedTuple):
    """A difference of one call."""

    place: str  # "calls", "argument", "arrived", "raised", "value" or "state"
    name: str
    what: str
    unlike: Unlike | None = None
    rank: int | None = None
    tensor: str = ""


def _told(
    runs: tuple[str, str],
    number: int,
    here: Sequence[Seen],
    there: Sequence[Seen],
    found: Found,
    tolerance: float,
    watch: Watch,
    *,
    is_apart: bool,
) -> Difference:
    if found.unlike is None:
        failed = here[-1] if here[-1].raised else there[-1]
        cause = of_calls() if found.place == "calls" else of_error(failed.raised, (*here, *there))
        changed = [name for worker in failed.workers for note in worker.notes for name in note.changed]
        argument = argument_of_error(failed.raised) or next(iter(changed), "")
        if argument and argument not in found.what:
            cause = cause._replace(told=f"{cause.told}: it is argument {argument!r}")
        return Difference(
            *(runs, number, here[-1].title, found.what, cause.told, cause.kind, found.rank), argument=argument
        )
    case = Case(here, there, found.place, found.name, found.unlike, found.rank, tolerance, watch(number), is_apart)
    cause = cause_of(case)
    argument = found.name if found.place in ("argument", "arrived") else ""
    place = (found.rank, argument, found.tensor, found.unlike.size)
    return Difference(
        runs, number, here[-1].title, found.what, cause.told, cause.kind, *place, is_error=not _is_rounding(case, cause)
    )


def _is_rounding(case: Case, cause: Cause) -> bool:
    return case.unlike.how == "rounding" and cause.kind == "order of sums"


def _of_call(here: Seen, there: Seen, tolerance: float, *, is_apart: bool) -> Iterator[Found]:
    """What differs of one call, in the order in which it happens."""
    if here.title != there.title:
        yield Found("calls", "", f"the other run calls {there.title}")
        return
    same = {name for name in here.relative.keys() & there.relative.keys() if _as_counts(name, here, there, tolerance)}
    alike = here.num_workers == there.num_workers
    for name, held in here.arguments.items():
        unlike = held.unlike(there.arguments[name], tolerance) if name in there.arguments else None
        if name not in same and unlike is not None:
            rank = _rank_of_argument(name, here, there, unlike, alike)
            of_rank = f" (rank {rank} gets it)" if rank is not None else ""
            what = f"argument {name!r}{unlike.path}{of_rank} {unlike.told}"
            yield Found("argument", name, what, unlike, rank, name + unlike.path)
    if alike:
        yield from _arrived(here, there, tolerance)
    if bool(here.raised) != bool(there.raised):
        what = f"only one of the runs raises {here.raised or there.raised}"
        yield Found("raised", "", what, rank=here.raised_on if here.raised else there.raised_on)
    both = here.value is not None and there.value is not None and (alike or here.is_collected)
    if both and "value" not in same:
        unlike = here.value.unlike(there.value, tolerance)  # type: ignore[union-attr, arg-type]
        if unlike is not None:
            rank = _rank_of_value(here, there, unlike, alike)
            of_rank = f" of rank {rank}" if rank is not None else ""
            at = f" (value{unlike.path}{of_rank})" if unlike.path or of_rank else ""
            yield Found("value", "", f"its value{at} {unlike.told}", unlike, rank, f"value{unlike.path}")
    if alike and not is_apart:
        for rank, (worker, worker_there) in enumerate(zip(here.workers, there.workers, strict=False)):
            for owner in worker.state.keys() & worker_there.state.keys():
                for attribute, held in worker.state[owner].items():
                    held_there = worker_there.state[owner].get(attribute)
                    unlike = held.unlike(held_there, tolerance) if held_there is not None else None
                    if unlike is not None:
                        tensor = f"{owner}.{attribute}{unlike.path}"
                        what = f"afterwards {tensor} of rank {rank} {unlike.told}"
                        yield Found("state", attribute, what, unlike, rank, tensor)


def _as_counts(name: str, here: Seen, there: Seen, tolerance: float) -> bool:
    """Whether an argument or the value is the same if the number of workers counts as the same."""
    return here.relative[name].unlike(there.relative[name], tolerance) is None


def _notes(seen: Seen) -> list[tuple[int, dict[str, Held], Held | None]]:
    """By rank that was called: what it was given and what it gave."""
    found = []
    for rank, worker in enumerate(seen.workers):
        note = next((one for one in worker.notes if one.title == seen.name), None)
        if note is not None:
            found.append((rank, note.arguments, note.value))
    return found


def _arrived(here: Seen, there: Seen, tolerance: float) -> Iterator[Found]:
    """Arguments that differ only as workers get them."""
    for (rank, given, _), (_, given_there, _) in zip(_notes(here), _notes(there), strict=False):
        for name in given.keys() & given_there.keys():
            unlike = given[name].unlike(given_there[name], tolerance)
            if unlike is not None:
                what = f"argument {name!r}{unlike.path} of rank {rank}, as it arrives there, {unlike.told}"
                yield Found("arrived", name, what, unlike, rank, name + unlike.path)


def _rank_of_argument(name: str, here: Seen, there: Seen, unlike: Unlike, alike: bool) -> int | None:
    """The first rank to which what differs goes; None: it goes to all."""
    if here.collect == "first":
        return 0
    if not here.divides and max(here.num_workers, there.num_workers) > 1:
        return None
    if alike:
        for (rank, given, _), (_, given_there, _) in zip(_notes(here), _notes(there), strict=False):
            if name in given and name in given_there and given[name].unlike(given_there[name]):
                return rank
        return None
    return _rank_with(unlike, there.arguments[name], [(rank, given.get(name)) for rank, given, _ in _notes(there)])


def _rank_of_value(here: Seen, there: Seen, unlike: Unlike, alike: bool) -> int | None:
    """The first rank whose own value differs."""
    if here.collect == "first":
        return 0
    if alike:
        for (rank, _, value), (_, _, value_there) in zip(_notes(here), _notes(there), strict=False):
            if value is not None and value_there is not None and value.unlike(value_there):
                return rank
        return None
    assert there.value is not None, "both gave a value"
    return _rank_with(unlike, there.value, [(rank, value) for rank, _, value in _notes(there)])


def _rank_with(unlike: Unlike, whole: Held, parts: Sequence[tuple[int, Held | None]]) -> int | None:
    """The rank whose part of a value holds the item that differs; None: it cannot be told.

    Several parts may hold such an item, a row of zeros for one. Then it is the part at whose place the item stands, as
    long as the parts stand in the order of the ranks.
    """
    for path, item in _items_of(unlike, whole):
        leaf = whole.leaves[path]
        having: list[int] = []
        begin, placed = 0, None
        for rank, part in parts:
            own = part.leaves.get(path) if part is not None else None
            if own is None or not own.slices:
                continue
            end = begin + len(own.slices[0])
            if _has(own.slices[0], leaf.slices[0][item]):
                having.append(rank)
                placed = rank if begin <= item < end else placed
            begin = end
        if having:
            return having[0] if placed is None else placed
    return None


def _items_of(unlike: Unlike, whole: Held) -> Iterator[tuple[str, int]]:
    """The items that hold a difference, each with the path of its array or list: the innermost first."""
    steps = re.findall(r"\[.*?\]|\.\w+", unlike.path)
    found = [(unlike.path, unlike.item)]
    for k in range(len(steps) - 1, -1, -1):
        number = steps[k].strip("[]")
        found.append(("".join(steps[:k]), int(number) if number.isdigit() else None))
    for path, item in found:
        leaf = whole.leaves.get(path)
        if item is not None and leaf is not None and leaf.slices and item < len(leaf.slices[0]):
            yield path, item


def _has(items: Signatures, item: Signatures) -> bool:
    return bool(len(items)) and bool(np.isclose(items, item, rtol=1e-12, atol=0.0, equal_nan=True).all(1).any())
