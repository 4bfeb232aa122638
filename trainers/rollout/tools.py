"""Functions that a model may call, as an environment.

The model sees them through its chat template, as JSON schemas of their signatures and docstrings (transformers'
``get_json_schema``), and calls one in the form that the template shows, which ``tool_calls.py`` reads. Each call of a
turn is answered by a message of role ``tool``; a turn without calls is the last. What a tool raises is its answer,
``{"error": ...}``, and counts as a failure; so does a call that cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainers.plugins import TOOLS
from trainers.rollout.environments import Message, Reply, answered, imported
from trainers.rollout.tool_call_forms import ToolCall
from trainers.rollout.tool_calls import Parser, read_hermes, shown_calls, with_ids


class ToolEnvironment:
    """Calls the ``tools``, functions by name, that the model asks for in a form that ``parse`` reads."""

    keeps_special_tokens = True  # in many forms they are what marks a call

    def __init__(self, tools: Mapping[str, Callable[..., Any]], parse: Parser = read_hermes) -> None:
        self.tools, self.parse = tools, parse
        self.row: Mapping[str, Any] = {}
        self.num_calls = 0

    def reset(self, row: Mapping[str, Any]) -> None:
        """Nothing to show: the tools are in the prompt."""
        self.row, self.num_calls = row, 0

    async def step(self, text: str) -> Reply:
        """``text`` has the special tokens that the model wrote."""
        calls = with_ids(self.parse(text, self.row), self.num_calls)
        self.num_calls += len(calls)
        results = [await self._call(call) for call in calls]
        return Reply(
            [message for message, _ in results],
            done=not results,
            num_tool_calls=len(results),
            num_tool_failures=sum(failed for _, failed in results),
            tool_calls=shown_calls(calls),
        )

    async def _call(self, call: ToolCall) -> tuple[Message, bool]:
        """The message that answers a call, and whether it failed."""
        try:
            if call.name is not None and call.name not in self.tools:
                raise ValueError(f"there is no tool {call.name!r}; there are {', '.join(self.tools)}")
            if call.error is None:
                result, failed = await answered(self.tools[str(call.name)](**call.arguments)), False
            else:
                result, failed = {"error": call.error}, True
        except (Exception, SystemExit) as error:  # whatever it is, the model is told
            result, failed = {"error": f"{type(error).__name__}: {error}"}, True
        content = result if isinstance(result, str) else json.dumps(result, default=str)
        name = {} if call.name is None else {"name": call.name}
        return {"role": "tool", "content": content, "tool_call_id": call.id, **name}, failed


def resolve_tools(specs: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """The functions that ``specs`` (registered names, dotted paths, callables) name, by the names the model uses.

    Raises:
        ValueError: there is none of a name, two have one name, or a function has no docstring to tell a model.
    """
    tools: dict[str, Callable[..., Any]] = {}
    for spec in specs:
        function = spec if callable(spec) else TOOLS[spec] if spec in TOOLS else imported("tool", str(spec), TOOLS)
        if function.__name__ in tools:
            raise ValueError(f"two tools are called {function.__name__!r}")
        tools[function.__name__] = function
    schemas(tools)
    return tools


def schemas(tools: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """What a chat template shows of the tools. Raises ValueError naming a function that lacks types or docstring."""
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for name, function in tools.items():
        try:
            found.append(get_json_schema(function))
        except Exception as error:
            raise ValueError(
                f"tool {name!r} cannot be described to a model: {error}. Give it types and a docstring with an "
                "Args section."
            ) from error
    return found
