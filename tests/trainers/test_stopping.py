"""Signals and limits of time that end a run early, and processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trainers.run import stopping
from trainers.run.stopping import SIGNALS, Stop, StopSignals, ends_by_sigterm


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_is_noted_and_handlers_come_back(number: str) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with StopSignals(with_interrupt=False) as signals:
        assert signals.stop() is None
        os.kill(os.getpid(), getattr(signal, number))
        assert signals.stop() == Stop(number, 143)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop() == Stop(number, 143)
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_ctrl_c_interrupts_unless_asked_to_save_and_the_second_one_always_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignals(with_interrupt=False), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with StopSignals(with_interrupt=True) as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the launcher passes on what the terminal sent to all
        assert signals.stop() == Stop("SIGINT", 130)
        monkeypatch.setattr(stopping, "SAME_INTERRUPT_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_what_was_ignored_still_is() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with StopSignals(with_interrupt=False) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.stop() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_of_the_main_thread_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def look() -> None:
        with StopSignals(with_interrupt=True), ends_by_sigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[object] = []
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]


def test_sigterm_while_workers_start_exits_with_143() -> None:
    with ends_by_sigterm(), pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143


WORKER = """
import signal, sys, time
from trainers.run import stopping
stopping.LAUNCHER_GRACE_S = float(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))  # and goes on
with stopping.ends_with_parent():
    print("started", flush=True)
    time.sleep(100)
    time.sleep(100)
"""
LAUNCHER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], '0.2']).wait()"


def test_a_process_whose_launcher_was_killed_ends_by_itself() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, WORKER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "started\n"
    launcher.kill()
    launcher.wait()
    begun = time.monotonic()
    assert launcher.stdout.read() == "SIGTERM\n"  # and the end of the file: nobody has the pipe any more
    assert time.monotonic() - begun < 60
    launcher.stdout.close()
