"""The runs whose curves are drawn: the trainer of each, the keys of its YAML, and what it begins with.

    model ──► sft ──┬──► grpo        rewards: the answer is right
                    ├──► trl_grpo    the same by TRL's trainer, with vLLM in its process
                    ├──► ppo         the same
                    ├──► dpo         pairs of right and wrong samples of the SFT model
                    └──► gkd         its teacher; the student has a third of its layers

Every key that is not here has its default. ``--keys grpo:learning_rate=3e-6`` changes one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.real.gsm8k import write_prompts, write_solutions
from trainers.rewards.functions import completion_text

RUNS = ("sft", "grpo", "dpo", "gkd", "ppo")
PEERS = ("trl_grpo",)
PPO_EPOCHS = 4
LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class Sizes:
    """Of one evaluation and of the runs; ``steps`` are those of each run."""

    steps: int = 200
    points: int = 4  # checkpoints whose accuracy is measured, with the last
    prompts: int = 32  # of a step of GRPO and PPO
    generations: int = 16
    length: int = 256  # tokens of a completion at most
    rows: int = 16  # of 1,024 tokens, of a step of SFT
    sampled: int = 2048  # problems of which DPO gets samples
    candidates: int = 8  # of each
    test_rows: int | None = None  # all 1,319
    reward: str = "exact_answer"


TINY = Sizes(
    *(3, 2, 2, 2, 12, 2, 6, 4, 5),
    reward="benchmarks.real.learning.stages.is_even",  # no random model is ever right
)


@dataclass(frozen=True)
class Begin:
    """What a run begins with. ``folder`` is its own; ``start`` the model of the stage before."""

    folder: Path
    start: str
    seed: int
    train_rows: list[dict[str, str]]
    sizes: Sizes


def command(name: str, begin: Begin, further: dict[str, Any]) -> tuple[list[str], str]:
    """The command of a run, once its data are written; and the model that it begins with.

    Under ``folder/out`` its steps come to ``metrics.jsonl``, its models to ``checkpoint-STEP`` and ``final``.
    """
    (begin.folder / "out").mkdir(parents=True, exist_ok=True)
    if name in PEERS:
        return _trl_grpo(begin, further), begin.start
    keys = _STAGES[name](begin)
    sizes = begin.sizes
    keys = {
        "model": begin.start,
        "max_steps": sizes.steps,
        "seed": begin.seed,
        "logging_steps": max(1, sizes.steps // 10),
        "report_to": ["none"],
        "output_dir": str(begin.folder / "out"),
        **keys,
        **further,
    }
    keys.setdefault("save_steps", max(1, int(keys["max_steps"]) // sizes.points))
    (begin.folder / "run.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
    return [sys.executable, "-m", f"trainers.{name}", "--config", str(begin.folder / "run.yaml")], keys["model"]


def is_even(completions: list[Any], **_: Any) -> list[float]:
    """1.0 for texts of an even number of characters."""
    return [1.0 - len(completion_text(completion)) % 2 for completion in completions]


def _sft(begin: Begin) -> dict[str, Any]:
    write_solutions(begin.train_rows, begin.folder / "data.jsonl")
    return {
        "dataset": str(begin.folder / "data.jsonl"),
        "packing": True,
        "max_length": 1024,
        "global_batch_size": begin.sizes.rows,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.05,
    }


def _rewarded(begin: Begin) -> dict[str, Any]:
    write_prompts(begin.train_rows, begin.folder / "data.jsonl")
    sizes = begin.sizes
    return {
        "dataset": str(begin.folder / "data.jsonl"),
        "reward_funcs": [sizes.reward],
        "max_completion_length": sizes.length,
        "global_batch_size": sizes.prompts * sizes.generations,
        "learning_rate": 3e-6,
        "lr_scheduler_type": "constant",
    }


def _grpo(begin: Begin) -> dict[str, Any]:
    return {**_rewarded(begin), "num_generations": begin.sizes.generations}


def _trl_grpo(begin: Begin, further: dict[str, Any]) -> list[str]:
    """TRL's names of the keys; micro-batches of 32 rows, which its documentation leaves to the user."""
    sizes, out = begin.sizes, begin.folder / "out"
    own = _grpo(begin)
    rows = own["global_batch_size"]
    steps = further.pop("max_steps", sizes.steps)
    keys = {
        **{name: own[name] for name in ("learning_rate", "lr_scheduler_type")},
        "seed": begin.seed,
        "save_strategy": "steps",
        "save_steps": max(1, int(steps) // sizes.points),
        "save_only_model": True,
        "output_dir": str(out),
        **further,
    }
    asked = {
        "model": begin.start,
        "data": own["dataset"],
        "folder": str(begin.folder),
        "final": str(out / "final"),
        "steps_file": str(out / "metrics.jsonl"),
        "rewards": sizes.reward,
        "generations": own["num_generations"],
        "length": own["max_completion_length"],
        "steps": steps,
        "rows": rows,
        "micro": min(32, rows),
        "keys": keys,
    }
    return [sys.executable, "-m", "benchmarks.real.trl_side", "grpo", json.dumps(asked)]


def _ppo(begin: Begin) -> dict[str, Any]:
    """A batch of completions is learned in four optimizer steps, PPO's default; its checkpoints are between batches."""
    sizes = begin.sizes
    each = PPO_EPOCHS * max(1, sizes.steps // sizes.points)
    return {
        **_rewarded(begin),
        "num_ppo_epochs": PPO_EPOCHS,
        "max_steps": PPO_EPOCHS * sizes.steps,
        "save_steps": each,
    }


def _dpo(begin: Begin) -> dict[str, Any]:
    sizes, folder = begin.sizes, begin.folder
    write_prompts(begin.train_rows[: sizes.sampled], folder / "prompts.jsonl")
    keys = {
        "model": begin.start,
        "dataset": str(folder / "prompts.jsonl"),
        "orm_model": sizes.reward,
        "num_return_sequences": sizes.candidates,
        "easy_query_threshold": 1.0,  # a problem whose samples are all right has no pair
        "num_sampling_batch_size": 64,
        "max_new_tokens": sizes.length,
        "temperature": 1.0,
        "seed": begin.seed,
        "report_to": ["none"],
        "output_dir": str(folder),
        "output_file": "samples.jsonl",
    }
    (folder / "sampling.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
    sampling = [sys.executable, "-m", "trainers", "sampling", "--config", str(folder / "sampling.yaml")]
    with (folder / "sampling.log").open("w") as log:
        subprocess.run(sampling, check=True, stdout=log, stderr=subprocess.STDOUT)
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [line for line in lines if json.loads(line).get("rejected_response")]
    (folder / "data.jsonl").write_text("".join(f"{line}\n" for line in pairs), encoding="utf-8")
    if not pairs:
        raise SystemExit(f"dpo: no problem of {sizes.sampled} has a right and a wrong sample")
    return {
        "dataset": str(folder / "data.jsonl"),
        "global_batch_size": min(64, len(pairs)),
        "learning_rate": 5e-6,
    }


def _gkd(begin: Begin) -> dict[str, Any]:
    write_solutions(begin.train_rows, begin.folder / "data.jsonl")
    return {
        "model": every_third_layer(begin.start, begin.folder / "student"),
        "teacher_model": begin.start,
        "dataset": str(begin.folder / "data.jsonl"),
        "lmbda": 0.5,
        "max_completion_length": begin.sizes.length,
        "global_batch_size": begin.sizes.rows * 4,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.05,
    }


def every_third_layer(model: str, folder: Path) -> str:
    """A smaller model in ``folder``: layers 0, 3, 6 and so on of a model, and all else of it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = AutoConfig.from_pretrained(model)
    kept = list(range(0, config.num_hidden_layers, 3))
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in kept]
    smaller = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {}
    for name, weight in whole.state_dict().items():
        if found := LAYER.match(name):
            layer = int(found.group(1))
            if layer not in kept:
                continue
            start, end = found.span(1)
            name = f"{name[:start]}{kept.index(layer)}{name[end:]}"
        weights[name] = weight
    smaller.load_state_dict(weights)
    smaller.generation_config = whole.generation_config
    smaller.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


_STAGES: dict[str, Callable[[Begin], dict[str, Any]]] = {
    "sft": _sft,
    "grpo": _grpo,
    "dpo": _dpo,
    "gkd": _gkd,
    "ppo": _ppo,
}
