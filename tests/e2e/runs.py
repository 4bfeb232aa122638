"""Small runs of both trainers, and what they leave behind: what the tests of whole runs share."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from rayhelper.roles.runtime import state
from trainers.classification.config import ClassificationConfig
from trainers.cpo.config import CPOConfig, ORPOConfig, SimPOConfig
from trainers.dpo.config import DPOConfig
from trainers.embedding.config import EmbeddingConfig
from trainers.gkd.config import GKDConfig
from trainers.grpo.config import GRPOConfig
from trainers.kto.config import KTOConfig
from trainers.ppo.config import PPOConfig
from trainers.reranking.config import RerankingConfig
from trainers.reward.config import RewardConfig
from trainers.run.run import Run
from trainers.sft.config import SFTConfig

WORDS = "a bee sees two deer near the sea where no one ever was before and they all rest".split()
TEXTS = [" ".join(WORDS[k % 5 : k % 5 + 1 + 3 * k % 11]) for k in range(11)]  # 11 texts of unequal length


def shared(model: str, folder: Path) -> dict[str, Any]:
    return {
        "model": model,
        "output_dir": str(folder),
        "dtype": "float32",
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.01,
        "report_to": ["none"],
        "logging_steps": 100,
        "seed": 7,
    }


def sft_config(model: str, folder: Path, **keys: Any) -> SFTConfig:
    """Three epochs of three steps over 11 rows; the last batch of an epoch has 3 rows, the others 4."""
    settings: dict[str, Any] = {
        **shared(model, folder),
        "dataset": [{"text": text} for text in TEXTS],
        "per_device_train_batch_size": 2,
        "global_batch_size": 4,
        "num_train_epochs": 3,
        "save_steps": 0,
    }
    return SFTConfig(**(settings | keys))


def classification_config(model: str, folder: Path, **keys: Any) -> ClassificationConfig:
    return ClassificationConfig(**shared(model, folder) | {"save_steps": 0} | keys)


def embedding_config(model: str, folder: Path, **keys: Any) -> EmbeddingConfig:
    """Two epochs of three steps over 11 rows with one or two negatives; pools of 4 rows, the last of an epoch of 3."""
    rows = [
        {"anchor": text, "positive": f"{text} {WORDS[k]}", "negative": [TEXTS[k - 3], TEXTS[k - 4]][: 1 + k % 2]}
        for k, text in enumerate(TEXTS)
    ]
    settings: dict[str, Any] = {
        **shared(model, folder),
        **{"dataset": rows, "eval_dataset": rows[:5], "eval_steps": 3, "num_train_epochs": 2, "save_steps": 0},
        **{"per_device_train_batch_size": 2, "global_batch_size": 4, "use_chat_template": False},
    }
    return EmbeddingConfig(**(settings | keys))


def reranking_config(model: str, folder: Path, **keys: Any) -> RerankingConfig:
    """Three steps over 11 queries of unequal numbers of documents, of which some are drawn; a byte answers."""
    rows = [
        {"query": text, "positive": [f"{text} {WORDS[k]}", text], "negative": TEXTS[: k % 4]}
        for k, text in enumerate(TEXTS)
    ]
    settings: dict[str, Any] = {
        **shared(model, folder),
        **{"dataset": rows, "eval_dataset": rows[:5], "eval_steps": 3, "save_steps": 0, "max_negative_samples": 2},
        **{"per_device_train_batch_size": 2, "global_batch_size": 4, "task_type": "generative_reranker"},
        **{"generative_reranker_positive_token": "y", "generative_reranker_negative_token": "n"},
    }
    return RerankingConfig(**(settings | keys))


def pair_rows(count: int = 11) -> list[dict[str, Any]]:
    """Pairs whose completions differ in length, either way, and by how much the chosen one is better."""
    return [
        {
            "prompt": " ".join(WORDS[: 1 + k % 3]),
            "chosen": " ".join(WORDS[k % 4 : k % 4 + 1 + 3 * k % 7]),
            "rejected": " ".join(WORDS[7 + k % 3 : 8 + k % 3 + 5 * k % 6]),
            "margin": k % 3 / 2,
        }
        for k in range(count)
    ]


def dpo_config(model: str, folder: Path, **keys: Any) -> DPOConfig:
    """Three epochs of three steps over 11 pairs; the last batch of an epoch has 3 pairs, the others 4."""
    return DPOConfig(**of_pairs(model, folder, **keys))


def of_pairs(model: str, folder: Path, **keys: Any) -> dict[str, Any]:
    """What ``dpo_config`` says, for other trainers."""
    settings: dict[str, Any] = {
        **shared(model, folder),
        "dataset": pair_rows(),
        "eval_dataset": pair_rows(3),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "global_batch_size": 4,
        "num_train_epochs": 3,
        "save_steps": 0,
    }
    return settings | keys


def reward_config(model: str, folder: Path, **keys: Any) -> RewardConfig:
    """As ``dpo_config``."""
    return RewardConfig(**of_pairs(model, folder, **keys))


def cpo_config(model: str, folder: Path, **keys: Any) -> CPOConfig:
    """As ``dpo_config``."""
    return CPOConfig(**of_pairs(model, folder, **keys))


def simpo_config(model: str, folder: Path, **keys: Any) -> SimPOConfig:
    """As ``dpo_config``."""
    return SimPOConfig(**of_pairs(model, folder, **keys))


def orpo_config(model: str, folder: Path, **keys: Any) -> ORPOConfig:
    """As ``dpo_config``."""
    return ORPOConfig(**of_pairs(model, folder, **keys))


def judged_rows(count: int = 11) -> list[dict[str, Any]]:
    """One completion of each pair, desirable or not."""
    rows = pair_rows(count)
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if k % 3 else "rejected"], "label": k % 3 > 0}
        for k, row in enumerate(rows)
    ]


def kto_config(model: str, folder: Path, **keys: Any) -> KTOConfig:
    """As ``dpo_config``, of completions that are judged each by itself."""
    own = {"dataset": judged_rows(), "eval_dataset": judged_rows(4)}
    return KTOConfig(**of_pairs(model, folder, **own | keys))


def together(num_workers: int) -> dict[str, Any]:
    """Workers that host every role of every trainer."""
    roles = ["default", "train", "rollout", "reference", "teacher", "reward", "critic", "sampler", "prm", "orm"]
    return {"cpus": {"device": "CPU", "ranks": num_workers, "workers": roles}}


def separate() -> dict[str, Any]:
    """One worker that learns and judges; another that hosts what it needs answers and completions of."""
    others = ["rollout", "reference", "teacher", "critic", "sampler"]
    return {
        "learner": {"device": "CPU", "ranks": 1, "workers": ["default", "train", "reward", "prm", "orm"]},
        "other": {"device": "CPU", "ranks": 1, "workers": others},
    }


def apart(restarts: int = 0) -> dict[str, Any]:
    """One worker that learns, and two that do nothing but generate."""
    return {
        "learner": {"device": "CPU", "ranks": 1, "workers": ["train", "reference", "teacher", "reward"]},
        "actors": {"device": "CPU", "ranks": 2, "workers": ["rollout"], "restarts": restarts},
    }


def grpo_config(model: str, folder: Path, **keys: Any) -> GRPOConfig:
    """Two epochs of six steps over 6 prompts: generations of 16 and 8 completions, 8 a step, gone through twice."""
    settings: dict[str, Any] = {
        **shared(model, folder),
        "dataset": [{"prompt": text} for text in TEXTS[:6]],
        "eval_dataset": [{"prompt": text} for text in TEXTS[6:8]],
        "eval_temperature": 0.0,
        "reward_funcs": ["tests.e2e.runs.evenness", "tests.e2e.runs.shortness"],
        "reward_weights": [1.0, 0.1],
        "num_generations": 4,
        "generation_batch_size": 16,
        "num_iterations": 2,
        "max_completion_length": 8,
        "beta": 0.05,
        "per_device_train_batch_size": 3,
        "global_batch_size": 8,
        "num_train_epochs": 2,
        "save_steps": 0,
    }
    return GRPOConfig(**(settings | keys))


def gkd_config(model: str, folder: Path, **keys: Any) -> GKDConfig:
    """Two epochs of three steps over 11 rows, on-policy or not by the draw; the keys must say who teaches."""
    settings: dict[str, Any] = {
        **shared(model, folder),
        "dataset": [{"prompt": text[:6], "completion": text[6:]} for text in TEXTS],
        "eval_dataset": [{"prompt": text} for text in TEXTS[6:8]],
        "lmbda": 0.5,
        "temperature": 0.9,
        "sft_alpha": 0.1,
        "max_completion_length": 8,
        "per_device_train_batch_size": 2,
        "global_batch_size": 4,
        "num_train_epochs": 2,
        "save_steps": 0,
    }
    return GKDConfig(**(settings | keys))


def ppo_config(model: str, folder: Path, **keys: Any) -> PPOConfig:
    """Two epochs of six steps over 6 prompts: batches of 4 and 2 completions, 2 a step, gone through twice."""
    settings: dict[str, Any] = {
        **shared(model, folder),
        "dataset": [{"prompt": text} for text in TEXTS[:6]],
        "eval_dataset": [{"prompt": text} for text in TEXTS[6:8]],
        "eval_temperature": 0.0,
        "reward_funcs": ["tests.e2e.runs.evenness", "tests.e2e.runs.shortness"],
        "reward_weights": [1.0, 0.1],
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "max_completion_length": 8,
        "missing_eos_penalty": 0.5,
        "per_device_train_batch_size": 3,
        "global_batch_size": 2,
        "num_train_epochs": 2,
        "save_steps": 0,
    }
    return PPOConfig(**(settings | keys))


def evenness(completion_ids: Sequence[Any], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(int(token) % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def shortness(completion_ids: Sequence[Any], **_: Any) -> list[float | None]:
    """Fewer tokens are better; what is a single token is not scored."""
    return [None if len(ids) == 1 else -float(len(ids)) for ids in completion_ids]


def begin_torchrun_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is as the one that ``torchrun --nproc-per-node 1`` would start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


@contextmanager
def worker_killed_after(step: int, times: int = 1) -> Iterator[None]:
    """Inside, the second worker of a run on Ray is killed once this step is logged, so many times."""
    left, log_step = [times], Run.log_step

    def log_and_kill(run: Run, *args: Any, **kwargs: Any) -> None:
        log_step(run, *args, **kwargs)
        if run.step == step and left[0]:
            left[0] -= 1
            os.kill(next(iter(state.active.groups.values())).crew.facts[1]["pid"], signal.SIGKILL)  # type: ignore[union-attr]

    with patch.object(Run, "log_step", log_and_kill):
        yield


@contextmanager
def interrupted_after(step: int) -> Iterator[None]:
    """Inside, Ctrl-C comes when the numbers of ``step`` have been written."""
    log_step = Run.log_step

    def log_and_stop(run: Run, *args: Any, **kwargs: Any) -> None:
        log_step(run, *args, **kwargs)
        if run.step == step:
            raise KeyboardInterrupt

    with patch.object(Run, "log_step", log_and_stop):
        yield


@contextmanager
def signalled_in(step: int, number: int) -> Iterator[None]:
    """Inside, the process is sent a signal while the optimizer makes ``step``, counted from 1."""
    phase = Run.phase

    def phase_and_signal(run: Run, name: str) -> Any:
        if name == "update" and run.step == step - 1:
            os.kill(os.getpid(), number)
        return phase(run, name)

    with patch.object(Run, "phase", phase_and_signal):
        yield


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` without what tells of time."""
    return [{name: value for name, value in line.items() if not tells_time(name)} for line in whole_lines(folder)]


def whole_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tells_time(name: str) -> bool:
    """Whether a metric is another every time that the same run is made."""
    return name == "step_time" or name.startswith(("time/", "time_share/", "throughput/"))


def final_bytes(folder: Path) -> bytes:
    """The weights of the trained model as they stand in the file."""
    return (folder / "final" / "model.safetensors").read_bytes()


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")
