"""The states of all random generators of a process, so that a resumed run draws as the interrupted one would have.

They are made of tensors, numbers and tuples alone, so that a file of them is read without running code.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainers.backends.saved_files import read_saved


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, those of ``device`` among them."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    name, words, *others = np.random.get_state()
    numpy = (str(name), torch.from_numpy(np.asarray(words, np.int64)), *others)
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Puts back what ``random_state`` gave."""
    random.setstate(state["python"])
    name, words, *others = state["numpy"]
    np.random.set_state((name, np.asarray(words, np.uint32), *others))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextlib.contextmanager
def unmoved(device: torch.device) -> Iterator[None]:
    """Afterwards the generators go on where they were before, as if nothing had been drawn inside."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def read_random_state(path: Path) -> dict[str, Any]:
    """What ``random_state`` gave, from a file of ``torch.save``.

    Older files hold NumPy's words as an array. An array of numbers needs four names, which run nothing of the file.

    Raises:
        ConfigError: the file holds anything else; nothing of it was run.
    """
    rebuild: Any = np.zeros(1).__reduce__()[0]
    of_arrays: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    of_arrays += [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    with torch.serialization.safe_globals(of_arrays):
        state: dict[str, Any] = read_saved(path)
    return state


def zero_dropout(module: torch.nn.Module) -> None:
    """Sets every dropout to zero: the layers, and the rates that parts and configurations keep as plain numbers."""
    for holder, name in list(dropouts(module)):
        setattr(holder, name, 0.0)


def dropouts(module: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """Where a model keeps rates of dropout, as an object and its attribute."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            yield part, "p"
        for holder in (part, getattr(part, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    yield holder, name
