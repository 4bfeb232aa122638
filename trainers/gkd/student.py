"""GKD's student, of role train: a policy that learns to predict as its teacher does.

    student = Student(config, teacher)
    student.build(path, num_steps, vocab_size=size)      # ``vocab_size``: the tokens that both models score
    metrics = student.learn(samples, answer, numbers)    # one optimizer step
    metrics = student.compare(samples, answer, num_rows, sft_alpha)  # the loss, without learning

An ``answer`` is the teacher's ``TopLogps``, or a future of them, which then go from worker to workers. None: the
teacher is in the student's process, and is asked in passing for the whole vocabulary.
"""

from __future__ import annotations

import contextlib
from typing import Any

from rayhelper import RayHelper
from trainers.backends.base import Backend
from trainers.batch import TopLogps
from trainers.gkd.config import GKDConfig
from trainers.gkd.loss import Divergence, StepNumbers, divergence_of, gkd_loss, measure_divergence
from trainers.gkd.samples import DistillationSamples
from trainers.gkd.teacher import GKDTeacher
from trainers.metrics import Metrics
from trainers.parts.policy import Policy


@RayHelper.worker(group="train")
class Student(Policy):
    """The student of ``teacher``."""

    config: GKDConfig
    divergence: Divergence

    def __init__(self, config: GKDConfig, teacher: GKDTeacher) -> None:
        super().__init__(config, loss=gkd_loss, temperature=1.0)  # the divergence has its own
        self.teacher = teacher

    @RayHelper.function(group="train", dispatch="slice", collect=Metrics.merge)
    def learn(self, samples: DistillationSamples, answer: TopLogps | None, numbers: StepNumbers) -> Metrics:
        """One optimizer step over all workers."""
        with self.taught(answer):
            return self.step(samples.answered(answer), numbers)

    @RayHelper.function(group="train", dispatch="slice", collect=Metrics.merge)
    def compare(
        self, samples: DistillationSamples, answer: TopLogps | None, num_rows: int, sft_alpha: float
    ) -> Metrics:
        """The loss without learning; ``num_rows``: the samples over all workers."""
        size = self.config.per_device_eval_batch_size
        most = -(-num_rows // RayHelper.current().shard.count)  # of any worker
        with self.taught(answer):
            return measure_divergence(
                self.built,
                self.divergence,
                samples.answered(answer),
                micro_batch_size=size,
                num_micro=-(-most // size),
                sft_alpha=sft_alpha,
            )

    def taught(self, answer: TopLogps | None) -> contextlib.AbstractContextManager[Any]:
        """Inside, the teacher is on the device if it has not answered yet."""
        return self.teacher.at_hand() if answer is None else contextlib.nullcontext()

    def new_backend(self, model: str, num_steps: int | None, **settings: Any) -> Backend:
        """The model, and what it is compared by."""
        vocab_size = settings.pop("vocab_size")
        backend = super().new_backend(model, num_steps, **settings)
        self.divergence = divergence_of(self.config, self.teacher.backend or backend, vocab_size)
        self.token_function = self.divergence
        return backend
