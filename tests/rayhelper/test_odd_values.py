"""Values and exceptions that are unlike most: the same on Ray and in strict simulated workers."""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rayhelper import CallCancelledError, DeadlineError, DispatchError, RayHelper, WorkerError
from tests.conftest import RaySession, without_runtime
from tests.rayhelper.test_calls import KeywordError

if TYPE_CHECKING:
    import torch

GROUPS = {"odd": {"device": "CPU", "ranks": 2, "workers": ["odd"], "restarts": 1}}


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int = 7


class Holding:
    """Something that does not pickle."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@RayHelper.worker(group="odd")
class Odd:
    def __init__(self, held: Any = None) -> None:
        self.held = held

    @RayHelper.function(group="odd", execute="first")
    def generated(self) -> Any:
        return (i for i in [7])

    @RayHelper.function(group="odd", execute="first")
    def zeros(self, length: int) -> Any:
        return {"zeros": np.zeros(length)}

    @RayHelper.function(group="odd", execute="first")
    def same(self, value: Any) -> Any:
        return value

    @RayHelper.function(group="odd", execute="first")
    def total(self, values: Any) -> int:
        return int(sum(values))

    @RayHelper.function(group="odd", execute="first")
    def fail(self, kind: str) -> None:
        error: Exception = FrozenError()
        if kind == "lock":
            error = ValueError("with a lock")
            error.lock, error.code = threading.Lock(), 5  # type: ignore[attr-defined]
        elif kind == "keyword":
            error = KeywordError(1, why="the real cause")
        elif kind == "long":
            error = ValueError("x" * 20_000_000)
        raise error

    @RayHelper.function(group="odd", execute="first")
    def change_and_fail(self, tensor: torch.Tensor) -> None:
        tensor.add_(1)
        raise KeyError("after the change")

    @RayHelper.function(group="odd", execute="first")
    def imported(self, folder: str, module: str) -> int:
        sys.path.insert(0, folder)
        Path(folder, "begun").touch()
        return int(importlib.import_module(module).VALUE)

    @RayHelper.function(group="odd")
    def pid(self) -> int:
        return os.getpid()

    @RayHelper.function(group="odd")
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture(scope="module", params=["strict", "ray"])
def odd(request: pytest.FixtureRequest, ray_session: RaySession) -> Iterator[Odd]:
    simulated = RayHelper.session(GROUPS, runtime="inprocess", strict=True)
    with simulated if request.param == "strict" else ray_session(GROUPS):
        yield Odd()


def test_a_generator_that_is_a_value_is_refused(odd: Odd) -> None:
    with pytest.raises(WorkerError, match="generator"):
        odd.generated()


@pytest.mark.parametrize("length", [3, 3_000, 300_000])
def test_arrays_that_come_back_may_be_changed(odd: Odd, length: int) -> None:
    zeros = odd.zeros(length)["zeros"]
    zeros[0] = 1.0
    assert zeros.sum() == 1.0


def test_an_exception_keeps_its_type_and_the_attributes_that_pickle(odd: Odd) -> None:
    with pytest.raises(ValueError, match="with a lock") as caught:
        odd.fail("lock")
    assert caught.value.code == 5  # type: ignore[attr-defined]


def test_an_exception_with_a_constructor_of_its_own_keeps_its_type(odd: Odd) -> None:
    with pytest.raises(KeywordError, match="1 the real cause") as caught:
        odd.fail("keyword")
    assert any("rank 0" in note for note in caught.value.__notes__)


def test_a_frozen_exception_keeps_its_type(odd: Odd) -> None:
    with pytest.raises(FrozenError) as caught:
        odd.fail("frozen")
    assert caught.value.code == 7
    assert any("rank 0" in note for note in caught.value.__notes__)


def test_a_whole_future_is_a_whole_value(odd: Odd) -> None:
    made = odd.same.defer([1, 2, 3])
    assert odd.total(RayHelper.whole(made)) == 6  # type: ignore[arg-type]


def test_a_future_inside_a_list_is_refused_with_what_to_do(odd: Odd) -> None:
    made = odd.same.defer(1)
    with pytest.raises(DispatchError, match=r"Future.*\.result\(\)"):
        odd.total([made])


def test_a_call_that_failed_after_changing_a_tensor_is_not_blamed_on_the_next(odd: Odd) -> None:
    import torch  # here, as most of the workers that are started do without

    with pytest.raises(KeyError, match="after the change"):
        odd.change_and_fail(torch.zeros(3))
    assert odd.total([1, 2]) == 3


def test_an_argument_of_the_constructor_that_does_not_pickle_is_named(odd: Odd) -> None:
    with pytest.raises(DispatchError, match=r"Odd\(\.\.\.\) cannot be sent to a worker"):
        Odd(held=Holding())


@pytest.fixture(scope="module")
def on_ray(ray_session: RaySession) -> Iterator[Odd]:
    with ray_session(GROUPS):
        yield Odd()


def test_an_exception_with_a_very_long_message_is_shortened_in_its_traceback(on_ray: Odd) -> None:
    with pytest.raises(ValueError, match="xxx") as caught:
        on_ray.fail("long")
    assert len(str(caught.value.__cause__)) < 1_000_000


def test_an_import_is_not_interrupted_half_way(on_ray: Odd, tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(2)\nVALUE = 11\n")
    call = on_ray.imported.defer(str(tmp_path), "slow_to_import")
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    assert call.cancel()
    with pytest.raises(CallCancelledError):
        call.result()
    assert on_ray.imported(str(tmp_path), "slow_to_import") == 11


def test_a_deadline_holds_while_a_worker_is_replaced(ray_cluster: None) -> None:
    groups = {"odd": {**GROUPS["odd"], "timeout_s": 8}}
    with without_runtime(), RayHelper.session(groups):
        odd = Odd()
        pids = odd.pid()
        call = odd.sleep.defer(60)
        os.kill(pids[0], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(DeadlineError):
            call.result()
        assert time.monotonic() - started < 30
