"""Calls that do not end, in one process: interrupted at ``timeout_s``, reported after a while, also where they wait."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import logging
import os
import re
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayhelper import ConfigError, DeadlineError, RayHelper
from rayhelper.device_groups import DeviceGroups
from rayhelper.watch import interrupts
from rayhelper.watch.attended import attended
from rayhelper.watch.watchdog import Call, Watched, watchdog
from tests import warm

ROOT = Path(__file__).resolve().parents[2]

LONG_S = 600.0
GROUPS = {
    "driver": {"timeout_s": 0.3},
    "crew": {"device": "CPU", "ranks": 2, "workers": ["slow"], "timeout_s": 0.6},
    "patient": {"device": "CPU", "ranks": 1, "workers": ["patient"]},
}


@RayHelper.worker(group=["slow", "patient"])
class Slow:
    def __init__(self, ended: threading.Event | None = None) -> None:
        self.ended = ended

    @RayHelper.function(group="slow")
    def sleep(self) -> None:
        time.sleep(LONG_S)

    @RayHelper.function(group="slow")
    def count(self) -> None:
        while True:
            pass

    @RayHelper.function(group="slow")
    def swallow(self) -> None:
        try:
            time.sleep(LONG_S)
        except BaseException:
            time.sleep(LONG_S)

    @RayHelper.function(group="slow")
    async def wait(self) -> None:
        await asyncio.sleep(LONG_S)

    @RayHelper.function(group="slow")
    async def block(self) -> None:
        time.sleep(LONG_S)

    @RayHelper.function(group="slow")
    def items(self) -> Iterator[int]:
        yield 1
        time.sleep(LONG_S)

    @RayHelper.function(group="slow")
    async def streamed(self) -> Any:
        yield 1
        await asyncio.sleep(LONG_S)

    @RayHelper.function(group="driver")
    def read(self) -> None:
        time.sleep(LONG_S)

    @RayHelper.function(group="patient")
    def until(self) -> str:
        assert self.ended is not None
        self.ended.wait(LONG_S)
        return "done"

    @RayHelper.function(group="patient")
    async def awaits_until(self) -> str:
        assert self.ended is not None
        while not self.ended.is_set():
            await asyncio.sleep(0.01)
        return "done"

    @RayHelper.function(group="patient")
    async def awaits_file(self, path: str) -> None:
        while not os.path.exists(path):
            await asyncio.sleep(0.01)

    @RayHelper.function(group="patient")
    def items_until(self) -> Iterator[str]:
        assert self.ended is not None
        self.ended.wait(LONG_S)
        yield "done"


class Told(logging.Handler):
    """Ends what is waited for at the second warning, or the one that is said."""

    at = 2

    def __init__(self) -> None:
        super().__init__()
        self.ended, self.told = threading.Event(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())
        if len(self.told) == self.at:
            self.ended.set()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setenv("RAYHELPER_WARN_S", "0.2")
    handler, log = Told(), logging.getLogger("rayhelper.watch.watchdog")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


async def drained(slow: Slow) -> list[int]:
    return [item async for item in slow.streamed()]


MADE: dict[str, Callable[[Slow], Any]] = {
    "sleep": lambda slow: slow.sleep(),
    "count": lambda slow: slow.count(),
    "swallow": lambda slow: slow.swallow(),
    "wait": lambda slow: asyncio.run(slow.wait()),
    "block": lambda slow: asyncio.run(slow.block()),
    "items": lambda slow: list(slow.items()),
    "streamed": lambda slow: asyncio.run(drained(slow)),
    "sleep, deferred": lambda slow: slow.sleep.defer().result(),
    "wait, deferred": lambda slow: slow.wait.defer().result(),
}


@pytest.mark.parametrize("runtime", ["off", "inprocess"])
@pytest.mark.parametrize("made", MADE)
def test_a_call_beyond_timeout_s_is_interrupted_where_it_is(runtime: Any, made: str) -> None:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    name = made.partition(",")[0]
    with RayHelper.session(GROUPS, runtime=runtime), pytest.raises(DeadlineError) as late:
        MADE[made](Slow())
    told = str(late.value)
    assert told.startswith(f"Slow.{name} (role 'slow')")
    assert "did not finish within 0.6 s. The call was given up. Raise timeout_s of group 'crew'" in told
    assert f"in {name}\n" in told  # the stack
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers


def test_what_a_coroutine_does_when_it_is_cancelled_is_not_where_it_was() -> None:
    """On a loaded machine the cancellation itself is late, and is interrupted in the middle of the event loop."""

    class Endless:
        def __await__(self) -> Endless:
            return self

        def send(self, value: None) -> None:
            return None  # as ``asyncio.sleep(0)`` does: it goes on in the next round of the loop

        def throw(self, error: BaseException) -> None:
            time.sleep(LONG_S)

    call = Call("it", 0.3, lambda late: DeadlineError(late.stack))
    with pytest.raises(DeadlineError) as late:
        asyncio.run(attended(call, Endless(), lambda: "where it was"))
    assert str(late.value) == "where it was"


@pytest.mark.parametrize("runtime", ["off", "inprocess"])
def test_the_driver_has_a_limit_of_its_own(runtime: Any) -> None:
    with RayHelper.session(GROUPS, runtime=runtime), pytest.raises(DeadlineError) as late:
        Slow().read()
    assert re.match(r"Slow.read \(role 'driver'\), .* did not finish within 0.3 s.*section 'driver'", str(late.value))


def test_the_driver_has_a_limit_of_its_own_on_ray(ray_cluster: None) -> None:
    groups = {"driver": {"timeout_s": 0.3}, "all": {"device": "CPU", "ranks": 1, "workers": ["slow", "patient"]}}
    with RayHelper.session(groups):
        slow = Slow()
        with pytest.raises(DeadlineError, match=r"Slow.read \(role 'driver'\), on the driver did not finish"):
            slow.read()


def test_what_returns_in_time_is_as_without_a_limit() -> None:
    ended = threading.Event()
    ended.set()
    groups = {"driver": {"timeout_s": LONG_S}, "crew": {**GROUPS["crew"], "timeout_s": LONG_S}}
    with RayHelper.session(groups, runtime="off"):
        slow = Slow(ended)
        assert slow.until() == "done"
        assert asyncio.run(slow.awaits_until()) == "done"
        assert list(slow.items_until()) == ["done"]


def test_a_call_in_another_thread_is_reported_once_and_late_when_it_returns() -> None:
    errors: list[BaseException] = []
    messages: list[str] = []
    ended = threading.Event()

    def elsewhere() -> None:
        try:
            with Watched(Call("it", 0.1)):
                ended.wait(LONG_S)
        except TimeoutError as error:
            errors.append(error)

    class Until(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            ended.set()

    handler, log = Until(), logging.getLogger("rayhelper.watch.watchdog")
    log.addHandler(handler)
    try:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    finally:
        log.removeHandler(handler)
    (told,) = messages
    assert "it did not end within 0.1 s and cannot be interrupted: it runs in a thread that is not the main one" in told
    assert "ended.wait(LONG_S)" in told
    assert "it did not return within 0.1 s" in str(errors[0])


def test_native_code_is_reported_once_and_ends_as_it_returns(told: Told) -> None:
    read, write = os.pipe()
    told.at = 1
    told.ended = Written(write)  # type: ignore[assignment]
    try:
        with pytest.raises(TimeoutError, match=r"^it did not return"), Watched(Call("it", 0.1, warns=False)):
            _wait_natively(read)
    finally:
        os.close(read)
        os.close(write)
    assert told.told[0].startswith(
        "it did not end within 0.1 s and cannot be interrupted: native code has not returned"
    )
    assert "in _wait_natively\n" in told.told[0]


def _wait_natively(descriptor: int) -> None:
    """Until there is something to read; goes on when a signal comes."""
    libc = ctypes.CDLL(None)
    one = struct.pack("ihh", descriptor, select.POLLIN, 0)
    blocked = ctypes.create_string_buffer(b"\xff" * 128)
    libc.ppoll(one, 1, None, blocked)


class Written:
    """An event that is a byte in a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def set(self) -> None:
        os.write(self.descriptor, b"x")


def test_an_outer_limit_passes_through_an_inner_one() -> None:
    outer, inner = Watched(Call("outer", 0.1)), Watched(Call("inner", LONG_S))
    with pytest.raises(TimeoutError, match=r"^outer did not"), outer, inner:
        time.sleep(LONG_S)


def test_a_module_is_not_interrupted_while_it_is_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import time\nend = time.monotonic() + 0.4\nwhile time.monotonic() < end:\n    pass\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def imports() -> None:
        importlib.import_module("slow_module")
        time.sleep(LONG_S)

    with pytest.raises(TimeoutError), Watched(Call("it", 0.1)):
        imports()
    assert sys.modules.pop("slow_module").whole


@pytest.mark.parametrize("runtime", [None, "off", "inprocess"])
@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("until", lambda slow: slow.until()),
        ("awaits_until", lambda slow: asyncio.run(slow.awaits_until())),
        ("items_until", lambda slow: list(slow.items_until())),
        ("until", lambda slow: slow.until.defer().result()),
        ("awaits_until", lambda slow: slow.awaits_until.defer().result()),
    ],
)
def test_a_call_that_does_not_end_is_reported_again_and_again(runtime: Any, name: str, made: Any, told: Told) -> None:
    if runtime is None:
        made(Slow(told.ended))
    else:
        with RayHelper.session(GROUPS, runtime=runtime):
            made(Slow(told.ended))
    for line in told.told[:2]:
        assert line.startswith(f"Slow.{name} (role 'patient')")
        assert "no answer for" in line
        assert "rayhelper/roles" not in line
    assert f"in {name}\n" in told.told[1], "at the first report it may not have begun"


class Touching(Told):
    """What is waited for is a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ended = SimpleNamespace(set=path.touch)  # type: ignore[assignment]


def test_an_asynchronous_call_that_does_not_end_is_reported_on_ray(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYHELPER_WARN_S", "0.5")
    handler, log = Touching(tmp_path / "go on"), logging.getLogger("rayhelper.watch.watchdog")
    with RayHelper.session({"all": {"device": "CPU", "ranks": 2, "workers": ["slow", "patient"]}}):
        slow = Slow()
        log.addHandler(handler)
        try:
            asyncio.run(slow.awaits_file(str(tmp_path / "go on")))
        finally:
            log.removeHandler(handler)
    for line in handler.told[:2]:
        assert line.startswith("Slow.awaits_file (role 'patient') on group 'all' (roles slow, patient): no answer for ")
        assert "from ranks 0-1. Where they are:\n--- ranks 0" in line
    assert "in awaits_file\n" in handler.told[1]


TORCHRUN = """
import asyncio, logging, os, sys, time
from rayhelper import RayHelper
from pathlib import Path
from tests.rayhelper.test_limits import Touching

@RayHelper.worker(group="waits")
class Waits:
    @RayHelper.function(group="waits")
    def until(self, path):
        while RayHelper.current().rank and not os.path.exists(path):
            time.sleep(0.01)

    @RayHelper.function(group="waits")
    async def awaits_until(self, path):
        while RayHelper.current().rank and not os.path.exists(path):
            await asyncio.sleep(0.01)

    @RayHelper.function(group="driver", execute="first")
    def read(self):
        time.sleep(600)

groups = {"driver": {"timeout_s": 0.5}, "all": {"device": "CPU", "ranks": 2, "workers": ["waits"]}}
with RayHelper.session(groups, runtime="torchrun"):
    waits = Waits()
    for number, call in enumerate([waits.until, waits.awaits_until]):
        path = Path(sys.argv[1], f"go on {number}")
        handler, log = Touching(path), logging.getLogger("rayhelper.watch.watchdog")
        log.addHandler(handler)
        made = call(str(path))
        if number:
            asyncio.run(made)
        log.removeHandler(handler)
        if len(handler.told) > 1:  # the one whose second warning ended the call
            Path(sys.argv[1], f"told {number} by {os.environ['RANK']}").write_text(handler.told[1])
    try:
        waits.read()
    except Exception as error:
        Path(sys.argv[1], f"late {os.environ['RANK']}").write_text(f"{type(error).__name__}: {error}")
"""


def test_calls_are_reported_and_the_driver_has_a_limit_under_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text(TORCHRUN)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": str(warm.python()), "RAYHELPER_WARN_S": "0.5"}
    start = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start += ["--log-dir", str(tmp_path / "logs"), str(program)]
    done = subprocess.run([*start, str(tmp_path)], env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for number, name in enumerate(["until", "awaits_until"]):
        told = [path.read_text() for path in tmp_path.glob(f"told {number} by *")]
        assert told
        for text in told:
            assert text.startswith(f"Waits.{name} (role 'waits') on group 'all': no answer for ")
            assert f", in {name}\n" in text
    for rank in range(2):
        late = (tmp_path / f"late {rank}").read_text()
        assert late.startswith("DeadlineError: Waits.read (role 'driver'), rank 0 of torchrun did not finish within")


def test_a_call_in_a_debugger_is_neither_late_nor_reported(told: Told) -> None:
    program = compile("wait()", "bdb.py", "exec")
    call = Call("it", 0.3)
    with Watched(call):
        exec(program, {"__name__": "bdb", "wait": lambda: time.sleep(0.8)})
    assert not call.is_late
    assert told.told == []


def test_the_thread_ends_when_there_is_nothing_to_look_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayhelper.watch.watchdog._IDLE_S", 0.0)
    with Watched(Call("it", 0.05, warns=False)):
        pass
    deadline = time.monotonic() + 30
    while watchdog.is_awake:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("section", [{"gpus": 1}, {"device": "CPU", "ranks": 1, "workers": ["slow"]}, 5])
def test_of_the_driver_only_a_limit_can_be_set(section: Any) -> None:
    groups = {"driver": section, "crew": {"device": "CPU", "ranks": 1, "workers": ["slow"]}}
    with pytest.raises(ConfigError, match=r"section 'driver' of device_groups .* accepts timeout_s only, got"):
        DeviceGroups.parse(groups)
    with pytest.raises(ConfigError, match="timeout_s of section 'driver' must be a positive number"):
        DeviceGroups.parse(groups | {"driver": {"timeout_s": 0}})
    assert DeviceGroups.parse(groups | {"driver": {"timeout_s": 5}}).driver_timeout_s == 5


def test_ctrl_c_that_another_thread_is_given_ends_the_wait_of_a_loop() -> None:
    """As one does that comes when the loop is just about to wait, which nobody can time."""
    ended, is_late = threading.Event(), []

    def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if not ended.wait(30):
            is_late.append(True)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def waits() -> None:
        threading.Thread(target=interrupt).start()
        await asyncio.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(waits())
    ended.set()
    assert not is_late
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
