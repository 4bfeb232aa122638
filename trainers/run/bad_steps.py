"""The optimizer steps of a run that changed nothing, as their loss or gradient norm was not finite."""

from __future__ import annotations

import logging

from trainers.metrics import Metrics

BAD_STEPS = "bad_steps"  # the metric's name
NAMED = 20  # rows in a message
logger = logging.getLogger(__name__)


class BadStepsError(RuntimeError):
    """Too many steps in a row had a loss or a gradient norm that is not finite."""


class BadSteps:
    """Counts them, in all and one after the other. ``most``: consecutive ones that end the run."""

    def __init__(self, most: int, count: int = 0) -> None:
        self.most, self.count = most, count
        self.consecutive = 0
        self.rows: set[int] = set()  # of the consecutive ones
        self.found = ""

    @property
    def is_last(self) -> bool:
        """Whether the last step was one."""
        return self.consecutive > 0

    def add(self, step: int, metrics: Metrics) -> None:
        """Looks at the metrics of a step; a bad one gets a line in the log."""
        values = metrics.values()
        if not values.get(BAD_STEPS):
            self.consecutive, self.rows = 0, set()
            return
        self.count += 1
        self.consecutive += 1
        self.rows |= set(metrics.bad_rows)
        self.found = f"loss {values.get('loss', 0.0):g}, gradient norm {values.get('grad_norm', 0.0):g}"
        logger.warning(
            "step %d was skipped: %s, %s. No weight was changed (bad step %d of at most %d in a row)",
            *(step, self.found, named(metrics.bad_rows), self.consecutive, self.most),
        )

    def check(self) -> None:
        """Raises BadStepsError, naming the rows, if no more bad steps are borne."""
        if self.consecutive >= self.most:
            raise BadStepsError(
                f"{self.consecutive} optimizer steps in a row had no finite loss or gradient norm (the last one: "
                f"{self.found}), {named(sorted(self.rows))}. They changed no weight. Look at these rows and their "
                "rewards, lower learning_rate, or allow more such steps with max_bad_steps."
            )


def named(rows: list[int]) -> str:
    """``rows 3, 7``: places in the data, counted from 0."""
    if not rows:
        return "rows unknown"
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return f"rows {', '.join(map(str, rows[:NAMED]))}{more}"
