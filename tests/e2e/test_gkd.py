"""GKD: a student equal to its teacher has nothing to learn, wherever the teacher lives; any other learns from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rayhelper import ConfigError, RayHelper
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import final_bytes, gkd_config, interrupted_after, lines, separate, together
from tests.golden.tiny import save_tiny, tiny_model, tiny_tokenizer
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Prompts, Ragged
from trainers.cli import load_config, placement, run
from trainers.gkd.config import GKDConfig
from trainers.gkd.loss import TopDivergence
from trainers.gkd.samples import DistillationSamples, samples_of
from trainers.gkd.trainer import GKDTrainer, source_of
from trainers.gkd.vocabularies import common_vocab_size
from trainers.losses.distillation import generalized_jsd, topk_jsd, topk_logps
from trainers.metrics import Metrics
from trainers.parts.engine import sampling_of
from trainers.parts.tokenizer import load_tokenizer
from trainers.plugins import load_plugins, resolve_model

ROOT = Path(__file__).resolve().parents[2]
Step = tuple[dict[str, float], dict[str, torch.Tensor]]  # the metrics of one optimizer step, and the weights after it
TOGETHER = ["train", "rollout", "teacher"]
APART = {role: {"device": "CPU", "ranks": 1, "workers": [role]} for role in TOGETHER}
TEACHERS: dict[str, dict[str, Any]] = {  # how the teacher is asked
    "whole vocabulary": {},
    "top k and their tail": {"gkd_logits_topk": 5},
    "top k renormalised": {"gkd_logits_topk": 5, "gkd_topk_add_tail": False},
}
PROMPTS, RESPONSES = [2, 9, 4, 1, 6, 3, 5], [13, 1, 7, 2, 10, 5, 1]  # tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model, wider than the student."""
    return save_tiny(tmp_path_factory.mktemp("teacher"), seed=1, hidden_size=96)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model, whose embeddings are padded to four tokens more."""
    return save_tiny(tmp_path_factory.mktemp("padded"), seed=1, vocab_size=264)


def seven_samples(teacher_prompts: bool = False) -> DistillationSamples:
    """Random tokens; the teacher's prompts, if it has its own, are longer or shorter than the student's."""
    random = np.random.default_rng(5)
    responses = Ragged.split(random.integers(4, 260, sum(RESPONSES)), RESPONSES)
    prompts = [random.integers(4, 260, length) for length in PROMPTS]
    others = [random.integers(4, 260, length) for length in reversed(PROMPTS)] if teacher_prompts else None
    return samples_of(prompts, responses, others)


def built(config: GKDConfig) -> GKDTrainer:
    trainer = GKDTrainer(config)
    trainer.build(10)
    return trainer


def one_step(config: GKDConfig, samples: DistillationSamples) -> Step:
    """One optimizer step, over the workers there are."""
    trainer = built(config)
    metrics = trainer.learn(samples, trainer.asked(samples), config.sft_alpha)
    trainer.policy.export(Path(config.output_dir))
    return metrics.values(), load_file(Path(config.output_dir) / "model.safetensors")


def completed_by_teacher(trainer: GKDTrainer) -> DistillationSamples:
    """The prompts of all rows, as the teacher of a built trainer completes them."""
    run: Any = SimpleNamespace(phase=lambda name: contextlib.nullcontext(), step=0)
    started = trainer.started("teacher", np.arange(len(trainer.rows)), 0, run)
    return samples_of(started.prompts, started.pending.rollouts.result().completion_ids, started.teacher_prompts)


# Nothing to learn


@pytest.mark.parametrize(("name", "own_prompts"), [*zip(TEACHERS, (False, True, True), strict=True)])
def test_a_student_equal_to_its_teacher_has_a_loss_and_a_gradient_of_exactly_zero(
    name: str, own_prompts: bool, model: str, tmp_path: Path
) -> None:
    """The teacher is shown the same prompt, or one of its own that says the same."""
    samples = seven_samples()
    if own_prompts:
        own = {"teacher_input_ids": samples.input_ids, "teacher_target_mask": samples.target_mask}
        samples = DistillationSamples(samples.input_ids, samples.target_mask, **own)
    for beta in (0.0, 0.4, 1.0):
        keys: dict[str, Any] = {"beta": beta, "sft_alpha": 0.0, "weight_decay": 0.0, **TEACHERS[name]}
        found, _ = one_step(gkd_config(model, tmp_path, teacher_model=model, **keys), samples)
        assert (found["loss"], found["grad_norm"], found["teacher_agreement"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("topk", [None, 5])
def test_an_untrained_adapter_and_a_student_shown_its_own_prompt_have_nothing_to_learn(
    topk: int | None, model: str, tmp_path: Path
) -> None:
    same: dict[str, Any] = {"prompt": "two deer", "teacher_prompt": "two deer", "completion": " near the sea"}
    for keys in ({"tuner_type": "lora"}, {"tuner_type": "full", "dataset": [same]}):
        config = gkd_config(
            model, tmp_path, eval_dataset=None, lmbda=0.0, gkd_logits_topk=topk, sft_alpha=0.0, max_steps=1, **keys
        )
        found = GKDTrainer(config).train()
        assert (found["loss"], found["grad_norm"], found["on_policy"]) == (0.0, 0.0, 0.0)


def test_a_teacher_on_its_own_devices_finds_nothing_wrong_with_its_equal(model: str, tmp_path: Path) -> None:
    with without_runtime(), RayHelper.session(APART, runtime="inprocess"):
        config = gkd_config(model, tmp_path, teacher_model=model, gkd_logits_topk=5, sft_alpha=0.0, max_steps=1)
        found = GKDTrainer(config).train()
    assert (found["loss"], found["grad_norm"]) == (0.0, 0.0)


# Against plain loops


def plain_gradient(
    model: str, teacher: str, samples: DistillationSamples, config: GKDConfig, shift: int = 0
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and its gradient by full logits, a sample at a time; ``shift``: the teacher is read so far off."""
    student, other = AutoModelForCausalLM.from_pretrained(model), AutoModelForCausalLM.from_pretrained(teacher)
    seen = samples.as_teacher_sequences()
    options: dict[str, Any] = {"beta": config.beta, "temperature": config.temperature}
    loss = torch.zeros(())
    for row in range(len(samples)):
        ids, theirs = torch.tensor(samples.input_ids[row]), torch.tensor(seen.input_ids[row])
        count = int(samples.target_mask[row].sum())
        logits_TV = student(ids[None]).logits[0][-count - 1 : -1, :260]
        with torch.no_grad():
            teacher_TV = other(theirs[None]).logits[0][:, :260].roll(shift, 0)[-count - 1 : -1]
        if config.gkd_logits_topk is None:
            loss = loss + generalized_jsd(logits_TV, teacher_TV, **options).sum()
        else:
            top = topk_logps(teacher_TV, config.gkd_logits_topk, temperature=config.temperature)
            settings = {"add_tail": config.gkd_topk_add_tail, "teacher_temperature": config.temperature}
            loss = loss + topk_jsd(logits_TV, *top, **options, **settings).sum()
        cross_entropy = torch.nn.functional.cross_entropy(student(ids[None]).logits[0][-count - 1 : -1], ids[-count:])
        loss = loss + config.sft_alpha * count * cross_entropy
    loss = loss / samples.num_targets
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in student.named_parameters()}


@contextmanager
def gradients_seen(found: dict[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the gradients of every step are kept as they are before clipping."""
    clip = torch.nn.utils.clip_grad_norm_

    def keep(weights: Any, *args: Any) -> Any:
        weights = list(weights)
        found.update(enumerate(weight.grad.clone() for weight in weights))  # type: ignore[arg-type]
        return clip(weights, *args)

    with patch.object(torch.nn.utils, "clip_grad_norm_", keep):
        yield


@pytest.mark.parametrize(("name", "own_prompts"), [*zip(TEACHERS, (True, False, True), strict=True)])
def test_a_step_has_the_gradient_of_plain_autograd_and_not_of_a_teacher_read_one_token_off(
    name: str, own_prompts: bool, model: str, teacher: str, padded: str, tmp_path: Path
) -> None:
    teacher = padded if name == "whole vocabulary" else teacher
    config = gkd_config(model, tmp_path, teacher_model=teacher, sft_alpha=0.3, beta=0.3, **TEACHERS[name])
    samples = seven_samples(own_prompts)
    seen: dict[Any, torch.Tensor] = {}
    trainer = built(config)
    with gradients_seen(seen):
        found = trainer.learn(samples, trainer.asked(samples), config.sft_alpha).values()
    loss, gradients = plain_gradient(model, teacher, samples, config)
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["divergence"] + 0.3 * found["sft_loss"] == pytest.approx(found["loss"])
    for mine, expected in zip(seen.values(), gradients.values(), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)
    for shift in (-1, 1):
        _, off = plain_gradient(model, teacher, samples, config, shift)
        assert max(float((off[name] - weight).abs().max()) for name, weight in gradients.items()) > 1e-3


def test_tokens_that_the_student_lacks_are_left_out_of_the_teachers_answer() -> None:
    student_NV = torch.randn(2, 260, generator=torch.Generator().manual_seed(0))
    ids_NK, logps_NK = torch.tensor([[3, 261, 9], [263, 4, 5]]), torch.tensor([[-0.5, -1.5, -2.5], [-0.7, -1.2, -3.0]])
    settings: dict[str, Any] = {"beta": 0.3, "temperature": 1.3, "add_tail": False}
    found = TopDivergence(**settings, vocab_size=260)(student_NV, ids_NK, logps_NK)[0]
    for row, kept in ((0, [0, 2]), (1, [1, 2])):
        alone = (student_NV[row : row + 1], ids_NK[row : row + 1, kept], logps_NK[row : row + 1, kept])
        torch.testing.assert_close(found[row], topk_jsd(*alone, **settings, teacher_temperature=1.3)[0])


def test_a_teacher_whose_targets_are_others_is_refused() -> None:
    samples = seven_samples(teacher_prompts=True)
    assert samples.teacher_input_ids is not None
    shifted = Ragged(np.roll(samples.teacher_input_ids.values, 1), samples.teacher_input_ids.offsets)
    with pytest.raises(ValueError, match="the same tokens in the same order"):
        replace(samples, teacher_input_ids=shifted)


# However it is cut and placed


CUTS: dict[str, dict[str, Any]] = {
    "one by one": {"per_device_train_batch_size": 1},
    "two at once": {"per_device_train_batch_size": 2},
    "padding-free": {"per_device_train_batch_size": 3, "padding_free": True},
    "by tokens": {"token_budget": 30},
}


def step_keys(name: str) -> dict[str, Any]:
    # Adam divides gradients by their own size: an epsilon above their rounding errors keeps those from growing
    return {"sft_alpha": 0.3, "warmup_steps": 0, "adam_epsilon": 1e-4, "beta": 0.3, **TEACHERS[name]}


@pytest.fixture(scope="module")
def at_once(model: str, teacher: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Step]:
    """One step on all samples at once, in this process, each way of asking the teacher."""
    steps = {}
    for name in TEACHERS:
        keys = {"per_device_train_batch_size": 8, **step_keys(name)}
        config = gkd_config(model, tmp_path_factory.mktemp("at_once"), teacher_model=teacher, **keys)
        steps[name] = one_step(config, seven_samples(teacher_prompts=True))
    return steps


def assert_same_step(found: Step, expected: Step, where: str) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-6), where
    furthest = {name: float((found[1][name] - weight).abs().max()) for name, weight in expected[1].items()}
    assert max(furthest.values()) < 1e-6, f"{where}: {furthest}"


@pytest.mark.parametrize("name", TEACHERS)
def test_cutting_a_step_does_not_change_it(
    name: str, at_once: dict[str, Step], model: str, teacher: str, tmp_path: Path
) -> None:
    untrained = load_file(Path(model) / "model.safetensors")
    assert max(float((weight - untrained[key]).abs().max()) for key, weight in at_once[name][1].items()) > 1e-3
    for cut, keys in CUTS.items():
        config = gkd_config(model, tmp_path, teacher_model=teacher, **step_keys(name) | keys)
        assert_same_step(one_step(config, seven_samples(teacher_prompts=True)), at_once[name], cut)


def test_a_step_over_four_workers_is_the_step_of_one_though_one_has_nothing(
    at_once: dict[str, Step], model: str, teacher: str, tmp_path: Path, ray_session: RaySession
) -> None:
    """Student and teacher lie in shards, so that every worker must run both, equally often."""
    seven = seven_samples(teacher_prompts=True)
    of_three, of_seven = "whole vocabulary", "top k and their tail"

    def config(name: str, size: int) -> Any:
        keys = {"teacher_model": teacher, "per_device_train_batch_size": size}
        return gkd_config(model, tmp_path, **keys, **step_keys(name))

    expected = one_step(config(of_three, 8), seven[:3])
    with ray_session(together(4)):
        assert_same_step(one_step(config(of_three, 1), seven[:3]), expected, "three samples")
        assert_same_step(one_step(config(of_seven, 1), seven), at_once[of_seven], "seven samples")


RUNS: dict[str, dict[str, Any]] = {
    "whole": {},
    "top": {"gkd_logits_topk": 6, "seq_kd": True, "sft_alpha": 0.0, "eval_steps": 2},
}


@pytest.fixture(scope="module")
def off(model: str, teacher: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole runs in this process."""
    folder = tmp_path_factory.mktemp("off")
    for name, keys in RUNS.items():
        GKDTrainer(gkd_config(model, folder / name, teacher_model=teacher, **keys)).train()
        sources = [line["on_policy"] for line in lines(folder / name) if "on_policy" in line]
        assert set(sources) == {0.0, 1.0}
    return folder


def test_one_ray_worker_equals_ray_off_bit_for_bit(
    off: Path, model: str, teacher: str, tmp_path: Path, ray_session: RaySession
) -> None:
    with ray_session(together(1)):
        GKDTrainer(gkd_config(model, tmp_path, teacher_model=teacher, **RUNS["whole"])).train()
    assert lines(tmp_path) == lines(off / "whole")
    assert final_bytes(tmp_path) == final_bytes(off / "whole")


def test_roles_on_devices_of_their_own_equal_roles_that_share_one(
    off: Path, model: str, teacher: str, tmp_path: Path
) -> None:
    """The student's weights, its completions and the teacher's answers go from worker to worker; on Ray: below."""
    with without_runtime(), RayHelper.session(APART, runtime="inprocess"):
        GKDTrainer(gkd_config(model, tmp_path, teacher_model=teacher, **RUNS["top"])).train()
    assert lines(tmp_path) == lines(off / "top")
    assert final_bytes(tmp_path) == final_bytes(off / "top")


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_one_that_never_stopped(
    name: str, off: Path, model: str, teacher: str, tmp_path: Path
) -> None:
    keys = {"teacher_model": teacher, "save_steps": 2, **RUNS[name]}
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        GKDTrainer(gkd_config(model, tmp_path, **keys)).train()
    GKDTrainer(gkd_config(model, tmp_path, **keys, resume_from_checkpoint="auto")).train()
    assert lines(tmp_path) == lines(off / name)
    assert final_bytes(tmp_path) == final_bytes(off / name)


def test_a_merged_adapter_says_what_student_and_adapter_say(model: str, teacher: str, tmp_path: Path) -> None:
    config = gkd_config(model, tmp_path / "run", teacher_model=teacher, tuner_type="lora", learning_rate=3e-2)
    trainer = GKDTrainer(config)
    trainer.train()
    samples = seven_samples()
    merged = FsdpBackend(tmp_path / "run" / "final").token_logps(samples, micro_batch_size=2)
    adapted = trainer.policy.built.token_logps(samples, micro_batch_size=2)
    before = FsdpBackend(model).token_logps(samples, micro_batch_size=2)
    np.testing.assert_allclose(merged.values, adapted.values, atol=1e-5)
    assert np.abs(merged.values - before.values).max() > 1e-2


def test_an_offloaded_teacher_is_there_when_it_is_asked_and_only_then(
    model: str, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing moves, so the moves are written down in between of what needs the teacher."""
    events: list[str] = []

    def noted(name: str) -> None:
        method = getattr(FsdpBackend, name)

        def note(backend: FsdpBackend, *args: Any, **kwargs: Any) -> Any:
            if backend.optimizer is None or name == "step":
                events.append(name)
            return method(backend, *args, **kwargs)

        monkeypatch.setattr(FsdpBackend, name, note)

    for name in ("offload", "reload", "target_features", "top_logps", "step"):
        noted(name)
    keys = {"lmbda": 1.0, "sft_alpha": 0.0, "max_steps": 1, "eval_dataset": None, "per_device_train_batch_size": 4}
    for topk, expected in (
        (None, ["offload", "reload", "step", "target_features", "offload"]),
        (3, ["offload", "reload", "top_logps", "offload", "step"]),
    ):
        events.clear()
        config = gkd_config(
            model, tmp_path, teacher_model=teacher, offload_teacher_model=True, gkd_logits_topk=topk, **keys
        )
        GKDTrainer(config).train()
        assert events == expected


# Whose completions


def test_steps_take_the_students_completions_with_probability_lmbda() -> None:
    for lmbda, seq_kd in ((0.0, False), (0.3, True), (0.7, False), (1.0, False)):
        config = GKDConfig(model="m", dataset="d", teacher_model="t", lmbda=lmbda, seq_kd=seq_kd)
        sources = [source_of(config, step) for step in range(2000)]
        assert sources.count("student") / 2000 == pytest.approx(lmbda, abs=0.03)
        assert set(sources) <= {"student", "teacher" if seq_kd else "dataset"}


def test_the_teacher_completes_its_own_prompts(model: str, teacher: str, tmp_path: Path) -> None:
    """Nearly greedy, so that what was drawn is what it likes best; the student is shown the same completion."""
    rows = [{"prompt": "a bee", "teacher_prompt": f"{k} no one"} for k in range(3)]
    config = gkd_config(
        model, tmp_path, teacher_model=teacher, dataset=rows, eval_dataset=None, seq_kd=True, sft_alpha=0.0, lmbda=0.0,
        temperature=1e-3,
    )  # fmt: skip
    trainer = built(config)
    samples = completed_by_teacher(trainer)
    tokenizer, other = tiny_tokenizer(), AutoModelForCausalLM.from_pretrained(teacher)
    for k in range(3):
        ids = tokenizer(rows[k]["teacher_prompt"])["input_ids"]
        greedy = other.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist()
        seen = samples.as_teacher_sequences()
        assert seen.input_ids[k].tolist() == greedy
        assert samples.input_ids[k].tolist() == tokenizer("a bee")["input_ids"] + greedy[len(ids) :]


class Ledger(GKDTrainer):
    """What each step learns from, as lists of token ids."""

    def learn(self, samples: DistillationSamples, answer: Any, sft_alpha: float) -> Metrics:
        self.__dict__.setdefault("ledger", []).append([ids.tolist() for ids in samples.input_ids])
        return super().learn(samples, answer, sft_alpha)


def test_completions_begun_ahead_are_the_student_of_so_many_steps_before(
    model: str, teacher: str, tmp_path: Path, ray_session: RaySession
) -> None:
    keys: dict[str, Any] = {
        "teacher_model": teacher, "lmbda": 1.0, "sft_alpha": 0.0, "gkd_logits_topk": 6, "eval_dataset": None,
        "learning_rate": 3e-2, "warmup_steps": 0, "max_steps": 4,
    }  # fmt: skip
    cases: dict[str, dict[str, Any]] = {
        "on policy": {},
        "untrained": {"learning_rate": 0.0},
        "one ahead": {"max_staleness": 1},
        "all ahead": {"max_staleness": 7},
    }
    found: dict[str, Ledger] = {}
    with without_runtime(), RayHelper.session(APART, runtime="inprocess"):
        for name, case in cases.items():
            found[name] = Ledger(gkd_config(model, tmp_path / name, **keys | case))
            found[name].train()
    on_policy, untrained, one, every = (found[name].ledger for name in cases)  # type: ignore[attr-defined]
    assert every == untrained
    assert one[:2] == untrained[:2]
    assert one[0] == on_policy[0]
    assert all(ahead != fresh for ahead, fresh in zip(one[1:], on_policy[1:], strict=True))
    assert one[2] != untrained[2]
    told = {name: [line.get("staleness") for line in lines(tmp_path / name)] for name in cases}
    assert told["on policy"] == [None] * 4
    assert told["one ahead"] == [0, 1, 1, 1]
    assert told["all ahead"] == [0, 1, 2, 3]
    with ray_session(separate()):
        GKDTrainer(gkd_config(model, tmp_path / "ray", **keys, max_staleness=1)).train()
    assert lines(tmp_path / "ray") == lines(tmp_path / "one ahead")
    assert final_bytes(tmp_path / "ray") == final_bytes(tmp_path / "one ahead")


def test_steps_that_learn_from_the_dataset_lie_between_those_that_are_begun_ahead(
    off: Path, model: str, teacher: str, tmp_path: Path
) -> None:
    with without_runtime(), RayHelper.session(APART, runtime="inprocess"):
        config = gkd_config(model, tmp_path, teacher_model=teacher, max_staleness=2, **RUNS["top"])
        GKDTrainer(config).train()
    expected = [line["on_policy"] for line in lines(off / "top") if "on_policy" in line]
    told = [line for line in lines(tmp_path) if "on_policy" in line]
    assert [line["on_policy"] for line in told] == expected
    begun: dict[int, int] = {}  # when the completions of a step were
    for now in range(len(told)):
        if max(begun, default=now) <= now:
            ahead = range(now, min(now + 3, len(told)))
            begun = {step: now for step in ahead if source_of(config, step) == "student"} | begun
    found = {step: line["staleness"] for step, line in enumerate(told) if "staleness" in line}
    assert found == {step: step - now for step, now in begun.items()}
    assert max(found.values()) == 2


def test_completions_ahead_need_devices_of_their_own_and_a_student_that_completes(
    model: str, teacher: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"teacher_model": teacher, "max_staleness": 1}
    config = gkd_config(model, tmp_path, **keys)
    with pytest.raises(ConfigError, match="max_staleness=1 generates while the policy is trained"):
        GKDTrainer.check(config, None)
    with pytest.raises(ConfigError, match="with lmbda=0 there are none"):
        gkd_config(model, tmp_path, lmbda=0.0, **keys)


def test_a_prompt_of_the_teachers_takes_the_place_of_the_last_question(model: str, tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "1+1?"},
    ]
    row = {"messages": [*talk, {"role": "assistant", "content": "2"}], "teacher_prompt": "1+1? (it is 2)"}
    trainer = GKDTrainer(gkd_config(model, tmp_path, dataset=[row], eval_dataset=None))
    assert trainer.samples is not None
    text = tiny_tokenizer().decode
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    answer = "<|im_start|>assistant\n2<|im_end|>\n"
    assert text(trainer.samples.input_ids[0]) == chat.format("1+1?") + answer
    assert text(trainer.samples.as_teacher_sequences().input_ids[0]) == chat.format("1+1? (it is 2)") + answer
    target = trainer.samples.input_ids[0][trainer.samples.target_mask[0]]
    assert text(target) == "2<|im_end|>\n"


# It learns


def test_a_student_comes_near_its_teacher_on_its_own_completions(tmp_path: Path) -> None:
    """The teacher makes of each token another one, which tells nothing about the next; the student knows nothing.

    How far it is from its teacher in the end, plain code says, on new completions. A teacher read one token off leaves
    it at 3 nats, a wrong sign at 8.
    """
    both = tiny_model(initializer_range=0.02)
    with torch.no_grad():
        embedding_VH = torch.randn(260, 64, generator=torch.Generator().manual_seed(1))
        both.model.embed_tokens.weight.copy_(embedding_VH)
        for name, head_VH in (("teacher", 0.12 * embedding_VH.roll(1, 0)), ("student", torch.zeros(260, 64))):
            both.lm_head.weight.copy_(head_VH)
            both.save_pretrained(tmp_path / name)
            tiny_tokenizer().save_pretrained(tmp_path / name)
    config = gkd_config(
        str(tmp_path / "student"),
        tmp_path / "run",
        teacher_model=str(tmp_path / "teacher"),
        dataset=[{"prompt": f"{a} {b}"} for a in "abcdefgh" for b in "stuvwxyz"],
        eval_dataset=None,
        seed=1,
        lmbda=1.0,
        beta=1.0,
        temperature=1.0,
        sft_alpha=0.0,
        max_completion_length=6,
        global_batch_size=32,
        per_device_train_batch_size=32,
        max_steps=40,
        learning_rate=1e-2,
    )
    trainer = GKDTrainer(config)
    trainer.train()
    assert lines(tmp_path / "run")[0]["loss"] > 2.0
    assert reverse_kl(trainer, str(tmp_path / "teacher")) < 0.1


def reverse_kl(trainer: GKDTrainer, teacher: str) -> float:
    """Of the trained student to its teacher, a token, on 32 completions of its own."""
    student, other = trainer.policy.built.module.eval(), AutoModelForCausalLM.from_pretrained(teacher)
    prompts = Ragged.of(
        [tiny_tokenizer()(row["prompt"])["input_ids"] for row in trainer.rows.select(range(32))], np.int64
    )
    rollouts = trainer.generator.built.generate(Prompts(prompts), sampling_of(trainer.config), seed=99)
    divergences = []
    with torch.no_grad():
        for prompt, completion in zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True):
            ids = torch.tensor(np.concatenate([prompt, completion]))[None]
            s, t = (one(ids).logits[0][len(prompt) - 1 : -1].log_softmax(-1) for one in (student, other))
            divergences.append((s.exp() * (s - t)).sum(-1))
    return float(torch.cat(divergences).mean())


# Mistakes


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "lmbda": ({"lmbda": 1.5}, r"lmbda must lie in \[0, 1\], got 1.5"),
    "beta": ({"beta": -0.1}, r"beta must lie in \[0, 1\]"),
    "temperature": ({"temperature": 0.0}, "temperature must be positive"),
    "k of one": ({"gkd_logits_topk": 1, "gkd_topk_add_tail": False}, "compares nothing"),
    "a tail of nothing": ({"gkd_topk_add_tail": False}, "gkd_topk_add_tail is for gkd_logits_topk"),
    "sft_alpha on-policy": ({"lmbda": 1.0, "sft_alpha": 0.5}, "no step learns from them"),
    "seq_kd never": ({"lmbda": 1.0, "seq_kd": True, "sft_alpha": 0.0}, "lmbda=1 uses the student's completions"),
    "seq_kd of nobody": ({"teacher_model": None, "seq_kd": True, "sft_alpha": 0.0}, "set teacher_model"),
    "offload of nobody": ({"teacher_model": None, "offload_teacher_model": True}, "there is none"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_value_without_meaning_is_refused(name: str, model: str, tmp_path: Path) -> None:
    keys, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        gkd_config(model, tmp_path, **{"teacher_model": model} | keys)


def test_a_teacher_is_refused_where_it_cannot_be_asked(model: str, tmp_path: Path) -> None:
    apart: dict[str, Any] = {"device_groups": APART, "use_ray": True}
    for keys, message in (
        ({"teacher_model": model}, "Set gkd_logits_topk"),
        ({"teacher_model": None, "tuner_type": "lora"}, "Add teacher to the workers"),
        ({"teacher_model": model, "gkd_logits_topk": 4, "offload_teacher_model": True}, "Remove it"),
    ):
        config = gkd_config(model, tmp_path, **apart, **keys)
        with pytest.raises(ConfigError, match=message):
            GKDTrainer.check(config, placement(GKDTrainer, config))


def test_what_nobody_could_learn_from_is_refused_before_anything_is_built(model: str, tmp_path: Path) -> None:
    prompts = [{"prompt": "a bee"}]
    long = [{"prompt": "a bee", "completion": " sees two deer near the sea"}]
    for keys, message in (
        ({"teacher_model": None}, "every row needs a 'teacher_prompt'"),
        ({"teacher_model": model, "dataset": prompts}, "but its rows have none"),
        ({"teacher_model": model, "dataset": long, "max_length": 20}, "Raise max_length"),
        ({"teacher_model": model, "gkd_logits_topk": 261}, "more than the vocabulary of 260 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(GKDTrainer, gkd_config(model, tmp_path, **keys))


def test_a_teacher_of_other_tokens_is_refused(model: str, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|think|>"])
    tokenizer.save_pretrained(other)
    config = gkd_config(model, tmp_path, teacher_model=other)
    with pytest.raises(ConfigError, match=r"1 tokens differ, '<\|think\|>' is unknown here and 260 there"):
        GKDTrainer.check(config, None)
    with pytest.raises(ConfigError, match="teacher_model: 'nobody/nothing' has no configuration that can be read"):
        GKDTrainer.check(gkd_config(model, tmp_path, teacher_model="nobody/nothing"), None)


# Examples


def test_the_examples_are_placed_and_one_trains_two_steps(
    model: str, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with small models that were not taught to add; the other one on Ray: test_examples.py."""
    monkeypatch.chdir(ROOT)
    small = {"model": model, "teacher_model": teacher, "max_steps": 2, "global_batch_size": 16, "use_ray": "false"}
    arguments = [f"--{key}={value}" for key, value in {**small, "output_dir": tmp_path}.items()]
    for name, num_groups in (("separate", 3), ("quickstart", 1)):
        config = load_config(GKDConfig, ["--config", f"examples/gkd/{name}.yaml", *arguments])
        groups = placement(GKDTrainer, config)
        GKDTrainer.check(config, groups)
        assert len(groups.groups) == num_groups
    assert run(GKDTrainer, config)["eval_loss"] > 0
    assert len([line for line in lines(tmp_path) if "loss" in line]) == 2


def test_the_examples_teacher_goes_on_from_the_examples_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for plugin in load_plugins(["examples/grpo/addition.py", "examples/gkd/addition_teacher.py"]):
        name = "WARM_START_STEPS" if hasattr(plugin, "WARM_START_STEPS") else "STEPS"
        monkeypatch.setattr(plugin, name, 1)
    teacher = resolve_model("addition_teacher", output_dir=tmp_path, seed=1)
    student = resolve_model("addition", output_dir=tmp_path, seed=1)
    config = GKDConfig(model=student, teacher_model=teacher, dataset="addition")
    assert common_vocab_size(config, student, teacher, load_tokenizer(config, student)) == 14
