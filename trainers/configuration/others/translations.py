"""What other systems' keys mean in ours, where that takes more than another name: ms-swift's, Megatron's, TRL's.

Each function looks at keys that belong together, after they have been gathered from file and command line, takes those
that are none of ours and puts ours in their place. A mistake is noted, so that all are told at once.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rayhelper import ConfigError
from trainers.configuration.megatron import MegatronConfig
from trainers.configuration.others.engine_names import decide_engine, translate_engine
from trainers.configuration.others.ms_swift_keys import (
    engine_beside_training,
    room_for_prompts,
    translate_ms_swift,
)
from trainers.configuration.others.other_names import HINTS, is_neutral
from trainers.configuration.others.trl_translations import translate_trl
from trainers.configuration.others.tuner_names import translate_tuner
from trainers.configuration.reading.given_keys import GivenKeys, plain
from trainers.configuration.reading.typed_values import typed
from trainers.configuration.saving import SavingConfig
from trainers.configuration.values import types_of

ATTENTION = {  # ms-swift's attn_impl and Megatron's attention_backend, in transformers' words
    "flash_attn": "flash_attention_2",
    "flash": "sdpa",  # torch's own FlashAttention kernel, which needs no further package
    "fused": "sdpa",
    "unfused": "eager",
    "local": "eager",
}
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
DEEPSPEED = {  # ZeRO stage, its optional offload: sharding strategy, whether weights are freed after the forward pass
    "zero0": ("no_shard", None),
    "zero1": ("full_shard", False),  # with less memory: gradients lie in shards too
    "zero2": ("full_shard", False),
    "zero3": ("full_shard", True),
}
OFFLOAD = "_offload"  # after a stage that shards: weights and optimizer lie on the host
STAGES = (*DEEPSPEED, *(f"{stage}{OFFLOAD}" for stage, (strategy, _) in DEEPSPEED.items() if strategy == "full_shard"))
TRUNCATIONS = {  # ms-swift's truncation_strategy: ours, and what becomes of rows that are too long
    "right": ("keep_start", "rows keep their start"),
    "left": ("keep_end", "rows keep their end"),
    "delete": ("drop", "long rows are dropped"),
}
SCHEDULERS_NOT_BUILT = {
    "thinking_tips_scheduler": "it makes a sample of each turn, which is not supported. Write math_tip_trick, or a "
    "scheduler of yours with check_finished and step",
}
SHARES = ("eval_steps", "save_steps", "logging_steps")  # below 1 a share of the run's steps to transformers
COSINE = {  # arguments of ms-swift's reward cosine, in TRL's words
    "cosine_max_len": "max_len",
    "cosine_min_len_value_wrong": "min_value_wrong",
    "cosine_max_len_value_wrong": "max_value_wrong",
    "cosine_min_len_value_correct": "max_value_correct",
    "cosine_max_len_value_correct": "min_value_correct",
}
COSINE_DEFAULTS = (-0.5, 0.0, 1.0, 0.5)  # ms-swift's, of all but the first
CONSTANT = ("constant", "constant_with_warmup")


def translate(
    given: GivenKeys, config_type: type, defaults: Mapping[str, Any], rlhf_types: Callable[[], Mapping[str, type]]
) -> None:
    """Puts our keys in place of others' in ``given``.

    ``defaults`` are those of the keys of ``config_type``; ``rlhf_types`` gives the configurations by ms-swift's names.
    """
    _rlhf_type(given, config_type, rlhf_types)
    translate_ms_swift(given, defaults)
    decide_engine(given, defaults)
    translate_trl(given, defaults)
    translate_engine(given)
    _precision(given)
    _attention(given)
    _schedule(given, defaults)
    _generation(given)
    translate_tuner(given, defaults)
    _sharding(given)
    _micro_batches(given)
    _engine_memory(given)
    _recomputation(given)
    _megatron(given, defaults)
    _evaluation(given, defaults)
    _saving(given, defaults)
    _shares(given)
    _data(given, defaults)
    _long_rows(given, defaults)
    _rewards(given, defaults)
    _turns(given)
    _thinking(given)
    _samplers(given)
    _server(given)
    _kl(given, defaults)
    engine_beside_training(given)
    room_for_prompts(given)


def _rlhf_type(given: GivenKeys, config_type: type, rlhf_types: Callable[[], Mapping[str, type]]) -> None:
    if not given.foreign("rlhf_type"):
        return
    asked, known = given.take("rlhf_type"), rlhf_types()
    folder, _, name = config_type.__module__.rpartition(".")
    own = f"rayhelper {folder.rpartition('.')[2]}" if name == "config" else f"a run of {config_type.__name__}"
    remedy = "Write rayhelper rlhf (of ms-swift's commands: swift rlhf or megatron rlhf)"
    if config_type not in known.values():  # whatever it is
        given.refuse("rlhf_type", f"rlhf_type is {asked}, but this is {own}, which has none. {remedy}, or remove it")
    elif problem := rlhf_problem(asked, known):
        given.refuse("rlhf_type", problem)
    elif known[asked] is not config_type:
        given.refuse("rlhf_type", f"rlhf_type is {asked}, but this is {own}. {remedy}")


def rlhf_problem(asked: Any, known: Collection[str]) -> str | None:
    """Why there is no trainer of this rlhf_type, of those that are ``known``; None if there is one."""
    return None if asked in known else f"rlhf_type must be one of {', '.join(known)}, got {asked!r}"


def _precision(given: GivenKeys) -> None:
    if given.foreign("fp16") and given.take("fp16") not in (False, None):
        given.refuse("fp16", "fp16 is not supported: float16 is not offered. Write dtype: bfloat16")
    if given.foreign("bf16") and "dtype" in given.known:
        bf16 = given.take("bf16")
        if bf16 not in (True, False, None):
            given.refuse("bf16", f"bf16 must be true or false, got {bf16}")
        elif bf16 is not None:
            given.put("dtype", "bfloat16" if bf16 else "float32", "bf16")


def _attention(given: GivenKeys) -> None:
    for name in ("attn_impl", "attention_backend"):
        if given.foreign(name) and "model_init_kwargs" in given.known:
            value = given.take(name)
            if given.get("backend") == "megatron":
                given.notes[name] = "backend: megatron uses torch's fastest attention for the device and dtype"
                continue
            meant = ATTENTION.get(value, value) if isinstance(value, str) else value
            if meant in PACKAGES and not is_installed(PACKAGES[meant]):
                given.notes[name] = f"{PACKAGES[meant]} is not installed: torch's own FlashAttention kernel is used"
                meant = "sdpa"
            if meant not in ("auto", None):
                given.put_inner("model_init_kwargs", "attn_implementation", meant, name)


def _schedule(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Megatron's decay to ``min_lr``, by a cosine unless ``lr_decay_style`` (or lr_scheduler_type) says otherwise."""
    if "lr_scheduler_type" not in given.known:
        return
    style = given.take("lr_decay_style") if given.foreign("lr_decay_style") else None
    if style is not None and not given.foreign("min_lr"):
        given.put("lr_scheduler_type", "constant_with_warmup" if style == "constant" else style, "lr_decay_style")
    if not given.foreign("min_lr"):
        return
    floor, rate = given.take("min_lr"), given.get("learning_rate", defaults["learning_rate"])
    if isinstance(floor, bool) or not isinstance(floor, (int, float)) or not isinstance(rate, (int, float)):
        given.refuse("min_lr", f"min_lr must be a number, got {floor!r}")
        return
    shape = style or given.get("lr_scheduler_type") or ("cosine" if floor else None)
    if floor > rate:
        given.refuse("min_lr", f"min_lr {floor} is above learning_rate {rate}")
    elif floor == rate and shape == "cosine":
        given.values.pop("lr_scheduler_type", None)
        given.put("lr_scheduler_type", "constant_with_warmup", "min_lr")
    elif shape in ("cosine", "cosine_with_min_lr") and floor:
        given.values.pop("lr_scheduler_type", None)
        given.put("lr_scheduler_type", "cosine_with_min_lr", "min_lr")
        given.put_inner("lr_scheduler_kwargs", "min_lr", floor, "min_lr")
    elif shape == "linear" and floor:
        given.values.pop("lr_scheduler_type", None)
        given.put("lr_scheduler_type", "polynomial", "min_lr")
        given.put_inner("lr_scheduler_kwargs", "lr_end", floor, "min_lr")
        given.put_inner("lr_scheduler_kwargs", "power", 1.0, "min_lr")
    elif shape in CONSTANT and style is not None:
        given.put("lr_scheduler_type", "constant_with_warmup", "lr_decay_style")
    elif shape in CONSTANT:
        return  # above its floor always
    elif floor:
        given.refuse("min_lr", f"min_lr is not supported with lr_scheduler_type {shape}: write cosine, or remove it")
    elif style is not None:
        given.put("lr_scheduler_type", style, "lr_decay_style")


def _generation(given: GivenKeys) -> None:
    """Of Megatron's names, a generation is ``steps_per_generation`` optimizer steps; TRL's count micro-batches."""
    is_megatron = given.written.get("per_device_train_batch_size") == "micro_batch_size"
    needed = {"steps_per_generation", "global_batch_size", "generation_batch_size"}
    if (
        not is_megatron
        or not needed <= set(given.known)
        or not {*needed} - {"generation_batch_size"} <= set(given.values)
    ):
        return
    steps, size = given.get("steps_per_generation"), given.get("global_batch_size")
    if type(steps) is int and type(size) is int:
        del given.values["steps_per_generation"]
        given.put("generation_batch_size", steps * size, "steps_per_generation")


def _sharding(given: GivenKeys) -> None:
    if not given.foreign("deepspeed") or "fsdp_sharding_strategy" not in given.known:
        return
    value = given.take("deepspeed")
    if value is None:
        return
    if given.get("backend") == "megatron":
        given.refuse(
            "deepspeed",
            f"deepspeed {value} is of backend: fsdp. With megatron write use_distributed_optimizer, param_offload and "
            "optimizer_offload, or remove it",
        )
        return
    if not isinstance(value, str) or value not in STAGES:
        given.refuse(
            "deepspeed",
            f"deepspeed {value} is not supported: weights, gradients and optimizer are sharded by FSDP2. Write "
            f"{_either(STAGES)}, or the fsdp_* keys themselves",
        )
        return
    stage = value.removesuffix(OFFLOAD)
    strategy, frees = DEEPSPEED[stage]
    if value in ("zero1", "zero2") and (given.get("load_in_4bit") is True or given.get("load_in_8bit") is True):
        strategy, frees = "no_shard", None
        given.notes["deepspeed"] = "each worker has all of the quantized weights, and the small adapter's optimizer"
    given.put("fsdp_sharding_strategy", strategy, "deepspeed")
    if frees is not None:
        given.put("fsdp_reshard_after_forward", frees, "deepspeed")
    if value != stage:
        given.put("fsdp_offload_params", True, "deepspeed")


def _micro_batches(given: GivenKeys) -> None:
    """``per_device_train_batch_size: auto``: the step has the sequences of the default, and the run cuts them."""
    name = "per_device_train_batch_size"
    if name in given.known and given.get(name) == "auto":
        given.put("token_budget", "auto", name)
        del given.values[name]


def _engine_memory(given: GivenKeys) -> None:
    """``vllm_gpu_memory_utilization: auto``: null, by which the placement decides."""
    name = "vllm_gpu_memory_utilization"
    if name in given.known and given.get(name) == "auto":
        given.values[name] = None


def _recomputation(given: GivenKeys) -> None:
    """``none`` is null; fsdp recomputes whole layers or nothing."""
    name = "recompute_granularity"
    value = given.get(name)
    if name not in given.known or value is None:
        return
    if value == "none":
        del given.values[name]
    if given.get("backend") == "megatron":
        return
    if value in ("full", "none"):
        given.put("gradient_checkpointing", value == "full", name)
        given.values.pop(name, None)
    elif value == "selective":
        del given.values[name]
        given.notes[name] = "attention keeps no scores; gradient_checkpointing recomputes layers"


def _megatron(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Keys of the other backend: what they ask for may be done by fsdp as it is, or be a field of megatron-core."""
    own = [one.name for one in fields(MegatronConfig)]
    if "megatron" not in given.known:
        return
    if given.get("backend") != "megatron":
        hints = types_of(MegatronConfig)
        for name in [name for name in own if name in given.values]:
            value = given.get(name)
            try:
                typed(name, hints[name], given.values[name])
            except ConfigError as error:  # also where nobody would read it
                given.refuse(name, str(error))
                del given.values[name]
                continue
            if is_neutral(name, value) or (type(value), value) == (type(defaults[name]), defaults[name]):
                del given.values[name]
            elif name in HINTS:
                given.notes[name] = HINTS[name]
                del given.values[name]
        return
    if given.get("sequence_parallel") is True and given.get("tensor_model_parallel_size", 1) == 1:
        del given.values["sequence_parallel"]
        given.notes["sequence_parallel"] = "tensor_model_parallel_size is 1: there is nothing to divide over"
    fuses = given.get("moe_permute_fusion")
    if fuses is True and (given.get("tuner_type") == "lora" or not is_installed("transformer_engine")):
        given.take("moe_permute_fusion")
        given.notes["moe_permute_fusion"] = "tokens are permuted by torch, without TransformerEngine"
    further = given.get("megatron_extra_kwargs")
    if given.foreign("megatron_extra_kwargs") and isinstance(further, Mapping):
        given.take("megatron_extra_kwargs")
        for name, value in further.items():
            given.put_inner("megatron", str(name), plain(value), "megatron_extra_kwargs")
    for name in [name for name in given.values if given.foreign(name)]:
        if is_neutral(name, given.get(name)):
            continue
        if name.startswith("moe_") or name in (
            "attention_softmax_in_fp32",
            "apply_wd_to_qk_layernorm",
        ):  # as a field, known or not
            given.put_inner("megatron", name, given.take(name), name)


def is_installed(module: str) -> bool:
    """Whether this Python has a module; it is not imported."""
    return importlib.util.find_spec(module) is not None


def _evaluation(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Without evaluation data ms-swift does not evaluate, whatever ``eval_strategy`` and ``eval_steps`` say."""
    if "eval_strategy" not in given.known:
        return
    _strategy(given, defaults, "eval_strategy", "eval_steps")
    has_rows = bool(given.get("eval_dataset")) or bool(given.get("split_dataset_ratio"))
    for name in [] if has_rows else [name for name in ("eval_steps", "eval_strategy") if name in given.values]:
        if not _has_a_meaning(name, given.get(name)):
            continue  # it stays, so that its type is told
        if given.get(name) not in (None, "no"):
            given.notes[name] = "there is no eval_dataset"
        del given.values[name]


def _has_a_meaning(name: str, value: Any) -> bool:
    """Whether ``eval_strategy`` or ``eval_steps`` may have such a value; below 1 ``eval_steps`` is a share."""
    if name == "eval_strategy":
        return value in (None, "no", "steps", "epoch")
    value = plain(value)
    return value is None or value is False or (type(value) in (int, float) and 0 <= value < math.inf)


def _saving(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    if "save_strategy" in given.known:
        _strategy(given, defaults, "save_strategy", "save_steps")
        _end(given)
        if given.get("load_best_model_at_end") is True and given.get("metric_for_best_model") is None:
            given.values.pop("metric_for_best_model", None)
            given.put("metric_for_best_model", "loss", "load_best_model_at_end")  # as in transformers
    if given.foreign("finetune") and given.take("finetune") is True and given.get("resume_from_checkpoint"):
        given.refuse("finetune", "finetune starts over, and resume_from_checkpoint continues; remove one of them")


def _strategy(given: GivenKeys, defaults: Mapping[str, Any], name: str, steps: str) -> None:
    """Under another strategy than steps nobody reads ``eval_steps`` or ``save_steps``; no is false to YAML."""
    if name in given.values and given.get(name) is None:
        del given.values[name]
    elif given.get(name) is False:
        given.values[name] = "no"
    strategy = given.get(name, defaults[name])
    if strategy in ("epoch", "best", "no") and steps in given.values:
        count = given.get(steps)
        del given.values[steps]
        if count not in (None, 0, SavingConfig.save_steps):
            given.notes[steps] = f"{name} is {strategy}"


def _end(given: GivenKeys) -> None:
    """ms-swift's ``max_epochs`` ends a run before its ``max_steps`` too; without these it says how long the run is."""
    steps = given.get("max_steps")
    is_limit = given.written.get("num_train_epochs") == "max_epochs" and isinstance(steps, int) and steps > 0
    if is_limit and "num_train_epochs" in given.values:
        given.put("end_after_epochs", given.get("num_train_epochs"), "num_train_epochs")
        del given.values["num_train_epochs"]


def _shares(given: GivenKeys) -> None:
    """A number between 0 and 1 is a share of the run's steps to transformers, and no number of steps here."""
    for name in SHARES:
        share = given.get(name)
        if name not in given.known or not isinstance(share, float) or not 0 < share < 1:
            continue
        del given.values[name]  # or it would be told once more
        steps = given.get("max_steps")
        known = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
        given.refuse(
            name,
            f"{name} {share} is a share of the run, which is not supported: write the number of optimizer steps; "
            + (
                f"{share} of max_steps {steps} is {math.ceil(share * steps)}"
                if known
                else f"multiply the steps of the run by {share} (without max_steps the first lines of a run say them)"
            ),
        )


def _data(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    for name in ("dataset", "eval_dataset", "system"):
        value = given.values.get(name)
        if not isinstance(value, str):
            continue
        path = Path(value).expanduser()
        if name != "system" and len(value.split()) > 1 and not value.startswith(("[", "{")) and not path.exists():
            given.values[name] = value.split()
        elif name == "system" and value.endswith(".txt") and len(value.split()) == 1:
            if path.is_file():
                try:
                    given.values[name] = path.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    given.refuse(name, f"system: {value!r} cannot be read: {error}")
            else:
                given.refuse(name, f"system: there is no file {value!r} (looked for from {Path.cwd()})")
    if given.foreign("data_seed") and given.get("data_seed") == given.get("seed", 42):
        given.take("data_seed")
    if given.foreign("packing_length") and given.get("packing_length") in (
        None,
        given.get("max_length", defaults.get("max_length")),
    ):
        given.take("packing_length")
    _packing(given)
    if given.foreign("enable_dft_loss") and "packing" in given.known and given.take("enable_dft_loss") is True:
        given.put("loss_type", "dft", "enable_dft_loss")
    if {"loss_scale", "packing"} <= set(given.known) and given.get("loss_type") == "loss_scale":
        given.values["loss_type"] = "nll"  # the name that ms-swift's example has for the loss that loss_scale weighs


def _packing(given: GivenKeys) -> None:
    """ms-swift fills packs as is done here. Of GRPO and GKD it packs no rows: they pass the model without padding."""
    if given.get("packing_strategy") == "binpack":
        given.values["packing_strategy"] = "bfd"
    draws = {"gkd_logits_topk", "num_generations"} & set(given.known)
    if given.foreign("packing") and draws and "padding_free" in given.known and given.get("packing") is True:
        given.take("packing")
        given.put("padding_free", True, "packing")


def _long_rows(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """What becomes of rows that are too long; where there is no choice, what is done."""
    if not given.foreign("truncation_strategy"):
        return
    value = given.take("truncation_strategy")
    joins = "packing_strategy" in given.known and given.get("packing", defaults.get("packing")) is True
    modes = {name: meaning for name, meaning in TRUNCATIONS.items() if name != "left" or not joins}  # keep their start
    if value == "delete" and "drop_long_prompts" in given.known:
        given.put("drop_long_prompts", True, "truncation_strategy")
        return
    if "truncation_mode" not in given.known:
        done = (
            "delete"
            if {"center_rewards_coefficient", "sampler_type", "max_negative_samples"} & set(given.known)
            else "left"
        )
        what = "are left out" if done == "delete" else "are cut at the beginning of their prompt"
        instead = None if value in (done, None) else f"{done}: long rows {what}"
    elif isinstance(value, str) and value in modes:
        given.put("truncation_mode", modes[value][0], "truncation_strategy")
        return
    else:
        splits = {"split": "into rows of one stream"} if defaults.get("packing") else {}  # pretraining does so anyway
        accepted = {name: what for name, (_, what) in modes.items()} | splits
        is_done = value is None or (isinstance(value, str) and value in splits)
        instead = None if is_done else _either([f"{name} ({what})" for name, what in accepted.items()])
    if instead is not None:
        given.refuse("truncation_strategy", f"truncation_strategy {value} is not supported: write {instead}")


def _either(choices: Sequence[str]) -> str:
    """``a, b or c``; one alone as it is."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def _rewards(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Arguments of rewards stand beside the other keys in ms-swift, and inside ``reward_funcs`` here."""
    if "reward_funcs" not in given.known or "max_completion_length" not in given.known:
        return
    listed = given.get("reward_funcs", [])
    names = listed.split() if isinstance(listed, str) else listed
    if not isinstance(names, list):
        return
    longest = given.get("max_completion_length", defaults["max_completion_length"])
    soft = [name for name in ("soft_max_length", "soft_cache_length") if given.foreign(name)]
    changed: dict[str, dict[str, Any]] = {}
    if soft and "soft_overlong" in names:
        changed["soft_overlong"] = {"name": "soft_overlong", "soft_max_length": longest}
        changed["soft_overlong"] |= {name: given.take(name) for name in soft}
    scaled = [name for name in COSINE if given.foreign(name)]
    if "cosine" in names and (scaled or not given.get("external_plugins")):  # a plugin may have registered the name
        arguments = dict(zip(COSINE.values(), (longest, *COSINE_DEFAULTS), strict=True))
        arguments |= {COSINE[name]: given.take(name) for name in scaled}
        changed["cosine"] = {"name": "cosine_scaled", **arguments}
    if changed:
        given.values["reward_funcs"] = [
            changed.get(name, name) if isinstance(name, str) else name for name in map(plain, names)
        ]


def _turns(given: GivenKeys) -> None:
    """ms-swift's schedulers are environments here; the reward of theirs counts where ``use_gym_env`` says so."""
    if "environment" not in given.known:
        return
    game, name = given.get("environment"), "multi_turn_scheduler"
    scheduler = given.get(name) if given.foreign(name) else None
    if scheduler in SCHEDULERS_NOT_BUILT:
        given.take(name)
        given.refuse(name, f"{name} {scheduler}: {SCHEDULERS_NOT_BUILT[scheduler]}")
        return
    plays = _player(scheduler, game)
    is_theirs = game is None or plays == game or given.written["environment"] == "gym_env"
    if given.foreign(name) and is_theirs:  # beside an environment of ours it is told as a key that is none
        given.take(name)
        if plays != game:
            given.values.pop("environment", None)
            given.put("environment", plays, name)
    has_environment = given.get("environment") is not None
    said = given.get("use_gym_env") if given.foreign("use_gym_env") else None
    if given.foreign("use_gym_env") and (has_environment or said is not True):
        given.take("use_gym_env")
    is_rewarded = (game is not None) if said is None else said is True
    if "environment_reward" in given.known and has_environment and not is_rewarded:
        given.put("environment_reward", False, name if said is None else "use_gym_env")


def _player(scheduler: Any, game: Any) -> Any:
    """The environment that plays the turns: the scheduler, the game, or the scheduler with the game."""
    if game is None:
        return scheduler
    return game if scheduler in (None, "gym_scheduler") else {"name": scheduler, "gym_env": game}


def _thinking(given: GivenKeys) -> None:
    if given.foreign("enable_thinking") and "chat_template_kwargs" in given.known:
        value = given.take("enable_thinking")
        if value is not None:
            given.put_inner("chat_template_kwargs", "enable_thinking", value, "enable_thinking")


def _samplers(given: GivenKeys) -> None:
    """Engines and rewards of ms-swift's sampling that are not here."""
    if "sampler_engine" not in given.known:
        return
    if given.get("sampler_engine") == "lmdeploy":
        del given.values["sampler_engine"]  # or it would be told once more
        given.refuse("sampler_engine", "sampler_engine lmdeploy is not supported: write vllm, or hf")
    if given.get("external_plugins"):
        return  # which may have functions of these names
    if given.get("orm_model") == "math":
        given.values["orm_model"] = "ms_swift_math"
    elif given.get("orm_model") == "toolbench":
        given.refuse(
            "orm_model",
            "orm_model toolbench, a function of ms-swift, is not here: register a function of yours in a file of "
            "external_plugins",
        )


def _server(given: GivenKeys) -> None:
    """ms-swift keeps the server's address among the arguments of its engine."""
    engine = given.get("engine_kwargs")
    if "base_url" not in given.known or not isinstance(engine, Mapping):
        return
    for name in ("base_url", "api_key"):
        if name in engine and given.get("sampler_engine") == "client":
            given.put(name, engine[name], "engine_kwargs")
            engine = {key: value for key, value in engine.items() if key != name}
    given.values["engine_kwargs"] = engine


def _kl(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Megatron's ``calculate_KL`` of ms-swift, where it says what KTO's loss type says."""
    if not given.foreign("calculate_KL") or "kl_batch_size" not in given.known:
        return
    estimates = given.get("loss_type", defaults["loss_type"]) != "apo_zero_unpaired"
    if given.get("calculate_KL") in (None, estimates):
        given.take("calculate_KL")
