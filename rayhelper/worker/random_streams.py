"""The random generators of Python, NumPy and torch: workers draw what the same code draws with Ray off.

    driver     RandomState    where its generators are, sent with a construction
               DriverRandom   per group: what became of them between two calls, sent with the next call (``NewRandom``)
    worker     RandomStream   its own generators: they begin as the driver's, and follow what the driver is told to do

With Ray off driver and roles share a generator. So a seed that the driver sets holds for roles as well. A state that it
reads and sets again later (``torch.random.fork_rng``, ``random.setstate(state)``) takes roles back to where they
themselves were when it was read.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from rayhelper.worker.patches import MAX_MARKS, generators
from rayhelper.worker.when_loaded import when_loaded

NAMES = ("python", "numpy", "torch")


class RandomState(NamedTuple):
    """Where the random generators of a process are: of Python, NumPy and torch (None: not loaded)."""

    python: Any
    numpy: Any
    torch: Any
    seed: int | None  # of torch
    points: tuple[int, ...]  # how often each was set in this process, in order of ``NAMES``

    @classmethod
    def here(cls) -> RandomState:
        torch = sys.modules.get("torch")
        if not generators.paused.depth:
            generators.look_at_seed()
        with generators.paused:
            state = random.getstate(), np.random.get_state()
            if torch is None:
                return cls(*state, None, None, generators.points())
            return cls(*state, torch.get_rng_state().numpy(), torch.initial_seed(), generators.points())

    def digest(self) -> bytes:
        """Equal for states from which the same numbers are drawn."""
        numpy = tuple(one.tobytes() if isinstance(one, np.ndarray) else one for one in self.numpy)
        told = repr((self.python, numpy, None if self.torch is None else self.torch.tobytes()))
        return hashlib.blake2b(told.encode(), digest_size=16).digest()

    def restore(self, names: Collection[str] = NAMES) -> None:
        """These generators of this process go on from here. CUDA's start over, with torch's seed, if it is another."""
        with generators.paused:
            if "python" in names:
                random.setstate(self.python)
            if "numpy" in names:
                np.random.set_state(self.numpy)
        if "torch" in names and self.torch is not None:
            when_loaded("torch", self._restore_torch)

    def _restore_torch(self, torch: Any) -> None:
        if torch.initial_seed() != self.seed:
            torch.cuda.manual_seed_all(self.seed)  # waits for CUDA to be used, and does nothing without it
        with generators.paused:
            torch.set_rng_state(torch.from_numpy(self.torch.copy()))


@contextlib.contextmanager
def drawing_nothing() -> Iterator[None]:
    """Python's and NumPy's generators end where they were. Ray draws from them, and so does the import of rich."""
    before = RandomState.here()
    try:
        yield
    finally:
        before.restore(("python", "numpy"))


class NewRandom(NamedTuple):
    """What became of the driver's generators since the last call to a group."""

    marks: tuple[tuple[str, int], ...]  # the driver read its state: a worker remembers its own, by name and number
    names: tuple[str, ...]  # the generators that were set
    back: dict[str, int]  # of these, the ones that were set to a state of such a number
    state: RandomState | None  # where the others go on; None: nothing was set


class DriverRandom:
    """What the workers of one group have been told of the driver's generators."""

    def __init__(self) -> None:
        self.told: dict[str, int] | None = None  # by generator: how often it had been set; None: nothing is constructed
        self.looked_at = 0  # the events of the generators that were looked at
        self.marks: list[tuple[str, int]] = []  # read in the place where the workers are, which do not know of it yet
        self.known: set[tuple[str, int]] = set()  # the marks that workers have
        generators.begin()
        when_loaded("torch", generators.begin_torch)

    def constructing(self) -> None:
        """The workers are told where the driver's generators are."""
        generators.look_again()
        told = dict(zip(NAMES, generators.points(), strict=True))
        if self.told is not None:  # draws of the objects that are there go on behind this one, unless there is a seed
            self.marks += [(name, number) for name, number in self._new_marks() if told[name] == self.told[name]]
        self.told = told
        self.looked_at = generators.num_events

    def of_call(self) -> NewRandom | None:
        """What a call to the group has to tell; None: nothing."""
        generators.look_again()
        if generators.num_events == self.looked_at or self.told is None:
            return None
        marks, self.marks = [*self.marks, *self._new_marks()], []
        self.known |= set(marks)
        names: list[str] = []
        back: dict[str, int] = {}
        for name in NAMES:
            one = generators.by_name[name]
            if one.point != self.told[name]:
                names.append(name)
                if one.mark is not None and (name, one.mark) in self.known:
                    back[name] = one.mark
                self.told[name] = one.point
        self.looked_at = generators.num_events
        self.known &= {(name, mark.number) for name in NAMES for mark in generators.by_name[name].marks.values()}
        if not names and not marks:
            return None
        return NewRandom(tuple(marks), tuple(names), back, RandomState.here() if names else None)

    def _new_marks(self) -> list[tuple[str, int]]:
        """The states that were read since one last looked, in the place where the workers are."""
        assert self.told is not None, "something is constructed"
        newest, self.looked_at = self.looked_at, generators.num_events
        found = [(name, mark) for name in NAMES for mark in generators.by_name[name].marks.values()]
        return [(name, mark.number) for name, mark in found if mark.number > newest and mark.point == self.told[name]]


class RandomStream:
    """A worker's random generators: they begin as the driver's were when the first object was constructed here.

    Later constructions see the driver's as they are then. The calls in between go on where they were, except for
    generators that the driver has set since.
    """

    def __init__(self) -> None:
        self.begun_with: RandomState | None = None
        self.marks: OrderedDict[tuple[str, int], Marked] = OrderedDict()

    def constructing(self, driver: RandomState) -> DrawingFrom:
        """Inside, the generators are as the driver's."""
        before = self.begun_with
        self.begun_with = driver
        kept = [] if before is None else [i for i in range(len(NAMES)) if before.points[i] == driver.points[i]]
        return DrawingFrom(driver, then_as_before=[NAMES[i] for i in kept])

    def follow(self, new: NewRandom) -> None:
        """The generators of this process do what the driver's did."""
        if new.marks:
            here = Marked.here()
            self.marks |= dict.fromkeys(new.marks, here)
            while len(self.marks) > MAX_MARKS * len(NAMES):
                self.marks.popitem(last=False)
        for name in new.names:
            marked = self.marks.get((name, new.back[name])) if name in new.back else None
            if marked is not None:
                marked.restore(name)
            elif new.state is not None:
                new.state.restore([name])
        if self.begun_with is not None and new.state is not None:
            self.begun_with = self.begun_with._replace(points=new.state.points)


class Marked(NamedTuple):
    """A worker's generators, with those of CUDA devices, which the driver's state does not tell."""

    state: RandomState
    cuda: Any  # of all devices; None: they were not in use

    @classmethod
    def here(cls) -> Marked:
        torch = sys.modules.get("torch")
        is_used = torch is not None and torch.cuda.is_initialized()
        return cls(RandomState.here(), torch.cuda.get_rng_state_all() if torch is not None and is_used else None)

    def restore(self, name: str) -> None:
        """One of the generators goes on from here, with torch's also those of CUDA devices."""
        self.state.restore([name])
        if name == "torch" and self.cuda is not None:
            sys.modules["torch"].cuda.set_rng_state_all(self.cuda)


class DrawingFrom(contextlib.AbstractContextManager[None]):
    """Inside, the generators of this process go on from a state. No generator: see ``acting_as``.

    ``then_as_before``: those that go on afterwards from where they were.
    """

    def __init__(self, state: RandomState, *, then_as_before: Collection[str]) -> None:
        self.state = state
        self.then_as_before = then_as_before

    def __enter__(self) -> None:
        self.before = RandomState.here() if self.then_as_before else None
        self.state.restore()

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            self.before.restore(self.then_as_before)
