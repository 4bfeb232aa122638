"""A LoRA adapter inside vLLM, apart from the model that it changes: what vLLM is told, given and asked of it.

The engine has one place for one adapter. A new one takes the place of the last, so that requests that run go on with
it. vLLM reads adapters from folders alone: there is one in the memory of the host, for as long as it reads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from rayhelper import ConfigError
from trainers.backends.fsdp.tuners.adapters import without_weights
from trainers.parts.fingerprints import added_up, fingerprint
from trainers.rollout.vllm.processes import uninterrupted

ID = 1
MEMORY = Path("/dev/shm")


# Layers of a model's type that vLLM (0.26 to 0.32) gives no adapter: it would run without what they have learned
LAYERS_WITHOUT = {
    "gemma4_text": ("per_layer_model_projection",),
    "glm4": ("gate_up_proj",),
    "lfm2": ("in_proj",),
    "falcon_h1": ("in_proj", "out_proj"),
    "nemotron_h": ("in_proj", "out_proj"),
}
REMEDY = "Set vllm_enable_lora: false, which merges the adapter into the weights that the engine gets"


def check_adapter(model: str | Path, targets: Collection[str], *, on_cpu: bool, trust_remote_code: bool) -> None:
    """Raises ConfigError where vLLM cannot hold an adapter of these layers apart from the model in this folder.

    ``targets``: last parts of the names of adapted layers.
    """
    module = without_weights(model, trust_remote_code=trust_remote_code)
    kind = module.config.get_text_config().model_type
    without = sorted(set(LAYERS_WITHOUT.get(kind, ())) & set(targets))
    if without:
        others = ", ".join(sorted(set(targets) - set(without)))
        raise ConfigError(
            f"vllm_enable_lora: vLLM does not support LoRA on the layers {', '.join(without)} of {kind}. {REMEDY}. "
            f"Or leave these layers out: lora_target_modules: [{others}]."
        )
    if on_cpu and any(name.endswith(".experts") for name, _ in module.named_modules()):
        raise ConfigError(
            f"vllm_enable_lora: vLLM cannot run an adapter on a CPU with the experts of {kind}. {REMEDY}."
        )


def adapter_settings(rank: int, target_modules: Collection[str]) -> dict[str, Any]:
    """Fields of vLLM's EngineArgs; ``target_modules`` are last parts of names of layers.

    Other layers stay as they are: vLLM would wrap the head too, which then scores no prompts and takes no temperature.
    """
    from vllm.config.lora import MaxLoRARanks

    room = min(size for size in get_args(MaxLoRARanks) if size >= max(rank, 8))  # it has a size 1, which nobody uses
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room,
        "lora_target_modules": sorted(target_modules),
    }


def put_adapter(engine: Any, rank: int, named_weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """What requests say that run under the adapter, which ``Backend.adapter_weights`` gives.

    Raises:
        ConfigError: it changes experts.
    """
    weights = {name: weight.to("cpu", copy=True).contiguous() for name, weight in named_weights}
    if of_experts := [name for name in weights if ".experts." in name]:
        raise ConfigError(
            f"vllm_enable_lora: the adapter changes experts ({of_experts[0]}), but engines get only adapters of other "
            "layers. Set vllm_enable_lora: false, which merges the adapter into the engine's weights. Or name layers "
            "of the attention in lora_target_modules."
        )
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    fields = {"r": rank, "lora_alpha": rank, "target_modules": [], "bias": "none"}  # whose scaling is 1
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        save_file(weights, Path(folder) / "adapter_model.safetensors")
        (Path(folder) / "adapter_config.json").write_text(json.dumps(fields))
        with uninterrupted():
            engine.add_lora(LoRARequest("policy", ID, folder, load_inplace=True))
    return LoRARequest("policy", ID, "in place already")


def adapter_fingerprints(engine: Any, rank: int) -> dict[str, int]:
    """Of the adapter as the engine runs it: equal to ``fingerprints`` of what ``put_adapter`` was given.

    Each worker of a tensor-parallel group adds what its part has. Empty: it cannot be told.
    """
    with uninterrupted():
        found, *_ = engine.apply_model(partial(_fingerprints, rank))  # every process finds the same
    return dict(found)


def _fingerprints(rank: int, model: Any) -> dict[str, int]:
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    group = parallel_state.get_tp_group()
    is_first, manager = group.rank_in_group == 0, model.lora_manager
    place = manager.lora_index_to_id.index(ID)
    prints = []
    for name, layer in manager.modules.items():
        by_rows = isinstance(layer.base_layer, RowParallelLinear)
        by_columns = isinstance(layer.base_layer, ColumnParallelLinear)
        if group.world_size > 1 and getattr(layer.base_layer, "num_kv_head_replicas", 1) > 1:
            return {}
        for stack_a, stack_b in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            if stack_a.dim() != 4:  # experts
                return {}
            a, b = stack_a[place, 0], stack_b[place, 0, :, :rank]
            width = a.shape[1]
            if by_rows:
                print_a = fingerprint(a, first_column=group.rank_in_group * width, num_columns=group.world_size * width)
            else:
                print_a = fingerprint(a) * is_first
            prints.append((f"base_model.model.{name}", print_a))
            prints.append((f"base_model.model.{name}", fingerprint(b) * (is_first or by_columns)))
    if group.world_size == 1:
        return added_up(prints)
    return added_up(prints, lambda totals: torch.distributed.all_reduce(totals, group=group.device_group))
