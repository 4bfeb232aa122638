"""A worker that dies is replaced and its parts are built again, as they were after construction: on Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhelper import RayHelper

pytestmark = pytest.mark.xdist_group("ray")

GROUPS = {
    "learners": {"device": "CPU", "ranks": 2, "workers": ["train"], "restarts": 50},
    "judges": {"device": "CPU", "ranks": 1, "workers": ["judge"]},
}


@RayHelper.worker(group="train")
class Policy:
    def __init__(self, start: int, one_shard: bool = False) -> None:
        self.steps = start
        self.scale = 1
        self.set_up(one_shard)

    @RayHelper.function(group="train")
    def set_up(self, one_shard: bool) -> None:
        self.scale = 10
        if one_shard:
            RayHelper.shard(0, 1, leader=RayHelper.current().rank == 1)

    @RayHelper.function(group="train")
    def step(self, by: int = 1) -> int:
        self.steps += by
        return self.steps

    @RayHelper.function(group="train")
    def pid(self) -> int:
        return os.getpid()

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def scaled(self, items: list[int], die_once: str = "") -> list[int]:
        marker = Path(die_once)
        if die_once and RayHelper.current().rank == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [self.scale * item + self.steps for item in items]

    @RayHelper.function(group="train", dispatch="slice")
    def slices(self, items: list[int]) -> list[int]:
        return items


@RayHelper.worker(group="train")
class Crew:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.own = Policy(100)

    @RayHelper.function(group="train")
    def seen(self) -> tuple[int, int]:
        return self.policy.steps, self.own.steps


@RayHelper.worker(group="judge")
class Judge:
    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def judged(self, items: list[int]) -> list[int]:
        return [item + 1 for item in items]


@RayHelper.worker(group=["train", "judge"])
class Trainer:
    def __init__(self, start: int) -> None:
        self.policy = Policy(start)
        self.tensor = Policy(0, one_shard=True)
        self.crew = Crew(self.policy)
        self.judge = Judge()
        self.policy.step(by=5)

    @RayHelper.function(group="train")
    def is_one_object(self) -> bool:
        return self.crew.policy is self.policy


@RayHelper.worker(group="train")
class Observer:
    """Another whole, whose constructor is given a part of the first."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @RayHelper.function(group="train")
    def seen(self) -> int:
        return self.policy.steps

    @RayHelper.function(group="train")
    def is_mine(self, policy: Policy) -> bool:
        return policy is self.policy


@pytest.fixture(scope="module")
def session(ray_cluster: None) -> Iterator[None]:
    with RayHelper.session(GROUPS):
        yield


@pytest.fixture
def trainer(session: None) -> Trainer:
    return Trainer(1)


def kill(policy: Policy, rank: int) -> None:
    os.kill(policy.pid()[rank], signal.SIGKILL)  # type: ignore[index]


def test_a_parts_call_in_which_a_worker_died_runs_again(trainer: Trainer, tmp_path: Path) -> None:
    assert trainer.policy.scaled([1, 2, 3], str(tmp_path / "died")) == [16, 26, 36]
    assert (tmp_path / "died").exists()


def test_parts_are_built_again_as_they_were_after_construction(trainer: Trainer) -> None:
    values: Any = trainer.policy.step()
    assert values == [7, 7]
    trainer.crew.own.step()
    kill(trainer.policy, 1)
    assert trainer.policy.step() == [8, 7]
    assert trainer.crew.own.step() == [102, 101]
    assert trainer.crew.seen() == [(8, 102), (7, 101)]
    assert trainer.is_one_object() == [True, True]


def test_a_parts_shards_hold_for_the_replacement(trainer: Trainer) -> None:
    kill(trainer.policy, 0)
    assert trainer.tensor.slices([1, 2]) == [[1, 2]]
    assert trainer.policy.slices([1, 2]) == [[1], [2]]


def test_a_future_of_a_part_into_another_survives_the_death_of_its_maker(trainer: Trainer, tmp_path: Path) -> None:
    made = trainer.policy.scaled.defer([1, 2, 3, 4], str(tmp_path / "died"))
    assert trainer.judge.judged(made) == [17, 27, 37, 47]


def test_calls_to_several_parts_in_flight_run_again(trainer: Trainer) -> None:
    kill(trainer.policy, 0)
    in_flight = [part.scaled.defer([1, 2]) for part in (trainer.policy, trainer.crew.own, trainer.tensor)]
    assert [future.result() for future in in_flight] == [[16, 26], [110, 120], [10, 20]]


def test_a_whole_that_was_given_a_part_of_another_is_built_again_with_it(trainer: Trainer) -> None:
    observer = Observer(trainer.policy)
    kill(trainer.policy, 1)
    trainer.policy.step()
    assert observer.seen() == [7, 7]
    assert observer.is_mine(trainer.policy) == [True, True]


def test_the_death_of_a_worker_names_the_part(
    trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.policy.scaled([1, 2], str(tmp_path / "died"))
    assert "died during Trainer.policy.scaled" in caplog.text
