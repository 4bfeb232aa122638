# ruff: noqa: RUF001 - tokens of DeepSeek
"""Tool calls in the forms that models write: rendered by a model's own chat template, and read back the same.

Templates are those of the models as TRL ships them (``trl/chat_templates``), and recorded texts of further ones.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import trl
from trl.chat_template_utils import add_response_schema

from tests.golden.tiny import tiny_tokenizer
from trainers.data.rows import tokenize_prompts
from trainers.plugins import TOOL_CALL_PARSERS
from trainers.rollout.environments import Reply
from trainers.rollout.episodes import reply_ids
from trainers.rollout.tool_call_forms import ToolCall, gemma4
from trainers.rollout.tool_calls import form_of, read_hermes, tool_call_parser
from trainers.rollout.tools import ToolEnvironment, resolve_tools, schemas

SPECIAL = {  # special tokens of the models, besides ChatML's
    "deepseek": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁sep｜>", "<｜end▁of▁sentence｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>"),
    ],
    "gptoss": ["<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|return|>", "<|constrain|>"],
    "kimi": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    "qwen": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|observation|>"],
    "llama": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|eom_id|>"],
    "gemma 4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<|turn>", "<turn|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"],
    "mistral 11": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"],
}


def book(title: str, rooms: int, price: float, days: list[int]) -> str:
    """Books rooms.

    Args:
        title: What it is for.
        rooms: How many rooms.
        price: Of one.
        days: Of the month.
    """
    return f"{title}: {rooms * price}"


TOOLS = resolve_tools([book])
SCHEMAS = schemas(TOOLS)
ARGUMENTS = {"title": 'a "talk" {x} on\ntwo lines', "rooms": 2, "price": 0.5, "days": [3, 4]}
ASKED = {"role": "user", "content": "Book it."}


def tokenizer_of(model: str, template: str, eos: str = "<|im_end|>") -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[model]}, replace_extra_special_tokens=False)
    tokenizer.eos_token = eos
    file = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
    tokenizer.chat_template = file.read_text(encoding="utf-8") if file.exists() else template
    return tokenizer


def calling(arguments: Any) -> dict[str, Any]:
    """An assistant's turn that calls."""
    call = {"id": "000000000", "type": "function", "function": {"name": "book", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def written(tokenizer: Any, arguments: Any) -> str:
    """The turn as the template renders it, behind what it renders of the prompt."""
    options = {"tools": SCHEMAS, "tokenize": False}
    prompt = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template([ASKED, calling(arguments)], **options)
    length = next((k for k, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), len(prompt))
    text = whole[length:]
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))


LIVE = {  # of a model, TRL's file with its template: whose special tokens, and the parser it wants
    "qwen2_5": ("qwen", "hermes"),
    "qwen3": ("qwen", "hermes"),
    "deepseekv3": ("deepseek", "deepseek_v3"),
    "gptoss": ("gptoss", "openai"),
    "qwen3_5_nothink": ("qwen", "qwen3_coder"),
    "glm4moe": ("glm", "glm45"),
    "llama3_1": ("llama", "llama3_json"),
    "gemma4_v5": ("gemma 4", "gemma4"),
}


@pytest.mark.parametrize("template", LIVE)
def test_a_call_is_read_as_the_template_writes_it(template: str) -> None:
    model, form = LIVE[template]
    tokenizer = tokenizer_of(model, template)
    assert form_of(tokenizer, SCHEMAS) == form
    text = written(tokenizer, json.dumps(ARGUMENTS) if model == "deepseek" else ARGUMENTS)
    (call,) = tool_call_parser("auto", tokenizer, SCHEMAS)(text, {"prompt": [ASKED]})
    assert (call.name, call.arguments, call.error) == ("book", ARGUMENTS, None)
    assert tool_call_parser("auto", tokenizer, SCHEMAS)("nothing to call<|im_end|>", {"prompt": [ASKED]}) == []


NESTED = {
    "deep": {"a": [1, {"b": "c", "d": None}], "e": {}},
    "flags": [True, False],
    "text": "007, null] } 日本",
    "n": [],
}


@pytest.mark.parametrize("template", ["qwen3", "gemma4", "gemma4_v5", "qwen3_5_nothink", "glm4moe"])
def test_numbers_and_null_inside_of_values_keep_their_types(template: str) -> None:
    schema: Any = copy.deepcopy(SCHEMAS[0])
    types = {"deep": "object", "flags": "array", "text": "string", "n": "array"}
    schema["function"]["parameters"] = {"type": "object", "properties": {k: {"type": v} for k, v in types.items()}}
    tokenizer = tokenizer_of(LIVE.get(template, LIVE["gemma4_v5"])[0], template)
    (call,) = tool_call_parser("auto", tokenizer, [schema])(written(tokenizer, NESTED), {"prompt": [ASKED]})
    assert (call.arguments, call.error) == (NESTED, None)


@pytest.mark.parametrize("text", ["</tool_call>", "a </tool_call> b <tool_call>", '"</tool_call>"'])
def test_a_text_in_a_call_may_hold_the_marker_of_its_end(text: str) -> None:
    line, other = (json.dumps({"name": "book", "arguments": one}) for one in ({"title": text}, ARGUMENTS))
    whole = f"<tool_call>\n{line}\n</tool_call>\n<tool_call>\n{other}\n</tool_call><|im_end|>"
    calls = read_hermes(whole, {})
    assert [(call.name, call.arguments, call.error) for call in calls] == [
        ("book", {"title": text}, None),
        ("book", ARGUMENTS, None),
    ]


@pytest.mark.parametrize(
    "piece", ['<tool_call>{"a": "</tool_call>', '<tool_call>["</tool_call>', "<|tool_call>call:a{b:[["]
)
def test_a_turn_of_broken_calls_is_read_quickly(piece: str) -> None:
    began = time.process_time()
    text = piece * 30_000
    assert all(call.error for call in [*read_hermes(text, {}), *gemma4(f"{text}<tool_call|>")])
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    "inside", ["", "call:", "call:a", "call:a{", "call:a{b}", "call:a{b:}", "call:a{b:1,}", "call:a{b:1}x"]
)
def test_a_broken_call_of_gemma_is_told(inside: str) -> None:
    (call,) = gemma4(f"<|tool_call>{inside}<tool_call|>")
    assert call.error


LINE = json.dumps(ARGUMENTS)
VALUES = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in ARGUMENTS.items()]
RECORDED = {  # whose special tokens, the parser, a marker of its template, and what the template renders of the call
    # deepseek-ai/DeepSeek-V3.1 (MIT), and with a V3 model's block over several lines
    "deepseek_v31": (
        *("deepseek", "deepseek_v31", "<｜tool▁calls▁begin｜>"),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>book<｜tool▁sep｜>{LINE}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v3_indented": (
        *("deepseek", "deepseek_v3", "<｜tool▁calls▁begin｜>"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>book\n```json\n"
        + f"{json.dumps(ARGUMENTS, indent=2)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    # moonshotai/Kimi-K2-Thinking (modified MIT)
    "kimi_k2": (
        *("kimi", "kimi_k2", "<|tool_calls_section_begin|>"),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.book:0<|tool_call_argument_begin|>"
        + f"{LINE}<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
    ),
    # Qwen/Qwen3-Coder (Apache 2.0)
    "qwen3_coder": (
        *("qwen", "qwen3_coder", "<function=...><parameter=..."),
        "\n<tool_call>\n<function=book>\n"
        + "".join(VALUES).replace("[3, 4]", json.dumps([3, 4]))
        + "</function>\n</tool_call><|im_end|>\n",
    ),
    # mistralai/Mistral-Small-3.1 and before (v3), and since 3.2 (v11) (Apache 2.0)
    "mistral_v3": (
        *("mistral", "mistral", "[TOOL_CALLS]"),
        f'[TOOL_CALLS] [{{"name": "book", "arguments": {LINE}, "id": "000000000"}}]</s>',
    ),
    "mistral_v11": ("mistral 11", "mistral", "[TOOL_CALLS]", f"[TOOL_CALLS]book[ARGS]{LINE}</s>"),
    # openai/gpt-oss (Apache 2.0) as the models write it, with the recipient behind the channel
    "gptoss_written": (
        *("gptoss", "openai", "<|channel|> to=functions."),
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.book "
        + f"<|constrain|>json<|message|>{LINE}<|call|>",
    ),
}


@pytest.mark.parametrize("case", RECORDED)
def test_a_recorded_call_is_read(case: str) -> None:
    model, form, marker, text = RECORDED[case]
    tokenizer = tokenizer_of(model, f"{{{{ tools }}}}{marker}", eos="</s>" if form == "mistral" else "<|im_end|>")
    text = tokenizer.decode(tokenizer(text)["input_ids"])
    for name in ("auto", form):
        (call,) = tool_call_parser(name, tokenizer, SCHEMAS)(text, {"prompt": [ASKED]})
        assert (call.name, call.arguments, call.error) == ("book", ARGUMENTS, None)
        assert call.id == ("functions.book:0" if form == "kimi_k2" else None)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_nothink", "glm4moe", "gptoss", "llama3_1"])
def test_transformers_reads_what_the_tokenizer_has_a_response_template_for(template: str) -> None:
    tokenizer = tokenizer_of(LIVE[template][0], template)
    tokenizer = add_response_schema(tokenizer)
    text = written(tokenizer, ARGUMENTS)
    row = {"prompt": [ASKED], "tools": json.dumps(SCHEMAS)}
    for name in ("auto", "hf"):
        (call,) = tool_call_parser(name, tokenizer, SCHEMAS)(text, row)
        assert (call.name, call.arguments) == ("book", ARGUMENTS)


def test_without_vllm_trl_knows_the_template_or_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    tokenizer = tokenizer_of("glm", "glm4moe")
    (call,) = tool_call_parser("auto", tokenizer, SCHEMAS)(written(tokenizer, ARGUMENTS), {"prompt": [ASKED]})
    assert (call.name, call.arguments) == ("book", ARGUMENTS)
    assert getattr(tokenizer, "response_template", None) is None  # it is saved with the model as it was
    with pytest.raises(ValueError, match=r"'kimi_k2' is a parser of vLLM, which is not installed. Install it"):
        tool_call_parser("auto", tokenizer_of("kimi", RECORDED["kimi_k2"][2]), SCHEMAS)


def test_what_fits_nothing_is_refused_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    unknown = tokenizer_of("qwen", "{{ tools }}{% for call in message.tool_calls %}CALL{{ call }}{% endfor %}")
    with pytest.raises(ValueError, match=r"unknown form. Set tool_call_parser to the name"):
        tool_call_parser("auto", unknown, SCHEMAS)
    with pytest.raises(ValueError, match="the tokenizer has no response_template"):
        tool_call_parser("hf", unknown, SCHEMAS)
    plain = tiny_tokenizer()
    assert form_of(plain, SCHEMAS) == "hermes"
    assert "does not write tools" in caplog.text


def test_a_name_that_vllm_has_not_or_whose_tokens_lack_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no parser 'qwen3_codr'.*Did you mean 'qwen3_coder'"):
        tool_call_parser("qwen3_codr", tiny_tokenizer(), SCHEMAS)


def test_a_turn_of_markers_alone_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's parsers take minutes for it."""
    parse = tool_call_parser("kimi_k2", tokenizer_of("kimi", RECORDED["kimi_k2"][2]), SCHEMAS)
    (call,) = parse("<|tool_call_begin|>" * 2001, {"prompt": [ASKED]})
    assert call.error == "ValueError: the turn has more than 2000 special tokens"
    (call,) = parse(RECORDED["kimi_k2"][3] + "<|im_end|>" * 1000, {"prompt": [ASKED]})
    assert call.arguments == ARGUMENTS


def test_a_plugin_reads_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def shouted(text: str) -> list[dict[str, Any]]:
        return [{"name": "book", "arguments": json.loads(text.partition("!")[2])}]

    monkeypatch.setitem(TOOL_CALL_PARSERS.entries, "shouted", type("Entry", (), {"value": shouted}))
    for name in ("shouted", f"{__name__}:listed"):
        parse = tool_call_parser(name, tiny_tokenizer(), SCHEMAS)
        assert parse('!{"rooms": 1}', {}) == [ToolCall("book", {"rooms": 1})]
    with pytest.raises(ValueError, match=r"unknown tool_call_parser 'nowhere\.parser'"):
        tool_call_parser("nowhere.parser", tiny_tokenizer(), SCHEMAS)
    with pytest.raises(TypeError, match="must return a list of calls, got dict"):
        tool_call_parser("builtins:dict", tiny_tokenizer(), SCHEMAS)("", {})


def listed(text: str) -> list[ToolCall]:
    return [ToolCall("book", {"rooms": 1})]


def test_a_tool_environment_sees_special_tokens_and_answers_under_the_ids_of_calls() -> None:
    tokenizer = tokenizer_of("gptoss", "gptoss")
    environment = ToolEnvironment(TOOLS, tool_call_parser("auto", tokenizer, SCHEMAS))
    assert environment.keeps_special_tokens
    environment.reset({"prompt": [ASKED]})
    text = RECORDED["gptoss_written"][3]
    for number in ("000000000", "000000001"):
        reply = asyncio.run(environment.step(text))
        answer = {"role": "tool", "content": f"{ARGUMENTS['title']}: 1.0", "tool_call_id": number, "name": "book"}
        assert reply.messages == [answer]
        assert reply.tool_calls[0]["id"] == number
    unread = asyncio.run(environment.step(text.replace("{", "", 1)))
    assert "JSONDecodeError" in unread.messages[0]["content"]  # type: ignore[index]
    assert (unread.num_tool_calls, unread.num_tool_failures) == (1, 1)


ENDS = {  # the token with which a model of the template ends a turn that calls
    "qwen3": "<|im_end|>",
    "qwen3_5_nothink": "<|im_end|>",
    "gptoss": "<|call|>",
    "glm4moe": "<|observation|>",
    "llama3_1": "<|eot_id|>",
}


@pytest.mark.parametrize("template", ENDS)
def test_an_answer_stands_behind_the_call_as_the_template_puts_it(template: str) -> None:
    """The conversation with call and answer, rendered at once, is the prompt, the turn and the reply."""
    tokenizer = tokenizer_of(LIVE[template][0], template)
    answer = {"role": "tool", "content": "done", "tool_call_id": "000000000", "name": "book"}
    row = {"prompt": [ASKED], "tools": json.dumps(SCHEMAS)}
    turn = calling(ARGUMENTS)
    (whole,) = tokenize_prompts([{**row, "prompt": [ASKED, turn, answer]}], tokenizer)
    (end,) = tokenizer(ENDS[template], add_special_tokens=False)["input_ids"]
    found = reply_ids(row, [answer], [7, end], tokenizer, {}, turn["tool_calls"])
    assert whole[-len(found) :] == found
    assert whole[-len(found) - 1] == end


def test_templates_that_refuse_an_answer_without_a_call_show_it_as_the_users() -> None:
    """A call of gpt-oss that cannot be read has no name, under which the template would show the answer."""
    tokenizer = tokenizer_of("gptoss", "gptoss")
    reply = Reply([{"role": "tool", "content": "JSONDecodeError"}])
    found = reply_ids({"prompt": [ASKED]}, list(reply.messages), [7], tokenizer, {})  # type: ignore[arg-type]
    assert "<|start|>user<|message|>JSONDecodeError<|end|><|start|>assistant" in tokenizer.decode(found)
