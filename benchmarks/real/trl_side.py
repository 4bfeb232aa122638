"""TRL's trainers as its documentation runs them on one GPU, with a JSON line per step in a file.

    python -m benchmarks.real.trl_side grpo '{"model": ..., "data": ..., "folder": ..., "steps": 6, ...}'

GRPO: vLLM in the same process (``vllm_mode: colocate``), everything else TRL's default but for the sizes of a step.
SFT: ``packing``, likewise. ``micro``: rows of a micro-batch, which TRL has no default for that fits a card. ``final``:
a folder for the trained model, with its tokenizer; without it, none is written.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.gpu.steps import ON_GPU, synchronize


class Steps(TrainerCallback):
    """Writes seconds, reward or loss, and tokens of each step; ``spent`` has the seconds of parts of the step."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.spent: dict[str, float] = {}
        self.step: dict[str, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.since = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        generate = self.spent.pop("generate", None)
        self.step = {"seconds": seconds, "generate": generate}
        if generate is not None:
            self.step["update"] = seconds - generate

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        names = ("loss", "reward", "completions/mean_length", "num_tokens")
        if not self.step:
            return
        line = self.step | {name: (logs or {}).get(name) for name in names}
        line["loss"] = line["loss"] or None  # of the last step 0 is logged
        with self.file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        self.step = {}

    def timed(self, owner: Any, method: str) -> None:
        """Counts the seconds of a method of ``owner`` as generating, where it has one."""
        function = getattr(owner, method, None)
        if function is None:
            return

        @functools.wraps(function)
        def measured(*given: Any, **named: Any) -> Any:
            synchronize()
            since = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                synchronize()
                self.spent["generate"] = self.spent.get("generate", 0.0) + time.perf_counter() - since

        setattr(owner, method, measured)


def settings(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": str(Path(asked["folder"]) / "trl"),
        "max_steps": asked["steps"],
        "per_device_train_batch_size": asked["micro"],
        "gradient_accumulation_steps": asked["rows"] // asked["micro"],
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": ON_GPU,
        "use_cpu": not ON_GPU,
        **asked["keys"],
    }


def grpo(asked: dict[str, Any], steps: Steps) -> None:
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    if asked["rewards"] == "exact_answer":
        from trainers.rewards.functions import exact_answer as reward
    else:
        module, _, name = asked["rewards"].rpartition(".")
        reward = getattr(importlib.import_module(module), name)
    arguments = GRPOConfig(
        **{"use_vllm": ON_GPU, "vllm_mode": "colocate"} | settings(asked),
        num_generations=asked["generations"],
        max_completion_length=asked["length"],
    )
    trainer = GRPOTrainer(
        model=asked["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=load_dataset("json", data_files=asked["data"], split="train"),
        callbacks=[steps],
    )
    steps.timed(trainer, "_generate")  # weights to vLLM, and completions
    trainer.train()
    if "final" in asked:
        trainer.save_model(asked["final"])


def sft(asked: dict[str, Any], steps: Steps) -> None:
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=asked["model"],
        args=SFTConfig(**settings(asked), packing=True, max_length=asked["length"]),
        train_dataset=load_dataset("json", data_files=asked["data"], split="train"),
        callbacks=[steps],
    )
    trainer.train()


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    torch.manual_seed(0)
    {"grpo": grpo, "sft": sft}[sys.argv[1]](told, Steps(Path(told["steps_file"])))
