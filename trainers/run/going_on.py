"""A run whose workers died goes on by itself: ``resume_on_failure``.

    going_on(config, start)      start(config), and again from the newest checkpoint while resumes are left
    how_to_continue()            the advice of a run that ended early

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
logger = logging.getLogger(__name__)


def how_to_continue() -> str:
    """What to do after a run that ended early and left a checkpoint. A run inside a plugin has no command."""
    name = builds_model.get()
    if name is None:
        return "To go on, run the same command with --resume_from_checkpoint auto"
    return f"This run builds model {name!r} of a plugin. The same command begins it at step 0"


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
                where = f"goes on from {found}" if is_own else "begins again, as it has no checkpoint yet"
                logger.warning("resume_on_failure: the run %s, %d resumes left: %s", where, num_left, told)
            config = dataclasses.replace(config, resume_from_checkpoint=str(found) if is_own else first)
    finally:
        is_going_on.reset(token)
