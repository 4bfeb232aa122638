"""Values without meaning are refused by name, with what to write instead."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Any

import peft  # noqa: F401  (it sets a variable of the environment when it is first imported)
import pytest

from rayhelper import ConfigError, DeviceGroups
from trainers.configuration.shared import TrainConfig, sequences_per_step, total_steps
from trainers.configuration.values import SCHEDULES
from trainers.dpo.config import DPOConfig
from trainers.grpo.choices import keys_of
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.plugins import ADVANTAGES, LOSSES
from trainers.reward.config import RewardConfig
from trainers.sampling.config import SamplingConfig
from trainers.sft.config import PretrainConfig, SFTConfig
from trainers.sft.trainer import SFTTrainer

FOLDER = Path(__file__).parents[2] / "trainers"


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
    ({"num_train_epochs": float("nan")}, ["num_train_epochs", "nan"]),
    ({"dtype": "fp16"}, ["dtype must be one of auto, float32, bfloat16", "'fp16'"]),
    ({"backend": "fsdp2"}, ["backend must be one of fsdp", "Did you mean 'fsdp'?"]),
    ({"adam_beta2": 1.0}, ["adam_beta2", "[0, 1)", "1.0"]),
    ({"warmup_ratio": 1.5}, ["warmup_ratio", "[0, 1)", "1.5"]),
    ({"torch_compile": True, "activation_memory_budget": 1.5}, ["activation_memory_budget", "[0, 1]", "1.5"]),
    ({"logits_memory_gib": -1}, ["logits_memory_gib", "at least 0", "-1"]),
    ({"activation_memory_budget": 0.5}, ["activation_memory_budget is 0.5", "torch_compile is not true"]),
    ({"warmup_ratio": 0.1, "warmup_steps": 5}, ["warmup_ratio=0.1", "warmup_steps=5", "Remove one"]),
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
    ({"val_before_train": True}, ["val_before_train", "eval_dataset", "Add one"]),
    ({"greater_is_better": True}, ["greater_is_better", "metric_for_best_model"]),
    ({"metric_for_best_model": "loss"}, ["metric_for_best_model compares evaluations", "no eval_dataset"]),
    (
        {"metric_for_best_model": "loss", "early_stop_interval": 2},
        ["early_stop_interval compares evaluations", "no eval_dataset"],
    ),
    (
        {"metric_for_best_model": "loss", "eval_dataset": "d"},
        ["metric_for_best_model=loss", "multiple of eval_steps", "500 and None"],
    ),
    (
        {"metric_for_best_model": "loss", "eval_dataset": "d", "eval_steps": 4, "save_steps": 6},
        ["save_steps must be a multiple of eval_steps", "6 and 4"],
    ),
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


def test_every_schedule_of_transformers_that_looks_at_the_step_is_offered_and_works() -> None:
    import torch
    from transformers import SchedulerType, get_scheduler

    by_evaluation = {"reduce_lr_on_plateau", "greedy"}
    assert set(SCHEDULES) == {kind.value for kind in SchedulerType} - by_evaluation
    needed: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr": 1e-6},
        "cosine_warmup_with_min_lr": {"min_lr": 1e-6},
        "warmup_stable_decay": {"num_decay_steps": 2},
    }
    for name in SCHEDULES:
        kwargs = needed.get(name, {})
        config(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        schedule = get_scheduler(
            name, optimizer, num_warmup_steps=1, num_training_steps=9, scheduler_specific_kwargs=kwargs
        )
        optimizer.step()
        schedule.step()


def test_what_report_to_needs_is_looked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    config(report_to=["tensorboard"])
    with pytest.raises(ConfigError, match="pip install wandb"):
        config(report_to=["wandb"])


def test_a_step_learns_from_micro_batches_of_all_workers_or_from_the_global_batch() -> None:
    assert sequences_per_step(config(per_device_train_batch_size=4, gradient_accumulation_steps=3), 2) == 24
    assert sequences_per_step(config(per_device_train_batch_size=4, global_batch_size=20), 2) == 20


@pytest.mark.parametrize("epochs", [0.01, 0.5, 1.0, 1.1, 1.3, 2.25])
def test_parts_of_epochs_are_as_many_steps_as_in_transformers(epochs: float) -> None:
    """Its own counting, of dataloaders of several lengths: rounded up."""
    import torch
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(num_train_epochs=epochs, use_cpu=True, report_to=[])
    theirs = Trainer(torch.nn.Linear(1, 1), arguments)
    for length in (1, 3, 5, 7, 10):
        counted = theirs.set_initial_training_values(arguments, torch.utils.data.DataLoader([0] * length))
        assert counted[-1] == total_steps(config(num_train_epochs=epochs), length), (epochs, length)


def test_max_steps_come_before_epochs_and_epochs_may_be_parts() -> None:
    assert total_steps(config(), 10) == 30
    assert total_steps(config(num_train_epochs=0.5), 10) == 5
    assert total_steps(config(num_train_epochs=0.01), 10) == 1
    assert total_steps(config(max_steps=7), 10) == 7


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(AttributeError):
        config().seed = 1  # type: ignore[misc]


# The keys of the trainers

SFT_MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"tuner_type": "lora", "vit_lr": 1e-5}, ["vit_lr is 1e-05", "by default", "Write freeze_vit: false, or remove"]),
    ({"freeze_aligner": True, "vit_lr": 1e-5, "aligner_lr": 0.1}, ["aligner_lr is 0.1, but freeze_aligner is true"]),
    ({"max_length": 1}, ["max_length must be at least 2", "1"]),
    ({"packing": True, "max_length": None}, ["packing needs max_length"]),
    ({"group_by_length": True, "packing": True}, ["group_by_length", "packing fills rows to one length"]),
    ({"group_by_length": True, "shuffle_dataset": False}, ["group_by_length", "shuffle_dataset is false"]),
    ({"group_by_length": True, "streaming": True, "max_steps": 2}, ["group_by_length", "while the run continues"]),
    ({"packing": True, "truncation_mode": "keep_end"}, ["packing keeps the start", "truncation_mode is 'keep_end'"]),
    ({"loss_type": "nl"}, ["loss_type must be one of nll, dft", "Did you mean 'nll'?"]),
    ({"per_device_eval_batch_size": 0}, ["per_device_eval_batch_size must be at least 1"]),
    ({"dataset_num_proc": 0}, ["dataset_num_proc must be at least 1"]),
]
GRPO_MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"group_by_length": True}, ["group_by_length", "how long their completions get is not known"]),
    ({"num_generations": 1}, ["num_generations must be at least 2", "got 1"]),
    ({"generation_batch_size": 16, "steps_per_generation": 2}, ["both set the size", "set one of them"]),
    ({"reward_funcs": []}, ["reward_funcs is empty", "such as exact_answer"]),
    ({"temperature": 0.0}, ["temperature must be positive", "see eval_temperature"]),
    ({"temperature": float("nan")}, ["temperature must be positive", "nan"]),
    ({"top_p": 0.0}, ["top_p must lie in (0, 1]", "1 keeps every token"]),
    ({"min_p": 1.5}, ["min_p must lie in [0, 1]", "1.5"]),
    ({"repetition_penalty": 0.0}, ["repetition_penalty must be positive", "1 changes nothing"]),
    ({"stop_token_ids": [-1]}, ["stop_token_ids must be a list of token ids", "[-1]"]),
    ({"stop_token_ids": [True]}, ["stop_token_ids must be a list of token ids", "[True]"]),
    ({"stop_token_ids": 5}, ["stop_token_ids must be a list of token ids", "5"]),
    ({"beta": -0.1}, ["beta must be at least 0"]),
    ({"delta": 0.5}, ["delta must be at least 1"]),
    ({"max_completion_length": 0}, ["max_completion_length must be at least 1"]),
    ({"loss_type": "cispo"}, ["loss_type=cispo", "Set epsilon_high to 5.0"]),
    ({"loss_type": "ppo"}, ["loss_type must be one of grpo, bnpo", "'ppo'"]),
    ({"importance_sampling_level": "tokens"}, ["importance_sampling_level", "Did you mean 'token'?"]),
    ({"scale_rewards": "groups"}, ["scale_rewards must be one of group, batch, none", "Did you mean 'group'?"]),
    ({"reward_weights": [0.0]}, ["reward_weights are all 0"]),
    ({"reward_weights": [1.0, 2.0]}, ["reward_weights has 2 values for 1 reward_funcs"]),
    ({"rollout_engine": "vlm"}, ["rollout_engine must be one of hf", "'vlm'"]),
    (
        {"loss_type": "real", "off_policy_mask_threshold": 1.0},
        ["weighs no tokens. Write off_policy_mask_threshold: null"],
    ),
    ({"loss_type": "real", "teacher_model": "t"}, ["whole completions, and teacher_model judges tokens"]),
    ({"loss_type": "real", "epsilon": 0.1}, ["epsilon is 0.1", "has no effect with loss_type=real"]),
    ({"loss_type": "sapo", "epsilon": 0.1}, ["epsilon is 0.1", "has no effect with loss_type=sapo"]),
    ({"loss_type": "vespo", "delta": 2.0}, ["delta is 2.0", "read with grpo, bnpo"]),
    ({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1}, ["epsilon is 0.1", "loss_type=cispo"]),
    ({"sapo_temperature_neg": 2.0}, ["sapo_temperature_neg is 2.0", "loss_type=dapo", "read with sapo"]),
    ({"fipo_clip_range": None}, ["fipo_clip_range is None", "read with fipo"]),
    ({"reward_clip_range": [0.0, 1.0]}, ["reward_clip_range", "advantage_estimator=grpo", "read with rloo"]),
    ({"advantage_estimator": "rloo", "reward_clip_range": [1.0, 0.0]}, ["reward_clip_range must be [lowest, highest]"]),
    (
        {"advantage_estimator": "rloo", "scale_rewards": "batch"},
        ["scale_rewards=batch is for", "rloo divides by its own"],
    ),
    ({"kl_in_reward": True}, ["kl_in_reward is set, but beta", "is 0"]),
    (
        {"beta": 0.1, "kl_in_reward": True, "multi_objective_aggregation": "normalize_then_sum"},
        ["which normalize_then_sum does not"],
    ),
    ({"teacher_kl_coef": 0.5}, ["teacher_kl_coef is set, but teacher_model is not"]),
    ({"ref_model": "other"}, ["ref_model", "weight beta is 0"]),
    ({"ref_model_sync_steps": 8}, ["ref_model_sync_steps is 8", "sync_ref_model=False"]),
    ({"entropy_target": 1.0}, ["entropy_target is 1.0", "use_adaptive_entropy=False"]),
    ({"top_entropy_quantile": 1.5}, ["top_entropy_quantile must lie in [0, 1]", "1.5"]),
    ({"max_resample_times": 2}, ["max_resample_times is 2", "dynamic_sample=False"]),
    ({"rollout_importance_sampling_clip_max": 2.0}, ["clip_max is set", "correction is not"]),
    (
        {"rollout_importance_sampling_correction": False, "rollout_importance_sampling_mode": "token_mask"},
        ["mode is set, but rollout_importance_sampling_correction is not"],
    ),
    ({"max_turns": 2}, ["max_turns is set, but there is no environment"]),
    ({"environment": "e", "tools": ["t"]}, ["environment and tools both answer"]),
    ({"environment": "e", "max_turns": 2, "max_tool_calling_iterations": 1}, ["both limit the turns"]),
    ({"reward_model": ["judge"], "reward_weights": [1.0]}, ["1 values for 1 reward_funcs and 1 of reward_model"]),
]


def test_what_other_systems_call_it_means_the_same() -> None:
    assert grpo_config(rollout_importance_sampling_mode="token_mask").rollout_correction == "token_mask"
    assert grpo_config(rollout_importance_sampling_correction=True).rollout_correction == "sequence_mask"
    assert grpo_config(rollout_importance_sampling_correction=False).rollout_correction is None
    assert grpo_config().rollout_correction is None
    assert grpo_config(environment="e", max_tool_calling_iterations=2).turn_limit == 3
    assert not grpo_config(beta=0.1).has_kl_in_reward
    assert grpo_config(beta=0.1, advantage_estimator="reinforce_plus_plus", scale_rewards="batch").has_kl_in_reward
    assert grpo_config(advantage_estimator="reinforce_plus_plus_token", num_generations=1).num_generations == 1


def test_a_loss_at_another_level_than_its_papers_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    grpo_config(loss_type="luspo", importance_sampling_level="sequence")
    grpo_config(loss_type="vespo")
    assert not caplog.records
    grpo_config(loss_type="luspo")
    assert "loss_type=luspo is designed for importance_sampling_level=sequence, not token" in caplog.text


@pytest.mark.parametrize(("changed", "told"), SFT_MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_in_a_key_of_sft_is_told(changed: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        SFTConfig(**({"model": "tiny", "dataset": "texts"} | changed))
    for words in told:
        assert words in str(error.value)


def grpo_config(**changed: Any) -> GRPOConfig:
    return GRPOConfig(**({"model": "tiny", "dataset": "sums", "reward_funcs": ["exact_answer"]} | changed))


@pytest.mark.parametrize(("changed", "told"), GRPO_MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_in_a_key_of_grpo_is_told(changed: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        grpo_config(**changed)
    for words in told:
        assert words in str(error.value)


def test_scale_rewards_may_be_true_or_false_as_in_trl() -> None:
    assert [grpo_config(scale_rewards=value).scale_rewards for value in (True, False, "batch")] == [
        True,
        False,
        "batch",
    ]


def test_pretraining_is_sft_on_one_stream_of_tokens() -> None:
    config = PretrainConfig(model="tiny", dataset="texts")
    assert (config.packing, config.packing_strategy, config.output_dir) == (True, "wrapped", "outputs/pretrain")


# What can be told before anything starts, beyond the values of single keys


@pytest.mark.parametrize(
    ("changed", "num_workers", "told"),
    [
        ({"reward_funcs": ["exact_answr"]}, 1, ["reward_funcs: unknown reward 'exact_answr'", "Did you mean"]),
        ({"reward_funcs": ["nowhere.reward"]}, 1, ["reward_funcs", "'nowhere.reward' cannot be imported"]),
        ({"reward_funcs": [{"name": "soft_overlong_punishment", "max": 3}]}, 1, ["reward_funcs", "max_completion_len"]),
        ({"reward_funcs": [{"names": "exact_answer"}]}, 1, ["reward_funcs", "needs its `name`"]),
        ({"external_plugins": ["no.such_plugin"]}, 1, ["external_plugins", "'no.such_plugin' cannot be imported"]),
        ({"generation_kwargs": {"typical": 0.9}}, 1, ["generation_kwargs: ", "no field 'typical'", "typical_p"]),
        (
            {"rollout_engine": "vllm", "generation_kwargs": {"min_tokens": 999}},
            1,
            ["generation_kwargs: min_tokens must be less than or equal to max_tokens="],
        ),
        (
            {"rollout_engine": "vllm", "temperature": 0.5, "generation_kwargs": {"presence_penalty": 1.5}},
            1,
            ["generation_kwargs: presence_penalty is 1.5", "At temperature 0.5 the limit is 1"],
        ),
        (
            {
                "rollout_engine": "vllm",
                "eval_dataset": [{"prompt": "a"}],
                "eval_temperature": 0.25,
                "generation_kwargs": {"presence_penalty": 1.5},
            },
            1,
            ["generation_kwargs: presence_penalty is 1.5", "At temperature 0.25 the limit is 0.5"],
        ),
        (
            {"generation_kwargs": {"stop_token_ids": [5]}},
            1,
            ["write the key stop_token_ids in addition to generation_kwargs"],
        ),
        ({"generation_kwargs": {"stop_strings": ["x"]}}, 1, ["write its id as the key stop_token_ids"]),
        ({"generation_kwargs": {"eos_token_id": 5}}, 1, ["further ones as the key stop_token_ids"]),
        ({"generation_kwargs": {"logit_bias": [5]}}, 1, ["logit_bias must map token ids to numbers"]),
        ({"resume_from_checkpoint": "."}, 1, ["resume_from_checkpoint: '.' is not a checkpoint", "checkpoints: "]),
        ({"num_generations": 3}, 1, ["a generation of 8 completions", "multiple of num_generations=3"]),
        ({"num_generations": 16}, 1, ["a generation of 8 completions", "multiple of num_generations=16"]),
        ({"generation_batch_size": 12}, 1, ["a generation of 12", "multiple of the 8 sequences of an optimizer step"]),
        ({"generation_batch_size": 24}, 2, ["a generation of 24", "multiple of the 16 sequences of an optimizer step"]),
    ],
    ids=str,
)
def test_what_keys_say_together_is_checked_before_anything_starts(
    changed: dict[str, Any], num_workers: int, told: list[str]
) -> None:
    groups = DeviceGroups.single(["train", "rollout"], "CPU", num_workers)
    with pytest.raises(ConfigError) as error:
        GRPOTrainer.check(grpo_config(**changed), groups)
    for words in told:
        assert words in str(error.value)


def test_a_generation_may_be_too_small_for_one_worker_and_enough_for_two() -> None:
    config = grpo_config(num_generations=16)
    GRPOTrainer.check(config, DeviceGroups.single(["train", "rollout"], "CPU", 2))
    with pytest.raises(ConfigError):
        GRPOTrainer.check(config, None)


def test_a_broken_plugin_shows_where_it_is_broken(tmp_path: Path) -> None:
    plugin = tmp_path / "rewards.py"
    plugin.write_text("import re\n\nundefined_name\n")
    config = SFTConfig(model="tiny", dataset="texts", external_plugins=[str(plugin)])
    with pytest.raises(ImportError, match="NameError") as error:
        SFTTrainer.check(config, None)
    assert isinstance(error.value.__cause__, NameError)  # the traceback that names the line


# Every key has a meaning


def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(FOLDER)): ast.parse(path.read_text()) for path in FOLDER.rglob("*.py")}


def is_a_check(node: ast.AST) -> bool:
    """A function that only judges values: reading a key there is not using it."""
    return isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith(("check_", "post_init__"))


@functools.cache
def keys_that_are_read() -> set[str]:
    """The names read as ``config.name`` or ``self.config.name``, or by a configuration's properties, not by checks."""
    found: set[str] = set()

    def visit(node: ast.AST, names: tuple[str, ...] = ("config", "self.config")) -> None:
        if is_a_check(node):
            return
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            names = (*names, "self")
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names:
            found.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child, names)

    for tree in trees().values():
        visit(tree)
    registered = [entry.function for registry in (LOSSES, ADVANTAGES) for entry in registry.values()]
    return found.union(*map(keys_of, registered))  # constants of losses and estimators, by their parameters


def test_a_key_that_is_accepted_is_a_key_that_is_used() -> None:
    for config_type in (SFTConfig, PretrainConfig, GRPOConfig, DPOConfig, RewardConfig, SamplingConfig):
        unread = {field.name for field in dataclasses.fields(config_type)} - keys_that_are_read()
        assert unread == {"defaults"}, config_type  # whose meaning is in all other keys
    # Reading a key in a check is not using it: this would find a key that nobody reads
    assert "gradient_checkpointing" in keys_that_are_read()
    assert "output" not in keys_that_are_read()
    assert is_a_check(ast.parse("def check_shared(config): return config.x").body[0])
    assert is_a_check(ast.parse("def __post_init__(self): pass").body[0])


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"lora_rank": 16}, "lora_rank is 16, but tuner_type is full"),
        ({"optim": "sgd", "adam_beta1": 0.8}, "adam_beta1 is 0.8, but optim is sgd"),
        ({"fsdp_sharding_strategy": "no_shard", "fsdp_offload_params": True}, "fsdp_offload_params needs"),
        (
            {"optimizer_offload": True, "fsdp_offload_params": True},
            "optimizer_offload is True.*on the host all the time",
        ),
        (
            {"fsdp_sharding_strategy": "no_shard", "fsdp_reshard_after_forward": False},
            "fsdp_reshard_after_forward is False, but fsdp_sharding_strategy is no_shard",
        ),
        ({"lora_kwargs": {"use_rslora": True}}, "tuner_type: lora"),
        ({"tuner_type": "lora", "lora_kwargs": {"r": 4}}, "is the key lora_rank"),
        ({"tuner_type": "lora", "lora_kwargs": {"use_rslor": True}}, "use_rslora"),
        ({"token_budget": 0}, "token_budget must be at least 1"),
        ({"token_budget": "most"}, "token_budget must be one of auto"),
        ({"optim": "adam"}, "optim must be one of"),
        ({"optim": "adafactor"}, "Set fsdp_sharding_strategy: no_shard"),
    ],
)
def test_keys_of_the_model_that_nobody_would_read_or_that_have_no_meaning(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SFTConfig(**{"model": "m", "dataset": [{"text": "a"}], **keys})


def test_keys_of_an_adapter_and_an_optimizer_are_taken() -> None:
    keys = {"tuner_type": "lora", "lora_rank": 4, "lora_kwargs": {"use_rslora": True}, "optim": "rmsprop"}
    config = SFTConfig(model="m", dataset=[{"text": "a"}], **keys)
    assert config.lora_rank == 4


def test_a_run_goes_on_by_itself_only_where_its_workers_are_other_processes() -> None:
    with pytest.raises(ConfigError, match=r"resume_on_failure is 2, but only with use_ray .*Under torchrun"):
        SFTConfig(model="m", dataset=[{"text": "a"}], resume_on_failure=2)
    with pytest.raises(ConfigError, match="resume_without_manifest is True, but resume_from_checkpoint is not set"):
        SFTConfig(model="m", dataset=[{"text": "a"}], resume_without_manifest=True)
    with pytest.raises(ConfigError, match="resume_on_failure must be at least 0"):
        SFTConfig(model="m", dataset=[{"text": "a"}], resume_on_failure=-1, use_ray=True)
