"""Which tensors of a checkpoint each layer of a model is made of: one table for all architectures.

It follows from the configuration alone and is the same on every worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from trainers.backends.megatron.architectures import (
    BIASED,
    DELTA,
    MODEL_TYPES,
    NORMED,
    SHARED,
    has_experts,
    head_width,
    is_delta,
)
from trainers.backends.megatron.tensors.sources import Block, Source

EMBEDDING, HEAD, VALUES = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
GROUPED = "mlp.experts.weight{}"  # the parameters of GroupedMLP, of all experts of a rank


def check(config: Any, num_ranks: int) -> None:
    """Raises ValueError for a model that is not known, or cannot be cut over so many tensor-parallel ranks."""
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type {config.model_type!r} cannot be converted for megatron-core; these can: "
            f"{', '.join(MODEL_TYPES)}. For others use backend: fsdp."
        )
    heads = config.num_key_value_heads
    if heads % num_ranks:
        sizes = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ValueError(
            f"tensor_model_parallel_size {num_ranks} does not divide the model's {heads} key-value heads: "
            f"use one of {sizes}"
        )


def block_sources(
    config: Any,
    block: int,
    *,
    num_ranks: int,
    num_expert_ranks: int,
    num_padded: int,
    head: Literal["lm", "value", "embedding"] = "lm",
    num_labels: int = 1,
) -> Block:
    """The table: the embedding (block 0), a layer (from 1 on), or what follows the last layer.

    ``num_ranks`` are the tensor-parallel ranks, ``num_expert_ranks`` those of an expert, ``num_padded`` the rows that
    the vocabulary has in megatron-core alone. Names of a layer's parameters begin behind ``decoder.layers.N.``.
    """
    hidden, words = config.hidden_size, (config.vocab_size, config.hidden_size)
    if block == 0:
        name = "embedding.word_embeddings.weight"
        return Block([Source((name,), {EMBEDDING: words}, 0, num_ranks, num_padded=num_padded)])
    if block > config.num_hidden_layers:
        end = [Source(("decoder.final_layernorm.weight",), {"model.norm.weight": (hidden,)})]
        if head == "value":
            end.append(Source(("values.weight",), {VALUES: (num_labels, hidden)}))
        elif head == "lm" and not config.tie_word_embeddings:
            end.append(Source(("output_layer.weight",), {HEAD: words}, 0, num_ranks, num_padded=num_padded))
        return Block(end)
    layer = f"model.layers.{block - 1}."
    plain = [
        Source(
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            {f"{layer}input_layernorm.weight": (hidden,)},
        ),
        *(
            _delta_rule(config, f"{layer}linear_attn.", num_ranks)
            if is_delta(config, block - 1)
            else _attention(config, f"{layer}self_attn.", num_ranks)
        ),
        Source(
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            {f"{layer}post_attention_layernorm.weight": (hidden,)},
        ),
    ]
    mlp = f"{layer}mlp."
    if not has_experts(config, block - 1):
        plain += _mlp(["mlp.linear_fc{}.weight"], mlp, hidden, config.intermediate_size, num_ranks)
        if config.model_type == "llama" and config.mlp_bias:
            rows = (config.intermediate_size,)
            gated = {f"{mlp}gate_proj.bias": rows, f"{mlp}up_proj.bias": rows}
            plain.append(Source(("mlp.linear_fc1.bias",), gated, 0, num_ranks))
            plain.append(Source(("mlp.linear_fc2.bias",), {f"{mlp}down_proj.bias": (hidden,)}))
        return Block(plain)
    plain.append(Source(("mlp.router.weight",), {f"{mlp}gate.weight": (config.num_experts, hidden)}))
    if config.model_type in SHARED:
        names = ["mlp.shared_experts.linear_fc{}.weight"]
        plain += _mlp(names, f"{mlp}shared_expert.", hidden, config.shared_expert_intermediate_size, num_ranks)
        plain.append(Source(("mlp.shared_experts.gate_weight",), {f"{mlp}shared_expert_gate.weight": (1, hidden)}))
    names = ["mlp.experts.local_experts.{{}}.linear_fc{}.weight", "mlp.experts.linear_fc{}.weight{{}}", GROUPED]
    size = config.moe_intermediate_size
    experts = [
        _mlp(names, f"{mlp}experts.{expert}.", hidden, size, num_expert_ranks) for expert in range(config.num_experts)
    ]
    return Block(plain, experts)


def tower_blocks(shapes: Mapping[str, tuple[int, ...]], names: Collection[str]) -> list[Block]:
    """These weights of a vision tower, which each worker of the first stage has whole: a block for each layer."""
    sources = [Source((name.removeprefix("model."),), {name: shapes[name]}) for name in shapes if name in names]
    return [Block(list(layer)) for _, layer in groupby(sources, lambda source: source.key.split(".")[2:4])]


def _attention(config: Any, hf: str, num_ranks: int) -> Iterator[Source]:
    head = head_width(config)
    wide, hidden = config.num_attention_heads * head, config.hidden_size
    rows = {"q": wide, "k": config.num_key_value_heads * head, "v": config.num_key_value_heads * head}
    if config.model_type in DELTA:
        rows["q"] *= 2  # of each head the query, then the gate of its output
    groups = config.num_key_value_heads // num_ranks
    biased = config.model_type in ("llama", "qwen3", "qwen3_moe") and config.attention_bias
    qkv_biased = biased or (config.model_type in BIASED and getattr(config, "qkv_bias", True))
    name = "self_attention.linear_qkv"
    yield Source(
        (f"{name}.weight",), {f"{hf}{x}_proj.weight": (n, hidden) for x, n in rows.items()}, 0, num_ranks, groups
    )
    if qkv_biased:
        yield Source((f"{name}.bias",), {f"{hf}{x}_proj.bias": (n,) for x, n in rows.items()}, 0, num_ranks, groups)
    if config.model_type in NORMED:
        for x in "qk":
            yield Source((f"self_attention.{x}_layernorm.weight",), {f"{hf}{x}_norm.weight": (head,)})
    yield Source(("self_attention.linear_proj.weight",), {f"{hf}o_proj.weight": (hidden, wide)}, 1, num_ranks)
    if biased:
        yield Source(("self_attention.linear_proj.bias",), {f"{hf}o_proj.bias": (hidden,)})


def _delta_rule(config: Any, hf: str, num_ranks: int) -> Iterator[Source]:
    """Of Qwen3-Next the rows of ``in_proj`` are sorted by key heads; Qwen3.5 has the queries of all heads first."""
    hidden, num_values = config.hidden_size, config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = num_values * config.linear_value_head_dim
    of_conv = (keys, keys, values)
    if config.model_type == "qwen3_next":
        rows, sections = {"qkvz": sum(of_conv) + values, "ba": 2 * num_values}, {}
    else:
        rows = {"qkv": sum(of_conv), "z": values, "b": num_values, "a": num_values}
        sections = {f"{hf}in_proj_qkv.weight": of_conv}
    tensors = {f"{hf}in_proj_{name}.weight": (size, hidden) for name, size in rows.items()}
    yield Source(("self_attention.in_proj.weight",), tensors, 0, num_ranks, sections=sections)
    conv = {f"{hf}conv1d.weight": (sum(of_conv), 1, config.linear_conv_kernel_dim)}
    sections = {f"{hf}conv1d.weight": of_conv}
    yield Source(("self_attention.conv",), conv, 0, num_ranks, sections=sections)
    yield Source(("self_attention.log_rate",), {f"{hf}A_log": (num_values,)}, 0, num_ranks)
    yield Source(("self_attention.dt_bias",), {f"{hf}dt_bias": (num_values,)}, 0, num_ranks)
    yield Source(("self_attention.norm",), {f"{hf}norm.weight": (config.linear_value_head_dim,)})
    yield Source(("self_attention.out_proj.weight",), {f"{hf}out_proj.weight": (hidden, values)}, 1, num_ranks)


def _mlp(parameters: Sequence[str], hf: str, hidden: int, size: int, num_ranks: int) -> list[Source]:
    """A gated MLP of ``size``; in the parameters' names {} is 1 for what goes in and 2 for what comes out."""
    gated = {f"{hf}gate_proj.weight": (size, hidden), f"{hf}up_proj.weight": (size, hidden)}
    return [
        Source(tuple(name.format(1) for name in parameters), gated, 0, num_ranks),
        Source(tuple(name.format(2) for name in parameters), {f"{hf}down_proj.weight": (hidden, size)}, 1, num_ranks),
    ]
