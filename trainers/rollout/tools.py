"""Functions that a model may call, as an environment.

The model sees them through its chat template, as JSON schemas of their signatures and docstrings (transformers'
``get_json_schema``), and calls one by writing ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen and
Hermes templates ask for. Each call of a turn is answered by a message of role ``tool``; a turn without calls is the
last. What a tool raises is its answer, ``{"error": ...}``, and counts as a failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainers.plugins import TOOLS
from trainers.rollout.environments import Message, Reply, answered, imported

_BEGIN, _END = "<tool_call>", "</tool_call>"


class ToolEnvironment:
    """Calls the ``tools``, functions by name, that the model asks for."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        self.tools = tools

    def reset(self, row: Mapping[str, Any]) -> None:
        """Nothing: the tools are in the prompt."""

    async def step(self, text: str) -> Reply:
        results = [await self._call(call) for call in calls_in(text)]
        return Reply(
            [message for message, _ in results],
            done=not results,
            num_tool_calls=len(results),
            num_tool_failures=sum(failed for _, failed in results),
        )

    async def _call(self, call: str) -> tuple[Message, bool]:
        """The message that answers a call, and whether it failed."""
        name = None
        try:
            asked = json.loads(call)
            name = asked["name"]
            if name not in self.tools:
                raise ValueError(f"there is no tool {name!r}; there are {', '.join(self.tools)}")
            result, failed = await answered(self.tools[name](**asked.get("arguments", {}))), False
        except (Exception, SystemExit) as error:  # whatever it is, the model is told
            result, failed = {"error": f"{type(error).__name__}: {error}"}, True
        content = result if isinstance(result, str) else json.dumps(result, default=str)
        return {"role": "tool", "content": content, **({"name": str(name)} if name else {})}, failed


def calls_in(text: str) -> Iterator[str]:
    """What stands between each ``<tool_call>`` and the next ``</tool_call>``, in one pass over the text.

    A regular expression would look for the end again from every beginning: minutes where a model repeats it.
    """
    begin = text.find(_BEGIN)
    while begin >= 0:
        end = text.find(_END, begin + len(_BEGIN))
        if end < 0:
            return
        yield text[begin + len(_BEGIN) : end]
        begin = text.find(_BEGIN, end + len(_END))


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
                f"tool {name!r} cannot be told to a model: {error}. Give it types and a docstring with an Args section."
            ) from error
    return found
