"""Objects with roles that a role's method uses on its workers, and that the driver has changed since construction.

trainer.policy.temperature = 0.5     the workers' policy has what __init__ set
trainer.explore(prompts)             whose role calls self.policy.sample() there, without a message to the driver
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.names import Names, of_method, of_use


class Use(NamedTuple):
    """What a method does with an object with roles that an attribute of its own object holds."""

    instance: Any
    names: Names


class UsedParts:
    """Of one object of the driver, by method."""

    def __init__(self) -> None:
        self.of_method: dict[Any, tuple[Use, ...]] = {}  # once it has been called

    def check(self, method: RoleMethod[..., Any], target: Any, title: str) -> None:
        """Raises RoleError if the method reads what was set, or changed in place, in such an object."""
        if method not in self.of_method:
            cls: Any = type(target)
            self.of_method[method] = tuple(_uses(target, of_method(cls, method), {id(target)}))
        for instance, names in self.of_method[method]:
            placement = instance._rayhelper
            owner = placement.identity.name
            placement.snapshot.check_attributes(method, names, instance, title, owner)
            placement.in_place.check(method, names, instance, title, owner)
            placement.snapshot.called(names, instance)


def _uses(target: Any, names: Names, seen: set[int]) -> Iterator[Use]:
    for name in sorted(names.reads | names.reads_of_roles):
        for instance in with_roles(vars(target).get(name)):
            if id(instance) not in seen:
                seen.add(id(instance))
                cls: Any = type(instance)
                used = of_use(cls, frozenset(names.attributes))
                yield Use(instance, used)
                yield from _uses(instance, used, seen)


def with_roles(value: Any) -> Iterator[Any]:
    """A value, or the values of a list, tuple or dict, that are objects with roles of this driver."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    for one in values:
        placement = getattr(one, "__dict__", {}).get("_rayhelper")
        if getattr(placement, "snapshot", None) is not None:
            yield one
