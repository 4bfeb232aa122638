"""What is wrong with a run of ``backend: megatron``, found before any process starts: packages, fields and sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rayhelper import ConfigError, DeviceGroups
from rayhelper.planning.model_shape import ModelShape
from trainers.backends.device import default_device
from trainers.backends.megatron.adapter_targets import chosen_targets
from trainers.backends.megatron.architectures import architecture_mistakes, too_few_layers
from trainers.backends.megatron.fields import check_fields, check_installed, check_made, divided
from trainers.backends.megatron.model_fields import read_config
from trainers.backends.megatron.settings import MegatronSettings, dense_mistakes, layout_mistakes
from trainers.backends.own_code import own_code_mistake
from trainers.configuration.roles import LEARNS, backend_model
from trainers.configuration.shared import TrainConfig, megatron_settings
from trainers.configuration.tuners import trained_parts
from trainers.configuration.values import is_there
from trainers.data.images.processor import is_vision


def check_megatron(config: TrainConfig, groups: DeviceGroups | None, lora: Mapping[str, Any] | None = None) -> None:
    """Raises ConfigError, all mistakes of the layout in it, for what megatron-core cannot do or would do wrongly.

    ``lora``: fields of peft's LoraConfig, where an adapter is trained.
    """
    check_installed()
    check_fields(config.megatron, has_adapter=lora is not None)
    check_devices(config, groups)
    settings = replace(megatron_settings(config), **divided(config.megatron))
    mistakes: list[str] = []
    shapes: dict[str, ModelShape | None] = {}
    models = dict(models_of(config, groups))
    for role, model in models.items():
        num_workers = 1 if groups is None else groups.group_of(role).num_workers
        shapes[role] = shape_of(model)
        mistakes += layout_mistakes(f"role {role!r}", settings, num_workers, shapes[role])
        if learns(config, role) and not config.disable_dropout:
            mistakes += dropout_mistakes(model)
    if all(shape is not None and not shape.num_experts for shape in shapes.values()):
        mistakes += dense_mistakes(settings)
    if mistakes:
        raise ConfigError(mistakes[0] if len(mistakes) == 1 else "\n  - ".join(["several mistakes", *mistakes]))
    for role, model in models.items():
        check_model(config, role, model, settings, lora if learns(config, role) else None)


def check_model(
    config: TrainConfig, role: str, model: str, settings: MegatronSettings, lora: Mapping[str, Any] | None
) -> None:
    """Raises ConfigError for a model that megatron-core or the role's adapter cannot be of, as far as it is known."""
    file = config_file(model)
    if file is None:
        return
    whole = read_config(file.parent, {}, trust_remote_code=config.trust_remote_code)
    hf = whole.get_text_config()
    sizes = settings.sizes(settings.workers_per_shard)
    if mistake := too_few_layers(whole, sizes.stage_layers(hf.num_hidden_layers)[0] // sizes.virtual_pipeline):
        raise ConfigError(f"role {role!r}: {mistake}")
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16  # which auto is on a GPU
    check_made(f"role {role!r}", hf, settings, dtype=dtype, has_adapter=lora is not None)
    if lora is not None:
        if (parts := trained_parts(config)) and not is_vision(whole):
            raise ConfigError(
                f"lora_kwargs: modules_to_save has {parts[0]}, but the model {model} has no vision tower. Remove it."
            )
        chosen_targets(hf, lora, num_stages=config.pipeline_model_parallel_size)


def check_devices(config: TrainConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for a role on a CPU, where nothing stands in for CUDA as a plugin of tests may."""
    for role, _ in models_of(config, groups):
        on_cpu = default_device().type == "cpu" if groups is None else groups.group_of(role).device == "CPU"
        if on_cpu and not _has_stand_in():
            raise ConfigError(
                f"backend: megatron computes only on GPUs, and role {role!r} is on a CPU. Give it GPUs, or write "
                "backend: fsdp."
            )


def _has_stand_in() -> bool:
    try:
        return str(torch.cuda.current_device()) == "cpu"
    except (AssertionError, RuntimeError):
        return False


def models_of(config: TrainConfig, groups: DeviceGroups | None) -> Iterator[tuple[str, str]]:
    """The roles that have a model of the backend, those that learn first, each with the model's folder or name."""
    for role in sorted(config.ROLES, key=lambda role: not learns(config, role)):
        keys = config.ROLES[role].models
        is_there = not keys or any(hasattr(config, key) for key in keys) if groups is None else role in groups.roles
        model = backend_model(config, role)
        if is_there and model is not None:
            yield role, model


def learns(config: TrainConfig, role: str) -> bool:
    """Whether the model of the role is trained; models of others only score."""
    return config.ROLES[role].does in LEARNS


def shape_of(model: str) -> ModelShape | None:
    """The shape of a model in a folder, or of the hub if it was loaded before; None if nobody knows it yet.

    Raises:
        ConfigError: an architecture that the backend does not know, or weights that it cannot read.
    """
    file = config_file(model)
    if file is None:
        return None
    fields = json.loads(file.read_text(encoding="utf-8"))
    if mistake := own_code_mistake(model, fields):
        raise ConfigError(mistake)
    for mistake in architecture_mistakes(fields):
        raise ConfigError(f"backend: megatron does not support the model {model}: {mistake}. Write backend: fsdp.")
    folder = Path(model).expanduser()
    if folder.is_dir() and any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("model*.safetensors")):
        raise ConfigError(
            f"backend: megatron reads safetensors, and the model {model} has only pytorch_model*.bin. Load and save it "
            "once with transformers, or write backend: fsdp."
        )
    return ModelShape.of(file, "model")


def dropout_mistakes(model: str) -> Iterator[str]:
    """What speaks against training with dropout."""
    file = config_file(model)
    dropout = None if file is None else json.loads(file.read_text(encoding="utf-8")).get("attention_dropout")
    if dropout:
        yield (
            f"disable_dropout is false and attention_dropout of the model {model} {dropout}, which the backend "
            "megatron does not apply. Write disable_dropout: true."
        )


def config_file(model: str) -> Path | None:
    """Where the model's config.json lies on this machine; None if it does not."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(model).expanduser()
    if is_there(folder, Path.is_dir):
        return folder / "config.json" if (folder / "config.json").is_file() else None
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # no name that the hub could have
        return None
    return Path(found) if isinstance(found, str) else None
