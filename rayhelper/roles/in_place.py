"""Modules and tensors that the driver changes in place: ``trainer.model.load_state_dict(...)``, ``trainer.double()``.

With Ray off roles see it. Workers have modules of their own, which nobody has changed.
"""

from __future__ import annotations

from typing import Any

from rayhelper.errors import RoleError
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.names import Names
from rayhelper.values.slicing import instance_of


class InPlace:
    """What the modules and tensors of an object on the driver were when it was constructed."""

    def __init__(self, instance: Any) -> None:
        self.stamps = {name: stamp for name, value in _held(instance).items() if (stamp := _stamp(value)) is not None}

    def check(self, method: RoleMethod[..., Any], names: Names, target: Any, title: str, owner: str = "self") -> None:
        """Raises RoleError if the method, which does this with the object, reads one that was changed since."""
        if not self.stamps:
            return
        held = _held(target)
        for name in names.reads & self.stamps.keys():
            if name in held and _stamp(held[name]) != self.stamps[name]:
                raise RoleError(
                    f"{title} reads {owner}.{name}, which was changed in place on the driver after construction (its "
                    f"values, dtype, device or mode). The workers of role {method.role!r} have their own copy. Change "
                    f"it in a method of role {method.role!r}, or in __init__."
                )


def _held(instance: Any) -> dict[str, Any]:
    held = getattr(instance, "__dict__", {})
    return {**held, **held.get("_parameters", {}), **held.get("_buffers", {}), **held.get("_modules", {})}


def _stamp(value: Any) -> Any:
    """Another one when a module or tensor was changed in place; None: it is none."""
    if instance_of(value, "torch.nn", "Module"):
        tensors = (*value.parameters(), *value.buffers())
        modes = tuple(module.training for module in value.modules())
        return modes, tuple(map(_stamp, tensors))
    if instance_of(value, "torch", "Tensor"):
        return value._version, value.dtype, value.device.type, value.requires_grad, id(value)
    return None
