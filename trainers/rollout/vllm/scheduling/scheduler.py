"""The schedulers that vLLM is given by name as ``scheduler_cls``: vLLM's own, but for steps that only decode.

Such a step is planned from arrays, and what it drew is taken in as arrays (``steps.py``). Its tokens that end nothing
are given out by ``steps.take_decoded``, and not among vLLM's outputs.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from trainers.rollout.vllm.scheduling.steps import Steps


class DecodingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's Scheduler."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.steps = Steps(self, is_ahead=False)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        return _schedule(self, super(), throttle_prefills)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        rest = self.steps.take(scheduler_output, model_runner_output)
        return super().update_from_output(rest, model_runner_output)

    def finish_requests(self, *given: Any, **named: Any) -> Any:
        self.steps.settle()
        return super().finish_requests(*given, **named)

    def reset_prefix_cache(self, *given: Any, **named: Any) -> Any:
        self.steps.settle()
        return super().reset_prefix_cache(*given, **named)


class AsyncDecodingScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's AsyncScheduler, which plans a step before the tokens of the last one are known."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.steps = Steps(self, is_ahead=True)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        return _schedule(self, super(), throttle_prefills)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        rest = self.steps.take(scheduler_output, model_runner_output)
        return super().update_from_output(rest, model_runner_output)

    def finish_requests(self, *given: Any, **named: Any) -> Any:
        self.steps.settle()
        return super().finish_requests(*given, **named)

    def reset_prefix_cache(self, *given: Any, **named: Any) -> Any:
        self.steps.settle()
        return super().reset_prefix_cache(*given, **named)


def _schedule(scheduler: Any, vllms: Any, throttle_prefills: bool) -> Any:
    if throttle_prefills:
        scheduler.steps.settle()
    elif (planned := scheduler.steps.plan()) is not None:
        return planned
    return vllms.schedule(throttle_prefills)
