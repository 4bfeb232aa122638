"""The schedulers that vLLM is given by name as ``scheduler_cls``: vLLM's own, but for steps that only decode.

Such a step is planned from arrays, and what it drew is taken in as arrays (``steps.py``). Its tokens that end nothing
are given out by ``steps.take_decoded``, and not among vLLM's outputs.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from trainers.rollout.vllm.scheduling.steps import Steps


class _Decoding:
    """Stands before a scheduler of vLLM. ``is_ahead``: it plans a step before the tokens of the last one are known."""

    is_ahead = False

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.steps = Steps(self, is_ahead=self.is_ahead)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if throttle_prefills:
            self.steps.settle()
        elif (planned := self.steps.plan()) is not None:
            return planned
        return super().schedule(throttle_prefills)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        rest = self.steps.take(scheduler_output, model_runner_output)
        return super().update_from_output(rest, model_runner_output)  # type: ignore[misc]

    def finish_requests(self, *given: Any, **named: Any) -> Any:
        self.steps.settle()
        return super().finish_requests(*given, **named)  # type: ignore[misc]

    def reset_prefix_cache(self, *given: Any, **named: Any) -> Any:
        self.steps.settle()
        return super().reset_prefix_cache(*given, **named)  # type: ignore[misc]


class DecodingScheduler(_Decoding, Scheduler):  # type: ignore[misc]
    """vLLM's Scheduler."""


class AsyncDecodingScheduler(_Decoding, AsyncScheduler):  # type: ignore[misc]
    """vLLM's AsyncScheduler."""

    is_ahead = True
