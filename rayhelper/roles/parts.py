"""Wholes and their parts: who a decorated object is, and what is being built right now.

    class Trainer:                               address    name
        def __init__(self):                      "0"        Trainer
            self.policy = Policy()               "0.0"      Trainer.policy
            self.generator = Generator()         "0.1"      Trainer.generator

A decorated object that is built while the ``__init__`` of another one runs is a part of it. Every process builds the
part as it runs the whole's ``__init__``, so the k-th part is the same one everywhere; ``check_same_parts`` compares. An
object that is passed travels as its address, and arrives as the receiving process's own object.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import fields, is_dataclass
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from rayhelper.errors import DecorationError, RoleError
from rayhelper.roles.runtime import state

NO_INSTANCE = "-"  # the address of calls that belong to no object: methods of role driver may stand in any class
_DEPTH = 10  # of containers that are looked into for decorated objects, where nothing is pickled
_MANY = 1000  # items of a container from which on it is not looked into


class Record(NamedTuple):
    """A part as processes tell each other: its address, its class, and its name for messages."""

    address: str
    cls: str
    name: str


class Identity:
    """Who a decorated object is: its class, its whole (None: it is one), its parts, and its address among processes.

    ``address`` is None for an object that one process alone has.
    """

    def __init__(self, instance: Any, whole: Identity | None, address: str | None) -> None:
        self.cls = type(instance)
        self.whole = whole
        self.address = address
        self.parts: list[Identity] = []
        self.is_built = False
        self._name = ""
        try:
            self.reference: Callable[[], Any] = weakref.ref(instance)
        except TypeError:  # a class without weak references
            self.reference = lambda: instance  # which refers to this as well: Python collects both together
        if whole is not None:
            whole.parts.append(self)

    @property
    def outermost(self) -> Identity:
        """The whole that the object belongs to, in the end."""
        return self if self.whole is None else self.whole.outermost

    @property
    def is_building(self) -> bool:
        """Whether the ``__init__`` of the outermost whole still runs."""
        return not self.is_built if self.whole is None else self.whole.is_building

    @property
    def name(self) -> str:
        """As a user would write it: ``Trainer.policy``, ``Trainer.scorers[1]``."""
        if self.whole is None:
            return self.cls.__name__
        if not self._name:
            attribute = _attribute(self.whole.reference(), self.reference())
            if not attribute:
                return f"{self.whole.name}.{self.cls.__name__}"
            self._name = f"{self.whole.name}.{attribute}"
        return self._name

    def called(self, method: Any) -> str:
        """A method of this object, for timelines: of a whole as its function is named."""
        return method.function.__qualname__ if self.whole is None else f"{self.name}.{method.__name__}"

    def title(self, method: Any) -> str:
        """A method of this object, for messages: with its role."""
        return str(method) if self.whole is None else f"{self.called(method)} (role {method.role!r})"

    def records(self) -> tuple[Record, ...]:
        """All parts, and their parts, in the order in which they were built."""
        return tuple(part.record() for part in self._family())

    def instances(self) -> Iterator[Any]:
        """The object and its parts, and theirs, as far as they still exist."""
        found = (identity.reference() for identity in (self, *self._family()))
        yield from (instance for instance in found if instance is not None)

    def record(self) -> Record:
        # pickled by value, a class that a function defines keeps only the last part of its name
        return Record(str(self.address), self.cls.__qualname__.rpartition("<locals>.")[2], self.name)

    def _family(self) -> Iterator[Identity]:
        for part in self.parts:
            yield part
            yield from part._family()


class Building(NamedTuple):
    """An object whose ``__init__`` runs: on which runtime, who it is, and itself."""

    runtime: Any
    identity: Identity
    instance: Any


_innermost: ContextVar[Building | None] = ContextVar("rayhelper_building", default=None)


def being_built() -> Building | None:
    """The innermost object that this process, as what it is now, is building."""
    found = _innermost.get()
    if found is None:
        return None
    runtime = state.active
    return found if found.runtime is runtime or found.runtime is getattr(runtime, "process", found) else None


def begin_building(identity: Identity, instance: Any) -> Token[Building | None]:
    """From now on objects that are built are parts of this one, until ``end_building``."""
    return _innermost.set(Building(state.active, identity, instance))


def begin_apart() -> Token[Building | None]:
    """From now on objects that are built are parts of none, until ``end_building``."""
    return _innermost.set(None)


def end_building(token: Token[Building | None]) -> None:
    _innermost.reset(token)


def address_within(whole: Identity) -> str | None:
    """The address of the next part of ``whole``."""
    return None if whole.address is None else f"{whole.address}.{len(whole.parts)}"


def check_whole(whole: type, part: type) -> None:
    """Raises DecorationError if the class of a whole does not name the roles of a part."""
    named, own = whole.__rayhelper_roles__, part.__rayhelper_roles__  # type: ignore[attr-defined]
    missing = [role for role in own if role not in named]
    if missing:
        roles = ", ".join(map(repr, missing))
        raise DecorationError(
            f"{whole.__name__} builds a {part.__name__} in its __init__, whose role{'s' * (len(missing) > 1)} {roles} "
            f"it does not name. Write @RayHelper.worker(group={[*named, *missing]!r}) on {whole.__name__}."
        )


def check_same_parts(name: str, here: str, expected: Sequence[Record], built: Mapping[str, Sequence[Record]]) -> None:
    """Raises RoleError if a process built other parts of an object than this one did.

    Args:
        name: The object, for messages.
        here: This process, for messages.
        expected: The parts that this process built.
        built: By process: the parts that it built.
    """
    for who, records in built.items():
        if [record[:2] for record in records] == [record[:2] for record in expected]:
            continue
        told = _difference(here, expected, who, records)
        raise RoleError(
            f"the __init__ of {name} built other parts on {who} than on {here}: {told}. An __init__ runs on the "
            "driver and on every worker, and must build the same parts everywhere. Build them unconditionally, "
            "and not in a method of a role."
        )


def _difference(here: str, ours: Sequence[Record], who: str, theirs: Sequence[Record]) -> str:
    for missing_on, some, others in ((who, ours, theirs), (here, theirs, ours)):
        names = {record.name for record in others}
        lacking = [record for record in some if record.name not in names]
        if lacking and len(some) > len(others):
            return f"{lacking[0].name} (a {lacking[0].cls}) is missing on {missing_on}"
    for one, other in zip(ours, theirs, strict=False):
        if one[:2] != other[:2]:
            return f"{one.name} is a {one.cls} on {here}, where {who} has a {other.cls} ({other.name})"
    last, missing_on = (ours[len(theirs)], who) if len(ours) > len(theirs) else (theirs[len(ours)], here)
    return f"{last.name} (a {last.cls}) is missing on {missing_on}"


# Decorated objects among the arguments and values of calls


def placement_of(value: Any) -> Any:
    """Where the roles of a decorated object run; None: it is no decorated object, or was built with Ray off."""
    return value._rayhelper if hasattr(type(value), "__rayhelper_roles__") else None


class _Destination(threading.local):
    groups: Collection[str] = ()


_destination = _Destination()


class bound_for:  # noqa: N801
    """Inside, what is pickled goes to the workers of these groups, which must have its decorated objects."""

    def __init__(self, *groups: str) -> None:
        self.groups = groups

    def __enter__(self) -> None:
        self.outer, _destination.groups = _destination.groups, self.groups

    def __exit__(self, *_: object) -> None:
        _destination.groups = self.outer


def reference_to(value: Any) -> tuple[Any, ...] | None:
    """How a decorated object is pickled on its way between the driver and its workers; None: it is none.

    Raises RoleError if a group that it is bound for does not have it.
    """
    placement = placement_of(value)
    if placement is None or placement.identity.address is None:
        return None
    for group in _destination.groups:
        if group not in placement.hosts:
            raise elsewhere(placement.identity.name, f"group {group!r}")
    return arrived, (placement.identity.address, placement.identity.name)


def arrived(address: str, name: str) -> Any:
    """This process's own object in place of one that was passed. Raises RoleError if it does not have it."""
    found = None if state.active is None else state.active.instance_at(address)
    if found is None:
        who = "a process with Ray off" if state.active is None else state.active.describe()
        raise elsewhere(name, who)
    return found


def elsewhere(name: str, who: str) -> RoleError:
    """The error for an object that a process was given and does not have."""
    return RoleError(
        f"{name} was passed to {who}, which does not have it. An object lives on the driver and on the workers of "
        "its roles. Pass its results, or let one device group host both."
    )


def check_hosts(arguments: Iterable[Any], group: str) -> None:
    """Raises RoleError if a decorated object among the arguments does not live on the workers of a group."""
    for value in _decorated(arguments, _DEPTH):
        placement = value._rayhelper
        if group not in placement.hosts:
            raise elsewhere(placement.identity.name, f"group {group!r}")


def _decorated(values: Iterable[Any], depth: int) -> Iterator[Any]:
    for value in values:
        if placement_of(value) is not None:
            yield value
        elif depth:
            yield from _decorated(_contents(value).values(), depth - 1)


def own_objects(value: Any, depth: int = _DEPTH) -> Any:
    """The value as this process has it where nothing is pickled: with its own objects in place of another's.

    Raises RoleError for an object that this process does not have.
    """
    placement = placement_of(value)
    if placement is not None:
        identity = placement.identity
        return refuse_to_travel(placement) if identity.address is None else arrived(identity.address, identity.name)
    contents = _contents(value) if depth else {}
    own = {name: own_objects(item, depth - 1) for name, item in contents.items()}
    if all(own[name] is item for name, item in contents.items()):
        return value
    kind = type(value)
    if kind is dict:
        return own
    if kind in (list, tuple):
        return kind(own.values())
    if isinstance(value, (MethodType, functools.partial, FunctionType)):
        return _bound_to(value, list(own.values()))
    copied = copy.copy(value)
    for name, item in own.items():
        object.__setattr__(copied, name, item)  # also of a frozen one
    return copied


def _contents(value: Any) -> Mapping[Any, Any]:
    """What a container or a dataclass holds, by place; nothing if it is another value, or of many items."""
    kind = type(value)
    if kind in (list, tuple):
        return dict(enumerate(value)) if len(value) <= _MANY else {}
    if kind is dict:
        return value if len(value) <= _MANY else {}
    if is_dataclass(kind):
        return {field.name: getattr(value, field.name, None) for field in fields(kind)}
    return dict(enumerate(bound_values(value)))


def bound_values(value: Any) -> list[Any]:
    """What a bound method, a partial or a function with a closure refers to; nothing of another value."""
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType) and value.__closure__:
        try:
            return [cell.cell_contents for cell in value.__closure__]
        except ValueError:  # a variable without a value
            return []
    return []


def _bound_to(value: Any, values: list[Any]) -> Any:
    """A method, partial or function as ``value``, that refers to these values in place of its own."""
    if isinstance(value, MethodType):
        return MethodType(value.__func__, values[0])
    if isinstance(value, functools.partial):
        num_args = 1 + len(value.args)
        keywords = dict(zip(value.keywords, values[num_args:], strict=True))
        kind: Any = type(value)
        return kind(*values[:num_args], **keywords)
    cells = tuple(map(CellType, values))
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    return functools.update_wrapper(made, value, updated=("__dict__",))


def refuse_to_travel(placement: Any) -> Any:
    """What pickling a placement comes to, and so an object that has no address elsewhere. Raises RoleError."""
    raise RoleError(f"{placement.identity.name} cannot be sent to another process; send its results instead")


def _attribute(whole: Any, part: Any) -> str:
    """How a whole names its part; empty: it does not."""
    if whole is None or part is None:
        return ""
    attributes: dict[str, Any] = vars(whole)
    for name, value in attributes.items():
        if value is part:
            return name
        if isinstance(value, (list, tuple)):
            places: Iterable[tuple[Any, Any]] = enumerate(value)
        else:
            places = value.items() if isinstance(value, dict) else ()
        for key, item in places:
            if item is part:
                return f"{name}[{key!r}]"
    return ""
