"""How large an adapter is: LoRA's, or that of another tuner of peft."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rayhelper.planning.model_shape import ModelShape

ALL = "all-linear"
DEFAULT_RANK = 8  # of LoRA
Numbers = Callable[[int, int], int]  # of an adapter beside a layer, by the sizes of its input and output
DEFAULTS: dict[str, dict[str, int]] = {  # peft's, of the fields that say how large an adapter is
    "adalora": {"init_r": 12},
    "boft": {"boft_block_size": 4, "boft_block_num": 0, "boft_n_butterfly_factor": 1},
    "fourierft": {"n_frequency": 1000},
    "miss": {"r": 64},
    "vera": {"r": 256},
}


def numbers_of(tuner: str, rank: int, kwargs: Mapping[str, Any]) -> Numbers:
    """What an adapter of a tuner has beside a layer; ``kwargs``: fields of peft's configuration, for other than lora.

    A tuner that is not known counts as LoRA.
    """
    sizes = DEFAULTS.get(tuner, {})
    given = {name: kwargs[name] for name in sizes if type(kwargs.get(name)) is int}
    of = sizes | given
    if tuner == "adalora":  # two matrices, and a number for each rank
        return lambda inputs, outputs: of["init_r"] * (inputs + outputs + 1)
    if tuner == "boft":  # blocks along the input, and a number for each output
        size, count, factor = (of[name] for name in ("boft_block_size", "boft_block_num", "boft_n_butterfly_factor"))
        return lambda inputs, outputs: factor * inputs * (size if size or not count else inputs // count) + outputs
    if tuner == "fourierft":
        return lambda inputs, outputs: of["n_frequency"]
    if tuner == "ia3":  # a number for each output, or input of the feed-forward part: at most the larger of the two
        return lambda inputs, outputs: max(inputs, outputs)
    if tuner == "miss":
        return lambda inputs, outputs: of["r"] * outputs
    if tuner == "vera":  # two vectors; its matrices are drawn, shared by all layers, and not trained
        return lambda inputs, outputs: of["r"] + outputs
    return lambda inputs, outputs: rank * (inputs + outputs)


def adapter_parameters(
    shape: ModelShape,
    rank: int,
    targets: Iterable[str] = (ALL,),
    *,
    tuner: str = "lora",
    kwargs: Mapping[str, Any] | None = None,
) -> int:
    """Numbers that are trained beside every layer that ``targets`` name by the last part of its name, as in peft.

    ``all-linear``: every layer but the head. The stacked gate and up projection of an expert have one pair of matrices
    of LoRA of twice the rank; other tuners change no experts. Names that are not those of Llama and Qwen count nothing.
    """
    names = {target.rpartition(".")[2] for target in targets}
    numbers = numbers_of(tuner, rank, kwargs or {})
    hidden, queries = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys, width, expert = (
        shape.num_key_value_heads * shape.head_dim,
        shape.intermediate_size,
        shape.moe_intermediate_size,
    )

    def chosen(layer: Mapping[str, int]) -> int:
        return sum(size for name, size in layer.items() if name in names or ALL in names)

    attention = {
        "q_proj": numbers(hidden, queries * (2 if shape.output_gate else 1)),
        "k_proj": numbers(hidden, keys),
        "v_proj": numbers(hidden, keys),
        "o_proj": numbers(queries, hidden),
    }
    mlp = dict.fromkeys(("gate_proj", "up_proj"), numbers(hidden, width)) | {"down_proj": numbers(width, hidden)}
    experts, router = {}, {}
    if tuner == "lora":
        experts = dict.fromkeys(("gate_proj", "up_proj"), numbers(hidden, 2 * expert))
        experts |= {"down_proj": numbers(expert, hidden)}
        router = {"gate": numbers(hidden, shape.num_experts)}
    num_dense = shape.num_hidden_layers - shape.num_moe_layers
    num_delta = shape.num_delta_layers
    total = (shape.num_hidden_layers - num_delta) * chosen(attention) + num_dense * chosen(mlp)
    total += num_delta * chosen(_delta_layer(shape, numbers))
    return total + shape.num_moe_layers * (shape.num_experts * chosen(experts) + chosen(router))


def _delta_layer(shape: ModelShape, numbers: Numbers) -> dict[str, int]:
    """What an adapter has beside the projections of a layer with a state, by their names."""
    hidden, (keys, values), heads = shape.hidden_size, shape.delta_widths, shape.linear_num_value_heads
    rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    if shape.delta_by_head:
        rows = {"qkvz": 2 * (keys + values), "ba": 2 * heads}
    return {f"in_proj_{name}": numbers(hidden, size) for name, size in rows.items()} | {
        "out_proj": numbers(values, hidden)
    }
