"""How much memory a role needs on one GPU: an estimate, as a list of terms. Pure.

    ModelShape x ParallelSizes x Work  ->  terms in bytes  ->  peak of the roles that share a GPU

Weights, gradients and optimizer states are counted, and exact but for padding. Activations follow Korthikanti et al.
2022 ("Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198), where a layer keeps
s b h (10 + 24/t + 5 a s / (h t)) bytes under tensor parallelism (equation 2), s b h (34 + 5 a s / h) / t with sequence
parallelism too (equation 4), and its input alone, 2 s b h, when it is computed again. Departures, because today's
layers differ from that one: RMSNorm in float32, SwiGLU, grouped queries, no dropout, and attention that never holds
its scores (so no term in s^2); the output head works on chunks. Not counted: buffers of communication, gradients that
pass through a layer, and fragmentation, for which ``RUNTIME_BYTES`` is set aside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rayhelper.planning.model_shape import ModelShape, Weights
from rayhelper.planning.parallel_sizes import ParallelSizes

GIB = 1024**3
RUNTIME_BYTES = 3 * GIB // 2  # CUDA context, NCCL and the allocator's leftovers of a process
LOGITS_CHUNK_BYTES = 256 * 1024**2  # float32 logits that autograd holds at once; a plain head's twice, in 1.5 tensors
LOGITS_ROOM = 3 * GIB  # kept by a head for the backward pass, at most, unless logits_memory_gib says it
CACHE_BYTES = 2  # of a number in a key-value cache
DELTA_CHUNK = 64  # tokens that the gated delta rule takes at once

# Keys that move something away while another role works
OFFLOAD_MODEL, OFFLOAD_OPTIMIZER, SLEEP_LEVEL = "offload_model", "offload_optimizer", "sleep_level"
PARAM_OFFLOAD, GRAD_OFFLOAD = "param_offload", "grad_offload"  # of backend: megatron
STEP_ONLY = "optimizer_offload"  # has the optimizer's states here in the very change of the weights alone
PIECE_BYTES = GIB  # of states, by which fsdp does that, two at once; a larger weight's are one
FREEING_KEYS = (OFFLOAD_MODEL, OFFLOAD_OPTIMIZER, SLEEP_LEVEL, PARAM_OFFLOAD, GRAD_OFFLOAD, STEP_ONLY)


@dataclass(frozen=True)
class Work:
    """What a role does with its model at once."""

    micro_batch: int = 8  # sequences
    length: int = 1024  # tokens of a sequence
    backend: Literal["fsdp", "megatron"] = "fsdp"
    compute_bytes: int = 2  # of a number in the forward pass; 2: bfloat16
    checkpointing: bool = False
    kept_share: float = 1.0  # of a compiled layer's activations (activation_memory_budget); it computes the rest again
    kept_logits: int = 0  # bytes that a trained head may keep for its backward pass
    distributed_optimizer: bool = True  # megatron's: optimizer states are divided over data-parallel workers
    num_micro_batches: int | None = None  # of an optimizer step; None: enough to fill a pipeline
    has_reference: bool = False  # a frozen copy of the model beside the trained one
    adapter: int = 0  # parameters of an adapter, which alone is trained; 0: all are
    whole: int = 0  # parameters of a vision model's tower among them, which learn themselves
    frozen: tuple[str, ...] = ()  # parts of a vision model that do not learn: vit, aligner, llm
    bits: int | None = None  # of a number in the layers beside the adapter; None: they are as the forward pass has them

    @property
    def is_autocast(self) -> bool:
        """Whether float32 weights meet bfloat16 products, which leaves the stream between layers in float32."""
        return self.backend == "fsdp" and self.compute_bytes == 2


@dataclass(frozen=True)
class Term:
    """A part of a role's memory on one GPU."""

    name: str
    num_bytes: int
    stays: bool = True  # while another role of the same workers works
    freed_by: tuple[str, ...] = ()  # keys of which each moves it away meanwhile
    is_estimate: bool = False  # False: counted
    at_once: int | None = None  # bytes of it that are here if it comes in pieces; None: all

    @property
    def here_at_once(self) -> int:
        return self.num_bytes if self.at_once is None else self.at_once


@dataclass(frozen=True)
class RoleMemory:
    """What one role needs on one GPU."""

    role: str
    terms: tuple[Term, ...]
    offloads: frozenset[str] = frozenset()  # of the keys in ``freed_by``, those that are set
    generates: bool = False

    @property
    def resting(self) -> tuple[Term, ...]:
        """What is away in the passes through the model, and here in the change of its weights."""
        return tuple(term for term in self.terms if STEP_ONLY in self.offloads.intersection(term.freed_by))

    @property
    def at_work(self) -> int:
        """Bytes at the most: in the passes through the model, or in the change of its weights."""
        in_passes = sum(term.num_bytes for term in self.terms if term not in self.resting)
        in_change = sum(term.num_bytes for term in self.terms if term not in self.resting and not term.is_estimate)
        return max(in_passes, in_change + sum(term.here_at_once for term in self.resting))

    @property
    def counted(self) -> RoleMemory:
        """The part that is no estimate."""
        return replace(self, terms=tuple(term for term in self.terms if not term.is_estimate))

    @property
    def awake(self) -> RoleMemory:
        """The same role if it moved nothing away."""
        return replace(self, offloads=frozenset())

    @property
    def idle(self) -> int:
        """Bytes that stay while another role works."""
        return sum(term.num_bytes for term in self.terms if term.stays and self.offloads.isdisjoint(term.freed_by))


def peak_bytes(*processes: Sequence[RoleMemory]) -> int:
    """The most that the roles of processes on one GPU need, without the runtime's share.

    Of a process one role is at work at a time. Processes work at the same time, but those that generate and the others
    take turns.
    """

    def added(memory: RoleMemory) -> int:
        return memory.at_work - memory.idle

    def at_once(generates: bool) -> int:
        return sum(max((added(one) for one in roles if one.generates is generates), default=0) for roles in processes)

    idle = sum(memory.idle for roles in processes for memory in roles)
    return idle + max(at_once(True), at_once(False))


def training(shape: ModelShape, sizes: ParallelSizes, work: Work) -> tuple[Term, ...]:
    """Weights, gradients and AdamW's states as the backend divides them; activations of a micro-batch.

    fsdp: everything in float32 (16 bytes a parameter), divided over the data-parallel workers, and what is gathered of
    it in the compute type. megatron in bfloat16: 2 + 4 bytes of weights and gradients a parameter of the worker, and 12
    of master weights and moments, which the distributed optimizer divides. Under an adapter it alone has all that, in
    float32; the weights are in the compute type, but those that fsdp divides.
    """
    if work.adapter:
        weights = _under_adapter(shape, sizes, work)
    elif work.backend == "megatron":
        dense, experts = megatron_parameters(shape, sizes)
        master = 4 if work.compute_bytes == 2 else 0
        dense_ways, expert_ways = _optimizer_ways(sizes) if work.distributed_optimizer else (1, 1)
        learned, learned_experts = (dense, experts) if not work.frozen else _learned_by_megatron(shape, sizes, work)
        states = (master + 8) * (math.ceil(learned / dense_ways) + math.ceil(learned_experts / expert_ways))
        own = dense + experts
        weights = [
            Term("weights", work.compute_bytes * own, freed_by=(OFFLOAD_MODEL, PARAM_OFFLOAD)),
            Term("gradients", 4 * (learned + learned_experts), freed_by=(OFFLOAD_OPTIMIZER, GRAD_OFFLOAD)),
            Term("optimizer", states, freed_by=(OFFLOAD_OPTIMIZER, STEP_ONLY)),
        ]
    else:
        own = math.ceil(shape.num_parameters / sizes.fsdp_ways)
        kept = shape.without(work.frozen)
        num_learned = kept.tower if "llm" in work.frozen else kept.num_parameters
        learned = math.ceil(num_learned / sizes.fsdp_ways)
        pieces = 2 * max(PIECE_BYTES, math.ceil(8 * max(shape.ends, shape.largest_layer) / sizes.fsdp_ways))
        weights = [
            Term("weights", 4 * own, freed_by=(OFFLOAD_MODEL,)),
            Term("gradients", 4 * learned, stays=False),  # set to none by the step
            Term("optimizer", 8 * learned, freed_by=(OFFLOAD_OPTIMIZER, STEP_ONLY), at_once=min(8 * learned, pieces)),
            *_gathered(shape, sizes, work),
        ]
    if work.has_reference:
        weights.append(Term("reference", scoring(shape, sizes, work)[0].num_bytes, freed_by=(OFFLOAD_MODEL,)))
    activations = _passing("activations", activation_bytes(shape, sizes, work))
    return (*weights, activations, _logits(shape, sizes, work, trains=True))


def _learned_by_megatron(shape: ModelShape, sizes: ParallelSizes, work: Work) -> tuple[int, int]:
    """Parameters on the fullest worker without those of frozen parts of a vision model, those of experts apart."""
    kept = shape.without(work.frozen)
    return (kept.tower, 0) if "llm" in work.frozen else megatron_parameters(kept, sizes)


def _under_adapter(shape: ModelShape, sizes: ParallelSizes, work: Work) -> list[Term]:
    if work.backend == "megatron":
        num_bytes = work.compute_bytes * sum(megatron_parameters(shape, sizes))
        most = max(sizes.stage_layers(shape.num_hidden_layers))  # layers of a stage
        layered = work.adapter - work.whole  # the tower is on the first stage
        own = work.whole + math.ceil(
            layered * most / shape.num_hidden_layers
        )  # all of halves that TP workers may share
        states = math.ceil(own / (_optimizer_ways(sizes)[0] if work.distributed_optimizer else 1))
        return [
            Term("weights", num_bytes, freed_by=(OFFLOAD_MODEL, PARAM_OFFLOAD)),
            Term("adapter", 4 * own, freed_by=(OFFLOAD_MODEL, PARAM_OFFLOAD)),
            Term("gradients", 4 * own, freed_by=(OFFLOAD_OPTIMIZER, GRAD_OFFLOAD)),
            Term("optimizer", 8 * states, freed_by=(OFFLOAD_OPTIMIZER, STEP_ONLY)),
        ]
    if work.bits is not None:  # each worker has all of it
        apart = shape.ends
        num_bytes = math.ceil(work.bits / 8 * (shape.num_parameters - apart)) + work.compute_bytes * apart
        return [
            Term("weights", num_bytes, freed_by=(OFFLOAD_MODEL,)),
            Term("adapter", 4 * work.adapter, freed_by=(OFFLOAD_MODEL,)),
            Term("gradients", 4 * work.adapter, stays=False),
            Term("optimizer", 8 * work.adapter, freed_by=(OFFLOAD_OPTIMIZER, STEP_ONLY)),
        ]
    own = math.ceil(work.adapter / sizes.fsdp_ways)
    kept = 4 if sizes.fsdp_ways > 1 else work.compute_bytes
    return [
        Term("weights", kept * math.ceil(shape.num_parameters / sizes.fsdp_ways), freed_by=(OFFLOAD_MODEL,)),
        Term("adapter", 4 * own, freed_by=(OFFLOAD_MODEL,)),
        Term("gradients", 4 * own, stays=False),
        Term("optimizer", 8 * own, freed_by=(OFFLOAD_OPTIMIZER, STEP_ONLY)),
        *(_gathered(shape, sizes, work) if sizes.fsdp_ways > 1 else []),
    ]


def scoring(shape: ModelShape, sizes: ParallelSizes, work: Work) -> tuple[Term, ...]:
    """A frozen model in the compute type, divided as in training, and one layer's activations."""
    if work.backend == "megatron":
        own = sum(megatron_parameters(shape, sizes))
        weights = [Term("weights", work.compute_bytes * own, freed_by=(OFFLOAD_MODEL, PARAM_OFFLOAD))]
    else:
        own = math.ceil(shape.num_parameters / sizes.fsdp_ways)
        gathered = _gathered(shape, sizes, work) if sizes.fsdp_ways > 1 else []
        weights = [Term("weights", work.compute_bytes * own, freed_by=(OFFLOAD_MODEL,)), *gathered]
    layer = _layer_bytes(shape, sizes, work, trains=False) * _tokens(sizes, work)
    return (*weights, _passing("activations", layer), _logits(shape, sizes, work))


def vllm_engine(shape: ModelShape, tensor: int, utilization: float, gpu_bytes: int) -> tuple[Term, ...]:
    """bfloat16 weights divided over ``tensor`` GPUs; the cache takes what the engine's share of the GPU leaves."""
    weights = math.ceil(2 * shape.num_parameters / tensor)
    cache = max(0, int(utilization * gpu_bytes) - weights)
    return (
        Term("weights", weights, freed_by=(SLEEP_LEVEL,)),
        Term("KV cache", cache, freed_by=(SLEEP_LEVEL,)),
    )


def hf_engine(shape: ModelShape, work: Work, num_sequences: int, *, shares_weights: bool) -> tuple[Term, ...]:
    """transformers' generate: a cache for all sequences at once, and weights if no trained role lends its own."""
    own = () if shares_weights else (Term("weights", work.compute_bytes * shape.num_parameters),)
    cache = num_sequences * work.length * cache_bytes_per_token(shape)
    return (*own, _passing("KV cache", cache))


def cache_bytes_per_token(shape: ModelShape, tensor: int = 1) -> int:
    """Keys and values of one token on one GPU; every GPU holds at least one head of each. States have no tokens."""
    heads = max(1, shape.num_key_value_heads // tensor)
    return 2 * CACHE_BYTES * (shape.num_hidden_layers - shape.num_delta_layers) * heads * shape.head_dim


def megatron_parameters(shape: ModelShape, sizes: ParallelSizes) -> tuple[int, int]:
    """Parameters on a worker of the fullest pipeline stage, those of experts apart.

    The first stage holds the embedding, and on each worker a vision model's tower; the last the head (a copy of the
    embedding if they are tied) and the last norm.
    """
    embedding = math.ceil(shape.vocab_size / sizes.tensor) * shape.hidden_size
    layers = sizes.stage_layers(shape.num_hidden_layers)
    ends = [0] * len(layers)
    ends[0] += embedding + shape.tower
    ends[-1] += shape.hidden_size + (0 if len(layers) == 1 and shape.tie_word_embeddings else embedding)
    stages = (_layer_parameters(shape, sizes, count) for count in layers)
    return max(((dense + end, experts) for (dense, experts), end in zip(stages, ends, strict=True)), key=sum)


def _layer_parameters(shape: ModelShape, sizes: ParallelSizes, num_layers: int) -> tuple[int, int]:
    """Parameters of so many layers on a worker, as many of them of the larger kind as there can be; those of experts
    apart."""
    moe_layers = min(num_layers, shape.num_moe_layers)
    kinds: list[tuple[int, Weights]] = [(num_layers - moe_layers, shape.dense_layer)]
    kinds += [(moe_layers, shape.moe_layer)] if moe_layers else []
    dense = sum(count * (math.ceil(part.split / sizes.tensor) + part.replicated) for count, part in kinds)
    if shape.num_delta_layers:
        state, attention = (
            math.ceil(part.split / sizes.tensor) + part.replicated for part in (shape.delta_rule, shape.attention)
        )
        others = shape.num_hidden_layers - shape.num_delta_layers
        is_more = state > attention
        dense += (min(num_layers, shape.num_delta_layers) if is_more else max(0, num_layers - others)) * (
            state - attention
        )
    experts = sum(count * math.ceil(part.experts / (sizes.expert * sizes.expert_tensor)) for count, part in kinds)
    return dense, experts


def activation_bytes(shape: ModelShape, sizes: ParallelSizes, work: Work) -> int:
    """What one worker keeps of its micro-batches from the forward pass to the backward pass.

    A stage of a pipeline holds a micro-batch for itself and for every stage after it (1F1B), so that the first one's
    layers times its micro-batches are as many as all layers where stages have equally many; interleaving adds
    (p - 1) / (p m) for m pieces a stage (section 4.2.3). With checkpointing each layer keeps its input alone, and one
    layer at a time is computed again. So is what a layer does not keep, beside its input, for a ``kept_share`` below 1.
    """
    tokens, pipeline = _tokens(sizes, work), sizes.pipeline
    more = 1 + (pipeline - 1) / (pipeline * sizes.virtual_pipeline) if sizes.virtual_pipeline > 1 else 1.0

    def in_flight(stage: int) -> float:
        held = (pipeline - stage) * more
        return held if work.num_micro_batches is None else min(held, work.num_micro_batches)

    stages = enumerate(sizes.stage_layers(shape.num_hidden_layers))
    layers = max(count * in_flight(stage) for stage, count in stages)
    layer = _layer_bytes(shape, sizes, work)
    share = 0.0 if work.checkpointing else work.kept_share
    if share == 1:
        return int(tokens * layer * layers)
    entering = (4 if work.is_autocast else work.compute_bytes) * shape.hidden_size / _norm_ways(sizes)
    kept = entering + share * (layer - entering)
    return int(tokens * (kept * layers + layer))


def _layer_bytes(shape: ModelShape, sizes: ParallelSizes, work: Work, *, trains: bool = True) -> int:
    """Kept a token by the heaviest kind of layer.

    A norm of n numbers keeps its float32 input, the normalised numbers and its output; attention its queries, keys,
    values, output and a float32 number a head; SwiGLU two projections, the activation and their product. Under
    autocast the normalised numbers are float32, and each product that reads a norm's output keeps its own copy of it.
    Tensor parallelism divides what lies between two of its collectives, sequence parallelism the rest as well.
    """
    hidden, compute = shape.hidden_size, work.compute_bytes
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    whole = 2 * (4 + 2 * compute) * hidden + (10 * hidden if trains and work.is_autocast else 0)
    heads = compute * (2 * queries + 2 * keys) + 4 * shape.num_attention_heads
    if shape.qk_norm:
        heads += (4 + compute) * (queries + keys)
    if shape.output_gate:
        heads += 2 * compute * queries
    if shape.num_delta_layers:
        heads = max(heads, _delta_bytes(shape, compute))
    if shape.num_moe_layers:
        each = 4 * compute * shape.moe_intermediate_size / sizes.expert_tensor + 2 * compute * hidden
        mlp = shape.num_experts_per_tok * each + 8 * shape.num_experts
    else:
        mlp = 4 * compute * shape.intermediate_size / sizes.tensor
    return int(whole / _norm_ways(sizes) + heads / sizes.tensor + mlp)


def _delta_bytes(shape: ModelShape, compute: int) -> int:
    """Kept a token between the norms of a layer with a state, by flash-linear-attention's kernels.

    Its products, the convolution's output, queries and keys of every value head, the rows of a chunk's triangular
    matrix, and of the gated norm what a norm keeps, with the gate.
    """
    keys, values = shape.delta_widths
    heads = shape.linear_num_value_heads
    products = 2 * (2 * keys + values) + values + 2 * heads
    rule = 2 * heads * shape.linear_key_head_dim + values + DELTA_CHUNK * heads
    return compute * (products + rule + values) + (4 + compute) * values + 8 * heads


def _norm_ways(sizes: ParallelSizes) -> int:
    """Over how many workers the tokens of norms and of the stream between layers are divided."""
    return sizes.tensor if sizes.sequence else 1


def _tokens(sizes: ParallelSizes, work: Work) -> int:
    """Tokens of a micro-batch on one worker."""
    return math.ceil(work.micro_batch * work.length / (sizes.context * sizes.shared_rows))


def _gathered(shape: ModelShape, sizes: ParallelSizes, work: Work) -> list[Term]:
    """Whole weights in the compute type: the layer at work and the next, embedding and head. Alone, a copy of all."""
    if sizes.fsdp_ways > 1:
        return [_passing("gathered", work.compute_bytes * (shape.ends + 2 * shape.largest_layer))]
    return [_passing("gathered", 2 * shape.num_parameters)] if work.compute_bytes == 2 else []


def _logits(shape: ModelShape, sizes: ParallelSizes, work: Work, *, trains: bool = False) -> Term:
    """A chunk of float32 logits, their softmax and their gradient; in training what a plain head keeps beside."""
    chunk = min(LOGITS_CHUNK_BYTES, 4 * shape.vocab_size * work.micro_batch * work.length)
    kept = math.ceil(shape.vocab_size / sizes.tensor) * work.compute_bytes * _tokens(sizes, work)
    return _passing("logits", 3 * chunk + (min(kept, work.kept_logits) if trains else 0))


def _passing(name: str, num_bytes: int) -> Term:
    """What exists only while the role works, estimated."""
    return Term(name, num_bytes, stays=False, is_estimate=True)


def _optimizer_ways(sizes: ParallelSizes) -> tuple[int, int]:
    """Over how many workers the distributed optimizer divides states of dense parameters and of experts."""
    workers = sizes.data * sizes.context
    return workers, max(1, workers * sizes.tensor // (sizes.expert * sizes.expert_tensor))
