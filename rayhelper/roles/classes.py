"""What a decorated class goes through: its roles declared, its construction routed, its subclasses adopted.

Trainer(config)
    -> construct(init, instance, args, kwargs)
         Ray off                      __init__ itself
         on the driver                the same construction on every worker, then __init__ here
         on a worker                  __init__ itself, calls to roles hosted elsewhere skipped
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rayhelper.device_groups import DRIVER
from rayhelper.errors import DecorationError
from rayhelper.roles.methods import Kind, RoleMethod
from rayhelper.roles.parts import Identity, begin_building, being_built, check_whole, end_building
from rayhelper.roles.runtime import state
from rayhelper.roles.unset import missing
from rayhelper.worker.failures import add_note

S = TypeVar("S")


def construct(init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs ``__init__`` on this instance and, on a driver, on every worker that hosts one of its roles.

    An instance that is built while another one's ``__init__`` runs is a part of that one. Raises DecorationError if the
    class of the whole does not name the part's roles. With Ray off an argument may refuse, if its class has
    ``__rayhelper_off__``: a configuration that asks for workers.
    """
    within = being_built()
    if instance._rayhelper is not None or (within is not None and within.instance is instance):
        init(instance, *args, **kwargs)  # the constructor of a base class
        return
    if within is not None:
        check_whole(type(within.instance), type(instance))
    if state.active is None:
        for value in (*args, *kwargs.values()):
            if (refuse := getattr(type(value), "__rayhelper_off__", None)) is not None:
                refuse(value, type(instance))
        build(init, instance, args, kwargs, Identity(instance, None if within is None else within.identity, None))
        return
    check_roles(type(instance))
    if within is None:
        state.active.construct(init, instance, args, kwargs, None)
    else:
        within.runtime.construct(init, instance, args, kwargs, within.instance)


def build(
    init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], identity: Identity
) -> None:
    """Runs ``__init__`` in this process; decorated objects that it builds are parts of the instance."""
    token = begin_building(identity, instance)
    try:
        init(instance, *args, **kwargs)
    except Exception as error:
        if identity.whole is not None:
            add_note(error, f"[in the __init__ of {identity.name}, a part of {identity.whole.name}]")
            identity.whole.parts.remove(identity)
        raise
    finally:
        end_building(token)
    identity.is_built = True


def decorate_class(cls: type[S], roles: tuple[str, ...]) -> type[S]:
    """The class itself, its construction and that of its subclasses routed through ``construct``."""
    if not cls.__dictoffset__:
        raise DecorationError(f"{cls.__name__} has __slots__ and no __dict__; add '__dict__' to its __slots__.")
    inherited = getattr(cls, "__rayhelper_roles__", ())
    cls.__rayhelper_roles__ = tuple(dict.fromkeys((*inherited, *roles)))  # type: ignore[attr-defined]
    cls._rayhelper = None  # type: ignore[attr-defined]
    if not hasattr(getattr(cls, "__getattr__", None), "names_setters") and "__getattr__" not in vars(cls):
        cls.__getattr__ = _naming_setters(cls)  # type: ignore[attr-defined]
    _adopt(cls)
    if not hasattr(cls.__init_subclass__, "wraps_init"):
        cls.__init_subclass__ = _wrapping_init_subclass(cls)  # type: ignore[method-assign]
    check_roles(cls)
    return cls


def check_roles(cls: type) -> None:
    """Raises DecorationError if a method belongs to a role that the class does not declare, or to one of several."""
    declared = cls.__rayhelper_roles__  # type: ignore[attr-defined]
    for name, method in role_methods(cls).items():
        if method.is_own and len(declared) > 1:
            raise DecorationError(
                f"{cls.__name__}.{name} belongs to role 'own', the one role of its class, and the class declares "
                f"{len(declared)} ({', '.join(declared)}). Name the method's role, or give the class one."
            )
        if not method.is_own and method.role not in declared and method.role != DRIVER:
            raise DecorationError(
                f"{cls.__name__}.{name} belongs to role {method.role!r}, which the class does not declare "
                f"(declared: {', '.join(declared)}). Add it to @RayHelper.worker(group=[...])."
            )


def role_methods(cls: type) -> dict[str, RoleMethod[..., Any]]:
    """The decorated methods of a class by name, inherited ones included."""
    names = {name for base in cls.__mro__ for name in vars(base)}
    found = {name: inspect.getattr_static(cls, name) for name in sorted(names)}
    return {name: method for name, method in found.items() if isinstance(method, RoleMethod)}


def _adopt(cls: type) -> None:
    """Makes what a class itself defines ready for roles: its constructor, and static methods in either order."""
    for name, entry in list(vars(cls).items()):
        if isinstance(entry, (staticmethod, classmethod)) and isinstance(entry.__func__, RoleMethod):
            below = entry.__func__
            kind: Kind = "static" if isinstance(entry, staticmethod) else "class"
            setattr(cls, name, RoleMethod(*(*below.__getstate__()[:-1], kind)))
    if "__init__" in vars(cls) or not getattr(cls.__init__, "constructs", False):  # type: ignore[misc]
        _wrap_init(cls)


def _wrap_init(cls: type) -> None:
    """Routes ``cls.__init__`` through ``construct``; a class without its own gets one that calls the next in line."""
    init = cls.__dict__.get("__init__")
    if getattr(init, "constructs", False):
        return
    own = init is not None
    original: Callable[..., None] = init if init is not None else functools.partial(_next_init, cls)

    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        construct(original, self, args, kwargs)

    functools.update_wrapper(__init__, init if own else cls.__init__)  # type: ignore[arg-type, misc]
    __init__.constructs = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]


def _naming_setters(cls: type) -> Callable[[Any, str], Any]:
    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        return missing(cls, self, name)

    __getattr__.names_setters = True  # type: ignore[attr-defined]
    return __getattr__


def _next_init(cls: type, instance: Any, *args: Any, **kwargs: Any) -> None:
    inherited: Any = super(cls, instance).__init__  # type: ignore[arg-type]
    overridden: Any = type(instance).__new__
    if getattr(inherited, "__objclass__", None) is object and overridden is not object.__new__:
        return  # as in Python itself: the arguments were for __new__
    inherited(*args, **kwargs)


def _wrapping_init_subclass(cls: type) -> Any:
    original = cls.__dict__.get("__init_subclass__")

    def __init_subclass__(subclass: type, /, **kwargs: Any) -> None:  # noqa: N807
        init_subclass(original, cls, subclass, kwargs)

    __init_subclass__.wraps_init = True  # type: ignore[attr-defined]
    return classmethod(__init_subclass__)


def init_subclass(original: Any, cls: type, subclass: type, kwargs: dict[str, Any]) -> None:
    """What a subclass of a decorated class goes through when it is defined."""
    if original is None:
        super(cls, subclass).__init_subclass__(**kwargs)  # type: ignore[arg-type]
    else:
        original.__get__(None, subclass)(**kwargs)
    _adopt(subclass)
