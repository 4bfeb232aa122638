"""Which fields of TRL's and transformers' configurations are read here, and which are refused?

    python -m benchmarks.trl_fields [--all]

Every field is written into a file, once with its own default and once with another value, beside what TRL itself
needs for the field to matter. ``taken``: our configuration is another one by it, or the value asks for what is done
anyway. ``told``: accepted, and one line says what is done instead, as it changes speed, memory or the console alone.
``refused``: with a reason and a remedy. ``unknown``: nobody here knows the name. ``silent``: accepted, and
it changes nothing. ``--all`` lists every field; without it only the counts, and fields that are unknown, silent, or
refused at their default.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import tempfile
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rayhelper import ConfigError
from trainers.configuration.others.other_names import ALIASES, is_neutral
from trainers.configuration.reading.command_line import load_config
from trainers.configuration.reading.folders import configuration_named

logger = logging.getLogger("trainers.configuration")  # which says what is not needed here

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Another value than the default, where the type does not say one
OTHER: dict[str, Any] = {
    "report_to": "tensorboard",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"min_lr": 1e-6},
    "optim": "sgd",
    "optim_args": "momentum=0.9",
    "eval_strategy": "steps",
    "save_strategy": "no",
    "logging_strategy": "epoch",
    "log_level": "debug",
    "log_level_replica": "error",
    "hub_strategy": "end",
    "fsdp": "shard_grad_op",
    "fsdp_config": {"reshard_after_forward": False},
    "deepspeed": "zero2",
    "debug": "underflow_overflow",
    "parallelism_config": {"cp_size": 2},
    "train_sampling_strategy": "group_by_length",
    "include_for_metrics": ["inputs"],
    "include_num_input_tokens_seen": "all",
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "accelerator_config": {"split_batches": True},
    "model_init_kwargs": {"attn_implementation": "eager"},
    "teacher_model_init_kwargs": {"attn_implementation": "eager"},
    "generation_kwargs": {"num_beams": 2},
    "chat_template_kwargs": {"enable_thinking": False},
    "truncation_mode": "keep_end",
    "packing_strategy": "wrapped",
    "loss_type": {"grpo": "grpo", "sft": "dft", "dpo": ["hinge"], "gkd": "dft"},
    "loss_weights": [0.5],
    "f_divergence_type": "js_divergence",
    "label_smoothing": 0.1,
    "epsilon_high": 0.3,
    "delta": 1.5,
    "importance_sampling_level": "sequence",
    "multi_objective_aggregation": "normalize_then_sum",
    "scale_rewards": "batch",
    "reward_weights": [0.5],
    "beta": 0.25,
    "num_generations": 4,
    "vllm_mode": "server",
    "vllm_model_impl": "transformers",
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_server_base_url": "http://localhost:8000",
    "vllm_structured_outputs_regex": "[0-9]+",
    "metric_for_best_model": "loss",
    "resume_from_checkpoint": "auto",
    "top_p": 0.9,
    "min_p": 0.1,
    "max_steps": 2,
    "adam_beta1": 0.8,
    "adam_beta2": 0.99,
    "top_entropy_quantile": 0.5,
    "lmbda": 0.75,
    "lora_dropout": 0.1,
    "vllm_gpu_memory_utilization": 0.5,
    "ref_model_mixup_alpha": 0.5,
    "lora_target_modules": ["q_proj"],
    "lora_target_parameters": ["experts.down_proj"],
    "lora_modules_to_save": ["lm_head"],
    "lora_task_type": "TOKEN_CLS",
    "dtype": "bfloat16",
    "attn_implementation": "eager",
    "dataset_name": "others.jsonl",
    "dataset_config": "main",
    "dataset_train_split": "validation",
    "dataset_test_split": "validation",
    "reward_funcs": ["think_format_reward"],
    "reward_model_name_or_path": "judge",
    "teacher_model_name_or_path": "teacher",
    "model_name_or_path": "other",
    "chat_template_path": "template.jinja",
    "datasets": [{"path": "rows.jsonl", "columns": ["prompt"]}],
    "bnb_4bit_quant_type": "fp4",
    "model_revision": "v2",
    "teacher_model_revision": "v2",
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "cache_implementation": "static",
    "trackio_static_space_id": "me/space",
    "warmup_steps": 3,
    "test_split_size": 0.2,
    "pad_to_multiple_of": 8,
    "liger_kernel_config": {"rope": True},
    "gradient_checkpointing": False,
    "transformers_continuous_batching_config": {"block_size": 16},
    "eval_delay": 1,
    "eval_steps": 7,
    "max_length": 64,
}
VLLM = {"use_vllm": True}
EVALUATED = {"eval_dataset": "rows.jsonl", "eval_strategy": "steps", "eval_steps": 5}
PEFT = {"use_peft": True}
ADAPTIVE = {"use_adaptive_entropy": True}
CORRECTED = {"vllm_importance_sampling_correction": True}
# What TRL needs beside a field for the field to matter
BESIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"), PEFT),
    **dict.fromkeys(("lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora"), PEFT),
    "eval_strategy": {"dataset_name": "hub/name"},
    "eval_steps": EVALUATED,
    "eval_on_start": EVALUATED,
    "metric_for_best_model": {**EVALUATED, "save_steps": 5},
    "greater_is_better": {**EVALUATED, "save_steps": 5, "metric_for_best_model": "reward"},
    "load_best_model_at_end": {**EVALUATED, "save_steps": 5},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_min_lr"},
    "optim_args": {"optim": "sgd"},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing": True},
    "ref_model_mixup_alpha": {"sync_ref_model": True, "beta": 0.1},
    "ref_model_sync_steps": {"sync_ref_model": True, "beta": 0.1},
    "sync_ref_model": {"beta": 0.1},
    "packing_strategy": {"packing": True},
    "max_tool_calling_iterations": {"grpo": {"tools": ["my_tools.search"]}, "distillation": {}},
    **dict.fromkeys(
        ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap"),
        CORRECTED,
    ),
    "f_alpha_divergence_coef": {"f_divergence_type": "alpha_divergence"},
    "label_smoothing": {"loss_type": ["robust"]},
    "discopop_tau": {"loss_type": ["discopop"]},
    "precompute_ref_batch_size": {"precompute_ref_log_probs": True},
    "teacher_model_init_kwargs": {"teacher_model_name_or_path": "teacher"},
    "teacher_model_revision": {"teacher_model_name_or_path": "teacher"},
    "seq_kd": {"teacher_model_name_or_path": "teacher"},
    "dataset_test_split": EVALUATED,
    "dataset_config": {"dataset_name": "hub/name"},
    "dataset_streaming": {"max_steps": 5},
    "streaming": {"datasets": [{"path": "rows.jsonl"}], "max_steps": 5},
    "test_split_size": {"datasets": [{"path": "rows.jsonl"}], "eval_strategy": "steps", "eval_steps": 5},
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), PEFT),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), PEFT | {"load_in_4bit": True}
    ),
    **dict.fromkeys(("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"), ADAPTIVE),
    "entropy_target": {"use_adaptive_entropy": True},
}
CHANGES_NOTHING = ("remove_unused_columns",)  # where nobody reads further columns, there as here
OF_ALL = "sft"  # the trainer that is asked for fields that all have in common
NEEDED = {"model_name_or_path": "model", "reward_funcs": "reward_funcs"}  # null at its default, and must be given


def config_classes() -> dict[str, list[type[Any]]]:
    """TRL's classes of the fields that a trainer's file may hold, by the trainer's name here."""
    import trl
    from trl.experimental.gkd import GKDConfig
    from trl.scripts.grpo import GRPOScriptArguments

    shared = [trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig]
    return {
        "grpo": [trl.GRPOConfig, trl.ModelConfig, GRPOScriptArguments, trl.DatasetMixtureConfig],
        "sft": [trl.SFTConfig, *shared],
        "dpo": [trl.DPOConfig, *shared],
        "reward": [trl.RewardConfig, *shared],
        "gkd": [GKDConfig, *shared],
        "distillation": [trl.DistillationConfig, *shared],
    }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one field of one class: at its default, and at another value."""

    trainer: str
    owner: str
    field: str
    at_default: str
    at_other: str
    told: str


def outcomes(*, shared_once: bool = False) -> Iterator[Outcome]:
    """Every field of every class; ``shared_once``: fields that all trainers have in common are asked of one of them."""
    with tempfile.TemporaryDirectory() as folder:
        here, level = os.getcwd(), logger.level
        os.chdir(folder)
        logger.setLevel(logging.INFO)  # once: it goes through all loggers of the process
        try:
            Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
            Path("others.jsonl").write_text('{"prompt": "c", "completion": "d"}\n')
            Path("template.jinja").write_text("{{ messages }}")
            for trainer, owners in config_classes().items():
                for owner in owners:
                    for field in dataclasses.fields(owner):
                        if not shared_once or trainer == OF_ALL or not is_shared(owner, field.name):
                            yield outcome(trainer, owner, field)
        finally:
            logger.setLevel(level)
            os.chdir(here)


def is_shared(owner: type[Any], name: str) -> bool:
    """Whether the field stands for the same in files of all trainers."""
    import trl
    from transformers import TrainingArguments

    is_of_all = owner in (trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig)
    return is_of_all or name in {field.name for field in dataclasses.fields(TrainingArguments)}


def outcome(trainer: str, owner: type[Any], field: dataclasses.Field[Any]) -> Outcome:
    """What becomes of one field."""
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    default = getattr(default, "value", default)
    first, told = read(trainer, field.name, default, {}, at_default=True)
    beside = BESIDE.get(field.name, {})
    beside = beside.get(trainer, beside)
    second, reason = read(trainer, field.name, other_value(trainer, owner, field, default), beside)
    return Outcome(trainer, owner.__name__, field.name, first, second, told if first == "refused" else reason)


def other_value(trainer: str, owner: type[Any], field: dataclasses.Field[Any], default: Any) -> Any:
    """A value of the field that is not its default."""
    if field.name in OTHER:
        value = OTHER[field.name]
        return value[trainer] if isinstance(value, dict) and trainer in value else value
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default * 2 or type(default)(1)
    hint = typing.get_type_hints(owner).get(field.name, str)
    kinds = typing.get_args(hint) or (hint,)
    values = {bool: True, int: 16, float: 0.5, str: "something", dict: {"key": 1}, list: ["something"]}
    return next((value for kind, value in values.items() if kind in kinds), "something")


def read(trainer: str, name: str, value: Any, beside: dict[str, Any], *, at_default: bool = False) -> tuple[str, str]:
    """One word for what becomes of ``name: value``, and the message."""
    config_type = configuration_named(trainer)
    assert config_type is not None
    base = {"model": "m", "dataset": "rows.jsonl"}
    if trainer == "grpo":
        base["reward_funcs"] = ["exact_answer"]  # type: ignore[assignment]
    if not at_default and name.startswith("vllm_") and trainer in ("grpo", "gkd", "distillation"):
        beside = {**VLLM, **beside}
    stands_for = {"model_name_or_path": "model", "dataset_name": "dataset", "datasets": "dataset"}
    without = {stands_for.get(key, key) for key in (name, *beside) if value is not None and value != []}
    kept = {key: one for key, one in base.items() if key not in without}
    if value is None and name in NEEDED:
        kept.pop(NEEDED[name])
        beside = {**beside, "model": "m", "reward_model": "judge"} if name == "reward_funcs" else beside
        if name == "model_name_or_path":  # TRL's trainers fail without it too
            return "taken", ""
    told = logging.Handler()
    lines: list[str] = []
    told.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(told)
    plain = without_field(
        config_type, yaml.safe_dump({**base, **{k: beside[k] for k in beside if k not in stands_for}})
    )
    lines.clear()
    try:
        config = load(config_type, yaml.safe_dump({**kept, **beside, name: value}))
    except ConfigError as error:
        is_unknown = "unknown key" in str(error) or "is another name of" in str(error)
        return ("unknown" if is_unknown else "refused"), str(error)
    finally:
        logger.removeHandler(told)
    own = ALIASES.get(name, name)
    if (
        name in CHANGES_NOTHING
        or config != plain
        or is_neutral(name, value)
        or own in {field.name for field in dataclasses.fields(config)}
    ):
        return "taken", ""
    if any(name in line for line in lines):
        return "told", lines[0]
    return "silent", ""


@functools.cache
def without_field(config_type: Any, text: str) -> Any:
    """The configuration to compare with, that many fields have in common; None if there is none without the field."""
    try:
        return load(config_type, text)
    except ConfigError:
        return None


def load(config_type: type[Any], text: str) -> Any:
    """The configuration of a file with this text."""
    file = Path("keys.yaml")
    file.write_text(text)
    return load_config(config_type, ["--config", str(file)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="list every field")
    options = parser.parse_args()
    found = list(outcomes())
    for one in found:
        is_listed = one.at_default in ("refused", "unknown") or one.at_other in ("unknown", "silent")
        if options.all or is_listed:
            print(f"{one.trainer:12} {one.owner:20} {one.field:40} {one.at_default:8} {one.at_other:8} {one.told}")
    print()
    for trainer in dict.fromkeys(one.trainer for one in found):
        mine = [one for one in found if one.trainer == trainer]
        print(f"{trainer:12} {len(mine):4} fields", *summary(mine))
    print(f"{'all':12} {len(found):4} fields", *summary(found))


def summary(found: list[Outcome]) -> list[str]:
    """Counts of outcomes at another value, and of mistakes at defaults."""
    counts = Counter(one.at_other for one in found)
    wrong = sum(one.at_default in ("refused", "unknown") for one in found)
    words = [f"{word} {counts[word]}" for word in ("taken", "told", "refused", "unknown", "silent")]
    return [", ".join(words) + ";", f"refused or unknown at the default {wrong}"]


if __name__ == "__main__":
    main()
