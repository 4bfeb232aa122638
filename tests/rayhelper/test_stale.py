"""What the driver has set since an object was constructed, and a role's method reads, is refused by name."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper import RayHelper, RoleError
from tests.conftest import session_of
from tests.rayhelper import stale_helper, stale_helper_inner

SCALE = 2.0
GROUPS = {"g": {"device": "CPU", "ranks": 2, "workers": ["train"]}}


@RayHelper.worker(group="train")
class Base:
    def __init__(self) -> None:
        self.offset = 1.0
        self.count = 0
        self.model: Any = None
        self.step = 0

    def shifted(self, x: float) -> float:
        return x + self.offset

    @RayHelper.function(group="train")
    def build(self) -> None:
        self.model = "built"

    @RayHelper.function(group="train")
    def has_model(self) -> bool:
        return self.model == "built"

    @RayHelper.function(group="train")
    def score(self, x: float) -> float:
        return self.shifted(x)

    @RayHelper.function(group="train")
    def scaled(self, x: float) -> float:
        return x * SCALE

    @RayHelper.function(group="train")
    def helped(self, x: float) -> float:
        return stale_helper.scaled(x)

    @RayHelper.function(group="train")
    def offset_by_helper(self, x: float) -> float:
        return x + stale_helper.OFFSET

    @RayHelper.function(group="train")
    def helped_late(self, x: float) -> float:
        from tests.rayhelper.stale_helper import scaled

        return scaled(x)

    @RayHelper.function(group="train")
    def counted_by_helper(self) -> int:
        return stale_helper.count()

    @RayHelper.function(group="train")
    def counted_inside(self) -> int:
        return stale_helper.Counter().count()

    @RayHelper.function(group="train")
    def counted(self) -> int:
        self.count += 1
        return self.count


@RayHelper.worker(group="train")
class Held:
    """What a part holds: it has a method of a name that the part has too."""

    def score(self, x: float) -> float:
        return -x


class Whole(Base):
    def __init__(self) -> None:
        super().__init__()
        self.part: Any = Base()
        self.part.offset = 10.0  # every process runs this
        self.part.held = Held()

    @RayHelper.function(group="train")
    def score_of_part(self, x: float) -> Any:
        return self.part.score(x)

    @RayHelper.function(group="train")
    def score_of_held(self, x: float) -> Any:
        return self.part.held.score(x)

    def loop(self) -> None:
        self.step += 1
        self.model = f"the driver's own, {self.step}"
        self.count = 5


@pytest.fixture(params=["inprocess", "ray"], autouse=True)
def _session(request: pytest.FixtureRequest) -> Iterator[None]:
    with session_of(request, GROUPS):
        yield


def test_an_attribute_that_was_set_from_outside_is_named() -> None:
    whole = Whole()
    assert whole.score(1.0) == [2.0, 2.0]
    whole.offset = 5.0
    with pytest.raises(RoleError, match=r"Base\.score .* reads self\.offset, which was set on the driver"):
        whole.score(1.0)
    assert whole.counted() == [1, 1]  # a method that does not read it
    whole.offset = 1.0
    assert whole.score(1.0) == [2.0, 2.0]


def test_so_is_one_of_a_part_that_its_whole_had_set_in_time() -> None:
    whole = Whole()
    assert whole.part.score(1.0) == [11.0, 11.0]
    whole.part.offset = 5.0
    with pytest.raises(RoleError, match=r"Whole\.part\.score \(role 'train'\) reads self\.offset"):
        whole.part.score(1.0)


def test_what_roles_set_themselves_is_their_own_until_the_driver_sets_it() -> None:
    whole = Whole()
    whole.loop()
    whole.build()  # sets on the workers what the driver has set before
    assert whole.has_model() == [True, True]
    whole.loop()  # with Ray off, the role would see the driver's
    for method, name in ((whole.has_model, "model"), (whole.counted, "count")):
        with pytest.raises(RoleError, match=rf"reads self\.{name}, which was set on the driver since"):
            method()
    whole.build()
    assert whole.has_model() == [True, True]


def test_what_is_set_in_a_part_that_a_role_of_the_whole_uses_is_named() -> None:
    """The call of the part is made on the worker, so that the driver hears of the whole's alone."""
    whole = Whole()
    assert whole.score_of_part(1.0) == [11.0, 11.0]
    whole.part.offset = 5.0
    with pytest.raises(RoleError, match=r"Whole\.score_of_part .* reads Whole\.part\.offset, which was set on the dri"):
        whole.score_of_part(1.0)
    assert whole.score(1.0) == [2.0, 2.0]  # does not use the part
    assert whole.score_of_held(1.0) == [-1.0, -1.0]  # nor does this use what the part's own score reads


class Doubled(Base):
    """A subclass without roles of its own."""

    def scaled(self, x: float) -> Any:  # the driver's
        return [2 * value for value in super().scaled(x)]


def test_an_override_of_the_driver_may_call_the_method_of_the_role() -> None:
    assert Doubled().scaled(3.0) == [12.0, 12.0]


def test_a_global_that_was_set_since_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Whole()
    assert whole.scaled(3.0) == [6.0, 6.0]
    monkeypatch.setattr(f"{__name__}.SCALE", 7.0)
    with pytest.raises(RoleError, match=r"reads the global 'SCALE', which was set to 7\.0 .* still have 2\.0"):
        whole.scaled(3.0)
    assert whole.score(1.0) == [2.0, 2.0]


HELPED = {  # by the method: the global that is set, its module, and the value then and now
    "helped": (stale_helper_inner, "SCALE", 2.0, 7.0),
    "helped_late": (stale_helper_inner, "SCALE", 2.0, 7.0),
    "offset_by_helper": (stale_helper, "OFFSET", 1.0, 5.0),
}


@pytest.mark.parametrize("name", sorted(HELPED))
def test_so_is_one_of_a_helper_module(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, key, before, now = HELPED[name]
    whole = Whole()
    value = getattr(whole, name)(3.0)
    monkeypatch.setattr(module, key, now)
    words = rf"reads the global '{module.__name__}\.{key}', which was set to {now} .* still have {before}"
    with pytest.raises(RoleError, match=words):
        getattr(whole, name)(3.0)
    assert whole.score(1.0) == [2.0, 2.0]  # a method that does not read it
    monkeypatch.setattr(module, key, before)
    assert getattr(whole, name)(3.0) == value


def test_a_function_of_the_helper_that_sets_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_helper_inner, "SCALE", 2.0)
    whole = Whole()
    stale_helper_inner.set_scale(9.0)
    with pytest.raises(RoleError, match=r"SCALE', which was set to 9\.0"):
        whole.helped(3.0)


def lowered() -> None:
    """The driver's own way to lower a rate step by step."""
    global SCALE
    SCALE = SCALE / 2


def test_one_that_the_driver_alone_reads_and_sets_is_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    whole = Whole()
    assert whole.scaled(3.0) == [6.0, 6.0]
    lowered()
    with pytest.raises(RoleError, match=r"reads the global 'SCALE', which was set to 1\.0"):
        whole.scaled(3.0)


def test_counters_caches_and_loggers_of_helpers_are_their_own() -> None:
    whole = Whole()
    stale_helper.count()  # the driver counts too
    stale_helper.logged("renamed")
    for _ in range(2):
        assert len(whole.counted_by_helper()) == len(whole.counted_inside()) == 2
        assert whole.helped(3.0) == [6.0, 6.0]


# Settings that are changed in place


@dataclass
class ModelConfig:
    lr: float = 0.1


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    names: list[str] = field(default_factory=lambda: ["a"])


class Handwritten:
    def __init__(self) -> None:
        self.lr = 0.1


OPTIONS = {"lr": 0.1}
SEEN: list[float] = []
REMEMBERED: dict[str, int] = {}


def remembered(text: str) -> None:
    noted(REMEMBERED, text)


def noted(memory: dict[str, int], text: str) -> None:
    memory[text] = len(text)


@RayHelper.worker(group="train")
class Configured:
    def __init__(self) -> None:
        self.config = Config()
        self.options = {"lr": 0.1, "betas": [0.9, 0.95]}
        self.args = SimpleNamespace(lr=0.1, tensor=torch.ones(1))
        self.own = Handwritten()
        self.history: list[float] = []
        self.meter = {"steps": 0}
        self.kept: dict[str, list[str]] = {}
        self.grouped: defaultdict[str, int] = defaultdict(int)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.recent = deque([1], maxlen=4)
        self.weights = np.ones(3)
        self.models = {"a": [torch.nn.Linear(1, 1)]}

    @RayHelper.function(group="train", execute="first")
    def by_recent(self) -> int:
        return sum(self.recent)

    @RayHelper.function(group="train", execute="first")
    def by_weights(self) -> float:
        return float(self.weights.sum())

    @RayHelper.function(group="train", execute="first")
    def by_optimizer(self) -> Any:
        return self.optimizer.param_groups[0]["lr"]

    @RayHelper.function(group="train", execute="first")
    def by_models(self) -> bool:
        return bool(self.models["a"][0].training)

    @RayHelper.function(group="train", execute="first")
    def by_config(self) -> tuple[float, list[str]]:
        return self.config.model.lr, self.config.names

    @RayHelper.function(group="train", execute="first")
    def by_options(self) -> tuple[Any, Any]:
        return self.options["lr"], self.options["betas"]

    @RayHelper.function(group="train", execute="first")
    def by_args(self) -> float:
        return float(self.args.lr)

    @RayHelper.function(group="train", execute="first")
    def by_own(self) -> float:
        return self.own.lr

    @RayHelper.function(group="train", execute="first")
    def by_global(self) -> float:
        return OPTIONS["lr"]

    @RayHelper.function(group="train", execute="first")
    def counts(self) -> int:
        self.meter["steps"] += 1
        SEEN.append(1.0)
        return self.meter["steps"] + 0 * len(SEEN)

    @RayHelper.function(group="train", execute="first")
    def remembers(self, text: str) -> int:
        remembered(text)
        return len(REMEMBERED) and len(self.tokens_of(text)) and sum(self.grouped.values())

    def tokens_of(self, text: str) -> list[str]:
        kept = self.kept
        kept[text] = text.split()
        return kept[text]

    @RayHelper.function(group="train", execute="first")
    def any_of(self) -> int:
        return len(vars(self))


CHANGED: dict[str, tuple[str, Callable[[Any], Any], str]] = {  # the method, what the driver does, and what is told
    "a field of a field": ("by_config", lambda one: setattr(one.config.model, "lr", 1.0), "self.config.model.lr"),
    "a list of a dataclass": ("by_config", lambda one: one.config.names.append("b"), "self.config.names"),
    "an entry": ("by_options", lambda one: one.options.update(lr=1.0), r"self.options\['lr'\] was changed from 0.1 to"),
    "a new entry": ("by_options", lambda one: one.options.update(new=1.0), r"self.options\['new'\]"),
    "an entry of an entry": ("by_options", lambda one: one.options["betas"].pop(), r"self.options\['betas'\]"),
    "a namespace": ("by_args", lambda one: setattr(one.args, "lr", 1.0), "self.args.lr was changed from 0.1 to 1.0"),
    "an object of settings": ("by_own", lambda one: setattr(one.own, "lr", 1.0), "self.own.lr"),
    "a dict of the module": ("by_global", lambda one: OPTIONS.update(lr=1.0), r"OPTIONS\['lr'\] was changed from 0.1"),
    "a deque": ("by_recent", lambda one: one.recent.append(2), "self.recent"),
    "an array": ("by_weights", lambda one: one.weights.fill(2.0), "self.weights"),
    "a rate of an optimizer": (
        "by_optimizer",
        lambda one: one.optimizer.param_groups[0].update(lr=1.0),
        r"self.optimizer.param_groups\[0\]\['lr'\] was changed from 0.1 to 1.0",
    ),
    "a model in a list": (
        "by_models",
        lambda one: one.models["a"][0].eval(),
        "self.models, which was changed in place",
    ),
    "the data of a model": (
        "by_models",
        lambda one: one.models["a"][0].weight.data.fill_(3.0),
        "self.models, which was changed in place",
    ),
    "read by name": ("any_of", lambda one: one.options.update(lr=1.0), r"self.options\['lr'\]"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_settings_that_are_changed_in_place_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, change, words = CHANGED[name]
    monkeypatch.setitem(OPTIONS, "lr", 0.1)
    configured = Configured()
    getattr(configured, method)()
    change(configured)
    with pytest.raises(RoleError, match=rf"Configured\.{method} .*{words}.* on the driver after"):
        getattr(configured, method)()
    assert configured.counts() == 1  # a method that does not read it


def test_what_roles_change_in_place_themselves_and_what_is_set_back_is_no_change() -> None:
    configured = Configured()
    assert [configured.counts(), configured.counts()] == [1, 2]
    configured.options["lr"] = 1.0
    configured.options["lr"] = 0.1
    assert configured.by_options() == (0.1, [0.9, 0.95])
    SEEN.append(2.0)
    assert configured.counts() == 3
    configured.tokens_of("the driver's")  # a cache that both fill, by another name
    configured.remembers("a b")
    remembered("the driver's")  # and by a function that is passed it
    assert configured.grouped["read"] == 0
    configured.remembers("a c")
