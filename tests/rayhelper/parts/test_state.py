"""A part is one object on each process that has the whole: its state, its own parts, and who else holds it."""

from __future__ import annotations

from typing import Any

from rayhelper import RayHelper
from tests.rayhelper.parts.stories import Run, agreed, raised, says, story


@RayHelper.worker(group="train")
class Policy:
    """A counter."""

    def __init__(self, start: int = 0) -> None:
        self.steps = start

    @RayHelper.function(group="train", collect=agreed)
    def step(self, by: int = 1) -> int:
        self.steps += by
        return self.steps

    @RayHelper.function(group="train", collect=agreed)
    def counted(self) -> int:
        return self.steps


@RayHelper.worker(group="rollout")
class Generator:
    """Reads the state of a sibling that its constructor was given."""

    def __init__(self, policy: Policy, settings: dict[str, Any] | None = None) -> None:
        self.policy = policy
        self.settings = settings or {}
        self.generated = 0

    @RayHelper.function(group="rollout", collect=agreed)
    def seen(self) -> int:
        self.generated += 1
        return self.policy.steps

    @RayHelper.function(group="rollout", collect=agreed)
    def seen_in_settings(self) -> int:
        return self.settings["policies"][0].steps  # type: ignore[no-any-return]


@RayHelper.worker(group=["train", "rollout", "judge"])
class Trainer:
    def __init__(self, start: int = 0) -> None:
        self.policy = Policy(start)
        self.generator = Generator(self.policy, settings={"policies": [self.policy]})

    @RayHelper.function(group="rollout", collect=agreed)
    def counted_by_rollout(self) -> int:
        return self.policy.steps

    @RayHelper.function(group="judge", collect=agreed)
    def counted_by_judge(self) -> int:
        return self.policy.steps

    @RayHelper.function(group="rollout", collect=agreed)
    def is_one_object(self) -> bool:
        return self.generator.policy is self.policy is self.generator.settings["policies"][0]

    @RayHelper.function(group="judge", collect=agreed)
    def is_one_object_for_judge(self) -> bool:
        return self.generator.policy is self.policy


@story
def counted_twice() -> Any:
    trainer = Trainer()
    trainer.policy.step()
    trainer.policy.step()
    return trainer.policy.counted(), trainer.counted_by_rollout(), trainer.counted_by_judge()


def test_a_part_that_the_driver_calls_is_the_one_that_the_whole_reads(run: Run) -> None:
    by_rollout = 2 if run.shares_state("train", "rollout") else 0
    by_judge = 2 if run.shares_state("train", "judge") else 0
    assert run(counted_twice) == [2, by_rollout, by_judge]


@story
def built_with_arguments() -> Any:
    trainer = Trainer(3)
    return trainer.policy.counted(), trainer.counted_by_rollout(), trainer.policy.step(by=4)


def test_the_arguments_of_a_parts_constructor_are_the_same_everywhere(run: Run) -> None:
    assert run(built_with_arguments) == [3, 3, 7]


@RayHelper.worker(group="judge")
class Judge:
    def __init__(self) -> None:
        self.judged = 0

    @RayHelper.function(group="judge", collect=agreed)
    def judge(self) -> int:
        self.judged += 1
        return self.judged


@story
def read_on_the_driver() -> Any:
    judge = Judge()
    return judge.judged, judge.judge(), raised(lambda: judge.judged)


def test_what_a_role_has_changed_is_not_read_where_no_process_of_it_is(run: Run) -> None:
    told = run.tell(read_on_the_driver)
    outside = {"three": 1, "overlapping": 1}.get(run.layout.name, 0)  # processes of torchrun that do not host the role
    if run.runtime != "torchrun":
        outside = 0 if run.is_off else 1
    reads = sorted((read for _, _, read in told), key=str)
    assert all((before, judged) == (0, 1) for before, judged, _ in told)
    assert sum("raised" in read for read in reads) == outside
    for read in reads:
        assert read == {"returned": 1} or "Judge.judge (role 'judge') has changed it" in read["text"]


@story
def two_wholes() -> Any:
    one, two = Trainer(1), Trainer(10)
    one.policy.step()
    two.policy.step(by=5)
    return one.policy.counted(), two.policy.counted(), Trainer().policy.counted()


def test_parts_of_two_wholes_share_nothing(run: Run) -> None:
    assert run(two_wholes) == [2, 15, 0]


@story
def given_to_a_sibling() -> Any:
    trainer = Trainer(5)
    trainer.policy.step()
    on_driver = trainer.generator.policy is trainer.policy
    seen = trainer.generator.seen(), trainer.generator.seen_in_settings()
    return on_driver, trainer.is_one_object(), trainer.is_one_object_for_judge(), seen


def test_a_part_given_to_the_constructor_of_another_is_the_workers_own_object(run: Run) -> None:
    seen = 6 if run.shares_state("train", "rollout") else 5
    assert run(given_to_a_sibling) == [True, True, True, [seen, seen]]


@RayHelper.worker(group="train")
class Memory:
    def __init__(self, name: str) -> None:
        self.notes = [name]

    @RayHelper.function(group="train", execute="first")
    def note(self, text: str) -> list[str]:
        self.notes.append(text)
        return self.notes


@RayHelper.worker(group=["train", "judge"])
class Crew:
    """A part with parts."""

    def __init__(self, name: str) -> None:
        self.memory = Memory(name)
        self.policy = Policy(len(name))

    @RayHelper.function(group="train", execute="first")
    def noted(self) -> list[str]:
        return self.memory.notes

    @RayHelper.function(group="judge", execute="first")
    def counted_by_judge(self) -> int:
        return self.policy.steps


@RayHelper.worker(group=["train", "judge", "rollout"])
class Company:
    """A whole with parts of parts, beside parts of the same class."""

    def __init__(self) -> None:
        self.policy = Policy(100)
        self.first = Crew("a")
        self.second = Crew("bb")
        self.shared = Generator(self.second.policy)

    @RayHelper.function(group="train", execute="first")
    def all_steps(self) -> list[int]:
        return [self.policy.steps, self.first.policy.steps, self.second.policy.steps]


@story
def parts_of_parts() -> Any:
    company = Company()
    company.policy.step()
    company.first.policy.step()
    company.second.policy.step()
    company.second.policy.step()
    company.first.memory.note("x")
    company.second.memory.note("y")
    noted = company.first.noted(), company.second.noted()
    return company.all_steps(), noted, company.second.counted_by_judge(), company.shared.seen()


def test_parts_have_parts_of_their_own(run: Run) -> None:
    by_judge = 4 if run.shares_state("train", "judge") else 2
    by_rollout = 4 if run.shares_state("train", "rollout") else 2
    assert run(parts_of_parts) == [[101, 2, 4], [["a", "x"], ["bb", "y"]], by_judge, by_rollout]


class Holder:
    """An object without roles that builds a part for the whole."""

    def __init__(self, start: int) -> None:
        self.policy = Policy(start)


def built(start: int) -> Policy:
    return Policy(start)


@RayHelper.worker(group="train")
class Several:
    """Parts of one class, held in every way."""

    def __init__(self) -> None:
        self.one = Policy(1)
        self.two = Policy(2)
        self.listed = [Policy(10 * k) for k in range(3)]
        self.named = {"a": Policy(100), "b": Policy(200)}
        self.holder = Holder(300)
        self.from_function = built(400)
        self.again = self.listed[1]

    @RayHelper.function(group="train", execute="first")
    def all_steps(self) -> list[int]:
        held = [self.one, self.two, *self.listed, *self.named.values(), self.holder.policy, self.from_function]
        return [policy.steps for policy in held]


@story
def parts_of_one_class() -> Any:
    several = Several()
    several.two.step()
    several.listed[1].step()
    several.again.step()
    several.named["b"].step()
    several.holder.policy.step()
    several.from_function.step(by=3)
    counted = several.one.counted(), several.listed[2].counted(), several.named["a"].counted()
    return several.all_steps(), counted


def test_parts_of_one_class_do_not_share_state_wherever_they_are_held(run: Run) -> None:
    assert run(parts_of_one_class) == [[1, 3, 0, 12, 20, 100, 201, 301, 403], [1, 20, 100]]


@RayHelper.worker(group="train")
class Listener:
    """A part that is given its whole."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    @RayHelper.function(group="train", execute="first")
    def heard(self) -> tuple[bool, int]:
        return self.whole.listener is self, self.whole.said


@RayHelper.worker(group="train")
class Speaker:
    def __init__(self) -> None:
        self.said = 0
        self.listener = Listener(self)

    @RayHelper.function(group="train")
    def say(self) -> None:
        self.said += 1


@story
def a_whole_given_to_its_part() -> Any:
    speaker = Speaker()
    speaker.say()
    return speaker.listener.whole is speaker, speaker.listener.heard()


def test_a_whole_may_give_itself_to_its_part(run: Run) -> None:
    assert run(a_whole_given_to_its_part) == [True, [True, 1]]


@RayHelper.worker(group="train")
class Swapped:
    """Puts a part in the place of another while it is constructed, and moves it later on the driver."""

    def __init__(self) -> None:
        self.policy = Policy(1)
        self.policy = Policy(2)

    @RayHelper.function(group="train", execute="first")
    def counted(self) -> int:
        return self.policy.steps


@story
def a_part_in_the_place_of_another() -> Any:
    swapped = Swapped()
    kept, swapped.policy = swapped.policy, Policy(50)  # the last one is a whole of its own
    return kept.step(), swapped.policy.counted(), raised(swapped.counted)


def test_a_call_goes_to_the_object_and_not_to_what_has_its_name_now(run: Run) -> None:
    first, moved, counted = run(a_part_in_the_place_of_another)
    assert [first, moved] == [3, 50]
    if run.runtime in ("off", "torchrun"):  # the driver's code runs where the role does
        assert counted == {"returned": 50}
    else:
        assert says(counted, "RoleError", "Swapped.counted", "self.policy", "set on the driver")
