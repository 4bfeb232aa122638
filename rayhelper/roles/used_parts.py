"""Objects with roles that a role's method uses on its workers, and that the driver has changed since construction.

trainer.policy.temperature = 0.5     the workers' policy has what __init__ set
trainer.explore(prompts)             whose role calls self.policy.sample() there, without a message to the driver
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rayhelper.roles.left_behind import is_constructed, leave
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.names import Names, of_use
from rayhelper.roles.reached import Reached


class Use(NamedTuple):
    """What a method does with an object with roles other than its own."""

    instance: Any
    names: Names


class UsedParts:
    """Of one object of the driver, by method."""

    def __init__(self) -> None:
        self.of_method: dict[Any, tuple[Use, ...]] = {}  # once it has been called
        self.to_leave: dict[Any, Reached] = {}  # until a call of it is made for the first time

    def check(self, method: RoleMethod[..., Any], target: Any, title: str) -> None:
        """Raises RoleError if the method reads what was set, or changed in place, in such an object.

        If not, the call is made: what the method changes in any object is not to be read on the driver any more.
        """
        if method not in self.of_method:
            self._look_at(method, target)
        for instance, names in self.of_method[method]:
            placement = instance._rayhelper
            owner = placement.identity.name
            placement.snapshot.check_attributes(method, names, instance, title, owner)
            placement.in_place.check(method, names, instance, title, owner)
            placement.snapshot.called(names, instance)
        if self.to_leave and method in self.to_leave:
            leave(title, self.to_leave.pop(method))

    def _look_at(self, method: RoleMethod[..., Any], target: Any) -> None:
        self.of_method[method] = ()
        if method.kind == "method":
            reached = self.to_leave[method] = Reached(target, method.function)
            self.of_method[method] = tuple(
                Use(one.instance, of_use(class_of(one.instance), frozenset(one.read), frozenset(one.set)))
                for one in reached.touched.values()
                if one.instance is not target and is_constructed(one.instance)
            )


def class_of(instance: Any) -> Any:
    """Its class, as a key of caches."""
    return type(instance)
