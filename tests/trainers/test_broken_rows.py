"""Rows that cannot be used are found before the first step, all in one error, or left out and counted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError
from tests.e2e.runs import dpo_config, gkd_config, grpo_config, ppo_config, reward_config, sft_config
from tests.golden.tiny import save_tiny
from trainers.data.broken_rows import pair_mistake, prompt_mistake, response_mistake, supervised_mistake
from trainers.data.rows import load_rows
from trainers.data.sources import read_source
from trainers.dpo.trainer import DPOTrainer
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.trainer import GRPOTrainer
from trainers.ppo.trainer import PPOTrainer
from trainers.reward.trainer import RewardTrainer
from trainers.sft.trainer import SFTTrainer

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
GOOD: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "a bee"},
    "completion": {"prompt": "a bee", "completion": " sees two"},
    "pair": {"prompt": "a bee", "chosen": " sees two", "rejected": " sees"},
}
TRAINERS: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, grpo_config, "prompt", {}),
    "ppo": (PPOTrainer, ppo_config, "prompt", {"reward_funcs": ["tests.e2e.runs.evenness"], "reward_weights": None}),
    "gkd": (GKDTrainer, gkd_config, "prompt", {"lmbda": 1.0, "sft_alpha": 0.0}),
    "sft": (SFTTrainer, sft_config, "completion", {}),
    "dpo": (DPOTrainer, dpo_config, "pair", {}),
    "reward": (RewardTrainer, reward_config, "pair", {}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_names_all_broken_rows_before_the_start_or_leaves_them_out(
    name: str, model: str, tmp_path: Path
) -> None:
    trainer, config, kind, keys = TRAINERS[name]
    if name == "gkd":
        keys = keys | {"teacher_model": model}
    good = GOOD[kind]
    column = next(reversed(good))
    rows = [good, good | {column: None}, good, good | {column: 3}, good | {column: []}, good]
    keys = keys | {"dataset": rows, "eval_dataset": None}
    with pytest.raises(ConfigError) as told:
        trainer(config(model, tmp_path, **keys))
    assert "dataset: 3 of 6 rows are broken: row 1 (" in str(told.value)
    assert f"row 3 ({column}: the number 3, not text or a conversation), row 4 ({column}: " in str(told.value)
    assert "skip_broken_rows: true" in str(told.value)
    assert "\n" not in str(told.value)
    kept = trainer(config(model, tmp_path, **keys, skip_broken_rows=True))
    assert len(next(getattr(kept, each) for each in ("rows", "sequences", "pairs") if hasattr(kept, each))) == 3


@pytest.mark.parametrize("name", ["grpo", "ppo", "gkd"])
def test_conversations_without_a_chat_template_are_one_line_before_anything_is_built(
    name: str, model: str, tmp_path: Path
) -> None:
    trainer, config, _, keys = TRAINERS[name]
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    (plain / "chat_template.jinja").unlink()
    if name == "gkd":
        keys = keys | {"teacher_model": str(plain)}
    keys = keys | {"dataset": [{"prompt": [USER]}] * 4, "eval_dataset": None}
    with pytest.raises(ConfigError, match=r"^chat_template: the prompts are conversations, [^\n]*$"):
        trainer(config(str(plain), tmp_path, **keys))
    trainer(config(str(plain), tmp_path, **keys, chat_template="{{ messages[0].content }}"))


@pytest.mark.parametrize(
    ("mistake_of", "row", "told"),
    [
        (prompt_mistake, {"prompt": None}, ("prompt", "null")),
        (prompt_mistake, {"prompt": ""}, ("prompt", "empty")),
        (prompt_mistake, {"prompt": b"\xff"}, ("prompt", "bytes, not text or a conversation")),
        (prompt_mistake, {"prompt": [{"content": "a"}]}, ("prompt", "message 0 has no role")),
        (prompt_mistake, {"prompt": [USER, {"role": "user", "content": None}]}, ("prompt", "message 1 has no content")),
        (prompt_mistake, {"prompt": ["a"]}, ("prompt", "message 0 is the text 'a'")),
        (prompt_mistake, {"messages": []}, ("messages", "a conversation without messages")),
        (prompt_mistake, {"messages": [ANSWER]}, ("messages", "no turn to answer")),
        (prompt_mistake, {"messages": "a"}, ("messages", "the text 'a', not a conversation")),
        (prompt_mistake, {"prompt": None, "messages": [USER, ANSWER]}, None),
        (prompt_mistake, {"prompt": [{"role": "user", "content": [3]}]},
         ("prompt", "message 0 has a part that is the number 3")),
        (prompt_mistake, {"prompt": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
         ("prompt", "message 0 has a part whose text is the number 3")),
        (prompt_mistake, {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         ("messages", "message 0 has a part whose text is null")),
        (prompt_mistake, {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]}, None),
        (prompt_mistake, {"prompt": [USER, {"role": "assistant", "content": "", "tool_calls": 3}]},
         ("prompt", "message 1 has tool_calls that are the number 3, not a list of mappings")),
        (supervised_mistake, {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": ["x"]}]},
         ("messages", "message 1 has tool_calls that are a list, not a list of mappings")),
        (response_mistake, {"prompt": "a", "completion": 3},
         ("completion", "the number 3, not text or a conversation")),
        (response_mistake, {"prompt": "a", "completion": [ANSWER]},
         ("completion", "a list, and prompt is the text 'a'")),
        (response_mistake, {"prompt": "a", "completion": None}, ("completion", "null")),
        (response_mistake, {"messages": [USER, ANSWER, USER]}, ("messages", "no last turn of the assistant")),
        (response_mistake, {"prompt": [USER], "completion": "b"}, None),
        (prompt_mistake, {"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}]}, None),
        (supervised_mistake, {"text": 3}, ("text", "the number 3, not text")),
        (supervised_mistake, {"text": None, "messages": None}, ("text", "null")),
        (supervised_mistake, {"text": ""}, None),
        (supervised_mistake, {"prompt": "a"}, None),  # tokenization tells which columns are missing
        (supervised_mistake, {"prompt": [USER], "completion": "b"},
         ("completion", "the text 'b', and prompt is a list")),
        (pair_mistake, {"chosen": "a", "rejected": None}, ("rejected", "null")),
        (pair_mistake, {"chosen": "a", "rejected": "b", "margin": "c"}, ("margin", "the text 'c', not a number")),
        (pair_mistake, {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER], "margin": 0.5}, None),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_said_with_its_column(
    mistake_of: Callable[[Any], Any], row: dict[str, Any], told: tuple[str, str] | None
) -> None:
    assert mistake_of(row) == told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"prompt": "a \xff"}', r"rows.jsonl:2 is not UTF-8: invalid start byte at byte 14"),
        (b'{"prompt": "a', r"rows.jsonl:2 is not JSON"),
        (rb'{"prompt": "\ud800"}', r"rows.jsonl:2 holds text that is not Unicode"),
    ],
)
def test_lines_that_are_no_text_are_named_or_left_out(
    line: bytes, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "a bee"}).encode()
    file.write_bytes(b"\n".join([good, line, good, line]))
    with pytest.raises(ValueError, match=rf"{told}.*1 further lines are broken too.*skip_broken_rows"):
        read_source(str(file))
    assert read_source(str(file), skip_broken=True)["prompt"] == ["a bee", "a bee"]
    assert "2 lines are broken and left out" in caplog.text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "1", "completion": NaN}', "it holds NaN, which is not a JSON value"),
        ('{"prompt": "1", "completion": "2", "score": [-Infinity]}', "it holds -Infinity, which is not a JSON value"),
        ('{"prompt": "1", "prompt": "3", "completion": "2"}', "it holds the key 'prompt' twice in one object"),
    ],
)
def test_a_line_that_no_other_row_may_suffer_from_is_named_or_left_out(line: str, told: str, tmp_path: Path) -> None:
    good, file = '{"prompt": "1+1=", "completion": "2"}', tmp_path / "rows.jsonl"
    file.write_text("\n".join([good] * 5 + [line] + [good] * 5))
    with pytest.raises(ValueError, match=rf"^[^\n]*rows.jsonl:6 is not JSON: {told}[^\n]*skip_broken_rows: true\.$"):
        load_rows(str(file))
    rows = load_rows(str(file), skip_broken=True)
    assert rows["completion"] == ["2"] * 10
    file.write_text("\n".join([good, good.replace("1+1=", "NaN or -Infinity?")]))  # as text they are any other
    assert load_rows(str(file))["prompt"] == ["1+1=", "NaN or -Infinity?"]


def test_nan_in_a_json_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[\n{"prompt": "1", "completion": "2"},\n{"prompt": "1",\n"completion": NaN}\n]')
    with pytest.raises(ValueError, match=r"cannot read [^\n]*rows.json: ValueError: it holds NaN or Infinity"):
        load_rows(str(file))


def test_half_a_surrogate_pair_in_rows_from_python_is_named() -> None:
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "\ud800"}]}]
    with pytest.raises(ValueError, match="1 of 2 rows are broken: row 1 holds text that is not Unicode"):
        read_source(rows)
    assert len(read_source(rows, skip_broken=True)) == 1


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"prompt_template": "Q: {question}"}, [{"question": "a"}, {"question": None}]),
        ({"system": "s"}, [{"prompt": "a"}, {"prompt": 3}]),
        ({"system": "s"}, [{"messages": [USER]}, {"messages": None}]),
        ({}, [{"conversations": [{"from": "human", "value": "a"}]}, {"conversations": "a"}]),
    ],
)
def test_what_is_done_to_rows_beforehand_leaves_broken_ones_to_be_found(
    settings: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    assert [prompt_mistake(row) is None for row in load_rows(rows, **settings)] == [True, False]


def test_gkd_names_broken_responses_before_the_start_or_leaves_them_out(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a bee", "completion": completion} for completion in (" sees", 3, None, [], " two")]
    keys: dict[str, Any] = {"teacher_model": model, "eval_dataset": None, "dataset": rows}
    with pytest.raises(ConfigError, match=r"dataset: 3 of 5 rows are broken: row 1 \(completion: the number 3, [^\n]*"):
        GKDTrainer(gkd_config(model, tmp_path, **keys))
    assert len(GKDTrainer(gkd_config(model, tmp_path, **keys, skip_broken_rows=True)).rows) == 2


def test_options_of_a_row_that_are_no_mapping_are_named(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": [USER], "chat_template_kwargs": given} for given in ({"a": 1}, 3, None)]
    with pytest.raises(ConfigError, match=r"row 1 \(chat_template_kwargs: the number 3, not a mapping\)"):
        GRPOTrainer(grpo_config(model, tmp_path, dataset=rows, eval_dataset=None))


def test_a_row_that_the_chat_template_cannot_write_is_named(model: str, tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, call]}]
    template = "{% for message in messages %}{{ message.content + 'x' }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"cannot write a conversation: [^\n]*content[^\n]*tokenizing row 1 of the"):
        SFTTrainer(sft_config(model, tmp_path, dataset=rows, chat_template=template))


def test_a_folder_that_holds_no_rows_is_one_line(model: str) -> None:
    with pytest.raises(ValueError, match=r"^folder '[^\n]*' cannot be read as a dataset: [^\n]*$"):
        load_rows(model)


@pytest.mark.parametrize(
    ("good", "column", "broken"),
    [
        ({"query": "a", "response": "b", "history": "[]"}, "history", ["x(", "[" * 3000, "3", "[['a']]"]),
        ({"instruction": "a", "input": "c", "output": "b"}, "instruction", [3, ["a"]]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "conversations",
         [[{"value": "a"}], [{"from": "human"}]]),
    ],
)  # fmt: skip
def test_rows_of_other_formats_that_cannot_be_read_are_found_as_broken(
    good: dict[str, Any], column: str, broken: list[Any]
) -> None:
    rows = load_rows([good, *(good | {column: value} for value in broken), good])
    assert [supervised_mistake(row) is None for row in rows] == [True, *(False for _ in broken), True]


def test_a_pair_of_ms_swift_with_odd_messages_is_found_as_broken() -> None:
    good = {"messages": [USER, ANSWER], "rejected_response": "c"}
    rows = load_rows([good, good | {"messages": [3]}, good | {"messages": [["a"]]}, good])
    assert [pair_mistake(row) is None for row in rows] == [True, False, False, True]
