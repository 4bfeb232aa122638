"""What a role does with parts is noticed however its object holds them, and however the code comes by them."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import Trainer, TrainingArguments

from rayhelper import RayHelper, RoleError
from tests.conftest import without_runtime

GROUPS = {"g": {"device": "CPU", "ranks": 1, "workers": ["train"]}}


@RayHelper.worker(group="train")
class Part:
    def __init__(self) -> None:
        self.scale = 1.0
        self.count = 0
        self.history: list[float] = []
        self.lin = torch.nn.Linear(1, 1)

    @RayHelper.function(group="train", execute="first")
    def used(self) -> float:
        self.count += 1
        return self.scale

    @RayHelper.function(group="train", execute="first")
    def loss(self) -> Any:
        return self.lin(torch.ones(1, 1)).sum()


@dataclass
class Box:
    part: Any


class Pair(NamedTuple):
    part: Any


class Plain:
    """An object without roles, whose methods use the part."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def used(self) -> float:
        return self.part.used()  # type: ignore[no-any-return]


class Meter:
    """An object without roles, whose methods change it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def add(self, value: float) -> None:
        self.seen.append(value)


def used_by(whole: Any) -> float:
    return whole.held.used()  # type: ignore[no-any-return]


def used_of(part: Any) -> float:
    return part.used()  # type: ignore[no-any-return]


def listed(part: Any) -> Any:
    found = defaultdict(list)
    found["a"].append(part)
    return found


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {  # how a part is held, and how a role uses it
    "a deque": (lambda p: deque([p]), lambda w: w.held[0].used()),
    "a set": (lambda p: {p}, lambda w: next(p.used() for p in w.held)),
    "a namespace": (lambda p: SimpleNamespace(part=p), lambda w: w.held.part.used()),
    "a dataclass": (Box, lambda w: w.held.part.used()),
    "a named tuple": (Pair, lambda w: w.held.part.used()),
    "lists in a dict": (lambda p: {"a": [p]}, lambda w: w.held["a"][0].used()),
    "lists in a defaultdict": (listed, lambda w: w.held["a"][0].used()),
    "a list of dicts of tuples": (lambda p: [{"a": (p,)}], lambda w: w.held[0]["a"][0].used()),
    "a plain object": (Plain, lambda w: w.held.part.used()),
    "a method of a plain object": (Plain, lambda w: w.held.used()),
    "a bound method": (lambda p: p.used, lambda w: w.held()),
    "a weak reference": (weakref.ref, lambda w: w.held().used()),
    "a closure": (lambda p: lambda: p, lambda w: w.held().used()),
    "values()": (lambda p: {"a": p}, lambda w: sum(p.used() for p in w.held.values())),
    "items()": (lambda p: {"a": p}, lambda w: sum(p.used() for _, p in w.held.items())),
    "get": (lambda p: {"a": p}, lambda w: w.held.get("a").used()),
    "zip": (lambda p: [p], lambda w: sum(p.used() for p, _ in zip(w.held, [1], strict=True))),
    "enumerate": (lambda p: [p], lambda w: sum(p.used() for _, p in enumerate(w.held))),
    "next": (lambda p: [p], lambda w: next(iter(w.held)).used()),
    "map": (lambda p: [p], lambda w: sum(map(used_of, w.held))),
    "a star": (lambda p: [p], lambda w: used_of(*w.held)),
    "getattr": (lambda p: p, lambda w: getattr(w, "held").used()),  # noqa: B009
    "vars": (lambda p: p, lambda w: vars(w)["held"].used()),
    "its method by getattr": (lambda p: p, lambda w: getattr(w.held, "used")()),  # noqa: B009
    "a walrus": (lambda p: p, lambda w: (part := w.held).used() + 0 * bool(part)),
    "a property": (lambda p: p, lambda w: w.as_property.used()),
    "what a method returns": (lambda p: p, lambda w: w.returned().used()),
    "a helper that has the whole": (lambda p: p, used_by),
    "a helper that has the part": (lambda p: p, lambda w: used_of(w.held)),
}


@RayHelper.worker(group="train")
class Whole:
    def __init__(self, way: str = "") -> None:
        self.part = Part()
        self.other = Part()
        self.held: Any = WAYS[way][0](self.part) if way else {"a": [self.part], "b": [self.other]}
        self.parts = [self.part, self.other]
        self.seen: list[float] = []
        self.state = SimpleNamespace(step=0)
        self.number = 0
        self.meter = Meter()
        self.buffer = torch.zeros(2)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.generator = torch.Generator().manual_seed(1)
        self.rows = iter(range(9))

    @property
    def as_property(self) -> Any:
        return self.held

    def returned(self) -> Any:
        return self.held

    def untouched(self) -> float:
        return self.number

    @RayHelper.function(group="train", execute="first")
    def in_one_place(self) -> float:
        return self.held["a"][0].used()  # type: ignore[no-any-return]

    @RayHelper.function(group="train", execute="first")
    def in_a_loop(self) -> float:
        return sum(one.used() for _, parts in self.held.items() for one in parts)  # type: ignore[no-any-return]

    @RayHelper.function(group="train", execute="first")
    def by_a_local_function(self) -> float:
        def used(part: Any) -> float:
            return part.used()  # type: ignore[no-any-return]

        return sum(map(used, getattr(self, "held")["a"]))  # noqa: B009

    @RayHelper.function(group="train", execute="first")
    def by_what_was_put_there(self) -> float:
        self.now = self.returned().get("a")
        (now,) = self.now
        return now.used()  # type: ignore[no-any-return]

    @RayHelper.function(group="train", execute="first")
    def by_alias(self) -> None:
        seen = self.seen
        seen.append(1.0)

    @RayHelper.function(group="train", execute="first")
    def in_a_namespace(self) -> None:
        self.state.step += 1

    @RayHelper.function(group="train", execute="first")
    def by_setattr(self) -> None:
        setattr(self, "number", 5)  # noqa: B010

    @RayHelper.function(group="train", execute="first")
    def by_its_dict(self) -> None:
        vars(self).update(number=5)

    @RayHelper.function(group="train", execute="first")
    def by_a_plain_object(self) -> None:
        self.meter.add(1.0)

    @RayHelper.function(group="train", execute="first")
    def by_the_tensor(self) -> None:
        self.buffer.add_(1.0)

    @RayHelper.function(group="train", execute="first")
    def by_initialising(self) -> None:
        torch.nn.init.constant_(self.model.weight, 4.0)

    @RayHelper.function(group="train", execute="first")
    def by_loading(self) -> None:
        self.model.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.ones(1)})

    @RayHelper.function(group="train", execute="first")
    def by_each_weight(self) -> None:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.fill_(3.0)

    @RayHelper.function(group="train", execute="first")
    def by_the_scheduler(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    @RayHelper.function(group="train", execute="first")
    def draws(self) -> float:
        return float(torch.rand((), generator=self.generator))

    @RayHelper.function(group="train", execute="first")
    def takes_a_row(self) -> int:
        return next(self.rows)

    @RayHelper.function(group="train", execute="first")
    def changes_copies(self) -> None:
        logits = self.model.forward(torch.ones(1, 1)).detach()
        logits.div_(2.0)
        self.buffer.clone().add_(1.0)
        torch.relu_(self.buffer * 2)
        torch.cat([self.buffer, self.buffer]).zero_()
        next(part for part in self.parts if part is self.part)
        [*self.seen].append(1.0)
        (self.seen + self.seen).clear()
        self.seen.copy().append(3.0)

    @RayHelper.function(group="train", execute="first")
    def learns(self) -> None:
        with torch.no_grad():
            self.other.loss()
        self.part.loss().backward()


def _with_role(way: str) -> Any:
    """A class whose role uses the part in one way: its source has no other."""
    use = WAYS[way][1]

    @RayHelper.worker(group="train")
    class Uses(Whole):
        @RayHelper.function(group="train", execute="first")
        def uses(self) -> float:
            return use(self)  # type: ignore[no-any-return]

        @RayHelper.function(group="train", execute="first")
        def uses_not(self) -> float:
            return self.untouched()

    return Uses(way)


@RayHelper.worker(group="train")
class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(1, 1)
        self.scale = 1.0

    def forward(self, x: Any) -> Any:
        return self.lin(x) * self.scale

    @RayHelper.function(group="train", execute="first")
    def fit(self) -> None:
        self(torch.ones(1, 1)).sum().backward()
        self.zero_grad()


@RayHelper.worker(group="train")
class OfNetwork:
    def __init__(self) -> None:
        self.network = Network()

    @RayHelper.function(group="train", execute="first")
    def fit(self) -> None:
        self.network.fit()


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with RayHelper.session(GROUPS, runtime="inprocess"):
        yield


@pytest.mark.parametrize("way", WAYS)
def test_a_part_is_noticed_however_it_is_held_and_used(way: str) -> None:
    with without_runtime():
        off = _with_role(way)
        assert (off.uses(), off.part.count) == (1.0, 1)
    whole = _with_role(way)
    assert (whole.uses_not(), whole.part.count) == (0, 0)
    assert whole.uses() == 1.0
    with pytest.raises(AttributeError, match=r"Part\.count differs .*: .*uses \(role 'train'\) has changed it there"):
        _ = whole.part.count
    whole.part.scale = 0.5
    with pytest.raises(RoleError, match=r"uses \(role 'train'\) reads Uses\.part\.scale, which was set on the driver"):
        whole.uses()
    assert whole.uses_not() == 0


@pytest.mark.parametrize("name", ["in_one_place", "in_a_loop", "by_a_local_function", "by_what_was_put_there"])
def test_a_part_is_noticed_whatever_a_method_does_to_come_by_it(name: str) -> None:
    whole = Whole()
    getattr(whole, name)()
    with pytest.raises(AttributeError, match=rf"Part\.count differs .*: Whole\.{name} "):
        _ = whole.part.count
    whole.part.scale = 0.5
    with pytest.raises(RoleError, match=rf"Whole\.{name} .* reads Whole\.part\.scale, which was set on the driver"):
        getattr(whole, name)()


def test_a_part_in_another_place_is_not_meant() -> None:
    whole = Whole()
    whole.other.scale = 0.5
    assert (whole.in_one_place(), whole.other.count) == (1.0, 0)


CHANGED = {  # by the method: the attribute that it changes
    **{"by_alias": "seen", "in_a_namespace": "state", "by_setattr": "number", "by_its_dict": "number"},
    **{"by_a_plain_object": "meter", "by_the_tensor": "buffer", "by_initialising": "model", "by_loading": "model"},
    **{"by_each_weight": "model", "by_the_scheduler": "optimizer", "draws": "generator", "takes_a_row": "rows"},
}


@pytest.mark.parametrize(("method", "name"), CHANGED.items())
def test_what_a_role_changes_of_its_own_object_is_noticed_under_other_names(method: str, name: str) -> None:
    whole = Whole()
    getattr(whole, method)()
    with pytest.raises(AttributeError, match=rf"Whole\.{name} differs from the workers' value: Whole\.{method} "):
        getattr(whole, name)


def test_what_a_role_makes_of_its_attributes_is_not_they_themselves() -> None:
    whole = Whole()
    whole.changes_copies()
    assert (whole.seen, whole.buffer.tolist(), len(whole.parts)) == ([], [0.0, 0.0], 2)
    assert whole.model.weight.shape == (1, 1)


def test_a_part_whose_loss_is_trained_elsewhere_has_learned() -> None:
    whole = Whole()
    whole.learns()
    assert whole.other.lin.weight.shape == (1, 1), "which has no gradients there"
    with pytest.raises(AttributeError, match=r"Part\.lin differs from the workers' value: Whole\.learns "):
        _ = whole.part.lin


def test_a_module_of_torch_is_followed_into_what_the_user_wrote_of_it() -> None:
    whole = OfNetwork()
    for _ in range(2):
        whole.fit()
    with pytest.raises(AttributeError, match=r"Network\.state_dict\(\) differs"):
        _ = whole.network.state_dict()
    whole.network.scale = 2.0
    with pytest.raises(
        RoleError, match=r"OfNetwork\.fit .* reads OfNetwork\.network\.scale, which was set on the driv"
    ):
        whole.fit()


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(2) * index}


class Squared(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": super().forward(x).pow(2).mean()}


@RayHelper.worker(group="train")
class WithTrainer:
    """transformers' own Trainer in a role."""

    def __init__(self, folder: str) -> None:
        self.rows = Rows()
        self.model = Squared(2, 1)
        self.other = Squared(2, 1)
        settings = TrainingArguments(folder, max_steps=2, report_to=[], use_cpu=True, save_strategy="no")
        self.trainer = Trainer(self.model, settings, train_dataset=self.rows)

    @RayHelper.function(group="train", execute="first")
    def fit(self) -> float:
        return float(self.trainer.train().training_loss)

    @RayHelper.function(group="train", execute="first")
    def evaluate(self) -> int:
        self.model.train(False)
        return self.trainer.state.global_step


def test_what_a_trainer_of_a_library_trains_is_not_read_on_the_driver(tmp_path: Path) -> None:
    whole = WithTrainer(str(tmp_path))
    assert whole.evaluate() == 0
    assert whole.trainer.model is whole.model
    whole.fit()
    for name in ("model", "trainer"):
        with pytest.raises(AttributeError, match=rf"WithTrainer\.{name} differs from the workers' value: WithTrainer"):
            getattr(whole, name)
    assert len(whole.rows) == 4
    assert whole.other.weight.shape == (1, 2)
    assert whole.evaluate() == 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(2, 2)

    def forward(self, x: Any, beside: Any) -> Any:
        return self.lin(x) + beside[0] + beside[1]


class Stack(torch.nn.Module):
    """Layers in a pipe of functions, and tables that hold each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(8))
        self.tables: list[Any] = [[] for _ in range(40)]
        for table in self.tables:
            table.extend(self.tables)

    def forward(self, x: Any) -> Any:
        beside = (x, x * 2)
        pipe: list[Any] = []
        for layer in self.layers:
            pipe.append(lambda x, layer=layer: layer(x, beside))
        pipe.append(lambda x: sum(x, self.shift(*self.tables)))
        return run_all(pipe, x)

    def shift(self, *tables: Any) -> int:
        return len(max(tables, key=len)) * 0


def run_all(pipe: list[Any], x: Any) -> Any:
    for one in pipe:
        x = one(x)
    return x


@RayHelper.worker(group="train")
class WithStack:
    def __init__(self) -> None:
        self.model = Stack()

    @RayHelper.function(group="train", execute="first")
    def learn(self) -> None:
        self.model(torch.ones(3, 2)).sum().backward()


def test_code_with_ever_more_ways_through_it_is_followed_to_an_end() -> None:
    whole = WithStack()
    whole.learn()
    with pytest.raises(AttributeError, match=r"WithStack\.model differs from the workers' value: WithStack\.learn"):
        _ = whole.model
