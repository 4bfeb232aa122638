"""Decorated objects as arguments and values: the worker's own object where it lives, elsewhere an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayhelper import RayHelper
from tests.rayhelper.parts.layouts import ROLES
from tests.rayhelper.parts.stories import Run, agreed, only, raised, runs, says, story


@RayHelper.worker(group="train")
class Policy:
    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    @RayHelper.function(group="train", collect=agreed)
    def step(self) -> int:
        self.steps += 1
        return self.steps

    @RayHelper.function(group="train", collect=agreed)
    def is_me(self, policy: Policy) -> bool:
        return policy is self

    @RayHelper.function(group="train", execute="first")
    def me(self) -> Policy:
        return self


@RayHelper.worker(group="train")
class Trainer:
    """It lives where role train is hosted, and nowhere else."""

    def __init__(self) -> None:
        self.policy = Policy(10)
        self.others = [Policy(20), Policy(30)]

    @RayHelper.function(group="train", collect=agreed)
    def are_parts(self, policy: Any, others: Any, trainer: Any = None) -> list[bool]:
        return [policy is self.policy, *(a is b for a, b in zip(others, self.others, strict=True)), trainer is self]

    @RayHelper.function(group="train", execute="first")
    def best(self) -> Policy:
        return self.policy

    @RayHelper.function(group="train", execute="first")
    def held(self) -> Any:
        return [self.policy, self], {"others": tuple(self.others)}, 5

    @RayHelper.function(group="train", execute="first", collect="flatten")
    def listed(self) -> list[Policy]:
        return self.others

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def steps_of(self, policies: list[Policy]) -> list[int]:
        return [policy.steps for policy in policies]


@RayHelper.worker(group=["train", "rollout", "judge"])
class Receiver:
    """A separate whole that lives everywhere and is given policies."""

    def __init__(self) -> None:
        self.calls = 0

    def read(self, values: tuple[Any, ...]) -> Any:
        self.calls += 1
        return [read(value) for value in values]

    @RayHelper.function(group="train", collect=agreed)
    def by_train(self, *values: Any, **named: Any) -> Any:
        return self.read((*values, *named.values()))

    @RayHelper.function(group="rollout", collect=agreed)
    def by_rollout(self, *values: Any, **named: Any) -> Any:
        return self.read((*values, *named.values()))

    @RayHelper.function(group="judge", collect=agreed)
    def by_judge(self, *values: Any, **named: Any) -> Any:
        return self.read((*values, *named.values()))

    @RayHelper.function(group="train", collect=agreed)
    def step_policy(self, policy: Policy) -> int:
        return policy.step()

    @RayHelper.function(group="rollout", collect=agreed)
    def num_calls_of_rollout(self) -> int:
        return self.calls

    @RayHelper.function(group="judge", collect=agreed)
    def num_calls_of_judge(self) -> int:
        return self.calls

    def by(self, role: str) -> Callable[..., Any]:
        return getattr(self, f"by_{role}")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


def read(value: Any) -> Any:
    """The steps of every policy in it."""
    if isinstance(value, (list, tuple)):
        return [read(item) for item in value]
    if isinstance(value, dict):
        return {key: read(item) for key, item in value.items()}
    if isinstance(value, Pair):
        return read([value.left, value.right])
    return value.policy.steps if isinstance(value, Trainer) else getattr(value, "steps", value)


@story
def in_every_place() -> Any:
    trainer, receiver = Trainer(), Receiver()
    trainer.policy.step()
    places = {
        "positional": lambda by: by(trainer.policy, 1),
        "keyword": lambda by: by(1, policy=trainer.policy),
        "list": lambda by: by([trainer.policy, trainer.others[1]]),
        "dict": lambda by: by({"a": trainer.policy}),
        "tuple": lambda by: by((trainer.policy, 1)),
        "nested": lambda by: by({"a": [(trainer.policy,)]}),
        "whole": lambda by: by(RayHelper.whole([trainer.policy])),
        "dataclass": lambda by: by(Pair(trainer.policy, 5)),
        "the whole": lambda by: by(trainer),
    }
    seen = {role: {name: raised(call, receiver.by(role)) for name, call in places.items()} for role in ROLES}
    return seen, receiver.num_calls_of_rollout(), receiver.num_calls_of_judge()


PLACES: dict[str, Any] = {
    "positional": [11, 1],
    "keyword": [1, 11],
    "list": [[11, 30]],
    "dict": [{"a": 11}],
    "tuple": [[11, 1]],
    "nested": [{"a": [[11]]}],
    "whole": [[11]],
    "dataclass": [[11, 5]],
    "the whole": [11],
}


def test_a_decorated_object_arrives_where_it_lives_and_is_refused_elsewhere(run: Run) -> None:
    """Refused at the call: the method does not run."""
    seen, *_ = run(in_every_place)
    for role in ROLES:
        if run.layout.together("train", role):
            assert seen[role] == {name: {"returned": value} for name, value in PLACES.items()}, role
        else:
            for name, one in seen[role].items():
                kind = "Trainer" if name == "the whole" else "policy"
                assert says(one, "RoleError", kind, repr(run.layout.group(role))), name


@only(runs("inprocess", "strict", "torchrun", "ray", layouts=("two", "three", "shared")))
def test_a_call_that_was_refused_did_not_begin(run: Run) -> None:
    _, *num_calls = run(in_every_place)
    apart = [not run.layout.together("train", role) for role in ("rollout", "judge")]
    assert any(apart)
    assert not any(number for number, is_apart in zip(num_calls, apart, strict=True) if is_apart)


@story
def refused_when_deferred() -> Any:
    trainer, receiver = Trainer(), Receiver()
    return {role: raised(lambda by: bool(by.defer(trainer.policy)), receiver.by(role)) for role in ROLES}


def test_a_deferred_call_is_refused_when_it_is_made(run: Run) -> None:
    for role, seen in run(refused_when_deferred).items():
        if run.layout.together("train", role):
            assert seen == {"returned": True}
        else:
            assert says(seen, "RoleError", "policy")


@story
def is_the_workers_own() -> Any:
    trainer, other = Trainer(), Trainer()
    same = trainer.are_parts(trainer.policy, trainer.others, trainer=trainer)
    differ = trainer.are_parts(other.policy, tuple(reversed(trainer.others)), other)
    return same, differ, trainer.policy.is_me(trainer.policy), trainer.policy.is_me(other.policy)


def test_what_arrives_is_the_workers_own_object(run: Run) -> None:
    assert run(is_the_workers_own) == [[True] * 4, [False] * 4, True, False]


@story
def stepped_through_an_argument() -> Any:
    trainer, receiver = Trainer(), Receiver()
    stepped = receiver.step_policy(trainer.policy)
    return stepped, trainer.policy.step(), trainer.steps_of([*trainer.others, trainer.policy])


def test_a_call_to_an_argument_runs_on_the_worker_and_changes_the_part(run: Run) -> None:
    assert run(stepped_through_an_argument) == [11, 12, [20, 30, 12]]


@story
def returned_to_the_driver() -> Any:
    trainer = Trainer()
    (first, whole), named, five = trainer.held()
    returned = [first is trainer.policy, whole is trainer, named["others"][1] is trainer.others[1], five]
    listed = trainer.listed()
    returned += [trainer.best() is trainer.policy, trainer.policy.me() is trainer.policy]
    returned += [trainer.best.defer().result() is trainer.policy, listed[0] is trainer.others[0]]
    return returned, trainer.best().step(), trainer.policy.step()


def test_a_decorated_object_that_a_worker_returns_is_the_drivers_own(run: Run) -> None:
    assert run(returned_to_the_driver) == [[True, True, True, 5, True, True, True, True], 11, 12]


@story
def a_future_of_a_part_as_argument() -> Any:
    trainer, receiver = Trainer(), Receiver()
    future = trainer.best.defer()
    return receiver.step_policy(future), receiver.by_train(future, trainer.held.defer())


def test_a_future_whose_value_is_a_part_is_an_argument(run: Run) -> None:
    stepped, values = run(a_future_of_a_part_as_argument)
    assert stepped == 11
    assert values == [11, [[11, 11], {"others": [20, 30]}, 5]]


@story
def a_future_where_it_does_not_live() -> Any:
    trainer, receiver = Trainer(), Receiver()
    return {role: raised(lambda by: by(trainer.best.defer()), receiver.by(role)) for role in ROLES}


def test_a_future_whose_value_is_a_part_is_refused_where_it_does_not_live(run: Run) -> None:
    for role, seen in run(a_future_where_it_does_not_live).items():
        if run.layout.together("train", role):
            assert seen == {"returned": [10]}
        else:
            assert says(seen, "RoleError", "policy")


@RayHelper.worker(group="judge")
class Judge:
    """A separate whole whose constructor is given a part of another."""

    def __init__(self, policy: Policy, more: dict[str, Any] | None = None) -> None:
        self.policy = policy
        self.more = more or {}

    @RayHelper.function(group="judge", collect=agreed)
    def seen(self) -> Any:
        return self.policy.steps, [each.steps for each in self.more.get("others", ())]

    @RayHelper.function(group="judge", collect=agreed)
    def is_mine(self, policy: Policy) -> bool:
        return self.policy is policy


@story
def given_to_a_constructor() -> Any:
    trainer = Trainer()

    def judged() -> Any:
        judge = Judge(trainer.policy, more={"others": trainer.others})
        trainer.policy.step()
        trainer.others[0].step()
        return judge.policy is trainer.policy, judge.seen(), judge.is_mine(trainer.policy)

    return raised(judged), raised(lambda: Judge(policy=trainer.policy, more={}).seen()), trainer.policy.step()


def test_a_part_given_to_the_constructor_of_another_whole(run: Run) -> None:
    judged, again, after = run(given_to_a_constructor)
    if run.layout.together("train", "judge"):
        assert judged == {"returned": [True, [11, [21, 30]], True]}
        assert again == {"returned": [11, []]}
        assert after == 12
    else:
        assert says(judged, "RoleError", "Trainer.policy", repr(run.layout.group("judge")))
        assert says(again, "RoleError", "Trainer.policy", repr(run.layout.group("judge")))
        assert after == 11


@story
def a_whole_of_its_own_as_argument() -> Any:
    policy, receiver = Policy(5), Receiver()
    policy.step()
    return receiver.by_train(policy), receiver.step_policy(policy), policy.is_me(policy)


def test_a_whole_without_parts_is_an_argument_as_well(run: Run) -> None:
    assert run(a_whole_of_its_own_as_argument) == [[6], 7, True]


@RayHelper.worker(group="train")
class Called:
    """What it is given to call refers to the object itself."""

    def __init__(self) -> None:
        self.count = 0

    @RayHelper.function(group="train", collect=agreed)
    def rise(self, by: int = 1) -> int:
        self.count += by
        return self.count

    def risen(self, by: int) -> int:
        return self.count + by

    @RayHelper.function(group="train", collect=agreed)
    def call(self, function: Callable[[], int]) -> int:
        return function()


@story
def functions_over_the_object() -> Any:
    called = Called()
    called.rise(10)
    functions = [
        lambda: called.count,
        called.rise,
        partial(called.risen, 100),
        partial(called.rise, by=1000),
        lambda: called.risen(5),
    ]
    return [called.call(function) for function in functions]


def test_bound_methods_and_closures_refer_to_the_workers_own_object(run: Run) -> None:
    assert run(functions_over_the_object) == [10, 11, 111, 1011, 1016]
