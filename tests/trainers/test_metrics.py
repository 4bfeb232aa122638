"""Numbers measured in parts are those of the whole."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.metrics import Metrics

numbers = st.floats(-1e3, 1e3)


@given(st.lists(st.lists(numbers, max_size=5), min_size=1, max_size=5).filter(any))
def test_any_cut_of_a_batch_gives_the_numbers_of_the_whole(parts: list[list[float]]) -> None:
    """A mean of means would weigh the single value of a short part like many of a long one."""
    everything = [value for part in parts for value in part]
    measured = []
    for part in parts:
        metrics = Metrics()
        metrics.mean("mean", sum(part), len(part))
        metrics.sum("sum", sum(part))
        for value in part:
            metrics.max("max", value)
            metrics.min("min", value)
        measured.append(metrics)
    found = Metrics.merge(measured).values()
    assert found["mean"] == pytest.approx(sum(everything) / len(everything), abs=1e-9)
    assert found["sum"] == pytest.approx(sum(everything), abs=1e-9)
    assert (found["max"], found["min"]) == (max(everything), min(everything))


def test_a_mean_weighs_every_token_the_same() -> None:
    long, short = Metrics(), Metrics()
    long.mean("loss", 9.0, 9)
    short.mean("loss", 11.0, 1)
    assert Metrics.merge([long, short]).values() == {"loss": 2.0}


def test_what_every_worker_knows_is_told_once() -> None:
    parts = []
    for _ in range(3):
        metrics = Metrics()
        metrics.same("learning_rate", 1e-5)
        parts.append(metrics)
    assert Metrics.merge(parts).values() == {"learning_rate": 1e-5}


def test_nothing_measured_is_not_reported() -> None:
    metrics = Metrics()
    metrics.mean("nothing", 0.0, 0)
    metrics.mean("unknown", math.nan, 3)
    metrics.max("unknown", math.nan)
    metrics.min("unknown", math.nan)
    assert metrics.values() == {}
    assert Metrics.merge([]).values() == {}


def test_a_nan_in_a_mean_does_not_hide_the_others() -> None:
    metrics = Metrics()
    metrics.mean("reward", math.nan, 2)
    metrics.mean("reward", 3.0, 2)
    assert metrics.values() == {"reward": 1.5}


@given(st.lists(st.tuples(numbers, st.integers(0, 3)), max_size=6))
def test_tensors_give_the_numbers_that_they_hold(parts: list[tuple[float, int]]) -> None:
    """In double precision, in order, whoever of them comes as a tensor."""
    plain, late = Metrics(), Metrics()
    for k, (value, count) in enumerate(parts):
        for metrics, number in ((plain, float), (late, torch.tensor if k % 2 else float)):
            as_double = number(value, dtype=torch.float64) if number is torch.tensor else number(value)  # type: ignore
            metrics.sum("sum", as_double)
            metrics.mean("mean", as_double, number(count))  # type: ignore[arg-type]
            metrics.max("max", as_double, count=number(count))  # type: ignore[arg-type]
            metrics.min("min", as_double, count=number(count))  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(late)).entries == plain.entries
    assert list(late.values().items()) == list(plain.values().items())
    assert Metrics.merge([late, plain]).values() == Metrics.merge([plain, plain]).values()


def test_tensors_are_read_when_somebody_asks() -> None:
    """One transfer, and the graph that they came from is not kept."""
    weight = torch.ones(3, requires_grad=True)
    metrics = Metrics()
    metrics.sum("loss", (2 * weight).sum())
    metrics.same("rate", 0.5)
    with torch.no_grad():
        metrics.mean("nothing", torch.tensor(math.nan), torch.tensor(2))
        metrics.max("none", torch.tensor(-math.inf), count=torch.tensor(0))
    assert not any(number.requires_grad for *_, number, _ in metrics._unread if torch.is_tensor(number))
    assert metrics.values() == {"loss": 6.0, "rate": 0.5}
    metrics.sum("loss", torch.tensor(1.0))
    assert metrics.values()["loss"] == 7.0


def test_what_happens_to_a_tensor_later_changes_no_metric() -> None:
    several = torch.tensor([3.0, 4.0])
    metrics = Metrics()
    metrics.sum("loss", several[:1])
    several.zero_()
    assert metrics.values() == {"loss": 3.0}
    with pytest.raises(ValueError, match="'loss' was joined by 'sum' before and by 'mean' now"):
        metrics.mean("loss", several[0], 1)
    metrics.max("largest", several[0])
    with pytest.raises(ValueError, match="'largest' was joined by 'max' before and by 'min' now"):
        metrics.min("largest", several[0])
    assert metrics.values() == {"loss": 3.0, "largest": 0.0}


def test_a_nan_loss_is_told() -> None:
    metrics = Metrics()
    metrics.sum("loss", math.nan)
    metrics.sum("loss", 1.0)
    assert math.isnan(metrics.values()["loss"])


def test_one_name_is_joined_by_one_rule() -> None:
    one, other = Metrics(), Metrics()
    one.sum("loss", 1.0)
    other.mean("loss", 1.0, 1)
    with pytest.raises(ValueError, match="'loss' was joined by 'sum' before and by 'mean' now"):
        Metrics.merge([one, other])


def test_merging_leaves_the_parts_alone() -> None:
    one, other = Metrics(), Metrics()
    one.sum("loss", 1.0)
    other.sum("loss", 2.0)
    assert Metrics.merge([one, other]).values() == {"loss": 3.0}
    assert (one.values(), other.values()) == ({"loss": 1.0}, {"loss": 2.0})


def test_metrics_travel() -> None:
    metrics = Metrics()
    metrics.mean("loss", 1.0, 3)
    assert pickle.loads(pickle.dumps(metrics)).values() == metrics.values()


def test_metrics_are_taken_away_renamed_and_chosen_by_name_and_the_first_ones_stay() -> None:
    metrics = Metrics()
    metrics.mean("loss", 6.0, 3)
    metrics.sum("num_tokens", 5.0)
    metrics.same("objective/kl", 0.5)
    assert metrics.without("num_tokens", "unheard of").values() == {"loss": 2.0, "objective/kl": 0.5}
    renamed = metrics.renamed({"loss": "critic/loss", "unheard of": "heard of", "objective/kl": "num_tokens"})
    assert renamed.values() == {"critic/loss": 2.0, "num_tokens": 0.5}
    renamed.mean("critic/loss", 6.0, 1)
    assert renamed.values()["critic/loss"] == 3.0
    assert metrics.only("objective/").values("eval_") == {"eval_objective/kl": 0.5}
    assert metrics.values() == {"loss": 2.0, "num_tokens": 5.0, "objective/kl": 0.5}


def test_rows_that_were_bad_are_those_of_all_parts_and_go_through_pickle() -> None:
    parts = [Metrics(), Metrics(), Metrics()]
    parts[0].bad_rows, parts[2].bad_rows = [7, 3], [3, 4]
    parts[0].max("bad_steps", 1.0)
    whole = Metrics.merge([pickle.loads(pickle.dumps(part)) for part in parts])
    assert whole.bad_rows == [3, 4, 7]
    assert whole.without("loss").bad_rows == [3, 4, 7]
    assert whole.values() == {"bad_steps": 1.0}
