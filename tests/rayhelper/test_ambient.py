"""What the driver's process has set holds in the code of its workers: seeds, torch's defaults, modes, logging."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayhelper import RayHelper
from rayhelper.errors import DispatchError, WorkerError
from rayhelper.values.lost import check_arguments, check_value
from rayhelper.worker.ambient import DriverMode
from rayhelper.worker.messages import Messages
from rayhelper.worker.patches import PRECISIONS, backend_of, precisions
from tests.conftest import RaySession, without_runtime

TWO = {"g": {"device": "CPU", "ranks": 2, "workers": ["net"]}}
FORMAT = "%(levelname)s|%(message)s"


@RayHelper.worker(group="net")
class Net:
    """Draws when it is built and when it is called."""

    def __init__(self) -> None:
        self.drawn = self.draw()
        self.weight = torch.nn.Linear(3, 3).weight.detach()

    def draw(self) -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    @RayHelper.function(group="net")
    def built_with(self) -> list[Any]:
        return [*self.drawn, self.weight.tolist()]

    @RayHelper.function(group="net")
    def drawn_now(self) -> list[float]:
        return self.draw()

    @RayHelper.function(group="net")
    def drawn_with(self, generator: Any) -> float:
        if isinstance(generator, dict):
            return self.drawn_with(generator["its"])
        if isinstance(generator, torch.Generator):
            return float(torch.rand((), generator=generator))
        return float(generator.random())

    @RayHelper.function(group="net")
    def seeded(self, seed: int) -> list[float]:
        seed_all(seed)
        return self.draw()

    @RayHelper.function(group="net")
    def folder(self, goes_to: str | None = None) -> str:
        if goes_to is not None:
            os.chdir(goes_to)
        return os.getcwd()

    @RayHelper.function(group="net")
    def defaults(self) -> list[Any]:
        cudnn = torch.backends.cudnn
        return [
            str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            (cudnn.deterministic, cudnn.benchmark),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.is_anomaly_enabled(),
            np.geterr()["divide"],
        ]

    @RayHelper.function(group="net")
    def arithmetic(self) -> list[Any]:
        matmul = torch.backends.cuda.matmul
        small = torch.full((1,), 1e-40, dtype=torch.float32)
        return [
            torch.get_num_threads(),
            torch.backends.mkldnn.enabled,
            (torch.backends.fp32_precision, matmul.fp32_precision),
            matmul.allow_bf16_reduced_precision_reduction,
            float(small * 1.0) == 0.0,
        ]

    @RayHelper.function(group="net", execute="first")
    def imports(self, name: str) -> int:
        return int(importlib.import_module(name).VALUE)

    @RayHelper.function(group="net")
    def modes(self, _: int = 0) -> list[Any]:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        weight = torch.ones(2, requires_grad=True)
        return [str(product.dtype), (weight * 2).requires_grad, torch.is_inference_mode_enabled()]

    @RayHelper.function(group="net")
    def handlers_of(self, name: str) -> int:
        return len(logging.getLogger(name).handlers)

    @RayHelper.function(group="net")
    def warned(self) -> str:
        try:
            warnings.warn("an old name", UserWarning, stacklevel=1)
        except UserWarning as error:
            return str(error)
        return "went on"

    @RayHelper.function(group="net")
    def logging_of(self, name: str) -> list[Any]:
        root = logging.getLogger()
        formats = [handler.formatter._fmt for handler in root.handlers if handler.formatter]
        return [root.level, logging.getLogger(name).getEffectiveLevel(), formats]


@pytest.fixture(params=["inprocess", "strict", "ray"])
def session(request: pytest.FixtureRequest) -> Any:
    """Opens two workers."""
    if request.param == "ray":
        ray_session: RaySession = request.getfixturevalue("ray_session")
        return lambda: ray_session(TWO)
    return lambda: RayHelper.session(TWO, runtime="inprocess", strict=request.param == "strict")


@pytest.fixture
def on_ray(ray_session: RaySession) -> Iterator[None]:
    with ray_session(TWO):
        yield


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Tests set what holds for the whole process."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_seeds_of_the_driver_hold_on_every_worker_and_repeat(session: Any) -> None:
    with without_runtime():
        seed_all(5)
        off = Net().built_with()
    with session():
        for _ in range(2):
            seed_all(5)
            net = Net()
            assert net.built_with() == [off] * 2
            assert net.drawn == off[:3]  # the driver's own object is built with them too
        seed_all(6)
        assert Net().built_with()[0] != off


def test_workers_go_on_from_the_seeds_whatever_the_driver_draws(session: Any) -> None:
    with without_runtime():
        seed_all(7)
        off = Net()
        expected = [off.drawn_now(), off.drawn_now()]
    with session():
        seed_all(7)
        net = Net()
        first = net.drawn_now()
        torch.rand(5), random.random(), np.random.rand()
        assert [first, net.drawn_now()] == [[one, one] for one in expected]


def test_an_object_built_later_does_not_wind_back_the_generators(session: Any) -> None:
    with session():
        seed_all(8)
        net = Net()
        drawn = []
        for _ in range(3):
            drawn += [net.drawn_now()[0]]
            Net()
        assert len({tuple(one) for one in drawn}) == 3


def test_unseeded_replicas_are_alike(session: Any) -> None:
    with session():
        one, other = Net().built_with()
        assert one == other


def test_seeds_that_are_set_after_the_construction_reach_the_workers(on_ray: None) -> None:
    net = Net()
    drawn = []
    for _ in range(2):
        seed_all(9)
        drawn.append(net.drawn_now())
        seed_all(10)
        drawn.append(net.drawn_now())
    assert drawn[0] == drawn[2]
    assert drawn[1] == drawn[3] != drawn[0]
    seed_all(9)
    assert drawn[0] == [Net.draw(net)] * 2


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_seed_that_is_set_again_reaches_the_workers(on_ray: None, which: int) -> None:
    """Each generator alone, and with the seed that it had."""
    set_seed: Any = [random.seed, np.random.seed, torch.manual_seed][which]
    seed_all(11)
    net = Net()
    drawn = []
    for _ in range(2):
        getattr([random, np.random, torch][which], ["seed", "seed", "manual_seed"][which])(11)
        drawn.append([one[which] for one in net.drawn_now()])
    assert drawn[0] == drawn[1]
    set_seed(11)
    assert drawn[0] == [Net.draw(net)[which]] * 2


def seeded_alone(net: Net) -> list[Any]:
    """A seed of one generator leaves the others where they are."""
    first = net.drawn_now()
    random.seed(9)
    return [first, net.drawn_now()]


def seeded_twice_between_objects(net: Net) -> list[Any]:
    """The first object's draws go on from the seed, behind what the second one drew."""
    first = net.drawn_now()
    seed_all(13)
    Net()
    return [first, net.drawn_now()]


def seeded_by_torch_alone(net: Net) -> list[Any]:
    """Nobody knows the seed that torch took; draws are the driver's after it, also if another generator is seeded."""
    torch.default_generator.manual_seed(21)
    random.seed(4)
    return [net.drawn_now(), net.drawn_now()]


def set_back(net: Net) -> list[Any]:
    """A state that was read is set again: what was drawn since is drawn once more, and what was drawn before is not."""
    drawn = [net.drawn_now()]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn += [net.drawn_now(), net.drawn_now()]
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    drawn += [net.drawn_now(), net.drawn_now()]
    assert drawn[1:3] == drawn[3:5] != [drawn[0], drawn[1]]
    return drawn


def set_back_to_before_the_construction(net: Net) -> list[Any]:
    """The state was the driver's own."""
    seed_all(4)
    states = random.getstate(), torch.get_rng_state()
    other = Net()
    drawn = [other.drawn_now()]
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    return [*drawn, other.drawn_now()]


def forked(net: Net) -> list[Any]:
    """Within ``fork_rng`` a seed holds for calls; afterwards they go on from where they were."""
    drawn = [net.drawn_now()]
    for _ in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            drawn.append(net.drawn_now())
        drawn.append(net.drawn_now())
    with torch.random.fork_rng():
        torch.manual_seed(8)  # for no call
    return [*drawn, net.drawn_now()]


def seeds_of_a_role(net: Net) -> list[Any]:
    """What a role does to its generators is not the driver's doing."""
    return [net.drawn_now(), net.seeded(3), net.drawn_now(), net.drawn_now()]


@pytest.mark.parametrize(
    "play",
    [
        *(seeded_alone, seeded_twice_between_objects, seeded_by_torch_alone, set_back),
        *(set_back_to_before_the_construction, forked, seeds_of_a_role),
    ],
)
def test_what_the_driver_does_to_its_generators_holds_for_roles_as_with_ray_off(session: Any, play: Any) -> None:
    with without_runtime():
        seed_all(12)
        off = play(Net())
    with session():
        seed_all(12)
        assert play(Net()) == [[one, one] for one in off]


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_a_generator_that_is_passed_again_is_refused(on_ray: None, kind: str) -> None:
    """With Ray off the second call goes on from the first."""

    def made() -> Any:
        if kind == "torch":
            return torch.Generator().manual_seed(4)
        return np.random.default_rng(4) if kind == "numpy" else random.Random(4)

    net, generator = Net(), made()
    expected = Net.drawn_with(net, made())
    assert net.drawn_with({"its": generator}) == expected
    with pytest.raises(DispatchError, match=r"Net.drawn_with .* argument 'generator' is a random generator that was"):
        net.drawn_with(generator)
    assert net.drawn_with(made()) == expected, "a new one in the same state"


def test_under_torchrun_all_processes_refuse_a_generator_that_some_have_drawn_from() -> None:
    for generator in (random.Random(4), np.random.default_rng(4)):
        check_arguments((generator,), {}, ("generator",), "Net.drawn_with", is_copied=False)
        generator.random()  # on rank 0, whose method had it
        with pytest.raises(DispatchError, match=r"Net.drawn_with: argument 'generator' is a random generator that was"):
            check_arguments((generator,), {}, ("generator",), "Net.drawn_with", is_copied=False)


def test_whole_within_another_value_is_refused(session: Any) -> None:
    with session():
        net = Net()
        with pytest.raises(DispatchError, match=r"argument 'generator'\['its'\] is RayHelper.whole"):
            net.drawn_with({"its": RayHelper.whole([1, 2])})


def test_seeds_inside_fork_rng_leave_the_workers_alone(on_ray: None) -> None:
    seed_all(12)
    net = Net()
    first = net.drawn_now()
    with torch.random.fork_rng():
        torch.manual_seed(3)
    assert net.drawn_now()[0][2] != first[0][2]


def test_defaults_of_torch_hold_on_workers(on_ray: None) -> None:
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        torch.autograd.set_detect_anomaly(True)
        np.seterr(divide="raise")
        torch.backends.cuda.enable_flash_sdp(False)
        seen = Net().defaults()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        torch.autograd.set_detect_anomaly(False)
        np.seterr(divide="warn")
        torch.backends.cuda.enable_flash_sdp(True)
    assert seen == [["torch.float64", "high", True, True, (True, False), False, True, "raise"]] * 2
    assert Net().defaults() == [["torch.float32", "highest", False, False, (False, False), True, False, "warn"]] * 2


def test_defaults_of_torch_that_are_set_later_hold_from_the_next_call_on(on_ray: None) -> None:
    net = Net()
    before = net.defaults()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        changed = ["torch.float64", "high", False, False, (False, True)]
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            assert net.defaults() == [[*changed, False, False, "warn"]] * 2
        assert net.defaults() == [[*changed, True, False, "warn"]] * 2
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False
    assert (
        net.defaults()
        == before
        == [["torch.float32", "highest", False, False, (False, False), True, False, "warn"]] * 2
    )


def test_what_sums_and_products_are_computed_with_holds_on_workers(on_ray: None) -> None:
    """The interface of torch 2.9 sets what the older one cannot name, and then refuses to tell."""
    net, backends = Net(), torch.backends
    before, precisions_before = net.arithmetic(), precisions(torch)
    assert before[0][1]
    assert not before[0][4]
    try:
        torch.set_num_threads(before[0][0] + 2)
        backends.mkldnn.enabled = False
        backends.fp32_precision = "tf32"
        backends.cuda.matmul.fp32_precision = "ieee"
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.set_flush_denormal(True)
        told = [before[0][0] + 2, False, ("tf32", "ieee"), False, True]
        assert net.arithmetic() == Net().arithmetic() == [told] * 2
    finally:
        torch.set_num_threads(before[0][0])
        backends.mkldnn.enabled = True
        for name, value in zip(PRECISIONS, precisions_before, strict=True):
            backend_of(torch, name).fp32_precision = value
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        torch.set_flush_denormal(False)
    assert net.arithmetic() == before


def test_workers_find_modules_where_the_driver_does(
    on_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a module that a role imports when it runs is not found, with Ray alone."""
    (tmp_path / "of_that_folder.py").write_text("VALUE = 5\n")
    net = Net()
    with pytest.raises(ModuleNotFoundError):
        net.imports("of_that_folder")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (net.imports("of_that_folder"), Net().imports("of_that_folder")) == (5, 5)
    (tmp_path / "not_there_any_more.py").write_text("VALUE = 6\n")
    monkeypatch.undo()
    with pytest.raises(ModuleNotFoundError):
        net.imports("not_there_any_more")


def test_workers_go_where_the_driver_goes(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise relative paths of a role lie elsewhere than with Ray off, without a word."""
    begin, first, second = os.getcwd(), tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with session():
        net = Net()
        assert net.folder() == [begin] * 2
        monkeypatch.chdir(first)
        assert net.folder() == [str(first)] * 2
        assert Net().folder() == [str(first)] * 2
        assert net.folder(str(second)) == [str(second)] * 2
        assert net.folder() == [str(second)] * 2, "a role's own folder stays, as the driver has not moved"
        monkeypatch.chdir(begin)
        assert net.folder() == [begin] * 2


def test_the_mode_of_a_call_holds_on_workers(on_ray: None) -> None:
    net = Net()
    assert net.modes() == [["torch.float32", True, False]] * 2
    with torch.no_grad():
        assert net.modes() == [["torch.float32", False, False]] * 2
        later = net.modes.defer(1)
    assert later.result() == [["torch.float32", False, False]] * 2
    with torch.inference_mode():
        assert net.modes() == [["torch.float32", False, True]] * 2
    with torch.autocast("cpu", torch.bfloat16):
        assert net.modes(1) == [["torch.bfloat16", True, False]] * 2
    assert net.modes() == [["torch.float32", True, False]] * 2


def test_a_future_among_the_arguments_keeps_its_mode(on_ray: None) -> None:
    net = Net()
    given = net.drawn_now.defer()
    with torch.no_grad():
        assert net.modes(given) == [["torch.float32", False, False]] * 2


def test_filters_of_warnings_hold_on_workers(on_ray: None) -> None:
    earlier = Net()
    assert earlier.warned() == ["went on"] * 2
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "an old", UserWarning)
        with without_runtime():
            assert Net().warned() == "an old name"
        assert earlier.warned() == ["an old name"] * 2, "as of the next call"
        assert Net().warned() == ["an old name"] * 2
    assert earlier.warned() == ["went on"] * 2
    assert Net().warned() == ["went on"] * 2


@contextlib.contextmanager
def debugging() -> Iterator[None]:
    """Main sets up logging, and afterwards it is as it was."""
    root, level, handler = logging.getLogger(), logging.getLogger().level, logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    root.handlers.insert(0, handler)
    try:
        root.setLevel(logging.INFO)
        logging.getLogger("mine.here").setLevel(logging.DEBUG)
        logging.getLogger("mine.silent").addHandler(logging.NullHandler())
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        logging.getLogger("mine.here").setLevel(logging.NOTSET)
        logging.getLogger("mine.silent").handlers.clear()


def test_levels_and_format_of_logging_hold_on_workers(on_ray: None) -> None:
    earlier = Net()
    before = earlier.logging_of("mine.here")
    assert FORMAT not in before[0][2]
    with debugging():
        net = Net()
        seen, silent = net.logging_of("mine.here"), net.handlers_of("mine.silent")
        assert earlier.logging_of("mine.here") == seen
    assert earlier.logging_of("mine.here") == before, "set back, as of the next call"
    assert silent == [0, 0], "a handler that writes nothing is none"
    assert seen == [[logging.INFO, logging.DEBUG, [FORMAT]]] * 2


def test_a_call_tells_workers_of_messages_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_runtime():
        mode, num_read = DriverMode(), []
        here = Messages.here
        mode.constructing()
        monkeypatch.setattr(Messages, "here", lambda: num_read.append(1) or here())
        assert [mode.of_call(0) for _ in range(3)] == [None] * 3
        assert num_read == [], "a call in which nothing changed reads no filters and no loggers"
        with debugging():
            told = mode.of_call(0)
            assert told is not None
            assert [one.level for one in told.messages.loggers if one.name == "mine.here"] == [logging.DEBUG]
            assert mode.of_call(0) is None
            logging.getLogger("mine.here").propagate = False
            monkeypatch.setattr(logging.getLogger("mine.here"), "disabled", True)
            logging.getLogger("mine.there").setLevel(logging.ERROR)
            told = mode.of_call(0)
            assert {(one.name, one.propagate, one.disabled) for one in told.messages.loggers} >= {
                ("mine.here", False, True),
                ("mine.there", True, False),
            }
            logging.disable(logging.ERROR)
            assert mode.of_call(0).messages.disabled_below == logging.ERROR
            logging.disable(logging.NOTSET)
            assert mode.of_call(0) is not None
            assert mode.of_call(1).messages is not None, "a worker that took the place of another knows nothing of it"
            assert mode.of_call(1) is None


@pytest.mark.parametrize("kind", ["deque", "set", "namespace", "of namespaces"])
def test_a_tensor_with_a_graph_is_found_in_every_container(kind: str) -> None:
    cut = torch.ones(2, requires_grad=True) * 2
    holder: Any = {
        "deque": deque([cut]),
        "set": {cut},
        "namespace": SimpleNamespace(loss=cut),
        "of namespaces": [SimpleNamespace(losses=deque([cut]))],
    }[kind]
    place = {"deque": r"\[0\]", "set": r" \(an item of the set\)", "namespace": r"\.loss"}
    where = place.get(kind, r"\[0\]\.losses\[0\]")
    with pytest.raises(DispatchError, match=rf"Net.total: argument 'given'{where} is a tensor with a grad_fn"):
        check_arguments((holder,), {}, ("given",), "Net.total")
    with pytest.raises(WorkerError, match=rf"the value{where} of Net.total is a tensor with a grad_fn"):
        check_value(holder, "Net.total")
