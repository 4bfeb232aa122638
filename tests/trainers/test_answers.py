"""Which tokens of a conversation are learned: answers alone, found without marks in the template; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.golden.tiny import tiny_tokenizer
from trainers.cli import load_config
from trainers.data.broken_rows import supervised_mistake
from trainers.data.loss_scale import parsed
from trainers.data.rows import load_rows, tokenize_sft
from trainers.sft.config import SFTConfig

PLAIN = (  # no marks
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # as Qwen3's: the last answer has thoughts, and earlier ones have lost them
    "{% set last = messages | map(attribute='role') | list | length - 1 %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.index0 == last %}<think>\n\n</think>\n\n{% endif %}{{ said }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "two."},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "three."},
]


def tokenizer(template: str = PLAIN) -> Any:
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def learned(messages: list[dict[str, Any]], scale: str | None, template: str = PLAIN, **settings: Any) -> list[str]:
    """What stands together of the learned tokens, as text."""
    made = tokenizer(template)
    rows = Dataset.from_list([{"messages": messages}])
    found = tokenize_sft(rows, made, max_length=None, loss_scale=parsed(scale), **settings)
    ids, mask = found.input_ids[0].tolist(), found.target_mask[0].tolist()
    runs: list[list[int]] = []
    for k, (token, is_in) in enumerate(zip(ids, mask, strict=True)):
        if is_in and not (k and mask[k - 1]):
            runs.append([])
        if is_in:
            runs[-1].append(token)
    return [made.decode(run) for run in runs]


def said(**loss: bool) -> list[dict[str, Any]]:
    """``MESSAGES``, of which the first or the second answer says ``loss``."""
    places = {"first": 2, "second": 4}
    return [
        {**message, "loss": {places[name]: value for name, value in loss.items()}.get(k)}
        for k, message in enumerate(MESSAGES)
    ]


def test_answers_and_what_ends_them_are_learned_and_nothing_else() -> None:
    assert learned(MESSAGES, "default") == ["two.<|im_end|>\n", "three.<|im_end|>\n"]
    assert learned(MESSAGES, "last_round") == ["three.<|im_end|>\n"]
    everything = "".join(learned(MESSAGES, None))
    assert everything == "".join(learned(MESSAGES, "all"))
    assert "be brief" in everything
    assert "one?" in everything


def test_a_template_that_takes_thoughts_out_of_earlier_answers_is_understood() -> None:
    messages = [*MESSAGES[:2], {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo."}, *MESSAGES[3:]]
    assert learned(messages, "default", THINKING) == [
        "two.<|im_end|>\n",
        "<think>\n\n</think>\n\nthree.<|im_end|>\n",
    ]
    scale = "default+ignore_empty_think"
    assert learned(messages, scale, THINKING) == ["two.<|im_end|>\n", "three.<|im_end|>\n"]


def test_a_message_says_of_itself_whether_it_is_learned() -> None:
    assert learned(said(first=False), "default") == ["three.<|im_end|>\n"]
    assert learned(said(first=True, second=False), "last_round") == ["two.<|im_end|>\n"]
    with pytest.raises(ValueError, match="set loss_scale: default"):
        learned(said(first=False), None)
    with pytest.raises(ValueError, match="message 1 is of role 'user' and has loss"):
        learned([*MESSAGES[:1], {**MESSAGES[1], "loss": True}, *MESSAGES[2:]], "default")


def test_completion_only_loss_of_messages_is_refused_as_in_trl() -> None:
    with pytest.raises(ValueError, match="completion_only_loss: true learns completions, and this row has none"):
        learned(MESSAGES, None, completion_only_loss=True)


def test_a_file_of_ms_swifts_names_learns_answers_alone(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model: m\ndataset: d\nattn_impl: sdpa\n")
    theirs = load_config(SFTConfig, ["--config", str(tmp_path / "x.yaml")])
    assert learned(MESSAGES, theirs.loss_scale) == ["two.<|im_end|>\n", "three.<|im_end|>\n"]
    (tmp_path / "x.yaml").write_text("model: m\ndataset: d\n")
    ours = load_config(SFTConfig, ["--config", str(tmp_path / "x.yaml")])
    assert "be brief" in "".join(learned(MESSAGES, ours.loss_scale))


def test_rows_that_are_too_long_are_dropped_where_that_is_asked_for() -> None:
    rows = Dataset.from_list([{"text": "a" * 5}, {"text": "b" * 50}, {"text": "c" * 6}])
    found = tokenize_sft(rows, tokenizer(), max_length=10, truncation_mode="drop")
    assert [len(row) for row in found.input_ids] == [6, 7]
    cut = tokenize_sft(rows, tokenizer(), max_length=10)
    assert [len(row) for row in cut.input_ids] == [6, 10, 7]


@pytest.mark.parametrize("name", ["images", "videos", "audios"])
def test_rows_with_something_to_see_or_hear_are_refused_by_name(name: str) -> None:
    rows = [{"messages": MESSAGES, name: ["a.png"]}, {"messages": MESSAGES, name: []}]
    with pytest.raises(ValueError, match=f"1 of 2 rows have {name}, which this run cannot read"):
        load_rows(rows)
    assert len(load_rows([{"messages": MESSAGES, name: []}] * 2)) == 2
    assert len(load_rows([{"messages": MESSAGES, name: None}] * 2)) == 2


@pytest.mark.parametrize("name", ["image", "video_url", "audio"])
def test_a_part_of_a_message_that_is_no_text_is_refused_by_its_type(name: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": name}]}, MESSAGES[2]]
    assert supervised_mistake({"messages": messages}) == (
        "messages",
        f"message 0 has a part of type '{name}', which this run cannot read",
    )


@pytest.mark.parametrize(
    "row", [{"query": "one?", "response": "two."}, {"instruction": "one?", "input": "", "output": "two."}]
)
def test_rows_of_ms_swift_and_alpaca_are_learned_by_the_chat_template(row: dict[str, Any]) -> None:
    made = tokenizer()
    found = tokenize_sft(load_rows([row]), made, max_length=None, loss_scale=parsed("default"))
    whole = "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\ntwo.<|im_end|>\n"
    assert made.decode(found.input_ids[0]) == whole
    assert made.decode(found.input_ids[0][found.target_mask[0]]) == "two.<|im_end|>\n"


def test_texts_of_a_file_of_ms_swifts_names_are_conversations(tmp_path: Path) -> None:
    """As its prompts are always: also those whose columns were renamed to ours."""
    rows = [{"question": "one?", "answer": "two."}]
    whole = {}
    for name, line in (("ms-swift", "attn_impl: sdpa\n"), ("trl", "")):
        (tmp_path / "x.yaml").write_text(
            f"model: m\ndataset: d\ncolumns: {{question: prompt, answer: completion}}\n{line}"
        )
        config = load_config(SFTConfig, ["--config", str(tmp_path / "x.yaml")])
        read = load_rows(rows, columns=config.columns, system=config.system)
        made = tokenizer()
        found = tokenize_sft(read, made, max_length=None, loss_scale=parsed(config.loss_scale))
        whole[name] = made.decode(found.input_ids[0]), made.decode(found.input_ids[0][found.target_mask[0]])
    assert whole["trl"] == ("one?two.<|im_end|>", "two.<|im_end|>")
    assert whole["ms-swift"] == (
        "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\ntwo.<|im_end|>\n",
        "two.<|im_end|>\n",
    )


def test_pairs_of_texts_become_conversations_too() -> None:
    (row,) = load_rows([{"prompt": "one?", "chosen": "two.", "rejected": "no."}], system="")
    assert row["prompt"] == [{"role": "user", "content": "one?"}]
    assert (row["chosen"], row["rejected"]) == (
        [{"role": "assistant", "content": "two."}],
        [{"role": "assistant", "content": "no."}],
    )


def test_a_row_that_is_none_of_these_is_told_that_texts_are_learned_as_they_are() -> None:
    with pytest.raises(ValueError, match="With system: '' they become conversations"):
        tokenize_sft(Dataset.from_list([{"ask": "a", "say": "b"}]), tokenizer(), max_length=None)
