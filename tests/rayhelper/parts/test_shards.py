"""A part's shards are its own: tensor parallelism in one part, data parallelism in another."""

from __future__ import annotations

from typing import Any

from rayhelper import RayHelper
from tests.rayhelper.parts.stories import Run, raised, says, story


def report_one_shard(reverse: bool = False) -> None:
    """All workers are one shard; the last one leads it, so that a wrong leader shows."""
    info = RayHelper.current()
    RayHelper.shard(0, 1, leader=info.rank == (0 if reverse else info.world_size - 1))


def seen_shard() -> tuple[int, int]:
    shard = RayHelper.current().shard
    return shard.index, shard.count


@RayHelper.worker(group="judge")
class Data:
    """Every worker its own shard, as it reports none."""

    @RayHelper.function(group="judge", dispatch="slice")
    def slices(self, items: list[int]) -> list[int]:
        return items

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def doubled(self, items: list[int]) -> list[int]:
        return [2 * item for item in items]

    @RayHelper.function(group="judge")
    def ranks(self) -> int:
        return RayHelper.current().rank

    @RayHelper.function(group="judge")
    def shard(self) -> tuple[int, int]:
        return seen_shard()

    @RayHelper.function(group="judge")
    def report(self, reverse: bool = False) -> None:
        report_one_shard(reverse)


class Tensor(Data):
    """All workers one shard, reported by a method of its role that its constructor calls."""

    def __init__(self, reverse: bool = False) -> None:
        self.report(reverse)


class Direct(Data):
    """The same, reported by the constructor itself."""

    def __init__(self) -> None:
        if RayHelper.current().group not in ("driver", "off"):
            report_one_shard()


@RayHelper.worker(group="judge")
class Whole(Data):
    def __init__(self, reports: bool = False) -> None:
        self.before = Data()
        if reports:
            self.report()
        self.tensor = Tensor()
        self.direct = Direct()
        self.reverse = Tensor(reverse=True)
        self.data = Data()

    @RayHelper.function(group="judge", execute="first")
    def shards_by_turns(self) -> list[tuple[int, int]]:
        return [self.shard(), self.tensor.shard(), self.data.shard(), self.direct.shard(), seen_shard()]

    @RayHelper.function(group="judge")
    def report_for_data(self) -> None:
        self.data.report()


@story
def slices_of_each_part() -> Any:
    whole = Whole()
    items = [1, 2, 3, 4]
    return [part.slices(items) for part in (whole, whole.data, whole.tensor, whole.direct, whole.reverse)]


def test_each_part_gets_slices_after_its_own_shards(run: Run) -> None:
    apart = run.of_shards([[1, 2, 3, 4]] if run.layout.size("judge") == 1 else [[1, 2], [3, 4]])
    together = run.of_shards([[1, 2, 3, 4]])
    assert run(slices_of_each_part) == [apart, apart, together, together, together]


@story
def values_of_each_part() -> Any:
    whole = Whole()
    return [part.ranks() for part in (whole, whole.data, whole.tensor, whole.direct, whole.reverse)]


def test_each_parts_values_come_from_its_own_leaders(run: Run) -> None:
    size = run.layout.size("judge")
    every, last, first = run.of_shards(list(range(size))), run.of_shards([size - 1]), run.of_shards([0])
    assert run(values_of_each_part) == [every, every, last, last, first]


@story
def flattened_by_each_part() -> Any:
    whole = Whole()
    return [part.doubled([1, 2, 3]) for part in (whole, whole.data, whole.tensor, whole.direct)]


def test_flattened_values_are_the_same_whatever_the_shards(run: Run) -> None:
    assert run(flattened_by_each_part) == [[2, 4, 6]] * 4


@story
def shards_seen_by_turns() -> Any:
    return Whole().shards_by_turns()


def test_current_tells_a_part_its_own_shard_also_within_a_method_of_the_whole(run: Run) -> None:
    own, one = [0, run.layout.size("judge")], [0, 1]
    assert run(shards_seen_by_turns) == [own, one, own, one, own]


@story
def a_whole_that_reports() -> Any:
    whole = Whole(reports=True)
    return [part.slices([1, 2, 3, 4]) for part in (whole, whole.before, whole.data, whole.tensor)]


def test_what_a_whole_reports_is_not_its_parts(run: Run) -> None:
    apart = run.of_shards([[1, 2, 3, 4]] if run.layout.size("judge") == 1 else [[1, 2], [3, 4]])
    together = run.of_shards([[1, 2, 3, 4]])
    assert run(a_whole_that_reports) == [together, apart, apart, together]


@story
def reported_later() -> Any:
    whole, other = Whole(), Whole()
    whole.report_for_data()
    other.data.report()
    parts = (whole.data, whole, whole.before, whole.tensor, other.data, other)
    return [part.slices([1, 2, 3, 4]) for part in parts], whole.data.ranks()


def test_a_shard_that_a_part_reports_later_holds_for_that_part_whoever_called_it(run: Run) -> None:
    size = run.layout.size("judge")
    apart = run.of_shards([[1, 2, 3, 4]] if size == 1 else [[1, 2], [3, 4]])
    together = run.of_shards([[1, 2, 3, 4]])
    slices = [together, apart, apart, together, together, apart]
    assert run(reported_later) == [slices, run.of_shards([size - 1])]


@RayHelper.worker(group=["judge", "train"])
class Late:
    """A part whose sibling reports for it, in another role."""

    def __init__(self) -> None:
        self.data = Data()
        self.caller = Caller(self.data)


@RayHelper.worker(group="train")
class Caller:
    def __init__(self, data: Data) -> None:
        self.data = data

    @RayHelper.function(group="train")
    def report_for_sibling(self) -> None:
        self.data.report()


@story
def reported_by_a_sibling() -> Any:
    late = Late()
    asked = raised(late.caller.report_for_sibling)
    return asked, late.data.slices([1, 2, 3, 4])


def test_a_sibling_of_another_role_has_a_part_report_where_one_worker_hosts_both(run: Run) -> None:
    asked, slices = run(reported_by_a_sibling)
    if run.layout.together("judge", "train"):
        assert "returned" in asked
        assert slices == run.of_shards([[1, 2, 3, 4]])
    else:
        assert says(asked, "RoleError", "'judge'", "'learners'")
        size = run.layout.size("judge")
        assert slices == ([[1, 2, 3, 4]] if size == 1 else [[1, 2], [3, 4]])
