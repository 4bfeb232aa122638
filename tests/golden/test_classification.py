"""Whole runs of sequence classification beside transformers' own classifiers, from the same head."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, get_scheduler

from tests.conftest import RaySession
from tests.e2e.runs import together
from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.golden.training import OUR_ARGUMENTS, Steps, Training, assert_same_training, logged_steps, recorded
from trainers.classification.config import ClassificationConfig
from trainers.classification.trainer import ClassificationTrainer

TEXTS = ["good", "bad weather today", "so-so", "the best of all", "never again", "fine", "awful", "as expected, mostly"]
ROWS = 8
SETTINGS: dict[str, Any] = {"learning_rate": 3e-4, "per_device_train_batch_size": 4, "max_steps": 3}
SETTINGS |= {"adam_epsilon": 1e-6, "max_grad_norm": 1.0}
LABELS: dict[str, list[Any]] = {
    "single_label_classification": [k % 3 for k in range(ROWS)],
    "multi_label_classification": [[], [0], [1, 2], [0, 1, 2], [2], [], [0, 2], [1]],
    "regression": [[k / 4, -k / 3, 1.0] for k in range(ROWS)],
}
Keys = dict[str, Any]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def classifier(language_model: str, folder: Path, num_labels: int) -> str:
    """A classifier whose head is drawn once for both."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(language_model, num_labels=num_labels)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def rows_of(problem: str, labels: list[Any]) -> list[Keys]:
    return [
        {"messages": [{"role": "user", "content": text}], "label": label}
        for text, label in zip(TEXTS, labels, strict=True)
    ]


def targets_of(problem: str, labels: list[Any], num_labels: int) -> torch.Tensor:
    """Labels as transformers' classifiers take them."""
    if problem == "single_label_classification":
        return torch.tensor(labels)
    if problem == "regression":
        return torch.tensor(labels, dtype=torch.float32)
    hot = torch.zeros(len(labels), num_labels)
    for row, some in enumerate(labels):
        hot[row, some] = 1
    return hot


def plain_loop(model: str, problem: str, labels: list[Any], texts: list[str], num_labels: int) -> tuple[Steps, Any]:
    """Three steps of transformers' classifier on its own loss, four rows each, padded on the right; an evaluation."""
    network = AutoModelForSequenceClassification.from_pretrained(model, problem_type=problem, pad_token_id=0).float()
    wide, narrow = [[p for p in network.parameters() if (p.dim() > 1) == is_wide] for is_wide in (True, False)]
    groups = [{"params": wide}, {"params": narrow}]  # in the order of ours
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS["learning_rate"], eps=SETTINGS["adam_epsilon"], weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=3)
    targets, steps = targets_of(problem, labels, num_labels), []
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"

    def loss_of(chosen: list[int]) -> Any:
        found = tokenizer([texts[k] for k in chosen], padding=True, return_tensors="pt", add_special_tokens=False)
        return network(**{name: found[name] for name in ("input_ids", "attention_mask")}, labels=targets[chosen])

    network.train()
    for step in range(3):
        chosen = list(range(4)) if step % 2 == 0 else list(range(4, 8))
        loss = loss_of(chosen).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), SETTINGS["max_grad_norm"])
        learning_rate = schedule.get_last_lr()[0]
        steps.append({"loss": float(loss.detach()), "grad_norm": float(norm), "learning_rate": learning_rate})
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    network.eval()
    with torch.no_grad():
        steps.append({"eval_loss": float(loss_of(list(range(ROWS))).loss)})
    return steps, network


def templated(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("use_chat_template", [True, False])
@pytest.mark.parametrize(
    ("problem", "num_labels"), [*((problem, 3) for problem in LABELS), ("regression", 1)], ids=lambda value: str(value)
)
def test_three_steps_equal_transformers_classifier(
    language_model: str, tmp_path: Path, problem: str, num_labels: int, use_chat_template: bool
) -> None:
    labels = LABELS[problem] if num_labels > 1 else [k / 4 for k in range(ROWS)]
    rows, model = rows_of(problem, labels), classifier(language_model, tmp_path / "model", num_labels)
    keys: Keys = OUR_ARGUMENTS | SETTINGS | {"use_chat_template": use_chat_template, "num_labels": num_labels}
    keys |= {"problem_type": problem if num_labels > 1 else None, "eval_dataset": rows, "eval_steps": 3}

    def ours() -> tuple[Steps, torch.nn.Module]:
        config = ClassificationConfig(model=model, dataset=rows, output_dir=str(tmp_path / "run"), **keys)
        trainer = ClassificationTrainer(config)
        evaluation = trainer.train()
        return [*logged_steps(tmp_path / "run")[:3], evaluation], trainer.policy.built.module

    texts = [templated(text) for text in TEXTS] if use_chat_template else TEXTS
    our_run: Training = recorded(ours)
    their_run = recorded(lambda: plain_loop(model, problem, labels, texts, num_labels))
    our_evaluation, their_evaluation = our_run.steps.pop(), their_run.steps.pop()
    assert_same_training(our_run, their_run)
    assert our_evaluation["eval_loss"] == pytest.approx(their_evaluation["eval_loss"], abs=1e-5)
    assert ("accuracy" in our_run.steps[0]) == (problem != "regression")

    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "final")
    assert (exported.config.num_labels, exported.config.problem_type) == (num_labels, problem)
    for name, weight in exported.named_parameters():
        torch.testing.assert_close(weight, their_run.weights[name], rtol=0, atol=1e-5)


CUTS: dict[str, Keys] = {
    "alone": {},
    "one row at a time": {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1},
    "padding-free": {"padding_free": True},
    "by tokens": {"token_budget": 90},
    "packed": {"packing": True, "max_length": 400},  # all rows in one pack
    "two workers": {"per_device_train_batch_size": 2},
}


def one_step(problem: str, model: str, folder: Path, cut: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The step of seven rows, so that two workers get four and three."""
    rows = rows_of(problem, LABELS[problem])[:7]
    keys: Keys = OUR_ARGUMENTS | SETTINGS | {"max_steps": 1, "global_batch_size": 7} | CUTS[cut]
    if cut == "packed":
        keys |= {"global_batch_size": 1, "per_device_train_batch_size": 1}
    keys |= {"num_labels": 3, "problem_type": problem, "eval_dataset": rows, "eval_steps": 1}
    config = ClassificationConfig(model=model, dataset=rows, output_dir=str(folder), **keys)
    trainer = ClassificationTrainer(config)
    last = trainer.train()
    weights = AutoModelForSequenceClassification.from_pretrained(folder / "final").state_dict()
    return {name: last[name] for name in last if name in COMPARED}, weights


COMPARED = ("loss", "grad_norm", "accuracy", "eval_loss", "eval_accuracy", "num_tokens")


@pytest.mark.parametrize("problem", LABELS)
def test_a_step_is_the_same_however_it_is_cut(
    language_model: str, tmp_path: Path, problem: str, ray_session: RaySession
) -> None:
    metrics, weights = one_step(problem, language_model, tmp_path / "alone", "alone")
    for cut in list(CUTS)[1:]:
        with ray_session(together(2)) if cut == "two workers" else contextlib.nullcontext():
            found = one_step(problem, language_model, tmp_path / cut, cut)
        assert found[0] == pytest.approx(metrics, rel=1e-4, abs=1e-6), cut
        for name, weight in weights.items():
            torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_under_an_adapter_the_head_is_trained_whole_and_a_resumed_run_is_the_same(
    language_model: str, tmp_path: Path
) -> None:
    keys: Keys = OUR_ARGUMENTS | SETTINGS | {"num_labels": 3, "tuner_type": "lora", "lora_rank": 4, "save_steps": 1}

    def final(folder: Path, **further: Any) -> dict[str, torch.Tensor]:
        rows = rows_of("single_label_classification", LABELS["single_label_classification"])
        config = ClassificationConfig(model=language_model, dataset=rows, output_dir=str(folder), **keys | further)
        ClassificationTrainer(config).train()
        return dict(AutoModelForSequenceClassification.from_pretrained(folder / "final").state_dict())

    whole = final(tmp_path / "whole")
    resumed = final(tmp_path / "resumed", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    begun = final(tmp_path / "begun", learning_rate=0.0)
    changed = {name.partition(".layers.0.")[2] for name in whole if not torch.equal(whole[name], begun[name])}
    assert {"self_attn.q_proj.weight", "mlp.down_proj.weight"} <= changed
    assert not torch.equal(whole["score.weight"], begun["score.weight"])
    assert torch.equal(whole["model.embed_tokens.weight"], begun["model.embed_tokens.weight"])
