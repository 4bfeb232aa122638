"""Signals and limits of time that end a run early, and processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trainers.patches import notices_exit
from trainers.run import stopping
from trainers.run.stopping import SIGNALS, GivenUp, Stop, Stopped, StopSignals, ends_by_sigterm


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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_workers_start_exits_with_143(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with ends_by_sigterm(), pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), number)
        assert ended.value.code == 143
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_process_that_was_stopped_keeps_its_exit_code_whatever_its_launcher_sends() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Stopped) as ended, ends_by_sigterm(ends_process=True):
            raise Stopped(143)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 143
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_that_came_to_another_process_is_noted_and_passed_on() -> None:
    passed = threading.Event()
    with StopSignals(with_interrupt=False, pass_on=passed.set) as signals:
        elsewhere = threading.Thread(target=signals.note_elsewhere)
        elsewhere.start()
        elsewhere.join()
        assert signals.stop() == Stop("SIGTERM", 143)
        assert passed.wait(60)
    signals.note_elsewhere()  # the run is over


@pytest.mark.parametrize(("work", "what"), [("step", "the step"), ("saving", "saving"), ("loading", "loading")])
def test_what_hangs_after_sigterm_is_given_up_and_told(
    work: str, what: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    monkeypatch.setattr(stopping, "FIRST_SAVE_GRACE_S", 0.1)

    def hang() -> None:
        with (
            StopSignals(with_interrupt=False, grace_s=0.1, where=lambda: "here") as signals,
            getattr(signals.watch, work)(),
        ):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(100)

    with pytest.raises(GivenUp):
        hang()
    told = capfd.readouterr().err
    assert "SIGTERM: the run finishes this step, saves a checkpoint and ends" in told
    rule = "" if work == "saving" else " (stop_grace_s)"
    assert f"SIGTERM: {what} did not end within 0.1 s{rule} and is abandoned\nhere" in told
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_saving_is_watched_after_a_step_that_ended_just_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "FIRST_SAVE_GRACE_S", 0.0)
    asked, ended = threading.Event(), threading.Event()

    def where() -> str:
        asked.set()
        ended.wait()
        return ""

    def hang() -> None:
        with StopSignals(with_interrupt=False, grace_s=0.0, where=where) as signals:
            with signals.watch.step():
                os.kill(os.getpid(), signal.SIGTERM)
                asked.wait()
            ended.set()
            with signals.watch.saving():
                time.sleep(100)

    with pytest.raises(GivenUp):
        hang()


def test_a_step_that_is_only_slow_ends_and_another_signal_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has twice the time of the longest one before; between steps the run may save for as long as it takes."""
    monkeypatch.setattr(stopping, "STOP_GRACE_S", 0.0)
    with StopSignals(with_interrupt=False) as signals:
        with signals.watch.step():
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(2 * stopping.STEP_LOOK_S)
        assert signals.stop() == Stop("SIGUSR1", 143)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * stopping.STEP_LOOK_S)
        signals.watch.steps.longest_s = 1000.0
        with signals.watch.step():
            time.sleep(2 * stopping.STEP_LOOK_S)


def test_saving_has_the_time_of_a_checkpoint_whatever_a_step_has() -> None:
    """A checkpoint may take longer than a step; how long, only the one before shows."""
    watch = StopSignals(with_interrupt=False, grace_s=1.0).watch
    assert watch.limit_s(watch.savings) == 1800.0  # of a model whose size is not known
    for num_parameters, limit_s in [(10_000, 60.0), (10**9, 320.0), (70 * 10**9, 1800.0)]:
        of_size = StopSignals(with_interrupt=False, grace_s=1.0, num_parameters=num_parameters).watch
        assert of_size.limit_s(of_size.savings) == limit_s
    assert [watch.limit_s(one) for one in (watch.steps, watch.loadings)] == [1.0, 1.0]
    watch.savings.longest_s = 2.0
    assert watch.limit_s(watch.savings) == stopping.SAVE_GRACE_S
    watch.savings.longest_s = 500.0
    assert watch.limit_s(watch.savings) == 1000.0
    watch.grace_s = 7000.0
    assert watch.limit_s(watch.savings) == 7000.0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_forked_child_ends_by_signals_that_its_parent_notes(number: signal.Signals) -> None:
    """As the children of multiprocessing and of a DataLoader are ended by SIGTERM."""
    with ends_by_sigterm(), StopSignals(with_interrupt=True, grace_s=0.0) as signals, signals.watch.step():
        child = os.fork()
        if child == 0:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                os.kill(os.getpid(), number)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
        time.sleep(2 * stopping.STEP_LOOK_S)
        assert signals.watch.thread is not None
        assert signals.watch.thread.is_alive()


def test_a_run_that_os_exit_ends_does_not_look_finished(capfd: pytest.CaptureFixture[str]) -> None:
    """A run is entered twice: from the command line, and in ``Run``. Its forked children end as they like."""
    real = os._exit
    codes = []
    for status in (0, 7):
        child = os.fork()
        if child == 0:
            with notices_exit(), notices_exit():
                grandchild = os.fork()
                if grandchild == 0:
                    os._exit(0)
                os._exit(status if os.waitpid(grandchild, 0)[1] == 0 else 9)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert codes == [1, 7]
    (told,) = capfd.readouterr().err.strip().splitlines()
    assert told.startswith(f"error: os._exit(0) at {__file__}:")
    assert told.endswith(" ended the run before its last step. There is no final model.")
    with notices_exit():
        assert os._exit is not real
    assert os._exit is real


NATIVE = """
import ctypes, os, signal
from trainers.run import stopping
stopping.UNWIND_S = 0.1
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(128)
with stopping.StopSignals(with_interrupt=False, grace_s=0.1) as signals, signals.watch.step():
    print("started", flush=True)
    lock(mutex)
    lock(mutex)  # for ever, as a collective that nobody else joins: no signal is handled
"""


def test_a_step_that_hangs_in_native_code_is_given_up_too() -> None:
    run = subprocess.Popen([sys.executable, "-c", NATIVE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "started\n"
    run.terminate()
    told = run.communicate(timeout=60)[1]
    assert "SIGTERM: the step did not end within 0.1 s (stop_grace_s) and is abandoned" in told
    assert run.returncode == 143


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
