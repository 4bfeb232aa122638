"""Whether an optimizer step may change the weights: its loss and its gradient norm are finite on every rank.

One NaN in a gradient makes every weight NaN, on all ranks, and what the optimizer remembers as well. So the ranks agree
before the optimizer is asked, and a step that fails changes nothing anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainers.metrics import Metrics
from trainers.run.bad_steps import BAD_STEPS


class FiniteStep:
    """The losses of the micro-batches of one step, and the rows that they are of."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.losses: list[torch.Tensor] = []
        self.rows: list[Any] = []  # (rows,) places in the data of each micro-batch; None: unknown

    def add(self, loss: torch.Tensor, micro: Any) -> None:
        """The loss of ``micro``, whose column ``row_ids`` names its rows where it has one."""
        self.losses.append(loss.detach())
        self.rows.append(getattr(micro, "row_ids", None))

    def allows(self, grad_norm: torch.Tensor | float, metrics: Metrics) -> bool:
        """Whether loss and gradient norm are finite on all ranks; every rank calls it, and all get the same answer.

        Otherwise ``metrics`` get ``bad_steps`` 1, and the rows of this rank whose loss is not finite.
        """
        norm = torch.as_tensor(grad_norm, dtype=torch.float64, device=self.device).reshape(())
        losses = [loss.to(self.device, torch.float64) for loss in self.losses]
        seen = torch.stack([norm, torch.stack(losses).sum() if losses else torch.zeros_like(norm)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(seen)
        if bool(seen.isfinite().all()):
            return True
        metrics.max(BAD_STEPS, 1.0)
        bad = [rows for loss, rows in zip(self.losses, self.rows, strict=True) if not bool(loss.isfinite())]
        metrics.bad_rows = sorted({int(row) for rows in bad if rows is not None for row in rows})
        return False
