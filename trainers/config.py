"""The keys that all trainers share, under the names of TRL and transformers, and what follows from them.

A trainer's own keys stand in a dataclass beside the trainer, which extends ``TrainConfig``. Reading them from YAML and
the command line is ``cli.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rayhelper import ConfigError, DeviceGroups

REPORTERS = ("tensorboard", "wandb", "none")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The keys that all trainers share."""

    # Model
    model: str
    """Folder, hub name, or the name of a model that a plugin registered."""
    tokenizer: str | None = None
    """Folder or hub name; null: the model's own."""
    chat_template: str | None = None
    """A Jinja template, or a file that holds one; null: the tokenizer's own."""
    model_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of AutoModelForCausalLM.from_pretrained."""
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass; auto: bfloat16 on GPUs that have it, else float32. Trained weights are float32."""
    backend: Literal["fsdp"] = "fsdp"

    # Data
    dataset: Any
    """JSONL, JSON, Parquet or CSV files (globs, lists), a folder, a hub name, a plugin's dataset, or a list of rows."""
    dataset_split: str = "train"
    eval_dataset: Any = None
    """As ``dataset``; null: no evaluation."""
    eval_dataset_split: str = "test"
    columns: dict[str, str] = field(default_factory=dict)
    """Columns to rename, from the data's name to ours: {question: prompt}."""
    prompt_template: str | None = None
    """Writes ``prompt`` from the other columns: 'Question: {question}'."""
    system: str | None = None
    """System message put before every conversation that has none; text prompts become conversations by it."""
    shuffle_dataset: bool = True
    external_plugins: list[str] = field(default_factory=list)
    """Python files or modules that register reward functions, datasets and models."""

    # Optimization
    learning_rate: float = 2e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    lr_scheduler_type: str = "linear"
    """One of transformers' schedules: linear, cosine, constant, constant_with_warmup, ..."""
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    """Share of all steps to warm up for, where ``warmup_steps`` is 0."""
    num_train_epochs: float = 3.0
    max_steps: int = -1
    """Optimizer steps in all; overrides ``num_train_epochs`` where positive."""
    per_device_train_batch_size: int = 8
    """Sequences that a worker passes through the model at once (the micro-batch)."""
    gradient_accumulation_steps: int = 1
    global_batch_size: int | None = None
    """Sequences an optimizer step, over all workers; null: per_device_train_batch_size x gradient_accumulation_steps x
    workers. Where it is set, gradient_accumulation_steps must be left alone."""
    gradient_checkpointing: bool = False
    disable_dropout: bool = True
    seed: int = 42

    # Output
    output_dir: str = "outputs"
    run_name: str | None = None
    logging_steps: int = 10
    """Optimizer steps between lines on the console; the metrics files hold every step."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """tensorboard, wandb, none."""
    eval_steps: int | None = None
    """Optimizer steps between evaluations; null: only at the end."""
    save_steps: int = 500
    """Optimizer steps between checkpoints; 0: only the final model is saved."""
    save_total_limit: int | None = None
    """Checkpoints to keep; the oldest go first."""
    resume_from_checkpoint: str | bool | None = None
    """A checkpoint folder; true or 'auto': the newest one of output_dir, if there is one."""

    # Placement
    use_ray: bool = False
    device_groups: dict[str, Any] | str | None = None
    """Which roles run on which devices, as a mapping or JSON; null: all roles in one worker."""
    ray_address: str | None = None
    """The Ray cluster to join; null: RAY_ADDRESS, else a cluster on this machine."""

    def __post_init__(self) -> None:
        check_shared(self)


def check_shared(config: TrainConfig) -> None:
    """Raises ConfigError naming the first shared key whose value has no meaning."""
    from transformers import SchedulerType

    at_least(config, 1, "per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps")
    at_least(config, 1, "global_batch_size", "eval_steps", "save_total_limit")
    at_least(config, 0, "learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps", "save_steps")
    for name in ("adam_beta1", "adam_beta2", "warmup_ratio"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name} must lie in [0, 1), got {getattr(config, name)}")
    if config.max_steps <= 0 and config.num_train_epochs <= 0:
        raise ConfigError(
            f"nothing would be trained: max_steps is {config.max_steps} and num_train_epochs {config.num_train_epochs}. "
            "Make one of them positive."
        )
    if config.global_batch_size is not None and config.gradient_accumulation_steps != 1:
        raise ConfigError(
            "global_batch_size and gradient_accumulation_steps say the same thing; remove gradient_accumulation_steps "
            "(the micro-batch is per_device_train_batch_size)"
        )
    one_of("lr_scheduler_type", config.lr_scheduler_type, [kind.value for kind in SchedulerType])
    for reporter in config.report_to:
        one_of("report_to", reporter, REPORTERS)
    if config.dataset is None or config.dataset == [] or config.dataset == "":
        raise ConfigError("dataset is empty; give a file, a folder, a hub name, a plugin's dataset, or rows")
    if config.eval_steps is not None and not config.eval_dataset:
        raise ConfigError(f"eval_steps is {config.eval_steps}, but there is no eval_dataset to evaluate on. Add one.")
    for name in ("dataset", "eval_dataset"):
        for source in _listed(getattr(config, name)):
            _check_file(name, source, (".jsonl", ".json", ".parquet", ".csv"))
    for plugin in config.external_plugins:
        _check_file("external_plugins", plugin, (".py",))
    resume = config.resume_from_checkpoint
    if isinstance(resume, str) and resume != "auto" and not Path(resume).is_dir():
        raise ConfigError(
            f"resume_from_checkpoint: there is no folder {resume!r}. Give a checkpoint-N folder, or 'auto' for the "
            "newest of output_dir."
        )
    if config.device_groups is not None:
        DeviceGroups.parse(config.device_groups)


def at_least(config: Any, least: float, *names: str) -> None:
    """Raises ConfigError if a named key is set and below ``least``."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises ConfigError if the value is not among the allowed ones, with the nearest of them."""
    allowed = list(allowed)
    if value not in allowed:
        close = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.{hint}")


def sequences_per_step(config: TrainConfig, num_workers: int) -> int:
    """Sequences that one optimizer step learns from, over all workers."""
    if config.global_batch_size is not None:
        return config.global_batch_size
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * num_workers


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    if config.max_steps > 0:
        return config.max_steps
    return max(1, round(config.num_train_epochs * steps_per_epoch))


def _listed(source: Any) -> list[Any]:
    return source if isinstance(source, list) else [source]


def _check_file(name: str, source: Any, suffixes: tuple[str, ...]) -> None:
    if not isinstance(source, str) or not source.endswith(suffixes) or any(mark in source for mark in "*?["):
        return
    path = Path(source)
    if not path.is_file():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, beside, n=1)
        hint = f" Did you mean {str(path.parent / close[0])!r}?" if close else f" (looked from {Path.cwd()})"
        raise ConfigError(f"{name}: there is no file {source!r}.{hint}")
