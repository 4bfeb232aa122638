"""Whose defaults hold for the keys that nobody gives, and whose meaning keys have that two systems read otherwise.

    defaults: trl         the defaults of the configurations here, which are TRL's (1.16), except for ``DEPARTURES``
    defaults: ms-swift    ms-swift's (4.6), in the table below, each with the file of its source that it stands in

It is a property of the file: the key ``defaults`` says it, or else a key that only ms-swift has. What follows is put
into the configuration as keys of ours, before it is made. ``--print_config`` shows it, one line of the run tells it,
and nothing later asks whose defaults hold. A configuration that is made in Python says its values itself.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayhelper import ConfigError, DeviceGroups
from trainers.configuration.others.ms_swift_only import MS_SWIFT_ONLY
from trainers.configuration.reading.given_keys import GivenKeys, plain

TRL, MS_SWIFT = "trl", "ms-swift"
ARGUMENTS, SFT = "swift/trainers/arguments.py", "swift/arguments/sft_args.py"
BASE, TEMPLATE = "swift/arguments/base_args/base_args.py", "swift/arguments/base_args/template_args.py"
RLHF, MIXIN = "swift/arguments/rlhf_args.py", "swift/rlhf_trainers/args_mixin.py"
MEGATRON = "swift/megatron/arguments/megatron_args.py"
SEQUENCES_A_STEP = 16  # that ms-swift chooses gradient_accumulation_steps for

Keys = Mapping[str, Any]  # of the run, as far as they are known: given, or by default
Condition = Callable[[Keys], bool]


@dataclass(frozen=True)
class Default:
    """A default of ms-swift that differs from ours."""

    key: str
    value: Any  # or a function of the other keys
    file: str  # of ms-swift's source
    holds: Condition = lambda keys: True


def _is_megatron(keys: Keys) -> bool:
    return bool(keys.get("backend") == "megatron")


def _is_fsdp(keys: Keys) -> bool:
    return not _is_megatron(keys)


def _has_adapter(keys: Keys) -> bool:
    return keys.get("tuner_type") in ("lora", "adalora")


def _learns_whole(keys: Keys) -> bool:
    return _is_fsdp(keys) and keys.get("tuner_type") == "full" and not keys.get("freeze_llm")


def _has_four_bits(keys: Keys) -> bool:
    return keys.get("load_in_4bit") is True


def _is_quantized(keys: Keys) -> bool:
    return _has_four_bits(keys) or keys.get("load_in_8bit") is True


def _has_vllm(keys: Keys) -> bool:
    return bool(keys.get("rollout_engine") == "vllm")


def _has_turns(keys: Keys) -> bool:
    return keys.get("environment") is not None


def _has_kl_in_loss(keys: Keys) -> bool:
    import trainers.rewards.estimators  # noqa: F401 - which registers its own
    from trainers.plugins import ADVANTAGES

    estimator = ADVANTAGES.get(str(keys.get("advantage_estimator")))
    by_default = bool(estimator and estimator.kl_in_reward)
    return not (by_default if keys.get("kl_in_reward") is None else keys["kl_in_reward"])


def _counts_steps(keys: Keys) -> bool:
    return _is_fsdp(keys) and not keys.get("global_batch_size") and _counts_rows(keys)


def _counts_rows(keys: Keys) -> bool:
    """Whether rows say how large a micro-batch is, or would if the run did not choose it."""
    return keys.get("token_budget") in (None, "auto")


def _accumulation(keys: Keys) -> int:
    size = keys.get("per_device_train_batch_size")
    return max(1, math.ceil(SEQUENCES_A_STEP / (size if isinstance(size, int) and size > 0 else 1) / _workers(keys)))


def _workers(keys: Keys) -> int:
    """Workers of role train, as far as the keys say."""
    if keys.get("use_ray") is not True:
        return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    groups = keys.get("device_groups")
    try:
        named = DeviceGroups.parse(groups or {})
        hosts = [group for group in named.groups if {"train", "default"} & set(group.roles)]
        return hosts[0].num_workers if hosts else 1
    except (ConfigError, TypeError, AttributeError):
        return 1  # what is wrong with it is told elsewhere


def _has_rows(keys: Keys) -> bool:
    return bool(keys.get("eval_dataset")) or bool(keys.get("split_dataset_ratio"))


def _ends_early(keys: Keys) -> bool:
    return bool(keys.get("early_stop_interval"))


def _evaluates_as_it_saves(keys: Keys) -> bool:
    return _has_rows(keys) and keys.get("save_strategy") in ("epoch", "no")


def _evaluates_by_steps(keys: Keys) -> bool:
    return _has_rows(keys) and bool(keys.get("save_steps")) and keys.get("eval_strategy") == "steps"


def _estimates_kl(keys: Keys) -> bool:
    return _is_fsdp(keys) and _counts_rows(keys) and not keys.get("packing") and keys.get("loss_type") == "kto"


def _adds_likelihood(keys: Keys) -> bool:
    """Whether the loss of pairs has the likelihood of the chosen completions beside it."""
    if not _counts_rows(keys) or keys.get("packing"):
        return False
    listed = keys.get("loss_type")
    types = listed.split() if isinstance(listed, str) else listed or ()
    return bool("learns_prompts" in keys or keys.get("cpo_alpha") or keys.get("rpo_alpha") or "sft" in types)


def _micro_batch(keys: Keys) -> Any:
    """Rows of one micro-batch of a worker."""
    size = keys.get("per_device_train_batch_size")
    return size if isinstance(size, int) and size > 0 else None


def _micro_batches(keys: Keys) -> Any:
    """Rows of one micro-batch of all workers, as far as the keys say."""
    size = _micro_batch(keys)
    return None if size is None else size * _workers(keys)


def _learning_rate(keys: Keys) -> float:
    return 1e-5 if keys.get("tuner_type") == "full" else 1e-4


def _positions(keys: Keys) -> int | None:
    """Tokens that the model knows; None: it is no folder, and rows are not cut."""
    try:
        config = json.loads((Path(str(keys.get("model"))).expanduser() / "config.json").read_text(encoding="utf-8"))
        found = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
        return found if isinstance(found, int) else None
    except (OSError, ValueError, AttributeError):
        return None


def _multiplies_in_bfloat16(keys: Keys) -> bool:
    """Whether there are experts of bfloat16, which alone can be multiplied at once here."""
    return keys.get("dtype") == "bfloat16" and _has_experts(keys)


def _has_experts(keys: Keys) -> bool:
    """Whether the model is a mixture of experts that Megatron trains; one that is no folder is taken for none."""
    if not _is_megatron(keys):
        return False
    found = _model_config(keys)
    return "num_experts" in found or "n_routed_experts" in found or "num_local_experts" in found


def _has_router_loss(keys: Keys) -> bool:
    """Whether TRL's trainer of the same name adds the loss of routers unasked: its coefficient is in the model."""
    if not _is_fsdp(keys) or {"num_labels", "center_rewards_coefficient", "cpo_alpha"} & keys.keys():
        return False
    return '"router_aux_loss_coef"' in _model_config(keys)


def _model_config(keys: Keys) -> str:
    """The text of the model's config.json; '' if there is none that can be read."""
    try:
        return (Path(str(keys.get("model"))).expanduser() / "config.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


# By the class of configurations that has the key; later rows see what earlier ones decided
TABLE: Mapping[str, tuple[Default, ...]] = {
    "RunConfig": (Default("system", "", TEMPLATE),),  # use_chat_template: texts become conversations
    "TrainConfig": (
        Default("tuner_type", "lora", BASE, _is_fsdp),
        Default("use_bnb_nested_quant", True, "swift/arguments/base_args/quant_args.py", _has_four_bits),
        Default("fsdp_sharding_strategy", "no_shard", ARGUMENTS, _is_quantized),
        Default("lora_dropout", 0.05, "swift/arguments/tuner_args.py", _has_adapter),
        Default("freeze_vit", True, "swift/arguments/tuner_args.py", _learns_whole),
        Default("freeze_aligner", True, "swift/arguments/tuner_args.py", _learns_whole),
        Default("learning_rate", _learning_rate, SFT),
        Default("lr_scheduler_type", "cosine", ARGUMENTS),
        Default("weight_decay", 0.1, ARGUMENTS),
        Default("adam_beta2", 0.95, ARGUMENTS, lambda keys: str(keys.get("optim")).startswith(("adamw", "muon"))),
        Default("per_device_train_batch_size", 1, ARGUMENTS, _counts_rows),
        Default("gradient_accumulation_steps", _accumulation, ARGUMENTS, _counts_steps),
        Default("global_batch_size", SEQUENCES_A_STEP, MEGATRON, _is_megatron),
        Default("gradient_checkpointing", True, ARGUMENTS, _is_fsdp),
        Default("logging_steps", 5, ARGUMENTS),
        Default("expert_tensor_parallel_size", 1, MEGATRON, _has_experts),
        Default("moe_grouped_gemm", True, MEGATRON, _multiplies_in_bfloat16),
        Default("max_length", _positions, BASE),
        Default("per_device_eval_batch_size", 1, ARGUMENTS),
        Default("eval_strategy", lambda keys: keys.get("save_strategy"), SFT, _evaluates_as_it_saves),
        Default("eval_steps", lambda keys: keys.get("save_steps"), SFT, _evaluates_by_steps),
        Default("metric_for_best_model", "loss", SFT, _ends_early),
    ),
    "CompletionConfig": (
        Default("temperature", 0.9, RLHF),
        Default("max_completion_length", 512, RLHF),
        Default("rollout_engine", "vllm", MEGATRON, _is_megatron),
        Default(
            "vllm_gpu_memory_utilization",
            0.9,
            MIXIN,
            lambda keys: _has_vllm(keys) and "gpu_memory_utilization" not in (keys.get("vllm_engine_kwargs") or {}),
        ),
    ),
    "SFTConfig": (
        Default("truncation_mode", "drop", TEMPLATE),
        Default("loss_scale", "default", TEMPLATE),
    ),
    **dict.fromkeys(
        ("DPOConfig", "PairConfig"),
        (
            Default("truncation_mode", "drop", TEMPLATE),
            Default("nll_batch_size", _micro_batch, "swift/rlhf_trainers/dpo_trainer.py", _adds_likelihood),
        ),
    ),
    "ClassificationConfig": (Default("truncation_mode", "drop", TEMPLATE),),
    "KTOConfig": (
        Default("truncation_mode", "drop", TEMPLATE),
        Default("kl_batch_size", _micro_batches, "swift/rlhf_trainers/kto_trainer.py", _estimates_kl),
    ),
    "PretrainConfig": (
        Default("packing", False, BASE),
        Default("packing_strategy", "bfd", BASE),
        Default("loss_scale", "all", "swift/arguments/pretrain_args.py"),
        Default("use_chat_template", False, "swift/arguments/pretrain_args.py"),
        Default("system", None, "swift/arguments/pretrain_args.py"),
    ),
    "GRPOConfig": (
        Default("completion_length_limit_scope", "per_round", MIXIN, _has_turns),
        Default("beta", 0.04, RLHF),
        Default("loss_type", "grpo", RLHF),
        Default("metric_for_best_model", "reward", RLHF, _ends_early),
        Default("use_bias_correction_kl", False, "swift/rlhf_trainers/grpo_trainer.py", _has_kl_in_loss),
        Default("kl_clip_max", 10.0, "swift/rlhf_trainers/grpo_trainer.py", _has_kl_in_loss),
        Default("dataloader_drop_last", True, "swift/rlhf_trainers/arguments.py"),
        Default("shuffle_generation", False, "swift/rlhf_trainers/grpo_trainer.py"),
        Default("gradient_accumulation_steps", 1, RLHF, _counts_steps),
        Default(
            "rollout_importance_sampling_clip_max",
            2.0,
            MIXIN,
            lambda keys: keys.get("rollout_importance_sampling_mode") is not None,
        ),
    ),
    "ORPOConfig": (Default("learns_prompts", "answers", "swift/rlhf_trainers/rlhf_mixin.py"),),
    "CPOConfig": (Default("simpo_gamma", 1.0, RLHF, lambda keys: keys.get("loss_type") == "simpo"),),
    "GKDConfig": (
        Default("dataloader_drop_last", True, "swift/rlhf_trainers/gkd_trainer.py"),
        Default("completion_length_limit_scope", "per_round", MIXIN, _has_turns),
        Default(
            "gkd_topk_add_tail",
            False,
            "swift/rlhf_trainers/gkd_loss.py",
            lambda keys: isinstance(keys.get("gkd_logits_topk"), int) and keys["gkd_logits_topk"] > 1,
        ),
    ),
    "SamplingConfig": (
        Default("num_sampling_batch_size", 1, "swift/arguments/sampling_args.py"),
        Default("output_dir", "sample_output", "swift/arguments/sampling_args.py"),
    ),
}


@dataclass(frozen=True)
class Departure:
    """A default of ours that is not TRL's, though ``defaults`` is trl: the run says so."""

    key: str
    theirs: Any
    holds: Condition = lambda keys: True


DEPARTURES = (
    Departure("gradient_checkpointing", True, lambda keys: keys.get("recompute_granularity") is None),
    Departure("rollout_importance_sampling_correction", True, _has_vllm),
    Departure("router_aux_loss_coef", "the model's own", _has_router_loss),
)
# What TRL's own spelling of a key brings with it, in place of a departure: (what is written, key, value)
OF_TRLS_NAMES = (("use_vllm", "rollout_importance_sampling_correction", True),)


OF_EITHER = ("defaults", "token_budget")  # no default of ms-swift, though not the class's
# Whose losses or noise depend on the rows of a micro-batch, so that nothing but the file decides which they are
CUT_MATTERS = ("router_aux_loss_coef", "neftune_noise_alpha")
SORTING_LOSSES = ("aot", "aot_unpaired")  # over the rows of a micro-batch


@dataclass(frozen=True)
class Holding:
    """Whose defaults hold in a run, and why."""

    system: str
    said_by: tuple[str, ...] = ()  # keys that only this system has; none: the key ``defaults``, or nothing says it

    @property
    def is_ms_swift(self) -> bool:
        return self.system == MS_SWIFT


def holding(given: GivenKeys) -> Holding:
    """Whose defaults hold, by the key ``defaults`` or by the names of the other keys, those in sections too.

    Called before anything is translated.
    """
    said = given.get("defaults")
    if said is not None:
        return Holding(str(said))
    names = [*given.written.values()]
    names += [str(key) for value in given.values.values() if isinstance(value, Mapping) for key in value]
    found = tuple(dict.fromkeys(name for name in names if name in MS_SWIFT_ONLY))
    return Holding(MS_SWIFT, found) if found else Holding(TRL)


def defaults_of(held: Holding, config_type: type, ours: Mapping[str, Any], given: GivenKeys) -> dict[str, Any]:
    """The default of every key of the configuration, where ``ours`` are those of its class; they depend on other keys.

    Called twice: before translations, which ask for defaults, and after them, when all keys are known.
    """
    keys = {**ours, "defaults": held.system, **{name: given.get(name) for name in given.values}}
    found = {"defaults": held.system}
    for default in _rows(held, config_type, given):
        if default.key in ours and default.key not in given.values and default.holds(keys):
            found[default.key] = default.value(keys) if callable(default.value) else default.value
            keys[default.key] = found[default.key]
    if "gradient_accumulation_steps" in ours and _counts_generations(keys, given):
        found["gradient_accumulation_steps"] = ours["gradient_accumulation_steps"]
    if "token_budget" in ours and _may_be_cut(keys, given, joins=bool(getattr(config_type, "JOINS_ROWS", False))):
        found["token_budget"] = "auto"
    is_said = {"gradient_checkpointing", "recompute_granularity"} & set(given.values)
    if "gradient_checkpointing" in ours and not (is_said or held.is_ms_swift or _is_megatron(keys)):
        found["gradient_checkpointing"] = "auto"
    return {**ours, **found}


def _may_be_cut(keys: Keys, given: GivenKeys, *, joins: bool) -> bool:
    """Whether a run may choose its micro-batches: no key says how large they are, and no number depends on it.

    The sequences of a step stay those of ``per_device_train_batch_size``. ``joins``: ``packing`` makes rows of rows.
    """
    if {"per_device_train_batch_size", "token_budget"} & set(given.values) or _is_megatron(keys):
        return False
    said = keys.get("loss_type")  # not judged yet: it may be anything
    passes_twice = "infonce_use_batch" in keys and not keys.get("disable_dropout")  # which must draw alike
    sorts = passes_twice or any(one in SORTING_LOSSES for one in (said if isinstance(said, list | tuple) else [said]))
    return not (sorts or any(keys.get(name) for name in CUT_MATTERS) or (keys.get("packing") and not joins))


def _rows(held: Holding, config_type: type, given: GivenKeys) -> Iterable[Default]:
    """What a base class says first, and each key once: as the class says that is nearest."""
    if not held.is_ms_swift:
        for name, key, value in OF_TRLS_NAMES:
            if name in given.written and not {"rollout_importance_sampling_mode"} & set(given.values):
                yield Default(key, value, "trl/trainer/grpo_config.py", _has_vllm)
        return
    rows: dict[str, Default] = {}
    for kind in reversed(config_type.__mro__):
        rows |= {default.key: default for default in TABLE.get(kind.__name__, ())}
    yield from rows.values()


def _counts_generations(keys: Keys, given: GivenKeys) -> bool:
    """Whether global_batch_size, which no accumulation may stand beside, says the sequences of a step."""
    return bool(keys.get("global_batch_size")) and "gradient_accumulation_steps" not in given.values


def told_of(held: Holding, ours: Mapping[str, Any], found: Mapping[str, Any], given: GivenKeys) -> str:
    """One line of whose defaults hold and what follows from it, for the log."""
    why = f" (the file has {', '.join(held.said_by[:4])})" if held.said_by else ""
    keys = {**found, **{name: plain(value) for name, value in given.values.items()}}
    if held.is_ms_swift:
        others = [name for name in found if name in ours and found[name] != ours[name] and name not in given.values]
        listed = ", ".join(f"{name} {_shown(found[name]) or repr('')}" for name in others if name not in OF_EITHER)
        return f"defaults: {MS_SWIFT}{why}. These differ from TRL's: {listed or 'none'}"
    here = [
        f"{row.key} {_shown(keys.get(row.key))} (TRL: {_shown(row.theirs)})"
        for row in DEPARTURES
        if row.key in ours and row.key not in given.values and keys.get(row.key) != row.theirs and row.holds(keys)
    ]
    return f"defaults: {TRL}{', except for ' + ', '.join(here) if here else ''}"


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
