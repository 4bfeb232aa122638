"""Micro-batches through the stages of a model, by megatron-core's schedules; also where there is one stage.

Every worker runs the same number of micro-batches, the last ones empty if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainers.backends.megatron import attention, layout
from trainers.backends.megatron.packing import Packed, pack
from trainers.backends.megatron.settings import MegatronSettings
from trainers.backends.megatron.vision.tower import Tower
from trainers.backends.scores.inputs import ReadAt
from trainers.batch import Ragged, Sequences

Finish = Callable[[int, torch.Tensor, Packed], torch.Tensor]


class Pipeline:
    """The ``stages`` of this worker, which stands at ``at``; ``read_at``: where numbers of targets are read off.

    ``tower``: of a model that sees pictures.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        at: layout.Coordinates,
        settings: MegatronSettings,
        *,
        read_at: ReadAt,
        device: torch.device,
        tower: Tower | None = None,
    ) -> None:
        self.tower = tower
        self.stages, self.at, self.settings, self.read_at, self.device = list(stages), at, settings, read_at, device
        self.tells_length = stages[
            0
        ].config.variable_seq_lengths  # else all rows have one, for a dispatcher that gathers

    def run(self, micros: Sequence[Sequences], finish: Finish, *, learns: bool) -> None:
        """``finish`` makes of the last stage's output of each micro-batch what is learned from. Every rank calls it."""
        num_micro = self.num_micro(len(micros))
        nothing = Sequences(Ragged.of([], np.int64), Ragged.of([], bool))
        filled = [*micros, *[nothing] * (num_micro - len(micros))]
        packs, length = [self._packed(micro) for micro in filled], self.at.tensor_size
        if not self.tells_length:
            length = self._largest(max(len(one.input_ids_S) for one in packs))
            packs = [self._packed(micro, length) for micro in filled]

        def finished(k: int, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            return finish(k, output, packs[k]), torch.zeros((), dtype=torch.int, device=self.device), {}

        def run(numbers: Iterator[int], stage: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            k = next(numbers)
            return stage(packs[k]), partial(finished, k)

        try:
            get_forward_backward_func()(
                forward_step_func=run,
                data_iterator=[iter(range(num_micro)) for _ in self.stages],
                model=self.stages,
                num_microbatches=num_micro,
                seq_length=length * self.at.context_size,
                micro_batch_size=1,
                forward_only=not learns,
            )
        finally:
            attention.forget()

    def num_micro(self, count: int) -> int:
        """The largest count of any rank, at least one, and a multiple of the stages where they are virtual."""
        unit = self.at.pipeline_size if self.settings.virtual_stages else 1
        return -(-self._largest(max(1, count)) // unit) * unit

    def from_last_stage(self, values: torch.Tensor) -> None:
        """Fills ``values`` on every stage with what the last one has."""
        if self.at.pipeline_size > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(values, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)

    def _packed(self, micro: Sequences, at_least: int = 0) -> Packed:
        return pack(
            micro,
            self.device,
            read_at=self.read_at,
            context=self.at.context,
            context_size=self.at.context_size,
            divisor=(self.at.tensor_size if self.settings.is_sequence_parallel else 1) * self.settings.fp8_rows,
            at_least=at_least,
            tower=self.tower,
        )

    def _largest(self, number: int) -> int:
        """The largest of the numbers of all ranks."""
        numbers = torch.tensor(number, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)
