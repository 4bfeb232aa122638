"""Models that do not learn: the reference that a policy is kept close to, and a teacher.

    reference = Reference(config)                  # role reference
    reference.build(path)
    ref_logps = reference.logps(samples)           # Ragged: a log-probability per target token
    ref_logps = reference.precomputed(path, parts) # all that a run will ask; the model is freed
    reference.follow(policy, step)                 # mixes the policy into it every few steps, if it was asked to
    teacher = Teacher(config)                      # role teacher: logps and top_logps

What every model can do is ``Model`` (``policy.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rayhelper import RayHelper
from trainers.backends.base import Steppable
from trainers.batch import Ragged
from trainers.configuration.shared import TrainConfig
from trainers.parts.policy import Model, Trained
from trainers.run.reference_store import read_reference_logps, write_reference_logps
from trainers.run.run import resumed_state


@RayHelper.worker(group="reference")
class Reference(Model):
    """The reference model, of role reference. Every ``every`` steps, it mixes in ``share`` of the policy's weights.

    ``every`` None: it does not change.
    """

    def __init__(self, config: TrainConfig, *, every: int | None = None, share: float = 0.0, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.every, self.share = every, share

    def follow(self, policy: Trained, step: int) -> None:
        """Mixes the policy into the reference if that is due after ``step`` optimizer steps."""
        if self.every is not None and step % self.every == 0:
            weights: Any = policy.weights.defer()  # goes from worker to workers, not through the driver
            self.mix(weights)

    def precomputed(self, model: str, parts: Sequence[Steppable], *, micro_batch_size: int) -> list[Ragged]:
        """The model's log-probabilities of the targets of each part's sequences. Then the model is freed.

        A resumed run reads the saved log-probabilities. A new run does not, because the folder may now hold another
        model.
        """
        checkpoint, _ = resumed_state(self.config)
        sequences = [part.as_sequences() for part in parts]
        known = None if checkpoint is None else read_reference_logps(checkpoint.parent, sequences, model)
        if known is None:
            self.build(model)
            scored = [self.logps(part, micro_batch_size=micro_batch_size) for part in parts]
            self.free()
            known = [one if isinstance(one, Ragged) else Ragged.concat(one) for one in scored]
            write_reference_logps(Path(self.config.output_dir), sequences, model, known)
        return known

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
