"""How fast a step was: tokens a second, and the share of the devices' arithmetic that went into the model (MFU); and
the memory of the devices.

Each worker adds to the metrics of its update what it worked through (``add_work``). The driver divides that by the
seconds that it saw go by (``throughput``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from trainers.metrics import Metrics

# Floating-point operations a second of dense matrix products in bfloat16, by a word of the device's name
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "L40S": 362e12, "A100": 312e12, "H20": 148e12}
SLOWER = {"H100": {"PCIE", "NVL"}, "H200": {"NVL"}}  # of the same name, with another peak
WORK = ("update_tokens", "update_flops", "update_peak_flops")  # what workers tell the driver alone


def peak_flops(device: torch.device, peak_tflops: float | None) -> float | None:
    """FLOP/s that ``device`` has at most: ``peak_tflops``, or what is known of its name; None: unknown, or a CPU."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    return known_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def known_peak(device_name: str) -> float | None:
    """FLOP/s by the name of a GPU ("NVIDIA H100 80GB HBM3"); None: not in the table, or a part of one (MIG)."""
    words = set(re.split(r"\W+", device_name.upper()))
    for word, peak in PEAK_FLOPS.items():
        if word in words:
            return None if words & ({"MIG"} | SLOWER.get(word, set())) else peak
    return None


def add_work(metrics: Metrics, num_tokens: int, flops: float, peak: float | None, num_devices: int = 1) -> None:
    """Adds to the metrics of a slice's update its tokens, their FLOPs, and the peak of its devices, where known."""
    metrics.sum("update_tokens", num_tokens)
    metrics.sum("update_flops", flops)
    if peak is not None:
        metrics.sum("update_peak_flops", peak * num_devices)


def add_memory(metrics: Metrics, device: torch.device) -> None:
    """Adds what a GPU has in use after an update, of all workers the largest: ``memory/...`` in GiB; a CPU has none.

    ``peak_gib``: the most that tensors of this process have taken so far; ``reserved_gib``: what its allocator holds
    now; ``device_used_gib``: what all processes hold on the device, engines too.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    metrics.max("memory/peak_gib", torch.cuda.max_memory_allocated(device) / 2**30)
    metrics.max("memory/reserved_gib", torch.cuda.memory_reserved(device) / 2**30)
    metrics.max("memory/device_used_gib", (total - free) / 2**30)


def flops_of(module: torch.nn.Module, num_tokens: int) -> float:
    """The FLOPs of an update of ``module`` by so many tokens.

    A token costs 2 FLOPs a parameter forward, 2 for the gradient of what the layers pass on and, of trained parameters,
    2 for their own gradient: 6 where all are trained, 4 for the model under a LoRA adapter. All parameters count,
    embeddings and every expert of a mixture too. Attention between tokens does not count, nor padding, nor activations
    that are computed twice, nor another model that is asked in the update (a teacher of the whole vocabulary).
    """
    parameters = list(module.parameters())
    num_parameters = sum(map(_numbers, parameters))  # of the whole model, also where it lies in shards
    num_trained = sum(weight.numel() for weight in parameters if weight.requires_grad)
    return (4.0 * num_parameters + 2.0 * num_trained) * num_tokens


def _numbers(weight: torch.Tensor) -> int:
    """Numbers of a weight, of which bitsandbytes keeps two in a byte."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else math.prod(state.shape)


def throughput(metrics: Metrics, seconds: Mapping[str, float]) -> dict[str, float]:
    """The metrics ``throughput/...`` of a step whose phases took ``seconds``: those of which enough is known.

    ``tokens_per_second``: tokens that went through the update, prompts included. ``completion_tokens_per_second``:
    tokens of the completions that were seen with this step. Both by the seconds of the whole step. ``mfu``: FLOPs of
    the update by what all its devices could do in the seconds of phase ``update``; the driver's waiting counts.
    """
    totals = {name: total for name, (_, total, _) in metrics.entries.items()}
    step, update = sum(seconds.values()), seconds.get("update", 0.0)
    rates = {}
    if step and "update_tokens" in totals:
        rates["throughput/tokens_per_second"] = totals["update_tokens"] / step
    if step and "completions/mean_length" in totals:
        rates["throughput/completion_tokens_per_second"] = totals["completions/mean_length"] / step
    if update and "update_peak_flops" in totals:
        rates["throughput/mfu"] = totals["update_flops"] / (update * totals["update_peak_flops"])
    return rates
