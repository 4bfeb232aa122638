"""Pairs as typed batches: where completions begin, what is cut and dropped, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from tests.golden.tiny import tiny_tokenizer
from trainers.backends.base import token_lengths
from trainers.backends.scores.inputs import micro_batches
from trainers.data.preferences import Preferences, tokenize_comparisons, tokenize_preferences

EOS = 2
PAIR = {"prompt": "ab", "chosen": "c", "rejected": "de"}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def tokenized(*rows: dict[str, Any], max_length: int | None = None, **keys: Any) -> Preferences:
    return tokenize_preferences(Dataset.from_list(list(rows)), tiny_tokenizer(), max_length=max_length, **keys)


def ids(text: str) -> list[int]:
    return list(tiny_tokenizer()(text)["input_ids"])


def test_a_pair_is_two_sequences_whose_completions_are_targets() -> None:
    pairs = tokenized(PAIR)
    assert pairs.chosen_ids[0].tolist() == [*ids("abc"), EOS]
    assert pairs.chosen_mask[0].tolist() == [False, False, True, True]
    assert pairs.rejected_ids[0].tolist() == [*ids("abde"), EOS]
    assert pairs.rejected_mask[0].tolist() == [False, False, True, True, True]
    assert (pairs.num_tokens, pairs.num_chosen_tokens) == (9, 2)


def test_a_completion_that_ends_already_gets_no_second_end() -> None:
    assert tokenized(PAIR | {"chosen": "c<|im_end|>"}) == tokenized(PAIR)


def test_all_chosen_sequences_come_before_the_rejected_and_pairs_stay_together() -> None:
    pairs = tokenized(*(PAIR | {"prompt": "a" * (k + 1)} for k in range(3)))
    sequences = pairs[np.array([2, 0])].as_sequences()
    assert [row.tolist() for row in sequences.input_ids] == [
        pairs.chosen_ids[2].tolist(),
        pairs.chosen_ids[0].tolist(),
        pairs.rejected_ids[2].tolist(),
        pairs.rejected_ids[0].tolist(),
    ]
    assert [len(row) for row in sequences.target_mask] == [5, 3, 6, 4]
    assert len(pairs[:0].as_sequences()) == 0


def test_a_budget_of_tokens_holds_both_sides_of_a_pair_with_their_padding() -> None:
    pairs = tokenized(*(PAIR | {"rejected": "d" * length} for length in (1, 9, 9, 2, 30)))
    both = pairs.as_sequences().input_ids.lengths.reshape(2, -1)  # chosen above rejected
    assert token_lengths(pairs, padded=False).tolist() == both.sum(0).tolist() != pairs.row_lengths().tolist()
    for rows in micro_batches(pairs.row_lengths(), 8, token_budget=50):
        sequences = pairs[rows].as_sequences()
        assert len(rows) == 1 or len(sequences) * int(sequences.input_ids.lengths.max()) <= 50


def test_the_first_token_of_a_sequence_is_no_target_even_if_it_is_completion() -> None:
    assert tokenized(PAIR | {"prompt": ""}).chosen_mask[0].tolist() == [False, True]
    assert tokenized(PAIR, max_length=2, truncation_mode="keep_end").rejected_mask[0].tolist() == [False, True]


def test_pairs_with_a_long_side_may_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """As ms-swift's ``truncation_strategy: delete`` does: by the longer side, the prompt included; nothing is cut."""
    rows = [
        PAIR | {"prompt": "ab", "chosen": "c" * a, "rejected": "d" * b} for a, b in ((1, 1), (9, 1), (1, 9), (5, 5))
    ]
    whole = tokenized(*rows)
    longest = [int(max(len(pair[0]), len(pair[1]))) for pair in zip(whole.chosen_ids, whole.rejected_ids, strict=True)]
    kept = tokenized(*rows, max_length=longest[3], truncation_mode="drop")
    assert kept.chosen_ids == whole[[0, 3]].chosen_ids
    assert kept.rejected_ids == whole[[0, 3]].rejected_ids
    assert "dropped 2 of 4 pairs longer than max_length" in caplog.text
    with pytest.raises(ValueError, match="all are longer than max_length 3"):
        tokenized(*rows[1:3], max_length=3, truncation_mode="drop")


def test_rows_whose_prompt_fills_the_length_are_dropped_with_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pairs = tokenized(PAIR, PAIR | {"prompt": "abcdef"}, PAIR, max_length=4)
    assert [row.tolist() for row in pairs.rejected_ids] == [ids("abde")] * 2
    assert "dropped 1 of 3 pairs whose prompt fills max_length 4" in caplog.text
    with pytest.raises(ValueError, match=r"none of 1 pairs is left.*Raise max_length"):
        tokenized(PAIR, max_length=2)


def test_text_completions_of_a_conversation_are_turns_of_the_assistant() -> None:
    prompt = [turn("user", "hi")]
    texts = {"prompt": prompt, "chosen": "yes", "rejected": "no"}
    turns = {"prompt": prompt, "chosen": [turn("assistant", "yes")], "rejected": [turn("assistant", "no")]}
    assert tokenized(texts) == tokenized(turns)
    assert tiny_tokenizer().decode(tokenized(turns).chosen_ids[0][tokenized(turns).chosen_mask[0]]) == "yes<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "a", "chosen": "b"}, "'chosen' and 'rejected'.*this one has prompt, chosen"),
        ({"prompt": "a", "better": "b", "worse": "c"}, "Rename with `columns`"),
    ],
    ids=["no rejected", "other names"],
)
def test_rows_that_are_no_pairs_are_refused_by_their_number(row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as error:
        tokenized(row)
    assert "while tokenizing row 0 of the dataset" in error.value.__notes__


def test_a_scored_sequence_has_one_target_its_last_token() -> None:
    pairs = tokenize_comparisons(Dataset.from_list([PAIR | {"margin": 0.5}]), tiny_tokenizer(), max_length=None)
    assert pairs.chosen_ids[0].tolist() == [*ids("abc"), EOS]
    assert pairs.chosen_mask[0].tolist() == [False, False, False, True]
    assert pairs.margins is not None
    assert pairs.margins.tolist() == [0.5]


def test_where_the_end_is_padding_the_token_before_it_is_scored_as_transformers_does() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    pairs = tokenize_comparisons(Dataset.from_list([PAIR]), tokenizer, max_length=None)
    assert pairs.chosen_mask[0].tolist() == [False, False, True, False]


def test_pairs_with_a_sequence_that_is_too_long_to_score_are_left_out() -> None:
    rows = Dataset.from_list([PAIR, PAIR | {"rejected": "a long one"}])
    assert len(tokenize_comparisons(rows, tiny_tokenizer(), max_length=6)) == 1
