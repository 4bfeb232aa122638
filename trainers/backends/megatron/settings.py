"""How the ``megatron`` backend divides a model, and what it trades for memory: plain values. Imports no megatron."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rayhelper.planning.model_shape import ModelShape
from rayhelper.planning.parallel_sizes import ParallelSizes, size_mistakes
from trainers.backends.megatron.layers import fp8_rows

TRANSFORMER, DDP, OPTIMIZER = "transformer", "ddp", "optimizer"  # the mappings of MegatronSettings
OPTIMIZERS = ("adamw_torch", "sgd")
RECOMPUTABLE = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
OF_EXPERTS = ("moe", "moe_act", "shared_experts")  # of RECOMPUTABLE
EVERY_LAYER: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@dataclass(frozen=True, kw_only=True)
class MegatronSettings:
    """The names of megatron-core; what is None is as ``transformer_fields`` says.

    ``transformer``, ``ddp`` and ``optimizer`` are further fields of TransformerConfig, DistributedDataParallelConfig
    and OptimizerConfig.

    ``param_offload``, ``grad_offload``, ``optimizer_offload``: weights, gradient buffers, and optimizer states with
    master weights are in device memory only while a method of the backend computes with them (states: in the
    optimizer's own step). Between the calls they wait in the memory of the host, gradients nowhere: they are empty.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool | None = None
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    moe_grouped_gemm: bool = False
    moe_layer_recompute: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] | None = None
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    infer_batch_size: int | None = None  # sequences of a micro-batch that is only scored; None: what the caller says
    transformer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_pieces(self) -> int:
        """Pieces of the model that a worker holds: its virtual pipeline stages."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def virtual_stages(self) -> int | None:
        """``num_pieces`` as megatron-core takes it, to which 1 is a schedule of its own and None the plain one."""
        return self.num_pieces if self.num_pieces > 1 else None

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether norms and what lies between layers are divided over tensor-parallel workers; None: if there are."""
        return self.tensor_model_parallel_size > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def fp8_rows(self) -> int:
        """What the number of tokens of a worker is a multiple of, padding among them."""
        return fp8_rows(self.transformer)

    @property
    def workers_per_shard(self) -> int:
        """Workers that see the same data."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def sizes(self, num_workers: int) -> ParallelSizes:
        """The sizes on so many workers, a multiple of ``workers_per_shard``."""
        tensor = self.tensor_model_parallel_size
        return ParallelSizes(
            tensor=tensor,
            pipeline=self.pipeline_model_parallel_size,
            context=self.context_parallel_size,
            data=max(1, num_workers // self.workers_per_shard),
            expert=self.expert_model_parallel_size,
            expert_tensor=self.expert_tensor_parallel_size or tensor,
            virtual_pipeline=self.num_pieces,
            first_stage=self.decoder_first_pipeline_num_layers,
            last_stage=self.decoder_last_pipeline_num_layers,
            sequence=self.is_sequence_parallel,
        )

    @property
    def transformer_fields(self) -> dict[str, Any]:
        """What these settings say of TransformerConfig; the model's sizes, dtype and dropout are not theirs."""
        fields: dict[str, Any] = {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": self.virtual_stages,
            "context_parallel_size": self.context_parallel_size,
            "expert_model_parallel_size": self.expert_model_parallel_size,
            "expert_tensor_parallel_size": self.expert_tensor_parallel_size,
            "sequence_parallel": self.is_sequence_parallel,
            "moe_token_dispatcher_type": self.moe_token_dispatcher_type,
            "moe_grouped_gemm": self.moe_grouped_gemm,
            **self._recomputation(),
        }
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        if first is not None:
            fields["num_layers_in_first_pipeline_stage"] = first
        # of two stages one says both; given both, megatron-core divides by the number of those between them
        if last is not None and not (first is not None and self.pipeline_model_parallel_size == 2):
            fields["num_layers_in_last_pipeline_stage"] = last
        if self.num_pieces > 1:  # batched, two messages to one neighbour are taken for each other (PP 2)
            fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        return fields | dict(self.transformer)

    @property
    def ddp_fields(self) -> dict[str, Any]:
        """What these settings say of DistributedDataParallelConfig."""
        return {
            "use_distributed_optimizer": self.use_distributed_optimizer,
            "overlap_grad_reduce": self.overlap_grad_reduce,
            "overlap_param_gather": self.overlap_param_gather,
            **self.ddp,
        }

    @property
    def optimizer_fields(self) -> dict[str, Any]:
        """What these settings say of OptimizerConfig."""
        return {
            "use_distributed_optimizer": self.use_distributed_optimizer,
            "overlap_param_gather": self.overlap_param_gather,
            **self.optimizer,
        }

    def _recomputation(self) -> dict[str, Any]:
        if self.recompute_granularity == "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": self.recompute_method or "uniform",
                "recompute_num_layers": self.recompute_num_layers or 1,
            }
        modules = list(self.recompute_modules or ())
        if self.moe_layer_recompute and "moe" not in modules:
            modules.append("moe")
        if self.recompute_granularity is None and not modules:
            return {}
        return {"recompute_granularity": "selective", "recompute_modules": modules or ["core_attn"]}


KEYS = tuple(one.name for one in fields(MegatronSettings) if one.name not in (TRANSFORMER, DDP, OPTIMIZER))


def setting_mistakes(settings: MegatronSettings) -> Iterator[str]:
    """What settings break among themselves, each with its remedy."""
    granularity, modules = settings.recompute_granularity, settings.recompute_modules
    if granularity != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(settings, name) is not None:
                yield (
                    f"{name} is {getattr(settings, name)}, but recompute_granularity is {_word(granularity)}: only "
                    "full recomputes whole layers. Write recompute_granularity: full, or remove it."
                )
    if modules is not None and granularity != "selective":
        yield (
            f"recompute_modules is {list(modules)}, but recompute_granularity is {_word(granularity)}. Write "
            "recompute_granularity: selective, or remove it."
        )
    unknown = [name for name in modules or () if name not in RECOMPUTABLE]
    if unknown or modules == ():
        yield f"recompute_modules must be among {', '.join(RECOMPUTABLE)}, got {unknown or 'none of them'}."
    if "moe_act" in (modules or ()) and not settings.moe_grouped_gemm:
        yield "recompute_modules holds moe_act, which needs moe_grouped_gemm: true. Write that, or moe (the layer)."
    if settings.recompute_method == "block" and settings.recompute_num_layers is None:
        yield "recompute_method block needs recompute_num_layers, the number of layers per stage to recompute. Write "
        "it."
    if settings.moe_layer_recompute and granularity == "full":
        yield "moe_layer_recompute is set, but recompute_granularity: full recomputes all of a layer. Remove one."
    if settings.overlap_param_gather and not (settings.use_distributed_optimizer and settings.overlap_grad_reduce):
        yield (
            "overlap_param_gather needs use_distributed_optimizer: true and overlap_grad_reduce: true; got "
            f"{_word(settings.use_distributed_optimizer)} and {_word(settings.overlap_grad_reduce)}. Write both, or "
            "remove it."
        )
    if settings.moe_token_dispatcher_type == "flex":
        yield (
            "moe_token_dispatcher_type flex needs TransformerEngine's fused permutation and DeepEP, which the backend "
            "does not use. Write alltoall or allgather."
        )


def layout_mistakes(
    where: str, settings: MegatronSettings, num_workers: int, shape: ModelShape | None
) -> Iterator[str]:
    """What settings break on so many workers, and with the model where its shape is known, each with its remedy."""
    if num_workers % settings.workers_per_shard:
        sizes = (
            f"tensor_model_parallel_size {settings.tensor_model_parallel_size} x pipeline_model_parallel_size "
            f"{settings.pipeline_model_parallel_size} x context_parallel_size {settings.context_parallel_size}"
        )
        product = settings.workers_per_shard
        how = " (torchrun --nproc-per-node, or use_ray with device_groups)" if num_workers == 1 else ""
        yield (
            f"{sizes} = {product} does not divide the {num_workers} workers of {where}. Give it a multiple of "
            f"{product} workers{how}, or make the product smaller."
        )
        return
    given = {"sequence_parallel": settings.sequence_parallel}
    sizes_given = settings.sizes(num_workers)
    yield from size_mistakes(where, sizes_given, given, shape)
    if shape is None:
        return
    if settings.fp8_rows > 1:
        yield from _fp8_mistakes(where, settings, sizes_given, shape)
    layers = max(sizes_given.stage_layers(shape.num_hidden_layers)) // sizes_given.virtual_pipeline
    if layers and (settings.recompute_num_layers or 1) > layers:
        yield (
            f"recompute_num_layers {settings.recompute_num_layers} is more than the {layers} layers of a stage of "
            f"{where}. Write 1 to {layers}."
        )


def dense_mistakes(settings: MegatronSettings) -> Iterator[str]:
    """Settings of experts, which nobody would read in a run of dense models."""
    default = MegatronSettings()
    names = ("expert_tensor_parallel_size", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_layer_recompute")
    found = [name for name in names if getattr(settings, name) != getattr(default, name)]
    found += [f"recompute_modules {name}" for name in settings.recompute_modules or () if name in OF_EXPERTS]
    found += [name for name in settings.transformer if name.startswith("moe_")]
    if found:
        yield f"{', '.join(found)}: fields of experts, but no model of backend: megatron has experts. Remove these."


def _fp8_mistakes(where: str, settings: MegatronSettings, sizes: ParallelSizes, shape: ModelShape) -> Iterator[str]:
    """Matrices of a worker that fp8 cannot multiply."""
    heads = shape.num_attention_heads * shape.head_dim
    widths = {
        "hidden_size": shape.hidden_size,
        "num_attention_heads x head_dim": heads // sizes.tensor,
        "queries, keys and values": (heads + 2 * shape.num_key_value_heads * shape.head_dim) // sizes.tensor,
        "moe_intermediate_size": shape.moe_intermediate_size // sizes.expert_tensor,
    }
    if shape.num_moe_layers < shape.num_hidden_layers:
        widths["intermediate_size"] = shape.intermediate_size // sizes.tensor
    odd = [f"{name} {width}" for name, width in widths.items() if width % settings.fp8_rows]
    if odd:
        yield (
            f"with fp8 every width of the model on a worker of {where} must be a multiple of {settings.fp8_rows}. "
            f"These are not: {', '.join(odd)}. Remove fp8, or choose other sizes."
        )


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower()
