"""A run whose workers died goes on by itself: ``resume_on_failure``.

    going_on(config, start)      start(config), and again from the newest checkpoint while resumes are left
    resume_asked(config)         from which checkpoint a run is to continue

All workers are ended first and then started anew, so that the run goes on as a new command with
``resume_from_checkpoint`` would, equal to one that never failed to the last bit.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rayhelper import DeadlineError, WorkerDiedError
from trainers.checkpoint import ages, newest

FAILURES = (WorkerDiedError, DeadlineError)
is_going_on: ContextVar[bool] = ContextVar("is_going_on", default=False)  # whether ``going_on`` runs the trainer
builds_model: ContextVar[str | None] = ContextVar("builds_model", default=None)  # of a plugin, which may train it
resumes_too: ContextVar[bool] = ContextVar("resumes_too", default=False)  # runs that build the model, as the command's
CONTINUE = "To continue, run the same command with --resume_from_checkpoint auto"
logger = logging.getLogger(__name__)


def resume_asked(config: Any) -> Any:
    """``resume_from_checkpoint`` of a run; ``auto`` for one inside a plugin whose building is continued."""
    return config.resume_from_checkpoint or ("auto" if resumes_too.get() else None)


def going_on(config: Any, start: Callable[[Any], dict[str, float]]) -> dict[str, float]:
    """What ``start(config)`` returns, which starts the workers, trains and ends them.

    After one of ``FAILURES`` it is called again, ``config.resume_on_failure`` times at most, with the newest checkpoint
    that this run wrote as ``resume_from_checkpoint``; as at first while there is none.
    """
    num_left, folder = getattr(config, "resume_on_failure", 0), Path(getattr(config, "output_dir", ""))
    if not num_left:
        return start(config)
    before = ages(folder)
    first = config.resume_from_checkpoint
    token = is_going_on.set(True)
    try:
        while True:
            try:
                return start(config)
            except FAILURES as error:
                if num_left == 0:
                    error.add_note(f"resume_on_failure: all {config.resume_on_failure} resumes were used")
                    raise
                num_left -= 1
                found = newest(folder).folder
                is_own = found is not None and ages(folder)[found] != before.get(found)
                told = str(error).partition("\n")[0]
                where = f"continues from {found}" if is_own else "begins again, because it has no checkpoint yet"
                logger.warning("resume_on_failure: the run %s, %d resumes left: %s", where, num_left, told)
            config = dataclasses.replace(config, resume_from_checkpoint=str(found) if is_own else first)
    finally:
        is_going_on.reset(token)
