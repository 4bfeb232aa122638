"""What every worker receives of the caller's arguments."""

from __future__ import annotations

import collections
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

import rayhelper.values.dispatch as dispatch_module
from rayhelper.errors import DecorationError, DispatchError
from rayhelper.values.dispatch import Balanced, balanced, slices, split_call, unwrap, validate_dispatch, whole
from trainers.batch import Prompts, Ragged, Rollouts


class Columns(NamedTuple):
    ids: Any
    scores: Any


class Deck:
    """A user's type: a length, and slices of its own type."""

    def __init__(self, cards: list[int]) -> None:
        self.cards = cards

    def __len__(self) -> int:
        return len(self.cards)

    def __getitem__(self, index: slice) -> Deck:
        return Deck(self.cards[index])


def firsts(dispatch: Any, num_shards: int, value: Any) -> list[Any]:
    """What each shard gets of a call's single argument."""
    return [args[0] for args, _ in split_call(dispatch, num_shards, (value,), {}).calls]


def rollouts(num: int) -> Rollouts:
    return Rollouts(
        prompt_ids=Ragged.of([[i] for i in range(num)], np.int64),
        completion_ids=Ragged.of([[i] * (i + 1) for i in range(num)], np.int64),
        rollout_logps=Ragged.of([[-0.5] * (i + 1) for i in range(num)], np.float32),
        truncated=np.arange(num) % 2 == 0,
    )


# all


def test_all_gives_every_worker_the_same_objects() -> None:
    prompts, table = ["a"], {"x": np.zeros(3)}
    division = split_call("all", 3, (prompts,), {"table": table})
    assert len(division.calls) == 3
    assert division.order is None
    assert all(args[0] is prompts and kwargs["table"] is table for args, kwargs in division.calls)


def test_all_needs_no_arguments() -> None:
    assert split_call("all", 2, (), {}).calls == [((), {}), ((), {})]


# slice


def test_slice_cuts_near_equal_contiguous_parts_longer_ones_first() -> None:
    assert firsts("slice", 2, [1, 2, 3, 4, 5]) == [[1, 2, 3], [4, 5]]
    assert [len(part) for part in slices(11, 4)] == [3, 3, 3, 2]


@settings(deadline=None)
@given(count=st.integers(0, 64), num_shards=st.integers(1, 16))
def test_slice_sizes_differ_by_at_most_one_and_cover_everything_in_order(count: int, num_shards: int) -> None:
    parts = firsts("slice", num_shards, list(range(count)))
    sizes = [len(part) for part in parts]
    assert [item for part in parts for item in part] == list(range(count))
    assert len(sizes) == num_shards
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_slice_calls_every_worker_even_with_fewer_items() -> None:
    assert firsts("slice", 3, ["only"]) == [["only"], [], []]


def test_slice_of_an_empty_list_calls_every_worker() -> None:
    assert firsts("slice", 2, []) == [[], []]
    assert split_call("slice", 2, (), {"x": []}).calls == [((), {"x": []}), ((), {"x": []})]


def test_slice_cuts_plain_tuples_and_ranges() -> None:
    assert firsts("slice", 2, (1, 2, 3)) == [(1, 2), (3,)]
    assert firsts("slice", 2, range(5)) == [range(0, 3), range(3, 5)]


def test_slice_cuts_keyword_and_positional_arguments_alike() -> None:
    calls = split_call("slice", 2, ([1, 2, 3],), {"labels": np.array([4, 5, 6])}).calls
    assert [args[0] for args, _ in calls] == [[1, 2], [3]]
    assert [kwargs["labels"].tolist() for _, kwargs in calls] == [[4, 5], [6]]


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_, np.dtype("U3")])
def test_slice_keeps_an_arrays_dtype_and_trailing_shape_even_when_empty(dtype: Any) -> None:
    parts = firsts("slice", 3, np.ones((2, 4), dtype))
    assert [part.shape for part in parts] == [(1, 4), (1, 4), (0, 4)]
    assert all(part.dtype == dtype for part in parts)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
def test_slice_keeps_a_tensors_dtype_and_trailing_shape_even_when_empty(dtype: torch.dtype) -> None:
    parts = firsts("slice", 3, torch.ones((2, 4), dtype=dtype))
    assert [tuple(part.shape) for part in parts] == [(1, 4), (1, 4), (0, 4)]
    assert all(part.dtype == dtype for part in parts)


def test_slice_of_a_dataset_keeps_its_columns_even_when_empty() -> None:
    parts = firsts("slice", 3, datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]}))
    assert [part["text"][:] for part in parts] == [["a"], ["b"], []]
    assert all(part.column_names == ["text", "n"] for part in parts)
    assert parts[2].features == parts[0].features


def test_slice_of_a_data_frame_goes_by_row_not_by_label() -> None:
    parts = firsts("slice", 2, pandas.DataFrame({"a": [1, 2, 3]}, index=[0.5, 0.1, 9.0]))
    assert [part["a"].tolist() for part in parts] == [[1, 2], [3]]


def test_slice_cuts_a_mapping_of_columns_row_by_row() -> None:
    parts = firsts("slice", 2, {"ids": [1, 2, 3], "x": torch.arange(3), "inner": {"y": np.arange(3)}})
    assert [part["ids"] for part in parts] == [[1, 2], [3]]
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2]]
    assert [part["inner"]["y"].tolist() for part in parts] == [[0, 1], [2]]


@pytest.mark.parametrize(
    "build",
    [
        dict,
        collections.OrderedDict,
        collections.UserDict,
        MappingProxyType,
        BatchEncoding,
        lambda columns: collections.defaultdict(list, columns),
    ],
)
def test_slice_keeps_the_type_of_a_mapping(build: Callable[[dict[str, Any]], Any]) -> None:
    table = build({"input_ids": [[1], [2, 3], [4]], "labels": torch.tensor([0, 1, 0])})
    parts = firsts("slice", 2, table)
    assert [type(part) for part in parts] == [type(table)] * 2
    assert [part["input_ids"] for part in parts] == [[[1], [2, 3]], [[4]]]
    assert parts[1]["labels"].tolist() == [0]


def test_slice_gives_a_dict_where_a_mapping_type_cannot_be_built_from_columns() -> None:
    class Fixed(dict):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__(a=[1, 2])

    assert firsts("slice", 2, Fixed()) == [{"a": [1]}, {"a": [2]}]


def test_slice_treats_a_named_tuple_as_columns_and_keeps_it() -> None:
    parts = firsts("slice", 2, Columns(ids=[1, 2, 3], scores=np.arange(3.0)))
    assert all(isinstance(part, Columns) for part in parts)
    assert [part.ids for part in parts] == [[1, 2], [3]]
    assert parts[1].scores.tolist() == [2.0]


def test_slice_lets_a_column_be_none() -> None:
    assert firsts("slice", 2, {"ids": [1, 2], "images": None}) == [
        {"ids": [1], "images": None},
        {"ids": [2], "images": None},
    ]


def test_slice_cuts_ragged_rows_and_typed_batches() -> None:
    parts = firsts("slice", 3, rollouts(2))
    assert [type(part) for part in parts] == [Rollouts] * 3
    assert [len(part) for part in parts] == [1, 1, 0]
    assert parts[2].rollout_logps.dtype == np.float32
    assert firsts("slice", 2, Ragged.of([[1], [2, 3], []], np.int64))[1] == Ragged.of([[]], np.int64)


def test_slice_cuts_any_type_with_a_length_and_slices() -> None:
    parts = firsts("slice", 2, Deck([1, 2, 3]))
    assert all(isinstance(part, Deck) for part in parts)
    assert [part.cards for part in parts] == [[1, 2], [3]]


class Tokenizer:
    """Sized, as tokenizers are, but no collection."""

    def __len__(self) -> int:
        return 50_000


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        0.5,
        True,
        np.float32(1.0),
        np.array(4),
        torch.tensor(5),
        "text",
        b"bytes",
        object(),
        print,
        dict,
        {},
        {"temperature": 1.0, "stop": "</s>"},
        Columns(1, "x"),
        Tokenizer(),
        torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_slice_sends_what_is_no_collection_to_everyone(value: Any) -> None:
    calls = split_call("slice", 2, ([1, 2], value), {"again": value}).calls
    assert all(args[1] is value and kwargs["again"] is value for args, kwargs in calls)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset({1, 2}),
        collections.deque([1, 2]),
        collections.deque(),
        {"a": 1}.keys(),
        {"a": 1}.values(),
        iter([1, 2]),
        (i for i in range(2)),
        zip([1], [2], strict=True),
        torch.utils.data.DataLoader([1, 2]),  # type: ignore[arg-type]
        datasets.IterableDataset.from_generator(lambda: iter([{"a": 1}])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_slice_refuses_what_cannot_be_cut_in_order(value: Any) -> None:
    with pytest.raises(DispatchError, match=r"^T.f: argument 'xs' is an? \w+, which .* RayHelper.whole\(value\)"):
        split_call("slice", 2, (value,), {}, names=["xs"], where="T.f")


def test_slice_refuses_a_type_that_ignores_slices() -> None:
    class Stubborn(Deck):
        def __getitem__(self, index: slice) -> Deck:
            return self

    with pytest.raises(DispatchError, match="gave 3 items for 2"):
        firsts("slice", 2, Stubborn([1, 2, 3]))


def test_slice_refuses_a_dataset_that_knows_single_indices_only() -> None:
    class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index**2

    with pytest.raises(DispatchError, match="Squares, which does not accept a slice as index") as caught:
        firsts("slice", 2, Squares())
    assert isinstance(caught.value.__cause__, TypeError)


def test_slice_refuses_arguments_of_two_lengths_and_names_both() -> None:
    with pytest.raises(DispatchError) as caught:
        split_call("slice", 2, ([1, 2, 3], 0.5), {"labels": torch.zeros(2)}, names=["prompts", "t"], where="T.f")
    message = str(caught.value)
    assert message.startswith(
        "T.f: argument 'prompts' (a list of length 3) and argument 'labels' (a Tensor of length 2)"
    )
    assert "RayHelper.whole(value)" in message


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"a": [1, 2], "b": [1]}, ["'a': a list of length 2", "'b': a list of length 1"]),
        ({"a": [1, 2], "name": "xy"}, ["'a': a list of length 2", "'name': a str"]),
        ({"a": [1, 2], "b": {"c": 1}}, ["'b': a dict"]),
        ({"a": [1, 2], "b": whole([3])}, ["'b': a Whole"]),
        (Columns([1], 2.0), ["'ids': a list of length 1", "'scores': a float"]),
    ],
)
def test_slice_refuses_mixed_columns_and_names_keys_and_lengths(table: Any, named: list[str]) -> None:
    with pytest.raises(DispatchError, match=r"positional argument 1 .*RayHelper\.whole\(value\)") as caught:
        firsts("slice", 2, table)
    assert all(name in str(caught.value) for name in named)


def test_slice_names_the_column_that_cannot_be_cut() -> None:
    with pytest.raises(DispatchError, match=r"argument 1\['a'\] is a set"):
        firsts("slice", 2, {"a": {1, 2}})


@pytest.mark.parametrize("value", [None, 0, False, "", {}])
@pytest.mark.parametrize("dispatch", ["slice", balanced()], ids=["slice", "balanced"])
def test_slice_refuses_a_call_that_would_repeat_the_work(dispatch: Any, value: Any) -> None:
    with pytest.raises(DispatchError, match=r"no argument can be sliced .*dispatch='all'.*empty list"):
        firsts(dispatch, 2, value)


def test_slice_refuses_a_call_without_arguments() -> None:
    with pytest.raises(DispatchError, match="got no arguments"):
        split_call("slice", 2, (), {})


def test_one_shard_is_refused_what_two_are() -> None:
    with pytest.raises(DispatchError):
        split_call("slice", 1, ([1, 2], [1]), {})


# whole


@pytest.mark.parametrize("dispatch", ["all", "slice", balanced(), lambda n, i, data: data])
def test_whole_arrives_bare_and_uncut_under_every_dispatch(dispatch: Any) -> None:
    vocabulary = ["a", "b", "c"]
    calls = split_call(dispatch, 2, ([1, 2],), {"vocabulary": whole(vocabulary)}).calls
    assert all(kwargs["vocabulary"] is vocabulary for _, kwargs in calls)


def test_whole_of_a_single_argument_reaches_a_callable_bare() -> None:
    assert firsts(lambda n, i, data: data[i], 2, whole(["x", "y"])) == ["x", "y"]


def test_whole_twice_is_whole_once_and_unwrap_takes_it_off() -> None:
    assert unwrap((whole(whole([1])), 2), {"a": whole(None)}) == (([1], 2), {"a": None})


def test_whole_sends_even_what_cannot_be_sliced() -> None:
    assert split_call("slice", 2, ([1, 2], whole({3})), {}).calls == [(([1], {3}), {}), (([2], {3}), {})]


# callable


def test_callable_gets_the_single_argument_and_answers_in_the_same_form() -> None:
    def every_other(n: int, i: int, data: list[int]) -> list[int]:
        return data[i::n]

    assert firsts(every_other, 2, [1, 2, 3]) == [[1, 3], [2]]
    assert split_call(every_other, 2, (), {"xs": [1, 2, 3]}).calls == [((), {"xs": [1, 3]}), ((), {"xs": [2]})]


def test_callable_gets_the_pair_when_there_are_several_arguments_or_none() -> None:
    def first_only(n: int, i: int, data: Any) -> Any:
        args, kwargs = data
        return [args[0][i::n], *args[1:]], dict(kwargs, shard=i)

    calls = split_call(first_only, 2, ([1, 2, 3], "t"), {"k": 0}).calls
    assert calls == [(([1, 3], "t"), {"k": 0, "shard": 0}), (([2], "t"), {"k": 0, "shard": 1})]
    assert split_call(lambda n, i, data: data, 2, (), {}).calls == [((), {}), ((), {})]


@pytest.mark.parametrize(
    ("answer", "named"), [([1], "a list"), (None, "None"), (([1], [2]), "a tuple"), (([1], {}, 3), "a tuple")]
)
def test_callable_that_answers_in_another_form_is_refused(answer: Any, named: str) -> None:
    with pytest.raises(
        DispatchError, match=rf"T\.f: .* returned {named} for shard 0 of 2.* a pair of a tuple and a dict"
    ):
        split_call(lambda n, i, data: answer, 2, ([1], [2]), {}, where="T.f")


def test_an_exception_of_the_callable_says_which_shard() -> None:
    def by_language(n: int, i: int, data: dict[int, str]) -> str:
        return data[i]

    with pytest.raises(KeyError) as caught:
        split_call(by_language, 2, ({0: "en"},), {}, where="T.f")
    assert "by_language of T.f, for shard 1 of 2" in caught.value.__notes__[0]


# balanced


@settings(deadline=None)
@given(costs=st.lists(st.integers(0, 1000), max_size=64), num_shards=st.integers(1, 16))
def test_balanced_hands_out_every_item_once_within_the_bound(costs: list[int], num_shards: int) -> None:
    items = [(position, cost) for position, cost in enumerate(costs)]
    division = split_call(balanced(lambda item: item[1]), num_shards, (items,), {})
    parts = [args[0] for args, _ in division.calls]
    laid_out = [item for part in parts for item in part]
    assert division.order == [position for position, _ in laid_out]
    assert sorted(laid_out) == items
    assert all(part == sorted(part) for part in parts)
    loads = [sum(cost for _, cost in part) for part in parts]
    assert max(loads) <= sum(costs) / num_shards + max(costs, default=0)


def test_balanced_puts_the_longest_texts_on_different_shards() -> None:
    texts = ["aaaaaa", "b", "cc", "ddddd"]
    division = split_call(balanced(), 2, (texts,), {})
    assert [args[0] for args, _ in division.calls] == [["aaaaaa", "b"], ["cc", "ddddd"]]
    assert division.order == [0, 1, 2, 3]


def test_balanced_spreads_items_that_cost_nothing() -> None:
    assert [len(part) for part in firsts(balanced(lambda item: 0.0), 3, [1, 2, 3, 4])] == [2, 1, 1]


def test_balanced_divides_every_argument_like_the_first() -> None:
    texts = ["aa", "b", "cccc"]
    others = {
        "tuple": (0, 1, 2),
        "range": range(3),
        "array": np.arange(3),
        "tensor": torch.arange(3, dtype=torch.bfloat16),
        "dataset": datasets.Dataset.from_dict({"i": [0, 1, 2]}),
        "frame": pandas.DataFrame({"i": [0, 1, 2]}),
        "columns": BatchEncoding({"i": [0, 1, 2]}),
        "batch": Prompts(Ragged.of([[0], [1], [2]], np.int64)),
    }
    division = split_call(balanced(), 2, (texts, "uncut"), others)
    assert division.order == [2, 0, 1]
    (_, first), (args, second) = division.calls
    assert args == (["aa", "b"], "uncut")
    assert first["tuple"] == (2,)
    assert second["tuple"] == (0, 1)
    assert second["range"] == [0, 1]
    assert second["array"].tolist() == [0, 1]
    assert second["tensor"].dtype == torch.bfloat16
    assert second["tensor"].tolist() == [0, 1]
    assert first["dataset"]["i"][:] == [2]
    assert second["frame"]["i"].tolist() == [0, 1]
    assert isinstance(second["columns"], BatchEncoding)
    assert second["columns"]["i"] == [0, 1]
    assert second["batch"] == Prompts(Ragged.of([[0], [1]], np.int64))


@pytest.mark.parametrize(
    ("value", "cost"),
    [
        (rollouts(5), lambda sample: sample.completion_ids.lengths[0]),
        (Ragged.of([[0] * (i + 1) for i in range(5)], np.int64), None),
        ({"ids": [[0] * (i + 1) for i in range(5)], "none": None}, lambda row: len(row["ids"])),
        (Columns([[0] * (i + 1) for i in range(5)], np.zeros(5)), lambda row: len(row.ids)),
        (datasets.Dataset.from_dict({"n": [1, 2, 3, 4, 5]}), lambda row: row["n"]),
        (pandas.DataFrame({"n": [1, 2, 3, 4, 5]}), lambda row: row["n"]),
        (torch.arange(1, 6), lambda item: item),
    ],
    ids=["Batch", "Ragged", "dict", "namedtuple", "Dataset", "DataFrame", "Tensor"],
)
def test_balanced_weighs_the_items_of_every_type(value: Any, cost: Any) -> None:
    assert split_call(balanced(cost), 2, (value,), {}).order == [0, 1, 4, 2, 3]  # costs 1 + 2 + 5 and 3 + 4


def test_balanced_leaves_shards_empty_rather_than_out() -> None:
    division = split_call(balanced(), 3, (torch.ones(1, 2, dtype=torch.int64),), {})
    assert [tuple(args[0].shape) for args, _ in division.calls] == [(1, 2), (0, 2), (0, 2)]
    assert split_call(balanced(), 2, ([],), {}).order == []


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1])
def test_balanced_refuses_costs_that_are_no_weights(cost: float) -> None:
    with pytest.raises(DispatchError, match=r"for item 0\. A cost is finite and >= 0"):
        firsts(balanced(lambda item: cost), 2, [1])


def test_an_exception_of_the_cost_says_which_item() -> None:
    with pytest.raises(KeyError) as caught:
        split_call(balanced(lambda row: row["n"]), 2, ([{"n": 1}, {}],), {}, names=["rows"])
    assert "for item 1 of argument 'rows'" in caught.value.__notes__[0]


def test_balanced_refuses_a_type_that_takes_slices_only() -> None:
    with pytest.raises(DispatchError, match="Deck, which does not accept an array of positions"):
        firsts(balanced(lambda item: 1.0), 2, Deck([1, 2]))


# decoration


@pytest.mark.parametrize("dispatch", ["all", "slice", balanced(), lambda n, i, data: data, max])
def test_known_dispatches_are_accepted(dispatch: Any) -> None:
    validate_dispatch(dispatch, "all")


@pytest.mark.parametrize("dispatch", ["slcie", None, 3, balanced])
def test_an_unknown_dispatch_is_refused_with_what_is_known(dispatch: Any) -> None:
    with pytest.raises(DecorationError, match=r"dispatch="):
        validate_dispatch(dispatch, "all")
    with pytest.raises(DecorationError):
        split_call(dispatch, 2, ([1],), {})


def test_an_unknown_execute_is_refused() -> None:
    with pytest.raises(DecorationError, match=r"execute='rank0' is unknown\. Use 'first'"):
        validate_dispatch("all", "rank0")


@pytest.mark.parametrize("dispatch", ["slice", Balanced(), lambda n, i, data: data])
def test_first_is_refused_with_anything_that_divides(dispatch: Any) -> None:
    validate_dispatch("all", "first")
    with pytest.raises(DecorationError, match=r"execute='first' .* Use dispatch='all' .*, or execute='all'"):
        validate_dispatch(dispatch, "first")


def test_a_callable_of_other_parameters_is_refused() -> None:
    with pytest.raises(DecorationError, match=r"cannot be called as f\(n, i, data\)"):
        validate_dispatch(lambda data: data, "all")


def test_importing_needs_no_optional_library() -> None:
    folder = str(Path(dispatch_module.__file__).parents[1])
    code = (
        f"import sys, types; package = types.ModuleType('rayhelper'); package.__path__ = [{folder!r}]; "
        "sys.modules['rayhelper'] = package; "  # these files by themselves, whatever the package imports
        "import rayhelper.values.dispatch, rayhelper.values.collect; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "datasets", "transformers", "ray", "pandas"} & set(loaded.split())
