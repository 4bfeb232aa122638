"""What is asked of a model inside vLLM, in whichever process it lies: its ``apply_model`` calls these there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rayhelper import ConfigError
from trainers.parts.fingerprints import added_up, fingerprint, fingerprints, layer_of, rows_of
from trainers.rollout.vllm.patches import plain_convolutions

STACK = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
DERIVED = ("W_UK_T", "W_UV")  # parameters that vLLM computes from others: of latent attention (DeepSeek)
OF_HEADS = ("A_log", "dt_bias")  # parameters of delta layers, a number per head: each worker has those of its heads
COPIED = ("layer_scalar",)  # buffers of vLLM's that are weights of transformers' models (Gemma 4)


def load(named_weights: Iterable[tuple[str, torch.Tensor]], model: Any) -> None:
    """Takes the weights in place, and computes anew what vLLM has derived from those before."""
    with plain_convolutions(model):
        model.load_weights(as_in_files(named_weights, model))
    for module in model.modules():
        if hasattr(module, "kv_b_proj") and hasattr(module, DERIVED[0]):
            module.process_weights_after_loading(module.kv_b_proj.weight.dtype)


def as_in_files(named_weights: Iterable[tuple[str, torch.Tensor]], model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Stacks of experts as the model's own files have them: in those of Qwen3-VL rows and columns are exchanged."""
    is_exchanged = any(getattr(module, "is_fused_checkpoint_transposed", False) for module in model.modules())
    for name, weight in named_weights:
        yield name, weight.transpose(1, 2) if is_exchanged and STACK.fullmatch(name) else weight


# Models of vLLM that keep weights under other names, the other way round, or as another function of them
UNLIKE = {"FalconH1ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM", "NemotronHForCausalLM"}
PLAIN = {"CPU", "TRITON", "BATCHED_TRITON"}  # vLLM's kernels for experts that take weights as they come


def check_experts(model: Any) -> None:
    """Raises ConfigError if vLLM keeps experts in a layout in which weights that come later would be read wrongly."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    backends = {backend.name for one in methods if (backend := getattr(one, "unquantized_backend", None)) is not None}
    if backends - PLAIN:
        raise ConfigError(
            f"vLLM keeps the experts of {type(model).__name__} in the layout of {', '.join(sorted(backends - PLAIN))}, "
            "where new weights cannot be loaded into their place. Set vllm_engine_kwargs: {moe_backend: triton}."
        )


PEFT = "base_model.model."  # how names of an adapter's weights begin


def layers_of(names: Iterable[str], model: Any) -> dict[str, str]:
    """The checkpoint's layers of these weights, by the names that vLLM has for them, where those are others.

    vLLM calls parts of models that see pictures by names of its own.
    """
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    found = {}
    for name in names:
        start = PEFT if name.startswith(PEFT) else ""
        for own in mapper.apply_list([name.removeprefix(start)]):
            found[layer_of(start + own)] = layer_of(name)
    return {own: layer for own, layer in found.items() if own != layer}


def scale_logits(factor: float, model: Any) -> None:
    """Logits are multiplied by ``factor``, beside the scale that some architectures have there themselves (Granite)."""
    speaks = model if hasattr(model, "logits_processor") else model.get_language_model()  # of one that sees
    processor = speaks.logits_processor
    if not hasattr(processor, "scale_of_model"):
        processor.scale_of_model = processor.scale
    processor.scale = processor.scale_of_model * factor


def _weights(module: Any, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in module.named_parameters(recurse=recurse):
        if name.rpartition(".")[2] not in DERIVED:
            yield name, weight
    for name, weight in module.named_buffers(recurse=recurse):
        if name.rpartition(".")[2] in COPIED:
            yield name, weight


def _as_sent(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if weight.dtype == torch.float32 else weight


def model_fingerprints(dtype: torch.dtype, model: Any) -> dict[str, int]:
    """Of the whole model; each worker of a tensor-parallel group adds what its part has. Empty: it cannot be told.

    ``dtype``: in which weights come. Some that vLLM keeps in float32 (biases of routers, decays of states) came in it
    too, so they are looked at in it.
    """
    if type(model).__name__ in UNLIKE:
        return {}
    with plain_convolutions(model):
        return _model_fingerprints(dtype, model)


def _model_fingerprints(dtype: torch.dtype, model: Any) -> dict[str, int]:
    from vllm.distributed import parallel_state

    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    if size == 1:
        return fingerprints((name, _as_sent(weight, dtype)) for name, weight in _weights(model))
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    prints, seen = [], set()
    for module_name, module in model.named_modules():
        for name, weight in _weights(module, recurse=False):
            if id(weight) in seen:  # tied
                continue
            seen.add(id(weight))
            weight = _as_sent(weight, dtype)
            if isinstance(module, RowParallelLinear) and name == "weight":
                width = weight.shape[1]
                found = fingerprint(weight, first_column=rank * width, num_columns=size * width)
            elif isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
                if getattr(module, "num_kv_head_replicas", 1) > 1:
                    return {}
                found = fingerprint(rows_of(name, weight))
            elif name in OF_HEADS:
                width, rows = len(weight), rows_of(name, weight)
                told = {"first_column": rank * width, "num_columns": size * width} if rows.dim() == 1 else {}
                if told and width * rows.element_size() % 8:  # a word would be of two workers
                    return {}
                found = fingerprint(rows, **told)
            elif weight.dim() > 2 and not module_name.endswith(("patch_embed.proj", ".conv1d")):  # experts
                return {}
            else:  # every worker has it
                found = fingerprint(rows_of(name, weight)) * (rank == 0)
            prints.append((f"{module_name}.{name}", found))
    group = parallel_state.get_tp_group().device_group
    return added_up(prints, lambda totals: torch.distributed.all_reduce(totals, group=group))
