"""The ``megatron`` backend: a model of megatron-core, cut over the workers of a role in any of its ways.

    batch (ragged) --cut--> micro-batches --pack--> rows of documents --stages--> hidden states of targets
                                                                                          |
            optimizer <-- gradients, summed over workers <-- loss function <-- numbers of all targets

Workers that share a slice of the batch (tensor, context and pipeline parallelism) get the same rows. On the last stage
each of them has the numbers of all targets, added up over columns of the vocabulary and over tokens of the row, and
computes the same loss, which knows nothing of how the model is cut. In the backward pass each gets its own share.

Gradients are sums over micro-batches and workers, as in ``fsdp/backend.py``, and all run the same number of
micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rayhelper import ConfigError
from trainers.backends.base import SentWeights, TokenFunction, token_lengths
from trainers.backends.device import default_device
from trainers.backends.finite import FiniteStep
from trainers.backends.megatron import layout
from trainers.backends.megatron.adapter_checkpoint import load_adapter, save_adapter
from trainers.backends.megatron.adapters import MegatronAdapter
from trainers.backends.megatron.checkpoint import Writer, check_parts, load_parts, save_parts
from trainers.backends.megatron.fields import check_fields
from trainers.backends.megatron.model import Head, build_stages
from trainers.backends.megatron.model_fields import read_config
from trainers.backends.megatron.optimizer import build_optimizer, build_schedule, gradient_norm, with_gradients
from trainers.backends.megatron.packing import Packed
from trainers.backends.megatron.pipeline import Pipeline
from trainers.backends.megatron.residence import Residence
from trainers.backends.megatron.settings import MegatronSettings
from trainers.backends.megatron.vision.tower import FROZEN, Tower
from trainers.backends.megatron.weights import MegatronWeights
from trainers.backends.random_state import random_state, read_random_state, set_random_state
from trainers.backends.saved_files import read_saved
from trainers.backends.scores.head import LinearHead, Scores, room_of
from trainers.backends.scores.inputs import ReadAt, in_order, micro_batches, targets_of_rows
from trainers.backends.scores.token_loss import token_loss
from trainers.backends.scores.top_logps import TopLogps
from trainers.backends.scores.vocabulary import ShardedVocabulary
from trainers.backends.segments import growing_segments
from trainers.batch import Ragged, Sequences
from trainers.checkpoint import is_written
from trainers.losses.vocabulary import WHOLE, Vocabulary
from trainers.metrics import Metrics
from trainers.run.throughput import add_memory, add_work, peak_flops


class MegatronBackend:
    """A model with a language head, a value head or none; unless it only scores, its optimizer and schedule.

    In bfloat16 the weights are bfloat16, and the optimizer keeps them in float32 beside; a model that only scores
    (``learning_rate=None``) has neither gradients nor optimizer. ``settings`` say how the model is cut.
    ``lora``: fields of peft's LoraConfig that ``adapter_targets.py`` knows; the adapter alone is trained, in float32.
    ``num_labels``: of a value head. ``values_at``: where it is read off, at the token that predicts a target or at
    itself.
    ``model_init_kwargs``: other values of the model's configuration.
    ``logits_memory_gib``: what the head may keep for its backward pass (see ``head.room_of``).
    ``async_save``: checkpoints are written from a copy in the host's memory while training goes on.
    ``vision``: of a model that sees pictures, its frozen parts (vit and aligner) and more (``vision/tower.py``).

    Raises:
        ConfigError: a further field of ``settings`` cannot be used here, such as fp8 without TransformerEngine; or the
            model has what the backend does not apply.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        settings: MegatronSettings,
        head: Head = "lm",
        num_labels: int = 1,
        values_at: ReadAt = "predicting",
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str | torch.device | None = None,
        learning_rate: float | None = None,
        num_training_steps: int = 0,
        optim: str = "adamw_torch",
        optim_kwargs: Mapping[str, Any] | None = None,
        weight_decay: float = 0.0,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
        max_grad_norm: float = 1.0,
        lr_scheduler_type: str = "linear",
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        warmup_steps: int = 0,
        disable_dropout: bool = True,
        lora: Mapping[str, Any] | None = None,
        logits_memory_gib: float | None = None,
        token_budget: int | None = None,
        peak_tflops: float | None = None,
        seed: int = 42,
        model_init_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        async_save: bool = False,
        vision: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import set_seed

        set_seed(seed)
        further = {**settings.transformer, **settings.ddp, **settings.optimizer}
        check_fields(further, has_adapter=lora is not None)
        self.device = default_device() if device is None else torch.device(device)
        self.settings, self.head_kind, self.token_budget = settings, head, token_budget
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.peak_flops = peak_flops(self.device, peak_tflops)
        read_at: ReadAt = values_at if head != "lm" else "predicting"
        self.at = layout.start(settings, seed=seed)
        whole = read_config(model, model_init_kwargs or {}, trust_remote_code=trust_remote_code)
        self.hf = whole.get_text_config()
        if not disable_dropout and learning_rate is not None and self.hf.attention_dropout:
            raise ConfigError(
                f"disable_dropout is false and the model's attention_dropout {self.hf.attention_dropout}, which the "
                "backend megatron does not apply. Set disable_dropout: true."
            )
        seen = FROZEN if vision is None else vision
        self.tower = Tower.of(whole, model, dtype=self.dtype, trust_remote_code=trust_remote_code, **seen)
        self.stages = build_stages(
            self.hf,
            settings,
            head=head,
            num_labels=num_labels,
            dtype=self.dtype,
            device=self.device,
            has_adapter=lora is not None,
            seed=seed,
            tower=self.tower,
        )
        told: dict[str, Any] = {"num_labels": num_labels, "whole": whole, "tower": self.tower}
        self.weights = MegatronWeights(self.hf, self.stages, head=head, **told)
        self.weights.load(model)
        self.adapter: MegatronAdapter | None = None
        if lora is not None:
            values: dict[str, Any] = {"value_head": head == "value", "num_labels": num_labels, "seed": seed}
            self.adapter = MegatronAdapter(self.hf, self.stages, lora, tower=self.tower, **values)
        self.num_active = self.weights.num_active()
        self.module: Any = None  # an engine has its own
        self.sent = SentWeights()
        self.shares_device = False  # with an engine that asked for room
        self.vocabulary = self._vocabulary()
        self.head: LinearHead | None = None
        if head == "lm" and self.at.is_last_stage:
            room = room_of(logits_memory_gib, recomputes=settings.recompute_granularity == "full")
            self.head = LinearHead(self._head_weight, self.vocabulary, room=room)
        self.writer = Writer(in_background=async_save)
        self.chunks: list[Any] = self.stages
        self.optimizer: Any = None
        if learning_rate is None:
            for stage in self.stages:
                stage.requires_grad_(False)
                stage.eval()
        else:
            self.chunks = with_gradients(self.stages, settings)
            self.optimizer = build_optimizer(
                optim,
                self.chunks,
                settings,
                dtype=self.dtype,
                learning_rate=learning_rate,
                weight_decay=weight_decay,
                adam_betas=(adam_beta1, adam_beta2),
                adam_epsilon=adam_epsilon,
                max_grad_norm=max_grad_norm,
                kwargs=optim_kwargs or {},
            )
            self.scheduler = build_schedule(
                lr_scheduler_type,
                learning_rate=learning_rate,
                num_warmup_steps=warmup_steps,
                num_training_steps=num_training_steps,
                kwargs=lr_scheduler_kwargs or {},
            )
        self.residence = Residence(self.stages, self.chunks, self.optimizer, settings)
        where: dict[str, Any] = {"read_at": read_at, "device": self.device, "tower": self.tower}
        self.pipeline = Pipeline(self.chunks, self.at, settings, **where)

    def _head_weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.stages[-1].output_layer()
        return weight[: self._num_columns()]

    def _num_columns(self) -> int:
        """Columns of the vocabulary that this worker has, without padding."""
        if isinstance(self.vocabulary, ShardedVocabulary):
            return self.vocabulary.width
        return int(self.hf.vocab_size)

    def _vocabulary(self) -> Vocabulary:
        if self.at.tensor_size == 1:
            return WHOLE
        shard = self.stages[0].vocab_size // self.at.tensor_size  # padding is in the last ones
        return ShardedVocabulary(self.hf.vocab_size, shard, parallel_state.get_tensor_model_parallel_group())

    @property
    def shard(self) -> tuple[int, int, bool]:
        """Index and number of slices of a batch, and whether this worker answers for its slice."""
        return self.at.data, self.at.data_size, self.at.is_leader

    # Scoring

    def token_logps(
        self, sequences: Sequences, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
    ) -> Ragged:
        """float32 log-probabilities of each row's targets under softmax(logits / temperature). Every rank."""
        return self.token_scores(
            sequences, micro_batch_size=micro_batch_size, temperature=temperature, adapter=adapter
        )[0]

    def token_scores(
        self, sequences: Sequences, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
    ) -> tuple[Ragged, Ragged]:
        """The log-probabilities of ``token_logps``, and the entropies at the same targets. Every rank."""
        logps, entropies = self._each(sequences, micro_batch_size, lambda scores: scores[:2], 2, temperature, adapter)
        return logps, entropies

    def token_values(self, batch: Any, *, micro_batch_size: int, as_in_step: bool = False) -> Ragged:
        """float32 values at each row's targets: (N,), or (N, width of the head) if that is not 1. Every rank.

        ``as_in_step`` changes nothing: no layer of such a model drops anything.
        """
        width = self.weights.width if self.weights.width > 1 else None
        return self._each(batch, micro_batch_size, lambda values: values, 1, 1.0, width=width)[0]

    def top_logps(
        self, sequences: Sequences, k: int, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
    ) -> tuple[Ragged, Ragged]:
        """The k likeliest ids at each row's targets (values (N, k)) and their log-probabilities. Every rank."""
        function = TopLogps(k, temperature)
        logps, ids = self._each(
            sequences,
            micro_batch_size,
            lambda scores: scores.further,
            2,
            temperature,
            adapter,
            width=k,
            token_function=function,
        )
        return Ragged(ids.values.astype(np.int64), ids.offsets), logps

    @torch.no_grad()
    def target_features(self, sequences: Sequences, *, adapter: bool = True) -> torch.Tensor:
        """(N, H) what ``logits`` takes, of the targets of all rows in one pass; (0, H) before the last stage."""
        found = self._pass([sequences], lambda features, packed: (self._of_all_targets(features, packed),), adapter)
        if found:
            return found[0][0]
        return torch.zeros(0, self.hf.hidden_size, dtype=self.dtype, device=self.device)

    def logits(self, features_NX: torch.Tensor) -> torch.Tensor:
        """(N, columns) float32 logits of what ``target_features`` gave: this worker's part of the vocabulary.

        Weights that rest between calls come back, and stay until the next pass has ended: it is called chunk by chunk.
        """
        self.residence.bring_weights()
        if self.head is None:
            return torch.zeros(0, self._num_columns(), device=self.device)
        return self.head.logits(features_NX)

    def _each(
        self,
        batch: Any,
        micro_batch_size: int,
        pick: Callable[[Any], tuple[torch.Tensor, ...]],
        num_columns: int,
        temperature: float,
        adapter: bool = True,
        width: int | None = None,
        **settings: Any,
    ) -> list[Ragged]:
        """The columns that ``pick`` takes of each micro-batch's scores, in the order of the rows, on every rank."""
        rows = self._cut(batch, self.settings.infer_batch_size or micro_batch_size)
        micros = [batch[part].as_sequences() for part in rows]

        def read(features: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, ...]:
            scores = pick(self._scores(features, packed, temperature, **settings))
            return tuple(column.float() for column in scores)

        found = self._pass(micros, read, adapter)
        if not rows:
            return [Ragged.of([], np.float32) for _ in range(num_columns)]
        counts = np.concatenate([targets_of_rows(batch[part]) for part in rows])
        columns = []
        for column in range(num_columns):
            if found:
                values = torch.cat([found[k][column] for k in range(len(micros))])
            else:
                values = torch.empty(int(counts.sum()), *(() if width is None else (width,)), device=self.device)
            self.pipeline.from_last_stage(values)
            columns.append(in_order([Ragged.split(values.cpu().numpy(), counts)], rows))
        return columns

    @torch.no_grad()
    def _pass(
        self,
        micros: list[Sequences],
        read: Callable[[torch.Tensor, Packed], tuple[torch.Tensor, ...]],
        adapter: bool = True,
    ) -> dict[int, tuple[torch.Tensor, ...]]:
        """What ``read`` makes of the last stage's output of each micro-batch, without learning; elsewhere nothing."""
        found: dict[int, tuple[torch.Tensor, ...]] = {}

        def keep(k: int, features: torch.Tensor, packed: Packed) -> torch.Tensor:
            found[k] = read(features, packed)
            return torch.zeros((), device=self.device)

        with (
            self.residence.weights_here(),
            contextlib.nullcontext() if self.adapter is None else self.adapter.off(not adapter),
        ):
            for stage in self.stages:
                stage.eval()
            self.pipeline.run(micros, keep, learns=False)
            for stage in self.stages:
                stage.train(self.optimizer is not None)
        return found

    # Learning

    def step(
        self,
        batch: Any,
        loss_function: Any,
        *,
        micro_batch_size: int,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        token_function: TokenFunction | None = None,
    ) -> Metrics:
        """One optimizer step; every rank calls it. See ``Backend.step``; all but the norm is told by the last stage."""
        assert self.optimizer is not None, "this model only scores: it was built without a learning rate"
        self.residence.check_memory()
        growing = growing_segments(self.device) if self.shares_device else contextlib.nullcontext()
        with self.residence.weights_here(), growing:
            return self._step(batch, loss_function, micro_batch_size, temperature, entropy_gradient, token_function)

    def _step(
        self,
        batch: Any,
        loss_function: Any,
        micro_batch_size: int,
        temperature: float,
        entropy_gradient: bool,
        token_function: TokenFunction | None,
    ) -> Metrics:
        metrics, finite = Metrics(), FiniteStep(self.device)
        micros = [batch[part] for part in self._cut(batch, micro_batch_size)]
        settings: dict[str, Any] = {}
        given: list[tuple[torch.Tensor, ...]] = []
        if self.head_kind == "lm":
            settings = {"entropy_gradient": entropy_gradient, "token_function": token_function}
        if token_function is not None:  # ahead of the schedule: a teacher runs one of its own
            given = [token_function.inputs(micro) for micro in self._filled(micros, batch)]

        def loss_of(k: int, features: torch.Tensor, packed: Packed) -> torch.Tensor:
            micro = micros[k] if k < len(micros) else batch[:0]
            inputs = (
                {}
                if token_function is None
                else {"token_inputs": tuple(x[packed.chosen_M.to(x.device)] for x in given[k])}
            )
            scores = self._scores(features, packed, temperature, **settings, **inputs)
            names = () if token_function is None else token_function.names
            loss = token_loss(scores, names, loss_function, micro, micro.as_sequences(), metrics)
            metrics.sum("loss", loss)
            finite.add(loss, micro)
            return loss

        self.residence.bring_gradients()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        num_tokens = int(batch.row_lengths().sum())
        balance = self.stages[0].balance
        if balance is not None:
            balance.begin(num_tokens, self.device)
        rate = self.scheduler.get_last_lr()[0]
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
        self.pipeline.run([micro.as_sequences() for micro in micros], loss_of, learns=True)
        self.residence.bring_memory()
        grad_norm = gradient_norm(self.optimizer)
        if finite.allows(grad_norm, metrics):
            succeeded, grad_norm, _ = self.optimizer.step()
            assert succeeded, "only float16 skips steps"
            self.scheduler.optimizer.step()
            self.scheduler.step()
        self.residence.rest()
        metrics.same("grad_norm", float(grad_norm))
        metrics.same("learning_rate", rate)
        if balance is not None:
            for name, value in balance.end().items():
                metrics.sum(name, value)
        flops = (6.0 if self.adapter is None else 4.0) * self.num_active * num_tokens
        add_work(metrics, num_tokens, flops, self.peak_flops, self.at.workers_per_shard)
        add_memory(metrics, self.device)
        return metrics

    def _filled(self, micros: list[Any], batch: Any) -> list[Any]:
        """The micro-batches, and behind them as many empty ones as this worker runs beside others."""
        return [*micros, *[batch[:0]] * (self.pipeline.num_micro(len(micros)) - len(micros))]

    def _scores(self, features: torch.Tensor, packed: Packed, temperature: float, **settings: Any) -> Any:
        """The numbers of all targets of a micro-batch, from those that this worker has of its tokens."""
        if self.head_kind != "lm":
            return (self._of_all_targets(self.stages[-1].numbers(features), packed),)
        assert self.head is not None, "only the last stage finishes"
        scores = self.head.scores(features, packed.target_ids_M, temperature, **settings)
        if self.at.context_size == 1:
            return scores
        logps, entropy, is_top1, *further = (
            self._of_all_targets(column, packed) for column in (*scores[:3], *scores.further)
        )
        return Scores(logps, entropy, is_top1, tuple(further))

    def _of_all_targets(self, own_M: torch.Tensor, packed: Packed) -> torch.Tensor:
        """(N, ...) from the (M, ...) of each context-parallel worker, in order; gradients go back to whose they are."""
        if self.at.context_size == 1:
            return own_M
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

        whole_N = own_M.new_zeros(packed.num_targets, *own_M.shape[1:]).index_copy(0, packed.chosen_M, own_M)
        summed: torch.Tensor = reduce_from_tensor_model_parallel_region(
            whole_N, group=parallel_state.get_context_parallel_group()
        )
        return summed

    def _cut(self, batch: Any, micro_batch_size: int) -> list[np.ndarray]:
        lengths = token_lengths(batch, padded=False)
        return micro_batches(lengths, micro_batch_size, token_budget=self.token_budget, padding_free=True)

    # Weights

    def whole_weights(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do: no engine shares the model."""
        return contextlib.nullcontext()

    @property
    def trains_part(self) -> bool:
        """Whether there are weights that an adapter leaves as they are."""
        return self.adapter is not None

    def named_weights(self, *, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, whole, one at a time, an adapter merged. Every rank.

        ``trained_only``: without those that an adapter leaves as they are.
        """
        with self.residence.weights_here():
            if self.adapter is None:
                yield from self.weights.as_in_checkpoints(self.weights.named_weights())
                return
            merged, changes = self.weights.named_weights(self.adapter.merged), self.adapter.changes
            chosen = ((name, weight) for name, weight in merged if not trained_only or changes(name))
            yield from self.weights.as_in_checkpoints(chosen)

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The matrices of the adapter alone, its scaling in B. Every rank."""
        assert self.adapter is not None, "the backend was built without lora"
        with self.residence.weights_here():
            yield from self.adapter.named_weights()

    def load_adapter(self, folder: Path) -> None:
        """Takes the adapter that peft, or ``export`` into its folder ``adapter``, wrote. Every rank."""
        assert self.adapter is not None, "the backend was built without lora"
        self.sent = SentWeights()
        with self.residence.weights_here():
            self.adapter.load(Path(folder))
            self._remember_weights()

    def load_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the weights in place; every rank gives all of them."""
        self._take(named_weights, None)

    def mix_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]], share: float) -> None:
        """weights = share x given + (1 - share) x own. Every rank."""
        self._take(named_weights, share)

    def _take(self, named_weights: Iterable[tuple[str, torch.Tensor]], share: float | None) -> None:
        if self.adapter is not None:
            raise ValueError("weights are given to a model without an adapter: named_weights() has the adapter merged")
        self.sent = SentWeights()
        with self.residence.weights_here():
            self.weights.load_named(named_weights, share)
            self._remember_weights()

    def _remember_weights(self) -> None:
        """The optimizer's own copies of weights become what those are now."""
        if self.optimizer is not None:
            self.residence.bring_memory()
            self.optimizer.reload_model_params()

    # Memory

    def offload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Moves weights, what the optimizer remembers, or both to pinned memory of the host. Every rank.

        With the latter the gradients go, nowhere: they are of one step. What torch keeps of a GPU for later is free for
        others too, also if neither is moved.
        """
        self.shares_device = True
        self.residence.offload(model=model, optimizer=optimizer)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Brings back what ``offload`` moved. Every rank."""
        self.residence.reload()

    # Checkpoints

    def export(self, folder: Path, tokenizer: Any = None) -> None:
        """Writes the model alone in ``dtype``, as a Hugging Face folder (rank 0 does). Every rank calls it.

        A LoRA adapter is merged into it, and stands alone in ``adapter``.
        """
        folder = Path(folder)
        self.writer.wait()
        with self.residence.weights_here():
            if self.adapter is None:
                self.weights.export(folder, dtype=self.dtype)
            else:
                self.adapter.merging(self.weights).export(folder, dtype=self.dtype)
                self.adapter.save(folder / "adapter")
        if self.tower is not None and dist.get_rank() == 0:
            self.tower.vision.export(folder)
        if tokenizer is not None and dist.get_rank() == 0:
            tokenizer.save_pretrained(folder)

    def save(self, folder: Path) -> None:
        """Writes the model as a Hugging Face folder and, in parts that any layout reads, all that training needs.

        That is weights, what the optimizer keeps of them, schedule and every rank's random state; of a model that only
        scores, the folder alone. With ``async_save`` the parts may yet be written when it returns. Every rank calls it.

        Raises:
            RuntimeError: the checkpoint before could not be written.
        """
        folder = Path(folder)
        self.writer.wait()
        self.residence.bring_memory()
        with self.residence.weights_here(), self.writer.writing(folder) as files:
            if self.adapter is None:
                self.weights.export(folder, dtype=self.dtype)
            state = random_state(self.device) | {"megatron": get_cuda_rng_tracker().get_states()}
            torch.save(state, folder / f"rng_state_{dist.get_rank()}.pth")
            if self.optimizer is not None:
                if dist.get_rank() == 0:
                    torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")
                if self.adapter is None:
                    save_parts(folder, self.stages, self.optimizer, files)
                else:
                    save_adapter(folder, self.adapter, self.optimizer)

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote: bit for bit in the same layout, weights and optimizer in any. Every rank.

        A rank that had no part in the saved run keeps its own random state.

        Raises:
            FileNotFoundError: a model in training finds no checkpoint of one of this backend.
            RuntimeError: the checkpoint is not whole.
            ConfigError: a file of it holds more than tensors, numbers and text; nothing of it was run.
        """
        folder = Path(folder)
        self.writer.wait()
        if not is_written(folder):
            raise RuntimeError(f"{folder} is incomplete: a run ended while it was written. Use an earlier checkpoint.")
        self.sent = SentWeights()
        self.residence.bring_memory()
        with self.residence.weights_here():
            if self.optimizer is None:
                self.weights.load(folder)
            elif self.adapter is None:
                check_parts(folder, dtype=self.dtype)
                load_parts(folder, self.stages, self.optimizer)
            else:
                load_adapter(folder, self.adapter, self.optimizer)
        if self.optimizer is not None:
            self.scheduler.load_state_dict(read_saved(folder / "scheduler.pt"))
        states = folder / f"rng_state_{dist.get_rank()}.pth"
        if states.exists():
            state = read_random_state(states)
            set_random_state(state, self.device)
            if "megatron" in state:  # another backend may have written what a model that only scores reads
                get_cuda_rng_tracker().set_states(state["megatron"])
