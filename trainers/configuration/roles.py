"""What a trainer declares of its roles, and the roles that several trainers have, each said once. Imports no torch.

A configuration declares its trainer's roles as ``ROLES``, by name:

    class RaftConfig(CompletionConfig):
        ROLES: ClassVar[Mapping[str, Role]] = {
            "train": TRAIN,                                                       # the first is the main role
            "rollout": ROLLOUT,
            "judge": Role("judges", models=("judge_model",), host="train"),       # judge: {gpus: 2, model: ...}
        }

The command line, plans, checks, placement and sections of a file read nothing else of them. One that declares none has
``WELL_KNOWN``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayhelper.planning.role_kinds import KNOWN, RoleKind
from trainers.configuration.others.other_names import IN_ROLLOUT

LEARNS = ("trains", "values")


@dataclass(frozen=True)
class Role(RoleKind):
    """A role of a trainer: the fields of ``RoleKind``, and the keys that a section of the role may hold.

    The section of the main role may hold every key, except keys that only one other role reads.
    """

    keys: tuple[str, ...] = ()
    """Keys of the configuration that only this role reads."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys in a section of the role. ``model`` always means the first of ``models``."""
    is_optional: bool = False
    """True: without a key for its model, the role has none. False: it then has the run's ``model``."""

    @property
    def own_names(self) -> Mapping[str, str]:
        """``names``, and the meaning of ``model``."""
        return {**({"model": self.models[0]} if self.models else {}), **self.names}


def _known(name: str, **more: Any) -> Role:
    """What plans take a role of this name for, and ``more``."""
    return Role(KNOWN[name].does, KNOWN[name].models, **more)


TRAIN = _known("train", also=("default",))
ROLLOUT = _known(
    "rollout",
    names=IN_ROLLOUT,
    keys=(
        *("rollout_engine", "rollout_batch_size", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("stop_token_ids", "generation_kwargs", "reward_processes", "environment", "tools"),
        *("tool_call_parser", "max_turns", "completion_length_limit_scope"),
        "max_tool_calling_iterations",
    ),
)
REFERENCE = _known("reference", host="train", also=("ref",), keys=("ref_model",))
TEACHER = _known(
    "teacher",
    host="train",
    names={"model_init_kwargs": "teacher_model_init_kwargs"},
    keys=(
        *("offload_teacher_model", "gkd_logits_topk", "teacher_model", "teacher_model_init_kwargs"),
        *("teacher_engine", "teacher_engine_kwargs"),
    ),
    is_optional=True,
)
CRITIC = _known("critic", host="train", names={"learning_rate": "value_learning_rate", "lr": "value_learning_rate"})
REWARD = _known("reward", host="train", keys=("reward_model", "reward_funcs", "reward_weights"), is_optional=True)

WELL_KNOWN: Mapping[str, Role] = {
    "train": TRAIN,
    "rollout": ROLLOUT,
    "reference": REFERENCE,
    "teacher": TEACHER,
    "critic": CRITIC,
    "reward": REWARD,
}


def main_role(roles: Mapping[str, Role]) -> str:
    """The role that reads every key that no other one reads alone: the first."""
    return next(iter(roles), "")


def backend_model(config: Any, role: str) -> str | None:
    """The folder or name of the model that the backend builds for a role of the run; None: it builds none."""
    kind = config.ROLES[role]
    if kind.does not in (*LEARNS, "scores") or getattr(config, f"{role}_engine", "hf") != "hf":
        return None
    named = next((name for key in kind.models if (name := getattr(config, key, None))), None)
    return named or (None if kind.is_optional else config.model)
