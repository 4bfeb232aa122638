"""Errors, deadlines and timelines name a part as its user does: ``Trainer.policy.step``."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from rayhelper import RayHelper
from rayhelper.timeline.trace import read
from tests.rayhelper.parts.stories import (
    Open,
    Run,
    agreed,
    only,
    raised,
    runs,
    says,
    story,
    story_not_under_torchrun,
    story_that_opens,
)


@RayHelper.worker(group="train")
class Policy:
    @RayHelper.function(group="train", collect=agreed)
    def step(self) -> int:
        return 1

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def fail(self, items: list[int]) -> list[int]:
        if items:
            raise KeyError("cannot step")
        return items

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def zipped(self, items: list[int], others: list[int]) -> list[Any]:
        return list(zip(items, others, strict=True))

    @RayHelper.function(group="train", collect="flatten")
    def number(self) -> int:
        return 5

    @RayHelper.function(group="train", execute="first")
    def unsendable(self) -> Any:
        return threading.Lock()

    @RayHelper.function(group="train")
    def wait(self, seconds: float) -> None:
        threading.Event().wait(seconds)


@RayHelper.worker(group="rollout")
class Generator:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @RayHelper.function(group="rollout", execute="first")
    def step_policy(self) -> int:
        return self.policy.step()


@RayHelper.worker(group="train")
class Crew:
    def __init__(self) -> None:
        self.policies = [Policy(), Policy()]


@RayHelper.worker(group=["train", "rollout"])
class Trainer:
    def __init__(self) -> None:
        self.policy = Policy()
        self.generator = Generator(self.policy)
        self.scorers = [Policy(), Policy(), Policy()]
        self.heads = {"a": Policy(), "b": Policy()}
        self.crew = Crew()

    @RayHelper.function(group="rollout", execute="first")
    def step_scorer(self) -> int:
        return self.scorers[1].step()


class SpecialTrainer(Trainer):
    """A subclass's errors have its own name."""


@story
def failing_everywhere() -> Any:
    trainer, special = Trainer(), SpecialTrainer()
    failing = [trainer.policy, trainer.scorers[1], trainer.heads["b"], trainer.crew.policies[0], special.policy]
    return [raised(part.fail, [1]) for part in failing]


NAMES = ["Trainer.policy.fail", "Trainer.scorers[1].fail", "Trainer.heads['b'].fail", "Trainer.crew.policies[0].fail"]
NAMES += ["SpecialTrainer.policy.fail"]


@only(runs("inprocess", "strict", "torchrun", "ray"))
def test_an_exception_is_noted_with_the_parts_name(run: Run) -> None:
    for seen, name in zip(run(failing_everywhere), NAMES, strict=True):
        assert says(seen, "KeyError", "cannot step", name, "rank 0", repr(run.layout.group("train")))


def test_an_exception_keeps_its_type(run: Run) -> None:
    assert [seen["raised"] for seen in run(failing_everywhere)] == ["KeyError"] * len(NAMES)


@story
def failing_when_deferred() -> Any:
    trainer = Trainer()
    future = trainer.scorers[2].fail.defer([1])
    return raised(future.result), trainer.policy.step()


@only(runs("inprocess", "strict", "torchrun", "ray"))
def test_a_deferred_failure_is_noted_with_the_parts_name(run: Run) -> None:
    seen, after = run(failing_when_deferred)
    assert says(seen, "KeyError", "Trainer.scorers[2].fail")
    assert after == 1


@story
def calls_where_the_role_is_not() -> Any:
    trainer = Trainer()
    return raised(trainer.generator.step_policy), raised(trainer.step_scorer)


def test_a_call_where_the_role_is_not_names_the_part(run: Run) -> None:
    policy, scorer = run(calls_where_the_role_is_not)
    if run.layout.together("train", "rollout"):
        assert (policy, scorer) == ({"returned": 1}, {"returned": 1})
    else:
        assert says(policy, "RoleError", "Trainer.policy.step", "'train'", "rollout")
        assert says(scorer, "RoleError", "Trainer.scorers[1].step", "'train'", "rollout")


@story
def calls_that_cannot_be_divided_or_joined() -> Any:
    trainer = Trainer()
    return raised(trainer.policy.zipped, [1, 2], [1]), raised(trainer.heads["a"].number)


@only(runs("inprocess", "strict", "torchrun", "ray"))
def test_what_cannot_be_divided_or_joined_names_the_part(run: Run) -> None:
    divided, joined = run(calls_that_cannot_be_divided_or_joined)
    assert says(divided, "DispatchError", "Trainer.policy.zipped")
    assert says(joined, "CollectError", "Trainer.heads['a'].number")


@story
def a_value_that_cannot_be_sent() -> Any:
    return raised(lambda: Trainer().scorers[0].unsendable())


@only(runs("strict", "ray"))
def test_a_value_that_cannot_be_sent_back_names_the_part(run: Run) -> None:
    assert says(run(a_value_that_cannot_be_sent), "WorkerError", "Trainer.scorers[0].unsendable")


@story_not_under_torchrun
def a_deadline() -> Any:
    trainer = Trainer()
    call = trainer.policy.wait.defer(60.0)
    late = raised(lambda: call.result(timeout_s=0.5))
    return late, call.cancel(), trainer.policy.step()


@only(runs("ray", layouts=("pair",)))
def test_a_deadline_names_the_part(run: Run) -> None:
    late, was_cancelled, after = run(a_deadline)
    assert says(late, "DeadlineError", "Trainer.policy.wait")
    assert (was_cancelled, after) == (True, 1)


@story_that_opens("pair")
def a_groups_deadline(session: Open) -> Any:
    with session(timeout_s=1.0):
        return raised(Trainer().scorers[1].wait, 1.5)


@only(runs("torchrun", layouts=("pair",)))
def test_the_deadline_of_a_group_names_the_part(run: Run) -> None:
    assert says(run(a_groups_deadline), "DeadlineError", "Trainer.scorers[1].wait")


@story_that_opens("pair")
def traced(session: Open) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with session(trace=path):
            trainer = Trainer()
            trainer.policy.step()
            trainer.scorers[1].step()
            trainer.crew.policies[1].step()
            trainer.generator.step_policy()
        if not path.exists():  # rank 0 of torchrun writes what all recorded
            return None
        spans, _ = read(path)
        return sorted({span.name for span in spans if span.phase == "run"})


STEPS = ["Trainer.crew.policies[1].step", "Trainer.generator.step_policy", "Trainer.policy.step"]
STEPS += ["Trainer.scorers[1].step"]


@only(runs("off") + runs("inprocess", "strict", layouts=("one",)) + runs("ray", layouts=("pair",)))
def test_a_timeline_names_the_part(run: Run) -> None:
    told = run(traced)
    assert set(STEPS) <= set(told)
    assert not any(name.startswith(("Policy.", "Generator.")) for name in told)


@only(runs("torchrun", layouts=("pair",)))
def test_a_timeline_of_torchrun_names_the_part(run: Run) -> None:
    first, *others = run.tell(traced)
    assert set(STEPS) <= set(first)
    assert others == [None]


@RayHelper.worker(group="train")
class Failing:
    """Its constructor fails on one worker."""

    def __init__(self, failing: str) -> None:
        info = RayHelper.current()
        if failing and info.group == failing and info.rank == info.world_size - 1:
            raise ValueError(f"no weights on rank {info.rank}")
        self.set_up(failing)

    @RayHelper.function(group="train")
    def set_up(self, failing: str) -> None:
        if failing == "set_up" and RayHelper.current().rank == 0:
            raise ValueError("no weights in set_up")

    @RayHelper.function(group="train", collect=agreed)
    def step(self) -> int:
        return 2


@RayHelper.worker(group=["train", "rollout"])
class Fragile:
    def __init__(self, failing: str) -> None:
        self.before = Policy()
        self.policy = Failing(failing)
        self.after = Policy()


@story
def failing_constructors() -> Any:
    """On the last worker of a group that hosts role train, or of one that only has the whole's."""
    names = ("everyone", "learners", "samplers", "engines", "others", "set_up")
    seen = {name: raised(Fragile, name) for name in names}
    fragile = Fragile("")
    return seen, fragile.policy.step(), fragile.after.step()


@only(runs("inprocess", "strict", "torchrun", "ray"))
def test_an_exception_of_a_parts_constructor_on_one_worker_is_the_wholes(run: Run) -> None:
    seen, *after = run(failing_constructors)
    hosting = {run.layout.group(role) for role in ("train", "rollout")}
    overlapped = run.layout.name == "overlapping"  # there every process of the others is one of the learners first
    for group in hosting - ({"others"} if overlapped else set()):
        rank = len(run.layout.groups[group].ranks) - 1
        assert says(seen[group], "ValueError", f"no weights on rank {rank}", "Failing", "__init__", repr(group))
    assert says(seen["set_up"], "ValueError", "no weights in set_up", "Failing", "rank 0")
    assert after == [2, 1]
