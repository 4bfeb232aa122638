"""Which Hugging Face architectures the backend can be, and what of them it does not know. Imports no megatron."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SEEING = {  # models that also see, and what their language model is; "": it says that itself
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "internvl": "",
}
SPEAKING = ("qwen2_5_omni", "qwen3_omni_moe")  # of these: what sees and reads is a part of them, the thinker
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # some layers go by the gated delta rule
MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", *DELTA),
    *("qwen2_5_omni_text", "qwen3_omni_moe_text"),
)
ROTATIONS = ("default", "linear", "llama3", "yarn")
OF_PICTURES = "mrope"  # what older files of Qwen2.5-VL call the default, where there are positions of pictures
BIASED = (  # queries, keys and values have biases
    *("qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
)
NORMED = (  # queries and keys have norms
    *("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", *DELTA),
)
SHARED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")  # mixtures with an expert for all tokens
MIXED = ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text", *SHARED)  # mixtures of experts
NORMS_CHOICES = (
    "qwen3_vl_moe_text",
    "qwen3_omni_moe_text",
    *DELTA,
)  # probabilities of a token's experts add up to one, unless it is said
STACKED = ("qwen3_vl_moe_text",)  # of these: no checkpoint has experts one by one
ALWAYS = ("qwen3_vl_moe_text", "qwen3_5_moe_text")  # of these, whatever is said


def architecture_mistakes(config: Mapping[str, Any]) -> Iterator[str]:
    """What a config.json asks for that the backend would leave out, and so compute something else."""
    kind = config.get("model_type")
    if kind in SEEING:  # older files of Qwen2.5-VL have the fields of the language model among the others
        config = config.get("thinker_config") or config
        inner = config.get("text_config") or {}
        yield from architecture_mistakes(
            {**config, **inner, "model_type": SEEING[kind] or inner.get("model_type", "qwen2")}
        )
        return
    if kind not in MODEL_TYPES:
        yield f"the architecture {kind!r} is not known (known: {', '.join((*MODEL_TYPES, *SEEING))})"
        return
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        yield f"its hidden_act is {activation!r}, but MLPs must use silu"
    window = config.get("sliding_window", 4096) if kind == "mistral" else config.get("use_sliding_window")
    if window or "sliding_attention" in (config.get("layer_types") or ()):
        yield "some layers attend to a sliding window of tokens, but only attention to all earlier tokens is supported"
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotated = rotation.get("rope_type", rotation.get("type", "default"))
    if rotated not in ROTATIONS and not (rotated == OF_PICTURES and kind in SEEING.values()):
        yield f"its rotary embedding is of the kind {rotated!r}, but supported are {', '.join(ROTATIONS)}"
    if config.get("attention_bias") and kind not in BIASED:
        yield "its attention_bias is true, but projections must have no bias"
    if kind == "qwen2_moe" and not config.get("qkv_bias", True):
        yield "its qkv_bias is false, but queries, keys and values must have biases"
    if kind in SHARED and config.get("shared_expert_intermediate_size") == 0:
        yield "its shared_expert_intermediate_size is 0, but layers of experts must have a shared expert"
    if kind in MIXED and config.get("num_experts", config.get("num_local_experts")) == 0:
        yield "its num_experts is 0, but a mixture must have experts"
    if kind in MIXED and config.get("num_experts_per_tok") == 1 and _norms_choices(config):
        yield "its norm_topk_prob is true with num_experts_per_tok 1, which megatron-core's router refuses"
    if kind in ALWAYS and not _norms_choices(config):
        yield "its norm_topk_prob is false, but the probabilities of a token's experts must add up to one"
    if kind in DELTA:
        keys, values = config.get("linear_num_key_heads", 16), config.get("linear_num_value_heads", 32)
        if values % keys:
            yield f"its linear_num_value_heads {values} are not a multiple of its linear_num_key_heads {keys}"
    if config.get("mlp_bias"):
        yield "its mlp_bias is true, but MLPs must have no bias"
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        yield f"its weights are quantized ({method}), but the backend reads numbers without their scales"


def _norms_choices(config: Mapping[str, Any]) -> bool:
    """Whether the probabilities of a token's experts are made to add up to one."""
    return bool(config.get("norm_topk_prob", config.get("model_type") in NORMS_CHOICES))


def has_experts(config: Any, layer: int) -> bool:
    """Whether a layer, counted from 0, has experts; of all layers, that is megatron-core's ``moe_layer_freq``."""
    if not getattr(config, "num_experts", 0) or layer in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    return (layer + 1) % getattr(config, "decoder_sparse_step", 1) == 0


def num_later(whole: Any) -> int:
    """Layers that a vision tower's features are added behind (deepstack, arXiv 2406.04334)."""
    vision = getattr(getattr(whole, "thinker_config", whole), "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def too_few_layers(whole: Any, num_layers: int) -> str | None:
    """What is wrong with a first pipeline stage of so many layers, if anything is."""
    if num_layers >= num_later(whole):
        return None
    return (
        f"the vision tower adds features after the first {num_later(whole)} layers, but the first pipeline stage has "
        f"{num_layers}. Make pipeline_model_parallel_size or virtual_pipeline_model_parallel_size smaller, or write "
        f"decoder_first_pipeline_num_layers: {num_later(whole)}."
    )


def head_width(config: Any) -> int:
    """Channels of an attention head."""
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def is_delta(config: Any, layer: int) -> bool:
    """Whether a layer, counted from 0, goes by the gated delta rule and not by attention."""
    return config.model_type in DELTA and config.layer_types[layer] == "linear_attention"
