"""How a role's workers divide a model, and which sizes go together. Pure.

The rules of megatron-core (0.16), whose groups are made of consecutive workers, tensor parallelism innermost. That
TP x PP x CP divides the workers is checked where device groups are read (``check_parallel_sizes``). With ``backend:
fsdp`` consecutive workers share rows (``sequence_parallel_size``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayhelper.device_groups.keys import PARALLEL_SIZES
from rayhelper.device_groups.mistakes import Mistakes, check_count
from rayhelper.device_groups.role_form import check_parallel_sizes
from rayhelper.planning.model_shape import ModelShape

MEGATRON_KEYS, (VLLM_KEY,), (SEQUENCE_KEY,) = PARALLEL_SIZES
TENSOR_KEY, PIPELINE_KEY, CONTEXT_KEY = MEGATRON_KEYS
EXPERT_KEY, EXPERT_TENSOR_KEY = "expert_model_parallel_size", "expert_tensor_parallel_size"
VIRTUAL_KEY = "virtual_pipeline_model_parallel_size"
FIRST_KEY, LAST_KEY = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
SIZE_KEYS = (*MEGATRON_KEYS, EXPERT_KEY, EXPERT_TENSOR_KEY, VIRTUAL_KEY, FIRST_KEY, LAST_KEY, VLLM_KEY)


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes of a role; tensor x pipeline x context x shared_rows x data workers in all."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shared_rows: int = 1  # workers of fsdp that share rows, and have a part of every sequence
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1  # pieces of a pipeline stage
    first_stage: int | None = None  # layers of the first pipeline stage; None: as many as a stage without such a number
    last_stage: int | None = None
    sequence: bool = False  # sequence parallelism: norms are divided over tensor-parallel workers too

    @classmethod
    def of(cls, where: str, settings: Mapping[str, Any], num_workers: int, mistakes: Mistakes) -> ParallelSizes:
        """The sizes that the settings say; what is no size is noted and counts as 1, what does not divide is noted.

        Sequence parallelism goes with tensor parallelism unless the settings say otherwise.
        """
        keys = (*SIZE_KEYS, SEQUENCE_KEY)
        given = {key: value for key, value in settings.items() if key in keys and value is not None}
        divided = {key: given[key] for key in (*MEGATRON_KEYS, SEQUENCE_KEY) if key in given}
        check_parallel_sizes(where, divided, f"{num_workers} workers", num_workers, mistakes)

        def size(key: str, default: int = 1) -> int:
            value = given.get(key, default)
            if key not in divided:  # those are noted above
                return mistakes.attempt(check_count, f"{key} of {where}", value, "Write 1 or more.") or 1
            return value if type(value) is int and value > 0 else 1

        tensor, pipeline, context = (size(key) for key in MEGATRON_KEYS)
        shared_rows = size(SEQUENCE_KEY)
        return cls(
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            shared_rows=shared_rows,
            data=max(1, num_workers // (tensor * pipeline * context * shared_rows)),
            expert=size(EXPERT_KEY),
            expert_tensor=size(EXPERT_TENSOR_KEY, tensor),
            virtual_pipeline=size(VIRTUAL_KEY),
            first_stage=size(FIRST_KEY) if FIRST_KEY in given else None,
            last_stage=size(LAST_KEY) if LAST_KEY in given else None,
            sequence=tensor > 1 if settings.get("sequence_parallel") is None else bool(settings["sequence_parallel"]),
        )

    @property
    def is_divided(self) -> bool:
        """Whether anything but the data is divided."""
        return max(self.tensor, self.pipeline, self.context, self.expert, self.expert_tensor) > 1

    @property
    def fsdp_ways(self) -> int:
        """Workers over which fsdp divides weights, gradients and optimizer states."""
        return self.data * self.shared_rows

    @property
    def given_stages(self) -> dict[str, int]:
        """The keys that say how many layers a pipeline stage has, with their numbers."""
        both = {FIRST_KEY: self.first_stage, LAST_KEY: self.last_stage}
        return {key: layers for key, layers in both.items() if layers is not None}

    def stage_layers(self, num_layers: int) -> list[int]:
        """Layers of each pipeline stage; of those without a number of their own equally many, rounded up."""
        given = self.given_stages
        others = max(1, self.pipeline - len(given))
        layers = [math.ceil(max(0, num_layers - sum(given.values())) / others)] * self.pipeline
        layers[0] = given.get(FIRST_KEY, layers[0])
        layers[-1] = given.get(LAST_KEY, layers[-1])
        return layers


def size_mistakes(
    where: str, sizes: ParallelSizes, settings: Mapping[str, Any], shape: ModelShape | None
) -> Iterator[str]:
    """What a training role's sizes break, each with its remedy; those of the model where its shape is known."""
    tp, ep, etp = sizes.tensor, sizes.expert, sizes.expert_tensor
    workers = tp * sizes.context * sizes.data
    if workers % (ep * etp):
        whole = workers % etp == 0
        remedy = f"{EXPERT_KEY} among {_divisors(workers // etp)}" if whole else f"{EXPERT_TENSOR_KEY} 1 or {tp}"
        yield (
            f"{EXPERT_KEY} {ep} x {EXPERT_TENSOR_KEY} {etp} = {ep * etp} of {where} does not divide the {workers} "
            f"workers of a pipeline stage. (They are TP {tp} x CP {sizes.context} x DP {sizes.data}.) Choose {remedy}."
        )
    if sizes.virtual_pipeline > 1 and sizes.pipeline == 1:
        yield (
            f"{VIRTUAL_KEY} {sizes.virtual_pipeline} of {where} cuts stages of a pipeline, but {PIPELINE_KEY} is 1. "
            f"Remove it, or make {PIPELINE_KEY} larger."
        )
    for key, layers in sizes.given_stages.items():
        if sizes.pipeline == 1:
            yield (
                f"{key} {layers} of {where} sets the layers of a pipeline stage, but {PIPELINE_KEY} is 1. Remove it, "
                f"or make {PIPELINE_KEY} larger."
            )
        elif layers % sizes.virtual_pipeline:
            yield (
                f"{key} {layers} of {where} cannot be cut into {VIRTUAL_KEY} {sizes.virtual_pipeline} equal pieces. "
                f"Write a multiple of {sizes.virtual_pipeline}."
            )
    if settings.get("sequence_parallel") and tp == 1:
        yield f"sequence_parallel of {where} divides over tensor-parallel workers, but {TENSOR_KEY} is 1. Remove it."
    if shape is not None:
        yield from _shape_mistakes(where, sizes, settings, shape)


def _shape_mistakes(where: str, sizes: ParallelSizes, settings: Mapping[str, Any], shape: ModelShape) -> Iterator[str]:
    tp, ep = sizes.tensor, sizes.expert
    if shape.num_attention_heads % sizes.shared_rows:
        yield (
            f"{SEQUENCE_KEY} {sizes.shared_rows} of {where} does not divide the model's num_attention_heads "
            f"{shape.num_attention_heads}. Choose among {_divisors(shape.num_attention_heads)}."
        )
    for name, count in (
        ("num_attention_heads", shape.num_attention_heads),
        ("num_key_value_heads", shape.num_key_value_heads),
        ("linear_num_key_heads", shape.linear_num_key_heads),
        ("linear_num_value_heads", shape.linear_num_value_heads),
        ("intermediate_size", shape.intermediate_size if shape.num_moe_layers < shape.num_hidden_layers else tp),
        ("shared_expert_intermediate_size", shape.shared_expert_intermediate_size if shape.num_moe_layers else tp),
    ):
        if count % tp:
            yield (
                f"{TENSOR_KEY} {tp} of {where} does not divide the model's {name} {count}. "
                f"Choose among {_divisors(count)}."
            )
    pieces = sizes.pipeline * sizes.virtual_pipeline
    if sizes.given_stages:
        yield from _stage_mistakes(where, sizes, shape.num_hidden_layers)
    elif shape.num_hidden_layers % pieces:
        virtual = f" x {VIRTUAL_KEY} {sizes.virtual_pipeline}" if sizes.virtual_pipeline > 1 else ""
        yield (
            f"{PIPELINE_KEY} {sizes.pipeline}{virtual} of {where} does not divide the model's num_hidden_layers "
            f"{shape.num_hidden_layers}. Choose a product among {_divisors(shape.num_hidden_layers)}."
        )
    if not shape.num_experts:
        if ep > 1:
            yield (
                f"{EXPERT_KEY} {ep} of {where} divides experts, but the model has none. Remove it: a dense model "
                "cannot share workers with divided experts."
            )
        return
    if shape.num_experts % ep:
        yield (
            f"{EXPERT_KEY} {ep} of {where} does not divide the model's num_experts {shape.num_experts}. "
            f"Choose among {_divisors(shape.num_experts)}."
        )
    if shape.moe_intermediate_size % sizes.expert_tensor:
        yield (
            f"{EXPERT_TENSOR_KEY} {sizes.expert_tensor} of {where} does not divide the model's moe_intermediate_size "
            f"{shape.moe_intermediate_size}. Choose among {_divisors(shape.moe_intermediate_size)}."
        )
    if ep == 1 and sizes.expert_tensor != tp:
        yield (
            f"{EXPERT_TENSOR_KEY} {sizes.expert_tensor} of {where} differs from {TENSOR_KEY} {tp}, but {EXPERT_KEY} is "
            f"1. Then megatron-core reduces the experts' gradients over the wrong workers. Remove {EXPERT_TENSOR_KEY}, "
            f"or make {EXPERT_KEY} larger."
        )
    if tp > 1 and settings.get("sequence_parallel") is False:
        yield (
            f"sequence_parallel of {where} is false, but a mixture of experts under {TENSOR_KEY} {tp} needs it. "
            "Write sequence_parallel: true."
        )


def _stage_mistakes(where: str, sizes: ParallelSizes, num_layers: int) -> Iterator[str]:
    """Layers that the stages with a number of their own do not leave to the others in equal numbers."""
    given, num_others = sizes.given_stages, sizes.pipeline - len(sizes.given_stages)
    if num_others < 0:  # one stage has no first and last one
        return
    told = " and ".join(f"{key} {layers}" for key, layers in given.items())
    rest = num_layers - sum(given.values())
    if num_others == 0:
        if rest:
            yield (
                f"{told} of {where} are all stages of {PIPELINE_KEY} {sizes.pipeline}, but {sum(given.values())} "
                f"layers differ from the model's num_hidden_layers {num_layers}. Write only one of them, or a larger "
                f"{PIPELINE_KEY}."
            )
        return
    step = num_others * sizes.virtual_pipeline
    if rest < step or rest % step:
        pieces = f" in {VIRTUAL_KEY} {sizes.virtual_pipeline} pieces each" if sizes.virtual_pipeline > 1 else ""
        yield (
            f"{told} of {where} leave {rest} of the model's num_hidden_layers {num_layers} to the other {num_others} "
            f"of {PIPELINE_KEY} {sizes.pipeline} stages. These stages have equally many layers{pieces}. Leave a "
            f"multiple of {step}."
        )


def engine_mistakes(where: str, tensor: int, shape: ModelShape | None) -> Iterator[str]:
    """What the tensor-parallel size of a vLLM engine breaks; it repeats key-value heads if there are too few."""
    if shape is None:
        return
    if shape.num_attention_heads % tensor:
        yield (
            f"{VLLM_KEY} {tensor} of {where} does not divide the model's num_attention_heads "
            f"{shape.num_attention_heads}. Choose among {_divisors(shape.num_attention_heads)}."
        )
    heads = shape.num_key_value_heads
    if heads % tensor and tensor % heads:
        yield (
            f"{VLLM_KEY} {tensor} of {where} neither divides the model's num_key_value_heads {heads} nor is a multiple "
            f"of them. Choose among {_divisors(heads)}, or a multiple of {heads}."
        )


def num_torn(ranks: Sequence[int], width: int, nproc_per_node: int | None) -> int:
    """How many blocks of ``width`` consecutive ranks lie on more than one node."""
    if nproc_per_node is None or width < 2:
        return 0
    return sum(
        ranks[start] // nproc_per_node != ranks[start + width - 1] // nproc_per_node
        for start in range(0, len(ranks) - width + 1, width)
    )


def _divisors(count: int) -> str:
    return ", ".join(str(size) for size in range(1, min(count, 1024) + 1) if count % size == 0)
