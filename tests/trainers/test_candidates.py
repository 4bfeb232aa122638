"""Which candidates of a row are kept: small cases that can be worked out by eye."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trainers.sampling.candidates import Verdict, answered, completion_of, judged, normalised

NAN = math.nan


def verdict(prm: list[float] | None, orm: list[float] | None, *, num_texts: int = 0, **settings: Any) -> Verdict:
    failures = settings.pop("failures", [])
    num_texts = num_texts or len(prm or orm or [])
    return judged(num_texts, failures, prm, orm, **({"n_best_to_keep": 2} | settings))


def test_values_are_normalised_over_the_whole_row_and_equal_ones_as_ms_swift_does() -> None:
    assert normalised(np.array([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert normalised(np.array([0.3, 0.3])).tolist() == [0.3, 0.3]
    assert normalised(np.array([7.0, 7.0])).tolist() == [1.0, 1.0]
    assert normalised(np.array([0.0, 0.0])).tolist() == [0.0, 0.0]
    np.testing.assert_array_equal(normalised(np.array([1.0, NAN, 3.0])), [0.0, NAN, 1.0])
    np.testing.assert_array_equal(normalised(np.array([NAN, NAN])), [NAN, NAN])


def test_right_answers_come_before_better_reasoned_wrong_ones() -> None:
    found = verdict(prm=[0.2, 1.0, 0.6, 0.4], orm=[1.0, 0.0, 1.0, 0.0])
    assert found.scores == pytest.approx((10.0, 1.0, 10.5, 0.25))
    assert found == Verdict("kept", (2, 0), 3, found.scores, num_correct=2)


def test_a_positive_needs_an_outcome_above_0_and_a_process_above_the_threshold() -> None:
    found = verdict(prm=[0.2, 0.9, 0.6, 0.4], orm=[1.0, 0.0, 1.0, 1.0], prm_threshold=0.4)
    assert found.positives == (2,)
    assert verdict(prm=[0.2, 0.9], orm=[1.0, 0.0], prm_threshold=0.4).state == "no_positive"
    assert verdict(prm=[-0.5, 0.5], orm=None).positives == (1,)
    assert verdict(prm=None, orm=[-1.0, 2.0]).positives == (1,)


def test_the_best_are_kept_and_of_two_alike_the_earlier() -> None:
    assert verdict(prm=None, orm=[1.0, 3.0, 1.0, 2.0], n_best_to_keep=3).positives == (1, 3, 0)
    assert verdict(prm=None, orm=[1.0, 3.0, 1.0, 2.0], n_best_to_keep=9).positives == (1, 3, 0, 2)


def test_where_all_are_alike_none_is_rejected() -> None:
    assert verdict(prm=None, orm=[1.0, 1.0, 1.0]).rejected is None
    assert verdict(prm=None, orm=[1.0, 0.0, 1.0]).rejected == 1


def test_a_row_is_easy_by_the_share_of_all_its_candidates_failed_ones_included() -> None:
    orm = [1.0, 1.0, 0.0]
    assert verdict(prm=None, orm=orm, easy_query_threshold=0.6).state == "easy"
    assert verdict(prm=None, orm=orm, easy_query_threshold=0.7).state == "kept"
    assert verdict(prm=None, orm=orm, easy_query_threshold=0.6, failures=["empty"]).state == "kept"
    assert verdict(prm=None, orm=orm, easy_query_threshold=0.5, failures=["empty"]) == Verdict(
        "easy", scores=(10.0, 10.0, 0.0), num_correct=2
    )


def test_a_candidate_without_a_number_is_neither_kept_nor_rejected() -> None:
    found = verdict(prm=[NAN, 0.5, 1.0], orm=[1.0, 1.0, 1.0])
    assert (found.positives, found.rejected, found.num_correct) == ((2, 1), None, 3)
    assert verdict(prm=None, orm=[NAN, NAN]).state == "no_positive"


def test_without_scorers_every_candidate_is_kept() -> None:
    assert verdict(None, None, num_texts=3) == Verdict("kept", (0, 1, 2))


def test_a_row_without_any_candidate_failed_and_says_why_once_for_each_reason() -> None:
    found = judged(0, ["empty", "status 500", "empty"], [], [], n_best_to_keep=1)
    assert found == Verdict("failed", reason="empty; status 500")


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("1+1=", [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]),
        (
            [{"role": "system", "content": "Add.", "name": None}, {"role": "user", "content": "1+1="}],
            [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "1+1="},
                {"role": "assistant", "content": "2"},
            ],
        ),
        (
            [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is "}],
            [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is 2"}],
        ),
    ],
)
def test_an_answer_becomes_a_conversation_and_is_found_in_it_again(prompt: Any, messages: list[dict[str, Any]]) -> None:
    assert answered(prompt, "2") == messages
    assert completion_of(prompt, messages[-1]["content"]) == "2"
