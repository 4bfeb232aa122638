"""How large a LoRA adapter is."""

from __future__ import annotations

from collections.abc import Iterable

from rayhelper.planning.model_shape import ModelShape

ALL = "all-linear"


def adapter_parameters(shape: ModelShape, rank: int, targets: Iterable[str] = (ALL,)) -> int:
    """Numbers in the two matrices beside every layer that ``targets`` name by the last part of its name, as in peft.

    ``all-linear``: every layer but the head. The stacked gate and up projection of an expert have one pair of matrices
    of twice the rank. Names that are not those of Llama and Qwen count nothing.
    """
    names = {target.rpartition(".")[2] for target in targets}
    hidden, queries = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys, width, expert = (
        shape.num_key_value_heads * shape.head_dim,
        shape.intermediate_size,
        shape.moe_intermediate_size,
    )

    def chosen(layer: dict[str, int]) -> int:
        return sum(size for name, size in layer.items() if name in names or ALL in names)

    attention = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": queries + hidden,
    }
    mlp = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + width)
    experts = dict.fromkeys(("gate_proj", "up_proj"), hidden + 2 * expert) | {"down_proj": hidden + expert}
    router = {"gate": hidden + shape.num_experts}
    num_dense = shape.num_hidden_layers - shape.num_moe_layers
    total = shape.num_hidden_layers * chosen(attention) + num_dense * chosen(mlp)
    total += shape.num_moe_layers * (shape.num_experts * chosen(experts) + chosen(router))
    return rank * total
