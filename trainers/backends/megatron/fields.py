"""Which fields of megatron-core's configurations the key ``megatron`` may hold, and where each of them goes.

TransformerConfig, DistributedDataParallelConfig and OptimizerConfig say which there are. Some are keys of their own,
some follow from the model, the trainer or the backend, some need packages that may be missing; others are handed on.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch

from rayhelper import ConfigError
from rayhelper.text import nearest
from trainers.backends.megatron.layers import ENGINE_FIELDS, engine_mistake
from trainers.backends.megatron.model_fields import model_fields
from trainers.backends.megatron.settings import DDP, KEYS, OPTIMIZER, TRANSFORMER, MegatronSettings

INSTALL = "pip install 'rayhelper[megatron]'"

ELSEWHERE = {  # and the key that says it
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"), "dtype"),
    **dict.fromkeys(("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), "dtype"),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), "disable_dropout"),
    **dict.fromkeys(("lr", "decoupled_lr"), "learning_rate"),
    **dict.fromkeys(("min_lr", "decoupled_min_lr"), "lr_scheduler_kwargs"),
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_eps": "adam_epsilon",
    **dict.fromkeys(("optimizer", "decoupled_weight_decay"), "optim"),
    "sgd_momentum": "optim_kwargs",
    "clip_grad": "max_grad_norm",
    **dict.fromkeys(("optimizer_cpu_offload", "optimizer_offload_fraction"), "optimizer_offload"),
    **dict.fromkeys(("use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"), "optimizer_offload"),
    **dict.fromkeys(("cpu_offloading", "cpu_offloading_num_layers"), "recompute_granularity"),
    **dict.fromkeys(("fine_grained_activation_offloading", "offload_modules"), "recompute_granularity"),
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "moe_enable_deepep": "moe_token_dispatcher_type",
}
OF_MODEL = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("layernorm_epsilon", "layernorm_zero_centered_gamma", "normalization", "qk_layernorm", "qk_l2_norm"),
    *("add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func", "activation_func_clamp_value"),
    *("glu_linear_offset", "rotary_interleaved", "window_size", "window_attn_skip_freq", "softmax_scale"),
    *("softmax_type", "attention_output_gate", "multi_latent_attention", "no_rope_freq", "mrope_section"),
    *("experimental_attention_variant", "linear_attention_freq", "is_hybrid_model", "heterogeneous_block_specs"),
    *("apply_residual_connection_post_layernorm", "apply_query_key_layer_scaling"),
    *("num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_shared_expert_gate", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_topk_limited_devices", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
    *("moe_apply_probs_on_input", "moe_latent_size"),
)
OF_MODEL_BEGINNINGS = ("linear_", "dsa_", "mamba_", "mtp_")
OF_BACKEND = (
    *("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
    *("use_cpu_initialization", "perform_initialization", "init_model_with_meta_device", "init_method"),
    *("init_method_std", "output_layer_init_method", "embedding_init_method", "embedding_init_method_std"),
    *("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm", "use_ring_exchange_p2p"),
    *("attention_backend", "calculate_per_token_loss", "cp_comm_type", "test_mode"),
    *("hierarchical_context_parallel_sizes", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    "pipeline_model_parallel_layout",
    *("num_microbatches_with_partial_activation_checkpoints", "cross_entropy_loss_fusion"),
    *("cross_entropy_fusion_impl", "average_in_collective", "gradient_reduce_div_fusion", "moe_extended_tp"),
    *("num_distributed_optimizer_instances", "use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"),
    *("outer_dp_sharding_strategy", "preserve_fp32_weights", "overlap_param_gather_with_optimizer_step"),
    *("overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release", "moe_enable_routing_replay"),
    *("flash_decode", "batch_invariant_mode", "symmetric_ar_type", "use_inference_optimized_layers"),
    *("mlp_chunks_for_prefill", "quant_recipe", "hetereogenous_dist_checkpoint"),
    *("fp32_residual_connection", "microbatch_group_size_per_vp_stage", "overlap_p2p_comm_warmup_flush"),
)
OF_BACKEND_BEGINNINGS = ("_", "fsdp_", "inference_", "muon_", "use_kitchen", "kitchen_")
AUX, Z, BALANCING = "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type"
BALANCES = {  # and why not; None: it is known
    "aux_loss": None,
    "seq_aux_loss": None,
    "none": None,
    "global_aux_loss": "needs the experts that a whole step chooses before its first backward pass",
    "sinkhorn": "sends tokens to other experts in training than in scoring",
}
AT_RANDOM = (
    "sends tokens to random experts, also in scoring. No two log-probabilities of the same tokens would be equal"
)
WRONG_HERE = {  # and why
    "moe_pad_expert_input_to_capacity": "exchanges as many rows between workers as each has tokens, but their "
    "micro-batches are rows of documents of any length",
    "moe_input_jitter_eps": AT_RANDOM,
    "moe_router_force_load_balancing": AT_RANDOM,
    "defer_embedding_wgrad_compute": "belongs to megatron-core's output layer, but the backend has its own head",
}
UNREAD = (  # of attention, offloading, kernels and logs that are not in use here, or that megatron-core has no more
    *("attention_softmax_in_fp32", "log_max_attention_logit", "qk_clip", "qk_clip_alpha", "qk_clip_threshold"),
    *("cpu_offloading_activations", "cpu_offloading_weights", "cpu_offloading_double_buffering"),
    *("min_offloaded_tensor_size", "pin_cpu_grads", "pin_cpu_params", "pipeline_model_parallel_comm_backend"),
    *("moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_flex_dispatcher_backend", "moe_use_legacy_grouped_gemm"),
    *("moe_token_dropping", "moe_per_layer_logging", "barrier_with_L1_time", "wgrad_deferral_limit"),
    *("use_fused_weighted_squared_relu", "use_mamba_mem_eff_path", "async_tensor_model_parallel_allreduce"),
    *("log_num_zeros_in_grad", "disable_bf16_reduced_precision_matmul"),
    *("suggested_communication_unit_size", "disable_symmetric_registration"),
)
# Beginnings of fields of TransformerEngine's layers, optimizers and graphs, or of apex's: but for ``ENGINE_FIELDS`` the
# backend uses none of them
OF_OTHER_LAYERS = (
    *("fp8", "fp4", "keep_fp8", "activation_func_fp8", "tp_comm_", "tp_only_amax", "apply_rope_fusion", "delay_wgrad"),
    *("fused_single_qkv_rope", "use_te_", "moe_permute_fusion", "moe_router_fusion", "moe_router_padding_for_"),
    *("use_precision_aware_optimizer", "store_param_remainders", "main_grads", "main_params_dtype", "exp_avg_"),
    *("reuse_grad_buf_for_mxfp8", "enable_cuda_graph", "cuda_graph_", "external_cuda_graph", "num_layers_at_"),
    *("first_last_layers_bf16", "disable_parameter_transpose", "persist_layer_norm", "masked_softmax_fusion"),
    "memory_efficient_layer_norm",
)
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}  # of plain types


def check_installed() -> None:
    """Raises ConfigError with the install line if megatron-core is not there."""
    if not _is_installed("megatron") or not _is_installed("megatron.core"):
        raise ConfigError(f"backend: megatron needs megatron-core, which is not installed. Run {INSTALL}")


def known_fields() -> dict[str, dict[str, Any]]:
    """The default of every field in each configuration that has it: {field: {"transformer": default}}."""
    found: dict[str, dict[str, Any]] = {}
    for part, one in _all_fields():
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        found.setdefault(one.name, {})[part] = default
    return found


def check_fields(further: Mapping[str, Any], *, has_adapter: bool = False) -> None:
    """Raises ConfigError for the first field that does not exist, is said elsewhere, or cannot be used here.

    ``has_adapter``: whether an adapter is trained.
    """
    if not further:
        return
    known = known_fields()
    if mistake := _balancing_mistake(further):
        raise ConfigError(f"megatron: {mistake}")
    for name, value in further.items():
        problem = _why_not(name, known) or _wrong_type(name, value, known[name])
        if problem is not None:
            raise ConfigError(f"megatron: {problem}")
        default = next(iter(known[name].values()))
        if name in WRONG_HERE and value != default:
            raise ConfigError(f"megatron: {name} {WRONG_HERE[name]}. Remove it.")
        if name in UNREAD and value != default:
            raise ConfigError(f"megatron: {name} has no effect in the backend. Remove it.")
        if name.startswith(OF_OTHER_LAYERS) and name not in ENGINE_FIELDS and value != default:
            raise ConfigError(
                f"megatron: {name} belongs to layers of TransformerEngine or apex that the backend does not use. "
                "Remove it."
            )
    changed = {name: value for name, value in further.items() if value != next(iter(known[name].values()))}
    chosen = {name: value for name, value in further.items() if name == "transformer_impl"}  # also if it is the default
    problem = engine_mistake(changed | chosen, has_adapter=has_adapter)
    if problem is not None:
        raise ConfigError(f"megatron: {problem}")


def check_made(where: str, hf: Any, settings: MegatronSettings, *, dtype: torch.dtype, has_adapter: bool) -> None:
    """Raises ConfigError with what megatron-core itself finds wrong with a model and the settings together.

    ``hf``: the model's configuration; ``has_adapter``: whether an adapter of it is trained.
    """
    fields = model_fields(hf, settings, dtype=dtype, on_gpu=True, has_adapter=has_adapter)
    kinds = _configurations()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kinds[TRANSFORMER](**fields)
            kinds[DDP](**settings.ddp_fields)
            kinds[OPTIMIZER](lr=1.0, bf16=dtype == torch.bfloat16, params_dtype=dtype, **settings.optimizer_fields)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"megatron-core refuses the model of {where} with these keys: {error}") from None


def divided(further: Mapping[str, Any]) -> dict[str, Any]:
    """The fields by the configuration that they are of; one that several have goes to each."""
    if not further:
        return {}
    known = known_fields()
    return {
        part: {name: value for name, value in further.items() if part in known[name]}
        for part in (TRANSFORMER, DDP, OPTIMIZER)
    }


def _why_not(name: str, known: Mapping[str, Any]) -> str | None:
    if name in KEYS:
        return f"{name} is a separate key. Write it as a separate key, not in megatron."
    if name not in known:
        near = nearest(name, [*known, *KEYS])
        return f"megatron-core has no field {name!r} in its configurations{near}."
    if name in ELSEWHERE:
        return f"{name} is set by the key {ELSEWHERE[name]}. Write that key."
    if name in OF_MODEL or name.startswith(OF_MODEL_BEGINNINGS):
        return f"{name} follows from the model's config.json. Remove it."
    if name in OF_BACKEND or name.startswith(OF_BACKEND_BEGINNINGS):
        return f"{name} is set by the backend, which is tested only with its own choice. Remove it."
    return None


def is_field(name: str) -> bool:
    """Whether megatron-core has such a field, be it one that may be set here or not. Raises ImportError without it."""
    return any(name == one.name for _, one in _all_fields())


def why_not(name: str) -> str | None:
    """Why a field may not stand in ``megatron``; None if it may."""
    return _why_not(name, known_fields())


def _all_fields() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Each field of each configuration, and which of the three has it."""
    for part, kind in _configurations().items():
        yield from ((part, one) for one in dataclasses.fields(kind))


def _configurations() -> dict[str, Any]:
    """megatron-core's classes, by the mapping of MegatronSettings that is for each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are not needed
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer.transformer_config import TransformerConfig

    return {TRANSFORMER: TransformerConfig, DDP: DistributedDataParallelConfig, OPTIMIZER: OptimizerConfig}


def _wrong_type(name: str, value: Any, defaults: Mapping[str, Any]) -> str | None:
    """A value of none of the types that the field is declared with, as far as these are plain ones and choices."""
    declared = next(one.type for _, one in _all_fields() if one.name == name)
    kinds = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    plain = [kind for kind in kinds if kind in WORDS]
    is_told = len(plain) + sum(get_origin(kind) is Literal or kind is NoneType for kind in kinds) == len(kinds)
    fits = type(value) in plain or (float in plain and type(value) is int) or value in choices
    if not is_told or fits or (value is None and (NoneType in kinds or None in defaults.values())):
        return None
    words = [f"one of {', '.join(map(str, choices))}"] if choices else []
    return f"{name} must be {' or '.join([*words, *(WORDS[kind] for kind in plain)])}, got {value!r}."


def _balancing_mistake(further: Mapping[str, Any]) -> str | None:
    """What the losses that balance experts (``router.py``) are not, or do not say together."""
    kind = further.get(BALANCING, "aux_loss")
    known = ", ".join(name for name, why in BALANCES.items() if why is None)
    if not isinstance(kind, str) or kind not in BALANCES:
        return f"{BALANCING} must be one of {known}, got {kind!r}."
    if why := BALANCES[kind]:
        return f"{BALANCING} {kind} {why}. Write one of {known}."
    for name in (AUX, Z):
        value = further.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            return f"{name} must be a number, 0 or above, got {value!r}."
    if kind == "none" and further.get(AUX):
        return f"{BALANCING} is none, but {AUX} {further[AUX]}. Remove one of them."
    if kind != "none" and BALANCING in further and AUX not in further:
        return f"{BALANCING} {kind} has no effect without {AUX}. Write that too, such as 1e-3, or remove it."
    return None


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
