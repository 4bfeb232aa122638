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
from trainers.batch import Ragged, Sequences
from trainers.metrics import Metrics


class FsdpBackend:
    """A causal language model and, unless it only scores, its AdamW optimizer and schedule.

    Weights and optimizer states are float32; ``dtype='bfloat16'`` runs the forward pass under autocast. A model that
    only scores (``learning_rate=None``) is kept in ``dtype``.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
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
        from transformers import AutoModelForCausalLM, get_scheduler, set_seed

        set_seed(seed)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.dtype = getattr(torch, dtype)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        trains = learning_rate is not None
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=torch.float32 if trains else self.dtype,
            trust_remote_code=trust_remote_code,
            **dict(model_init_kwargs or {}),
        )
        self.module: Any = loaded.to(self.device)
        if disable_dropout:
            _disable_dropout(self.module)
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
            self.forward = DistributedDataParallel(self.scorer, device_ids=devices)
        self.max_grad_norm = max_grad_norm
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.module, weight_decay),
            lr=learning_rate,
            betas=(adam_beta1, adam_beta2),
            eps=adam_epsilon,
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
        """float32 log-probabilities of each row's targets under softmax(logits / temperature). Any rank, alone too."""
        parts = [
            self._scores(self.scorer, sequences[start : start + micro_batch_size], temperature).logps_N.cpu().numpy()
            for start in range(0, len(sequences), micro_batch_size)
        ]
        values = np.concatenate(parts) if parts else np.zeros(0, np.float32)
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
        """The weights under their Hugging Face names, tied ones once. Any rank."""
        seen: set[int] = set()
        for name, weight in self.module.state_dict(keep_vars=True).items():
            if weight.data_ptr() not in seen or not weight.numel():
                seen.add(weight.data_ptr())
                yield name, weight.detach()

    def load_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the weights in place; see ``load_named_weights``."""
        load_named_weights(self.module, named_weights)

    def export(self, folder: Path, tokenizer: Any = None) -> None:
        """Writes a Hugging Face folder (rank 0 does)."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.module.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

    def save(self, folder: Path) -> None:
        """Writes model, optimizer, schedule and every rank's random state. Every rank calls it."""
        folder = Path(folder)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.export(folder)
        if rank == 0 and self.optimizer is not None:
            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
            torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")
        torch.save(random_state(), folder / f"rng_state_{rank}.pth")
        if self.world_size > 1:
            dist.barrier()

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote, bit for bit. Every rank calls it.

        A rank that had no part in the saved run (there were fewer) keeps its own random state.
        """
        from safetensors.torch import load_file

        folder = Path(folder)
        rank = dist.get_rank() if dist.is_initialized() else 0
        for file in sorted(folder.glob("model*.safetensors")):
            load_named_weights(self.module, load_file(file, device=str(self.device)).items())
        if self.optimizer is not None:
            self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location=self.device))
            self.scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=False))
        states = folder / f"rng_state_{rank}.pth"
        if states.exists():
            set_random_state(torch.load(states, weights_only=False))


class Scorer(torch.nn.Module):
    """A language model that answers with the scores of target tokens; what DDP wraps."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = Head(model)

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        attention_mask_BT: torch.Tensor | None,
        position_ids_BT: torch.Tensor,
        predicting_N: torch.Tensor,
        target_ids_N: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, ...]:
        """``predicting_N``: places, in the flattened (B, T), whose logits predict ``target_ids_N``."""
        hidden_BTH = self.model.base_model(
            input_ids=input_ids_BT,
            attention_mask=attention_mask_BT,
            position_ids=position_ids_BT,
            use_cache=False,
        ).last_hidden_state
        hidden_NH = hidden_BTH.flatten(0, 1)[predicting_N]
        return tuple(self.head.scores(hidden_NH, target_ids_N, temperature, entropy_gradient=entropy_gradient))


def padded_inputs(micro: Sequences, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """What ``Scorer`` is called with: rows padded on the right. An empty micro-batch becomes one token of padding.

    Packed rows have positions that start anew with every document and no attention mask: transformers then keeps the
    documents apart; the padding behind them is a document of its own.
    """
    if not len(micro):
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        one = torch.zeros(1, 1, dtype=torch.long, device=device)
        return one, torch.ones_like(one), one, nothing, nothing
    input_ids_BT = micro.input_ids.padded(0, device)
    is_target_BT = micro.target_mask.padded(False, device)
    width = input_ids_BT.shape[1]
    if micro.segment_lengths is None:
        attention_mask_BT = micro.input_ids.mask(device).long()
        position_ids_BT = torch.arange(width, device=device).expand_as(input_ids_BT)
    else:
        attention_mask_BT = None
        rows = [_restarting(lengths, width) for lengths in micro.segment_lengths]
        position_ids_BT = torch.from_numpy(np.stack(rows)).to(device)
    targets_N = is_target_BT.flatten().nonzero().squeeze(-1)
    first = (targets_N % width == 0) if micro.segment_lengths is None else position_ids_BT.flatten()[targets_N] == 0
    if bool(first.any()):
        raise ValueError("the first token of a document has nothing before it and cannot be a target")
    return input_ids_BT, attention_mask_BT, position_ids_BT, targets_N - 1, input_ids_BT.flatten()[targets_N]


def num_targets(sequences: Sequences) -> np.ndarray:
    """(B,) target tokens of each row."""
    ends = np.concatenate([[0], np.cumsum(sequences.target_mask.values)])
    counts: np.ndarray = ends[sequences.target_mask.offsets[1:]] - ends[sequences.target_mask.offsets[:-1]]
    return counts


def load_named_weights(module: Any, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copies weights into a model by their names; those tied to a given one follow.

    Raises:
        ValueError: a name or shape the model does not have, or a weight that was not given.
    """
    own = module.state_dict(keep_vars=True)
    given: set[int] = set()
    with torch.no_grad():
        for name, weight in named_weights:
            if name not in own or own[name].shape != weight.shape:
                there = tuple(own[name].shape) if name in own else "no such weight"
                raise ValueError(f"weight {name!r} {tuple(weight.shape)} does not fit the model: {there}")
            own[name].copy_(weight)
            given.add(own[name].data_ptr())
    missing = [name for name, weight in own.items() if weight.numel() and weight.data_ptr() not in given]
    if missing:
        raise ValueError(f"{len(missing)} weights of the model were not given, among them {missing[:3]}")


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts back what ``random_state`` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _loss(scores: Scores, loss_function: LossFunction[Any], micro: Sequences, metrics: Metrics) -> torch.Tensor:
    counts = torch.from_numpy(num_targets(micro)).to(scores.logps_N.device)
    width = int(counts.max()) if len(counts) else 0
    mask_BT = torch.arange(width, device=counts.device)[None, :] < counts[:, None]
    logps_BT = torch.zeros(mask_BT.shape, device=counts.device).masked_scatter(mask_BT, scores.logps_N)
    entropy_BT = torch.zeros(mask_BT.shape, device=counts.device).masked_scatter(mask_BT, scores.entropy_N)
    metrics.mean("mean_token_accuracy", float(scores.is_top1_N.sum()), len(scores.is_top1_N))
    loss = loss_function(logps_BT, entropy_BT, mask_BT, micro, metrics)
    return loss + 0.0 * scores.logps_N.sum()  # an empty micro-batch still has a gradient, of zeros


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


def _disable_dropout(module: torch.nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0  # type: ignore[assignment]


def _restarting(lengths: np.ndarray, width: int) -> np.ndarray:
    lengths = np.append(lengths, width - lengths.sum())
    return np.concatenate([np.arange(length) for length in lengths])
