"""``breakpoint()`` on a rank: it says where it waits, and ``rayhelper debug`` is pdb there."""

from __future__ import annotations

import bdb
import contextlib
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rayhelper import RayHelper
from rayhelper.__main__ import main
from rayhelper.authenticated.client import Client
from rayhelper.runtimes.announced import Announced
from rayhelper.runtimes.debugging import Debugger, Waiting
from rayhelper.watch import breakpoints
from rayhelper.watch.breakpoints import Breakpoints, paused_s
from rayhelper.worker.side_door import Door
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 90.0


def debug(*arguments: str, typed: str = "") -> str:
    """What ``rayhelper debug`` prints, after these lines were typed."""
    command = [sys.executable, "-m", "rayhelper", "debug", *arguments]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=WITHIN_S)
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


def listed() -> dict[str, int]:
    """The ranks that wait at breakpoints, and for how many seconds, as ``rayhelper debug`` lists them."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert main(["debug"]) == 0
    return {name: int(seconds) for name, seconds in re.findall(r"^(\S+)   for (\d+) s   ", told.getvalue(), re.M)}


def until(seen: Callable[[], Any]) -> Any:
    """What ``seen`` gives, once it is true."""
    deadline = time.monotonic() + WITHIN_S
    while not (value := seen()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def halving(number: int) -> float:
    breakpoint()
    half = number / 2
    return half


class Halving(threading.Thread):
    """A thread that comes to a breakpoint."""

    def __init__(self, function: Callable[[int], float] = halving) -> None:
        super().__init__()
        self.function = function
        self.outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self.function(84)
        except BaseException as error:
            self.outcome = error


class Here:
    """This process as a rank that has breakpoints, of a run that is announced."""

    def __init__(self) -> None:
        self.ticks = 0
        self.breakpoints = Breakpoints("crew:1", lambda: "rank 1 of group 'crew'", self.tick)
        key = os.urandom(16)
        self.door = Door("127.0.0.1", key, self.breakpoints.answers)
        self.announced = Announced(lambda: "", Waiting(lambda: {"crew:1": (self.door.address, key)}).answers)

    def tick(self) -> None:
        self.ticks += 1

    def asks(self) -> bool:
        """Whether pdb waits for a line."""
        return self.breakpoints.current is not None and self.breakpoints.current.asks

    def ask(self, debugger: str, line: tuple[int, str] | None = None, *, leaves: bool = False, stop: int = 0) -> Any:
        return self.breakpoints.debugged(
            {"stop": stop, "debugger": debugger, "seen": 0, "line": line, "leaves": leaves}
        )

    def close(self) -> None:
        self.announced.close()
        self.door.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    here = Here()
    with here.breakpoints.installed():
        yield here
    here.close()


def test_a_rank_says_where_it_waits_and_pdb_is_there(here: Here, capfd: pytest.CaptureFixture[str]) -> None:
    thread = Halving()
    until(here.asks)
    line = halving.__code__.co_firstlineno + 1
    where = f"{__file__}:{line} in halving"
    assert capfd.readouterr().err == (
        f"rank 1 of group 'crew' waits at a breakpoint, {where}. Attach on the driver's machine: "
        "rayhelper debug crew:1\n"
    )
    (listed,) = debug().splitlines()[1:]
    assert listed.startswith("crew:1   for ")
    assert listed.endswith(f"{where}   rayhelper debug crew:1")
    said = debug("crew:1", typed="p number\nn\np half\n!half = 7.0\nc\n")
    assert "half = number / 2" in said
    assert "(Pdb) 84\n" in said
    assert "(Pdb) 42.0\n" in said
    assert said.startswith("0\nattached to crew:1")
    assert said.endswith("crew:1 goes on\n")
    thread.join(WITHIN_S)
    assert thread.outcome == 7.0
    assert here.ticks
    assert debug().startswith("0\nno rank of this user's runs on this machine (1 runs) waits")
    assert debug("crew:1").startswith("2\n")


def test_a_debugger_that_leaves_or_is_lost_leaves_the_rank_at_its_breakpoint(
    here: Here, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = Halving()
    until(here.asks)
    assert debug("crew:1", typed="p number\n").endswith("Attach again: rayhelper debug crew:1\n")
    assert "waits at the breakpoint again, as its debugger has left" in capfd.readouterr().err
    monkeypatch.setattr(breakpoints, "_LOST_S", 0.0)
    monkeypatch.setattr(breakpoints, "_LOOK_S", 0.01)
    assert here.ask("killed", (0, "p number\n"))["stop"] == 1
    current = here.breakpoints.current
    assert current is not None
    until(lambda: current.debugger_id is None)
    with current.changed:  # it holds this while it writes, and what is written while one reads may be lost
        assert "has lost its debugger" in capfd.readouterr().err
    monkeypatch.setattr(breakpoints, "_LOST_S", 60.0)
    assert here.ask("next", (0, "q\n"))["stop"] == 1
    thread.join(WITHIN_S)
    assert isinstance(thread.outcome, bdb.BdbQuit)


def test_a_rank_has_one_debugger_and_reads_each_line_once(here: Here) -> None:
    thread = Halving()
    until(here.asks)
    here.ask("one", (0, "!number = number + 1\n"))
    assert here.ask("other") == {"refused": "rank 1 of group 'crew' has a debugger already."}
    here.ask("one", (0, "!number = number + 1\n"))  # sent twice, as its answer was lost
    until(here.asks)
    here.ask("one", (1, "c\n"))
    thread.join(WITHIN_S)
    assert thread.outcome == 42.5
    assert here.ask("one", stop=1)["over"]
    assert here.ask("two") == {"refused": "rank 1 of group 'crew' does not wait at a breakpoint."}


class Ending:
    """The connection to a run that ends after so many answers: it breaks, or the driver tells it."""

    def __init__(self, num_answers: int, *, is_told: bool) -> None:
        self.num_answers, self.is_told = num_answers, is_told

    def ask(self, question: Any, timeout_s: float) -> Any:
        self.num_answers -= 1
        if self.num_answers >= 0:
            return {"stop": 1, "text": "", "seen": 0, "asks": question[1][1]["line"] is None, "over": False}
        if self.is_told:
            return {"refused": "crew:1 does not answer any more.", "is_gone": True}
        raise ConnectionError("the other side closed the connection")


@pytest.mark.parametrize("is_told", [False, True])
def test_a_program_that_ends_behind_its_last_breakpoint_is_no_mistake(
    is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process may be gone before the debugger asks again. One that goes while it waits is a mistake."""
    monkeypatch.setattr("builtins.input", lambda prompt: "c")
    assert Debugger(cast(Client, Ending(2, is_told=is_told)), "crew:1").run() == 0
    assert capsys.readouterr().out.endswith("crew:1 has ended since\n")
    if is_told:
        assert Debugger(cast(Client, Ending(0, is_told=True)), "crew:1").run() == 1
        assert capsys.readouterr().err == "error: crew:1 does not answer any more.\n"
    else:
        for num_answers in (0, 1):  # not even the first; the line was not taken
            with pytest.raises(ConnectionError):
                Debugger(cast(Client, Ending(num_answers, is_told=False)), "crew:1").run()


def test_threads_stop_one_after_the_other_and_a_breakpoint_of_pdb_stops_again(here: Here) -> None:
    first = Halving()
    until(here.asks)
    second = Halving()
    line = halving.__code__.co_firstlineno + 3
    here.ask("one", (0, f"b {line}\n"))
    until(here.asks)
    here.ask("one", (1, "c\n"))
    until(here.asks)
    assert f"({line})halving()" in here.ask("one")["text"]
    here.ask("one", (2, f"clear {__file__}:{line}\n"))
    until(here.asks)
    here.ask("one", (3, "c\n"))
    first.join(WITHIN_S)
    until(lambda: here.asks() and here.breakpoints.current is not None and here.breakpoints.current.number == 2)
    here.ask("two", (0, "c\n"))
    second.join(WITHIN_S)
    assert (first.outcome, second.outcome) == (42.0, 42.0)


def test_breakpoints_can_be_switched_off(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert halving(84) == 42.0


def test_a_header_is_shown(here: Here) -> None:
    def stops(number: int) -> float:
        breakpoint(header="look at number")
        return float(number)

    thread = Halving(stops)
    until(here.asks)
    assert here.ask("one")["text"].startswith("look at number\n")
    here.ask("one", (0, "c\n"))
    thread.join(WITHIN_S)


def test_the_time_at_breakpoints_is_counted_once() -> None:
    assert paused_s([], 10.0) == 0.0
    assert paused_s([[(9.0, 7.0)], [(8.0, 6.0), (2.0, 0.0)]], 10.0) == 5.0
    assert paused_s([[(9.0, 7.0)], [(30.0, 0.0)]], 10.0) == 10.0
    assert paused_s([[(30.0, 20.0)]], 10.0) == 0.0


@RayHelper.worker(group="stops")
class Stops:
    @RayHelper.function(group="stops")
    def added(self, number: int) -> int:
        breakpoint()
        total = number + RayHelper.current().rank
        return total

    @RayHelper.function(group="stops")
    async def awaited(self, number: int) -> int:
        breakpoint()
        total = number + RayHelper.current().rank
        return total


def test_two_ranks_wait_on_ray_and_deadlines_with_them(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with RayHelper.session({"crew": {"device": "CPU", "ranks": 2, "workers": ["stops"], "timeout_s": 2}}):
        stops = Stops()
        call = stops.added.defer(5)
        outcome: list[Any] = []
        waiting = threading.Thread(target=lambda: outcome.append(call.exception() or call.result()))
        waiting.start()
        until(lambda: len(listed()) == 2)
        until(lambda: listed()["crew:1"] >= 4)  # twice the deadline
        assert outcome == []
        said = debug("crew:1", typed="p RayHelper.current().rank\n!number = 6\nc\n")
        assert "(Pdb) 1\n" in said
        assert debug("crew:0", typed="c\n").endswith("crew:0 goes on\n")
        waiting.join(WITHIN_S)
        assert outcome == [[5, 7]]
        quit_ = stops.added.defer(5)
        until(lambda: len(listed()) == 2)
        debug("crew:1", typed="q\n")
        error = quit_.exception()  # which gives up rank 0 at its breakpoint
        assert isinstance(error, bdb.BdbQuit)
        assert "Stops.added (role 'stops') on rank 1 of group 'crew'" in error.__notes__[0]
        until(lambda: not listed())


TORCHRUN = """
import os, sys
from rayhelper import RayHelper

@RayHelper.worker(group="stops")
class Stops:
    @RayHelper.function(group="stops")
    def added(self, number):
        if RayHelper.current().rank == 1 or number == 6:
            breakpoint()
        return number + RayHelper.current().rank

groups = {"crew": {"device": "CPU", "ranks": 2, "workers": ["stops"], "timeout_s": 2}}
with RayHelper.session(groups, runtime="torchrun"):
    stops = Stops()
    print(stops.added(5), flush=True)
    print(stops.added(6), flush=True)
    print(stops.added.__name__, flush=True)
"""


def test_two_ranks_wait_under_torchrun_and_deadlines_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = tmp_path / "stops.py"
    program.write_text(TORCHRUN)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": str(warm.python())}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(tmp_path / "logs"), str(program)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    ) as run:
        try:
            until(lambda: listed().get("torchrun:1", 0) >= 4)  # twice the deadline
            assert debug("torchrun:1", typed="p number\nc\n").endswith("torchrun:1 goes on\n")
            until(lambda: len(listed()) == 2)
            assert debug("torchrun:0", typed="c\n").endswith("torchrun:0 goes on\n")
            last = debug("torchrun:1", typed="c\n")  # its process may have ended before the debugger asks again
            assert last.startswith("0\n"), last
            assert last.endswith(("torchrun:1 goes on\n", "torchrun:1 has ended since\n")), last
            said, _ = run.communicate(timeout=WITHIN_S)
        finally:
            run.terminate()
    assert run.returncode == 0, said
    assert said.count("[5, 6]") == said.count("[6, 7]") == 2  # two processes write the line ends when they like
    assert "rank 1 of torchrun on node 127.0.0.1 waits at a breakpoint, " in said
