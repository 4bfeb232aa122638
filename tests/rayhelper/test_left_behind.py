"""What a role changes on its workers the driver does not read; what the driver changes in place, roles do not have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rayhelper import RayHelper, RoleError
from tests.conftest import session_of, without_runtime

GROUPS = {"g": {"device": "CPU", "ranks": 1, "workers": ["train"]}}


class Fields:
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(2, 1)
        self.frozen = torch.nn.Linear(2, 1).requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.lin.parameters(), lr=0.1)
        self.count = 0
        self.history: list[float] = []
        self.options = {"lr": 0.1}
        self.cache: Any = None
        self.untouched = [1]


class Steps(Fields):
    @RayHelper.function(group="train", execute="first")
    def step(self) -> float:
        loss = (self.lin(torch.ones(4, 2)) - self.frozen(torch.ones(4, 2))).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self._note(loss.item())
        return float(loss.item())

    def _note(self, loss: float) -> None:
        self.count += 1
        self.history.append(loss)
        self.options["last"] = loss
        self.cache = loss

    @RayHelper.function(group="train", execute="first")
    def counted(self) -> int:
        return self.count + len(self.history)


def loss_of(model: torch.nn.Linear) -> Any:
    return model(torch.ones(4, 2)).pow(2).mean()


def learn(model: torch.nn.Linear, frozen: Any) -> None:
    loss_of(model).backward()


@RayHelper.worker(group="train")
class Giving(Fields):
    @RayHelper.function(group="train", execute="first")
    def loss(self) -> float:
        return float(loss_of(self.lin))

    @RayHelper.function(group="train", execute="first")
    def learn(self) -> None:
        learn(self.lin, frozen=self.frozen)

    @RayHelper.function(group="train", execute="first")
    def learn_by_other_names(self) -> None:
        lin, frozen = self.lin, self.frozen
        learn(frozen=frozen, model=lin)


@RayHelper.worker(group="train")
class Plain(Steps):
    pass


@RayHelper.worker(group="train")
class Module(Steps, torch.nn.Module):
    pass


@pytest.fixture(params=["inprocess", "ray"])
def _session(request: pytest.FixtureRequest) -> Iterator[None]:
    with session_of(request, GROUPS):
        yield


@pytest.mark.usefixtures("_session")
@pytest.mark.parametrize("cls", [Plain, Module])
@pytest.mark.parametrize("name", ["count", "history", "options", "lin"])
def test_the_driver_is_told_that_the_workers_have_another_value(cls: Any, name: str) -> None:
    trained = cls()
    assert getattr(trained, name) is not None, "nothing has changed it yet"
    trained.step()
    words = rf"{cls.__name__}\.{name} differs from the workers' value: Steps\.step \(role 'train'\) has changed it"
    with pytest.raises(AttributeError, match=words):
        getattr(trained, name)
    assert trained.counted() == 2, "roles read their own"
    assert trained.untouched == [1]
    assert trained.frozen is not None
    assert trained.cache is None, "a place for what comes"


@pytest.mark.usefixtures("_session")
@pytest.mark.parametrize("method", ["learn", "learn_by_other_names"])
def test_a_model_that_a_function_trains_is_told_as_well(method: str) -> None:
    giving = Giving()
    giving.loss()
    assert giving.lin is not None, "which trains nothing"
    getattr(giving, method)()
    with pytest.raises(AttributeError, match=rf"Giving\.lin differs from the workers' value: Giving\.{method} \(role"):
        _ = giving.lin
    assert giving.frozen is not None


@pytest.mark.usefixtures("_session")
def test_an_untrained_state_dict_is_not_saved() -> None:
    trained = Module()
    assert len(trained.state_dict()) == 4
    trained.step()
    with pytest.raises(AttributeError, match=r"Module\.state_dict\(\) differs from the workers' value"):
        trained.state_dict()


@pytest.mark.usefixtures("_session")
def test_what_the_driver_has_set_is_its_own() -> None:
    trained = Plain()
    trained.cache = 5
    trained.step()
    assert trained.cache == 5
    trained.count = 5
    with pytest.raises(RoleError, match=r"Steps\.step .* reads self\.count, which was set on the driver since"):
        trained.step()


@RayHelper.worker(group="train")
class Whole:
    def __init__(self) -> None:
        self.parts = [Plain()]
        self.rows: Any = None
        self.prepare()

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        self.rows = [1, 2]

    @RayHelper.function(group="train", execute="first")
    def steps(self) -> float:
        return sum(part.step() for part in self.parts)

    @RayHelper.function(group="train", execute="first")
    def fit(self) -> None:
        part = self.parts[0]
        part.lin(torch.ones(4, 2)).sum().backward()
        part.optimizer.step()

    @RayHelper.function(group="train", execute="first")
    def num_rows(self) -> int:
        return len(self.rows)


@pytest.mark.usefixtures("_session")
@pytest.mark.parametrize(("method", "names"), [("steps", ["count", "history", "lin"]), ("fit", ["lin"])])
def test_what_a_role_of_the_whole_changes_in_a_part_is_told_as_well(method: str, names: list[str]) -> None:
    whole = Whole()
    getattr(whole, method)()
    for name in names:
        with pytest.raises(AttributeError, match=rf"Plain\.{name} differs .*: Whole\.{method} .* has changed it there"):
            getattr(whole.parts[0], name)
    assert whole.parts[0].untouched == [1]


class Loop:
    """A loop of somebody who knows no roles."""

    def __init__(self) -> None:
        self.lin = torch.nn.Linear(2, 1)
        self.num_steps = 0
        self.callbacks: defaultdict[str, list[Any]] = defaultdict(list)

    def on(self, event: str, callback: Any) -> None:
        self.callbacks[event] = [callback]

    def run(self) -> None:
        lin = self.lin
        self.loss = lin(torch.ones(4, 2)).sum()
        self.loss.backward()
        torch.optim.SGD(lin.parameters(), lr=0.1).step()
        self.num_steps += 1
        for callback in self.callbacks["step"]:
            callback(self)


@RayHelper.worker(group="train")
class Inheriting(Loop):
    @RayHelper.function(group="train", execute="first")
    def run(self) -> None:
        super().run()

    @RayHelper.function(group="train", execute="first")
    def on(self, event: str, callback: Any) -> None:
        Loop.on(self, event, callback)

    @RayHelper.function(group="train", execute="first")
    def counted(self) -> int:
        return self.num_steps


@RayHelper.worker(group="train")
class Naming(Loop):
    @RayHelper.function(group="train", execute="first")
    def run(self) -> None:
        Loop.run(self)


@pytest.mark.usefixtures("_session")
@pytest.mark.parametrize("cls", [Inheriting, Naming])
def test_what_an_inherited_method_changes_is_told_as_well(cls: Any) -> None:
    loop = cls()
    loop.run()
    for name in ("num_steps", "lin"):
        with pytest.raises(AttributeError, match=rf"{name} differs from the workers' value: {cls.__name__}\.run"):
            getattr(loop, name)
    with pytest.raises(AttributeError, match=rf"{cls.__name__}\.run \(role 'train'\) sets self\.loss"):
        _ = loop.loss


@pytest.mark.usefixtures("_session")
def test_a_callback_that_the_workers_do_not_have_is_refused() -> None:
    seen: list[int] = []
    loop = Naming()
    _ = loop.callbacks["read"]  # which adds nothing but an empty list
    loop.run()
    loop.on("step", seen.append)
    with pytest.raises(RoleError, match=r"of which self\.callbacks\['step'\] was changed on the driver"):
        loop.run()
    other = Inheriting()
    other.on("step", lambda it: setattr(it, "num_steps", 10))
    other.run()
    assert other.counted() == 10


@pytest.mark.usefixtures("_session")
def test_what_a_method_of_the_driver_has_set_in_construction_is_not_read_by_roles() -> None:
    with pytest.raises(
        RoleError, match=r"reads self\.rows, which was set on the driver by a method of the role 'driver'"
    ):
        Whole().num_rows()


def loads(it: Any) -> None:
    it.lin.load_state_dict({name: torch.zeros_like(value) for name, value in it.lin.state_dict().items()})


def trains(it: Any) -> None:
    torch.optim.SGD(it.lin.parameters(), lr=1.0).zero_grad()
    for weight in it.lin.parameters():
        weight.grad = torch.ones_like(weight)
    torch.optim.SGD(it.lin.parameters(), lr=1.0).step()


@pytest.mark.usefixtures("_session")
@pytest.mark.parametrize("cls", [Plain, Module])
@pytest.mark.parametrize(
    "change",
    [loads, trains, lambda it: it.lin.double(), lambda it: it.lin.eval(), lambda it: it.lin.requires_grad_(False)],
)
def test_a_module_that_the_driver_changes_in_place_is_named(cls: Any, change: Any) -> None:
    changed = cls()
    change(changed)
    with pytest.raises(RoleError, match=r"Steps\.step .* reads self\.lin, which was changed in place on the driver"):
        changed.step()
    assert changed.counted() == 0, "which does not read it"


@pytest.mark.parametrize("cls", [Plain, Module])
def test_with_ray_off_there_is_one_object(cls: Any) -> None:
    with without_runtime():
        trained = cls()
        trained.step()
        assert [trained.count, len(trained.history)] == [1, 1]
        assert trained.lin.weight.shape == (1, 2)
