"""The first lines of every run: what it is about to do, in at most 15 lines. The leader prints them once.

    grpo: Qwen3-0.6B (596,049,920 parameters), lora of rank 16, by fsdp in bfloat16 where the device has it
    data: 7,473 rows of gsm8k/train.jsonl (7,480 rows were read and 7 left out)
    roles: train, rollout on 8 GPU (policy); reward on 2 CPU
    steps: 934, of 64 sequences and at most 65,536 tokens each
    rollout_engine: hf  # auto: the workers that train also generate
    chosen in the first step: token_budget, gradient_checkpointing (...)
    translated: learning_rate from lr, dtype from bf16

What is true of one kind of trainer alone is no line here; a line that has nothing to say is left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rayhelper import DeviceGroups
from rayhelper.planning.model_shape import ModelShape
from trainers.backends.device import default_device
from trainers.checkpoint import GROWN, checkpoints
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.reading.command_line import read_from
from trainers.configuration.reading.folders import names_of
from trainers.configuration.shared import SEQUENCES_PER_STEP, TrainConfig
from trainers.configuration.tuners import shown_tuner, trained_parts
from trainers.configuration.vision import vision_settings
from trainers.data.broken_rows import counted_of
from trainers.rollout.choice import vllm_share
from trainers.run.going_on import builds_model

PARTS_OF_VISION = {"vit": "the vision tower", "aligner": "the aligner", "llm": "the language model"}
MOST_LINES = 15
TOWERS = ("vision_config", "audio_config", "thinker_config")
MOST_CHARACTERS = 200  # of a line
# what the order of a run's data counts
ROWS = {
    name: name.removeprefix("num_") for name in ("num_rows", "rows", "prompts", "sequences", "pairs", "completions")
}


def header(config: TrainConfig, num_steps: int, order: Mapping[str, Any]) -> list[str]:
    """The lines. ``order``: what decides which rows a step sees, as ``Run`` is told it."""
    lines = [line for part in PARTS for line in part(config, num_steps, order)]
    return [line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 4]} ..." for line in lines][
        :MOST_LINES
    ]


def start_lines(config: TrainConfig, checkpoint: Path | None) -> Iterator[str]:
    """What ``output_dir`` holds of earlier runs, where a run starts at step 0."""
    folder = Path(config.output_dir)
    if checkpoint is not None:
        return
    found, final = checkpoints(folder), folder / "final"
    if config.resume_from_checkpoint and not found:
        yield f"resume_from_checkpoint: {folder} has no checkpoint, so the run starts at step 0"
    if final.exists():
        can_resume = found and not config.resume_from_checkpoint and builds_model.get() is None
        advice = "; to continue that run, write resume_from_checkpoint: auto" if can_resume else ""
        yield (
            f"{final} is of an earlier run, and is replaced at the end of this one. To keep it, write another "
            f"output_dir{advice}"
        )


def _model(config: TrainConfig, num_steps: int, order: Mapping[str, Any]) -> Iterator[str]:
    grown = Path(config.output_dir) / GROWN  # with rows for new_special_tokens
    count = num_parameters(str(grown) if config.new_special_tokens and grown.is_dir() else config.model)
    size = "" if count is None else f" ({count:,} parameters)"
    dtype = "bfloat16 on GPUs that have it, else float32" if config.dtype == "auto" else config.dtype
    yield f"{trainer_name(config)}: {config.model}{size}, {_learns(config)}, backend {config.backend}, {dtype}"
    for name in ("ref_model", "teacher_model", "reward_model", "value_model"):
        if named := getattr(config, name, None):
            yield f"{name}: {', '.join(named) if isinstance(named, list) else named}"


def _learns(config: TrainConfig) -> str:
    """What is trained, without the parts of a vision model that are frozen."""
    told, frozen = shown_tuner(config), [PARTS_OF_VISION[part] for part in vision_settings(config)["frozen"]]
    sees = _has_tower(config.model)
    whole = [PARTS_OF_VISION[part] for part in trained_parts(config)]
    if whole and sees is not False:
        told += f", and all weights of {' and '.join(whole)}"
    if not frozen or sees is False or (config.backend == "megatron" and not sees):
        return told
    if config.has_adapter:
        return f"{told} (none in {' and '.join(frozen)})" if sees else told
    return f"{told} except {' and '.join(frozen)}{'' if sees else ' of a vision model'}"


def _has_tower(model: str) -> bool | None:
    """Whether a folder's model sees or hears; None: the folder or its config.json cannot be read here."""
    try:
        found = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return any(found.get(tower) for tower in TOWERS)


def trainer_name(config: Any) -> str:
    """What the command line calls the trainer of a configuration; of a user's own, its class in small letters."""
    kind = type(config)
    return (
        names_of(kind)[0] if kind.__module__.startswith("trainers.") else kind.__name__.removesuffix("Config").lower()
    )


def num_parameters(model: str) -> int | None:
    """How many parameters a folder's model has, by its config.json; None where that does not say it.

    Of a model with a tower config.json says the language model alone: its files are asked.
    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    try:
        if any(json.loads((folder / "config.json").read_bytes()).get(tower) for tower in TOWERS):
            return sum(map(_num_in_file, folder.glob("*.safetensors"))) or None
        shape = ModelShape.of(model, "model")
    except (ValueError, OSError, SafetensorError):
        return None
    return None if shape is None else shape.num_parameters


def _num_in_file(file: Path) -> int:
    with safe_open(file, framework="np") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def _rows(config: TrainConfig, num_steps: int, order: Mapping[str, Any]) -> Iterator[str]:
    counts = [f"{order[name]:,} {told}" for name, told in ROWS.items() if isinstance(order.get(name), int)]
    if getattr(config, "streaming", False):
        counts = ["a stream"]
    source = config.dataset if isinstance(config.dataset, (str, dict)) else None
    every = "epoch" if config.eval_strategy == "epoch" else f"{config.eval_steps or num_steps} steps"
    evaluated = f", evaluated every {every}" if config.eval_dataset and config.evaluates else ""
    seen = counted_of(config.training_data)
    less = f" ({seen.num_read:,} rows were read and {seen.num_left_out:,} left out)" if seen.num_left_out else ""
    named = [", ".join(counts)] if counts else []
    named += [str(source)] if source else []
    if named:
        yield f"data: {' of '.join(named)}{less}{evaluated}"


def _roles(config: TrainConfig, num_steps: int, order: Mapping[str, Any]) -> Iterator[str]:
    processes = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if config.device_groups is None or (not config.use_ray and processes == 1):
        where = "one worker on Ray" if config.use_ray else "this process"
        yield f"roles: all in {where}" if processes == 1 else f"roles: all in each of {processes} processes"
        return
    groups = DeviceGroups.parse(config.device_groups).groups
    told = [f"{', '.join(group.roles)} on {group.num_workers} {group.device} ({group.name})" for group in groups]
    yield f"roles: {'; '.join(told)}"


def _steps(config: TrainConfig, num_steps: int, order: Mapping[str, Any]) -> Iterator[str]:
    size = order.get(SEQUENCES_PER_STEP) or config.global_batch_size
    prompt, completion = getattr(config, "max_prompt_length", None), getattr(config, "max_completion_length", None)
    longest = getattr(config, "max_length", None) or (prompt + completion if prompt and completion else None)
    is_paired = "pairs" in order  # chosen and rejected
    of_what = f", of {size:,} {'pairs' if is_paired else 'sequences'} each" if isinstance(size, int) else ""
    most = f", at most {size * longest * (2 if is_paired else 1):,} tokens" if isinstance(size, int) and longest else ""
    yield f"steps: {num_steps:,}{of_what}{most}, into {config.output_dir}"


def _chosen(config: TrainConfig, num_steps: int, order: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are auto: what they stand for on a CPU, as YAML that fixes it. A GPU measures it later."""
    keys = [key for key in ("token_budget", "gradient_checkpointing") if getattr(config, key) == "auto"]
    if keys and not _trains_on_cpu(config):
        yield f"chosen in the first step: {', '.join(keys)} (the log then has the values)"
        return
    if "token_budget" in keys:
        yield f"per_device_train_batch_size: {config.per_device_train_batch_size}  # auto: nothing is measured on a CPU"
    if "gradient_checkpointing" in keys:
        yield "gradient_checkpointing: false  # auto: on a CPU"


def _trains_on_cpu(config: TrainConfig) -> bool:
    if config.device_groups is None or not (config.use_ray or "TORCHELASTIC_RUN_ID" in os.environ):
        return default_device().type == "cpu"
    groups = DeviceGroups.parse(config.device_groups).groups
    training = [group for group in groups if {"train", "default"} & {role.rpartition(":")[2] for role in group.roles}]
    return all(group.device == "CPU" for group in training or groups)


def _engine(config: TrainConfig, num_steps: int, order: Mapping[str, Any]) -> Iterator[str]:
    _, chosen = _as_read(config)
    yield from (f"{key}: {getattr(config, key)}  # auto: {reason}" for key, reason in chosen.items())


def _engine_memory(config: TrainConfig, num_steps: int, order: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(config, CompletionConfig) or config.rollout_engine != "vllm":
        return
    if config.vllm_gpu_memory_utilization is not None or "gpu_memory_utilization" in config.vllm_engine_kwargs:
        return
    groups = None if config.device_groups is None else DeviceGroups.parse(config.device_groups)
    on_cpu = default_device().type == "cpu" if groups is None else groups.group_of("rollout").device == "CPU"
    if not on_cpu:
        shares = groups is None or groups.share_devices("rollout", "train")
        reason = "the policy is trained on the same GPU" if shares else "the engine has GPUs of its own"
        yield f"vllm_gpu_memory_utilization: {vllm_share(shares_devices=shares)}  # auto: {reason}"


def _translated(config: TrainConfig, num_steps: int, order: Mapping[str, Any]) -> Iterator[str]:
    origins, _ = _as_read(config)
    if origins:
        yield f"translated: {', '.join(f'{key} from {theirs}' for key, theirs in origins.items())}"


def _as_read(config: TrainConfig) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Which keys others' keys said, and which were auto; nothing for a configuration that was made in Python."""
    read, origins, chosen = read_from.get()
    is_this = type(read) is type(config) and all(
        getattr(read, key) == getattr(config, key) for key in ("output_dir", *origins, *chosen)
    )
    return (origins, chosen) if is_this else ({}, {})


PARTS: tuple[Callable[[Any, int, Mapping[str, Any]], Iterator[str]], ...] = (
    *(_model, _rows, _roles, _steps, _engine, _engine_memory, _chosen, _translated),
)
