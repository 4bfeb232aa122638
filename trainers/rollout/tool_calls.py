# ruff: noqa: RUF001 - tokens of DeepSeek
"""The tool calls that a model wrote, in the form that its chat template shows.

    parse = tool_call_parser("auto", tokenizer, schemas)
    parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>', row)
    # [ToolCall("add", {"a": 1})]

``auto`` takes the first that fits: the tokenizer's ``response_template``, by which transformers' ``parse_response``
reads; else the parser of the form whose markers stand in the chat template. The forms of Hermes (Qwen 2.5 and 3),
DeepSeek V3, gpt-oss and Gemma 4 are read here (``tool_call_forms.py``), the others by vLLM's tool parsers. Where vLLM
is not installed, TRL's response template for the chat template serves. A plugin is a function of the text that returns
calls:

    @register_tool_call_parser("mine")
    def mine(text):                 # what the model wrote, special tokens included
        return [{"name": "add", "arguments": {"a": 1, "b": 2}}]
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayhelper.text import DID_YOU_MEAN, nearest
from trainers.data.rows import tokenize_prompts
from trainers.plugins import TOOL_CALL_PARSERS
from trainers.rollout.environments import imported
from trainers.rollout.tool_call_forms import FORMS, ToolCall, calls_of

logger = logging.getLogger(__name__)

Parser = Callable[[str, Mapping[str, Any]], list[ToolCall]]  # the text of a turn, and the row it belongs to

MOST_MARKERS = 2000  # in one turn: vLLM's parsers copy the rest of the text at every one
PIECE = 4096  # characters that transformers' parser gets at once: it searches all that it has at every marker

# Markers in a chat template, and the parser of the form they belong to; the first that are all there decide.
# Names are those of vLLM's --tool-call-parser.
MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v32", ("<｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("openai", ("<|channel|>", "functions.")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("olmo3", ("<function_calls>",)),
    ("internlm", ("<|plugin|>",)),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("phi4_mini_json", ("<|tool|>",)),
    ("hermes", ("<tool_call>", "arguments")),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    ("llama4_json", ("<|header_start|>", '"parameters": ')),
)


def tool_call_parser(
    name: str,
    tokenizer: Any,
    schemas: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Parser:
    """What reads the calls of a turn of the model, whose text has its special tokens.

    ``name``: auto, a name of vLLM's tool parsers, hf (the tokenizer's ``response_template``), a registered function or
    a dotted path. ``schemas``: of the tools, by which values that a form writes as plain text get their types.

    Raises:
        ValueError: there is none of the name, or none that fits the chat template, or vLLM is needed and not there.
    """
    if name == "auto":
        return _found(tokenizer, schemas, chat_template_kwargs)
    if name == "hf":
        return _by_response_template(tokenizer, tokenizer, schemas, chat_template_kwargs)
    if name in FORMS:
        return _by_form(name)
    if name in TOOL_CALL_PARSERS or ":" in name or "." in name:
        function = TOOL_CALL_PARSERS.get(name)
        return _by_function(name, function or imported("tool_call_parser", name, TOOL_CALL_PARSERS))
    return _by_vllm(name, tokenizer, schemas)


def _found(
    tokenizer: Any, schemas: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None
) -> Parser:
    if getattr(tokenizer, "response_template", None) is not None:
        return _by_response_template(tokenizer, tokenizer, schemas, chat_template_kwargs)
    form = form_of(tokenizer, schemas)
    if form in FORMS:
        return _by_form(form)
    if importlib.util.find_spec("vllm") is None and (known := _known_to_trl(tokenizer)) is not None:
        return _by_response_template(known, tokenizer, schemas, chat_template_kwargs)
    return _by_vllm(form, tokenizer, schemas)


def form_of(tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> str:
    """The name of the parser for the form of calls that the chat template shows; hermes if it shows none.

    Raises ValueError for a template that renders calls in no form of ``MARKERS``.
    """
    template = tokenizer.get_chat_template(tools=list(schemas))
    for name, markers in MARKERS:
        if all(marker in template for marker in markers):
            return name
    if "tool_calls" in template:
        raise ValueError(
            "the chat template writes tool calls in an unknown form. Set tool_call_parser to the name of "
            "a parser of vLLM. Or use register_tool_call_parser in a file of external_plugins."
        )
    if "tools" not in template:
        logger.warning("the chat template does not write tools: describe them in the prompts")
    return "hermes"


def _by_form(name: str) -> Parser:
    form = FORMS[name]
    return lambda text, row: form(text)


read_hermes = _by_form("hermes")


def _by_function(name: str, function: Callable[[str], Any]) -> Parser:
    def parse(text: str, row: Mapping[str, Any]) -> list[ToolCall]:
        found = function(text)
        if not isinstance(found, (list, tuple)):
            raise TypeError(f"tool_call_parser {name!r} must return a list of calls, got {type(found).__name__}")
        return [call if isinstance(call, ToolCall) else calls_of(call) for call in found]

    return parse


# transformers' parse_response


def _known_to_trl(tokenizer: Any) -> Any:
    """A copy of the tokenizer with TRL's response template for its chat template; None if TRL has none."""
    from trl.chat_template_utils import add_response_schema

    try:
        known = add_response_schema(copy.copy(tokenizer))
    except ValueError:
        return None
    return known if getattr(known, "response_template", None) is not None else None


def _by_response_template(
    known: Any,
    tokenizer: Any,
    schemas: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Parser:
    """By the ``response_template`` of ``known``; prompts are rendered by ``tokenizer``."""
    template = getattr(known, "response_template", None)
    if template is None:
        raise ValueError("the tokenizer has no response_template. Name a parser of vLLM, or auto.")
    try:
        from transformers.utils.chat_parsing import ResponseParser
    except ImportError:
        raise ValueError(
            "the tokenizer's response_template needs transformers 5.13 or newer. Upgrade it, or name a parser of vLLM."
        ) from None
    shown: list[Any] = [dict(schema) for schema in schemas]

    def parse(text: str, row: Mapping[str, Any]) -> list[ToolCall]:
        # The template may have begun the turn, such as with <think>
        (ids,) = tokenize_prompts([row], tokenizer, chat_template_kwargs=chat_template_kwargs)
        prefix = tokenizer.decode(ids, skip_special_tokens=False)
        parser = ResponseParser(template, prefix=prefix, tools=shown)
        try:
            for start in range(0, len(text), PIECE):
                parser.feed(text[start : start + PIECE])
            message, _ = parser.finalize()
        except (ValueError, TypeError) as error:  # what is no call of this form is told to the model
            return [ToolCall(error=f"{type(error).__name__}: {error}")]
        return [calls_of(call) for call in message.get("tool_calls") or []]

    return parse


# vLLM's tool parsers


def _by_vllm(name: str, tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> Parser:
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"{name!r} is a parser of vLLM, which is not installed. Install it (pip install vllm), or set "
            "tool_call_parser to a function of yours (register_tool_call_parser in a file of external_plugins)."
        )
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    known = sorted({"auto", "hf", *FORMS, *TOOL_CALL_PARSERS, *ToolParserManager.list_registered()})
    if name not in known:
        raise ValueError(f"there is no parser {name!r}.{nearest(name, known, DID_YOU_MEAN)} Known: {', '.join(known)}")
    kind = ToolParserManager.get_tool_parser(name)
    tools = [ChatCompletionToolsParam(**schema) for schema in schemas]
    request = ChatCompletionRequest(messages=[], model="", tools=[dict(schema) for schema in schemas])
    try:
        kind(tokenizer, tools)
    except Exception as error:  # of any kind: what a parser wants of a tokenizer is its own affair
        raise ValueError(f"vLLM's parser {name!r} does not fit the tokenizer: {error}. Name another one.") from error

    marker = re.compile("|".join(map(re.escape, tokenizer.get_added_vocab())) or r"(?!)")

    def parse(text: str, row: Mapping[str, Any]) -> list[ToolCall]:
        if next(itertools.islice(marker.finditer(text), MOST_MARKERS, None), None) is not None:
            return [ToolCall(error=f"ValueError: the turn has more than {MOST_MARKERS} special tokens")]
        parser = kind(tokenizer, tools)  # it keeps what it has read
        told = parser.extract_tool_calls(_without_end(text, tokenizer), request)
        return [
            calls_of({"id": call.id if call.id and call.id in text else None, "function": call.function.model_dump()})
            for call in told.tool_calls or []
        ]

    return parse


def _without_end(text: str, tokenizer: Any) -> str:
    """The text without the token that ended it, which vLLM's server takes off before its parsers see a text."""
    return text if tokenizer.eos_token is None else text.removesuffix(tokenizer.eos_token)


def shown_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """The calls as a chat template takes them in an assistant's message; those without a name are left out."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in calls
        if call.name is not None
    ]


def with_ids(calls: Sequence[ToolCall], first: int) -> list[ToolCall]:
    """The calls, each with an id: the one that the model wrote, or nine digits, as Mistral's templates want it."""
    return [call if call.id else call.with_id(f"{number:09d}") for number, call in enumerate(calls, start=first)]
