"""A Hugging Face configuration in the words of megatron-core's TransformerConfig. Imports no megatron.

The workers build their models of these fields, and what is checked before they start is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rayhelper import ConfigError
from trainers.backends.megatron.architectures import (
    BIASED,
    DELTA,
    MIXED,
    NORMED,
    SHARED,
    has_experts,
    head_width,
    is_delta,
)
from trainers.backends.megatron.layers import ENGINE_FIELDS, LOCAL, TRANSFORMER_ENGINE, as_there, implementation
from trainers.backends.megatron.settings import MegatronSettings
from trainers.data.images.processor import seeing_part

OF_HEADS = ("pad_token_id", "problem_type")  # of a linear head: of what it is read off, and what its labels are


def model_fields(
    hf: Any, settings: MegatronSettings, *, dtype: torch.dtype, on_gpu: bool, has_adapter: bool
) -> dict[str, Any]:
    """What megatron-core wants to know of a model and of how it is cut."""
    has_delta = hf.model_type in DELTA
    if has_delta and (asked := [name for name in ENGINE_FIELDS if name in settings.transformer]):
        raise ConfigError(
            f"megatron: {asked[0]} needs layers of TransformerEngine, but the layers of {hf.model_type} are "
            f"megatron-core's own. Remove it{as_there(asked[0])}."
        )
    if has_delta and settings.transformer.get("transformer_impl") == TRANSFORMER_ENGINE:
        raise ConfigError(
            f"megatron: transformer_impl is {TRANSFORMER_ENGINE}, but the layers of {hf.model_type} are "
            f"megatron-core's own. Write transformer_impl: {LOCAL}, or remove it."
        )
    layers = implementation(settings.transformer, own_only=has_adapter or has_delta)
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": getattr(hf, "intermediate_size", None) or hf.moe_intermediate_size,
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
        **(delta_rule(hf) if has_delta else {}),
        **settings.transformer_fields,
    }


def read_config(model: Any, fields: Mapping[str, Any], *, trust_remote_code: bool) -> Any:
    """The model's configuration with other values of ``fields``; ``get_text_config()`` of it is the language model's.

    Raises:
        ConfigError: values for a model that also sees, of which it is not told whether they are of its language model.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, **fields)
    text = config.get_text_config()
    if text is not config:
        for name in OF_HEADS:
            if name in fields:
                setattr(config, name, fields[name])
        if fields := {name: value for name, value in fields.items() if name not in OF_HEADS}:
            raise ConfigError(
                f"model_init_kwargs {sorted(fields)}: {config.model_type} is a vision model, and backend: megatron "
                "cannot change its configuration. Change config.json, or remove them."
            )
        text.tie_word_embeddings = seeing_part(config).tie_word_embeddings  # which decides in transformers
        text.name_or_path = config.name_or_path
    return config


def mixture(hf: Any) -> dict[str, Any]:
    found = {
        "num_moe_experts": hf.num_experts,
        "moe_layer_freq": [int(has_experts(hf, layer)) for layer in range(hf.num_hidden_layers)],
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
    }
    if hf.model_type in SHARED:
        shared = hf.shared_expert_intermediate_size
        found |= {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}
    return found


def delta_rule(hf: Any) -> dict[str, Any]:
    """Of the layers that go by the gated delta rule, and of the attention between them."""
    return {
        "linear_attention_freq": [int(is_delta(hf, layer)) for layer in range(hf.num_hidden_layers)],
        "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
        "linear_key_head_dim": hf.linear_key_head_dim,
        "linear_value_head_dim": hf.linear_value_head_dim,
        "linear_num_key_heads": hf.linear_num_key_heads,
        "linear_num_value_heads": hf.linear_num_value_heads,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
    }
