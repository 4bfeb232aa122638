"""What holds for every value: a call that hands back what it was given gives it back exactly, however it travels.

In the core alone, packed and unpacked, over simulated workers, and over a Ray session. The values are in ``values.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rayhelper import RayHelper, ShardError
from rayhelper.roles.runtime import Shard
from rayhelper.runtimes.ray.late_call import Parts
from rayhelper.values.collect import join
from rayhelper.values.dispatch import balanced, split_call
from rayhelper.values.packing import pack, unpack
from rayhelper.values.shards import check_shards
from tests.conftest import without_runtime
from tests.rayhelper.values import arrays, columns, laid_out, leaves, many, nestings, num_rows, same, seeds, tensors
from trainers.batch import Ragged

pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all
some_columns = st.integers(0, 64).flatmap(columns)
few_columns = st.integers(0, 9).flatmap(columns)


# Divided and collected


@settings(max_examples=40)
@given(value=some_columns, num_shards=st.integers(1, 16))
def test_any_value_that_is_sliced_comes_back_exactly(value: Any, num_shards: int) -> None:
    division = split_call("slice", num_shards, (value,), {})
    parts = [args[0] for args, _ in division.calls]
    sizes = [num_rows(part) for part in parts]
    assert len(parts) == num_shards
    assert max(sizes) - min(sizes) <= 1
    assert same(join("flatten", parts, order=division.order), value)


@settings(max_examples=30)
@given(value=some_columns, num_shards=st.integers(1, 16), weights=st.lists(st.integers(0, 9), min_size=64, max_size=64))
def test_any_value_that_is_balanced_comes_back_exactly(value: Any, num_shards: int, weights: list[int]) -> None:
    upcoming = iter(weights)
    division = split_call(balanced(lambda item: next(upcoming)), num_shards, (value,), {})
    parts = [args[0] for args, _ in division.calls]
    loads = [sum(weights[k] for k in shard) for shard in _shards(division.order or [], parts)]
    mine = weights[: num_rows(value)]
    assert max(loads) <= sum(mine) / num_shards + max(mine, default=0)
    assert same(join("flatten", parts, order=division.order), value)


def _shards(order: list[int], parts: list[Any]) -> Iterator[list[int]]:
    positions = iter(order)
    for part in parts:
        yield [next(positions) for _ in range(num_rows(part))]


@settings(max_examples=40)
@given(
    drawn=st.integers(0, 20).flatmap(lambda count: st.lists(columns(count), min_size=2, max_size=4)),
    num_shards=st.integers(1, 8),
    dispatch=st.sampled_from(["slice", balanced(lambda item: 1.0)]),
)
def test_any_arguments_stay_aligned_and_come_back_as_a_tuple(drawn: list[Any], num_shards: int, dispatch: Any) -> None:
    division = split_call(dispatch, num_shards, (drawn[0], 0.5, "uncut"), {str(k): v for k, v in enumerate(drawn[1:])})
    assert all(args[1:] == (0.5, "uncut") for args, _ in division.calls)
    parts = [(args[0], *kwargs.values()) for args, kwargs in division.calls]
    assert all(len({num_rows(column) for column in part}) == 1 for part in parts)
    assert same(join("flatten", parts, order=division.order), tuple(drawn))


# Shards


def shard_layouts() -> st.SearchStrategy[dict[int, Shard]]:
    """By rank, any right layout: every shard has one rank or more, one of them its leader."""

    def made(drawn: tuple[int, list[int], int]) -> dict[int, Shard]:
        count, extra, seed = drawn
        random = np.random.default_rng(seed)
        members = random.permutation([*range(count), *(index % count for index in extra)]).tolist()
        leaders = {index: random.choice([r for r, i in enumerate(members) if i == index]) for index in range(count)}
        return {rank: Shard(index, count, bool(leaders[index] == rank)) for rank, index in enumerate(members)}

    return st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=6), seeds).map(made)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=16),
    num_shards=st.integers(1, 16),
    kind=st.sampled_from([list, np.array, torch.tensor, lambda rows: Ragged.of(rows, np.int64)]),
)
def test_any_parts_are_cut_as_their_joined_value_would_be(lengths: list[int], num_shards: int, kind: Any) -> None:
    values = [kind([[start, row] for row in range(length)]) for start, length in enumerate(lengths)]
    parts = split_call("slice", num_shards, (Parts(values, "here"),), {}).calls
    whole = split_call("slice", num_shards, (join("flatten", values),), {}).calls
    for (part,), (piece,) in zip((args for args, _ in parts), (args for args, _ in whole), strict=True):
        assert type(part.joined()) is type(piece)
        assert len(part) == len(piece)
        assert np.array_equal(_rows(part.joined()), _rows(piece))


def _rows(value: Any) -> Any:
    return np.array([list(row) for row in value])


@given(shards=shard_layouts())
def test_any_layout_gives_the_ranks_of_a_shard_one_slice_and_one_voice(shards: dict[int, Shard]) -> None:
    layout = check_shards(shards, len(shards), "role 'train'")
    items = list(range(2 * layout.num_shards + 1))
    calls = split_call("slice", layout.num_shards, (items,), {}).calls
    given_to = [calls[index][0][0] for index in layout.shard_of]
    assert all(given_to[rank] == calls[shard.index][0][0] for rank, shard in shards.items())
    assert join("flatten", [given_to[rank] for rank in layout.leaders]) == items
    assert all(shards[rank].leader for rank in layout.leaders)


@given(shards=shard_layouts(), seed=seeds, fault=st.sampled_from(["silent", "two leaders", "no leader", "other count"]))
def test_any_layout_with_a_fault_is_refused(shards: dict[int, Shard], seed: int, fault: str) -> None:
    rank = seed % len(shards)
    mine = shards[rank]
    size = len(shards)
    if fault == "silent":
        del shards[rank]
        size += not shards  # of one rank, which then says nothing: another is there that does not either
    elif fault == "other count":
        shards[size] = Shard(0, mine.count + 1, leader=False)
        size += 1
    elif fault == "two leaders":
        shards[size] = Shard(mine.index, mine.count, leader=True)
        size += 1
    else:
        leader = next(r for r, shard in shards.items() if shard.index == mine.index and shard.leader)
        shards[leader] = Shard(mine.index, mine.count, leader=False)
    with pytest.raises(ShardError, match="role 'train'"):
        check_shards(shards, size, "role 'train'")


# Packed


@settings(max_examples=100)
@given(value=nestings(leaves()), writable=st.booleans())
@example(value=torch.arange(6).reshape(1, 6)[:, 2], writable=False)  # of one item, at a stride of six
@example(value=many(32, ">i4", 0, list), writable=False)
@example(value=many(32, np.dtypes.StringDType(), 0, tuple), writable=False)
def test_any_value_that_is_packed_is_unpacked_exactly(value: Any, writable: bool) -> None:
    assert same(unpack(pack(value), writable=writable), value)


@settings(max_examples=25)
@given(value=nestings(leaves()))
@example(value=many(32, "i8", 0, list))
@example(value=np.arange(70_000))
def test_any_value_that_is_packed_twice_is_shared_when_it_is_unpacked(value: Any) -> None:
    first, second = unpack(pack([value, {"again": value}]))
    assert same(first, value)
    assert first is second["again"]


@settings(max_examples=25)
@given(value=st.one_of(arrays(3), tensors(3)))
@example(value=laid_out(np.arange(3), "read-only"))
def test_any_array_unpacked_for_its_only_reader_can_be_written_to_and_the_senders_stays(value: Any) -> None:
    assume(0 not in value.shape)
    before = repr(value)
    back = unpack(pack(value), writable=True)
    back[0] = back[1]
    assert same(back[0:1], back[1:2])
    assert repr(value) == before


# Sent to workers


@RayHelper.worker(group="w")
class Echo:
    """Gives back what it was given."""

    @RayHelper.function(group="w", dispatch="slice", collect="flatten")
    def sliced(self, value: Any) -> Any:
        return value

    @RayHelper.function(group="w", dispatch=RayHelper.balanced(lambda item: 1.0), collect="flatten")
    def balanced(self, value: Any, *others: Any) -> Any:
        return (value, *others) if others else value

    @RayHelper.function(group="w", execute="first")
    def first(self, value: Any) -> Any:
        return value

    @RayHelper.function(group="w")
    def take_shard(self, shards: dict[int, Shard]) -> None:
        mine = shards[RayHelper.current().rank]
        RayHelper.shard(mine.index, mine.count, mine.leader)


def group_of(num_workers: int) -> dict[str, Any]:
    return {"g": {"device": "CPU", "ranks": num_workers, "workers": ["w"]}}


@settings(max_examples=25)
@given(value=st.one_of(some_columns, few_columns), num_workers=st.integers(1, 16), strict=st.booleans())
def test_any_value_comes_back_from_simulated_workers(value: Any, num_workers: int, strict: bool) -> None:
    with without_runtime(), RayHelper.session(group_of(num_workers), runtime="inprocess", strict=strict):
        echo = Echo()
        assert same(echo.sliced(value), value)
        assert same(echo.balanced(value), value)
        assert same(echo.balanced.defer(value, value).result(), (value, value))
        assert same(echo.first(value), value)


@settings(max_examples=30)
@given(shards=shard_layouts(), value=few_columns)
def test_any_value_comes_back_from_any_layout_of_shards(shards: dict[int, Shard], value: Any) -> None:
    with without_runtime(), RayHelper.session(group_of(len(shards)), runtime="inprocess"):
        echo = Echo()
        echo.take_shard(shards)
        assert same(echo.sliced(value), value)
        assert len(list(echo.sliced.stream(value))) == next(iter(shards.values())).count


@pytest.fixture(scope="module")
def ray_echo(ray_cluster: None) -> Iterator[Echo]:
    with without_runtime(), RayHelper.session(group_of(2)):
        yield Echo()


@settings(max_examples=25)
@given(value=some_columns)
def test_any_value_comes_back_from_ray_workers(ray_echo: Echo, value: Any) -> None:
    assert same(ray_echo.sliced(value), value)
    assert same(ray_echo.balanced(value, value), (value, value))


@settings(max_examples=25)
@given(value=nestings(leaves()))
def test_any_value_goes_to_a_ray_worker_and_back(ray_echo: Echo, value: Any) -> None:
    assert same(ray_echo.first(value), value)
