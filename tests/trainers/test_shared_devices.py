"""Policy and engine in two processes of one device: what makes room for what, in which order, and that nothing else is
different. The processes are simulated in this one, and the memory that makes room is that of the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError, DeviceGroups, RayHelper
from tests.e2e.runs import gkd_config, grpo_config, lines, ppo_config
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.offload import Offload
from trainers.batch import Rollouts
from trainers.cli import placement
from trainers.configuration.completion import CompletionConfig
from trainers.gkd import trainer as gkd
from trainers.gkd.teacher import shares_devices
from trainers.grpo import trainer as grpo
from trainers.parts import generator
from trainers.parts.checks import check_completions
from trainers.parts.engine import vllm_settings
from trainers.ppo import trainer as ppo
from trainers.rollout.hf.engine import HfEngine

KEYS: dict[str, Any] = {"eval_dataset": None, "max_steps": 2, "learning_rate": 0.1, "warmup_steps": 0}
ROOM: dict[str, Any] = {"sleep_level": 1, "offload_model": True, "offload_optimizer": True}
LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 2, "lora_target_modules": ["q_proj"]}
UNDER_TEST: dict[str, tuple[Any, Callable[..., Any], dict[str, Any]]] = {
    "grpo": (grpo.GRPOTrainer, grpo_config, {"generation_batch_size": 8, "num_iterations": 1}),
    "ppo": (ppo.PPOTrainer, ppo_config, {"num_mini_batches": 1, "num_ppo_epochs": 1}),
    "gkd": (gkd.GKDTrainer, gkd_config, {"lmbda": 1.0, "sft_alpha": 0.0}),
}


def beside(trainer: Any, **keys: Any) -> dict[str, Any]:
    """The engine in processes of its own on the device of everything else."""
    roles = [role for role in trainer.__rayhelper_roles__ if role != "rollout"]
    return {
        "policy": {"device": "GPU", "ranks": [0], "workers": roles},
        "engine": {"shares_devices_with": "policy", "workers": ["rollout"]} | keys,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What policy and engine do, in order. What the policy gives away is really away."""
    events: list[str] = []
    offload, reload = FsdpBackend.offload, FsdpBackend.reload

    def noted_offload(self: FsdpBackend, *, model: bool = True, optimizer: bool = True) -> None:
        events.extend(f"{name} away" for name, goes in (("model", model), ("optimizer", optimizer)) if goes)
        for weight in self.module.parameters():
            if not weight.untyped_storage().resizable():  # memory of a file cannot be given back
                weight.data = weight.data.clone()
        offload(self, model=model, optimizer=optimizer)

    def noted_reload(self: FsdpBackend) -> None:
        events.append("reload")
        reload(self)

    class NotingEngine(HfEngine):
        def generate(self, *args: Any, **settings: Any) -> Rollouts:
            events.append("generate")
            return super().generate(*args, **settings)

        def load_weights(self, named_weights: Iterable[Any], *, part: bool = False, version: int | None = None) -> None:
            events.append("part of the weights" if part else "weights")
            super().load_weights(named_weights, part=part, version=version)

        def sleep(self) -> None:
            events.append("sleep")

        def wake(self, part: str) -> None:
            events.append(f"wake {part}")

    def built(config: Any, path: str, tokenizer: Any, backend: Any, **_: Any) -> HfEngine:
        assert backend is None, "it has a process of its own"
        return NotingEngine(path, tiny_tokenizer())

    monkeypatch.setattr(FsdpBackend, "offload", noted_offload)
    monkeypatch.setattr(FsdpBackend, "reload", noted_reload)
    monkeypatch.setattr("trainers.backends.fsdp.backend.Offload", partial(Offload, "cpu"))
    monkeypatch.setattr(generator, "build_engine", built)
    for trainer, _, _ in UNDER_TEST.values():
        learn = trainer.learn

        def noted_learn(self: Any, *args: Any, learn: Any = learn, **settings: Any) -> Any:
            events.append("learn")
            return learn(self, *args, **settings)

        monkeypatch.setattr(trainer, "learn", noted_learn)
    return events


def train(name: str, model: str, folder: Path, **keys: Any) -> list[dict[str, float]]:
    """The steps of a run on one device in two processes."""
    trainer, config, own = UNDER_TEST[name]
    teacher = {"teacher_model": model} if name == "gkd" else {}
    with RayHelper.session(beside(trainer), runtime="inprocess"):
        trainer(config(model, folder, **KEYS | own | teacher | keys)).train()
    return [line for line in lines(folder) if "learning_rate" in line]


GENERATION = ["wake weights", "weights", "wake kv_cache", "generate", "sleep", "reload", "learn"]


@pytest.mark.parametrize("name", UNDER_TEST)
def test_each_makes_room_for_what_comes_next(name: str, events: list[str], model: str, tmp_path: Path) -> None:
    assert len(train(name, model, tmp_path, **ROOM)) == 2
    first = ["optimizer away", "wake weights", "weights", "model away", "wake kv_cache", "generate"]
    assert events == [*first, "sleep", "reload", "learn"] * 2


def test_what_nobody_asked_to_move_stays(events: list[str], model: str, tmp_path: Path) -> None:
    train("grpo", model, tmp_path)
    assert events == GENERATION * 2


@pytest.mark.parametrize(("level", "second"), [(1, "part of the weights"), (2, "weights")])
def test_an_engine_that_forgets_gets_all_weights_again(
    level: int, second: str, events: list[str], model: str, tmp_path: Path
) -> None:
    train("grpo", model, tmp_path, sleep_level=level, **LORA)
    assert [event for event in events if event.endswith("weights") and "wake" not in event] == ["weights", second]


def test_the_numbers_are_those_of_one_process(
    events: list[str], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = train("grpo", model, tmp_path / "two", **ROOM)
    monkeypatch.undo()
    grpo.GRPOTrainer(grpo_config(model, tmp_path / "one", **KEYS | UNDER_TEST["grpo"][2])).train()
    expected = [line for line in lines(tmp_path / "one") if "learning_rate" in line]
    for key in ("loss", "grad_norm", "reward", "completions/mean_length"):
        assert [line[key] for line in found] == [line[key] for line in expected], key
    assert found[0]["grad_norm"] > 0


# --- before anything starts


def completions(groups: dict[str, Any], **keys: Any) -> None:
    config = CompletionConfig(model="any", dataset="any", rollout_engine="vllm", **keys)
    check_completions(config, DeviceGroups.parse(groups))


def test_an_engine_on_shared_devices_may_sleep_and_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        completions(beside(grpo.GRPOTrainer), **ROOM)
    assert caplog.messages == []
    apart = beside(grpo.GRPOTrainer, shares_devices_with=None, device="GPU", ranks=[1])
    with caplog.at_level(logging.WARNING):
        completions(apart, **ROOM)
    assert "without effect: sleep_level, offload_model, offload_optimizer" in caplog.text


def test_engines_on_shared_devices_may_hold_one_model_together() -> None:
    groups = beside(grpo.GRPOTrainer)
    groups["policy"]["ranks"] = [0, 1]
    completions(groups, vllm_tensor_parallel_size=2)


@RayHelper.worker(group=["train", "rollout", "teacher"])
class Memory:
    @RayHelper.function(group="rollout", execute="first")
    def share_of_engine(self) -> Any:
        from trainers.parts.weights import is_beside

        config = CompletionConfig(model="any", dataset="any", rollout_engine="vllm")
        return vllm_settings(config, shares_devices=is_beside("train"))["gpu_memory_utilization"]

    @RayHelper.function(group="teacher", execute="first")
    def teacher_shares(self) -> bool:
        return shares_devices()


@pytest.mark.parametrize("shares", [True, False])
def test_an_engine_takes_less_of_a_device_on_which_a_policy_is_trained(shares: bool) -> None:
    devices = {"shares_devices_with": "policy"} if shares else {"device": "GPU", "ranks": 1}
    groups = {"policy": {"device": "GPU", "ranks": 1, "workers": ["train"]}}
    groups |= {role: {**devices, "workers": [role]} for role in ("rollout", "teacher")}
    with RayHelper.session(groups, runtime="inprocess"):
        memory = Memory()
        assert memory.share_of_engine() == (0.4 if shares else 0.9)
        assert memory.teacher_shares() is shares


def test_nothing_is_generated_ahead_on_the_devices_that_train(model: str, tmp_path: Path) -> None:
    keys = {"max_staleness": 1, "device_groups": beside(grpo.GRPOTrainer), **KEYS}
    config = grpo_config(model, tmp_path, num_iterations=1, **keys)
    with pytest.raises(ConfigError, match="Give role rollout a group with its own devices"):
        grpo.GRPOTrainer.check(config, placement(grpo.GRPOTrainer, config))


def test_a_teacher_in_a_process_of_its_own_makes_room_for_the_student(model: str, tmp_path: Path) -> None:
    groups = {"train": {"gpus": 1}, "rollout": {"gpus": 1}, "teacher": {"shares_devices_with": "train"}}
    keys = {"teacher_model": model, "gkd_logits_topk": 4, "offload_teacher_model": True, **KEYS}
    config = gkd_config(model, tmp_path, device_groups=groups, **keys)
    gkd.check_placement(config, placement(gkd.GKDTrainer, config))
    groups["teacher"] = {"gpus": 1}
    config = gkd_config(model, tmp_path, device_groups=groups, **keys)
    with pytest.raises(ConfigError, match="offload_teacher_model frees memory"):
        gkd.check_placement(config, placement(gkd.GKDTrainer, config))
