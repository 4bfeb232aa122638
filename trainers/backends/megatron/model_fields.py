"""A Hugging Face configuration in the words of megatron-core's TransformerConfig. Imports no megatron.

The workers build their models of these fields, and what is checked before they start is the same.
"""

from __future__ import annotations

from typing import Any

import torch

from trainers.backends.megatron.architectures import BIASED, MIXED, NORMED, has_experts, head_width
from trainers.backends.megatron.layers import LOCAL, implementation
from trainers.backends.megatron.settings import MegatronSettings


def model_fields(
    hf: Any, settings: MegatronSettings, *, dtype: torch.dtype, on_gpu: bool, has_adapter: bool
) -> dict[str, Any]:
    """What megatron-core wants to know of a model and of how it is cut."""
    layers = implementation(settings.transformer, has_adapter=has_adapter)
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_width(hf),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type in BIASED,
        "qk_layernorm": hf.model_type in NORMED,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": False,
        "transformer_impl": layers,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": layers == LOCAL,
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        # rows of any length; gradients are sums, which the loss has divided by what it is a mean of
        "variable_seq_lengths": settings.moe_token_dispatcher_type != "allgather",
        "calculate_per_token_loss": True,
        "deallocate_pipeline_outputs": on_gpu,  # gloo would still be sending what was freed
        **(mixture(hf) if hf.model_type in MIXED else {}),
        **settings.transformer_fields,
    }


def mixture(hf: Any) -> dict[str, Any]:
    found = {
        "num_moe_experts": hf.num_experts,
        "moe_layer_freq": [int(has_experts(hf, layer)) for layer in range(hf.num_hidden_layers)],
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
    }
    if hf.model_type == "qwen2_moe":
        shared = hf.shared_expert_intermediate_size
        found |= {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}
    return found
