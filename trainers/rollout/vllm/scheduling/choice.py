"""Which scheduler an engine is given."""

from __future__ import annotations

from typing import Any

from trainers.rollout.vllm.patches import is_compared

VLLMS = ("vllm.v1.core.sched.scheduler.Scheduler", "vllm.v1.core.sched.async_scheduler.AsyncScheduler")
OURS = (
    "trainers.rollout.vllm.scheduling.scheduler.DecodingScheduler",
    "trainers.rollout.vllm.scheduling.scheduler.AsyncDecodingScheduler",
)


def decoding_scheduler(settings: Any) -> str | None:
    """The name of our scheduler for the one that vLLM's SchedulerConfig chooses.

    None: it chooses a scheduler that is not vLLM's usual one, or ours was not compared with this version of vLLM.
    """
    chosen = settings.scheduler_cls
    if chosen is None:
        chosen = VLLMS[bool(settings.async_scheduling)]
    elif not isinstance(chosen, str):
        chosen = f"{chosen.__module__}.{chosen.__qualname__}"
    if chosen not in VLLMS or not is_compared("decoding_scheduler"):
        return None
    return OURS[VLLMS.index(chosen)]
