"""The keys that all trainers share, under the names of TRL and transformers, and what follows from them.

A trainer's own keys stand in a dataclass beside the trainer, which extends ``TrainConfig``. Reading them from YAML and
the command line is ``cli.py``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rayhelper import ConfigError, DeviceGroups
from rayhelper.device_groups.keys import SECTION_KEYS
from trainers.trackers import check_installed

REPORTERS = ("tensorboard", "wandb", "none")
PLAIN_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
# Those of transformers that look at the step alone; some need lr_scheduler_kwargs.
SCHEDULES = (
    *PLAIN_SCHEDULES,
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)


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
    """Run Python code that comes with a model or tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass; auto: bfloat16 on GPUs that have it, else float32. Trained weights are float32."""
    backend: Literal["fsdp"] = "fsdp"
    """What trains the model. fsdp: transformers and torch."""

    # Data
    dataset: Any
    """JSONL, JSON, Parquet or CSV files (globs, lists), a folder, a hub name, a plugin's dataset, or a list of rows."""
    dataset_split: str = "train"
    """The split of a folder or hub dataset to train on."""
    eval_dataset: Any = None
    """As ``dataset``; null: no evaluation."""
    eval_dataset_split: str = "test"
    """The split of ``eval_dataset``."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns to rename, from the data's name to ours: {question: prompt}."""
    prompt_template: str | None = None
    """Writes ``prompt`` from the other columns: 'Question: {question}'."""
    system: str | None = None
    """System message put before every conversation that has none; text prompts become conversations by it."""
    shuffle_dataset: bool = True
    """Go through the rows in a new random order every epoch."""
    external_plugins: list[str] = field(default_factory=list)
    """Python files or modules that register reward functions, datasets and models."""

    # Optimization
    learning_rate: float = 2e-5
    """AdamW's, after warm-up."""
    weight_decay: float = 0.0
    """AdamW's; biases and norms do not decay."""
    adam_beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of AdamW's mean of squared gradients."""
    adam_epsilon: float = 1e-8
    """Added to the root of that mean."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    lr_scheduler_type: str = "linear"
    """One of transformers' schedules: linear, cosine, constant, constant_with_warmup, ..."""
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the schedule, such as {min_lr: 1e-6} of cosine_with_min_lr."""
    warmup_steps: int = 0
    """Optimizer steps in which the learning rate rises from 0."""
    warmup_ratio: float = 0.0
    """Share of all steps to warm up for, where ``warmup_steps`` is 0."""
    num_train_epochs: float = 3.0
    """Times to go through the rows; may be a fraction."""
    max_steps: int = -1
    """Optimizer steps in all; overrides ``num_train_epochs`` where positive."""
    per_device_train_batch_size: int = 8
    """Sequences that a worker passes through the model at once (the micro-batch)."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of a worker in an optimizer step."""
    global_batch_size: int | None = None
    """Sequences an optimizer step, over all workers; null: per_device_train_batch_size x gradient_accumulation_steps x
    workers. Where it is set, gradient_accumulation_steps must be left alone."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, more time."""
    disable_dropout: bool = True
    """Train without the model's dropout."""
    seed: int = 42
    """Of shuffling, sampling, dropout and new weights."""

    # Output
    output_dir: str = "outputs"
    """Folder of the trained model (final), checkpoints, metrics and the resolved configuration."""
    run_name: str | None = None
    """Name of the run in wandb."""
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
    resume_from_checkpoint: bool | str | None = None
    """A checkpoint folder; true or 'auto': the newest one of output_dir, if there is one."""

    # Placement
    use_ray: bool = False
    """Run the roles in workers on a Ray cluster; false: in this process."""
    device_groups: dict[str, Any] | str | None = None
    """Which roles run on which devices, as a mapping or JSON; null: all roles in one worker."""
    ray_address: str | None = None
    """The Ray cluster to join; null: RAY_ADDRESS, else a cluster on this machine."""
    timeout_s: float | None = None
    """Seconds that a call to a role may take, in groups that do not say it themselves; null: no limit."""
    env: dict[str, str | int | float] = field(default_factory=dict)
    """Environment variables of every process; they win over the shell's, and a group's own ``env`` over them."""

    def __post_init__(self) -> None:
        check_shared(self)


def check_shared(config: TrainConfig) -> None:
    """Raises ConfigError naming the first shared key whose value has no meaning."""
    at_least(config, 1, "per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps")
    at_least(config, 1, "global_batch_size", "eval_steps", "save_total_limit")
    at_least(config, 0, "learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps", "save_steps")
    at_least(config, 0, "seed", "num_train_epochs")
    check_choices(config)
    for name in ("adam_beta1", "adam_beta2", "warmup_ratio"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name} must lie in [0, 1), got {getattr(config, name)}")
    if config.max_steps <= 0 and config.num_train_epochs <= 0:
        raise ConfigError(
            f"nothing would be trained: max_steps is {config.max_steps}, num_train_epochs {config.num_train_epochs}. "
            "Make one of them positive."
        )
    if config.global_batch_size is not None and config.gradient_accumulation_steps != 1:
        raise ConfigError(
            "global_batch_size and gradient_accumulation_steps say the same thing; remove gradient_accumulation_steps "
            "(the micro-batch is per_device_train_batch_size)"
        )
    if config.warmup_steps and config.warmup_ratio:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} and warmup_ratio={config.warmup_ratio} say the same thing; remove one"
        )
    _check_schedule(config.lr_scheduler_type, config.lr_scheduler_kwargs)
    for reporter in config.report_to:
        one_of("report_to", reporter, REPORTERS)
    check_installed(config.report_to)
    if config.dataset is None or config.dataset == [] or config.dataset == "":
        raise ConfigError("dataset is empty; give a file, a folder, a hub name, a plugin's dataset, or rows")
    if config.eval_steps is not None and not config.eval_dataset:
        raise ConfigError(f"eval_steps is {config.eval_steps}, but there is no eval_dataset to evaluate on. Add one.")
    for name in ("dataset", "eval_dataset"):
        for source in _listed(getattr(config, name)):
            _check_file(name, source, (".jsonl", ".json", ".parquet", ".csv"))
    for plugin in config.external_plugins:
        _check_file("external_plugins", plugin, (".py",))
    _check_folder("model", config.model)
    _check_folder("tokenizer", config.tokenizer)
    if config.chat_template is not None and "{" not in config.chat_template:
        _check_file("chat_template", config.chat_template, ("",))
    resume = config.resume_from_checkpoint
    if isinstance(resume, str) and resume != "auto" and not Path(resume).is_dir():
        raise ConfigError(
            f"resume_from_checkpoint: there is no folder {resume!r}. Give a checkpoint-N folder, or 'auto' for the "
            "newest of output_dir."
        )
    if config.timeout_s is not None and not 0 < config.timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds, got {config.timeout_s}")
    if config.device_groups is not None:
        check_sections(DeviceGroups.parse(config.device_groups))


def check_sections(groups: DeviceGroups) -> None:
    """Raises ConfigError if the section of a role says more than where the role runs: nobody would read it."""
    for role, settings in groups.role_settings.items():
        for key in settings:
            close = difflib.get_close_matches(key, SECTION_KEYS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(
                f"section {role!r} has the key {key!r}{hint}: a section says where its role runs "
                f"({', '.join(SECTION_KEYS)}). Move other keys to the top level, where they hold for all roles."
            )


def _check_schedule(name: str, kwargs: dict[str, Any]) -> None:
    one_of("lr_scheduler_type", name, SCHEDULES)
    if name in PLAIN_SCHEDULES and not kwargs:
        return  # without importing transformers, so that a typo elsewhere is answered at once
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    try:
        get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=1, scheduler_specific_kwargs=dict(kwargs))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_scheduler_kwargs={kwargs} do not fit lr_scheduler_type={name}: {error}") from None


def check_choices(config: Any) -> None:
    """Raises ConfigError for a key that has none of the values it may have: Python checks no types."""
    for name, hint in get_type_hints(type(config)).items():
        kinds = [hint, *get_args(hint)]
        allowed = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        value = getattr(config, name)
        if allowed and not (isinstance(value, bool) and bool in kinds):
            one_of(name, value, allowed)


def at_least(config: Any, least: float, *names: str) -> None:
    """Raises ConfigError if a named key is set and below ``least``, or no finite number."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
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


def _check_folder(name: str, folder: str | None) -> None:
    if folder is not None and folder.startswith(("/", "./", "../")) and not Path(folder).exists():
        raise ConfigError(f"{name}: there is no folder {folder!r} (looked from {Path.cwd()}). Give a folder or a name.")


def _check_file(name: str, source: Any, suffixes: tuple[str, ...]) -> None:
    if not isinstance(source, str) or not source.endswith(suffixes) or any(mark in source for mark in "*?["):
        return
    path = Path(source).expanduser()
    if not path.is_file():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, beside, n=1)
        hint = f"Did you mean {str(path.parent / close[0])!r}?" if close else f"It was looked for from {Path.cwd()}."
        raise ConfigError(f"{name}: there is no file {source!r}. {hint}")
