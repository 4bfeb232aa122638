"""Tiny random models of the real architectures: configuration classes of transformers with small sizes.

A name is transformers' ``model_type`` of the text model. All have two to four layers, so that each kind of layer an
architecture mixes occurs, and distributions that differ from token to token: what equals by chance alone shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.tiny import text
from benchmarks.tiny.text import tiny_tokenizer

SIZES: dict[str, Any] = {
    **text.SIZES,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM's attention takes
    "max_position_embeddings": 512,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # the only size that vLLM's attention takes
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
GROUPED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}


@dataclass(frozen=True)
class Architecture:
    """How a tiny model of an architecture is made; ``config``: transformers' class, and fields beside ``SIZES``."""

    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # of SIZES


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaConfig"),
    "llama4_text": Architecture(
        "Llama4TextConfig",
        {
            "num_local_experts": 2,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 16,
            "use_qk_norm": True,
            "num_hidden_layers": 4,
        },
    ),
    "qwen2": Architecture("Qwen2Config"),
    "qwen2_moe": Architecture("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3": Architecture("Qwen3Config"),
    "qwen3_moe": Architecture("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_next": Architecture("Qwen3NextConfig", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 64}),
    "qwen3_5_text": Architecture("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe_text": Architecture(
        "Qwen3_5MoeTextConfig", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 64}
    ),
    "mistral": Architecture("MistralConfig", {"sliding_window": 8}),
    "ministral": Architecture("MinistralConfig", {"sliding_window": 8}),
    "mixtral": Architecture("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": Architecture(
        "Gemma2Config", {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0, "tie_word_embeddings": True}
    ),
    "gemma3_text": Architecture(
        "Gemma3TextConfig", {"query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True}
    ),
    "gemma4_text": Architecture(
        "Gemma4TextConfig", {"sliding_window": 8, "hidden_size_per_layer_input": 16, "tie_word_embeddings": True}
    ),
    "phi3": Architecture("Phi3Config"),
    "glm4": Architecture("Glm4Config"),
    "glm4_moe": Architecture("Glm4MoeConfig", {**ROUTED, **GROUPED}),
    "deepseek_v2": Architecture("DeepseekV2Config", {**LATENT, **ROUTED, **GROUPED}, ("head_dim",)),
    "deepseek_v3": Architecture(
        "DeepseekV3Config",
        {**LATENT, **ROUTED, **GROUPED, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        ("head_dim",),
    ),
    "gpt_oss": Architecture("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "olmo3": Architecture("Olmo3Config", {"sliding_window": 8}),
    "smollm3": Architecture("SmolLM3Config"),
    "granite": Architecture(
        "GraniteConfig", {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
    ),
    "seed_oss": Architecture("SeedOssConfig"),
    "ernie4_5": Architecture("Ernie4_5Config"),
    "hunyuan_v1_dense": Architecture("HunYuanDenseV1Config"),
    "lfm2": Architecture(
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "conv_dim": 64,
            "block_dim": 64,  # vLLM reads it
            "tie_word_embeddings": True,  # in vLLM it always is
        },
    ),
    "falcon_h1": Architecture(
        "FalconH1Config",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 2,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
            "lm_head_multiplier": 0.5,
        },
    ),
    "nemotron_h": Architecture(
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 2,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 16,
        },
        ("num_hidden_layers",),
    ),
    "minimax": Architecture(
        "MiniMaxConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "minimax_m2": Architecture(
        "MiniMaxM2Config",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "cohere": Architecture("CohereConfig", {"logit_scale": 0.25, "tie_word_embeddings": True}),
}
# Fields beside these where vLLM completes: its blocks of 128 tokens lie in one chunk of Llama 4's attention
FOR_VLLM: dict[str, dict[str, Any]] = {"llama4_text": {"attention_chunk_size": 128}}


def tiny(name: str, seed: int = 0, **fields: Any) -> Any:
    """A float32 model with random weights, biases and norms too; the global generator is left as it was."""
    import transformers
    from transformers import AutoModelForCausalLM

    made = ARCHITECTURES[name]
    sizes = {key: value for key, value in SIZES.items() if key not in made.without}
    config = getattr(transformers, made.config)(**sizes | made.fields | fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, weight in model.named_parameters():
                if parameter_name.endswith("bias") or weight.dim() == 1:
                    weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def save(name: str, folder: Path, seed: int = 0, **fields: Any) -> str:
    """Writes ``tiny`` and a tokenizer of 260 tokens as a Hugging Face folder."""
    tiny(name, seed, **fields).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
