"""What a role does with its model, which keys name that model, and with whom the role lives: read by plans and checks.

A class declares its roles as ``ROLES``: on itself, or on the dataclass that its ``__init__`` takes as ``config``. A
role that nobody declared is what its name says, in ``KNOWN``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from rayhelper.errors import ConfigError
from rayhelper.named_class import class_named
from rayhelper.text import nearest

GROUP = "rayhelper.trainers"  # of entry points
Does = Literal["trains", "values", "scores", "judges", "generates", "other"]


@dataclass(frozen=True)
class RoleKind:
    """What a role does, and with which model."""

    does: Does = "other"
    """trains: a language model that learns. values: a model with a head of one value that learns (a critic).
    scores: log-probabilities, of a model like the trained one. judges: rewards, of a model of transformers that is
    whole on every worker. generates: completes prompts. other: nothing that a plan or a check knows."""
    models: tuple[str, ...] = ()
    """Keys of the configuration that name the role's model; the first that is set."""
    host: str | None = None
    """The role whose device group hosts this one too, where no device group names it; None: one must."""
    also: tuple[str, ...] = ()
    """Other names of the role in device groups."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value of another type, which would be read letter by letter, or not at all."""
        if self.does not in get_args(Does):
            known = get_args(Does)
            raise ConfigError(
                f"a role {', '.join(known[:-1])} or is {known[-1]}; got {self.does!r}{nearest(self.does, known)}"
            )
        for one in fields(self):
            if one.type == "tuple[str, ...]" and isinstance(value := getattr(self, one.name), str):
                raise ConfigError(f"{one.name} of a role must be a tuple: write {one.name}=({value!r},)")


KindT = TypeVar("KindT", bound=RoleKind)

# What a role is of which the name alone is known
KNOWN: Mapping[str, RoleKind] = {
    **dict.fromkeys(("train", "trainer", "actor", "policy", "student"), RoleKind("trains")),
    **dict.fromkeys(("critic", "value"), RoleKind("values", ("value_model", "reward_model"))),
    **dict.fromkeys(("rollout", "sampler", "generator"), RoleKind("generates")),
    **dict.fromkeys(("reference", "ref"), RoleKind("scores", ("ref_model",))),
    "teacher": RoleKind("scores", ("teacher_model",)),
    **{role: RoleKind("judges", (f"{role}_model",)) for role in ("reward", "prm", "orm")},
}


def declared_name(role: str, declared: Mapping[str, KindT]) -> str:
    """The declared role that ``role`` is another name of; ``role`` itself if it is none."""
    if role in declared:
        return role
    return next((name for name, kind in declared.items() if role in kind.also), role)


def kind_of(role: str, declared: Mapping[str, RoleKind]) -> RoleKind:
    """What the role is: as declared, or else as its name says."""
    return declared.get(declared_name(role, declared)) or KNOWN.get(role, RoleKind())


def declared_roles(cls: type) -> Mapping[str, Any]:
    """The ``ROLES`` of a class or of its configuration, by name; none if neither declares any."""
    found: Mapping[str, Any] = getattr(cls, "ROLES", None) or getattr(configuration_of(cls), "ROLES", {})
    return found


def roles_named(trainer: str, keys: Mapping[Any, Any]) -> Mapping[str, RoleKind]:
    """The declared roles of ``module:Class`` or ``file.py:Class``, or of a trainer that an installed package names.

    Such a package has an entry point of the group ``rayhelper.trainers``: a function that returns the roles of a name,
    of which the ``keys`` of the configuration may say more, and None of a name that is not its own.

    Raises:
        ConfigError: there is no such trainer.
    """
    if ":" in trainer:
        return declared_roles(class_named(trainer))
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        found: Mapping[str, RoleKind] | None = point.load()(trainer, keys)
        if found is not None:
            return found
    raise ConfigError(
        f"no installed package has a trainer {trainer!r}. Write module:Class, or path/to/file.py:Class. To plan a "
        "whole command, write rayhelper plan -- COMMAND."
    )


def default_hosts(cls: type) -> dict[str, str]:
    """The roles of a decorated class that device groups may leave out, and the role with which each then lives."""
    own = getattr(cls, "__rayhelper_roles__", ())
    kinds = {role: kind for role, kind in declared_roles(cls).items() if role in own}
    return {role: kind.host for role, kind in kinds.items() if kind.host in own}


def configuration_of(cls: type) -> type | None:
    """The class of a trainer's configuration: its ``CONFIG``, or the type of the parameter ``config`` of ``__init__``.

    None if it has neither, or if the type's name is not known where the class is defined.
    """
    if isinstance(declared := getattr(cls, "CONFIG", None), type):
        return declared
    init = inspect.unwrap(cls.__init__)  # type: ignore[misc]
    annotations = getattr(init, "__annotations__", {})
    if "config" not in annotations:
        return None
    alone = SimpleNamespace(__annotations__={"config": annotations["config"]})
    try:
        found = get_type_hints(alone, getattr(init, "__globals__", {}))["config"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return None
    return found if isinstance(found, type) else None
