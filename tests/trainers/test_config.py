"""Values without meaning are refused by name, with what to write instead."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError
from trainers.config import TrainConfig, sequences_per_step, total_steps


def config(**changed: Any) -> TrainConfig:
    return TrainConfig(**({"model": "tiny", "dataset": "sums"} | changed))


# key and value, and what the message must hold: the mistake and the remedy
MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"learning_rate": -1e-5}, ["learning_rate", "at least 0", "-1e-05"]),
    ({"learning_rate": float("nan")}, ["learning_rate", "at least 0", "nan"]),
    ({"learning_rate": float("inf")}, ["learning_rate", "inf"]),
    ({"per_device_train_batch_size": 0}, ["per_device_train_batch_size", "at least 1", "0"]),
    ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps", "at least 1"]),
    ({"logging_steps": 0}, ["logging_steps", "at least 1"]),
    ({"save_total_limit": 0}, ["save_total_limit", "at least 1", "0"]),
    ({"save_steps": -1}, ["save_steps", "at least 0", "-1"]),
    ({"global_batch_size": 0}, ["global_batch_size", "at least 1"]),
    ({"seed": -1}, ["seed", "at least 0"]),
    ({"adam_beta2": 1.0}, ["adam_beta2", "[0, 1)", "1.0"]),
    ({"warmup_ratio": 1.5}, ["warmup_ratio", "[0, 1)", "1.5"]),
    ({"warmup_ratio": 0.1, "warmup_steps": 5}, ["warmup_ratio=0.1", "warmup_steps=5", "remove one"]),
    ({"max_steps": 0, "num_train_epochs": 0}, ["nothing would be trained", "max_steps", "num_train_epochs"]),
    (
        {"global_batch_size": 64, "gradient_accumulation_steps": 2},
        ["global_batch_size", "remove gradient_accumulation_steps", "per_device_train_batch_size"],
    ),
    ({"lr_scheduler_type": "cosin"}, ["lr_scheduler_type", "'cosin'", "linear", "Did you mean 'cosine'?"]),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ["lr_scheduler_type", "must be one of linear, cosine"]),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, ["lr_scheduler_kwargs={}", "cosine_with_min_lr", "min_lr"]),
    ({"lr_scheduler_kwargs": {"cycles": 2}}, ["lr_scheduler_kwargs", "cycles", "lr_scheduler_type=linear"]),
    ({"report_to": ["tensorbord"]}, ["report_to", "'tensorbord'", "wandb", "Did you mean 'tensorboard'?"]),
    ({"dataset": ""}, ["dataset is empty", "give a file"]),
    ({"dataset": []}, ["dataset is empty"]),
    ({"eval_steps": 10}, ["eval_steps is 10", "eval_dataset", "Add one"]),
    ({"model": "./nowhere/model"}, ["model", "'./nowhere/model'", "Give a folder or a name"]),
    ({"tokenizer": "/nowhere/tokenizer"}, ["tokenizer", "'/nowhere/tokenizer'"]),
    ({"chat_template": "templates/chatml.jinja"}, ["chat_template", "no file 'templates/chatml.jinja'"]),
    ({"resume_from_checkpoint": "outputs/nowhere"}, ["resume_from_checkpoint", "'outputs/nowhere'", "'auto'"]),
    ({"timeout_s": 0.0}, ["timeout_s", "positive number of seconds", "0.0"]),
    ({"device_groups": {"train": {"gpus": 0}}}, ["gpus", "train", "0"]),
    (
        {"device_groups": {"train": {"gpus": 2, "learning_rate": 1e-5}}},
        ["section 'train'", "'learning_rate'", "gpus", "Move other keys to the top level"],
    ),
    ({"device_groups": '{"train": {"cpus": 1, "timeout": 3}}'}, ["'timeout'", "did you mean 'timeout_s'?"]),
]


@pytest.mark.parametrize(("changed", "told"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_told_with_its_key_and_its_remedy(changed: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config(**changed)
    for words in told:
        assert words in str(error.value)


@pytest.mark.parametrize("name", ["dataset", "eval_dataset", "external_plugins"])
def test_a_missing_file_is_answered_with_the_one_beside_it(name: str, tmp_path: Path) -> None:
    suffix = ".py" if name == "external_plugins" else ".jsonl"
    (tmp_path / f"train_rows{suffix}").write_text("")
    with pytest.raises(ConfigError, match=rf"{name}: there is no file .*train_row.*Did you mean .*train_rows{suffix}"):
        config(**{name: [str(tmp_path / f"train_row{suffix}")]})


def test_files_patterns_and_names_of_plugins_are_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (str(tmp_path / "rows.jsonl"), "~/rows.jsonl", "data/*.jsonl", "sums", [{"prompt": "1+1="}]):
        assert config(dataset=source).dataset == source


def test_a_chat_template_is_a_file_or_a_template(tmp_path: Path) -> None:
    (tmp_path / "chatml.jinja").write_text("{{ messages }}")
    config(chat_template=str(tmp_path / "chatml.jinja"))
    config(chat_template="{{ messages[0]['content'] }}")


def test_every_schedule_that_is_offered_can_be_built_and_stepped() -> None:
    import torch
    from transformers import SchedulerType, get_scheduler

    needed: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr": 1e-6},
        "cosine_warmup_with_min_lr": {"min_lr": 1e-6},
        "warmup_stable_decay": {"num_decay_steps": 2},
    }
    offered = []
    for name in (kind.value for kind in SchedulerType):
        kwargs = needed.get(name, {})
        try:
            config(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs)
        except ConfigError:
            continue
        offered.append(name)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        schedule = get_scheduler(
            name, optimizer, num_warmup_steps=1, num_training_steps=9, scheduler_specific_kwargs=kwargs
        )
        optimizer.step()
        schedule.step()
    assert {"linear", "cosine", "constant", *needed} <= set(offered)


def test_what_report_to_needs_is_looked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    config(report_to=["tensorboard"])
    with pytest.raises(ConfigError, match="pip install wandb"):
        config(report_to=["wandb"])


def test_a_step_learns_from_micro_batches_of_all_workers_or_from_the_global_batch() -> None:
    assert sequences_per_step(config(per_device_train_batch_size=4, gradient_accumulation_steps=3), 2) == 24
    assert sequences_per_step(config(per_device_train_batch_size=4, global_batch_size=20), 2) == 20


def test_max_steps_come_before_epochs_and_epochs_may_be_parts() -> None:
    assert total_steps(config(), 10) == 30
    assert total_steps(config(num_train_epochs=0.5), 10) == 5
    assert total_steps(config(num_train_epochs=0.01), 10) == 1
    assert total_steps(config(max_steps=7), 10) == 7


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(AttributeError):
        config().seed = 1  # type: ignore[misc]
