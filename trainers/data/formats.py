"""Rows as ms-swift has them, in our columns: what a column is called there, and what it means.

    {"query": q, "response": r, "history": [[q, r], ...], "system": s}          messages
    {"instruction": i, "input": x, "output": o}                                 messages (alpaca)
    {"conversation": [{"human": q, "assistant": r}, ...]}                       messages (ShareGPT, by turns)
    {"messages": [...], "rejected_response": r}                                 prompt, chosen, rejected
    {"messages": [...], "rejected_messages": [...]}                             prompt, chosen, rejected
    messages with the roles tool_call and tool_response                         tool_calls, and the role tool

Rows with a column of ours (``prompt``, ``chosen``, ``text``, ...) stay as they are. ShareGPT rows of ``from`` and
``value`` are ``rows.py``. Their names are those of ``swift/dataset/preprocessor/core.py``.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

OURS = ("prompt", "completion", "messages", "text", "chosen", "rejected")
QUERIES = ("query", "question", "problem")  # the first that a row has
ANSWERS = ("response", "answer", "output", "solution")
USERS, ASSISTANTS = ("user", "human"), ("assistant", "gpt", "bot")
CONSUMED = ("query", "response", "history", "instruction", "input", "output", "conversation", "rejected_response")
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, SyntaxError, RecursionError, MemoryError)
SELF_COGNITION = {"model_name": "{{NAME}}", "model_author": "{{AUTHOR}}"}


def in_our_columns(rows: Dataset) -> Dataset:
    """The rows with ``messages``, or with ``prompt``, ``chosen`` and ``rejected``, where ms-swift's columns say them.

    Columns that nothing here reads are kept: reward functions are given them.
    """
    names = set(rows.column_names)
    if names & {"rejected_response", "rejected_messages"} and not names & {"chosen", "rejected"}:
        convert: Any = _pair
    elif "instruction" in names and not names & {*OURS, *QUERIES}:
        convert = _alpaca
    elif "conversation" in names and not names & set(OURS):
        convert = _turns
    elif ("query" in names or (names & set(QUERIES) and names & set(ANSWERS))) and not names & set(OURS):
        convert = _query
    else:
        convert = None
    if convert is not None:
        gone = [name for name in (*CONSUMED, "rejected_messages") if name in names]
        gone += ["system"] if "system" in names else []
        gone += ["messages"] if convert is _pair and "messages" in names else []
        rows = rows.map(_read, fn_kwargs={"convert": convert}, remove_columns=gone, desc="Reading ms-swift's columns")
    return _with_tool_roles(rows)


def _read(row: Mapping[str, Any], convert: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """What ``convert`` makes of a row; nulls for a broken one, which ``broken_rows.py`` finds."""
    try:
        return convert(row)
    except UNREADABLE:
        return dict.fromkeys(("prompt", "chosen", "rejected") if convert is _pair else ("messages",))


def row_of_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row with ``query`` and ``response`` as one with ``messages``."""
    return {name: value for name, value in row.items() if name not in (*CONSUMED, "system")} | _query(row)


def with_names(rows: Dataset, names: Mapping[str, Sequence[str] | None]) -> Dataset:
    """The rows with the placeholders of ``swift/self-cognition`` filled in: {{NAME}} and {{AUTHOR}}.

    ``names`` holds ``model_name`` and ``model_author``, each the Chinese and the English form, or one for both. A row
    whose ``tag`` is zh gets the first.
    """

    def filled(row: dict[str, Any]) -> dict[str, Any]:
        for key, said in names.items():
            if said:
                value = said[0] if row.get("tag") == "zh" else said[-1]
                row = {name: _replaced(content, SELF_COGNITION[key], value) for name, content in row.items()}
        return row

    return rows.map(filled, desc="Filling in names") if any(names.values()) else rows


def _replaced(value: Any, placeholder: str, text: str) -> Any:
    if isinstance(value, str):
        return value.replace(placeholder, text)
    if isinstance(value, list):
        return [_replaced(item, placeholder, text) for item in value]
    if isinstance(value, dict):
        return {key: _replaced(item, placeholder, text) for key, item in value.items()}
    return value


def _query(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"messages": _messages(_first(row, QUERIES), _first(row, ANSWERS), row)}


def _alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    asked = "\n".join(text for text in (row.get("instruction"), row.get("input")) if text)
    return {"messages": _messages(asked, _first(row, ("output", "response")), row)}


def _turns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Each item of the conversation holds a question and its answer, in the order in which they were said."""
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for turn in row["conversation"] or []:
        if "role" in turn or "from" in turn:
            said = {"role": turn.get("role", turn.get("from")), "content": turn.get("content", turn.get("value"))}
            messages.append({**said, "role": _role(said["role"])})
            continue
        for names, role in ((USERS, "user"), (ASSISTANTS, "assistant")):
            content = _first(turn, names)
            messages += [] if content is None else [{"role": role, "content": content}]
    return {"messages": messages}


def _pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen answer is the last turn of the assistant; nothing is left of a row without one."""
    messages = row.get("messages") or _query(row)["messages"]
    if not isinstance(messages, list) or not messages or messages[-1].get("role") != "assistant":
        return {"prompt": messages or None, "chosen": None, "rejected": None}
    prompt, rejected = messages[:-1], row.get("rejected_response")
    if rejected is None and row.get("rejected_messages"):
        others = row["rejected_messages"]
        same = next((k for k, (a, b) in enumerate(zip(prompt, others, strict=False)) if a != b), len(prompt))
        return {"prompt": messages[:same], "chosen": messages[same:], "rejected": others[same:]}
    rejected = rejected[0] if isinstance(rejected, list) and rejected else rejected
    answered = None if rejected is None else [{"role": "assistant", "content": rejected}]
    return {"prompt": prompt, "chosen": messages[-1:], "rejected": answered}


def _messages(query: Any, response: Any, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    history = row.get("history") or []
    history = ast.literal_eval(history) if isinstance(history, str) else history
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for asked, answered in [*history, [query, response]]:
        messages += [] if asked is None else [{"role": "user", "content": asked}]
        answered = answered[0] if isinstance(answered, list) and answered else answered
        messages += [] if answered is None else [{"role": "assistant", "content": answered}]
    return messages


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _role(name: Any) -> Any:
    return "user" if name in USERS else "assistant" if name in ASSISTANTS else name


def _with_tool_roles(rows: Dataset) -> Dataset:
    """Rows whose turns ``tool_call`` are calls of the assistant, and whose ``tool_response`` are turns of ``tool``."""
    present = [name for name in ("messages", "prompt", "chosen", "rejected") if name in rows.column_names]
    roles = ("tool_call", "tool_response")

    def has(row: Mapping[str, Any]) -> bool:
        turns = (message for name in present if isinstance(row[name], list) for message in row[name])
        return any(isinstance(message, Mapping) and message.get("role") in roles for message in turns)

    if not present or not any(map(has, rows.select_columns(present))):
        return rows
    from datasets import Dataset as Rows

    changed = [
        {name: _called(row[name]) if name in present and isinstance(row[name], list) else row[name] for name in row}
        for row in rows
    ]
    return Rows.from_list(changed, on_mixed_types="use_json")


def _called(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    turned: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool_call":
            said = message["content"]
            function = json.loads(said) if isinstance(said, str) else said
            call = {"type": "function", "function": function}
            if turned and turned[-1].get("tool_calls"):
                turned[-1]["tool_calls"].append(call)
            elif turned and turned[-1]["role"] == "assistant":
                turned[-1]["tool_calls"] = [call]
            else:
                turned.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif message.get("role") == "tool_response":
            turned.append({**message, "role": "tool"})
        else:
            turned.append(dict(message))
    return turned
