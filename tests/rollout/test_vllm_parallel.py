"""A vLLM model in two parts (tensor parallel), against the hf engine: one a worker, or two processes of one worker."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rayhelper import RayHelper, WorkerDiedError
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import together
from tests.golden.tiny import tiny_tokenizer
from tests.rollout.prompts import prompts_of, save_decided
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Prompts, Rollouts
from trainers.configuration.completion import CompletionConfig
from trainers.parts.engine import build_vllm
from trainers.parts.fingerprints import fingerprints
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine

SAMPLING = Sampling(max_completion_length=12, temperature=0.0)


@RayHelper.worker(group="rollout")
class Completing:
    """The engine of trainers, and nothing else of them."""

    def __init__(self, config: CompletionConfig) -> None:
        self.config = config
        self.build()

    @RayHelper.function(group="rollout")
    def build(self) -> None:
        self.engine: Any = build_vllm(self.config, self.config.model, tiny_tokenizer(), shares_devices=False)

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, prompts: Prompts) -> Rollouts:
        return self.engine.generate(prompts, SAMPLING, seed=0)

    @RayHelper.function(group="rollout")
    def load(self, model: str) -> dict[str, int]:
        self.engine.load_weights(FsdpBackend(model).named_weights())
        return self.engine.fingerprints()

    @RayHelper.function(group="rollout")
    def processes(self) -> list[int]:
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    @RayHelper.function(group="rollout")
    def parts(self) -> list[int]:
        """The processes among them that hold a part of the model each."""
        return [child.pid for child in multiprocessing.active_children() if child.pid is not None]

    @RayHelper.function(group="rollout")
    def close(self) -> None:
        self.engine.close()


@contextmanager
def one_worker() -> Iterator[None]:
    """Of two invented GPUs."""
    group = {"device": "GPU", "ranks": 2, "gpus_per_worker": 2, "workers": ["rollout"]}
    with without_runtime(), RayHelper.session({"engines": group}):
        yield


@pytest.mark.parametrize("place", ["two workers", "one worker"])
def test_a_model_in_two_parts_completes_as_one(place: str, tmp_path: Path, ray_session: RaySession) -> None:
    models = [save_decided(tmp_path / str(seed), seed=seed, head_dim=32) for seed in (0, 1)]
    config = CompletionConfig(
        model=models[0],
        dataset="none",
        rollout_engine="vllm",
        vllm_tensor_parallel_size=2,
        vllm_max_model_len=64,
        max_completion_length=12,
    )
    expected = [HfEngine(model, tiny_tokenizer()).generate(prompts_of(), SAMPLING, seed=0) for model in models]
    with ray_session(together(2)) if place == "two workers" else one_worker():
        both = Completing(config)
        found = [both.generate(prompts_of())]
        prints = both.load(models[1])
        found.append(both.generate(prompts_of()))
        if place == "two workers":
            both.close()
        else:
            processes, parts = both.processes()[0], both.parts()[0]
            assert len(parts) == 2
            assert set(parts) < set(processes)
            os.kill(parts[1], signal.SIGKILL)
            assert all_gone(processes, timeout_s=30)
            with pytest.raises(WorkerDiedError, match="rank 0 of group 'engines'"):
                both.generate(prompts_of())
            for file in Path(tempfile.gettempdir()).glob("vllm_dist_*"):  # where the killed ones had met
                file.unlink()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.completion_ids == theirs.completion_ids
        np.testing.assert_allclose(ours.rollout_logps.values, theirs.rollout_logps.values, atol=1e-4)
    assert found[0].completion_ids != found[1].completion_ids
    assert prints == [fingerprints(FsdpBackend(models[1]).named_weights())]  # of the whole model, from the leader


def all_gone(pids: list[int], timeout_s: float) -> bool:
    """Whether the processes have ended in this time."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(is_alive, processes))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
