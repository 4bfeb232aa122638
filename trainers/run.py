"""One training run as its driver sees it: the step it has reached, what it logs, and the checkpoints it leaves.

Also the few things that every trainer builds from the shared keys: tokenizer, model path, backend.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.backends.fsdp import FsdpBackend
from trainers.checkpoint import checkpoint_folder, read_state, resolve_resume, rotate, write_state, writing
from trainers.cli import save_config
from trainers.config import TrainConfig
from trainers.data import load_rows
from trainers.metrics import Metrics
from trainers.plugins import load_plugins, resolve_model
from trainers.trackers import Trackers

BACKENDS = {"fsdp": FsdpBackend}
SaveFunction = Callable[[Path], Any]
Dtype = Literal["float32", "bfloat16"]


class Run:
    """Progress, logs and checkpoints of one call of ``train()``; a context manager that closes the logs.

    ``order`` says what decides which rows a step sees. Raises ConfigError if a checkpoint was written under another.
    """

    def __init__(
        self, config: TrainConfig, num_steps: int, *, headline: Sequence[str], order: Mapping[str, Any]
    ) -> None:
        self.config = config
        self.num_steps = num_steps
        self.output_dir = Path(config.output_dir)
        self.checkpoint = resolve_resume(config.resume_from_checkpoint, self.output_dir)
        state = read_state(self.checkpoint) if self.checkpoint else {}
        self.order = {**order, "seed": config.seed, "shuffle_dataset": config.shuffle_dataset}
        _check_same_order(state.get("order", {}), self.order, self.checkpoint)
        self.step: int = state.get("step", 0)
        self.num_tokens: float = state.get("num_tokens", 0.0)
        self.first_evaluation: dict[str, float] = state.get("first_evaluation", {})
        self.last: dict[str, float] = {}
        self.last_evaluation: dict[str, float] = {}
        self.clock = time.perf_counter()
        save_config(config, self.output_dir)
        self.trackers = Trackers(
            self.output_dir,
            report_to=config.report_to,
            run_name=config.run_name,
            total_steps=num_steps,
            first_step=self.step,
            headline=headline,
            logging_steps=config.logging_steps,
            config={field.name: getattr(config, field.name) for field in fields(config)},
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.trackers.close()

    def resume(self, load: SaveFunction) -> None:
        """Restores the workers from the checkpoint that the run goes on from, if there is one."""
        if self.checkpoint is not None:
            load(self.checkpoint)

    def log_step(self, metrics: Metrics, *, epoch: float) -> None:
        """Counts an optimizer step and writes its numbers, under TRL's names."""
        self.step += 1
        numbers = metrics.values()
        now = time.perf_counter()
        self.num_tokens += numbers.pop("num_tokens", 0.0)
        numbers |= {"num_tokens": self.num_tokens, "epoch": epoch, "step_time": now - self.clock}
        self.clock = now
        self.last |= numbers
        self.trackers.log(self.step, numbers)

    def log_evaluation(self, numbers: Mapping[str, float]) -> None:
        """Writes the numbers of an evaluation; the first and the last are shown side by side at the end."""
        self.first_evaluation = self.first_evaluation or dict(numbers)
        self.last_evaluation = dict(numbers)
        self.last |= numbers
        self.trackers.log(self.step, numbers, advance=False)
        self.clock = time.perf_counter()

    def shows_completions(self, num_steps: int) -> bool:
        """Whether the first step or a multiple of ``logging_steps`` is among the next ``num_steps`` steps."""
        every = self.config.logging_steps
        return self.step == 0 or (self.step + num_steps) // every > self.step // every

    def log_completions(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Keeps the completions that the next step learns from."""
        self.trackers.completions(self.step + 1, columns)

    def due(self, every: int | None, num_steps: int = 1) -> bool:
        """Whether a multiple of ``every`` was passed in the last ``num_steps`` steps, and steps remain."""
        if not every or self.step >= self.num_steps:
            return False
        return self.step // every > (self.step - num_steps) // every

    def save_checkpoint(self, save: SaveFunction, tokenizer: Any) -> None:
        """Writes ``checkpoint-N``: the workers' part, tokenizer, position in the data; old ones beyond the limit go."""
        with writing(checkpoint_folder(self.output_dir, self.step)) as folder:
            save(folder)
            tokenizer.save_pretrained(folder)
            state = {"step": self.step, "num_tokens": self.num_tokens, "first_evaluation": self.first_evaluation}
            write_state(folder, {**state, "order": self.order})
        rotate(self.output_dir, self.config.save_total_limit)

    def finish(self, export: SaveFunction, tokenizer: Any) -> dict[str, float]:
        """Writes the trained model to ``output_dir/final`` and says what evaluation found before and after."""
        with writing(self.output_dir / "final") as folder:
            export(folder)
            tokenizer.save_pretrained(folder)
        for name, after in self.last_evaluation.items():
            before = self.first_evaluation.get(name)
            if before is not None and "rewards/" in name and name.endswith("/mean"):
                self.trackers.bar.write(f"{name}: {before:.1%} before, {after:.1%} after")
        self.trackers.bar.write(f"the model is in {self.output_dir / 'final'}")
        return self.last


def _check_same_order(saved: Mapping[str, Any], order: Mapping[str, Any], checkpoint: Path | None) -> None:
    changed = [
        f"{name} was {saved[name]} and is {value}" for name, value in order.items() if saved.get(name, value) != value
    ]
    if changed:
        raise ConfigError(
            f"resume_from_checkpoint: {checkpoint} belongs to a run that went through the data otherwise "
            f"({'; '.join(changed)}), so that rows would be repeated or left out. Change that back (global_batch_size "
            "sets the sequences of a step for any number of workers), or start anew from the checkpoint as model."
        )


@contextlib.contextmanager
def mistakes_of(key: str) -> Iterator[None]:
    """Inside, what is found wrong with something that the user wrote or named is a ConfigError that names the key.

    An error in the code of a plugin keeps its traceback.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        if isinstance(error, ImportError) and not isinstance(error.__cause__, (ImportError, NoneType)):
            raise
        told = str(error) if str(error).startswith(key) else f"{key}: {error}"
        raise ConfigError("; ".join([told, *getattr(error, "__notes__", [])])) from error


def check_before_start(config: TrainConfig) -> None:
    """Raises ConfigError for plugins that are not there, and for a checkpoint that is none."""
    with mistakes_of("external_plugins"):
        load_plugins(config.external_plugins)
    resolve_resume(config.resume_from_checkpoint, Path(config.output_dir))


def num_train_workers(groups: DeviceGroups | None) -> int:
    """The workers of role train that ``groups`` will start; None: this process is the only one."""
    return 1 if groups is None else groups.group_of("train").num_workers


def read_rows(config: TrainConfig, source: Any, split: str) -> Any:
    """The rows of ``dataset`` or ``eval_dataset``. Raises ConfigError if there are none of the kind."""
    with mistakes_of("dataset"):
        return load_rows(
            source,
            split=split,
            columns=config.columns,
            prompt_template=config.prompt_template,
            system=config.system,
        )


def load_model_and_tokenizer(config: TrainConfig) -> tuple[str, Any]:
    """The folder or hub name of the model, built first if a plugin builds it, and its tokenizer.

    Raises:
        ConfigError: a tokenizer that cannot be loaded, or that has no end-of-sequence token.
    """
    with mistakes_of("external_plugins"):
        load_plugins(config.external_plugins)
    model = resolve_model(config.model, output_dir=config.output_dir, seed=config.seed)
    return model, load_tokenizer(config, model)


def load_tokenizer(config: TrainConfig, model: str) -> Any:
    """The tokenizer of the run, with a padding token and the configured chat template."""
    from transformers import AutoTokenizer

    name = config.tokenizer or model
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer could be loaded from {name!r}: {error}. Give a folder or a hub name as model or tokenizer."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name!r} has no eos_token, so that no sequence could end. Set one.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        file = Path(config.chat_template)
        is_file = len(config.chat_template) < 1024 and file.is_file()
        tokenizer.chat_template = file.read_text(encoding="utf-8") if is_file else config.chat_template
    return tokenizer


def resolve_dtype(config: TrainConfig) -> Dtype:
    """'float32' or 'bfloat16': what ``auto`` means on this process's device."""
    import torch

    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"


def build_backend(config: TrainConfig, model: str, *, num_training_steps: int | None) -> Backend:
    """The backend of this worker, its process group joined; ``num_training_steps`` None: one that only scores."""
    if RayHelper.current().world_size > 1:
        RayHelper.init_process_group()
    steps = num_training_steps or 0
    return BACKENDS[config.backend](
        model,
        dtype=resolve_dtype(config),
        learning_rate=None if num_training_steps is None else config.learning_rate,
        num_training_steps=steps,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm,
        lr_scheduler_type=config.lr_scheduler_type,
        lr_scheduler_kwargs=config.lr_scheduler_kwargs,
        warmup_steps=config.warmup_steps or math.ceil(config.warmup_ratio * steps),
        gradient_checkpointing=config.gradient_checkpointing,
        disable_dropout=config.disable_dropout,
        seed=config.seed,
        model_init_kwargs=config.model_init_kwargs,
        trust_remote_code=config.trust_remote_code,
    )
