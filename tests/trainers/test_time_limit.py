"""Reward functions that do not return: interrupted where they are, and named."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rayhelper import ConfigError
from rayhelper.watch.time_limit import awaited_within, within
from rayhelper.watch.watchdog import LateError
from trainers.grpo.config import GRPOConfig
from trainers.ppo.config import PPOConfig
from trainers.rewards.functions import score

LONG_S = 600.0


def sleeps(completions: list[str], **_: Any) -> list[float]:
    time.sleep(LONG_S)
    return [0.0] * len(completions)


def swallows(completions: list[str], **_: Any) -> list[float]:
    with contextlib.suppress(BaseException):  # of a judge that never fails
        time.sleep(LONG_S)
    return sleeps(completions)


def counts(completions: list[str], **_: Any) -> list[float]:
    while True:
        pass


async def awaits(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(LONG_S)
    return [0.0] * len(completions)


async def blocks(completions: list[str], **_: Any) -> list[float]:
    threading.Event().wait(LONG_S)
    return [0.0] * len(completions)


def test_what_returns_in_time_is_as_without_a_limit() -> None:
    assert within(LONG_S, "it", divmod, 7, 2) == within(None, "it", divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        within(LONG_S, "it", divmod, 7, 0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(within, LONG_S, "it", divmod, 7, 2).result() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            pool.submit(within, LONG_S, "it", divmod, 7, 0).result()


@pytest.mark.parametrize("function", [sleeps, swallows, counts, awaits])
def test_a_function_that_does_not_return_is_named(function: Any) -> None:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    with pytest.raises(LateError, match=rf"^reward function '{function.__name__}', given 2 completions, did not"):
        score([function], ["a", "b"], ["c", "d"], [[1], [2]], {}, limit_s=0.2)
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers


def test_it_is_told_where_it_was() -> None:
    with pytest.raises(LateError) as late:
        within(0.2, "it", sleeps, ["a"])
    assert "time.sleep(LONG_S)" in "".join(traceback.format_exception(late.value))


def test_an_alarm_of_the_function_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    def rings(completions: list[str], **_: Any) -> list[float]:
        rung: list[float] = []
        before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(1.0))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while not rung:
            time.sleep(0.01)
        signal.signal(signal.SIGALRM, before)
        return rung * len(completions)

    assert score([rings], ["a"], ["b"], [[1]], {}, limit_s=LONG_S).tolist() == [[1.0]]


def test_an_async_function_that_blocks_is_left_behind() -> None:
    with pytest.raises(LateError, match="reward function 'blocks'"):
        score([blocks], ["a"], ["c"], [[1]], {}, limit_s=0.2)


def test_an_error_about_time_of_the_function_is_its_own() -> None:
    async def times_out() -> None:
        raise TimeoutError("the judge")

    with pytest.raises(TimeoutError, match="the judge"):
        asyncio.run(awaited_within(LONG_S, "it", times_out()))


@pytest.mark.parametrize("config", [GRPOConfig, PPOConfig])
def test_a_limit_is_a_number_of_seconds_for_functions(config: Any) -> None:
    given: dict[str, Any] = {"model": "m", "dataset": "d", "reward_funcs": ["exact_answer"]}
    assert config(**given, reward_timeout_s=5).reward_timeout_s == 5
    with pytest.raises(ConfigError, match="reward_timeout_s must be a positive number of seconds, got 0"):
        config(**given, reward_timeout_s=0)
    with pytest.raises(ConfigError, match="reward_timeout_s is set, but there are no reward_funcs"):
        config(
            **(given | {"reward_funcs": [], "reward_model": "m" if config is PPOConfig else ["m"]}), reward_timeout_s=5
        )
