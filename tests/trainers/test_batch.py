"""Ragged rows and batches against plain lists of lists."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayhelper import DispatchError, RayHelper
from rayhelper.values.dispatch import split_call
from trainers.batch import Batch, Prompts, Ragged, Rollouts, Samples, Sequences

ROWS = [[1, 2, 3], [], [4], [5, 6], []]
rows_of_any_shape = st.lists(st.lists(st.integers(-5, 5), max_size=4), max_size=6)


def ragged(rows: list[list[int]] = ROWS) -> Ragged:
    return Ragged.of(rows, np.int64)


def listed(found: Ragged) -> list[list[int]]:
    return [row.tolist() for row in found]


# Ragged


@given(rows_of_any_shape)
def test_rows_come_back_as_they_were(rows: list[list[int]]) -> None:
    found = ragged(rows)
    assert listed(found) == rows
    assert found.lengths.tolist() == [len(row) for row in rows]
    assert (len(found), found.dtype) == (len(rows), np.int64)


@given(rows_of_any_shape, st.slices(8))
def test_a_slice_is_the_slice_of_the_list(rows: list[list[int]], where: slice) -> None:
    found = ragged(rows)[where]
    assert listed(found) == rows[where]
    assert found.offsets[0] == 0
    assert len(found.values) == sum(map(len, rows[where]))


@given(rows_of_any_shape.filter(bool), st.data())
def test_an_array_of_indices_takes_those_rows(rows: list[list[int]], data: st.DataObject) -> None:
    where = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8))
    assert listed(ragged(rows)[np.array(where, np.int64)]) == [rows[k] for k in where]
    assert listed(ragged(rows)[where]) == [rows[k] for k in where]


@given(st.lists(rows_of_any_shape, min_size=1, max_size=4))
def test_parts_join_in_order(parts: list[list[list[int]]]) -> None:
    joined = Ragged.concat([ragged(part) for part in parts])
    assert listed(joined) == [row for part in parts for row in part]
    assert joined.dtype == np.int64


def test_one_row_is_a_view_and_may_be_counted_from_the_end() -> None:
    found = ragged()
    assert found[0].tolist() == found[-5].tolist() == found[np.int64(0)].tolist() == [1, 2, 3]
    assert np.shares_memory(found[0], found.values)
    for index in (5, -6):
        with pytest.raises(IndexError, match=rf"row {index} of 5"):
            found[index]


@pytest.mark.parametrize("where", [[5], [-6], [0, 7]])
def test_an_index_beyond_the_rows_is_an_error_in_arrays_too(where: list[int]) -> None:
    with pytest.raises(IndexError):
        ragged()[np.array(where)]


def test_a_mask_of_rows_keeps_those_that_are_true() -> None:
    assert listed(ragged()[np.array([True, False, False, True, False])]) == [[1, 2, 3], [5, 6]]
    with pytest.raises(IndexError):
        ragged()[np.array([True, False])]


def test_padding_is_on_the_right_and_the_mask_says_where_values_are() -> None:
    found = ragged()
    assert found.padded(-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1], [5, 6, -1], [-1, -1, -1]]
    expected = [[True] * len(row) + [False] * (3 - len(row)) for row in ROWS]
    assert found.mask().tolist() == expected
    assert (found.padded().dtype, found.mask().dtype) == (torch.int64, torch.bool)
    assert Ragged.of([[True], [False, True]], bool).padded(False).dtype == torch.bool
    assert Ragged.of([[0.5]], np.float32).padded().dtype == torch.float32


@pytest.mark.parametrize(("rows", "shape"), [([], (0, 0)), ([[], []], (2, 0))])
def test_nothing_pads_to_nothing(rows: list[list[int]], shape: tuple[int, int]) -> None:
    assert ragged(rows).padded().shape == ragged(rows).mask().shape == shape


def test_what_was_padded_may_be_written_even_if_it_came_read_only() -> None:
    found = ragged()
    found.values.flags.writeable = False  # as arrays from a shared-memory store are
    found.padded()[0, 0] = 9
    assert found.values[0] == 1


def test_lengths_must_add_up() -> None:
    assert listed(Ragged.split(np.arange(4), [1, 0, 3])) == [[0], [], [1, 2, 3]]
    with pytest.raises(ValueError, match="sum to 3, but there are 4 values"):
        Ragged.split(np.arange(4), [1, 2])


def test_equal_rows_are_equal_and_cut_rows_are_not() -> None:
    assert ragged() == ragged()
    assert ragged([[1, 2], [3]]) != ragged([[1], [2, 3]])
    assert ragged() != ROWS
    assert ragged()[1:4] == ragged(ROWS[1:4])


def test_a_slice_of_many_rows_pickles_to_its_own_size() -> None:
    many = Ragged.split(np.arange(100_000), np.full(1000, 100))
    assert len(pickle.dumps(many[:10])) < 10_000


# Batch


@dataclass(eq=False)
class Table(Batch):
    ids: Ragged
    names: list[str]
    scores: np.ndarray
    extra: Ragged | None = None


def table(**changed: Any) -> Table:
    columns: dict[str, Any] = {"ids": ragged(), "names": list("abcde"), "scores": np.arange(5, dtype=np.float32)}
    return Table(**(columns | changed))


def test_columns_of_unequal_length_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"columns of a Table must have one length.*'names': 4"):
        table(names=list("abcd"))


@pytest.mark.parametrize(
    "where", [slice(1, 3), slice(None, None, -1), slice(9, 12), [3, 0, 0], np.array([-1])], ids=str
)
def test_all_columns_are_cut_alike(where: Any) -> None:
    found = table(extra=ragged())[where]
    kept = np.arange(5)[where].tolist()
    assert type(found) is Table
    assert len(found) == len(kept)
    assert listed(found.ids) == [ROWS[k] for k in kept]
    assert found.names == ["abcde"[k] for k in kept]
    assert found.scores.tolist() == kept
    assert found.extra == found.ids


def test_a_mask_of_samples_keeps_those_that_are_true() -> None:
    assert table()[np.array([True, False, False, False, True])].names == ["a", "e"]


def test_the_slices_of_a_batch_join_to_the_batch() -> None:
    for whole in (table(), table(extra=ragged())):
        parts = [whole[start : start + 2] for start in range(0, 7, 2)]  # the last one is empty
        assert Table.concat(parts) == whole


def test_a_column_that_only_some_parts_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="column 'extra' of Table is set in some parts and None in others"):
        Table.concat([table(), table(extra=ragged())])


def test_an_empty_part_may_lack_a_column_that_others_have() -> None:
    joined = Table.concat([table()[:0], table(extra=ragged())])
    assert joined == table(extra=ragged())
    assert Table.concat([table()[:0], table()[:0]]) == table()[:0]


def test_batches_of_other_types_values_or_columns_differ() -> None:
    ids = ragged()
    assert table() == table()
    assert table() != table(scores=np.arange(5, dtype=np.float64))
    assert table() != table(names=list("abcdf"))
    assert table() != table(extra=ragged())
    assert Prompts(ids) == Prompts(ragged())
    assert Sequences(ids, ids) != Samples(ids, ids)


def test_a_batch_pickles() -> None:
    whole = table(extra=ragged())
    assert pickle.loads(pickle.dumps(whole)) == whole


def test_an_empty_batch_is_a_batch() -> None:
    nothing = Rollouts(ragged([]), ragged([]), Ragged.of([], np.float32), np.zeros(0, bool))
    assert len(nothing) == 0
    assert nothing[:5] == nothing[np.array([], np.int64)] == Rollouts.concat([nothing, nothing]) == nothing


def test_loss_tokens_are_the_targets_unless_a_mask_says_fewer() -> None:
    targets = Ragged.of([[False, True, True], [False, True]], bool)
    ids = Ragged.of([[1, 2, 3], [4, 5]], np.int64)
    assert Samples(ids, targets).num_loss_tokens == 3
    assert Samples(ids, targets, loss_mask=Ragged.of([[True, False], [True]], bool)).num_loss_tokens == 2


def test_a_step_is_shared_out_by_tokens() -> None:
    """One long sequence against six short ones, which a slice would have shared out four to three."""
    lengths = [12, 2, 2, 2, 2, 2, 2]
    sequences = Sequences(
        input_ids=Ragged.split(np.arange(sum(lengths)), lengths), target_mask=Ragged.split(np.ones(24, bool), lengths)
    )
    division = split_call(RayHelper.balanced(), 2, (sequences,), {})
    parts = [args[0] for args, _ in division.calls]
    assert [part.input_ids.lengths.tolist() for part in parts] == [[12], [2] * 6]
    assert Sequences.concat(parts) == sequences


def test_costs_that_do_not_fit_are_refused() -> None:
    class Wrong(list[int]):
        def item_costs(self) -> list[float]:
            return [1.0, -1.0]

    with pytest.raises(DispatchError, match=r"item_costs\(\) must give 2 finite numbers"):
        split_call(RayHelper.balanced(), 2, (Wrong([1, 2]),), {})
