"""Marks: what tells later, at little cost, whether a value is still what it was.

    before = mark(value)
    ...                          the value is changed in place, or is not
    differ(before, mark(value))

A mark holds plain values, identities, and counters: the versions that torch keeps of its tensors. Arrays and a few
tensors of the CPU are read as well: ``np.copyto`` and ``weight.data`` count no version. Of a long container, a large
array and a module with many tensors a sample is read. A mark keeps no tensor and no object alive.

Objects of the user's project are looked into. Of an object of a library only what trains is: modules, tensors,
optimizers, generators, dataclasses, and numbers and strings. Its dicts and lists are mostly caches.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import pathlib
import random
import re
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np

from rayhelper.roles import names
from rayhelper.roles.project import is_users
from rayhelper.roles.slots import attributes_of, slots_of
from rayhelper.roles.tensors import bytes_of, some_of

PLAIN = frozenset((*names.PLAIN, bytes, complex))
MOST = 1024  # entries of one mark
_OFTEN = 8  # calls of a method that are looked at in full
_SELDOM = 64  # and later one of so many
_HASHED = 1 << 14  # plain items of a list that are all read
_MANY = 512  # items of a container from which on a sample is read
_SAMPLE = 64
_WHOLE_BYTES = 16 << 10  # of an array; a sample of a larger one
_DEPTH = 5
_READ_TENSORS = 4  # of a module on the CPU, whose contents are read
_ITERABLES: tuple[Any, ...] = ([], (), {}, set(), "", range(0), {}.values(), {}.items())
_ITERATORS = frozenset((*(type(iter(one)) for one in _ITERABLES), type(reversed([]))))
_MAY_BE_EMPTY = frozenset((*PLAIN, list, dict, set, tuple, collections.defaultdict, collections.deque))
_KEEPS_COPIES = re.compile("cache|memo(?!ry)", re.IGNORECASE)  # names of what may be computed again
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


class Mark(list[Any]):
    """Entries that are compared. At ``most`` so many are wanted."""

    most = MOST
    is_whole = True  # False: reading the value raised, as where another thread changes it meanwhile; nothing is told


_Add = Callable[[Any, "Mark", int], None]


def mark(value: Any, most: int = MOST) -> Mark:
    """What tells later whether the value was changed in place, or is another one."""
    found = Mark()
    found.most = most
    try:
        _add(value, found, _DEPTH)
    except Exception:  # a call must not fail because it is observed
        found.is_whole = False
    return found


def is_looked_at(number: int) -> bool:
    """Whether values are read in full for this call of a method; the first one is 1."""
    return number <= _OFTEN or not number % _SELDOM


def is_own(module: str) -> bool:
    """Whether classes and functions of a module are the user's. Of one that is not loaded they came by value."""
    return module not in sys.modules or is_users(module)


def differ(before: Any, now: Any) -> bool:
    """Whether two marks, or two plain values, tell of a change."""
    if not all(one.is_whole for one in (before, now) if isinstance(one, Mark)):
        return False
    try:
        return before is not now and bool(before != now)
    except Exception:  # values that cannot be compared
        return True


def is_another(before: Any, value: Any) -> bool:
    """Whether a mark is surely of another value, by its first entry alone."""
    return not isinstance(before, Mark) or not before or before[0] != id(value)


def _add(value: Any, found: Mark, depth: int) -> None:
    kind: Any = type(value)
    if kind in PLAIN:
        found.append(value)
    elif len(found) < found.most:
        reader_of(kind)(value, found, depth)


@functools.lru_cache(4096)
def reader_of(kind: Any) -> _Add:
    """What reads values of a type."""
    if hasattr(kind, "__rayhelper_roles__"):  # which is looked at itself
        return _identity
    torch: Any = sys.modules.get("torch")
    of_torch: tuple[tuple[Any, _Add], ...] = ()
    if torch is not None:
        of_torch = (
            (torch.Tensor, _tensor),
            (torch.nn.Module, _module),
            (torch.optim.Optimizer, _optimizer),
            (torch.Generator, _torch_generator),
        )
    of_bases: tuple[tuple[Any, _Add], ...] = (
        *of_torch,
        ((enum.Enum, pathlib.PurePath, np.generic), _equal),
        ((type, types.FunctionType, types.ModuleType, types.MethodType, functools.partial), _identity),
        (np.ndarray, _array),
        (dict, _dict),
        ((list, tuple, collections.deque), _list),
        ((set, frozenset), _set),
        (_GENERATORS, _generator),
        (types.GeneratorType, _suspended),
    )
    for bases, reader in of_bases:
        if issubclass(kind, bases):
            return reader
    if kind in _ITERATORS:
        return _iterator
    if not kind.__dictoffset__ and not slots_of(kind):
        return _identity
    module = str(kind.__module__)
    if is_dataclass(kind) or issubclass(kind, (types.SimpleNamespace, argparse.Namespace)) or is_own(module):
        return _object
    return _identity if module.partition(".")[0] in sys.stdlib_module_names else _library


def _identity(value: Any, found: Mark, depth: int) -> None:
    found.append(id(value))


def _equal(value: Any, found: Mark, depth: int) -> None:
    found.append(value)


def _dict(value: Any, found: Mark, depth: int) -> None:
    if isinstance(value, collections.defaultdict):  # reading it may have added what is empty
        value = {key: item for key, item in value.items() if type(item) not in _MAY_BE_EMPTY or item}
        found.append(len(value))
    else:
        found += (id(value), len(value))
    if depth:
        for key, item in value.items() if len(value) <= _MANY else islice(value.items(), _SAMPLE):
            found.append(key if type(key) in PLAIN else id(key))
            _add(item, found, depth - 1)


def _list(value: Any, found: Mark, depth: int) -> None:
    length = len(value)
    found += (id(value), length)
    if 0 < length <= _HASHED and type(value[0]) in PLAIN and type(value[-1]) in PLAIN:
        try:
            found.append(hash(tuple(value)))
        except TypeError:  # others lie between them
            pass
        else:
            return
    if depth:
        for item in value if length <= _MANY else _some(value, length):
            _add(item, found, depth - 1)


def _some(value: Any, length: int) -> Iterable[Any]:
    if isinstance(value, collections.deque):
        return [value[0], value[-1]]
    return [*value[:: length // _SAMPLE], value[-1]]


def _set(value: Any, found: Mark, depth: int) -> None:
    found += (id(value), len(value))
    if len(value) <= _MANY:
        found.append(hash(frozenset(value)))


def _array(value: Any, found: Mark, depth: int) -> None:
    found += (id(value), value.shape)
    if value.dtype == object:
        found += map(id, value.flat[:_SAMPLE])
    elif value.nbytes <= _WHOLE_BYTES:
        found.append(hash(value.tobytes()))
    else:
        found.append(hash(value.flat[:: value.size // 1024].tobytes()))


def _tensor(value: Any, found: Mark, depth: int) -> None:
    _tensors([value], found)
    found += bytes_of(value)


def _tensors(tensors: list[Any], found: Mark) -> None:
    """Which they are, their versions, and whether they have gradients."""
    found += map(id, tensors)
    try:
        found += [one._version for one in tensors]
    except RuntimeError:  # made in inference mode, which counts none
        found += [one._version for one in tensors if not one.is_inference()]
    gradients = [one.grad for one in tensors if one.requires_grad and one.is_leaf]
    found += [None if one is None else one._version for one in gradients]


def _module(value: Any, found: Mark, depth: int) -> None:
    found.append(id(value))
    every: list[Any] = []
    modules, seen = [value], {id(value)}
    for module in modules:  # more of them are added meanwhile
        held = module.__dict__
        if here := held["_parameters"]:
            every += here.values()
        if here := held["_buffers"]:
            every += here.values()
        if below := held["_modules"]:
            more = [one for one in below.values() if id(one) not in seen and one is not None]
            seen.update(map(id, more))
            modules += [one for one in more if "_rayhelper" not in one.__dict__]
        if depth and is_own(type(module).__module__):
            for name in held.keys() - _names_of_torch():
                found.append(name)
                _add(held[name], found, depth - 1)
    tensors = [one for one in every if one is not None]
    _tensors(tensors, found)
    for one in some_of(tensors, _READ_TENSORS):
        found += bytes_of(one)


def _torch() -> Any:
    return sys.modules["torch"]


@functools.cache
def _names_of_torch() -> frozenset[str]:
    """The names under which each module of torch keeps what is its own."""
    return frozenset(vars(_torch().nn.Module())) | {"training"}


def _optimizer(value: Any, found: Mark, depth: int) -> None:
    found.append(id(value))
    for group in value.param_groups:
        for name, item in group.items():
            if name != "params":
                found.append(item if type(item) in PLAIN else id(item))
    found.append(len(value.state))
    for state in islice(value.state.values(), _READ_TENSORS):
        if isinstance(state, dict):
            for item in state.values():
                found.append((id(item), getattr(item, "_version", None)) if type(item) not in PLAIN else item)


def _torch_generator(value: Any, found: Mark, depth: int) -> None:
    found += (id(value), hash(value.get_state().numpy().tobytes()))


def _generator(value: Any, found: Mark, depth: int) -> None:
    found.append(id(value))
    if isinstance(value, random.Random):
        found.append(hash(value.getstate()))
    elif isinstance(value, np.random.Generator):
        found.append(repr(value.bit_generator.state))
    else:
        found.append(repr(value.get_state(legacy=False)))


def _iterator(value: Any, found: Mark, depth: int) -> None:
    found += (id(value), length_hint(value, -1))


def _suspended(value: Any, found: Mark, depth: int) -> None:
    """A generator: where it is, and which values its variables have."""
    frame = value.gi_frame
    found.append(id(value))
    if frame is not None:
        found.append(frame.f_lasti)
        found += map(id, frame.f_locals.values())


def _object(value: Any, found: Mark, depth: int) -> None:
    held = attributes_of(value)
    found.append(id(value))
    if depth:
        for name, item in held.items() if len(held) <= _MANY else islice(held.items(), _SAMPLE):
            if not may_keep_copies(name):
                found.append(name)
                _add(item, found, depth - 1)


def may_keep_copies(name: str) -> bool:
    """Whether a name says that what it holds may be computed again."""
    return _KEEPS_COPIES.search(name) is not None


def _library(value: Any, found: Mark, depth: int) -> None:
    found.append(id(value))
    if depth < _DEPTH - 3:
        return
    for name, item in attributes_of(value).items():
        kind: Any = type(item)
        if kind in PLAIN or reader_of(kind) in _OF_LIBRARIES or is_dataclass(kind):
            found.append(name)
            _add(item, found, min(depth - 1, 2))


_OF_LIBRARIES: tuple[_Add, ...] = (_tensor, _module, _optimizer, _torch_generator, _generator, _array, _library, _equal)
