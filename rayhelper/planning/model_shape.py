"""The shape of a language model, and how many parameters it has: without torch, without its weights. Pure.

Exact for the architectures named in ``BIASES``; any other is counted as if it were a Llama of the same sizes, and
``is_exact`` says so. A vision tower is no part of that: whoever can build the model counts it (``vision_parts.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rayhelper.device_groups.mistakes import check_count
from rayhelper.errors import ConfigError

# model_type -> which biases it has where its configuration does not say
BIASES = {
    "llama": (),
    "mistral": (),
    "mixtral": (),
    "qwen2": ("qkv_bias",),
    "qwen2_moe": ("qkv_bias",),
    "qwen3": ("qk_norm",),
    "qwen3_moe": ("qk_norm",),
    "qwen3_next": ("qk_norm", "output_gate"),
    "qwen2_vl": ("qkv_bias",),
    "qwen2_vl_text": ("qkv_bias",),
    "qwen2_5_vl": ("qkv_bias",),
    "qwen2_5_vl_text": ("qkv_bias",),
    "qwen2_5_omni_text": ("qkv_bias",),
    "qwen3_omni_moe_text": ("qk_norm",),
    "qwen3_vl_text": ("qk_norm",),
    "qwen3_vl_moe_text": ("qk_norm",),
    "qwen3_5_text": ("qk_norm", "output_gate"),
    "qwen3_5_moe_text": ("qk_norm", "output_gate"),
}
DELTA = {  # what these sizes are unless it is said, of architectures some of whose layers have a state
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
SHAPE_REMEDY = (
    "Give a folder with a config.json, that file, or {" + ": ..., ".join(REQUIRED) + ": ...} "
    "(and num_key_value_heads, head_dim, tie_word_embeddings, num_experts, num_experts_per_tok, moe_intermediate_size)."
)


class Weights(NamedTuple):
    """How many parameters a part of the model has, by how they are divided."""

    split: int  # over tensor-parallel ranks
    replicated: int  # norms and routers: every tensor-parallel rank has them
    experts: int = 0  # over expert-parallel and expert-tensor-parallel ranks


class Part(NamedTuple):
    """What a vision model has beside its language model: its vision tower, or its aligner."""

    num_parameters: int = 0
    linear: tuple[tuple[str, int, int], ...] = ()  # of each linear layer: end of its name, inputs, outputs


NO_PART = Part()


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer under the names of transformers."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    num_experts: int = 0  # 0: dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    num_moe_layers: int = 0
    shared_expert_intermediate_size: int = 0  # of the MLP that every token of a layer of experts goes through
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # a norm on every head's queries and keys
    output_gate: bool = False  # what attention gives is multiplied by a gate, as wide as the queries
    num_delta_layers: int = 0  # that have a state in the place of attention (gated delta rule)
    delta_by_head: bool = False  # their projections are stacked as Qwen3-Next has them
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    vit: Part = NO_PART  # of a vision model; who reads a config.json alone does not know it
    aligner: Part = NO_PART
    is_exact: bool = True  # False: the architecture is not one of BIASES

    @classmethod
    def of(cls, source: Mapping[str, Any] | str | Path, where: str = "model") -> ModelShape | None:
        """The shape that a mapping, a config.json or a model's folder says; None for a name of anything else.

        Raises:
            ConfigError: the file or mapping does not hold a shape.
        """
        if isinstance(source, Mapping):
            return cls._of_mapping(source, where)
        path = Path(source).expanduser()
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            return None
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: {path} cannot be read as JSON: {error}. {SHAPE_REMEDY}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{where}: {path} holds {type(config).__name__}, no shape. {SHAPE_REMEDY}")
        return cls._of_mapping(config, f"{where}: {path}")

    @classmethod
    def _of_mapping(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        thinker = config.get("thinker_config")  # of a model that also speaks
        config = thinker if isinstance(thinker, Mapping) else config
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) else config  # of a model that also sees
        kind = str(config.get("model_type", "llama"))
        if kind == "qwen3_5_moe_text":  # has no other layers
            config = {"intermediate_size": config.get("moe_intermediate_size"), **config}
        missing = [name for name in REQUIRED if config.get(name) is None]
        if missing:
            raise ConfigError(f"{where} has no {', '.join(missing)}. {SHAPE_REMEDY}")

        def size(*names: str, default: int = 0) -> int:
            for name in names:
                if config.get(name) is not None:
                    return check_count(f"{name} of {where}", config[name], SHAPE_REMEDY)
            return default

        extras = BIASES.get(kind, ())
        layers, heads, hidden = size("num_hidden_layers"), size("num_attention_heads"), size("hidden_size")
        experts = 0 if config.get("num_experts") == 0 else size("num_experts", "num_local_experts")
        has_shared = experts and kind != "qwen3_moe" and config.get("shared_expert_intermediate_size") != 0
        plain = config.get("mlp_only_layers") or []
        if not isinstance(plain, list):
            raise ConfigError(f"mlp_only_layers of {where} must be a list of layers, got {plain!r}. Write [0, 1].")
        step = size("decoder_sparse_step", default=1)
        delta: dict[str, Any] = _delta_sizes(config, layers, size) if "output_gate" in extras else {}
        sparse = [layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in plain]
        return cls(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=hidden // heads),
            intermediate_size=size("intermediate_size"),
            vocab_size=size("vocab_size"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            num_experts=experts,
            num_experts_per_tok=size("num_experts_per_tok", default=1) if experts else 0,
            moe_intermediate_size=size("moe_intermediate_size", "intermediate_size") if experts else 0,
            num_moe_layers=len(sparse) if experts else 0,
            shared_expert_intermediate_size=size("shared_expert_intermediate_size") if has_shared else 0,
            qkv_bias=bool(config.get("attention_bias", "qkv_bias" in extras)),
            output_bias=bool(config.get("attention_bias")),
            mlp_bias=bool(config.get("mlp_bias")),
            qk_norm=bool(config.get("qk_norm", "qk_norm" in extras)),
            output_gate="output_gate" in extras,
            delta_by_head=kind == "qwen3_next",
            is_exact=kind in BIASES,
            **delta,
        )

    @property
    def attention(self) -> Weights:
        """Of one layer, with both norms of the layer."""
        queries = self.num_attention_heads * (2 if self.output_gate else 1)
        heads = (queries + 2 * self.num_key_value_heads) * self.head_dim
        output = self.num_attention_heads * self.head_dim * self.hidden_size
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm + self.hidden_size * self.output_bias
        return Weights(self.hidden_size * heads + output + heads * self.qkv_bias, norms)

    @property
    def delta_rule(self) -> Weights:
        """Of one layer that has a state in the place of attention, with both norms of the layer."""
        keys, values = self.delta_widths
        mixed = 2 * keys + values
        rows = mixed + values + 2 * self.linear_num_value_heads
        further = mixed * self.linear_conv_kernel_dim + 2 * self.linear_num_value_heads
        return Weights((rows + values) * self.hidden_size + further, 2 * self.hidden_size + self.linear_value_head_dim)

    @property
    def delta_widths(self) -> tuple[int, int]:
        """Of all keys, and of all values, of such a layer."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return keys, self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def dense_layer(self) -> Weights:
        mlp = 3 * self.hidden_size * self.intermediate_size + 2 * self.intermediate_size * self.mlp_bias
        split, replicated, _ = self.attention
        return Weights(split + mlp, replicated + self.hidden_size * self.mlp_bias)

    @property
    def moe_layer(self) -> Weights:
        split, replicated, _ = self.attention
        experts = self.num_experts * 3 * self.hidden_size * self.moe_intermediate_size
        shared = 3 * self.hidden_size * self.shared_expert_intermediate_size
        routers = self.num_experts + (1 if shared else 0)  # a shared expert has a gate
        return Weights(split + shared, replicated + routers * self.hidden_size, experts)

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding; those of an untied output head."""
        return self.vocab_size * self.hidden_size

    @property
    def ends(self) -> int:
        """What is no layer: embedding, output head and the last norm."""
        return self.embedding * (1 if self.tie_word_embeddings else 2) + self.hidden_size

    @property
    def largest_layer(self) -> int:
        more = max(0, sum(self.delta_rule) - sum(self.attention)) if self.num_delta_layers else 0
        return sum(self.moe_layer if self.num_moe_layers else self.dense_layer) + more

    @property
    def tower(self) -> int:
        """Parameters of the vision tower and the aligner."""
        return self.vit.num_parameters + self.aligner.num_parameters

    def without(self, parts: Collection[str]) -> ModelShape:
        """The same model without its ``vit`` or ``aligner``."""
        return replace(
            self,
            vit=NO_PART if "vit" in parts else self.vit,
            aligner=NO_PART if "aligner" in parts else self.aligner,
        )

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return self.num_language_parameters + self.tower

    @property
    def num_language_parameters(self) -> int:
        dense_layers = self.num_hidden_layers - self.num_moe_layers
        more = self.num_delta_layers * (sum(self.delta_rule) - sum(self.attention))
        return self.ends + dense_layers * sum(self.dense_layer) + self.num_moe_layers * sum(self.moe_layer) + more


def _delta_sizes(config: Mapping[str, Any], num_layers: int, size: Callable[..., int]) -> dict[str, int]:
    """The fields of ModelShape that say which layers have a state, and how large it is."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        count = kinds.count("linear_attention")
    else:
        count = num_layers - num_layers // size("full_attention_interval", default=4)
    return {"num_delta_layers": count} | {name: size(name, default=default) for name, default in DELTA.items()}
