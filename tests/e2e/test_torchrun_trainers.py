"""Whole runs under torchrun: the numbers of Ray, written once, and gone on with by any number of processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

from rayhelper import ConfigError, RayHelper
from tests import warm
from tests.backends.ranks import run_ranks
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import (
    begin_torchrun_of_one,
    embedding_config,
    final_bytes,
    final_weights,
    gkd_config,
    grpo_config,
    interrupted_after,
    kto_config,
    lines,
    ppo_config,
    reranking_config,
    reward_config,
    sft_config,
    together,
)
from tests.golden.tiny import save_tiny
from tests.rayhelper.test_torchrun import torchrun
from trainers.batch import Sequences
from trainers.checkpoint import checkpoints, latest, read_state
from trainers.cli import run
from trainers.configuration.reading.text import save_config
from trainers.embedding.trainer import EmbeddingTrainer
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.kto.trainer import KTOTrainer
from trainers.metrics import Metrics
from trainers.parts.policy import Policy
from trainers.ppo.trainer import PPOTrainer
from trainers.reranking.trainer import RerankingTrainer
from trainers.reward.trainer import RewardTrainer
from trainers.run import stopping
from trainers.run.stopping import StepGivenUp, Stopped
from trainers.sft.config import SFTConfig
from trainers.sft.loss import supervised_loss
from trainers.sft.trainer import SFTTrainer

pytestmark = pytest.mark.xdist_group("ray_trainers")  # all look at what one start of torchrun left behind

ROOT = Path(__file__).resolve().parents[2]
# Those whose parts or batches no other has: DPO has KTO's reference and the pairs of reward models, ORPO less
OTHERS: dict[str, Any] = {
    **{"kto": KTOTrainer, "reward": RewardTrainer, "gkd": GKDTrainer, "ppo": PPOTrainer},
    **{"embedding": EmbeddingTrainer, "reranking": RerankingTrainer},
}
ROLES = sorted({role for cls in (GRPOTrainer, *OTHERS.values()) for role in cls.__rayhelper_roles__})
PLUGIN = """
import os
from pathlib import Path

from tests.e2e.runs import evenness
from tests.golden.tiny import save_tiny
from trainers.plugins import register_model, register_reward

def note(what):
    with Path(__file__).with_name(what).open("a") as file:
        file.write(f"{os.getpid()}\\n")

@register_model("small")
def small(output_dir, seed):
    note("built")
    return save_tiny(Path(output_dir) / "model", seed)

@register_reward("noted")
def noted(completion_ids, **columns):
    note("scored")
    return evenness(completion_ids)
"""


class NotingPolicy(Policy):
    """Each worker notes the sequences that it learns from, one line per step."""

    @RayHelper.function(group="train", dispatch="slice", collect=Metrics.merge)
    def step(self, samples: Sequences, numbers: int, entropy_gradient: bool = False) -> Metrics:
        info = RayHelper.current()
        with (Path(self.config.output_dir) / f"trained {info.rank} of {info.world_size}").open("a") as file:
            file.write(json.dumps([row.tolist() for row in samples.input_ids]) + "\n")
        return super().step(samples, numbers, entropy_gradient)


class NotingTrainer(SFTTrainer):
    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.policy = NotingPolicy(config, loss=supervised_loss)


class FailingPolicy(Policy):
    """Its second worker fails, or dies, while the second checkpoint is being written."""

    killed = False

    @RayHelper.function(group="train")
    def save(self, folder: Path) -> None:
        if folder.name.startswith("checkpoint-4") and RayHelper.current().rank == 1:
            (folder / "part").write_text("half")
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
        super().save(folder)
        if folder.name.startswith("checkpoint-4") and RayHelper.current().rank == 1:
            raise OSError("disk full")  # while nobody waits for it in a collective


class FailingTrainer(SFTTrainer):
    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.policy = FailingPolicy(config, loss=supervised_loss)


class HangingPolicy(Policy):
    """After its second step SIGTERM comes to the second process alone, which does not go on."""

    calls = 0

    @RayHelper.function(group="train", dispatch="slice", collect=Metrics.merge)
    def step(self, samples: Sequences, numbers: int, entropy_gradient: bool = False) -> Metrics:
        type(self).calls += 1
        if self.calls == 3 and RayHelper.current().rank == 1:
            signal.raise_signal(signal.SIGTERM)
            while True:
                time.sleep(0.1)
        return super().step(samples, numbers, entropy_gradient)


class HangingTrainer(SFTTrainer):
    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.policy = HangingPolicy(config, loss=supervised_loss)


class SignalledPolicy(Policy):
    """In its second step SIGUSR1 comes to the second process alone."""

    calls = 0

    @RayHelper.function(group="train", dispatch="slice", collect=Metrics.merge)
    def step(self, samples: Sequences, numbers: int, entropy_gradient: bool = False) -> Metrics:
        type(self).calls += 1
        if self.calls == 2 and RayHelper.current().rank == 1:
            signal.raise_signal(signal.SIGUSR1)
        return super().step(samples, numbers, entropy_gradient)


class SignalledTrainer(SFTTrainer):
    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.policy = SignalledPolicy(config, loss=supervised_loss)


# What torchrun runs: every process comes here


def first_part(model: str, folder: Path) -> None:
    """Of four workers: a run is interrupted after step 5; its last checkpoint is that of step 4."""
    with interrupted_after(5), pytest.raises(KeyboardInterrupt):
        NotingTrainer(resumable_config(model, folder)).train()


def whole_runs(model: str, folder: Path) -> None:
    """Of two processes: runs of all trainers, the middle of an interrupted one, and what goes wrong."""
    run(SFTTrainer, judged_config(model, folder / "sft"))
    run(GRPOTrainer, plugged_config(folder / "grpo"))
    for name, trainer in OTHERS.items():
        run(trainer, other_config(name, model, folder / name))
    with interrupted_after(7), pytest.raises(KeyboardInterrupt):
        run(NotingTrainer, resumable_config(model, folder / "parted"))
    with pytest.raises(Stopped) as stopped:
        run(SignalledTrainer, sft_config(model, folder / "signalled"))
    assert stopped.value.code == 143  # in each process
    with pytest.raises(OSError, match="disk full"):
        run(FailingTrainer, sft_config(model, folder / "failed", save_steps=2))
    with pytest.raises(ConfigError, match="dataset: a row to learn from has 'body'"):
        run(SFTTrainer, sft_config(model, folder / "wrong", dataset_text_field="body"))
    (folder / f"done {os.environ['RANK']}").touch()
    FailingPolicy.killed = True
    run(FailingTrainer, sft_config(model, folder / "killed", save_steps=2))


def other_config(name: str, model: str, folder: Path) -> Any:
    """Three steps and a checkpoint of a trainer of ``OTHERS``."""
    keys: dict[str, Any] = {"max_steps": 3, "save_steps": 2}
    if name == "reward":
        keys = {"max_steps": 4, "save_strategy": "epoch", "eval_strategy": "epoch"}
    if name == "gkd":
        return gkd_config(model, folder, teacher_model=model, lmbda=1.0, sft_alpha=0.0, **keys)
    if name in ("embedding", "reranking"):
        return {"embedding": embedding_config, "reranking": reranking_config}[name](model, folder, **keys)
    configs = {"kto": kto_config, "reward": reward_config, "ppo": ppo_config}
    return configs[name](model, folder, **keys)


def judged_config(model: str, folder: Path) -> SFTConfig:
    """Evaluated and saved every two steps, on what the training data makes it forget; ends with its best model."""
    keys: dict[str, Any] = {"eval_dataset": [{"text": "QZX 741 %&$ KJWVQ 963"}], "eval_steps": 2, "save_steps": 2}
    keys |= {"learning_rate": 1e-2}
    keys |= {"save_total_limit": 1, "metric_for_best_model": "loss", "val_before_train": True}
    keys |= {"load_best_model_at_end": True}
    return sft_config(model, folder, **keys)


def plugged_config(folder: Path) -> GRPOConfig:
    """A model and a reward of a plugin; completions are kept."""
    keys: dict[str, Any] = {"reward_funcs": ["noted"], "reward_weights": None, "log_completions": True, "save_steps": 4}
    return grpo_config("small", folder, num_train_epochs=1, external_plugins=[str(folder / "plugin.py")], **keys)


def resumable_config(model: str, folder: Path, **keys: Any) -> SFTConfig:
    """A sequence a worker and step; what belongs to the batch of four workers is not said anywhere else."""
    settings = {"per_device_train_batch_size": 1, "global_batch_size": None, "save_steps": 2, "adam_epsilon": 1e-4}
    return sft_config(model, folder, **(settings | {"resume_from_checkpoint": "auto"} | keys))


# What the test looks at


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def by_torchrun(model: str, tmp_path_factory: pytest.TempPathFactory, ray_session: RaySession) -> Path:
    """What two processes leave behind, and before them four workers of Ray."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "parted").mkdir()
    (folder / "grpo").mkdir()
    (folder / "grpo" / "plugin.py").write_text(PLUGIN)
    with ray_session(together(4)):
        first_part(model, folder / "parted")
    done = torchrun(2, "-m", __name__, "whole_runs", model, str(folder), cwd=ROOT)
    assert {path.name for path in folder.glob("done *")} == {"done 0", "done 1"}, done.stderr[-8000:]
    return folder


def test_two_processes_of_torchrun_equal_two_ray_workers_bit_for_bit(
    by_torchrun: Path, model: str, tmp_path: Path, ray_session: RaySession
) -> None:
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "plugin.py").write_text(PLUGIN)
    with ray_session(together(2)):
        SFTTrainer(judged_config(model, tmp_path / "sft")).train()
        GRPOTrainer(plugged_config(tmp_path / "grpo")).train()
        for name, trainer in OTHERS.items():
            trainer(other_config(name, model, tmp_path / name)).train()
    for name in ("sft", "grpo", *OTHERS):
        assert lines(by_torchrun / name) == lines(tmp_path / name)
        assert final_bytes(by_torchrun / name) == final_bytes(tmp_path / name)
        written = [{path.name for path in (folder / name).iterdir()} for folder in (by_torchrun, tmp_path)]
        assert written[0] == written[1]
    assert "checkpoint-3" in {path.name for path in (by_torchrun / "reward").iterdir()}  # the end of its first epoch


@pytest.mark.parametrize(("trainer", "names"), [("embedding", ("mean_neg", "margin")), ("reranking", ("mrr",))])
def test_texts_of_all_workers_are_compared(
    by_torchrun: Path, model: str, tmp_path: Path, trainer: str, names: tuple[str, ...]
) -> None:
    """A pool of four rows is the same over two processes and in one; so are drawn documents."""
    keys: dict[str, Any] = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 16, "max_steps": 3}
    makes = {"embedding": embedding_config, "reranking": reranking_config}
    OTHERS[trainer](makes[trainer](model, tmp_path, save_steps=2, **keys)).train()
    names = ("loss", "grad_norm", *names)
    of_evaluation = {f"eval_{name}" for name in names}
    both = [
        [{name: line[name] for name in {*names, *of_evaluation} if name in line} for line in lines(folder)]
        for folder in (by_torchrun / trainer, tmp_path)
    ]
    assert both[0][0].keys() == set(names)
    for by_two, by_one in zip(*both, strict=True):
        assert by_two == pytest.approx(by_one, rel=1e-4, abs=1e-6)


def test_the_best_checkpoint_is_kept_and_told(by_torchrun: Path) -> None:
    losses = {line["step"]: line["eval_loss"] for line in lines(by_torchrun / "sft") if "eval_loss" in line}
    assert sorted(losses) == [0, 2, 4, 6, 8, 9]
    found = checkpoints(by_torchrun / "sft")
    best = min((2, 4, 6, 8), key=lambda step: losses[step])
    assert best < 8  # or it would tell nothing
    assert [path.name for path in found] == [f"checkpoint-{best}", "checkpoint-8"]
    state = read_state(by_torchrun / "sft" / "checkpoint-8")
    assert state["best_metric"] == losses[best]
    assert Path(state["best_model_checkpoint"]).name == f"checkpoint-{best}"


def test_process_0_alone_builds_the_model_and_scores(by_torchrun: Path) -> None:
    built = (by_torchrun / "grpo" / "built").read_text().split()
    scored = (by_torchrun / "grpo" / "scored").read_text().split()
    assert len(built) == 1
    assert set(scored) == set(built)
    assert len(scored) == 2 + 1  # generations, and the evaluation at the end


def test_other_numbers_of_processes_go_on_with_a_run(by_torchrun: Path, model: str, tmp_path: Path) -> None:
    """Four workers of Ray, two processes of torchrun, then this one: every row once an epoch, losses of one run."""
    parted = by_torchrun / "parted"
    run(NotingTrainer, resumable_config(model, parted))
    run(SFTTrainer, resumable_config(model, tmp_path, global_batch_size=4))
    trained = [*steps_of(parted, 4)[:4], *steps_of(parted, 2)[:2], *steps_of(parted, 1)]
    rows = sorted(row.tolist() for row in SFTTrainer(resumable_config(model, tmp_path)).sequences.input_ids)
    assert [len(step) for step in trained] == [4, 4, 3] * 3
    assert all(sorted(itertools.chain(*trained[start : start + 3])) == rows for start in (0, 3, 6))
    found, expected = lines(parted), lines(tmp_path)
    assert [line["step"] for line in found] == list(range(1, 10))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    for name, weight in final_weights(tmp_path).items():
        torch.testing.assert_close(final_weights(parted)[name], weight, rtol=0, atol=1e-5)


def steps_of(folder: Path, num_workers: int) -> list[list[list[int]]]:
    """The sequences of every step that so many workers took, over all of them."""
    files = [folder / f"trained {rank} of {num_workers}" for rank in range(num_workers)]
    steps = zip(*(file.read_text().splitlines() for file in files), strict=True)
    return [list(itertools.chain(*map(json.loads, step))) for step in steps]


def test_a_worker_that_fails_or_is_killed_while_saving_leaves_the_checkpoint_before(by_torchrun: Path) -> None:
    assert [path.name for path in (by_torchrun / "failed").glob("checkpoint*")] == ["checkpoint-2"]
    found = latest(by_torchrun / "killed")
    assert found is not None
    assert read_state(found)["step"] == 2
    assert not (by_torchrun / "killed" / "checkpoint-4").exists()


def test_one_process_of_torchrun_equals_off_bit_for_bit(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_torchrun_of_one(monkeypatch)
    groups = {"cpus": {"device": "CPU", "ranks": 1, "workers": ROLES}}
    with without_runtime():
        GRPOTrainer(grpo_config(model, tmp_path / "off", max_steps=3)).train()
        with RayHelper.session(groups, runtime="torchrun"):
            GRPOTrainer(grpo_config(model, tmp_path / "on", max_steps=3)).train()
    assert lines(tmp_path / "on") == lines(tmp_path / "off")
    assert final_bytes(tmp_path / "on") == final_bytes(tmp_path / "off")


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "trainers.sft", "--model", "m", "--dataset", "d", "--sead", "7", cwd=ROOT)
    assert done.stderr.count("error: command line: unknown key sead (did you mean seed?)") == 1
    assert "exitcode  : 2 " in done.stderr


def test_engines_on_some_of_the_workers_that_hold_shards_are_refused(model: str, tmp_path: Path) -> None:
    """The others would wait for ever while the first gathers the weights."""
    groups = {
        "policy": {"device": "CPU", "ranks": 2, "workers": ["train", "reward"]},
        "sampler": {"device": "CPU", "ranks": 1, "workers": ["rollout"]},
    }
    config = grpo_config(model, tmp_path, device_groups=groups, eval_dataset=None)
    save_config(config, tmp_path)
    done = torchrun(2, "-m", "trainers.grpo", "--config", str(tmp_path / "config.yaml"), cwd=ROOT)
    assert done.returncode != 0
    assert "role rollout has 1 of the 2 workers that train" in done.stderr
    assert "fsdp_sharding_strategy: no_shard" in done.stderr


def stopped_in_a_hang(rank: int, port: int, model: str, folder: Path) -> Any:
    """The exit code. What is written to stderr is in a file for each rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.dup2(os.open(folder / f"told {rank}", os.O_CREAT | os.O_WRONLY), 2)
    waited = []

    def until_told(seconds: float) -> None:
        waited.append(seconds)
        wait_for(lambda: "stopped after step" in (folder / "told 0").read_text())

    config = sft_config(model, folder / "run", save_steps=1, stop_grace_s=0.1)
    clock = SimpleNamespace(sleep=until_told) if rank else time
    with (
        patch.object(stopping, "UNWIND_S", 250.0),  # the first process is free when the second one has left
        patch("trainers.run.run.time", clock),
        pytest.raises(StepGivenUp) as ended,
    ):
        run(HangingTrainer, config)
    assert waited == [stopping.ASKED_S] * rank
    return ended.value.code


def test_sigterm_while_one_process_hangs_tells_where_all_are_and_ends_both(model: str, tmp_path: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    codes = run_ranks(2, stopped_in_a_hang, store.port, model, tmp_path, folder=tmp_path, joined=False)
    assert codes == [143, 143]
    told = (tmp_path / "told 0").read_text()
    of_rank_1 = told.partition("--- ranks 1\n")[2]
    assert f"{Path(__file__).name}" in of_rank_1
    assert "time.sleep(0.1)" in of_rank_1
    assert f"stopped after step 2 of 9; saved before: {tmp_path / 'run' / 'checkpoint-2'}. To continue" in told
    assert "SIGTERM: the step did not end within 0.1 s" in told
    assert "given up" not in (tmp_path / "told 1").read_text()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_processes_whose_launcher_is_stopped_or_killed_save_and_end(
    sent: signal.Signals, model: str, tmp_path: Path
) -> None:
    """Both after the same step, without which neither could write its part of the checkpoint."""
    config = sft_config(model, tmp_path / "run", max_steps=100_000)
    save_config(config, tmp_path / "keys")
    start = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "trainers.sft", "--config", str(tmp_path / "keys/config.yaml")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON_EXEC": warm.python()}
    with (tmp_path / "out").open("w") as out:
        line = [*start, "--log-dir", str(tmp_path), *program]
        launcher = subprocess.Popen(line, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists() and len(lines(tmp_path / "run")) > 2)
        started = psutil.process_iter(["pid", "cmdline"])
        processes = [one for one in started if one.pid != launcher.pid and (one.info["cmdline"] or [])[-4:] == program]
        assert len(processes) == 2
        launcher.send_signal(sent)
        launcher.wait()
        wait_for(lambda: not any(process.is_running() for process in processes))
    finally:
        launcher.kill()
    told = (tmp_path / "out").read_text()
    step = len(lines(tmp_path / "run"))
    assert f"stopped by SIGTERM after step {step} of 100000" in told, told[-3000:]
    assert latest(tmp_path / "run") == tmp_path / "run" / f"checkpoint-{step}"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml", "logs", "metrics.jsonl", "run.json", "report.html", f"checkpoint-{step}",
    }  # fmt: skip


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
