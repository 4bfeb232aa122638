"""What the code of one call reads beside its arguments: the clock, the environment, a file, globals that it changes.

Code is watched as it runs, with Ray off, in a further run that is made once a difference has been found.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import io
import itertools
import linecache
import os
import platform
import random
import secrets
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np

from rayhelper.helper import RayHelper
from rayhelper.prove.held import Held, held_of
from rayhelper.roles.names import tree_of
from rayhelper.roles.project import is_of_project, is_users

# What is read, by the words that name it in a cause
CLOCK, ENTROPY, UUID, PROCESS = "the clock", "the system's random source", "a uuid", "the process"
ENVIRONMENT, FOLDER, FILE, FILE_ORDER = "the environment", "the working folder", "a file", "the order of files"
RANK, HASH, SET, THREAD = "the rank", "hash() or id()", "the order of a set", "the number of threads"

_BUILTINS: dict[str, tuple[Any, ...]] = {
    CLOCK: (
        *(time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns),
        *(time.process_time, time.process_time_ns, time.localtime, time.gmtime, time.ctime, time.strftime),
    ),
    PROCESS: (*(os.getpid, os.getppid, os.cpu_count, socket.gethostname), threading.get_ident, threading.get_native_id),
    ENTROPY: (os.urandom,),
    FOLDER: (os.getcwd,),
    FILE_ORDER: (os.listdir, os.scandir),
    HASH: (hash, id),
    FILE: (io.open, os.open, os.stat),
}
_NAME_OF = {id(function): what for what, functions in _BUILTINS.items() for function in functions}
_LIBRARIES = frozenset(  # through which a read may go on its way to what is read
    (
        *("os", "random", "secrets", "uuid", "datetime", "collections.abc", "pathlib", "tempfile", "platform"),
        *("socket", "genericpath", "posixpath", "glob", "fnmatch", "codecs"),
        *("torch.distributed.distributed_c10d", "rayhelper.helper"),
    )
)


def _codes() -> dict[CodeType, str]:
    import torch.distributed as dist

    found: dict[Any, str] = {uuid.uuid1: UUID, uuid.uuid4: UUID, RayHelper.current: RANK, platform.node: PROCESS}
    found |= {one: RANK for one in (getattr(dist, "get_rank", None), getattr(dist, "get_world_size", None)) if one}
    found |= dict.fromkeys((random.SystemRandom.random, random.SystemRandom.getrandbits, secrets.token_bytes), ENTROPY)
    environment = type(os.environ)
    found |= {environment.__getitem__: ENVIRONMENT, environment.__iter__: ENVIRONMENT}
    return {one.__code__: what for one, what in found.items() if isinstance(one, FunctionType)}


@dataclass(frozen=True)
class Read:
    """Something that code read: what, how it is written, and where."""

    what: str
    how: str  # "time.time_ns()"
    where: str  # "trainer.py:31"
    in_role: bool  # otherwise the driver's own code read it
    call: int  # while the run was at this call, or before it since the one before

    line: str = ""  # as it is written there

    def __str__(self) -> str:
        return f"{self.how} at {self.where}" + (f" ({self.line})" if 0 < len(self.line) <= _LONGEST else "")


_LONGEST = 100  # characters of a line that is shown
_PLAIN = ("bool", "int", "float", "str", "bytes", "NoneType")  # which nobody changes in place
_NUM_GIVEN = 30  # values of the last calls that are looked at after each call


def _place(code: CodeType, line: int, in_role: bool, call: int) -> tuple[str, bool, int, str]:
    where = f"{os.path.basename(code.co_filename)}:{line}"
    return where, in_role, call, linecache.getline(code.co_filename, line).strip()


@dataclass
class Evidence:
    """What was seen of a run up to one call."""

    number: int  # of the call
    reads: list[Read] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # globals and the like that calls of the run have changed
    changed_by_driver: list[tuple[str, Held]] = field(default_factory=list)  # attributes, as they were before
    changed_values: list[tuple[str, str]] = field(default_factory=list)  # the call that gave it, the one that changed

    def first(self, what: str, *, in_role: bool, before: bool = False) -> Read | None:
        """The first read of this in the call, or in the driver's code right before it; ``before``: in earlier ones."""
        found = (one for one in self.reads if one.what == what and one.in_role is in_role)
        return next((one for one in found if (one.call < self.number) is before), None)

    def of_call(self, *, in_role: bool) -> list[Read]:
        """What the call reads, or the driver's code right before it."""
        return [one for one in self.reads if one.call == self.number and one.in_role is in_role]


class Observer:
    """Watches the code of a run up to the end of one call."""

    def __init__(self, number: int, in_role: Callable[[], bool], before: dict[str, Held]) -> None:
        """``before``: what ``kept`` gave before the first run."""
        self.number, self.in_role, self.before = number, in_role, before
        self.evidence = Evidence(number)
        self.codes = _codes()
        self.executed: dict[CodeType, tuple[int, bool]] = {}  # the user's: at which call last, and whether in a role
        self.lines: dict[tuple[CodeType, int], int] = {}  # of the user's code, that ran: at which call last
        self.at = 1  # the call at which the run is
        self.outer = sys.gettrace()
        self.is_on = True
        self.states: dict[int, dict[str, dict[str, Held]]] = {}  # by object: what it held after its last call
        self.given: list[tuple[str, Any, Held]] = []  # what calls gave to the driver: the call, the value, what it held

    def begin(self) -> None:
        """The run begins."""
        sys.setprofile(self._note)
        sys.settrace(self._trace)

    def begins(self, whole: int, state: dict[str, dict[str, Held]]) -> None:
        """A call begins of an object, which holds this: what the driver's code has changed of it is noted."""
        if not self.is_on:
            return
        for owner, attributes in self.states.get(whole, {}).items():
            for name, held in attributes.items():
                now = state.get(owner, {}).get(name)
                if now is not None and held.unlike(now) and held.leaves[""].kind not in _PLAIN:
                    self.evidence.changed_by_driver.append((f"{owner}.{name}", held))

    def gave(self, title: str, whole: int, state: dict[str, dict[str, Held]], value: Any) -> None:
        """A call has given a value, and the object holds this: earlier values that it has changed are noted."""
        if not self.is_on:
            return
        self.states[whole] = state
        for k, (giver, given, held) in enumerate(self.given):
            now = held_of(given)
            if held.unlike(now):
                self.evidence.changed_values.append((giver, title))
                self.given[k] = (giver, given, now)
        if type(value).__name__ not in _PLAIN:
            self.given = [*self.given[-_NUM_GIVEN:], (title, value, held_of(value))]

    def ended(self, number: int) -> None:
        """A call has ended."""
        self.at = number + 1
        if number >= self.number:
            self.close()

    def close(self) -> None:
        """Ends watching."""
        if not self.is_on:
            return
        sys.settrace(self.outer)
        sys.setprofile(None)
        self.is_on = False
        for code, (_, in_role) in self.executed.items():
            for how, line in _sets(code):
                if (code, line) in self.lines:
                    self.evidence.reads.append(Read(SET, how, *_place(code, line, in_role, self.lines[code, line])))
        last = [code for code, (call, _) in self.executed.items() if call == self.number]
        names = {name for code in last for name in (*code.co_names, code.co_name)}
        for key, data in kept():
            before = self.before.get(key)
            is_used = key.rpartition(".")[2].partition(" ")[0] in names
            if is_used and before is not None and held_of(data).unlike(before):
                self.evidence.kept.append(key)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Notes which lines of the user's code run."""
        if event == "line":
            self.lines[frame.f_code, frame.f_lineno] = self.at
        return self._trace if _is_users_frame(frame) else None

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if _is_users_frame(frame):
                self.executed[code] = self.at, self.in_role()
            what = self.codes.get(code)
            if what is not None:
                self._read(what, code.co_qualname, frame.f_back, frame.f_locals)
            elif code is random.Random.seed.__code__ and frame.f_locals.get("a") is None:
                self._read(ENTROPY, "random.Random()", frame.f_back, {})
        elif event == "c_call":
            what = _NAME_OF.get(id(argument)) or _of_method(argument)
            if what is not None and not (what == FILE and argument is os.stat):
                self._read(what, getattr(argument, "__qualname__", str(argument)), frame, {})

    def _read(self, what: str, how: str, frame: FrameType | None, given: dict[str, Any]) -> None:
        user = self._user_of(frame)
        if user is None:
            return
        module = "time." if what == CLOCK and "." not in how else ""
        shown = f"{module}{how}()"
        if what == ENVIRONMENT:
            shown = f"os.environ[{given.get('key', '...')!r}]"
        elif what == FILE:
            shown = "open()"
        read = Read(what, shown, *_place(user.f_code, user.f_lineno, self.in_role(), self.at))
        if read not in self.evidence.reads:
            self.evidence.reads.append(read)

    def _user_of(self, frame: FrameType | None) -> FrameType | None:
        """The user's code that reads, directly or through a library that does nothing else; None: it is no such code,
        or the read is a part of one that is known."""
        while frame is not None:
            if _is_users_frame(frame):
                return frame
            if frame.f_code in self.codes or frame.f_globals.get("__name__") not in _LIBRARIES:
                return None
            frame = frame.f_back
        return None


def _of_method(function: Any) -> str | None:
    """What a built-in method reads, by its owner."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if name in ("now", "today", "utcnow") and isinstance(owner, type) and issubclass(owner, datetime.date):
        return CLOCK
    if name in ("seed", "initial_seed") and type(owner).__name__ == "Generator" and name == "seed":
        return ENTROPY
    return None


def _is_users_frame(frame: FrameType) -> bool:
    return is_users(str(frame.f_globals.get("__name__")))


def _sets(code: CodeType) -> Iterator[tuple[str, int]]:
    """The lines on which code makes a set, by its source."""
    tree = tree_of(code)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.Set, ast.SetComp)):
            name = "a set"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset"):
            name = f"{node.func.id}(...)"
        else:
            continue
        yield name, code.co_firstlineno + node.lineno - 1


def kept() -> Iterator[tuple[str, Any]]:
    """What outlives a call beside the attributes of objects: globals, attributes of classes, defaults of functions."""
    for module_name, module in list(sys.modules.items()):
        if not (module_name == "__main__" or (module is not None and is_of_project(module_name, module))):
            continue
        for name, value in list(vars(module).items()):
            if name.startswith("__"):
                continue
            key = f"{module_name}.{name}"
            if isinstance(value, FunctionType) and value.__module__ == module_name:
                yield from _of_function(key, value)
            elif isinstance(value, type) and value.__module__ == module_name:
                for attribute, inner in list(vars(value).items()):
                    function = getattr(inner, "function", getattr(inner, "__func__", inner))
                    if isinstance(function, FunctionType):
                        yield from _of_function(f"{key}.{attribute}", function)
                    elif not attribute.startswith("__") and (data := _data_in(inner)) is not None:
                        yield f"{key}.{attribute}", data
            elif (data := _data_in(value)) is not None:
                yield key, data


def _of_function(key: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if isinstance(default, (list, dict, set)):
            yield f"{key} (a default argument)", _data_in(default)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not set yet
            if (data := _data_in(cell.cell_contents)) is not None:
                yield f"{key} (a variable around it)", data
    own = {name: value for name, value in vars(function).items() if isinstance(value, _DATA)}
    if own:
        yield f"{key} (an attribute of the function)", own


_DATA = (bool, int, float, str, bytes, list, tuple, dict, np.ndarray, type(None))


def _data_in(value: Any) -> Any:
    """What of a value can be compared, in a list; None: nothing."""
    if (isinstance(value, _DATA) and _is_no_librarys(type(value))) or type(value).__name__ == "Tensor":
        return [value]
    if isinstance(value, (set, frozenset, deque)):
        return sorted(map(repr, value))
    if isinstance(value, random.Random):
        return [hash(value.getstate())]
    if isinstance(value, itertools.count) or hasattr(value, "cache_info"):
        return [repr(value.cache_info() if hasattr(value, "cache_info") else value)]
    if is_users(type(value).__module__) and hasattr(value, "__dict__"):
        return [{name: one for name, one in vars(value).items() if isinstance(one, _DATA)}]
    return None


def _is_no_librarys(cls: type) -> bool:
    """Whether a class of data is Python's, numpy's or the user's. What a library keeps may load much as it is read."""
    root = cls.__module__.partition(".")[0]
    return root in sys.stdlib_module_names or root == "numpy" or is_users(cls.__module__)
