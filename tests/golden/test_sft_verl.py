"""What fine-tuning learns of conversations, against verl's own data set (``verl/record_sft.py``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.tiny import tiny_tokenizer
from tests.golden.verl import record_sft as verl
from trainers.data.loss_scale import parsed
from trainers.data.rows import load_rows, tokenize_sft

RECORDED = json.loads(Path(verl.__file__).with_name("sft.json").read_text())


@pytest.mark.parametrize("k", range(len(verl.CONVERSATIONS)))
def test_a_conversation_has_the_tokens_that_verl_learns(k: int) -> None:
    """The keys that ``translate`` writes for verl's sft_trainer."""
    rows = load_rows([{"messages": verl.conversations()[k]}])
    found = tokenize_sft(rows, tiny_tokenizer(), max_length=256, loss_scale=parsed("default"))
    learned = [place for place, is_target in enumerate(found.target_mask.values.tolist()) if is_target]
    assert {"input_ids": found.input_ids.values.tolist(), "learned": learned} == RECORDED[k]
