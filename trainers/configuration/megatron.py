"""The keys of ``backend: megatron``, under megatron-core's own names, and which values of them have a meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainers.backends.megatron.settings import EVERY_LAYER, OPTIMIZERS, MegatronSettings, setting_mistakes

OF_FSDP = (
    *("fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_offload_params", "torch_compile"),
    "cuda_graphs",
    *("activation_memory_budget", "teacher_model_init_kwargs", "load_in_4bit", "load_in_8bit"),
)


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """The keys that ``backend: megatron`` alone reads; one value for all roles that train or score with it."""

    # Megatron; needs backend: megatron
    tensor_model_parallel_size: int = 1
    """Workers that divide every matrix among them (TP)."""
    pipeline_model_parallel_size: int = 1
    """Workers that divide the layers among them (PP)."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Pieces of layers per pipeline worker (VPP). More pieces mean less waiting. null: 1."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage. null: the same number as in each middle stage."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage, which also has the head. null: the same number as in each middle stage."""
    context_parallel_size: int = 1
    """Workers that divide every sequence among them (CP)."""
    expert_model_parallel_size: int = 1
    """Workers that divide the experts among them (EP)."""
    expert_tensor_parallel_size: int | None = None
    """Workers that divide the matrices of every expert among them (ETP). null: tensor_model_parallel_size."""
    sequence_parallel: bool | None = None
    """Also divide the activations between the matrices over the tensor-parallel workers. It needs less memory and gives
    the same numbers. null: true if tensor_model_parallel_size is above 1. Experts under tensor parallelism need it."""
    use_distributed_optimizer: bool = True
    """The optimizer is sharded over the data-parallel workers."""
    overlap_grad_reduce: bool = False
    """Add gradients over the workers while the backward pass continues."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass continues. It needs use_distributed_optimizer and
    overlap_grad_reduce."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens are sent to their experts. flex needs DeepEP, and is refused."""
    moe_grouped_gemm: bool = False
    """Multiply all experts of a worker at once, in bfloat16."""
    moe_layer_recompute: bool = False
    """Compute the layers of experts twice instead of keeping their activations."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """The activations that are computed twice instead of kept. full: whole layers, as with gradient_checkpointing:
    true. selective: the modules of recompute_modules. null: nothing."""
    recompute_method: Literal["uniform", "block"] | None = None
    """The layers of recompute_granularity full. uniform: all layers, in groups of recompute_num_layers. block: the
    first recompute_num_layers of every stage. null: uniform."""
    recompute_num_layers: int | None = None
    """The number of layers that recompute_method uses. null: 1 with uniform."""
    recompute_modules: list[str] | None = None
    """For recompute_granularity selective: core_attn, layernorm, mlp, moe, moe_act, shared_experts. null: core_attn."""
    param_offload: bool = False
    """Keep the weights in the memory of the host between all calls of their role. offload_model offloads them only
    while an engine generates on the same device."""
    grad_offload: bool = False
    """Gradients use device memory only during the optimizer's steps."""
    infer_batch_size: int | None = None
    """Sequences per micro-batch that is only scored. null: the same as in training."""
    async_save: bool = False
    """Write checkpoints from a copy in the memory of the host, while training continues."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of megatron-core's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig."""

    @property
    def workers_per_shard(self) -> int:
        """Workers that get the same slice of the data, as they hold one model together."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


def settings_of(config: MegatronConfig, *, gradient_checkpointing: bool, optimizer_offload: bool) -> MegatronSettings:
    """What the keys say to the backend, all but ``megatron``: its fields are divided where megatron-core is at hand."""
    settings = MegatronSettings(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        decoder_first_pipeline_num_layers=config.decoder_first_pipeline_num_layers,
        decoder_last_pipeline_num_layers=config.decoder_last_pipeline_num_layers,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        sequence_parallel=config.sequence_parallel,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        moe_token_dispatcher_type=config.moe_token_dispatcher_type,
        moe_grouped_gemm=config.moe_grouped_gemm,
        moe_layer_recompute=config.moe_layer_recompute,
        recompute_granularity=config.recompute_granularity,
        recompute_method=config.recompute_method,
        recompute_num_layers=config.recompute_num_layers,
        recompute_modules=None if config.recompute_modules is None else tuple(config.recompute_modules),
        param_offload=config.param_offload,
        grad_offload=config.grad_offload,
        optimizer_offload=optimizer_offload,
        infer_batch_size=config.infer_batch_size,
    )
    recomputes_layers = gradient_checkpointing and config.recompute_granularity is None
    return replace(settings, **EVERY_LAYER) if recomputes_layers else settings


def key_mistakes(
    config: MegatronConfig,
    settings: MegatronSettings,
    *,
    optim: str,
    optim_kwargs: Mapping[str, Any],
    token_budget: int | Literal["auto"] | None,
    gradient_checkpointing: bool,
) -> Iterator[str]:
    """What the keys of a run with ``backend: megatron`` break, as far as no model and no workers are asked.

    ``settings`` are those of the keys; the others are keys that the backend fsdp reads too.
    """
    if optim not in OPTIMIZERS:
        yield (
            f"optim is {optim}, but megatron-core has only {', '.join(OPTIMIZERS)} of transformers' "
            "optimizers. Write one of these."
        )
    known = {"momentum"} if optim == "sgd" else set()
    if unread := sorted(optim_kwargs.keys() - known):
        yield (
            f"optim_kwargs holds {', '.join(unread)}, which {optim} of megatron-core does not take"
            f"{' (it takes momentum)' if known else ''}. Remove it."
        )
    if optim == "sgd" and config.use_distributed_optimizer:
        yield "megatron-core cannot shard optim: sgd. Write use_distributed_optimizer: false."
    if token_budget == "auto":
        yield "token_budget: auto works only with backend: fsdp. Write a number of tokens."
    if token_budget is not None and config.infer_batch_size is not None:
        yield (
            f"infer_batch_size is {config.infer_batch_size}, but token_budget already sets the size of every "
            "micro-batch, also of scored ones. Remove one of the two keys."
        )
    if gradient_checkpointing and config.recompute_granularity == "selective":
        yield (
            "gradient_checkpointing: true recomputes whole layers, which is recompute_granularity: full, but that is "
            "selective. Remove one of them."
        )
    if gradient_checkpointing and config.moe_layer_recompute:
        yield "gradient_checkpointing: true recomputes all layers, also of experts. Remove moe_layer_recompute."
    yield from setting_mistakes(settings)
