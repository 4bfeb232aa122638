"""What a decorated call gives, in every way to run it: the same, or a clear error.

Most of the rows are calls that end in an error, a loss or a silent corruption in the systems users come from.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rayhelper import CollectError, DispatchError, RayHelper, RoleError
from tests.conftest import without_runtime

pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all

GROUPED = ["inprocess", "strict", "ray"]  # and torchrun: see test_torchrun.py
GROUPS = {
    "trainers": {"device": "CPU", "ranks": 2, "workers": ["train"]},
    "judges": {"device": "CPU", "ranks": 3, "workers": ["judge", "format"]},
}


class KeywordError(Exception):
    """An exception that pickles and cannot be unpickled."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code} {why}")


def every_other(n: int, i: int, data: Any) -> Any:
    return data[i::n]


def pair_dispatch(n: int, i: int, data: Any) -> Any:
    (items, scale), kwargs = data
    return (items[i::n], scale), kwargs


def total(values: list[int]) -> int:
    return sum(values)


class RefusedError(Exception):
    """An exception with a constructor of its own."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(code, why)
        self.code = code
        self.why = why


@RayHelper.worker(group=["train", "judge"])
class Trainer:
    def __init__(self, start: int = 10) -> None:
        self.start = start
        self.seen: list[Any] = []
        self.trained = self.set_up(7)
        self.everywhere = "undecorated code runs everywhere"

    @RayHelper.function(group="train")
    def set_up(self, value: int) -> int:
        self.state = value
        return value

    @RayHelper.function(group="train", execute="first")
    def first(self, value: Any) -> Any:
        return value

    @RayHelper.function(group="train", execute="first", collect="flatten")
    def first_flatten(self, value: Any) -> Any:
        return value

    @RayHelper.function(group="train", execute="first", collect=len)
    def first_counted(self, value: Any) -> Any:
        return value

    @RayHelper.function(group="train")
    def every(self, value: Any = None) -> Any:
        return value

    @RayHelper.function(group="train")
    def ranks(self) -> int:
        return RayHelper.current().rank

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def double(self, items: Any, factor: int = 2) -> Any:
        """Each item times ``factor``."""
        return [item * factor for item in items]

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def same(self, items: Any, *others: Any, **named: Any) -> Any:
        return (items, *others, *named.values()) if others or named else items

    @RayHelper.function(group="train", dispatch="slice")
    def lengths(self, items: Any) -> int:
        return len(items)

    @RayHelper.function(group="train", dispatch=every_other, collect="flatten")
    def interleaved(self, items: list[int]) -> list[int]:
        return items

    @RayHelper.function(group="train", dispatch=pair_dispatch, collect=total)
    def weighted(self, items: list[int], scale: int) -> int:
        return scale * sum(items)

    @RayHelper.function(group="train", dispatch=RayHelper.balanced(len), collect="flatten")
    def by_length(self, items: list[str]) -> list[str]:
        return [item.upper() for item in items]

    @RayHelper.function(group="train", collect="flatten")
    def flatten(self, value: Any) -> Any:
        return value

    @RayHelper.function(group="train")
    def attribute(self, name: str) -> Any:
        return getattr(self, name, "absent")

    @RayHelper.function(group="train")
    def calls_own_role(self, value: int) -> Any:
        return self.every(value)

    @RayHelper.function(group="train")
    def calls_other_role(self) -> Any:
        return self.grade([1, 2])

    @RayHelper.function(group="train")
    def calls_driver(self) -> Any:
        return self.on_driver()

    @RayHelper.function(group="driver")
    def on_driver(self) -> str:
        return "driver"

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def grade(self, items: list[int]) -> list[int]:
        return [item % 3 for item in items]

    @RayHelper.function(group="train", execute="first")
    async def waits(self, value: int) -> int:
        await asyncio.sleep(0)
        return value + 1

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def counts(self, items: list[int]) -> Iterator[int]:
        yield from items

    @staticmethod
    @RayHelper.function(group="train", execute="first")
    def static_below(value: int) -> int:
        return value * 3

    @RayHelper.function(group="train", execute="first")
    @staticmethod
    def static(value: int) -> int:
        return value * 3

    @RayHelper.function(group="train", execute="first")
    @classmethod
    def named(cls, suffix: str) -> str:
        return cls.__name__ + suffix

    @RayHelper.function(group="train", dispatch="slice")
    def refuse(self, items: list[int]) -> None:
        if 3 in items:
            raise RefusedError(3, "three")

    @RayHelper.function(group="train", execute="first")
    def fail(self, kind: str) -> None:
        if kind == "keyword":
            raise KeywordError(1, why="the real cause")
        raise {"cancelled": asyncio.CancelledError, "interrupt": KeyboardInterrupt, "exit": SystemExit}[kind]("why")

    def step(self, items: list[int]) -> list[int]:
        """An undecorated method: it runs on the driver and strings roles together."""
        return self.grade(self.double(items))


class Careful(Trainer):
    """A subclass with an undecorated override, and state of its own set after super().__init__()."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.extra = self.every(start)

    def every(self, value: Any = None) -> Any:  # type: ignore[override]
        return ("wrapped", super().every(value))

    @RayHelper.function(group="train", execute="first")
    def first(self, value: Any) -> Any:
        return ("sub", super().first(value))


@RayHelper.worker(group="judge")
class Judge:
    def __init__(self, bonus: int) -> None:
        self.bonus = bonus

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def score(self, items: list[int]) -> list[int]:
        return [item + self.bonus for item in items]


class Evaluation:
    """A class that knows nothing of roles and calls a trainer while it is constructed."""

    def __init__(self, trainer: Trainer) -> None:
        self.values = trainer.double([1, 2, 3])


@pytest.fixture(scope="module", params=["torchrun"] if "TORCHELASTIC_RUN_ID" in os.environ else GROUPED)
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    """Groups of 2 and 3 workers, in each of the ways to run them."""
    name: str = request.param
    if name == "ray":
        request.getfixturevalue("ray_cluster")
    options: dict[str, Any] = {"runtime": "inprocess", "strict": True} if name == "strict" else {"runtime": name}
    with RayHelper.session(GROUPS, **options):
        yield name


@pytest.fixture(scope="module")
def trainer(runtime: str) -> Trainer:
    return Trainer()


@pytest.fixture(params=["off", "groups"])
def either(request: pytest.FixtureRequest, trainer: Trainer) -> Iterator[Trainer]:
    """The same class with Ray off, and on groups of 2 and 3 workers."""
    if request.param == "groups":
        yield trainer
    else:
        with without_runtime():
            yield Trainer()


@pytest.mark.parametrize("value", [None, 0, 5, {"a": 1}, [1, 2], [], "text", (1, [2])], ids=repr)
def test_first_gives_worker_zeros_value_itself(either: Trainer, value: Any) -> None:
    assert either.first(value) == value
    assert either.first_flatten(value) == value


def test_first_with_a_callable_collect_gets_a_list_of_one(trainer: Trainer) -> None:
    assert trainer.first_counted([1, 2, 3]) == 1


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 64])
def test_slice_and_flatten_keep_every_item_once_and_in_order(either: Trainer, count: int) -> None:
    assert either.double(list(range(count))) == [2 * k for k in range(count)]


def test_slice_calls_every_worker_even_with_fewer_items(trainer: Trainer) -> None:
    assert trainer.lengths([1]) == [1, 0]
    assert trainer.lengths([]) == [0, 0]
    assert trainer.lengths(items=[]) == [0, 0]
    assert trainer.lengths([1, 2, 3, 4, 5]) == [3, 2]


def test_tuples_are_sliced_and_not_doubled(either: Trainer) -> None:
    assert either.double((1, 2, 3, 4)) == [2, 4, 6, 8]


def test_a_mapping_of_columns_is_sliced_by_rows(either: Trainer) -> None:
    batch = {"ids": [1, 2, 3], "text": ["a", "b", "c"]}
    assert either.same(batch) == batch


@pytest.mark.parametrize("dtype", ["int64", "bfloat16", "bool", "float32"])
def test_tensors_keep_dtype_and_shape(either: Trainer, dtype: str) -> None:
    import torch  # here, as most of the workers that are started do without

    value = torch.arange(15).reshape(5, 3).to(getattr(torch, dtype))
    back = either.same(value)
    assert back.dtype == value.dtype
    assert torch.equal(back, value)


def test_arrays_and_several_arguments_stay_aligned(either: Trainer) -> None:
    items, others = np.arange(5, dtype=np.int16), list("abcde")
    back_items, back_others = either.same(items, others)
    assert back_items.dtype == np.int16
    assert back_items.tolist() == [0, 1, 2, 3, 4]
    assert back_others == others


def test_unequal_lengths_are_refused_and_whole_is_the_remedy(trainer: Trainer) -> None:
    with pytest.raises(DispatchError, match=r"3.*4.*RayHelper\.whole|RayHelper\.whole") as caught:
        trainer.same([1, 2, 3], [1, 2, 3, 4])
    assert "3" in str(caught.value)
    assert "4" in str(caught.value)


def test_whole_goes_to_everyone_uncut(either: Trainer) -> None:
    assert either.double([1, 2], factor=RayHelper.whole(3)) == [3, 6]


@pytest.mark.parametrize("args", [(), (None,), (0,), (False,), ("",)], ids=repr)
def test_a_slice_call_with_nothing_to_slice_is_refused(trainer: Trainer, args: tuple[Any, ...]) -> None:
    with pytest.raises(DispatchError):
        trainer.lengths(*args)


def test_scalars_and_none_go_to_everyone_beside_a_sliced_argument(either: Trainer) -> None:
    assert either.double([1, 2, 3], 5) == [5, 10, 15]


def test_none_collect_gives_the_workers_values_as_they_are(trainer: Trainer) -> None:
    assert trainer.every({"a": 1}) == [{"a": 1}, {"a": 1}]
    assert trainer.every(([1], {"a": 1})) == [([1], {"a": 1}), ([1], {"a": 1})]
    assert trainer.ranks() == [0, 1]


def test_flatten_of_none_is_none(trainer: Trainer) -> None:
    assert trainer.flatten(None) is None


@pytest.mark.parametrize("value", [5, "ab", {"loss": 0.5}, 1.5], ids=repr)
def test_flatten_of_what_cannot_be_joined_names_the_type(trainer: Trainer, value: Any) -> None:
    with pytest.raises(CollectError, match=type(value if not isinstance(value, dict) else 0.5).__name__):
        trainer.flatten(value)


def test_a_custom_dispatch_returns_the_data_alone(trainer: Trainer) -> None:
    assert trainer.interleaved([0, 1, 2, 3, 4]) == [0, 2, 4, 1, 3]
    assert trainer.interleaved(items=[0, 1, 2]) == [0, 2, 1]


def test_a_custom_dispatch_of_several_arguments_gets_args_and_kwargs(either: Trainer) -> None:
    assert either.weighted([1, 2, 3], 10) == 60


def test_balanced_results_come_back_in_the_callers_order(either: Trainer) -> None:
    words = ["a", "bbbbbb", "cc", "ddd", "e", "ff"]
    assert either.by_length(words) == [word.upper() for word in words]


def test_a_nested_call_of_a_hosted_role_stays_on_the_worker(trainer: Trainer) -> None:
    assert trainer.calls_own_role(4) == [4, 4]


def test_a_nested_call_of_another_group_names_both_roles(trainer: Trainer) -> None:
    with pytest.raises(RoleError, match=r"judge.*train") as caught:
        trainer.calls_other_role()
    assert "judge" in str(caught.value)


def test_a_call_to_the_driver_from_a_worker_is_refused(trainer: Trainer) -> None:
    with pytest.raises(RoleError, match="driver"):
        trainer.calls_driver()


def test_a_driver_method_runs_here(either: Trainer) -> None:
    assert either.on_driver() == "driver"


def test_a_call_from_an_unrelated_constructor_reaches_the_workers(either: Trainer) -> None:
    assert Evaluation(either).values == [2, 4, 6]


def test_state_set_in_a_role_during_construction_lives_on_its_workers(trainer: Trainer, runtime: str) -> None:
    assert trainer.attribute("state") == [7, 7]
    if runtime != "torchrun":  # where a process is driver and worker
        assert trainer.trained is None
        assert not hasattr(trainer, "state")
    assert trainer.attribute("everywhere") == ["undecorated code runs everywhere"] * 2


def test_a_second_instance_has_workers_and_arguments_of_its_own(runtime: str) -> None:
    one, two = Trainer(1), Trainer(99)
    assert one.attribute("start") == [1, 1]
    assert two.attribute("start") == [99, 99]


def test_subclasses_override_and_call_super_as_undecorated(runtime: str) -> None:
    careful = Careful(5)
    assert careful.attribute("start") == [5, 5]
    assert careful.attribute("extra") == [("wrapped", 5), ("wrapped", 5)]
    assert careful.every(3) == ("wrapped", [3, 3])
    assert careful.first(3) == ("sub", 3)


def test_two_classes_share_a_device_group_and_no_state(trainer: Trainer) -> None:
    judge = Judge(100)
    assert judge.score([1, 2, 3, 4]) == [101, 102, 103, 104]
    assert trainer.grade([3, 4, 5]) == [0, 1, 2]


def test_undecorated_methods_string_roles_together(either: Trainer) -> None:
    assert either.step([1, 2, 3, 4]) == [2, 1, 0, 2]


def test_coroutines_generators_static_and_class_methods(either: Trainer) -> None:
    assert asyncio.run(either.waits(1)) == 2
    assert list(either.counts([3, 1, 2])) == [3, 1, 2]
    assert either.static(2) == 6
    assert either.named("!") == "Trainer!"


def test_static_methods_may_be_decorated_in_either_order(either: Trainer) -> None:
    assert either.static_below(2) == 6


def test_a_static_call_on_the_class_says_that_an_instance_is_needed(runtime: str) -> None:
    with pytest.raises(RoleError, match="instance"):
        Trainer.static(2)


def test_an_exception_of_a_worker_arrives_as_its_own_type_with_its_place(trainer: Trainer, runtime: str) -> None:
    with pytest.raises(RefusedError) as caught:
        trainer.refuse([1, 2, 3, 4])
    assert (caught.value.code, caught.value.why) == (3, "three")
    note = "".join(caught.value.__notes__)
    assert "Trainer.refuse" in note
    assert "'train'" in note
    assert "rank 1" in note
    shown = "".join(traceback.format_exception(caught.value))
    assert 'raise RefusedError(3, "three")' in shown
    assert trainer.lengths([1]) == [1, 0]


def test_a_trainer_built_before_initialize_says_so(runtime: str) -> None:
    with without_runtime():
        early = Trainer()
    with pytest.raises(RoleError, match=r"before RayHelper\.initialize"):
        early.every(1)


def test_defer_gives_a_future_and_futures_are_arguments(either: Trainer) -> None:
    doubled = either.double.defer([1, 2, 3, 4, 5])
    assert either.grade(doubled) == [2, 1, 0, 2, 1]
    assert doubled.result() == [2, 4, 6, 8, 10]
    assert doubled.done()
    assert either.first(value=either.first.defer([1])) == [1]


def test_a_deferred_failure_is_raised_by_result_and_passed_on(either: Trainer) -> None:
    failed = either.refuse.defer([1, 2, 3])
    assert isinstance(failed.exception(), RefusedError)
    with pytest.raises(RefusedError):
        failed.result()


def test_a_future_that_failed_fails_the_call_that_needs_it(trainer: Trainer) -> None:
    with pytest.raises(RefusedError):
        trainer.every(trainer.refuse.defer([3, 3]))


def test_as_completed_gives_every_future_once(either: Trainer) -> None:
    waiting = [either.first.defer(k) for k in range(4)]
    assert sorted(future.result() for future in RayHelper.as_completed(waiting)) == [0, 1, 2, 3]


def test_stream_gives_the_leaders_values(trainer: Trainer) -> None:
    assert sorted(trainer.ranks.stream()) == [0, 1]


def test_the_decorators_keep_signature_docstring_and_kind() -> None:
    trainer = Trainer()
    assert list(inspect.signature(Trainer.double).parameters) == ["self", "items", "factor"]
    assert list(inspect.signature(trainer.double).parameters) == ["items", "factor"]
    assert trainer.double.__doc__ == "Each item times ``factor``."
    assert trainer.double.__name__ == "double"
    assert inspect.iscoroutinefunction(trainer.waits)
    assert inspect.isgeneratorfunction(trainer.counts)
    assert list(inspect.signature(trainer.static).parameters) == ["value"]
    assert list(inspect.signature(trainer.named).parameters) == ["suffix"]
    assert list(inspect.signature(Trainer).parameters) == ["start"]


def test_a_balanced_future_reaches_the_next_call_in_the_callers_order(either: Trainer) -> None:
    words = ["a", "bbbbbb", "cc", "ddd", "e", "ff"]
    assert either.same(either.by_length.defer(words)) == [word.upper() for word in words]


def test_whole_is_taken_off_for_first_too(either: Trainer) -> None:
    assert either.first(RayHelper.whole([1, 2])) == [1, 2]


def test_more_methods_than_slots_and_dropped_instances_keep_calls_apart(runtime: str) -> None:
    import gc

    trainers = [Trainer(k) for k in range(17)]
    assert [one.attribute("start")[0] for one in trainers] == list(range(17))
    assert [one.every(k) for k, one in enumerate(trainers)] == [[k, k] for k in range(17)]
    assert [one.double([k]) for k, one in enumerate(trainers)] == [[2 * k] for k in range(17)]
    assert [one.first(k) for k, one in enumerate(trainers)] == list(range(17))  # 68 addresses, 64 slots
    del trainers[:12]
    gc.collect()
    fresh = Trainer(99)
    assert fresh.attribute("start") == [99, 99]
    assert [one.attribute("start")[0] for one in trainers] == list(range(12, 17))
    assert [one.first(k) for k, one in enumerate(trainers)] == list(range(5))


def test_inside_local_new_objects_stay_here_and_old_ones_keep_their_workers(trainer: Trainer) -> None:
    with RayHelper.local():
        here = Trainer(3)
        assert here.every(1) == 1
        assert here.trained == 7
        assert trainer.every(1) == [1, 1]
    assert trainer.every(2) == [2, 2]
