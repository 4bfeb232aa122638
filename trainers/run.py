"""One training run as its driver sees it: the step it has reached, what it logs, and the checkpoints it leaves.

Also the few things that every trainer builds from the shared keys: tokenizer, model path, backend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rayhelper import ConfigError, RayHelper
from trainers.backends.base import Backend
from trainers.backends.fsdp import FsdpBackend
from trainers.checkpoint import checkpoint_folder, read_state, resolve_resume, rotate, write_state, writing
from trainers.cli import save_config
from trainers.config import TrainConfig
from trainers.metrics import Metrics
from trainers.plugins import load_plugins, resolve_model
from trainers.trackers import Trackers

SaveFunction = Callable[[Path], Any]
Dtype = Literal["float32", "bfloat16"]


class Run:
    """Progress, logs and checkpoints of one call of ``train()``; a context manager that closes the logs."""

    def __init__(self, config: TrainConfig, num_steps: int, *, headline: Sequence[str]) -> None:
        self.config = config
        self.num_steps = num_steps
        self.output_dir = Path(config.output_dir)
        self.checkpoint = resolve_resume(config.resume_from_checkpoint, self.output_dir)
        state = read_state(self.checkpoint) if self.checkpoint else {}
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
            config=asdict(config),
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

    def log_completions(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Keeps the completions that the next step learns from."""
        if (self.step + 1) % self.config.logging_steps == 0 or self.step == 0:
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
            write_state(folder, state)
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


def load_model_and_tokenizer(config: TrainConfig) -> tuple[str, Any]:
    """The folder or hub name of the model, built first if a plugin builds it, and its tokenizer.

    Raises:
        ConfigError: a tokenizer that cannot be loaded, or that has no end-of-sequence token.
    """
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
    return FsdpBackend(
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
