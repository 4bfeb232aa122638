"""QLoRA beside peft and bitsandbytes alone, in a process that has bitsandbytes: ``test_quantized.py`` starts it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.integrations import dequantize_bnb_weight
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.backends.batches import largest_difference, mean_loss, plain_scores, samples_of
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.run.throughput import flops_of

LAYERS = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}
STEADY = {"lr_scheduler_type": "constant", "learning_rate": 3e-3, "adam_epsilon": 1e-3, "max_grad_norm": 0.0}
BITS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
    "int8": {"load_in_8bit": True},
}


def backend_of(model: str, bits: str, **lora: Any) -> FsdpBackend:
    settings = LORA | {"target_modules": "all-linear"} | lora
    return FsdpBackend(model, num_training_steps=9, **STEADY, lora=settings, quantization=BITS[bits])


def step(backend: FsdpBackend, seed: int) -> None:
    backend.step(samples_of(seed=seed), partial(mean_loss, 50), micro_batch_size=4)


def case(model: str, bits: str, folder: Path) -> dict[str, float]:
    """How far three steps, merged weights, the exported model and a resumed run are from what they must be."""
    backend = backend_of(model, bits)
    config = BitsAndBytesConfig(**BITS[bits], bnb_4bit_compute_dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    peft: Any = get_peft_model(loaded, LoraConfig(**LORA, target_modules=LAYERS, task_type="CAUSAL_LM"))
    peft.train()  # in which the products of 8 bits are those of floating-point inputs
    own = dict(backend.adapted.named_parameters())
    trained = {name: weight for name, weight in peft.named_parameters() if weight.requires_grad}
    start = {name: own[name].detach().clone() for name in trained}
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(start[name])
    optimizer = torch.optim.AdamW(trained.values(), lr=3e-3, eps=1e-3, weight_decay=0.0)
    for seed in range(3):
        step(backend, seed)
        optimizer.zero_grad()
        (-plain_scores(peft, samples_of(seed=seed))[0].sum() / 50).backward()
        optimizer.step()
    found = {"learned": max(float((own[name] - start[name]).abs().max()) for name in trained)}
    found["steps"] = max(float((own[name] - weight).abs().max()) for name, weight in trained.items())
    merged = {name: weight.clone() for name, weight in backend.named_weights()}
    far = 0.0
    for name, layer in peft.base_model.model.named_modules():
        if name.endswith(tuple(LAYERS)):
            delta = 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            state = getattr(layer.base_layer, "state", None)
            expected = dequantize_bnb_weight(layer.base_layer.weight, state=state).float() + delta.detach()
            far = max(far, float((merged[f"{name}.weight"] - expected).abs().max()))
    found["merged"] = far
    plain = dict(FsdpBackend(model).named_weights())
    same = FsdpBackend(model, num_training_steps=9, **STEADY, lora=LORA | {"target_modules": "all-linear"})
    found["flops"] = flops_of(backend.module, 1) / flops_of(same.module, 1)
    found["names"] = float(merged.keys() == plain.keys() == dict(backend.named_weights()).keys())
    found["quantized"] = largest_difference(merged, plain)
    scores = backend.token_logps(samples_of(), micro_batch_size=4).values
    backend.export(folder / "final")
    settings = json.loads((folder / "final" / "config.json").read_text())
    found["says quantized"] = float("quantization_config" in settings)
    exported = FsdpBackend(folder / "final")
    found["exported"] = largest_difference(dict(exported.named_weights()), merged)
    found["scores"] = float(np.abs(exported.token_logps(samples_of(), micro_batch_size=4).values - scores).max())
    backend.save(folder / "checkpoint")
    resumed = backend_of(model, bits)
    resumed.load(folder / "checkpoint")
    for one in (backend, resumed):
        step(one, 9)
    found["resumed"] = largest_difference(dict(resumed.named_weights()), dict(backend.named_weights()))
    some = {name for name, _ in backend_of(model, bits, target_modules=["q_proj"]).named_weights(trained_only=True)}
    found["sent"] = float(sum(name.endswith("_proj.weight") for name in some) == len(LAYERS) * 2)
    return found


if __name__ == "__main__":
    _, model, folder = sys.argv
    print(json.dumps({bits: case(model, bits, Path(folder) / bits) for bits in BITS}))
