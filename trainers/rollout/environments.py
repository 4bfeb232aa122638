"""Environments: what answers the turns of a model, and how a configuration names one.

    @register_environment("guess")
    class Guess:                                  # one object a completion
        def reset(self, row):                     # the row of the dataset; may give messages to put behind its prompt
            self.number = row["number"]

        async def step(self, text):               # what the model wrote; async or not
            if text.strip() == self.number:
                return Reply(done=True, reward=1.0)
            return Reply("wrong, try again")

An environment that waits (for a server, a sandbox) does so with ``async def`` and ``await``, and then holds up no
other: see ``episodes.py``, where turns are played. A plain ``step`` that waits holds up all of its worker.
What it raises ends the run. Its rewards are one more column of rewards, named ``environment``: their sum over the
episode, or None where it gave none. Functions that the model may call are an environment too: ``tools.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayhelper.named_class import object_named
from rayhelper.text import DID_YOU_MEAN, nearest
from trainers.plugins import ENVIRONMENTS

Message = dict[str, Any]


@dataclass(frozen=True)
class Opening:
    """What ``reset`` gives to put messages in place of the row's prompt."""

    messages: Sequence[Message]


@dataclass(frozen=True)
class Rewritten:
    """What becomes of the tokens of a turn, where not all of them stay as they are."""

    ids: Sequence[int]
    num_sampled: int  # the first ones, which the engine sampled; the others stand behind them
    is_learned: Sequence[bool]  # one a token
    text: str  # of the whole message of the assistant
    continues: bool  # the model goes on in the same message


@dataclass(frozen=True)
class Reply:
    """An environment's answer to one turn of the model."""

    messages: str | Sequence[Message] = ()  # put behind the turn: messages, or the text of one from the user
    done: bool = False  # nothing more is asked of the model; so too where there are no messages
    reward: float | None = None
    num_tool_calls: int = 0
    num_tool_failures: int = 0
    infos: Mapping[str, Any] | None = (
        None  # what reward functions are told as ``rollout_infos``; the last reply's count
    )
    turn: Rewritten | None = None
    goes_on: bool = False  # also behind a turn that ran into ``max_completion_length``
    tool_calls: Sequence[Message] = ()  # that the turn made, as a chat template shows them in front of ``messages``


class Environment(Protocol):
    """One episode. Both methods may be ``async``.

    ``step`` is called after every turn, also after one that ran into ``max_completion_length``; what it answers is then
    not shown to the model. An environment with a method ``step_turn(text, turn)`` is given the ``Turn`` as well, by
    that method in place of ``step``. An environment whose attribute ``keeps_special_tokens`` is true gets the text with
    them.
    """

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begins; a text or messages that follow the row's prompt, an ``Opening`` in its place, or None."""
        ...

    def step(self, text: str) -> Any:
        """The ``Reply`` to what the model wrote, special tokens left out unless it keeps them."""
        ...


async def answered(value: Any) -> Any:
    """The value itself, or what it stands for if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def resolve_environment(spec: Any) -> Callable[[], Environment]:
    """What makes an environment: for a registered name, a dotted path, {name: ..., argument: value} or a class.

    Raises:
        ValueError: there is none of the name, or it cannot be built with the arguments.
    """
    arguments = dict(spec) if isinstance(spec, Mapping) else {}
    name = arguments.pop("name", None) if isinstance(spec, Mapping) else spec
    if isinstance(name, str):
        target = ENVIRONMENTS[name] if name in ENVIRONMENTS else imported("environment", name, ENVIRONMENTS)
    elif callable(name):
        target = name
    else:
        raise ValueError(f"environment is a name, {{name: ..., argument: value}} or a class, got {spec!r}")
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"environment {name!r} cannot be built with {arguments or 'no arguments'}: {error}") from None
    for method in ("reset", "step"):
        if inspect.isclass(target) and not callable(getattr(target, method, None)):
            raise ValueError(f"environment {name!r} has no method {method}; environments.py lists the methods")
    return functools.partial(target, **arguments)


def imported(kind: str, path: str, known: Mapping[str, Any]) -> Any:
    """The object at ``module:name`` or ``module.name``. Raises ValueError if there is none."""
    try:
        return object_named(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"unknown {kind} {path!r} ({error}).{nearest(path, known, DID_YOU_MEAN)} Known: "
            f"{', '.join(known) or 'none'}. Register your own with @register_{kind} in a file of external_plugins, or "
            "write module:name."
        ) from error
