"""Which engine ``rollout_engine: auto`` stands for: decided while keys are read, before any process starts.

    hf      a worker trains the policy and generates with it, and the engine decodes the architecture in slots
    vllm    otherwise, where vLLM is installed and runs the model on the device of role rollout

Memory does not decide: on the same device vLLM needs a second copy of the weights, so that hf fits wherever vLLM does.
The exception is ``vllm_tensor_parallel_size``, which says that one device does not hold the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from rayhelper import ConfigError, DeviceGroups
from rayhelper.device_groups import DeviceGroup
from trainers.configuration.reading.typed_values import bracketed

AUTO = "auto"
TRAIN = ("train", "default")  # what the role is called that trains


@dataclass(frozen=True)
class Choice:
    """An engine, and why it was chosen, as the end of a sentence."""

    engine: Literal["hf", "vllm"]
    reason: str


def choose_engine(keys: Mapping[str, Any]) -> Choice:
    """What ``auto`` stands for in a run with these keys; a key that is missing has its default.

    Of a model that is not here yet (a hub name without network, or one that a plugin builds) it takes for granted that
    ``hf`` knows the architecture.
    """
    size = keys.get("vllm_tensor_parallel_size") or 1
    if isinstance(size, int) and size > 1:
        return Choice("vllm", f"vllm_tensor_parallel_size is {size}")
    group, is_together = _placed(keys)
    known, told = _knows(keys) if is_together else (False, "")
    if keys.get("backend") == "megatron":
        wish = "backend is megatron, whose model cannot generate"
    elif not is_together:
        wish = "role rollout has workers of its own"
    elif not known:
        wish = f"hf decodes {told} only by transformers' own loop"
    else:
        return Choice("hf", f"the workers that train also generate{told}")
    if mistake := _vllm_mistake(keys, group):
        return Choice("hf", f"{wish}, but {mistake}")
    return Choice("vllm", wish)


def vllm_share(*, shares_devices: bool) -> float:
    """What ``vllm_gpu_memory_utilization: auto`` stands for: the rest is of what trains on the same GPU."""
    return 0.4 if shares_devices else 0.9


def _placed(keys: Mapping[str, Any]) -> tuple[DeviceGroup | None, bool]:
    """The group of role rollout, None for a process that has all roles; and whether the same workers train."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if keys.get("use_ray") is not True and num_processes == 1:
        return None, True
    try:
        groups = DeviceGroups.parse(bracketed(keys.get("device_groups")) or {}).groups
    except (ConfigError, TypeError, AttributeError):
        return None, True  # whoever places the roles says what is wrong
    for group in groups:
        roles = {role.rpartition(":")[2] for role in group.roles}
        if "rollout" in roles:
            return group, bool(roles & set(TRAIN))
    return None, True


def _knows(keys: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether hf decodes the architecture in slots; with the name of one that it does not, or what is not known."""
    from transformers import AutoConfig

    from trainers.backends.fsdp.tuners.adapters import without_weights
    from trainers.data.images.processor import is_vision
    from trainers.rollout.hf.attention import attending
    from trainers.rollout.hf.cache import foreign_layers

    model, trusts = str(keys.get("model")), keys.get("trust_remote_code") is True
    try:
        found = AutoConfig.from_pretrained(model, trust_remote_code=trusts)
    except Exception:  # of any kind, by what the folder holds; whoever loads the model says it
        return True, f"; the architecture of {model} cannot be read yet"
    if is_vision(found):
        return False, f"{found.model_type}, a vision model,"
    try:
        with attending(without_weights(model, trust_remote_code=trusts)) as takes_attention:
            is_known = takes_attention and not foreign_layers(found)
    except ValueError:  # from classes that take no other attention, or a type that generates no text
        is_known = False
    return (True, "") if is_known else (False, str(found.model_type))


def _vllm_mistake(keys: Mapping[str, Any], group: DeviceGroup | None) -> str | None:
    """Why vLLM cannot be taken."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    from trainers.backends.device import default_device
    from trainers.rollout.vllm.settings import check_model_on_cpu
    from trainers.rollout.vllm.vision.features import check_sees

    model, trusts = str(keys.get("model")), keys.get("trust_remote_code") is True
    on_cpu = default_device().type == "cpu" if group is None else group.device == "CPU"
    dtype = "bfloat16" if keys.get("dtype") == "bfloat16" else "float32"
    try:
        if on_cpu:
            check_model_on_cpu(model, dtype=dtype, trust_remote_code=trusts)
        check_sees(model, "rollout_engine", trust_remote_code=trusts)
    except ConfigError as error:
        return str(error).partition(". ")[0]
    except (OSError, ValueError):
        return None  # the folder holds no model, which is told elsewhere
    return None
