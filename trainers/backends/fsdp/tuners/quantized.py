"""QLoRA (arXiv 2305.14314): a LoRA adapter beside weights that lie in 4 or 8 bits, by bitsandbytes.

bitsandbytes is installed apart (``requirements/qlora.txt``). Without it nothing here finds a quantized weight.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# What bitsandbytes keeps beside a weight, in the state of a model, as parts of the weight's name
STATES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.", ".SCB", ".weight_format")


def is_installed() -> bool:
    """Whether bitsandbytes can be imported."""
    return importlib.util.find_spec("bitsandbytes") is not None


def loading_arguments(quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that load a model onto ``device`` with quantized linear layers.

    ``quantization``: fields of transformers' BitsAndBytesConfig. Products are computed in ``dtype``; the head is left
    as it is, as in transformers.
    """
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(**quantization, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": device}}


def is_quantized(weight: Any) -> bool:
    """Whether a weight is one of bitsandbytes."""
    return type(weight).__name__ in ("Params4bit", "Int8Params")


def quantized_layers(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The layers of bitsandbytes, by the names of their weights."""
    return {
        f"{name}.weight": part for name, part in module.named_modules() if is_quantized(getattr(part, "weight", None))
    }


def compute_alike(module: torch.nn.Module) -> None:
    """Has 4-bit layers multiply on a CPU in evaluation as they do in training.

    Where a CPU multiplies bfloat16 itself, bitsandbytes lays the weights out anew at the first evaluation and computes
    in bfloat16 from then on, in training too, where no gradient passes such a product.
    """
    for layer in quantized_layers(module).values():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            setattr(layer, "support_avx512bf16_for_cpu", False)  # noqa: B010 - no layer of torch has it


def dequantized(layer: Any) -> torch.Tensor:
    """What the weight of a layer of bitsandbytes is computed with: as many numbers as before, of few values."""
    from peft.utils.integrations import dequantize_bnb_weight

    found: torch.Tensor = dequantize_bnb_weight(layer.weight, state=getattr(layer, "state", None))
    return found.detach()


@contextlib.contextmanager
def written_whole(module: Any) -> Iterator[None]:
    """Inside, transformers writes the weights of ``module`` that it is given, and not those that are quantized."""
    quantizer = getattr(module, "hf_quantizer", None)
    if quantizer is None:
        yield
        return
    module.hf_quantizer = None
    try:
        yield
    finally:
        module.hf_quantizer = quantizer


def is_quantization_state(name: str) -> bool:
    """Whether something in the state of a model stands beside a quantized weight and is no weight itself."""
    return any(state in name for state in STATES)
