"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


def abort_process_group() -> None:
    """torch's default group is gone, and its other members, which may wait for this process, are freed.

    PyTorch (2.9 to 2.13) waits in ``destroy_process_group`` for what NCCL has under way, and the function that does not
    wait is private (torch/distributed/distributed_c10d.py, ``_abort_process_group``). Where a version has none, it
    waits. Delete when there is a public one.
    """
    import torch.distributed as dist

    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    (abort or dist.destroy_process_group)()


def num_collectives() -> int | None:
    """How many collectives this process has begun; None where torch cannot tell, or NCCL is among its groups.

    PyTorch (2.4 to 2.13) counts them for each group, and its names for the groups and for the count are private
    (torch/distributed/distributed_c10d.py). Gloo counts messages between two ranks as well; NCCL does not, and other
    libraries use NCCL beside torch. Delete when a process group says publicly what it has begun.
    """
    import torch.distributed as dist

    groups = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", None)
    if not groups or any(backend != "gloo" for backend, _ in groups.values()):
        return None
    try:
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except (AttributeError, RuntimeError):
        return None


def take_over(future: Any) -> None:
    """Whoever was given a future by a coroutine waits for it in another way than ``await``, as a task does.

    The coroutine marks the future (Python 3.11 to 3.14, asyncio/futures.py, ``_asyncio_future_blocking``), and a future
    that is marked still cannot be awaited again. A future of another kind has no mark. Delete when asyncio can await
    several coroutines in one task.
    """
    if hasattr(future, "_asyncio_future_blocking"):
        future._asyncio_future_blocking = False


def default_device(torch: Any) -> str:
    """The type of torch's default device, asked before every call: most have set none, and that is known in 0.1 us.

    ``torch.get_default_device`` (2.4 to 2.13) takes 10 us. A device that is set stands on a stack of modes whose length
    is private (torch/overrides.py, ``_len_torch_function_stack``); a version without it is asked in the public way.
    Delete when that is as quick.
    """
    length = getattr(torch._C, "_len_torch_function_stack", None)
    return "cpu" if length is not None and not length() else str(torch.get_default_device().type)


PRECISIONS = {  # where ``fp32_precision`` can be set, the general ones first: in torch.backends, and inside torch
    "": ("generic", "all"),
    "cudnn": ("cuda", "all"),
    "cudnn.conv": ("cuda", "conv"),
    "cudnn.rnn": ("cuda", "rnn"),
    "cuda.matmul": ("cuda", "matmul"),
    "mkldnn": ("mkldnn", "all"),
    "mkldnn.matmul": ("mkldnn", "matmul"),
    "mkldnn.conv": ("mkldnn", "conv"),
    "mkldnn.rnn": ("mkldnn", "rnn"),
}


def precisions(torch: Any) -> tuple[str, ...]:
    """``fp32_precision`` of all backends, in order of ``PRECISIONS``, asked before every call; none before torch 2.9.

    The nine public attributes take 50 us, the private function behind them (2.9 to 2.13, torch/backends/__init__.py,
    ``_get_fp32_precision_getter``) takes 2 us. A version without it is asked in the public way. Delete when that is as
    quick.
    """
    if not hasattr(torch.backends, "fp32_precision"):
        return ()
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    if get is None:
        return tuple(backend_of(torch, name).fp32_precision for name in PRECISIONS)
    return tuple(get(*inside) for inside in PRECISIONS.values())


def backend_of(torch: Any, name: str) -> Any:
    """What has an ``fp32_precision``: torch.backends, or a name in it."""
    return functools.reduce(getattr, name.split(".") if name else (), torch.backends)


MAX_MARKS = 16  # states of a generator that are remembered


class Mark(NamedTuple):
    """The driver read the state of a generator: when, and how often the generator had been set by then."""

    number: int
    point: int


class Generator:
    """What was done to one random generator of this process."""

    def __init__(self, next_number: Callable[[], int]) -> None:
        self.next_number = next_number
        self.point = 0  # the number of the event by which it was set last
        self.mark: int | None = None  # of the state to which it was set then; None: a seed, or a state from elsewhere
        self.marks: OrderedDict[Any, Mark] = OrderedDict()  # by what the state holds

    def seeded(self) -> None:
        """It was given a seed."""
        self.point, self.mark = self.next_number(), None

    def read(self, state: Any) -> None:
        """Its state was read."""
        key = _contents(state)
        self.marks.pop(key, None)
        self.marks[key] = Mark(self.next_number(), self.point)
        if len(self.marks) > MAX_MARKS:
            self.marks.popitem(last=False)

    def set_to(self, state: Any) -> None:
        """It was set to a state."""
        mark = self.marks.get(_contents(state))
        self.point, self.mark = self.next_number(), None if mark is None else mark.number


def _contents(state: Any) -> Any:
    """What a generator's state holds, to compare and to hash."""
    if isinstance(state, Mapping):
        return tuple((name, _contents(state[name])) for name in sorted(state))
    if isinstance(state, (tuple, list)):
        return tuple(map(_contents, state))
    if hasattr(state, "numpy"):
        return state.numpy().tobytes()
    return state.tobytes() if isinstance(state, np.ndarray) else state


class _Paused(threading.local):
    """Inside, what this thread does to the generators is not the driver's doing."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class Generators:
    """Tells whether the random generators of this process were seeded, read or set since one last asked.

    Python, NumPy and PyTorch do not say so, and a seed that is set again leaves no other trace. Only public functions
    are wrapped: ``random.seed``, ``getstate``, ``setstate``; ``np.random.seed``, ``get_state``, ``set_state``;
    ``torch.manual_seed``, ``seed``, ``get_rng_state``, ``set_rng_state``. Delete when the libraries count.
    """

    def __init__(self) -> None:
        self.num_events = 0
        self.by_name = {name: Generator(self._next) for name in ("python", "numpy", "torch")}
        self.paused = _Paused()
        self.seed: int | None = None  # of torch, after the last event; None: to be looked at

    def _next(self) -> int:
        self.num_events += 1
        return self.num_events

    def points(self) -> tuple[int, ...]:
        """By which event each was set last."""
        return tuple(one.point for one in self.by_name.values())

    def begin(self) -> None:
        """Notes from now on what is done to the generators of Python and NumPy."""
        self._watch(random, "python", seed="seed", read="getstate", set_to="setstate")
        self._watch(np.random, "numpy", seed="seed", read="get_state", set_to="set_state")

    def begin_torch(self, torch: Any) -> None:
        """Notes from now on what is done to torch's generator."""
        self._watch(torch.random, "torch", seed="manual_seed", read="get_rng_state", set_to="set_rng_state")
        self._watch(torch.random, "torch", seed="seed", read="get_rng_state", set_to="set_rng_state")
        for name in ("manual_seed", "seed", "get_rng_state", "set_rng_state"):
            setattr(torch, name, getattr(torch.random, name))
        self.seed = None

    def look_again(self) -> None:
        """The driver makes a call, and no worker is at work in this thread.

        An interrupt may have left ``paused`` on, so that events went unnoticed: each generator counts as seeded then.
        """
        if self.paused.depth:
            self.paused.depth = 0
            for one in self.by_name.values():
                one.seeded()
        self.look_at_seed()

    def look_at_seed(self) -> None:
        """Another seed of torch than after the last event was set in a way that is not watched."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        seed = torch.initial_seed()
        if self.seed is not None and seed != self.seed:
            self.by_name["torch"].seeded()
        self.seed = seed

    def _watch(self, module: Any, name: str, *, seed: str, read: str, set_to: str) -> None:
        one = self.by_name[name]
        self._after(module, seed, lambda args, value: one.seeded())
        self._after(module, read, lambda args, value: one.read(value))
        self._after(module, set_to, lambda args, value: one.set_to(args[0]) if args else one.seeded())

    def _after(self, module: Any, name: str, note: Callable[[tuple[Any, ...], Any], None]) -> None:
        """Calls ``note`` with the positional arguments and the value of a function after each of its calls."""
        function = getattr(module, name)
        if hasattr(function, "__wrapped__"):
            return

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self.paused.depth:
                self.look_at_seed()  # what was set before in a way that is not watched
            value = function(*args, **kwargs)
            if not self.paused.depth:
                note(args, value)
                self.seed = None
            return value

        setattr(module, name, wrapped)


generators = Generators()
