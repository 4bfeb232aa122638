"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

import collections
import functools
import random
from typing import Any

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


class Seedings:
    """Tells whether the random generators of this process were given a seed since one last asked.

    Python, NumPy and PyTorch do not say so, and a seed that is set again leaves no other trace. Only public functions
    are wrapped: ``random.seed``, ``np.random.seed``, ``torch.manual_seed``, ``torch.set_rng_state``. Delete when the
    libraries count.
    """

    def __init__(self) -> None:
        self.num_others = 0
        self.num_torch = 0
        self.before: collections.deque[tuple[int, Any]] = collections.deque(maxlen=16)  # torch's state, by count

    @property
    def count(self) -> tuple[int, int]:
        """Another value than before, if a seed was set since."""
        return self.num_others, self.num_torch

    def begin(self) -> None:
        """Counts from now on the seeds of Python and NumPy."""
        for module in (random, np.random):
            _before(module, "seed", self._other)

    def begin_torch(self, torch: Any) -> None:
        """Counts from now on the seeds of torch."""
        _before(torch.random, "manual_seed", lambda *_: self._torch(torch))
        _before(torch.random, "set_rng_state", lambda *state: self._set_torch(torch, *state))
        torch.manual_seed, torch.set_rng_state = torch.random.manual_seed, torch.random.set_rng_state

    def _other(self, *_: Any) -> None:
        self.num_others += 1

    def _torch(self, torch: Any) -> None:
        self.before.append((self.num_torch, torch.get_rng_state()))
        self.num_torch += 1

    def _set_torch(self, torch: Any, *state: Any) -> None:
        """A seed inside ``torch.random.fork_rng`` is none when that ends, and puts the state back."""
        for count, before in self.before:
            if state and torch.equal(before, state[0]):
                self.num_torch = count
                return


def _before(module: Any, name: str, first: Any) -> None:
    """Calls ``first`` with the positional arguments of a function before each of its calls."""
    function = getattr(module, name)
    if hasattr(function, "__wrapped__"):
        return

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first(*args)
        return function(*args, **kwargs)

    setattr(module, name, wrapped)


seedings = Seedings()
