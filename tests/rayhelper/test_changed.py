"""What a call changes is observed where it runs, and told to the driver, however the code does it."""

from __future__ import annotations

import collections
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from benchmarks.tiny.text import tiny_tokenizer
from rayhelper import RayHelper
from rayhelper.errors import RoleError
from rayhelper.worker.changed.marks import differ, mark
from rayhelper.worker.changed.objects import Observed
from tests.conftest import session_of

GROUPS = {"g": {"device": "CPU", "ranks": 1, "workers": ["train"]}}


@dataclass
class Episode:
    tokens: list[int]
    reward: float = 0.0


def counting() -> Any:
    seen: list[int] = []
    return lambda self, number: seen.append(number)


@RayHelper.worker(group="train")
class Changing:
    total: ClassVar[int] = 0
    count = counting()

    def __init__(self) -> None:
        self.small, self.large = np.zeros(3), np.zeros(100_000)
        self.number, self.kept, self.untouched = 1, 2, [1]
        self.averaged, self.frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    @RayHelper.function(group="train", execute="first")
    def set(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    @RayHelper.function(group="train", execute="first")
    def copy(self) -> None:
        np.copyto(self.small, 1.0)
        np.copyto(self.large, 1.0)

    @RayHelper.function(group="train", execute="first")
    def average(self) -> None:
        torch._foreach_mul_([weight.data for weight in self.averaged.parameters()], 0.5)

    @RayHelper.function(group="train", execute="first")
    def fail(self, name: str) -> None:
        setattr(self, name, 3)
        raise ValueError("after the change")

    @RayHelper.function(group="train", execute="first")
    def score(self, episodes: list[Episode], options: Any = None, cache: Any = {}) -> int:  # noqa: B006
        episodes[-1].reward = 1.0
        Changing.total += 1
        cache["last"] = 1
        self.count(5)
        return len(episodes)

    @RayHelper.function(group="train", execute="first")
    def look(self, episodes: list[Episode]) -> float:
        return self.frozen(torch.ones(1, 2)).sum().item() + sum(map(len, (one.tokens for one in episodes)))


STATE, NUM_CALLS = {"n": 0}, 0


@dataclass(slots=True)
class Counts:
    calls: int = 0


@dataclass
class Settings:
    seen: list[int]


@RayHelper.worker(group="train")
class Slots:
    __slots__ = ("__dict__", "steps")  # without weak references

    def __init__(self) -> None:
        self.steps = 0

    @RayHelper.function(group="train", execute="first")
    def step(self) -> None:
        self.steps += 1


@RayHelper.worker(group="train")
class Given:
    decay = 1.0

    def __init__(
        self, net: Any, log: list[int], hook: Any, settings: Settings, on_step: Any, unused: list[int]
    ) -> None:
        self.layers = torch.nn.Sequential(net)
        self.log, self.hook, self.seen, self.on_step, self.unused = log, hook, settings.seen, on_step, unused
        self.counts = Counts()
        self.best: float | None = None
        self.model: Any = None

    @RayHelper.function(group="train", execute="first")
    def step(self, number: int) -> None:
        global NUM_CALLS
        NUM_CALLS += 1
        _count()
        self.layers(torch.ones(1, 2)).sum().backward()
        self.log.append(number)
        self.hook(number)
        self.on_step(number)
        self.seen.append(number)
        self.decay = 0.5
        self.counts.calls += 1
        self.best, self.model = 0.5, self.layers

    @RayHelper.function(group="train", execute="first")
    def read(self) -> float:
        return len(self.unused) + sum(self.log) + STATE["n"]


def _count() -> None:
    STATE["n"] += 1


@pytest.fixture(params=["inprocess", "ray"])
def _session(request: pytest.FixtureRequest) -> Iterator[None]:
    with session_of(request, GROUPS):
        yield


@pytest.mark.usefixtures("_session")
def test_what_a_call_has_changed_is_told_with_its_reply(caplog: pytest.LogCaptureFixture) -> None:
    changing = Changing()
    episodes = [Episode([1] * 200) for _ in range(12)]
    with caplog.at_level(logging.WARNING, "rayhelper"):
        changing.look(episodes)
        assert not caplog.records
        for _ in range(2):
            changing.score(episodes, options={"a": 1})
    told = [record.getMessage() for record in caplog.records]
    ours = r"Changing.score (role 'train') changes "
    assert sorted(one.removeprefix(ours).partition(". With Ray off")[0] for one in told) == [
        "its argument 'episodes'",
        "the class attribute Changing.total",
        "the default of argument 'cache' of Changing.score",
        "the variable 'seen' of Changing.count",
    ]
    changing.set("number", 5)
    changing.copy()
    changing.average()
    with pytest.raises(ValueError, match="after the change"):
        changing.fail("kept")
    changing.look(episodes)
    for name, method in {
        **{"number": "set", "small": "copy", "large": "copy"},
        **{"averaged": "average", "kept": "fail"},
    }.items():
        words = rf"Changing\.{name} differs from the workers' value: Changing\.{method} \(role 'train'\) has changed it"
        with pytest.raises(AttributeError, match=words):
            getattr(changing, name)
    assert changing.untouched == [1]
    assert changing.frozen.weight.shape == (2, 2)


@pytest.mark.usefixtures("_session")
def test_what_the_driver_holds_by_other_names_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    net, log, heard, settings, counter = torch.nn.Linear(2, 1), [0], [0], Settings([0]), collections.Counter[int]()
    given = Given(net, log, heard.append, settings, lambda number: counter.update([number]), [1])
    with caplog.at_level(logging.WARNING, "rayhelper"):
        given.read()
        assert not caplog.records
        for number in range(2):
            given.step(number)
        given.read()
    told = [record.getMessage() for record in caplog.records]
    ours = "Given.step (role 'train') changes "
    assert sorted(one.removeprefix(ours).partition(". With Ray off")[0] for one in told) == [
        "self.best, which Given.__init__ has set to None",
        "self.decay, which has a default in class Given",
        *(f"the argument '{name}' of Given(...)" for name in ("hook", "log", "net", "on_step", "settings")),
        "the global NUM_CALLS",
        "the global STATE",
    ]
    with pytest.raises(AttributeError, match=r"Given\.counts differs from the workers' value: Given\.step"):
        _ = given.counts
    slots = Slots()
    slots.step()
    with pytest.raises(AttributeError, match=r"Slots\.steps differs from the workers' value: Slots\.step"):
        _ = slots.steps
    other = Slots()
    other.steps = 5
    with pytest.raises(RoleError, match=r"reads self\.steps, which was set on the driver"):
        other.step()


class Rows:
    """A data set that keeps what it has read."""

    def __init__(self) -> None:
        self.names, self._cache = ["a", "b"], dict[int, str]()

    def __getitem__(self, place: int) -> str:
        return self._cache.setdefault(place, self.names[place])


def test_values_are_read_in_full_in_the_first_calls_of_a_method_and_seldom_later() -> None:
    placed = SimpleNamespace(identity=SimpleNamespace(address="one"))
    held = SimpleNamespace(_rayhelper=placed, numbers=[0], rows=Rows(), last=0)
    observed = Observed(iter([held]))
    found = []
    for call in range(1, 65):
        assert held.rows[call % 2] in "ab"
        held.numbers.append(call)
        held.last = call
        changes = observed.changes("T.add")[0]["one"]
        assert "last" in changes, "what is set anew is seen in every call"
        assert "rows" not in changes, "what is kept of rows may be read again"
        found += [call] * ("numbers" in changes)
    assert found == [*range(1, 9), 64]


def _normalised() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module(torch.ones(3, 2)).sum().backward()
    return module


def _stepped() -> Any:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.AdamW([weight])


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {  # made, changed, only read
    "a list": (lambda: [[1], 2], lambda v: v[0].append(1), lambda v: sorted(v[0])),
    "one of many": (lambda: list(range(9000)), lambda v: v.__setitem__(4321, 0), sum),
    "a deque": (lambda: collections.deque([1]), lambda v: v.rotate() or v.append(1), list),
    "a set": (lambda: {1, 2}, lambda v: v.add(3), len),
    "a defaultdict": (lambda: collections.defaultdict(list), lambda v: v["a"].append(1), lambda v: v["b"]),
    "a dict": (lambda: {"a": {"b": 1}}, lambda v: v["a"].update(b=2), lambda v: dict(v)),
    "a namespace": (lambda: SimpleNamespace(a=1), lambda v: setattr(v, "a", 2), vars),
    "a dataclass": (lambda: Episode([1]), lambda v: v.tokens.append(2), repr),
    "an array": (lambda: np.zeros((4, 4)), lambda v: np.copyto(v[2:], 1), np.sum),
    "a tensor": (lambda: torch.zeros(4), lambda v: v.add_(1), torch.sum),
    "its data": (lambda: torch.zeros(4), lambda v: v.data.add_(1), torch.sum),
    "bfloat16": (lambda: torch.zeros(3, dtype=torch.bfloat16), lambda v: v.data.add_(1), torch.sum),
    "a module": (lambda: torch.nn.Linear(2, 2), lambda v: v(torch.ones(1, 2)).sum().backward(), lambda v: v.eval()),
    "its buffers": (_normalised, lambda v: v(torch.zeros(3, 2)), lambda v: v.state_dict()),
    "an optimizer": (_stepped, lambda v: v.step(), lambda v: v.state_dict()),
    "its settings": (_stepped, lambda v: v.param_groups[0].update(lr=1.0), lambda v: v.state_dict()),
    "a generator of torch": (torch.Generator, lambda v: torch.rand(1, generator=v), lambda v: v.get_state()),
    "a generator of NumPy": (lambda: np.random.default_rng(1), lambda v: v.random(), repr),
    "a generator of Python": (lambda: random.Random(1), lambda v: v.random(), lambda v: v.getstate()),
    "an iterator": (lambda: iter([1, 2]), next, repr),
    "a generator function": (lambda: (one for one in [1, 2]), next, repr),
    "inference": (lambda: torch.inference_mode()(torch.ones)(2), lambda v: v.data.fill_(2.0), torch.sum),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_mark_tells_whether_a_value_was_changed(name: str) -> None:
    make, change, read = CHANGES[name]
    value = make()
    before = mark(value)
    read(value)
    assert not differ(before, mark(value))
    change(value)
    assert differ(before, mark(value))


def test_a_value_that_cannot_be_read_fails_no_call_and_is_no_change() -> None:
    class Moving(dict[str, int]):
        """As one that another thread adds to while it is read."""

        def items(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    moving = {"a": Moving(b=1)}
    before = mark(moving)
    assert not differ(before, mark(moving))
    moving["c"] = Moving()
    assert not differ(before, mark(moving))


def test_a_tokenizer_that_is_used_is_not_changed() -> None:
    tokenizer = tiny_tokenizer()
    before = mark(tokenizer)
    tokenizer(["a b", "a"], padding=True, truncation=True, max_length=2, return_tensors="pt")
    tokenizer.decode([1, 2])
    tokenizer.pad([{"input_ids": [1]}, {"input_ids": [1, 2]}])
    assert not differ(before, mark(tokenizer))
    tokenizer.padding_side = "left" if tokenizer.padding_side == "right" else "right"
    assert differ(before, mark(tokenizer))
