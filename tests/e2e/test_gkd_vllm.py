"""A teacher that vLLM hosts answers as one of transformers does, wherever it lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper import ConfigError, RayHelper
from tests.conftest import RaySession
from tests.e2e.runs import gkd_config, lines, separate
from tests.e2e.test_gkd import APART, TOGETHER, completed_by_teacher, gradients_seen, seven_samples
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import TopLogps
from trainers.cli import load_config, placement
from trainers.gkd.config import GKDConfig
from trainers.gkd.samples import DistillationSamples
from trainers.gkd.teacher import GKDTeacher, VllmTeacher, teacher_settings
from trainers.gkd.trainer import GKDTrainer

ROOT = Path(__file__).resolve().parents[2]
VLLM = pytest.mark.xdist_group("vllm")
KEYS: dict[str, Any] = {"gkd_logits_topk": 8, "temperature": 0.9, "sft_alpha": 0.0, "eval_dataset": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model, wider, whose embeddings are padded to four tokens more; no narrower head suits vLLM."""
    settings: dict[str, Any] = {"hidden_size": 96, "head_dim": 32, "vocab_size": 264}
    return save_tiny(tmp_path_factory.mktemp("teacher"), seed=1, **settings)


@RayHelper.worker(group=TOGETHER)
class ClosingTrainer(GKDTrainer):
    """Its workers may outlive it."""

    @RayHelper.function(group="teacher")
    def close_teacher(self) -> None:
        close(self.teacher)


def close(teacher: GKDTeacher) -> None:
    engine: Any = teacher.engine
    engine.close()


@contextmanager
def built(config: GKDConfig) -> Iterator[GKDTrainer]:
    """A trainer with all that it needs; the teacher's engine is closed afterwards."""
    trainer = GKDTrainer(config)
    trainer.build(10)
    try:
        yield trainer
    finally:
        if isinstance(trainer.teacher.backend, VllmTeacher):
            close(trainer.teacher)


# What it answers


@VLLM
def test_a_step_is_the_one_with_a_teacher_of_transformers(model: str, teacher: str, tmp_path: Path) -> None:
    """Longest sequence and tokens that the student lacks included; with the others as a tail and without."""
    cases = [seven_samples(teacher_prompts=own) for own in (False, True)]
    longest = max(int(samples.as_teacher_sequences().input_ids.lengths.max()) for samples in cases)
    exactly = {"max_model_len": longest, "max_num_seqs": 4}  # room for the longest, and not for a token more
    keys = {"teacher_model": teacher, "lmbda": 1.0, **KEYS}
    config = gkd_config(model, tmp_path, teacher_engine="vllm", teacher_engine_kwargs=exactly, **keys)
    with built(config) as trainer:
        assert not hasattr(trainer.teacher.built, "module")  # no model of a training framework
        answers = [trainer.asked(samples).result() for samples in cases]
    for add_tail in (True, False):
        hf = gkd_config(model, tmp_path, gkd_topk_add_tail=add_tail, **keys)
        for samples, answer in zip(cases, answers, strict=True):
            found, gradients = step(hf, samples, answer)
            expected, expected_gradients = step(hf, samples, None)
            assert found == pytest.approx(expected, abs=1e-4)
            assert min(found["loss"], found["grad_norm"]) > 0.01
            for name, gradient in expected_gradients.items():
                torch.testing.assert_close(gradients[name], gradient, atol=1e-4, rtol=1e-4)


def step(
    config: GKDConfig, samples: DistillationSamples, answer: TopLogps | None
) -> tuple[dict[str, float], dict[Any, torch.Tensor]]:
    """Numbers and gradients of one step on an answer; None: on that of the teacher that the configuration names."""
    with built(config) as trainer:
        own = trainer.asked(samples).result()
        assert bool((own.ids.values >= 260).any()), "no token that the student lacks"
        gradients: dict[Any, torch.Tensor] = {}
        with gradients_seen(gradients):
            metrics = trainer.learn(samples, answer or own, sft_alpha=0.0).values()
    return {name: metrics[name] for name in ("loss", "grad_norm", "teacher_agreement")}, gradients


@VLLM
def test_it_completes_prompts_of_its_own_with_the_engine_that_scores(model: str, teacher: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a bee", "teacher_prompt": f"{k} no one"} for k in range(3)]
    config = gkd_config(
        model, tmp_path, teacher_model=teacher, dataset=rows, seq_kd=True, lmbda=0.0, **KEYS | {"temperature": 1e-3},
        teacher_engine="vllm", teacher_engine_kwargs={"max_model_len": 64},
    )  # fmt: skip
    with built(config) as trainer:
        samples = completed_by_teacher(trainer)
        answer = trainer.asked(samples).result()
    tokenizer, other = tiny_tokenizer(), FsdpBackend(teacher).module
    for k in range(3):
        ids = tokenizer(rows[k]["teacher_prompt"])["input_ids"]
        greedy = other.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist()
        assert samples.as_teacher_sequences().input_ids[k].tolist() == greedy
    targets = samples.input_ids.values[samples.target_mask.values]
    assert np.array_equal(answer.ids.values[:, 0], targets)


def test_on_devices_of_its_own_it_teaches_what_a_teacher_of_transformers_would(
    model: str, teacher: str, tmp_path: Path, ray_session: RaySession
) -> None:
    keys = {"teacher_model": teacher, "lmbda": 0.5, "max_steps": 3, **KEYS}
    GKDTrainer(gkd_config(model, tmp_path / "hf", **keys)).train()
    keys |= {"teacher_engine": "vllm", "teacher_engine_kwargs": {"max_model_len": 2560}}
    with ray_session(separate()):
        trainer = ClosingTrainer(gkd_config(model, tmp_path / "vllm", **keys))
        trainer.train()
        trainer.close_teacher()
    expected, found = lines(tmp_path / "hf"), lines(tmp_path / "vllm")
    assert [line["on_policy"] for line in found] == [line["on_policy"] for line in expected]
    np.testing.assert_allclose([line["loss"] for line in found], [line["loss"] for line in expected], atol=1e-3)


# Where it lives


def test_an_offloaded_engine_is_awake_when_it_is_asked_and_only_then(
    model: str, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no vLLM on a CPU that sleeps, so this one only takes notes."""
    events: list[str] = []

    class Notes:
        def __init__(self, *_: Any, sleep_level: int, engine_kwargs: dict[str, Any], patches: bool, **__: Any) -> None:
            events.append(f"level {sleep_level}, patches {patches}")
            self.truly = FsdpBackend(teacher)

        def top_logps(self, *args: Any, **kwargs: Any) -> Any:
            events.append("ask")
            return self.truly.top_logps(*args, micro_batch_size=8, **kwargs)

        def sleep(self) -> None:
            events.append("sleep")

        def wake(self, part: str) -> None:
            events.append(f"wake {part}")

    monkeypatch.setattr("trainers.rollout.vllm.engine.VllmEngine", Notes)
    monkeypatch.setattr("trainers.gkd.teacher.default_device", lambda: torch.device("cuda"))
    config = gkd_config(
        model, tmp_path, teacher_model=teacher, teacher_engine="vllm", offload_teacher_model=True, lmbda=0.0,
        max_steps=1, vllm_patches=False, **KEYS,
    )  # fmt: skip
    GKDTrainer(config).train()
    assert events == ["level 1, patches False", "sleep", "wake weights", "wake kv_cache", "ask", "sleep"]


def test_its_engine_has_what_the_loss_needs_and_then_what_the_user_says(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gkd_config(model, tmp_path, teacher_model=model, teacher_engine="vllm", **KEYS)
    found = [teacher_settings(config, shares_devices=shares) for shares in (True, False)]
    assert [(one["gpu_memory_utilization"], one["max_logprobs"]) for one in found] == [(0.4, 8), (0.9, 8)]
    writing = teacher_settings(replace(config, seq_kd=True), shares_devices=False)
    assert found[0]["enforce_eager"]
    assert "enforce_eager" not in writing  # the engine knows: on a CPU nothing is compiled
    more = replace(config, teacher_engine_kwargs={"max_logprobs": 20, "gpu_memory_utilization": 0.5})
    settings = teacher_settings(more, shares_devices=False)
    assert (settings["gpu_memory_utilization"], settings["max_logprobs"]) == (0.5, 20)
    assert "max_num_batched_tokens" not in settings
    monkeypatch.setattr("trainers.gkd.teacher.default_device", lambda: torch.device("cuda"))
    assert teacher_settings(config, shares_devices=False)["max_num_batched_tokens"] == 2048


# Mistakes


VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "nobody": ({"teacher_model": None, "tuner_type": "lora"}, "is for a teacher_model, and there is none"),
    "whole vocabulary": ({"gkd_logits_topk": None}, "set gkd_logits_topk"),
    "arguments of another": ({"teacher_model_init_kwargs": {"x": 1}}, "vLLM takes teacher_engine_kwargs"),
    "too few": ({"teacher_engine_kwargs": {"max_logprobs": 7}}, "max_logprobs=7 is below gkd_logits_topk=8"),
    "too short": ({"teacher_engine_kwargs": {"max_model_len": 1023}}, "max_model_len=1023 is below max_length=1024"),
    "without vLLM": ({"teacher_engine": "hf", "teacher_engine_kwargs": {"seed": 1}}, "is for teacher_engine: vllm"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_without_meaning_is_refused(name: str, model: str, tmp_path: Path) -> None:
    keys, message = VALUES[name]
    with pytest.raises(ConfigError, match=message):
        gkd_config(model, tmp_path, **{"teacher_model": model, "teacher_engine": "vllm", **KEYS} | keys)


def test_every_number_of_log_probabilities_is_enough(model: str, tmp_path: Path) -> None:
    keys = {"teacher_model": model, "teacher_engine": "vllm", "teacher_engine_kwargs": {"max_logprobs": -1}}
    assert gkd_config(model, tmp_path, **keys, **KEYS).teacher_engine == "vllm"


SLEEPING: dict[str, Any] = {"rollout_engine": "vllm", "sleep_level": 1}
LEARNER: dict[str, Any] = {"device": "GPU", "ranks": [0], "workers": ["train", "rollout"]}
GPUS: dict[str, Any] = {"all": LEARNER | {"workers": ["train", "rollout", "teacher"]}}
JUDGE: dict[str, Any] = {"learner": LEARNER, "judge": {"device": "CPU", "ranks": 1, "workers": ["teacher"]}}
WIDE: dict[str, Any] = {
    "learner": LEARNER,
    "judge": {"device": "GPU", "ranks": [1, 2, 3, 4], "workers": ["teacher"], "gpus_per_worker": 4},
}
PLACED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no field": ({"teacher_engine_kwargs": {"max_seqs": 1}}, None, r"^teacher_engine_kwargs: vLLM's EngineArgs has no"),
    "taken": ({"teacher_engine_kwargs": {"dtype": "half"}}, None, "^teacher_engine_kwargs may not hold 'dtype'"),
    "half of a worker": (
        {"teacher_engine_kwargs": {"tensor_parallel_size": 2}},
        None,
        "Give role teacher its own group",
    ),
    "does not divide": ({"teacher_engine_kwargs": {"tensor_parallel_size": 2}}, APART, "does not divide the 1 workers"),
    "no number": ({"teacher_engine_kwargs": {"tensor_parallel_size": "two"}}, None, "is not a number of workers"),
    "two of a process": (
        {"rollout_engine": "vllm"},
        GPUS,
        "^teacher_engine: vllm gives role teacher a vLLM engine in",
    ),
    "one of them for completions": ({"teacher_engine": "hf", "seq_kd": True, **SLEEPING}, GPUS, "^seq_kd gives role"),
    "sleeps on a CPU": ({"teacher_engine": "hf", "seq_kd": True, **SLEEPING}, JUDGE, "and role teacher is on a CPU"),
    "idle GPUs": ({"teacher_engine_kwargs": {"tensor_parallel_size": 2}}, WIDE, "a worker of role teacher has 4 GPUs"),
    "sampling": ({"seq_kd": True, "generation_kwargs": {"no_repeat_ngram_size": 2}}, None, "SamplingParams has no fie"),
}


@VLLM
@pytest.mark.parametrize("name", PLACED)
def test_what_its_engine_could_not_do_is_refused_before_anything_starts(
    name: str, model: str, teacher: str, tmp_path: Path
) -> None:
    keys, groups, message = PLACED[name]
    placed = {} if groups is None else {"device_groups": groups, "use_ray": True}
    config = gkd_config(model, tmp_path, **{"teacher_model": teacher, "teacher_engine": "vllm", **KEYS} | keys | placed)
    with pytest.raises(ConfigError, match=message):
        GKDTrainer.check(config, placement(GKDTrainer, config))


# The example


@VLLM
def test_the_example_trains_two_steps(
    model: str, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process and on a CPU, where no engine sleeps; the student's completions come from transformers."""
    monkeypatch.chdir(ROOT)
    small = {"model": model, "teacher_model": teacher, "max_steps": 2, "global_batch_size": 4, "dtype": "float32"}
    small |= {"rollout_engine": "hf", "vllm_max_model_len": "null", "max_completion_length": 6, "use_ray": "false"}
    arguments = [f"--{key}={value}" for key, value in {**small, "output_dir": tmp_path}.items()]
    config = load_config(GKDConfig, ["--config", "examples/gkd/vllm_teacher.yaml", *arguments])
    groups = placement(GKDTrainer, config)
    GKDTrainer.check(config, groups)
    assert groups is not None
    assert [group.roles for group in groups.groups] == [tuple(TOGETHER[:2]), ("teacher",)]
    trainer = GKDTrainer(config)
    trainer.train()
    assert isinstance(trainer.teacher.backend, VllmTeacher)
    close(trainer.teacher)
    assert [line["step"] for line in lines(tmp_path) if "loss" in line] == [1, 2]
