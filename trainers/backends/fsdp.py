"""The ``fsdp`` backend: a transformers model, trained by one process or data-parallel over the workers of a role.

    Sequences (ragged) --pad--> micro-batches --Scorer--> logps, entropy of target tokens --loss function--> gradient
                                                  |
                                    DistributedDataParallel when the process group has several members

Gradients are *sums* over micro-batches and workers: the loss function divides by the normaliser of the whole optimizer
step. DDP averages, so the loss is multiplied by the number of workers. Every worker runs the same number of
micro-batches, the last ones empty if need be, so that collectives stay in step and an empty slice is no special case.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainers.backends.base import LossFunction
from trainers.backends.head import Head, Scores
from trainers.backends.hf_model import (
    build_model,
    default_device,
    evaluating,
    load_named_weights,
    named_weights,
    read_weights,
    write_model,
    zero_dropout,
)
from trainers.batch import Ragged, Sequences
from trainers.metrics import Metrics


class FsdpBackend:
    """A causal language model and, unless it only scores, its AdamW optimizer and schedule.

    Weights and optimizer states are float32; ``dtype='bfloat16'`` runs the forward pass under autocast. A model that
    only scores (``learning_rate=None``) is kept in ``dtype``. ``device`` None: the GPU of this process, or the CPU.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str | torch.device | None = None,
        learning_rate: float | None = None,
        num_training_steps: int = 0,
        weight_decay: float = 0.0,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
        max_grad_norm: float = 1.0,
        lr_scheduler_type: str = "linear",
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        warmup_steps: int = 0,
        gradient_checkpointing: bool = False,
        disable_dropout: bool = True,
        seed: int = 42,
        model_init_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import get_scheduler, set_seed

        set_seed(seed)
        self.device = default_device() if device is None else torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        trains = learning_rate is not None
        self.module: Any = build_model(
            model,
            dtype=torch.float32 if trains else self.dtype,
            device=self.device,
            model_init_kwargs=model_init_kwargs,
            trust_remote_code=trust_remote_code,
        )
        self.config = copy.deepcopy(self.module.config)  # as it is written: with its dropout
        if disable_dropout:
            zero_dropout(self.module)
        self.module.train(trains)
        if gradient_checkpointing and trains:
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.scorer = Scorer(self.module)
        self.forward: torch.nn.Module = self.scorer
        self.optimizer: torch.optim.Optimizer | None = None
        if learning_rate is None:
            self.module.requires_grad_(False)
            return
        if self.world_size > 1:
            devices = [self.device.index] if self.device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.scorer, device_ids=devices, gradient_as_bucket_view=True)
        self.max_grad_norm = max_grad_norm
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.module, weight_decay),
            lr=learning_rate,
            betas=(adam_beta1, adam_beta2),
            eps=adam_epsilon,
            fused=self.device.type == "cuda",
        )
        self.scheduler = get_scheduler(
            lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=dict(lr_scheduler_kwargs or {}),
        )

    @torch.no_grad()
    def token_logps(self, sequences: Sequences, *, micro_batch_size: int, temperature: float = 1.0) -> Ragged:
        """float32 log-probabilities of each row's targets under softmax(logits / temperature). Any rank, alone too.

        Without dropout they are, bit for bit, those that ``step`` finds for the same micro-batches.
        """
        with evaluating(self.module):
            parts = [
                self._scores(self.scorer, sequences[start : start + micro_batch_size], temperature).logps_N
                for start in range(0, len(sequences), micro_batch_size)
            ]
        values = torch.cat(parts).cpu().numpy() if parts else np.zeros(0, np.float32)
        return Ragged.split(values, num_targets(sequences))

    def step(
        self,
        sequences: Sequences,
        loss_function: LossFunction[Any],
        *,
        micro_batch_size: int,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
    ) -> Metrics:
        """One optimizer step; every rank calls it. See ``Backend.step``."""
        assert self.optimizer is not None, "this model only scores: it was built without a learning rate"
        metrics = Metrics()
        num_micro = self._most(-(-len(sequences) // micro_batch_size) or 1)
        for k in range(num_micro):
            micro = sequences[k * micro_batch_size : (k + 1) * micro_batch_size]
            with self._synchronised(last=k == num_micro - 1):
                scores = self._scores(self.forward, micro, temperature, entropy_gradient)
                loss = _loss(scores, loss_function, micro, metrics)
                (loss * self.world_size).backward()
            metrics.sum("loss", loss.item())
        grad_norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm or float("inf"))
        metrics.same("grad_norm", float(grad_norm))
        metrics.same("learning_rate", self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def _scores(
        self, forward: torch.nn.Module, micro: Sequences, temperature: float, entropy_gradient: bool = False
    ) -> Scores:
        inputs = padded_inputs(micro, self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return Scores(*forward(*inputs, temperature, entropy_gradient))

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.forward, DistributedDataParallel) and not last:
            return self.forward.no_sync()
        return contextlib.nullcontext()

    def _most(self, count: int) -> int:
        """The largest count of any rank."""
        if self.world_size == 1:
            return count
        counts = torch.tensor(count, device=self.device)
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        return int(counts)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under the names of a checkpoint, tied ones once. Any rank."""
        return named_weights(self.module)

    def load_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the weights in place; see ``load_named_weights``. Every rank."""
        load_named_weights(self.module, named_weights)

    def export(self, folder: Path, tokenizer: Any = None) -> None:
        """Writes the model alone in ``dtype``, as a Hugging Face folder (rank 0 does)."""
        if self.rank == 0:
            write_model(self.module, Path(folder), dtype=self.dtype, config=self.config)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

    def save(self, folder: Path) -> None:
        """Writes the model as it is in memory, optimizer, schedule and every rank's random state. Every rank."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            write_model(self.module, folder, dtype=self.module.dtype, config=self.config)
            if self.optimizer is not None:
                torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
                torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")
        torch.save(random_state(self.device), folder / f"rng_state_{self.rank}.pth")
        if self.world_size > 1:
            dist.barrier()

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote, bit for bit. Every rank.

        A rank that had no part in the saved run (there were fewer) keeps its own random state.

        Raises:
            FileNotFoundError: the folder is not one that ``save`` of a training backend wrote.
        """
        folder = Path(folder)
        load_named_weights(self.module, read_weights(folder))
        if self.optimizer is not None:
            self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu"))
            self.scheduler.load_state_dict(torch.load(folder / "scheduler.pt"))
        states = folder / f"rng_state_{self.rank}.pth"
        if states.exists():
            set_random_state(torch.load(states, weights_only=False), self.device)


class Scorer(torch.nn.Module):
    """A language model that answers with the scores of target tokens; what DDP wraps."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = Head(model)

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        position_ids_BT: torch.Tensor | None,
        predicting_N: torch.Tensor,
        target_ids_N: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, ...]:
        """``predicting_N``: places, in the flattened (B, T), whose logits predict ``target_ids_N``."""
        inputs = {"input_ids": input_ids_BT}
        if position_ids_BT is not None:
            inputs["position_ids"] = position_ids_BT
        features_NX = self.head.features(self.model, predicting_N, **inputs)
        return tuple(self.head.scores(features_NX, target_ids_N, temperature, entropy_gradient=entropy_gradient))


def padded_inputs(micro: Sequences, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """What ``Scorer`` is called with: rows padded on the right. A micro-batch without tokens becomes one of padding.

    There is no attention mask: no token looks at what follows it, so padding on the right reaches no target, and
    attention keeps its fastest kernel. Packed rows have positions that start anew with every document, by which
    transformers keeps the documents apart; the padding behind them is a document of its own.

    Raises:
        ValueError: a target that is the first token of its document, or documents that do not add up to their row.
    """
    input_ids_BT = micro.input_ids.padded(0)
    if not input_ids_BT.numel():
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        return torch.zeros(1, 1, dtype=torch.long, device=device), None, nothing, nothing
    position_ids_BT = None if micro.segment_lengths is None else _positions(micro, input_ids_BT.shape[1])
    is_first_BT = torch.zeros_like(input_ids_BT, dtype=torch.bool)
    is_first_BT[:, 0] = True
    if position_ids_BT is not None:
        is_first_BT = position_ids_BT == 0
    is_target_BT = micro.target_mask.padded(False)
    wrong = (is_target_BT & is_first_BT).any(1).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"the first token of a document has nothing before it and cannot be a target (row {wrong[0]} of a "
            f"micro-batch of {len(micro)}): set its target_mask to False"
        )
    targets_N = is_target_BT.flatten().nonzero().flatten()
    tensors = (input_ids_BT, position_ids_BT, targets_N - 1, input_ids_BT.flatten()[targets_N])
    return tuple(None if tensor is None else tensor.to(device) for tensor in tensors)


def num_targets(sequences: Sequences) -> np.ndarray:
    """(B,) target tokens of each row."""
    ends = np.concatenate([[0], np.cumsum(sequences.target_mask.values)])
    counts: np.ndarray = ends[sequences.target_mask.offsets[1:]] - ends[sequences.target_mask.offsets[:-1]]
    return counts


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, those of ``device`` among them."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Puts back what ``random_state`` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _loss(scores: Scores, loss_function: LossFunction[Any], micro: Sequences, metrics: Metrics) -> torch.Tensor:
    nothing = scores.logps_N[:0].sum()  # reaches every weight, with gradients of zero, whatever the loss looks at
    if not len(micro):
        return nothing
    counts = torch.from_numpy(num_targets(micro)).to(scores.logps_N.device)
    mask_BT = torch.arange(int(num_targets(micro).max()), device=counts.device)[None, :] < counts[:, None]
    logps_BT = torch.zeros(mask_BT.shape, device=counts.device).masked_scatter(mask_BT, scores.logps_N)
    entropy_BT = torch.zeros(mask_BT.shape, device=counts.device).masked_scatter(mask_BT, scores.entropy_N)
    metrics.mean("mean_token_accuracy", float(scores.is_top1_N.sum()), len(scores.is_top1_N))
    return loss_function(logps_BT, entropy_BT, mask_BT, micro, metrics) + nothing


def _parameter_groups(module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """As transformers' Trainer: no decay of biases and norms."""
    from transformers.trainer_pt_utils import get_parameter_names

    forbidden = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decayed = set(get_parameter_names(module, [torch.nn.LayerNorm], forbidden))
    groups = [(True, weight_decay), (False, 0.0)]
    return [
        {"params": [p for n, p in module.named_parameters() if (n in decayed) == decays], "weight_decay": decay}
        for decays, decay in groups
    ]


def _positions(micro: Sequences, width: int) -> torch.Tensor:
    """(B, width) positions within documents."""
    assert micro.segment_lengths is not None
    rows = []
    for row, (lengths, total) in enumerate(zip(micro.segment_lengths, micro.input_ids.lengths, strict=True)):
        if lengths.sum() != total:
            raise ValueError(
                f"segment_lengths of row {row} of a micro-batch add up to {lengths.sum()}; the row has {total} tokens"
            )
        lengths = np.append(lengths, width - total)
        rows.append(np.arange(width) - np.repeat(np.cumsum(lengths) - lengths, lengths))
    return torch.from_numpy(np.stack(rows))
