"""Why two runs differ, as far as what was seen of them tells: one kind per cause, each with its evidence.

The evidence is what each worker noted of the call (``on_worker.py``), and what the code read as it ran with Ray off
(``evidence.py``). Without any, the cause is the list of what is usual in such a place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rayhelper.prove.evidence import (
    CLOCK,
    ENTROPY,
    ENVIRONMENT,
    FILE,
    FILE_ORDER,
    FOLDER,
    HASH,
    PROCESS,
    RANK,
    SET,
    UUID,
    Evidence,
)
from rayhelper.prove.held import Held, Unlike
from rayhelper.prove.on_worker import AMBIENT, HASH_SEED, THREADS, Note
from rayhelper.prove.on_worker import ENVIRONMENT as VARIABLE
from rayhelper.prove.watching import Seen


class Cause(NamedTuple):
    """Why two runs differ: the kind, and what is told."""

    kind: str
    told: str


@dataclass(frozen=True)
class Case:
    """One difference: a call of two runs, all calls up to it, and where in the call it lies."""

    here: Sequence[Seen]  # the last one is the call
    there: Sequence[Seen]
    place: str  # "argument", "arrived", "value" or "state"
    name: str  # of the argument or the attribute
    unlike: Unlike
    rank: int | None
    tolerance: float  # 0: the runs have equally many workers
    evidence: Evidence
    is_apart: bool = False  # the second run has roles on workers of their own

    @property
    def is_constructor(self) -> bool:
        return self.here[-1].name == "__init__"

    def notes(self) -> tuple[Note | None, Note | None]:
        """What the workers of the rank noted of the call."""
        return _note(self.here[-1], self.rank), _note(self.there[-1], self.rank)


def _note(seen: Seen, rank: int | None) -> Note | None:
    """What a worker noted of the call; of one worker alone, whatever the rank."""
    notes = seen.workers[_at(seen, rank)].notes if seen.workers else []
    return next((note for note in reversed(notes) if note.title == seen.name), None)


def _at(seen: Seen, rank: int | None) -> int:
    return rank if rank is not None and rank < len(seen.workers) else 0


# Errors: what they say, and the kind of mistake

_UNLIKE = "arguments that differ between processes"
_OF_ERRORS = (
    ("grad_fn", "cut gradient"),
    ("changed in place on the driver", "changed in place on the driver"),
    ("changed its", "argument changed in place"),
    ("changed in place", "argument changed in place"),
    ("read-only", "argument changed in place"),
    ("reads the global", "global set on the driver"),
    ("set on the driver after", "attribute set on the driver"),
    ("changed on the driver after", "attribute set on the driver"),
    ("was set in class", "attribute set on the driver"),
    ("edited", "source edited"),
    ("reloaded", "source edited"),
    ("another source", "source edited"),
    ("draw the same numbers again", "generator passed twice"),
    ("pickle", "value that cannot travel"),
    ("cannot be sent", "value that cannot travel"),
    ("does not host", "call across roles"),
    ("must call with the same arguments", _UNLIKE),
)


def of_error(told: str, calls: Iterable[Seen] = ()) -> Cause:
    """The cause of an error that only one run raises, after so many calls of the runs."""
    kind = next((kind for words, kind in _OF_ERRORS if words in told), "error")
    if kind == _UNLIKE:
        for cause in _changed_in_place(calls):
            return cause
    return Cause(kind, "what the error says" if kind == "error" else f"{kind}, as the error says")


def argument_of_error(told: str) -> str:
    """The argument that an error names; empty: none."""
    found = re.search(r"argument '(\w+)'", told)
    return found[1] if found else ""


# Differences


def cause_of(case: Case) -> Cause:
    """The likely cause of a difference."""
    finders = _OF_THE_DRIVER if case.place == "argument" else _OF_CONSTRUCTORS if case.is_constructor else _OF_ROLES
    for finder in finders:
        for cause in finder(case):
            return cause
    return _usual(case)


_USUAL_OF_THE_DRIVER = (
    "the driver's own code. Look for random numbers that main does not seed, the order of a set or of files, or the "
    "time. Or a role changed an object that the driver shares with it"
)
_USUAL_OF_CONSTRUCTORS = "random numbers without a seed, or values of the process in __init__ (time, pid, environment)"
_USUAL_OF_ROLES = (
    "one of these. Random numbers of both the driver and the role: with Ray off, dropout and a shuffle share one "
    "generator. Give one of them its own torch.Generator. An argument that was changed in place. State outside of "
    "the object: a module's globals, a class's attributes, the clock, a uuid, or a written file. Or state of "
    "the process: environment, pid, folder, hash() of a text, the order of a set"
)
_ROWS = "the result depends on how the rows are divided"
_USUAL_OF_WORKERS = f"{_ROWS}: a mean over a shard, a random number per worker, a rank"


def of_calls() -> Cause:
    """The cause where the driver makes other calls."""
    return Cause("the driver's code", _USUAL_OF_THE_DRIVER)


def _usual(case: Case) -> Cause:
    if case.place == "argument":
        return Cause("the driver's code", _USUAL_OF_THE_DRIVER)
    if case.is_constructor:
        return Cause("seed", _USUAL_OF_CONSTRUCTORS)
    if case.tolerance:
        return Cause("division of rows", _USUAL_OF_WORKERS)
    return Cause("state outside of the object", _USUAL_OF_ROLES)


def _ambient(case: Case) -> Iterator[Cause]:
    """Settings of the process that differ as the code runs."""
    pairs = [(note.settings if note else {}) for note in case.notes()]
    if case.place == "argument":
        pairs = [case.here[-1].settings, case.there[-1].settings]
    elif case.is_constructor:
        pairs = [_after(case.here[-1], case.rank), _after(case.there[-1], case.rank)]
    one, other = pairs
    for name in AMBIENT:
        if name in one and name in other and one[name] != other[name]:
            yield Cause(
                "ambient state",
                f"ambient state: {name} is {one[name]} in one run and {other[name]} in the other. A role or the "
                "driver sets it, and the other process keeps its own value. Set it in main, before the object is "
                "constructed",
            )


def _after(seen: Seen, rank: int | None) -> dict[str, str]:
    return seen.workers[_at(seen, rank)].settings if seen.workers else {}


def _in_place(case: Case) -> Iterator[Cause]:
    """An argument that a role changed in place, in this call or in one before."""
    yield from _changed_in_place((*reversed(case.here), *reversed(case.there)))


def _changed_in_place(calls: Iterable[Seen]) -> Iterator[Cause]:
    for seen in calls:
        for worker in seen.workers:
            for note in worker.notes:
                if note.changed:
                    yield Cause(
                        "argument changed in place",
                        f"an argument that was changed in place: {seen.title} changes its argument "
                        f"{note.changed[0]!r}. With Ray off and in process, others get the change. On separate "
                        "workers they do not, and under torchrun only some processes do. Change a copy, and return it",
                    )


def _seeds(case: Case) -> Iterator[Cause]:
    """Generators that were not seeded."""
    in_role = case.place != "argument"
    read = case.evidence.first(ENTROPY, in_role=in_role)
    if read is None:
        return
    if case.unlike.how == "order":
        yield Cause(
            "order of rows",
            f"the order of rows: {_whose(case)} shuffles without a seed ({read}). Seed it: a generator without a "
            "seed starts differently in each run",
        )
    outside = " (state outside of the object)" if in_role and not case.is_constructor else ""
    yield Cause(
        "seed",
        f"random numbers without a seed{outside}: {_whose(case)} takes them from the system, {read}, regardless of "
        "the seeds in main. Make the generator from a seed",
    )


def _whose(case: Case) -> str:
    return "the driver's own code" if case.place == "argument" else f"the role's code in {case.here[-1].title}"


def _earlier(case: Case) -> Iterator[Cause]:
    """What was read before the call, and may be kept since."""
    in_role = case.place != "argument"
    for what, words in (
        (ENTROPY, "random numbers without a seed: taken from the system"),
        (UUID, "a uuid"),
        (CLOCK, "the clock"),
        (PROCESS, "the process (pid, host)"),
    ):
        read = case.evidence.first(what, in_role=in_role, before=True)
        if read is not None:
            kind = {ENTROPY: "seed", UUID: "uuid", CLOCK: "time", PROCESS: "process"}[what]
            outside = "state outside of the object: " if what != ENTROPY else ""
            yield Cause(kind, f"{outside}{words} in an earlier call, {read}, and kept since")


def _of_another_role(case: Case) -> Iterator[Cause]:
    """Attributes that another role has set, on its own worker if roles stand apart."""
    one, other = case.here[-1].workers, case.there[-1].workers
    if not case.is_apart or not one or not other:
        return
    here, there = one[_at(case.here[-1], case.rank)].state, other[_at(case.there[-1], case.rank)].state
    names = [
        f"{owner}.{attribute}"
        for owner, held in here.items()
        for attribute, value in held.items()
        if attribute in there.get(owner, {}) and value.unlike(there[owner][attribute])
    ]
    if names:
        yield Cause(
            "state of another role",
            f"state of another role: {', '.join(names[:3])} is not the same on the worker of {case.here[-1].title}. "
            "Another role sets it, on its own worker. Return it there, and pass it as an argument here",
        )


_SEEDING = re.compile(r"seed|rng|Random|[Gg]enerator")  # in a line of code that makes or sets a generator


def _draws(case: Case) -> Iterator[Cause]:
    """Generators that stood elsewhere before the role drew from them."""
    one, other = case.notes()
    drawn = sorted({*(one.drawn if one else ()), *(other.drawn if other else ())})
    if not drawn or one is None or other is None:
        return
    if case.tolerance:
        for what in (ENTROPY, CLOCK, PROCESS):  # a generator that is seeded anew is at no worker where another's is
            read = case.evidence.first(what, in_role=True)
            if read is not None and _SEEDING.search(read.line):
                yield from (*_seeds(case), *_outside(case))
        yield Cause(
            "random numbers per worker",
            f"{_ROWS}: the method draws random numbers (generator of {drawn[0]}), and each worker draws the same ones "
            "for its own rows. Draw by the row's number or on the driver, or pass the numbers as an argument",
        )
        return
    moved = [name for name in drawn if one.before.get(name) != other.before.get(name)]
    if not moved:
        return
    if case.is_apart:
        yield Cause(
            "one generator for several roles",
            f"random numbers that several roles draw: the generator of {moved[0]}, which they share only on one "
            f"worker. {_own_generator(moved[0])}",
        )
    driver = [seen for run in (case.here, case.there) for seen in run if set(moved) & set(seen.drawn_before)]
    if driver:
        yield Cause(
            "one generator for driver and role",
            f"random numbers that both the driver and the role draw: the generator of {moved[0]}. With Ray off they "
            f"share it; the driver's own code draws before {driver[0].title}. {_own_generator(moved[0])}",
        )
    yield Cause(
        "seed",
        f"random numbers: the generator of {moved[0]} has different states in the two runs before the method draws "
        "from it. In only one run, something drew from it or seeded it: an earlier call, a library or the time. "
        f"{_own_generator(moved[0])}",
    )


def _own_generator(name: str) -> str:
    made = {"python": "random.Random(seed)", "numpy": "numpy.random.default_rng(seed)"}
    return f"Give one of them its own generator, such as {made.get(name, 'torch.Generator().manual_seed(seed)')}"


def _driver_draws(case: Case) -> Iterator[Cause]:
    """The driver's generators stood elsewhere, as a role drew from them with Ray off."""
    here, there = case.here, case.there
    drawn = set(here[-1].drawn_before) | set(there[-1].drawn_before)
    if len(here) < 2 or len(there) < 2 or not drawn:
        return
    moved = [name for name in sorted(drawn) if here[-2].random.get(name) != there[-2].random.get(name)]
    if moved:
        use = " to order the rows" if case.unlike.how == "order" else ""
        yield Cause(
            "one generator for driver and role",
            f"random numbers that both the driver and a role draw: the generator of {moved[0]}, which the driver's own "
            f"code uses{use}. With Ray off they share it. {_own_generator(moved[0])}",
        )


def _rank(case: Case) -> Iterator[Cause]:
    read = case.evidence.first(RANK, in_role=True)
    if read is None:
        ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
        found = [one for one in case.evidence.of_call(in_role=True) if one.what == ENVIRONMENT]
        read = next((one for one in found if any(repr(name) in one.how for name in ranks)), None)
    if read is not None:
        told = f"{_ROWS}, or on which rank has them" if case.tolerance else "the result depends on the worker"
        yield Cause("rank", f"rank-dependent code: {told}: the role reads which worker it is, {read}")


_OUTSIDE = {  # what is read: the kind, and what to do
    CLOCK: ("time", "the clock", "Pass the time as an argument"),
    UUID: ("uuid", "a uuid", "Pass it as an argument"),
    FILE: ("file", "a file that is written or read", "Return its value, or read it on the driver"),
    PROCESS: ("process", "the process (pid, host)", "Pass it as an argument"),
}


def _outside(case: Case) -> Iterator[Cause]:
    """What the code reads outside of the object."""
    for what, (kind, words, remedy) in _OUTSIDE.items():
        if read := case.evidence.first(what, in_role=case.place != "argument"):
            yield Cause(kind, f"{_outside_words(case)}: {words}, {read}. {remedy}")


def _outside_words(case: Case) -> str:
    if case.place == "argument":
        return "the driver's own code reads values that differ from run to run"
    return "values of the process that __init__ reads" if case.is_constructor else "state outside of the object"


def _settings(case: Case) -> Iterator[Cause]:
    """Variables of the environment, and the folder, that the code reads and that differ."""
    one, other = _after(case.here[-1], case.rank), _after(case.there[-1], case.rank)
    if case.place == "argument":
        one, other = case.here[-1].settings, case.there[-1].settings
    in_role = case.place != "argument"
    unlike = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    for read in case.evidence.of_call(in_role=in_role):
        names = [name for name in unlike if name.startswith(VARIABLE) and repr(name[len(VARIABLE) :]) in read.how]
        if read.what == ENVIRONMENT and (names or not in_role):
            yield Cause(
                "environment variable",
                f"{_outside_words(case)}: an environment variable that is set differently there, {read}. Pass its "
                "value as an argument, or add it to the group's env",
            )
        if read.what == FOLDER and "working folder" in unlike:
            yield Cause(
                "working folder",
                f"{_outside_words(case)}: the working folder is {one.get('working folder')} and "
                f"{other.get('working folder')}, {read}. Use absolute paths",
            )


def _orders(case: Case) -> Iterator[Cause]:
    """The order of a set or of files; hash() of a text."""
    in_role = case.place != "argument"
    for what, kind, words in (
        (FILE_ORDER, "order of files", "the order in which the system lists files"),
        (SET, "order of a set", "the order of a set, which PYTHONHASHSEED decides in each process"),
        (HASH, "order of a set", "hash() of a text or id(), which differ from process to process"),
    ):
        read = case.evidence.first(what, in_role=in_role)
        one, other = _after(case.here[-1], case.rank), _after(case.there[-1], case.rank)
        is_other = one.get(HASH_SEED) != other.get(HASH_SEED) or (read is not None and read.how == "id()")
        if read is not None and (is_other or what == FILE_ORDER):
            yield Cause(kind, f"{_outside_words(case)}: {words}, {read}. Sort the items")


def _kept(case: Case) -> Iterator[Cause]:
    """Globals, attributes of classes and the like that calls change."""
    for name in case.evidence.kept:
        if name.endswith(")"):
            kind, words = "state kept between calls", "state outside of the object, kept between calls"
        elif _is_of_class(name):
            kind, words = "class attribute", "state outside of the object: a class's attributes"
        else:
            kind, words = "module global", "state outside of the object: a module's globals"
        yield Cause(
            kind, f"{words}: {name}, which the program changes as it runs. Keep it in an attribute of the object"
        )


def _is_of_class(name: str) -> bool:
    return any(part[:1].isupper() and not part.isupper() for part in name.split(".")[-2:-1])


def _shared(case: Case) -> Iterator[Cause]:
    """Objects that driver and role have in common with Ray off, and that one of them changes."""
    if case.unlike.how == "rounding":
        return
    if case.place == "argument":
        for value, call in case.evidence.changed_values:
            yield Cause(
                "value changed in place",
                f"a value that a role changes after it returned it: the value of {value} is changed in place by "
                f"{call}. With Ray off the driver has the change. With workers it does not. Return a copy",
            )
        return
    for name, held in case.evidence.changed_by_driver:
        yield Cause(
            "changed in place on the driver",
            f"the driver's own code changes {name} in place{_came_from(held, case.here[:-1])}. With Ray off they "
            "share it, but workers have their own copy. Pass a copy, and pass changed values again",
        )


def _came_from(held: Held, run: Sequence[Seen]) -> str:
    """The argument, or the value, by which driver and role came to have something in common."""
    for seen in reversed(run):
        for name, given in seen.arguments.items():
            if given.unlike(held) is None:
                return f", which is argument {name!r} of {seen.title}"
        if seen.value is not None and seen.value.unlike(held) is None:
            return f", which is the value of {seen.title}"
    return ""


def _own_state(case: Case) -> Iterator[Cause]:
    """Attributes that each worker changes for its own part of the rows."""
    if not case.tolerance or case.place != "value":
        return
    from_the_start = set(_attributes_changed([seen for seen in case.there if seen.name == "__init__"]))
    for name in _attributes_changed(case.there):
        if name in from_the_start:
            continue
        yield Cause(
            "state kept between calls",
            f"{_ROWS}: state kept between calls, {name}, which each worker changes for its own rows. Add up the "
            "workers' values in collect, or keep the state on the driver",
        )


def _attributes_changed(run: Sequence[Seen]) -> Iterator[str]:
    """The attributes that differ between the workers of a run before its last call."""
    before = [seen for seen in run if len(seen.workers) > 1]
    for seen in reversed(before):
        first, *others = (worker.state for worker in seen.workers)
        for owner, attributes in first.items():
            for name, held in attributes.items():
                if any(name in other.get(owner, {}) and held.unlike(other[owner][name]) for other in others):
                    yield f"{owner}.{name}"


def _shape_of(case: Case) -> Iterator[Cause]:
    """What the form of the difference tells."""
    how, whose = case.unlike.how, _whose(case)
    rows = f"{_ROWS}: " if case.tolerance and case.place != "argument" else ""
    if how == "order":
        yield Cause(
            "order of rows",
            f"{rows}the order of rows: {whose} gives the same rows in another order. Look for a shuffle, the order of "
            "a set, or a collect or dispatch function that changes the order",
        )
    words = {
        "dtype": ("dtype", "the type of numbers: a default dtype, autocast, or a conversion in between"),
        "device": ("device", "the device: a tensor is on another device. Move it in the role that uses it"),
        "shape": ("shape", "the number of items: padding to a longest row, or an average instead of rows"),
        "keys": ("missing key", "a key that only some workers or some steps have"),
        "type": ("type", "the type of a value, or None in its place"),
    }
    if how in words:
        kind, told = words[how]
        yield Cause(kind, f"{rows}{told} ({whose})")


def _rounding(case: Case) -> Iterator[Cause]:
    """Sums in another order."""
    if case.unlike.how != "rounding":
        return
    one, other = (note.settings.get(THREADS, "") if note else "" for note in case.notes())
    threads = f", {one} threads and {other}" if one != other else ""
    yield Cause(
        "order of sums",
        f"the order in which real numbers are added up{threads}. The runs differ by {case.unlike.size:.1e} of the "
        "numbers' size, which is rounding, not a mistake",
    )


_OF_ROLES = (
    *(_ambient, _in_place, _of_another_role, _rank, _draws, _seeds, _outside, _settings, _kept),
    *(_shared, _own_state, _earlier, _rounding, _orders, _shape_of),
)
_OF_CONSTRUCTORS = (_seeds, _outside, _settings, _rank, _ambient, _kept, _rounding, _orders, _shape_of)
_OF_THE_DRIVER = (
    _in_place,
    _ambient,
    _seeds,
    _driver_draws,
    _outside,
    _settings,
    _orders,
    _kept,
    _earlier,
    _shared,
    _rounding,
    _shape_of,
)
