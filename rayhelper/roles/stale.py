"""What a worker cannot know: attributes and globals that the driver's process has set since an object was constructed.

    trainer.temperature = 0.5        the workers still have what __init__ set
    sampling.TOP_P = 0.9             and what the module had when it was imported there
    Trainer.helper = another         and the functions that the class and its modules had
    trainer.options["lr"] = 0.1      nor do they see changes within dicts, lists, dataclasses (``inside.py``)

A call of a role's method that reads such a name (``names.py``) is refused. What a role's method sets itself is the
role's own, and may differ, until the driver sets it again. So may a global that code of a role sets: a counter.
Changes in settings that code of a role changes itself are its own as well.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import is_dataclass
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from rayhelper.errors import RoleError
from rayhelper.roles.inside import Inside
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.names import MISSING, PLAIN, Names, function_of, of_class, of_method, set_by
from rayhelper.roles.slots import attributes_of
from rayhelper.roles.tensors import bytes_of, some_of
from rayhelper.values.slicing import instance_of


class Compared:
    """Globals of one namespace, with what they were."""

    def __init__(self, namespace: dict[str, Any], names: tuple[str, ...], values: tuple[Any, ...]) -> None:
        self.namespace, self.names, self.values = namespace, names, values
        self.now = operator.itemgetter(*names, names[0])  # of one name alone it would be no tuple

    def is_as_it_was(self) -> bool:
        """Fast, as each call asks: each of them is the very same one."""
        try:
            return all(map(operator.is_, self.values, self.now(self.namespace)))
        except KeyError:  # deleted since
            return False


class Settings(NamedTuple):
    """Containers that a method reads."""

    name: str  # as messages name the attribute or the global
    inside: Inside


class Snapshot:
    """What an object's attributes, and the globals that its roles' methods read, were when it was constructed."""

    def __init__(self, instance: Any, set_here: dict[str, Any]) -> None:
        """``set_here``: what methods of the role driver have set meanwhile, as ``kept_attributes`` gives it."""
        self.attributes = kept_attributes(instance)
        for name, kept in set_here.items():
            if self.attributes.get(name) == kept:
                self.attributes[name] = _ONLY_HERE
        cls: Any = type(instance)
        found = of_class(cls)
        self.globals = {key: found.namespaces[key[0]].get(key[1], MISSING) for key in found.globals}
        self.specs = {place: namespace.get("__spec__") for place, namespace in found.namespaces.items()}
        self.compared: dict[Any, list[Compared]] = {}  # by method, once it has been called
        self.left_to_roles: dict[str, Any] = {}  # what attributes were when a role's method that sets them was called
        torchs = _hooks_of_torch() if instance_of(instance, "torch.nn", "Module") else ()
        self.inside = {
            name: Inside(value)
            for name, value in attributes_of(instance).items()
            if not isinstance(value, PLAIN) and name not in torchs
        }
        self.inside_globals = {
            key: Inside(value) for key, value in self.globals.items() if not isinstance(value, PLAIN)
        }
        self.settings: dict[Any, list[Settings]] = {}  # by method and owner, once it has been called
        self.classes = {one: dict(vars(one)) for one in (*cls.__mro__[:-1], *found.classes)}

    def is_as_constructed(self, name: str, value: Any) -> bool:
        """Whether an attribute is what the constructor has set."""
        return _is_kept(self.attributes.get(name, MISSING), value)

    def check(self, method: RoleMethod[..., Any], target: Any, title: str) -> None:
        """Raises RoleError if the method reads what was set since."""
        cls: Any = type(target)
        names = of_method(cls, method)
        self.check_attributes(method, names, target, title, "self")
        if names.reads_any:
            self._check_any(method, cls, attributes_of(target), title)
        for one, before in self.classes.items():
            if (one in names.classes or one in cls.__mro__) and not _is_untouched(vars(one), before):
                self._check_class(method, cls, one, names, title)
        if method not in self.compared:
            self.compared[method] = self._by_namespace(names)
        for compared in self.compared[method]:
            if not compared.is_as_it_was():
                self._check_globals(method, cls, compared, title)

    def check_attributes(self, method: RoleMethod[..., Any], names: Names, target: Any, title: str, owner: str) -> None:
        """Raises RoleError if the method, which does this with the object, reads attributes that were set since.

        ``owner``: the object, as messages name it.
        """
        cls: Any = type(target)
        held = attributes_of(target)
        for name in names.reads:
            if not _is_kept(self.attributes.get(name, MISSING), held.get(name, MISSING)):
                if name not in self.attributes and _is_filled_when_read(cls, name):
                    continue
                when = (
                    "by a method of the role 'driver', which workers do not run"
                    if self.attributes.get(name) is _ONLY_HERE
                    else "after the object was constructed"
                )
                raise RoleError(
                    f"{title} reads {owner}.{name}, which was set on the driver {when}. The "
                    f"workers of role {method.role!r} still have the value of __init__. Pass the value as an argument, "
                    f"or set it in a method of role {method.role!r}."
                )
        for name in names.reads_of_roles:
            now = held.get(name, MISSING)
            was = self.left_to_roles.get(name, self.attributes.get(name, MISSING))
            if now is not MISSING and not _is_kept(was, now) and not _is_filled_when_read(cls, name):
                raise RoleError(
                    f"{title} reads {owner}.{name}, which was set on the driver since. The workers of role "
                    f"{method.role!r} still have the value from __init__, or from a method of a role. Pass the value "
                    f"as an argument, or set it in a method of role {method.role!r}."
                )
        if (method, owner) not in self.settings:
            self.settings[method, owner] = list(self._settings(cls, names, owner))
        for settings in self.settings[method, owner]:
            if not settings.inside.is_as_it_was():
                self._check_settings(method, cls, settings, title)

    def called(self, names: Names, target: Any) -> None:
        """A call is made of what sets these names: they are the workers' own from now on, whatever the driver has."""
        held = attributes_of(target)
        for name in names.writes:
            self.left_to_roles[name] = _kept(held[name]) if name in held else MISSING

    def _settings(self, cls: Any, names: Names, owner: str) -> Iterator[Settings]:
        """The containers that a method reads, and no method of a role changes in place."""
        of_roles = of_class(cls)
        own = of_roles.writes | of_roles.changes
        read = names.reads & self.inside.keys() - own
        if names.reads_any:
            read |= self.inside.keys() - own - set_by(cls).writes - set_by(cls).changes
        for name in sorted(read):
            if self.inside[name].containers:
                yield Settings(f"{owner}.{name}", self.inside[name])
        for place, name in sorted(names.globals & self.inside_globals.keys() - of_roles.changed_globals):
            if self.inside_globals[place, name].containers:
                module = names.namespaces[place].get("__name__")
                known = name if module == cls.__module__ else f"{module}.{name}"
                yield Settings(f"the global {known}", self.inside_globals[place, name])

    def _check_settings(self, method: RoleMethod[..., Any], cls: Any, settings: Settings, title: str) -> None:
        """Raises RoleError if an entry is another one now that no code of a role sets."""
        own = of_class(cls).set_elsewhere
        for path, before, now in settings.inside.changed():
            if path.rpartition(".")[2] in own:
                continue
            shown = f" from {before!r} to {now!r}" if _is_short(before, now) else ""
            raise RoleError(
                f"{title} reads {settings.name}, of which {settings.name.removeprefix('the global ')}{path} was "
                f"changed{shown} on the driver after the object was constructed. The workers of role {method.role!r} "
                "still have the old value. Pass the value as an argument. Or set it in a method of role "
                f"{method.role!r}, or before you construct the object."
            )

    def _by_namespace(self, names: Names) -> list[Compared]:
        found: list[Compared] = []
        for place, namespace in names.namespaces.items():
            held = [(name, self.globals[place, name]) for of, name in sorted(names.globals) if of == place]
            if held:
                found.append(Compared(namespace, *zip(*held, strict=True)))
        return found

    def _check_globals(self, method: RoleMethod[..., Any], cls: Any, compared: Compared, title: str) -> None:
        """Raises RoleError if a global is another one now."""
        namespace = compared.namespace
        if namespace.get("__spec__") is not self.specs[id(namespace)]:
            return  # its module was reloaded: the runtime refuses another source, and the same one changes nothing
        for name, before in zip(compared.names, compared.values, strict=True):
            value = namespace.get(name, MISSING)
            if value is not before and not _is_same(value, before):
                owner = namespace.get("__name__")
                known = name if owner in (cls.__module__, method.function.__module__) else f"{owner}.{name}"
                now, then = (f" to {value!r}", repr(before)) if _is_short(value, before) else ("", "what it was")
                raise RoleError(
                    f"{title} reads the global {known!r}, which was set{now} on the driver after the object "
                    f"was constructed. The workers of role {method.role!r} still have {then}. Pass the value as an "
                    "argument, or set it before you construct the object."
                )

    def _check_any(self, method: RoleMethod[..., Any], cls: Any, held: dict[str, Any], title: str) -> None:
        """Raises RoleError if what neither a role nor the class itself sets was set since."""
        own = of_class(cls).writes | set_by(cls).writes
        for name in (held.keys() | self.attributes.keys()) - own:
            if name.startswith("_rayhelper") or _is_filled_when_read(cls, name):
                continue
            if not _is_kept(self.attributes.get(name, MISSING), held.get(name, MISSING)):
                raise RoleError(
                    f"{title} may read self.{name}, which was set on the driver after construction. The workers of "
                    f"role {method.role!r} still have the value of __init__. (The method passes self to other code, or "
                    "computes an attribute's name.) Pass the value as an argument, or set it in a method of role "
                    f"{method.role!r}."
                )

    def _check_class(self, method: RoleMethod[..., Any], cls: Any, one: type, names: Names, title: str) -> None:
        """Raises RoleError if a name of a class that the method may read was set in the class since."""
        now, before = vars(one), self.classes[one]
        for name in now.keys() | before.keys():
            value, was = now.get(name, MISSING), before.get(name, MISSING)
            is_read = name in names.attributes or (name.startswith("__") and isinstance(value, FunctionType))
            if name in names.reads_of_roles and name not in self.left_to_roles:  # a default, until a role sets its own
                is_read = name not in of_class(cls).set_elsewhere
            if value is not was and is_read and not _is_same(value, was):
                known = f"self.{name}" if one in cls.__mro__ else f"{one.__name__}.{name}"
                raise RoleError(
                    f"{title} reads {known}, which was set in class {one.__name__} on the driver after the object "
                    f"was constructed. The workers of role {method.role!r} still have the old value. Set it before you "
                    "construct the object."
                )


class InPlace:
    """What the modules and tensors of an object on the driver were when it was constructed.

    ``trainer.model.load_state_dict(...)``, ``trainer.double()``: with Ray off roles see it. Workers have modules of
    their own, which nobody has changed.
    """

    def __init__(self, instance: Any) -> None:
        held = _held_of(instance)
        self.stamps = {name: stamp for name, value in held.items() if (stamp := _stamp(value)) is not None}
        self.within = {
            name: found for name, value in held.items() if (found := list(_stamps_within(value, _DEPTH, set())))
        }

    def check(self, method: RoleMethod[..., Any], names: Names, target: Any, title: str, owner: str = "self") -> None:
        """Raises RoleError if the method, which does this with the object, reads one that was changed since."""
        if not self.stamps and not self.within:
            return
        held = _held_of(target)
        for name in names.reads & (self.stamps.keys() | self.within.keys()):
            is_same = name not in held or name not in self.stamps or _stamp(held[name]) == self.stamps[name]
            for reference, stamp in self.within.get(name, ()):
                value = reference()
                is_same = is_same and (value is None or _stamp(value) == stamp)
            if not is_same:
                raise RoleError(
                    f"{title} reads {owner}.{name}, which was changed in place on the driver after construction (its "
                    f"values, dtype, device or mode). The workers of role {method.role!r} have their own copy. Change "
                    f"it in a method of role {method.role!r}, or in __init__."
                )


def _held_of(instance: Any) -> dict[str, Any]:
    held = attributes_of(instance)
    return {**held, **held.get("_parameters", {}), **held.get("_buffers", {}), **held.get("_modules", {})}


def _stamp(value: Any) -> Any:
    """Another one when a module or tensor was changed in place; None: it is none."""
    if instance_of(value, "torch.nn", "Module"):
        tensors = [*value.parameters(), *value.buffers()]
        modes = tuple(module.training for module in value.modules())
        contents = [bytes_of(one) for one in some_of(tensors, _READ_TENSORS)]
        return modes, [_stamp_of_tensor(one) for one in tensors], contents
    if instance_of(value, "torch", "Tensor"):
        return _stamp_of_tensor(value), bytes_of(value)
    return None


def _stamp_of_tensor(value: Any) -> Any:
    return value._version, value.dtype, value.device.type, value.requires_grad, id(value)


@functools.cache
def _hooks_of_torch() -> Collection[str]:
    """The names under which each module of torch keeps what is its own: parameters, hooks."""
    return frozenset(vars(sys.modules["torch.nn"].Module()))


_DEPTH = 3
_READ_TENSORS = 16  # of a module, whose contents are read
_MOST_ITEMS = 64


def _stamps_within(value: Any, depth: int, seen: set[int]) -> Iterator[tuple[weakref.ref[Any], Any]]:
    """The modules and tensors in a container, with what they were. ``seen``: ids of containers looked into."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple, deque)):
        items = list(value) if len(value) <= _MOST_ITEMS else []
    elif isinstance(value, dict):
        items = list(value.values()) if len(value) <= _MOST_ITEMS else []
    elif isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        items = list(getattr(value, "__dict__", {}).values())
    else:
        return
    for item in items:
        stamp = _stamp(item)
        if stamp is not None:
            yield weakref.ref(item), stamp
        elif depth:
            yield from _stamps_within(item, depth - 1, seen)


_ONLY_HERE = object()  # what no attribute is


def kept_attributes(instance: Any) -> dict[str, Any]:
    """What tells later whether the attributes of an object are still the same."""
    return {name: _kept(value) for name, value in attributes_of(instance).items()}


def _is_equal(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except Exception:  # of arrays in them
        return False


def _is_untouched(now: Any, before: dict[str, Any]) -> bool:
    """Whether a class has the very same entries. Fast, as each call asks."""
    return len(now) == len(before) and all(map(operator.is_, now.values(), before.values()))


def _is_filled_when_read(cls: type, name: str) -> bool:
    return isinstance(_entry(cls, name), functools.cached_property)


def _is_same(value: Any, before: Any) -> bool:
    """Whether a global is what it was: equal, where it is plain or a list or dict; with functions the same code."""
    if isinstance(value, FunctionType) and isinstance(before, FunctionType):
        return value.__code__ == before.__code__ and _holds_the_same(value, before)
    if isinstance(value, type) and isinstance(before, type):  # a cell of a notebook that is run again
        of_both = [
            {name: getattr(function_of(one, name), "__code__", held) for name, held in vars(one).items()}
            for one in (value, before)
        ]
        for of_one in of_both:
            for name in ("__dict__", "__weakref__", "__doc__", "__firstlineno__", "_abc_impl"):
                of_one.pop(name, None)
        is_named = (value.__module__, value.__qualname__) == (before.__module__, before.__qualname__)
        return is_named and _is_equal(*of_both)
    if type(value) is type(before) and isinstance(value, (*PLAIN, dict, list, tuple, set)):
        return _is_equal(value, before) or (isinstance(value, float) and value != value)
    return False


def _holds_the_same(value: FunctionType, before: FunctionType) -> bool:
    """Of functions of one code, whether their variables are alike.

    A class that came back from a worker by value is given its functions anew, closures included.
    """
    for one, other in zip(value.__closure__ or (), before.__closure__ or (), strict=True):
        try:
            now, was = one.cell_contents, other.cell_contents
        except ValueError:  # not set yet
            continue
        if now is not was and isinstance(now, (*PLAIN, FunctionType)) and not _is_same(now, was):
            return False
    return True


def _is_short(value: Any, before: Any) -> bool:
    return isinstance(value, PLAIN) and isinstance(before, PLAIN)


def _entry(cls: type, name: str) -> Any:
    """What a class has under a name."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), MISSING)


def _kept(value: Any) -> Any:
    """What tells later whether an attribute is still the same: plain values themselves, of others who they are."""
    return (type(value), value) if isinstance(value, PLAIN) else id(value)


def _is_kept(kept: Any, value: Any) -> bool:
    if value is MISSING or kept is MISSING:
        return value is kept
    now = _kept(value)
    return bool(now == kept) or now != now
