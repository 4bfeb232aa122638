"""What the caller receives of the workers' values."""

from __future__ import annotations

from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas
import pytest
import torch
from transformers import BatchEncoding

from rayhelper.errors import CollectError, DecorationError
from rayhelper.values.collect import join, join_first, validate_collect
from trainers.batch import Ragged, Rollouts
from trainers.metrics import Metrics

LARGE_PARTS = [(0, 3_000_000), (7, 1), (11, 1_500_000)]  # (first number, rows)


class Scored(NamedTuple):
    texts: list[str]
    scores: Any


# none and callables


def test_none_gives_the_values_as_they_are() -> None:
    values: list[Any] = [([1], {"a": 2}), None]
    assert join("none", values) is values


def test_a_callable_gets_the_list_of_values() -> None:
    assert join(sum, [1, 2]) == 3
    assert join(len, ["only"]) == 1


def test_metrics_are_merged_over_workers() -> None:
    parts = [Metrics(), Metrics()]
    parts[0].mean("loss", total=2.0, weight=1.0)
    parts[1].mean("loss", total=4.0, weight=5.0)
    assert join(Metrics.merge, parts).values() == {"loss": 1.0}


def test_an_exception_of_the_callable_says_whose_it_is() -> None:
    with pytest.raises(ValueError, match="empty") as caught:
        join(lambda values: max(values[1], key=len), [[1], []], where="T.f")
    assert "of T.f, for 2 values" in caught.value.__notes__[0]


@pytest.mark.parametrize("value", [None, 3, [1, [2]], {"a": 1}, ("x",)])
def test_first_gives_the_value_itself(value: Any) -> None:
    assert join_first("none", value) is value
    assert join_first("flatten", value) is value
    assert join_first(lambda values: values, value) == [value]


# flatten


def test_flatten_joins_lists_one_level_deep() -> None:
    assert join("flatten", [[1, [2]], [], [[3]]]) == [1, [2], [3]]


def test_flatten_of_nothing_but_none_is_none() -> None:
    assert join("flatten", [None, None]) is None
    assert join("flatten", [None]) is None


def test_flatten_joins_tuples_position_by_position() -> None:
    values = [([1], np.array([1.0]), None), ([2, 3], np.array([2.0, 3.0]), None)]
    numbers, array, nothing = join("flatten", values)
    assert numbers == [1, 2, 3]
    assert array.tolist() == [1.0, 2.0, 3.0]
    assert nothing is None


def test_flatten_keeps_a_named_tuple() -> None:
    joined = join("flatten", [Scored(["a"], torch.tensor([1])), Scored(["b"], torch.tensor([2]))])
    assert isinstance(joined, Scored)
    assert joined.texts == ["a", "b"]
    assert joined.scores.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
def test_flatten_keeps_a_tensors_dtype_and_trailing_shape(dtype: torch.dtype) -> None:
    joined = join("flatten", [torch.ones((2, 3), dtype=dtype), torch.ones((0, 3), dtype=dtype)])
    assert joined.dtype == dtype
    assert joined.shape == (2, 3)


def test_flatten_does_not_let_an_empty_shard_decide_the_dtype() -> None:
    joined = join("flatten", [np.array([1, 2]), np.array([])])
    assert joined.dtype == np.int64
    assert join("flatten", [torch.tensor([]), torch.ones((1, 4), dtype=torch.int64)]).dtype == torch.int64


def test_flatten_joins_texts_of_any_width_and_masked_arrays_with_their_masks() -> None:
    assert join("flatten", [np.array(["a"]), np.array(["bcd"])]).tolist() == ["a", "bcd"]
    masked = np.ma.masked_equal([1, -1], -1)
    assert join("flatten", [masked, masked]).tolist() == [1, None, 1, None]


def test_flatten_joins_very_large_arrays_as_it_joins_small_ones() -> None:
    parts = [np.arange(start, start + 2 * count, dtype=np.int32).reshape(count, 2) for start, count in LARGE_PARTS]
    joined = join("flatten", parts)
    assert joined.nbytes > 32 * 1024 * 1024
    assert joined.dtype == np.int32
    assert np.array_equal(joined, np.concatenate(parts))


def test_flatten_of_one_read_only_array_can_be_written_to() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    joined = join("flatten", [array])
    joined[0] = 9
    assert array[0] == 0


def test_flatten_joins_mappings_of_columns_in_the_first_ones_type_and_order() -> None:
    values = [
        BatchEncoding({"ids": [[1]], "x": torch.tensor([1])}),
        BatchEncoding({"x": torch.tensor([2]), "ids": [[2]]}),
    ]
    joined = join("flatten", values)
    assert isinstance(joined, BatchEncoding)
    assert list(joined) == ["ids", "x"]
    assert joined["ids"] == [[1], [2]]
    assert joined["x"].tolist() == [1, 2]


def test_flatten_joins_typed_batches_by_their_concat() -> None:
    ids, logps = Ragged.of([[1, 2]], np.int64), Ragged.of([[-1.0, -2.0]], np.float32)
    one = Rollouts(prompt_ids=ids, completion_ids=ids, rollout_logps=logps, truncated=np.array([True]))
    assert join("flatten", [one, one[:0], one]) == Rollouts.concat([one, one])
    assert join("flatten", [one]) == one


def test_flatten_numbers_new_frames_through_and_keeps_given_labels() -> None:
    new = [pandas.DataFrame({"a": [1, 2]}), pandas.DataFrame({"a": [3]})]
    assert join("flatten", new).index.tolist() == [0, 1, 2]
    balanced_new = join("flatten", new, order=[0, 2, 1])
    assert balanced_new["a"].tolist() == [1, 3, 2]
    assert balanced_new.index.tolist() == [0, 1, 2]
    labelled = [frame.set_index(frame["a"] * 10) for frame in new]
    assert join("flatten", labelled).index.tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    "value",
    [1, 0.5, True, "text", b"bytes", {1}, range(2), np.float32(1), np.array(1), torch.tensor(1), object(), iter([])],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("num_shards", [1, 2])
def test_flatten_refuses_what_it_cannot_join_and_says_what_to_do(value: Any, num_shards: int) -> None:
    message = rf"T.f: value is an? {type(value).__name__}.* on shard 0 of {num_shards}.*callable as collect.*'none'"
    with pytest.raises(CollectError, match=message):
        join("flatten", [value] * num_shards, where="T.f")


def test_flatten_refuses_a_dict_of_scalars_and_names_the_key() -> None:
    with pytest.raises(CollectError, match=r"value\['loss'\] is a float"):
        join("flatten", [{"loss": 0.5}, {"loss": 0.25}])
    with pytest.raises(CollectError, match=r"value\[1\] is a dict on shard 0 and None on shard 1"):
        join("flatten", [([1], {"a": [2]}), ([3], None)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1], (2,)], "a list on shard 0 and a tuple on shard 1"),
        ([[1], None], "a list on shard 0 and None on shard 1"),
        ([np.zeros(1), torch.zeros(1)], "a ndarray on shard 0 and a Tensor on shard 1"),
        ([([1],), ([1], [2])], "a tuple of 1 on shard 0 and of 2 on shard 1"),
        ([{"a": [1]}, {"b": [1]}], r"the keys \['a'\] on shard 0 and \['b'\] on shard 1"),
        ([np.zeros(1, np.int64), np.zeros(1)], "dtype int64 .* on shard 0 and dtype float64 .* on shard 1"),
        ([np.zeros((1, 2)), np.zeros((1, 3))], r"trailing shape \(2,\) on shard 0 and .* \(3,\) on shard 1"),
        ([torch.zeros(1), torch.zeros(1).bfloat16()], "dtype torch.float32.* and dtype torch.bfloat16"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], r"trailing shape \(2,\).* and .*trailing shape \(3,\)"),
        ([pandas.DataFrame({"a": [1]}), pandas.DataFrame({"b": [1]})], "'a': int64 .* and columns 'b': int64"),
        (
            [datasets.Dataset.from_dict({"a": [1]}), datasets.Dataset.from_dict({"b": [1]})],
            r"columns \['a'\] on shard 0 and columns \['b'\]",
        ),
        ([datasets.Dataset.from_dict({"a": [1]}), datasets.Dataset.from_dict({"a": ["x"]})], "do not fit together"),
    ],
)
def test_flatten_refuses_values_that_differ_and_names_both(values: list[Any], message: str) -> None:
    with pytest.raises(CollectError, match=message):
        join("flatten", values)


# order


def test_order_reaches_every_position_and_column() -> None:
    order = [2, 0, 1]
    values = [([2], {"x": np.array([20])}), ([0, 1], {"x": np.array([0, 10])})]
    numbers, table = join("flatten", values, order=order)
    assert numbers == [0, 1, 2]
    assert table["x"].tolist() == [0, 10, 20]


def test_order_leaves_none_and_other_collects_alone() -> None:
    assert join("flatten", [None, None], order=[1, 0]) is None
    assert join("none", [[1], [0]], order=[1, 0]) == [[1], [0]]
    assert join(list, [[1], [0]], order=[1, 0]) == [[1], [0]]


def test_order_asks_for_one_item_per_item_sent() -> None:
    with pytest.raises(CollectError, match=r"value has 1 items in all, but RayHelper.balanced divided 2"):
        join("flatten", [[1], []], order=[1, 0])


def test_order_needs_a_type_that_can_be_indexed_by_positions() -> None:
    class Pile(list):  # type: ignore[type-arg]
        @classmethod
        def concat(cls, parts: list[Pile]) -> Heap:
            return Heap(len(parts))

    class Heap:
        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return self.size

    with pytest.raises(CollectError, match="cannot be put back into the caller's order"):
        join("flatten", [Pile(), Pile()], order=[1, 0])


# decoration


@pytest.mark.parametrize("collect", ["none", "flatten", sum, max, Metrics.merge])
def test_known_collects_are_accepted(collect: Any) -> None:
    validate_collect(collect)


@pytest.mark.parametrize("collect", ["flat", None, 3, lambda one, two: one])
def test_an_unknown_collect_is_refused(collect: Any) -> None:
    with pytest.raises(DecorationError, match=r"collect="):
        validate_collect(collect)
    with pytest.raises(TypeError):
        join(collect, [[1]])
