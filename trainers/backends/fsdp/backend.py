"""The ``fsdp`` backend: a transformers model, in one process or over the workers of a role.

    batch (ragged) --cut--> micro-batches --Scorer--> numbers of target tokens --loss function--> gradient --> optimizer
                                              |
                              FSDP2 (weights in shards) or DistributedDataParallel, where there are several workers

Gradients are *sums* over micro-batches and workers: the loss function divides by the normaliser of the whole optimizer
step. FSDP and DDP average, so the loss is multiplied by the number of workers. Every worker runs as many micro-batches,
the last ones empty if need be, so that collectives stay in step and an empty slice is no special case.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rayhelper import ConfigError
from trainers.backends.base import SentWeights, TokenFunction, token_lengths
from trainers.backends.device import default_device, keep_freed_memory
from trainers.backends.finite import FiniteStep
from trainers.backends.fsdp import checkpoint, documents, packed_attention
from trainers.backends.fsdp.hf_model import (
    ModelHead,
    add_noise,
    build_model,
    load_named_weights,
    named_weights,
    read_weights,
)
from trainers.backends.fsdp.one_worker.low_weights import LowWeights
from trainers.backends.fsdp.one_worker.passes import passes_of
from trainers.backends.fsdp.optimizer import OptimizerName, build_optimizer
from trainers.backends.fsdp.resting_optimizer import RestingOptimizer
from trainers.backends.fsdp.router import Balance
from trainers.backends.fsdp.scoring import Scoring
from trainers.backends.fsdp.sequence_attention import share_rows
from trainers.backends.fsdp.sharding import (
    forget_step,
    full,
    layers_of,
    most_of_ranks,
    reshard,
    shard,
    whole_weights,
)
from trainers.backends.fsdp.token_room import learning_tokens, rooms_of
from trainers.backends.fsdp.tuners.adalora import ranks_of
from trainers.backends.fsdp.tuners.adapters import (
    adapter_weights,
    add_adapter,
    load_adapter,
)
from trainers.backends.fsdp.vision.pixels import Vision
from trainers.backends.offload import MEMORY, WEIGHTS, Offload
from trainers.backends.random_state import dropouts, random_state, read_random_state, set_random_state, zero_dropout
from trainers.backends.scores.head import room_of
from trainers.backends.scores.inputs import ReadAt
from trainers.backends.scores.pooled import Pooling, scorer_of
from trainers.backends.scores.scorer import Scorer
from trainers.backends.scores.shared_prompts import can_share
from trainers.backends.scores.token_loss import token_loss
from trainers.backends.segments import growing_segments, memory_settings
from trainers.losses.vocabulary import WHOLE
from trainers.metrics import Metrics
from trainers.run.throughput import add_memory, add_work, flops_of, peak_flops

Sharding = Literal["full_shard", "no_shard"]
logger = logging.getLogger(__name__)
MANY = 20  # steps, in which compiled layers save as much time as it takes to compile them


class FsdpBackend(Scoring):
    """A model with a language or value head and, unless it only scores, its optimizer and schedule.

    Weights and optimizer states are float32; ``dtype='bfloat16'`` runs the forward pass in it. What is not trained, a
    model that only scores (``learning_rate=None``) or one under an adapter (``lora``: fields of peft's configuration of
    the ``tuner``), is kept in ``dtype``, or as ``quantization`` says: fields of transformers' BitsAndBytesConfig, not
    with shards. ``device`` None: the GPU of this process, or the CPU.

    ``token_budget`` cuts micro-batches by tokens instead of rows (auto: ``token_room.py``); ``padding_free`` joins the
    rows of one into a single row of documents. ``num_labels``: of a value head. ``values_at``: where it is read off, at
    the token that predicts a target or at itself; ``pooling``: of embeddings, likewise. Raises ConfigError if the model
    then would not keep the documents apart (``documents.py``).
    ``optimizer_offload``: the optimizer's states are in the memory of the host, and come in pieces to change weights.
    ``cuda_graphs``: on a single GPU, passes of ``step`` are captured and rows joined (``one_worker/passes.py``);
    ``torch_compile`` auto: layers are compiled for these alone, where there are ``MANY`` steps.
    ``activation_memory_budget``: the share of activations that a compiled layer keeps for its backward pass (in one
    process, what torch first compiled for one backend it takes for the next). ``logits_memory_gib``: of the head (see
    ``head.room_of``). ``router_aux_loss_coef``: of the loss that balances experts (``router.py``), in steps of a
    language model. ``neftune_noise_alpha``: noise on embeddings in ``step`` alone (see ``hf_model.add_noise``).
    ``sequence_parallel_size``: so many consecutive ranks share the rows of a slice (see ``sequence_attention.py``).
    ``vision``: of a model that sees pictures, its frozen parts and their learning rates (see ``vision/pixels.py``).
    """

    vocabulary = WHOLE

    def __init__(
        self,
        model: str | Path,
        *,
        head: ModelHead = "lm",
        num_labels: int = 1,
        values_at: ReadAt = "predicting",
        pooling: Pooling = "last",
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str | torch.device | None = None,
        learning_rate: float | None = None,
        num_training_steps: int = 0,
        optim: OptimizerName = "adamw_torch",
        optim_kwargs: Mapping[str, Any] | None = None,
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
        lora: Mapping[str, Any] | None = None,
        tuner: str = "lora",
        quantization: Mapping[str, Any] | None = None,
        sharding: Sharding = "no_shard",
        reshard_after_forward: bool = True,
        offload_params: bool = False,
        optimizer_offload: bool = False,
        torch_compile: bool | Literal["auto"] = False,
        activation_memory_budget: float = 1.0,
        logits_memory_gib: float | None = None,
        router_aux_loss_coef: float = 0.0,
        padding_free: bool = False,
        token_budget: int | Literal["auto"] | None = None,
        peak_tflops: float | None = None,
        neftune_noise_alpha: float | None = None,
        sequence_parallel_size: int = 1,
        cuda_graphs: bool = True,
        seed: int = 42,
        model_init_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        vision: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import get_scheduler, set_seed

        set_seed(seed)
        self.device = default_device() if device is None else torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.padding_free, self.token_budget = padding_free, None if token_budget == "auto" else token_budget
        self.activation_memory_budget = activation_memory_budget
        self.reshard_after_forward = reshard_after_forward and self.world_size > 1  # alone: nothing but copies
        self.peak_flops = peak_flops(self.device, peak_tflops)
        self.read_at: ReadAt = "predicting" if head == "lm" else values_at
        trains, lowers = learning_rate is not None, self.dtype != torch.float32
        if self.device.type == "cpu" and trains:
            keep_freed_memory()
        # FSDP keeps float32 weights and runs the layers in a lower dtype throughout, and so does ``LowWeights`` on a
        # single worker; autocast would leave all between the products in float32
        runs_low = sharding == "full_shard" and self.world_size == 1 and trains and lowers and lora is None
        shards = sharding == "full_shard" and (self.world_size > 1 or (runs_low and offload_params))
        frozen = not trains or (lora is not None and not shards)  # FSDP wants one dtype for a layer and its adapter
        self.module: Any = build_model(
            model,
            head=head,
            num_labels=num_labels,
            dtype=self.dtype if frozen else torch.float32,
            device=self.device,
            model_init_kwargs=model_init_kwargs,
            trust_remote_code=trust_remote_code,
            seed=seed,
            quantization=quantization,
        )
        self.vision = Vision.of(self.module, model, trust_remote_code=trust_remote_code, **(vision or {}))
        if lowers and self.device.type == "cuda":
            packed_attention.prefer(self.module)
        shares = sequence_parallel_size > 1  # rows
        self.sharing = share_rows(self.module, sequence_parallel_size) if shares else None
        way = documents.way_of(self.module)
        if padding_free and way is None:
            raise ConfigError(documents.refusal(self.module))
        self.config = copy.deepcopy(self.module.config)  # as it is written: with its dropout
        if disable_dropout:
            zero_dropout(self.module)
        room = room_of(logits_memory_gib, recomputes=gradient_checkpointing)
        self.scorer = scorer_of(self.module, head, pooling=pooling, room=room, way=way, ranks=self.sharing)
        self.adapted: Any = None
        if lora is not None:
            told: dict[str, Any] = {"head": head, "seed": seed, "tuner": tuner, "vision": self.vision}
            self.adapted = add_adapter(self.module, lora, num_training_steps=num_training_steps, **told)
            if isinstance(self.scorer, Scorer):
                self.scorer.head.linear = self.module.get_output_embeddings()  # which may have got an adapter too
        has_noise = neftune_noise_alpha or (trains and any(getattr(one, name) for one, name in dropouts(self.module)))
        is_plain = not (has_noise or self.vision or shares or router_aux_loss_coef or torch_compile is True)
        on_cpu = self.device.type == "cpu" and isinstance(self.scorer, Scorer)
        self.shares_prompts = on_cpu and is_plain and can_share(self.module)
        self.ranks = ranks_of(self.adapted)
        self.balance: Balance | None = None
        if router_aux_loss_coef and trains and isinstance(self.scorer, Scorer):
            known = self.scorer.head.known
            self.balance = self.scorer.balance = Balance(self.module, router_aux_loss_coef, has_backbone=known)
        self.room, self.scoring_room = rooms_of(self.module, self.device, self.dtype, token_budget)
        self.module.train(trains)
        if neftune_noise_alpha and trains:
            add_noise(self.module, neftune_noise_alpha)
        if gradient_checkpointing and trains:
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if not trains:
            self.module.requires_grad_(False)
        if self.vision is not None:
            self.vision.joins(self.scorer, trains=trains, shards=shards)
        self.forward: torch.nn.Module = self.scorer
        self.low = LowWeights(self.module, self.dtype) if runs_low and not shards else None
        self.casts = lowers and self.low is None
        if shards:
            shard(
                self.scorer,
                self.module,
                dtype=self.dtype,
                reshard_after_forward=self.reshard_after_forward,
                offload_params=offload_params,
            )
            self.casts = False
            with torch.no_grad():  # the first pass settles which module is the root
                self._run(self.scorer, None, temperature=1.0)
            reshard(self.scorer)
        elif trains and self.world_size > 1:
            devices = [self.device.index] if self.device.type == "cuda" else None
            told = {"gradient_as_bucket_view": True, "find_unused_parameters": self.vision is not None}
            self.forward = DistributedDataParallel(self.scorer, device_ids=devices, **told)
        self.is_sharded = shards
        captures = cuda_graphs and not (gradient_checkpointing or neftune_noise_alpha or optimizer_offload)
        self.passes = passes_of(self.scorer, self.low) if captures else None
        if self.passes is not None:
            self.padding_free = True
            if self.room is not None and (tokens := learning_tokens(self.module, self.device, self.dtype)):
                self.token_budget, self.room = tokens, None
        # decoding and passes that only score have other shapes, for each of which layers would be compiled
        self.compiles_learning = torch_compile == "auto" and self.passes is not None and num_training_steps >= MANY
        if self.passes is not None:
            logger.info(
                "cuda_graphs: true, torch_compile: %s", str(self.compiles_learning or torch_compile is True).lower()
            )
        if torch_compile is True or self.compiles_learning:
            for layer in layers_of(self.module):
                layer.compile()
        self.can_step = True  # no step failed in a way that would spoil the next
        self.is_reducing = False  # gradients are added up over ranks as they come
        self.offloaded = Offload()  # for an engine
        self.shares_device = False  # with an engine that asked for room
        self.sent = SentWeights()
        self.optimizer: torch.optim.Optimizer | None = None
        self.resting: RestingOptimizer | None = None  # for ``optimizer_offload``
        if learning_rate is None:
            return
        self.max_grad_norm = max_grad_norm
        self.optimizer = build_optimizer(
            optim,
            self.module,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_betas=(adam_beta1, adam_beta2),
            adam_epsilon=adam_epsilon,
            kwargs=optim_kwargs or {},
            rates=self.vision.rates if self.vision else {},
        )
        if optimizer_offload and self.device.type == "cuda":
            self.resting = RestingOptimizer(self.optimizer, self.device)
        steps: dict[str, Any] = {"num_warmup_steps": warmup_steps, "num_training_steps": num_training_steps}
        steps["scheduler_specific_kwargs"] = dict(lr_scheduler_kwargs or {})
        self.scheduler = get_scheduler(lr_scheduler_type, self.optimizer, **steps)

    @property
    def shard(self) -> tuple[int, int, bool]:
        """Index and number of slices of a batch, and whether this worker answers for its slice."""
        size = 1 if self.sharing is None else self.sharing.size
        return self.rank // size, self.world_size // size, self.rank % size == 0

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
        """One optimizer step; every rank calls it. See ``Backend.step``."""
        assert self.optimizer is not None, "this model only scores: it was built without a learning rate"
        self.offloaded.check_here(WEIGHTS, MEMORY)
        if not self.can_step:
            raise RuntimeError(
                "an earlier step failed while DistributedDataParallel, or FSDP of torch before 2.13, was adding "
                "up gradients. Resume in new processes"
            )
        growing = growing_segments(self.device) if self.shares_device else contextlib.nullcontext()
        settings: dict[str, Any] = {"temperature": temperature}
        if isinstance(self.scorer, Scorer):
            settings |= {"entropy_gradient": entropy_gradient, "token_function": token_function}
        with self._forgetting_failures(), memory_settings(self.activation_memory_budget, growing):
            metrics, finite = Metrics(), FiniteStep(self.device)
            rows = self._cut(batch, micro_batch_size, self.token_budget)
            with self._holding():
                num_tokens = self._add_gradients(batch, rows, loss_function, settings, metrics, finite)
            if self.ranks is not None:
                metrics.same("orthogonality", self.ranks.regularize())
            trained = [weight for weight in self.module.parameters() if weight.requires_grad]
            grad_norm = full(torch.nn.utils.clip_grad_norm_(trained, self.max_grad_norm or float("inf")))
            metrics.same("grad_norm", grad_norm)
            metrics.same("learning_rate", self.scheduler.get_last_lr()[0])
            if finite.allows(grad_norm, metrics):
                (self.resting or self.optimizer).step()
                self.scheduler.step()
                if self.ranks is not None:
                    self.ranks.allocate(self.scheduler.last_epoch)
            self._forget_gradients()
            num_ranks = 1 if self.sharing is None else self.sharing.size  # whose work it is
            add_work(metrics, num_tokens, flops_of(self.module, num_tokens), self.peak_flops, num_ranks)
            add_memory(metrics, self.device)
            return metrics

    def _add_gradients(
        self,
        batch: Any,
        rows: list[np.ndarray],
        loss_function: Any,
        settings: dict[str, Any],
        metrics: Metrics,
        finite: FiniteStep,
    ) -> int:
        """Passes of all micro-batches, of ``rows`` each, forward and back; the number of their tokens."""
        self._agree_on_towers(batch)
        num_micro, num_tokens, k = most_of_ranks(max(1, len(rows)), self.device), 0, 0
        token_function: TokenFunction | None = settings.get("token_function")
        names = () if token_function is None else token_function.names
        if self.balance is not None:
            self.balance.begin(batch.as_sequences(), self.device)
        if self.passes is not None:
            lengths = token_lengths(batch, padded=False)
            self.passes.begin(max((int(lengths[some].sum()) for some in rows), default=1))
        while k < num_micro:
            if self.room:
                self.room.before()
            micro = batch[rows[k] if k < len(rows) else slice(0, 0)]
            sequences = micro.as_sequences()
            if token_function is not None:
                settings["token_inputs"] = token_function.inputs(micro)
            if self.balance is not None:
                settings["is_token_BT"] = self.balance.tokens(sequences, padding_free=self.padding_free)
            with self._synchronised(last=k == num_micro - 1):
                scores = self._run(self.forward, sequences, **settings)
                if self.room:  # rows that are left are cut by what this pass kept
                    self.token_budget = self.room.cut(batch, rows, k, padding_free=self.padding_free)
                    self.room = None if self.room.is_known else self.room
                    num_micro = max(min(k + 2, num_micro), most_of_ranks(max(1, len(rows)), self.device))
                loss = token_loss(scores, names, loss_function, micro, sequences, metrics)
                if self.balance is not None:
                    loss = loss + self.balance.share(scores, sequences, metrics)
                self.is_reducing = k == num_micro - 1
                (loss * self.world_size).backward()
                self.is_reducing = False
            if self.low is not None:
                self.low.take_gradients()
            metrics.sum("loss", loss)
            finite.add(loss, micro)
            num_tokens += len(sequences.input_ids.values)
            k += 1
        return num_tokens

    def _forget_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        if self.low is not None:
            self.low.forget_gradients()

    @contextlib.contextmanager
    def _forgetting_failures(self) -> Iterator[None]:
        """What a step that fails inside leaves behind is not added to the next one."""
        try:
            yield
        except BaseException:
            self._forget_gradients()
            if self.is_sharded:
                self.can_step = forget_step(self.scorer)
            elif isinstance(self.forward, DistributedDataParallel):
                self.can_step = not self.is_reducing
            raise

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.forward, DistributedDataParallel) and not last:
            return self.forward.no_sync()
        return contextlib.nullcontext()

    # Weights

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside, every rank holds all weights and may run the module at its own pace. Every rank enters."""
        with contextlib.ExitStack() as stack:
            if self.is_sharded:
                told = {"reshard_after_forward": self.reshard_after_forward}
                stack.enter_context(whole_weights(self.scorer, **told))
            stack.enter_context(self._holding())
            stack.enter_context(self._uncompiled())
            yield

    @property
    def trains_part(self) -> bool:
        """Whether there are weights that an adapter leaves as they are."""
        return self.adapted is not None

    def named_weights(self, *, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under the names of a checkpoint, tied ones once, an adapter merged.

        ``trained_only``: without those that an adapter leaves as they are. Any rank, alone too, unless weights lie in
        shards.
        """
        self._settle()
        return named_weights(self.module, trained_only=trained_only and self.trains_part)

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The matrices of the adapter alone, its scaling in B. Any rank, alone too, unless weights lie in shards."""
        self._settle()
        return adapter_weights(self.module)

    def load_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the weights in place; see ``load_named_weights``. Every rank."""
        self._settle()
        self.sent = SentWeights()
        load_named_weights(self.module, named_weights)

    def mix_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]], share: float) -> None:
        """weights = share x given + (1 - share) x own. Every rank."""
        self._settle()
        self.sent = SentWeights()
        load_named_weights(self.module, named_weights, share)

    def offload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Moves weights, what the optimizer remembers, or both to pinned memory of the host. Every rank.

        What torch keeps of a GPU for later is free for others too, also if neither is moved.
        """
        self.shares_device = True
        if model:
            if self.is_sharded:
                reshard(self.scorer)
            self.offloaded.offload([*self.module.parameters(), *self.module.buffers()], WEIGHTS)
            if self.low is not None:
                self.low.drop()
        if self.passes is not None:
            self.passes.clear()
        if optimizer and self.optimizer is not None:
            self.offloaded.offload(self._remembered(), MEMORY)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Brings back what ``offload`` moved. Every rank."""
        self.offloaded.reload()

    def _remembered(self) -> list[torch.Tensor]:
        """The optimizer's states."""
        assert self.optimizer is not None, "this model only scores: it was built without a learning rate"
        entries = self.optimizer.state.values()
        return [value for entry in entries for value in entry.values() if torch.is_tensor(value)]

    def export(self, folder: Path, tokenizer: Any = None) -> None:
        """Writes the model alone in ``dtype``, as a Hugging Face folder (rank 0 does). Every rank calls it.

        An adapter is merged into it, and stands alone in ``adapter``.
        """
        self._settle()
        if self.rank == 0 or self.is_sharded:
            parts = (self.module, self.adapted, self.config, self.dtype)
            checkpoint.export_model(Path(folder), *parts, vision=self.vision, writes=self.rank == 0)
        if tokenizer is not None and self.rank == 0:
            tokenizer.save_pretrained(folder)

    def save(self, folder: Path) -> None:
        """Writes the model as it is in memory, optimizer, schedule and every rank's random state. Every rank.

        Of a model with an adapter, the adapter alone, as peft writes it.
        """
        folder = Path(folder)
        if self.world_size > 1:
            dist.barrier()  # whoever prepares the folder has done so before any rank writes
        folder.mkdir(parents=True, exist_ok=True)
        self._settle()
        writes, gathers = self.rank == 0, self.rank == 0 or self.is_sharded
        if self.adapted is not None:
            checkpoint.save_adapter(folder, self.adapted, self.ranks, writes=writes)
        elif gathers:
            checkpoint.save_model(folder, self.module, self.config, vision=self.vision, writes=writes)
        if self.optimizer is not None and gathers:
            checkpoint.save_optimizer(folder, self.resting or self.optimizer, self.scheduler, writes=writes)
        torch.save(random_state(self.device), folder / f"rng_state_{self.rank}.pth")
        if self.world_size > 1:
            dist.barrier()

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote, bit for bit. Every rank.

        A rank that had no part in the saved run (there were fewer) keeps its own random state.

        Raises:
            FileNotFoundError: the folder is not one that ``save`` of a training backend wrote.
            ConfigError: a file of it holds more than tensors, numbers and text; nothing of it was run.
        """
        folder = Path(folder)
        self._settle()
        self.sent = SentWeights()
        if self.adapted is not None:
            load_adapter(self.adapted, folder, self.ranks)
        else:
            load_named_weights(self.module, read_weights(folder))
        if self.optimizer is not None:
            checkpoint.load_optimizer(folder, self.resting or self.optimizer, self.scheduler)
        states = folder / f"rng_state_{self.rank}.pth"
        if states.exists():
            set_random_state(read_random_state(states), self.device)
