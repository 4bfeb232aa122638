"""Runs whose completions come from an engine with weights of its own: the right weights, and no row lost or doubled.

Completions are greedy (``top_k: 1``), so that every engine writes the same; the penalty keeps them from one token only.
Each token has an advantage of its own (``reinforce_plus_plus_token``), so that there is something to learn although the
completions of a prompt are alike. Each step changes what is written: an engine with old weights would show.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayhelper import Channel, ConfigError, RayHelper
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import (
    TEXTS,
    apart,
    final_bytes,
    final_weights,
    gkd_config,
    grpo_config,
    interrupted_after,
    lines,
    ppo_config,
    whole_lines,
)
from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.rayhelper.test_torchrun import torchrun
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Prompts, Rollouts, Samples, Tasks
from trainers.cli import placement
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.metrics import Metrics
from trainers.parts.engine import prompts_of, sampling_of
from trainers.parts.generator import Generator
from trainers.ppo.trainer import PPOTrainer
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine

LEARNER = ["train", "reference", "teacher", "reward"]
ROLES = [*LEARNER, "rollout"]
VLLM: dict[str, Any] = {"rollout_engine": "vllm", "vllm_max_model_len": 64, "vllm_max_num_seqs": 8}
Ledger = list[list[list[int]]]  # the token ids of every sequence of every optimizer step

in_vllm_process = pytest.mark.xdist_group("vllm")


def greedy_config(model: str, folder: Path, **keys: Any) -> GRPOConfig:
    """Four steps on generations of four of twelve prompts, twice each."""
    settings: dict[str, Any] = {
        "dataset": [{"prompt": f"{text} {k}"} for k, text in enumerate([*TEXTS, TEXTS[3]])],
        "eval_dataset": None,
        "reward_funcs": [scatter],
        "reward_weights": None,
        "advantage_estimator": "reinforce_plus_plus_token",
        "top_k": 1,
        "repetition_penalty": 1.5,
        "num_generations": 2,
        "generation_batch_size": None,
        "global_batch_size": 8,
        "per_device_train_batch_size": 8,
        "num_iterations": 1,
        "beta": 0.0,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_steps": 4,
    }
    folder.mkdir(parents=True, exist_ok=True)
    return grpo_config(model, folder, **settings | keys)


def scatter(completion_ids: Any, **_: Any) -> list[float]:
    """A reward that nothing can be learned from for long, so that every step changes the policy."""
    return [sum(map(int, ids)) % 7 / 7 for ids in completion_ids]


class DyingGenerator(Generator):
    """Whose worker 1 dies once, where ``dies`` says."""

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, starts: Prompts | Tasks, sampling: Sampling, channel: Channel | None, *numbers: int) -> Rollouts:
        if self.shall_die(f"in generation {numbers[0]}"):
            engine: Any = self.engine
            if hasattr(engine, "module"):
                engine.module.register_forward_pre_hook(third_call_kills(lambda *_: None))
            else:
                engine.advance = third_call_kills(engine.advance)
        return super().generate(starts, sampling, channel, *numbers)

    @RayHelper.function(group="rollout")
    def receive(self, channel: Channel, unless: int | None = None) -> None:
        if self.shall_die("while it receives"):
            engine: Any = self.engine
            load = engine.load_weights
            engine.load_weights = lambda weights, **settings: load(killed_after_three(weights), **settings)
        super().receive(channel, unless)

    def shall_die(self, where: str) -> bool:
        orders = Path(self.config.output_dir) / "dies"
        if RayHelper.current().rank != 1 or self.engine is None or not orders.exists() or orders.read_text() != where:
            return False
        orders.unlink()
        return True


@RayHelper.worker(group=ROLES)
class LedgerTrainer(GRPOTrainer):
    """Notes what every optimizer step learns from."""

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        self.generator = DyingGenerator(config, self.policy)

    def prepare(self) -> None:
        super().prepare()
        self.ledger: Ledger = []

    def learn(self, chunk: Samples, generation: Samples) -> Metrics:
        self.ledger.append([row.tolist() for row in chunk.input_ids])
        return super().learn(chunk, generation)

    @RayHelper.function(group="rollout")
    def pid(self) -> Any:
        return os.getpid()

    @RayHelper.function(group="rollout")
    def close_engine(self) -> None:
        """Of vLLM: the worker outlives the run."""
        engine: Any = self.generator.engine
        engine.close()


def third_call_kills(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; its third call ends the process."""
    calls = iter([None, None])

    def counted(*args: Any) -> Any:
        if next(calls, "over") == "over":
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    return counted


def killed_after_three(weights: Iterable[Any]) -> Iterator[Any]:
    for number, weight in enumerate(weights):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield weight


def trained(config: GRPOConfig, dies: str = "") -> LedgerTrainer:
    """A trainer after its run, in which a worker has died if ``dies`` says where."""
    orders = Path(config.output_dir) / "dies"
    if dies:
        orders.write_text(dies)
    trainer = LedgerTrainer(config)
    trainer.train()
    assert not orders.exists(), "nobody died"
    return trainer


def assert_same_run(found: LedgerTrainer, expected: LedgerTrainer, atol: float = 1e-5) -> None:
    """The same sequences in the same steps, and the same numbers to ``atol``."""
    assert found.ledger == expected.ledger
    assert_same_numbers(Path(found.config.output_dir), Path(expected.config.output_dir), atol)


def assert_same_numbers(found: Path, expected: Path, atol: float) -> None:
    """Metrics, but for those of vLLM alone, and final weights."""
    for ours, theirs in zip(lines(found), lines(expected), strict=True):
        ours = {name: value for name, value in ours.items() if not name.endswith("kv_cache_usage")}
        assert ours == pytest.approx(theirs, abs=atol)
    weights = final_weights(found)
    for name, weight in final_weights(expected).items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=atol)


def prompts_learned(ledger: Ledger, config: GRPOConfig) -> list[list[str]]:
    """The rows of the data that every step learned from."""
    tokenizer = tiny_tokenizer()
    texts = [[tokenizer.decode(ids) for ids in step] for step in ledger]
    prompts = [row["prompt"] for row in config.dataset]
    return [[max((p for p in prompts if text.startswith(p)), key=len) for text in step] for step in texts]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), head_dim=32)  # the smallest that vLLM's attention takes


@pytest.fixture(scope="module")
def off(model: str, tmp_path_factory: pytest.TempPathFactory) -> LedgerTrainer:
    """What all runs are compared with: one process, whose engine runs the very module that is trained."""
    with without_runtime():
        trainer = trained(greedy_config(model, tmp_path_factory.mktemp("off")))
    told = lines(Path(trainer.config.output_dir))
    assert all(line["grad_norm"] > 0.1 for line in told)
    return trainer


@pytest.fixture(scope="module")
def off_ahead(model: str, tmp_path_factory: pytest.TempPathFactory) -> LedgerTrainer:
    """The same with one generation begun ahead; workers apart in this process."""
    with apart_here():
        return trained(greedy_config(model, tmp_path_factory.mktemp("ahead"), max_staleness=1))


# --- the policy's own weights


@in_vllm_process
def test_vllm_beside_training_equals_hf_and_each_step_has_the_weights_of_the_last(
    off: LedgerTrainer, model: str, tmp_path: Path
) -> None:
    """Every generation is compared with what a fresh engine writes with the weights that were exported before it."""
    trainer = LedgerTrainer(greedy_config(model, tmp_path / "run", **VLLM))
    policies = [model]

    def learn_and_export(chunk: Samples, generation: Samples) -> Metrics:
        metrics = LedgerTrainer.learn(trainer, chunk, generation)
        policies.append(str(tmp_path / f"policy {len(policies)}"))
        trainer.policy.export(Path(policies[-1]))
        return metrics

    trainer.learn = learn_and_export  # type: ignore[method-assign]
    trainer.train()
    with closing(engine_of(trainer)):
        assert_same_run(trainer, off, atol=1e-4)
        sampling = sampling_of(trainer.config)
        for policy, step in zip(policies[:-1], trainer.ledger, strict=True):
            assert set(map(tuple, step)) <= set(greedy(policy, trainer, sampling))
        trainer.generator.update()
        prompts = prompts_of(trainer.config, trainer.rows, trainer.tokenizer)
        last = engine_of(trainer).generate(prompts, sampling, seed=0)
        assert whole(last) == greedy(policies[-1], trainer, sampling)
        from trainers.rollout.vllm.engine import VllmEngine

        fresh = VllmEngine(policies[-1], trainer.tokenizer, engine_kwargs={"max_model_len": 64})
        with closing(fresh):
            assert whole(fresh.generate(prompts, sampling, seed=0)) == whole(last)
            assert fresh.fingerprints() == engine_of(trainer).fingerprints()


@in_vllm_process
def test_a_model_whose_queries_keys_and_values_have_biases_trains_as_with_hf(tmp_path: Path) -> None:
    """Qwen2, whose biases vLLM keeps in one vector: the checksum of the weights takes each number for itself."""
    model = save_tiny(tmp_path / "model", family="qwen2", hidden_size=128)
    with_biases = AutoModelForCausalLM.from_pretrained(model)
    for name, weight in with_biases.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5, generator=torch.Generator().manual_seed(len(name)))
    with_biases.save_pretrained(model)
    for name, engine in (("hf", {}), ("vllm", VLLM)):
        train_and_close(LedgerTrainer(greedy_config(model, tmp_path / name, max_steps=2, **engine)))
    assert_same_numbers(tmp_path / "vllm", tmp_path / "hf", 1e-4)


@in_vllm_process
def test_an_engine_that_is_not_updated_is_seen(off: LedgerTrainer, model: str, tmp_path: Path) -> None:
    with patch.object(Generator, "update"):
        trainer = trained(greedy_config(model, tmp_path, **VLLM))
    with closing(engine_of(trainer)):
        assert trainer.ledger[0] == off.ledger[0]
        assert all(found != expected for found, expected in zip(trainer.ledger[1:], off.ledger[1:], strict=True))


@in_vllm_process
def test_vllm_draws_completions_and_compares_them_with_the_greedy_ones_of_hf(model: str, tmp_path: Path) -> None:
    """ReMax: what is learned is drawn, its baseline is not."""
    keys: dict[str, Any] = {"advantage_estimator": "remax", "top_k": 0, "temperature": 1.0, "max_steps": 2}
    for name, engine in (("hf", {}), ("vllm", VLLM)):
        train_and_close(GRPOTrainer(greedy_config(model, tmp_path / name, **keys, **engine)))
    hf, vllm = lines(tmp_path / "hf")[0], lines(tmp_path / "vllm")
    assert vllm[0]["greedy_reward"] == pytest.approx(hf["greedy_reward"])
    assert all(step["reward"] != step["greedy_reward"] and step["grad_norm"] > 0 for step in vllm)


@in_vllm_process
def test_ppo_with_vllm_equals_ppo_with_hf(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"top_k": 1, "max_steps": 6, "learning_rate": 1e-2, "warmup_steps": 0}
    keys |= {"stop_token_ids": list(range(100, 130))}
    for name, engine in (("hf", {}), ("vllm", VLLM)):
        trainer = PPOTrainer(ppo_config(model, tmp_path / name, **keys, **engine))
        train_and_close(trainer)
    assert_same_numbers(tmp_path / "vllm", tmp_path / "hf", 1e-4)


@in_vllm_process
def test_gkd_with_vllm_equals_gkd_with_hf(model: str, tmp_path: Path) -> None:
    teacher = save_tiny(tmp_path / "teacher", seed=1, head_dim=32)
    keys: dict[str, Any] = {"top_k": 1, "max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0, "lmbda": 1.0}
    keys |= {"sft_alpha": 0.0, "teacher_model": teacher, "eval_dataset": None}
    for name, engine in (("hf", {}), ("vllm", VLLM)):
        trainer = GKDTrainer(gkd_config(model, tmp_path / name, **keys, **engine))
        train_and_close(trainer)
    assert_same_numbers(tmp_path / "vllm", tmp_path / "hf", 1e-4)


def engine_of(trainer: Any) -> Any:
    return trainer.generator.engine


def train_and_close(trainer: Any) -> None:
    trainer.train()
    if hasattr(engine_of(trainer), "close"):
        engine_of(trainer).close()


def whole(rollouts: Rollouts) -> list[tuple[int, ...]]:
    """Prompts with their completions."""
    pairs = zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True)
    return [(*prompt.tolist(), *completion.tolist()) for prompt, completion in pairs]


def greedy(policy: str, trainer: GRPOTrainer, sampling: Sampling) -> list[tuple[int, ...]]:
    """What a fresh engine makes of all rows."""
    prompts = prompts_of(trainer.config, trainer.rows, trainer.tokenizer)
    return whole(HfEngine(policy, trainer.tokenizer).generate(prompts, sampling, seed=0))


# --- workers that generate apart, and die


@pytest.fixture(scope="module")
def workers(ray_session: RaySession) -> Iterator[None]:
    with ray_session(apart(restarts=50)):
        yield


@pytest.mark.parametrize("dies", ["in generation 2", "while it receives"])
def test_workers_apart_equal_one_process_though_one_dies(
    dies: str, workers: None, off: LedgerTrainer, model: str, tmp_path: Path
) -> None:
    assert_same_run(trained(greedy_config(model, tmp_path), dies), off)


def test_generations_begun_ahead_are_the_same_every_time(
    workers: None, off_ahead: LedgerTrainer, off: LedgerTrainer, model: str, tmp_path: Path
) -> None:
    found = trained(greedy_config(model, tmp_path, max_staleness=1))
    assert found.ledger == off_ahead.ledger
    assert lines(tmp_path) == lines(Path(off_ahead.config.output_dir))
    assert final_bytes(tmp_path) == final_bytes(Path(off_ahead.config.output_dir))
    assert [line["staleness"] for line in lines(tmp_path)] == [0, 1, 1, 1]
    assert found.ledger[0] == off.ledger[0]
    assert all(ahead != fresh for ahead, fresh in zip(found.ledger[1:], off.ledger[1:], strict=True))


class SlowGenerator(Generator):
    """Whose generation 1 takes long."""

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, starts: Prompts | Tasks, sampling: Sampling, channel: Channel | None, *numbers: int) -> Rollouts:
        if numbers[0] == 1:
            time.sleep(8)
        return super().generate(starts, sampling, channel, *numbers)


@RayHelper.worker(group=ROLES)
class SlowTrainer(GRPOTrainer):
    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        self.generator = SlowGenerator(config, self.policy)


def test_weights_wait_for_a_generation_without_a_deadline(workers: None, model: str, tmp_path: Path) -> None:
    """And that is waiting for completions."""
    config = greedy_config(model, tmp_path, max_staleness=1, max_steps=3)
    with patch("trainers.parts.generator.TIMEOUT_S", 5.0):
        SlowTrainer(config).train()
    _, waited, _ = whole_lines(tmp_path)
    assert waited["time/generate"] > waited["time/sync"] > 0


def test_a_worker_dies_while_generations_are_under_way_and_no_row_is_lost_or_doubled(
    workers: None, off_ahead: LedgerTrainer, model: str, tmp_path: Path
) -> None:
    """What an earlier policy wrote is gone: the policy as it is writes in its place."""
    config = greedy_config(model, tmp_path, max_staleness=1)
    found = trained(config, "in generation 2")
    assert prompts_learned(found.ledger, config) == prompts_learned(off_ahead.ledger, config)
    assert found.ledger[:2] == off_ahead.ledger[:2]
    assert found.ledger[2] != off_ahead.ledger[2]
    assert [line["staleness"] for line in lines(tmp_path)] == [0, 1, 0, 1]


def test_vllm_workers_apart_equal_one_process_though_one_dies(
    workers: None, off: LedgerTrainer, model: str, tmp_path: Path
) -> None:
    """An engine has nothing to do with those of others: the dead worker alone is replaced."""
    trainer = LedgerTrainer(greedy_config(model, tmp_path, **VLLM))
    (tmp_path / "dies").write_text("in generation 1")
    survivor, dying = trainer.pid()
    trainer.train()
    found = trainer.pid()
    trainer.close_engine()
    assert found[0] == survivor
    assert found[1] != dying
    assert_same_run(trainer, off, atol=1e-4)


# --- generations begun ahead


@contextmanager
def apart_here() -> Iterator[None]:
    """Inside, roles are apart, all in this process."""
    with without_runtime(), RayHelper.session(apart(), runtime="inprocess"):
        yield


def test_a_queue_of_generations_is_filled_again_when_its_last_is_needed(model: str, tmp_path: Path) -> None:
    """Learning from the others waits for no further generation."""
    queued: list[int] = []

    def learn(trainer: GRPOTrainer, chunk: Samples, generation: Samples) -> Metrics:
        queued.append(len(trainer.ahead))
        return GRPOTrainer.learn(trainer, chunk, generation)

    with apart_here(), patch.object(LedgerTrainer, "learn", learn):
        trainer = LedgerTrainer(greedy_config(model, tmp_path, max_staleness=3, max_steps=9))
        trainer.train()
    assert queued == [3, 2, 1, 3, 2, 1, 2, 1, 0]
    assert [line["staleness"] for line in lines(tmp_path)] == [0, 1, 2, 3, 1, 2, 3, 1, 2]


def test_the_ratio_is_to_the_policy_that_wrote_the_tokens(model: str, tmp_path: Path) -> None:
    """With no room for the ratio it is clipped, but where the policy that learns is the one that wrote."""
    with apart_here():
        trained(greedy_config(model, tmp_path, max_staleness=1, epsilon=1e-3))
    clipped = [line["clip_ratio/region_mean"] for line in lines(tmp_path)]
    assert clipped[0] == 0.0
    assert min(clipped[1:]) > 0.1


def test_the_policy_is_not_asked_for_the_ratio_to_another_one(model: str, tmp_path: Path) -> None:
    """The engine has given the numbers of the one that wrote the tokens: a pass over them would be for nothing."""
    keys: dict[str, Any] = {"num_iterations": 2, "max_steps": 2}
    with apart_here(), patch.object(FsdpBackend, "token_logps", side_effect=AssertionError("asked")):
        trained(greedy_config(model, tmp_path / "ahead", max_staleness=1, **keys))
        with pytest.raises(AssertionError, match="asked"):
            trained(greedy_config(model, tmp_path / "on policy", **keys))


def test_a_resumed_run_with_generations_ahead_loses_and_doubles_no_row(
    off_ahead: LedgerTrainer, model: str, tmp_path: Path
) -> None:
    config = greedy_config(model, tmp_path, max_staleness=1, save_steps=2, resume_from_checkpoint="auto")
    with apart_here():
        parted = LedgerTrainer(config)
        with interrupted_after(3), pytest.raises(KeyboardInterrupt):
            parted.train()
        resumed = trained(config)
    rows = prompts_learned(off_ahead.ledger, config)
    assert len({prompt for step in rows[:3] for prompt in step}) == 12  # an epoch
    assert prompts_learned(parted.ledger, config) == rows[:3]
    assert prompts_learned(resumed.ledger, config) == rows[2:]
    assert [line["staleness"] for line in lines(tmp_path)] == [0, 1, 0, 1]


def test_generations_ahead_need_devices_of_their_own(model: str, tmp_path: Path) -> None:
    config = greedy_config(model, tmp_path, max_staleness=1)
    with pytest.raises(ConfigError, match="max_staleness=1 generates while the policy is trained"):
        GRPOTrainer.check(config, None)
    together = {"all": {"device": "CPU", "ranks": 2, "workers": ROLES}}
    with pytest.raises(ConfigError, match="Give role rollout a group with its own devices"):
        GRPOTrainer.check(config, placement(GRPOTrainer, greedy_config(model, tmp_path, device_groups=together)))
    GRPOTrainer.check(config, placement(GRPOTrainer, greedy_config(model, tmp_path, device_groups=apart())))


# --- torchrun


def by_processes(model: str, folder: Path) -> None:
    """What torchrun runs on each of three processes: the first trains, the others generate."""
    groups = {
        "learner": {"device": "GPU", "ranks": [0], "workers": LEARNER},  # invented ones: CPUs have no ranks
        "actors": {"device": "GPU", "ranks": [1, 2], "workers": ["rollout"]},
    }
    with RayHelper.session(groups, runtime="torchrun"):
        trained(greedy_config(model, folder / "fresh"))
        trained(greedy_config(model, folder / "ahead", max_staleness=1))


def drawn_apart(line: dict[str, Any]) -> dict[str, Any]:
    """What a step logs, without what compares the engine's log-probabilities with the policy's."""
    return {name: value for name, value in line.items() if not name.startswith("sampling/")}


def test_processes_of_torchrun_apart_equal_one_process_bit_for_bit(
    off: LedgerTrainer, off_ahead: LedgerTrainer, model: str, tmp_path: Path
) -> None:
    done = torchrun(3, "-m", __name__, model, str(tmp_path), cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    for name, expected in (("fresh", off), ("ahead", off_ahead)):
        found, right = lines(tmp_path / name), lines(Path(expected.config.output_dir))
        assert list(map(drawn_apart, found)) == list(map(drawn_apart, right))
        for line, other in zip(found, right, strict=True):  # batches of other sizes round otherwise
            assert line == pytest.approx(other, abs=1e-6)
        assert final_bytes(tmp_path / name) == final_bytes(Path(expected.config.output_dir))


if __name__ == "__main__":
    by_processes(sys.argv[1], Path(sys.argv[2]))
