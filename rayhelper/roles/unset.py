"""What is said of an attribute that the driver reads and a role's method alone sets, on the workers of that role."""

from __future__ import annotations

import functools
from typing import Any

from rayhelper.device_groups import DRIVER
from rayhelper.roles.runtime import state


def missing(owner: type, instance: Any, name: str) -> Any:
    """The value of an attribute that was not found, by a base class that gives such. Raises AttributeError.

    ``owner``: the class whose ``__getattr__`` this is.
    """
    left = getattr(object.__getattribute__(instance, "__dict__").get("_rayhelper"), "left", None)
    if left is not None and name in left.changed_by:
        raise AttributeError(left.told(type(instance).__name__, name), name=name, obj=instance)
    inherited = getattr(super(owner, instance), "__getattr__", None)
    if inherited is not None:
        return inherited(name)
    cls: Any = type(instance)
    try:
        return object.__getattribute__(instance, name)  # again, for its error: a property may have raised it
    except AttributeError as error:
        told = "" if state.active is None or name.startswith("__") else where_it_is_set(cls, name)
        if not told or hasattr(cls, name):
            raise
        # Python may add ". Did you mean: ...?"
        raise AttributeError(f"{error}. {told.removesuffix('.')}", name=name, obj=instance) from None


@functools.lru_cache(1024)
def where_it_is_set(cls: Any, name: str) -> str:
    """The sentence that names the methods of roles that set an attribute; empty: none does."""
    from rayhelper.roles.classes import role_methods
    from rayhelper.roles.names import of_method

    of_roles = {method: one for method, one in role_methods(cls).items() if one.role != DRIVER}
    setters = {method: one.role for method, one in of_roles.items() if name in of_method(cls, one).writes}
    if not setters:
        return ""
    methods = " and ".join(f"{cls.__name__}.{method} (role {role!r})" for method, role in setters.items())
    return (
        f"{methods} sets self.{name}, which exists only on the workers of that role. Return the value from a method of "
        "the role, or read it in one."
    )
