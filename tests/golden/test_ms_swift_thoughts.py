"""Thoughts of conversations: the tokens, and which of them are learned, as ms-swift's templates make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from trl.chat_template_utils import qwen3_5_think_chat_template, qwen3_chat_template

from tests.golden.tiny import tiny_tokenizer
from trainers.data.loss_scale import parsed
from trainers.data.preferences import tokenize_preferences
from trainers.data.rows import tokenize_sft
from trainers.data.texts.thoughts import WrittenAnswers
from trainers.data.unpaired import tokenize_unpaired

RECORDED = json.loads((Path(__file__).parent / "ms_swift/thoughts.json").read_text(encoding="utf-8"))
TEMPLATES = {
    "qwen3": qwen3_chat_template,
    "qwen3_5_think": qwen3_5_think_chat_template,
    "qwen3_thinking": qwen3_chat_template[: qwen3_chat_template.index("    {%- if enable_thinking is defined")]
    + "    {{- '<think>\\n' }}\n{%- endif %}",  # as of Qwen3-4B-Thinking-2507
}


def tokenizer_of(name: str, **settings: Any) -> WrittenAnswers:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    return WrittenAnswers(tokenizer, **settings)


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_have_the_tokens_and_targets_of_ms_swift(template: str) -> None:
    compared = 0
    for case in RECORDED["supervised"]:
        settings = case["settings"]
        scale, is_default = settings["loss_scale"], settings["loss_scale"] == "default"
        if case["template"] != template:
            continue
        tokenizer = tokenizer_of(
            template,
            keeps=settings.get("preserve_thinking", is_default),
            adds_empty="none" if "add_non_thinking_prefix" in settings else "every" if is_default else "last",
        )
        scale = parsed(scale + "+ignore_empty_think" * (template != "qwen3_thinking"))
        rows = Dataset.from_list([{"messages": case["messages"]}])
        found = tokenize_sft(rows, tokenizer, max_length=None, loss_scale=scale)
        where = f"{settings}, {case['name']}"
        assert tokenizer.decode(found.input_ids[0]) == tokenizer.decode(case["input_ids"]), where
        assert np.flatnonzero(found.target_mask[0]).tolist() == case["learned"], where
        compared += 1
    assert compared == 25


@pytest.mark.parametrize(
    "case", RECORDED["pairs"], ids=lambda case: f"{case['template']} {case['loss_scale']}: {case['name']}"
)
def test_pairs_have_the_tokens_and_targets_of_ms_swift(case: dict[str, Any]) -> None:
    learns_answers = case["loss_scale"] == "default"
    adds: Any = "every" if learns_answers else "last"
    tokenizer = tokenizer_of(case["template"], keeps=learns_answers, adds_empty=adds)
    rejected = [{"role": "assistant", "content": case["rejected_response"]}]
    row = {"prompt": case["messages"][:-1], "chosen": case["messages"][-1:], "rejected": rejected}
    rows = Dataset.from_list([row])
    pairs = tokenize_preferences(rows, tokenizer, max_length=None, learns_answers=learns_answers)
    assert_is(case["chosen"], pairs.chosen_ids[0], pairs.chosen_mask[0])
    assert_is(case["rejected"], pairs.rejected_ids[0], pairs.rejected_mask[0])
    if learns_answers:  # ORPO alone
        return
    rows = Dataset.from_list([{"messages": case["messages"], "label": True}])
    judged = tokenize_unpaired(rows, tokenizer).judged(max_length=None)
    assert_is(case["chosen"], judged.input_ids[0], judged.target_mask[0])


def assert_is(theirs: dict[str, list[int]], ids: np.ndarray, mask: np.ndarray) -> None:
    assert ids.tolist() == theirs["input_ids"]
    assert np.flatnonzero(mask).tolist() == theirs["learned"]
