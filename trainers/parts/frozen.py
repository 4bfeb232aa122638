"""Models that do not learn: the reference that a policy is kept close to, and a teacher.

    reference = Reference(config)                  # role reference
    reference.build(path)
    ref_logps = reference.logps(samples)           # Ragged: a log-probability per target token
    reference.follow(policy, step)                 # mixes the policy into it every few steps, if it was asked to
    teacher = Teacher(config)                      # role teacher: logps and top_logps

What every model can do is ``Model`` (``policy.py``).
"""

from __future__ import annotations

from typing import Any

import torch

from rayhelper import RayHelper
from trainers.configuration.shared import TrainConfig
from trainers.parts.policy import Model, Trained


@RayHelper.worker(group="reference")
class Reference(Model):
    """The reference model, of role reference; ``every`` so many steps it takes ``share`` of the policy's weights.

    ``every`` None: it stays as it is.
    """

    def __init__(self, config: TrainConfig, *, every: int | None = None, share: float = 0.0, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.every, self.share = every, share

    def follow(self, policy: Trained, step: int) -> None:
        """Mixes the policy, which has made ``step`` optimizer steps, into the reference when that is due."""
        if self.every is not None and step % self.every == 0:
            weights: Any = policy.weights.defer()  # goes from worker to workers, not through the driver
            self.mix(weights)

    @RayHelper.function(group="reference")
    def mix(self, weights: dict[str, torch.Tensor]) -> None:
        """weights = share x given + (1 - share) x own."""
        self.built.mix_weights(weights.items(), self.share)

    @RayHelper.function(group="reference")
    def free(self) -> None:
        """Drops the model."""
        self.backend = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@RayHelper.worker(group="teacher")
class Teacher(Model):
    """The teacher, of role teacher."""
