"""What keys of ms-swift mean in ours, where that takes more than another name: of data, optimizers and checkpoints.

Called by ``translations.py``, which has those that several systems share. Each function reads keys that belong
together. Their meanings are those of ms-swift's ``swift/arguments`` and ``swift/megatron/arguments``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayhelper import ConfigError
from rayhelper.device_groups.keys import SHARE_KEY
from rayhelper.device_groups.keys import SIZE_KEYS as SIZES
from rayhelper.planning.parallel_sizes import SIZE_KEYS, VLLM_KEY
from rayhelper.text import parse_text
from trainers.configuration.others.other_names import is_neutral
from trainers.configuration.reading.given_keys import GivenKeys

logger = logging.getLogger(__name__)

FULL_PRECISION = ("fp32", "float32", "torch.float32", None)
PRECISIONS = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype")
OF_PICTURES = frozenset(  # of model_kwargs: what images, videos and sounds become, in ms-swift's models that take them
    """
    downsample_mode enable_audio_output fps fps_max_frames fps_min_frames frame_factor hd_num image_factor
    image_max_token_num image_min_token_num init_audio init_tts input_size max_num max_num_frames max_partition
    max_pixels max_ratio max_slice_nums min_pixels mix_pixels n_mels num_crops num_frames qwenvl_bbox_format
    sampling_rate spatial_merge_size stack_frames use_audio_in_video video_max_num video_max_pixels
    video_max_slice_nums video_max_token_num video_min_pixels video_min_token_num video_segments video_total_pixels
    """.split()
)
TEMPLATES = {  # of ms-swift's own, which are no model's, in Jinja (swift/template/templates/llm.py)
    "default": (
        "{% if tools %}{{ raise_exception('template: default shows no tools') }}{% endif %}{{ bos_token }}"
        "{% set has_system = messages[0]['role'] == 'system' %}"
        "{% set system = messages[0]['content'] if has_system else 'You are a helpful assistant.' %}"
        "{% if system %}{{ system + '\\n\\n' }}{% endif %}"
        "{% for message in (messages[1:] if has_system else messages) %}"
        "{% if message['role'] == 'user' %}{{ '### Human:\\n' + message['content'] + '\\n\\n### Assistant:\\n' }}"
        "{% elif message['role'] == 'assistant' %}"
        "{{ message['content'] }}{{ eos_token if loop.last else '\\n\\n' }}"
        "{% else %}{{ raise_exception('template: default has no role ' + message['role']) }}{% endif %}{% endfor %}"
    )
}
FSDP2 = {  # ms-swift's swift/config/fsdp2.json
    "fsdp_sharding_strategy": "full_shard",
    "fsdp_reshard_after_forward": True,
    "gradient_checkpointing": True,
}
EIGHT_BITS = ("fp8_format", "fp8_recipe", "fp8_param_gather")
OF_DELAYED = ("fp8_amax_history_len", "fp8_amax_compute_algo")  # read by the recipe delayed alone
OF_SPEED = {  # keys of Megatron's experts that change no number
    "moe_grouped_gemm": "transformers chooses the kernel of the experts",
    "moe_permute_fusion": "transformers permutes the tokens",
    "moe_shared_expert_overlap": "experts are computed one after the other",
}
FSDP: Mapping[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_config": {}}  # where such a file does not say them


def translate_ms_swift(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Puts our keys in place of ms-swift's in ``given``; ``defaults`` are those of the run's keys."""
    _cached(given)
    choose_backend(given)
    _without_megatron(given)
    _eight_bits(given)
    _experts(given)
    _optimizer(given)
    _fsdp(given)
    _checkpoints(given)
    _evaluation_steps(given, defaults)
    _templates(given)
    _best_checkpoint(given)
    _model_arguments(given)


def engine_beside_training(given: GivenKeys) -> None:
    """A colocated engine in parts has processes of its own on the devices of training, as ms-swift's engines have.

    ``colocate_groups: [[train, rollout]]`` with ``vllm_tensor_parallel_size: 2`` means that here.
    """
    groups, size = given.values.get("device_groups"), given.get("vllm_tensor_parallel_size", 1)
    if not isinstance(groups, Mapping) or given.get("rollout_engine") != "vllm" or not isinstance(size, int):
        return
    together, rollout = groups.get("colocate_groups"), groups.get("rollout")
    if size < 2 or not isinstance(together, list) or not isinstance(rollout, Mapping):
        return
    host = next((group[0] for group in together if isinstance(group, list) and "rollout" in group[1:]), None)
    if host is None or not isinstance(groups.get(host), Mapping):
        return
    left = [[role for role in group if role != "rollout"] for group in together if isinstance(group, list)]
    section = {key: value for key, value in rollout.items() if key not in SIZES} | {SHARE_KEY: host}
    changed = {**groups, "rollout": section, "colocate_groups": [group for group in left if len(group) > 1]}
    if not changed["colocate_groups"]:
        del changed["colocate_groups"]
    given.values["device_groups"] = changed
    logger.info("role rollout has its own processes on the devices of role %s: %d hold an engine", host, size)


def room_for_prompts(given: GivenKeys) -> None:
    """ms-swift's ``max_length`` may leave no room for a completion: its engine then ends the completion early."""
    if given.written.get("max_prompt_length") != "max_length":
        return
    sizes = [given.get(name) for name in ("vllm_max_model_len", "max_completion_length", "max_prompt_length")]
    if not all(type(size) is int for size in sizes) or "vllm_max_model_len" not in given.values:
        return
    whole, completion, prompt = sizes
    if whole > 1 and whole < prompt + completion:
        given.put("vllm_clip_completions", True, "vllm_max_model_len")
        given.values["max_prompt_length"] = min(prompt, whole - 1)


def _evaluation_steps(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Megatron's ``eval_iters`` are batches of an evaluation, each as large as a training step."""
    name, size = "eval_iters", given.get("global_batch_size", defaults.get("global_batch_size"))
    count = given.get(name)
    if not given.foreign(name) or "max_eval_sequences" not in given.known or type(count) is not int or count < 1:
        return
    if not (given.get("eval_dataset") or given.get("split_dataset_ratio")):
        given.take(name)
        given.notes[name] = "there is no eval_dataset"
    elif type(size) is int:
        given.put("max_eval_sequences", count * size, name)
        del given.values[name]
        given.notes[name] = (
            f"each evaluation has the first {count * size} sequences; an evaluation of ms-swift continues with the "
            "next ones"
        )


def _best_checkpoint(given: GivenKeys) -> None:
    """What ms-swift calls the accuracy of a classifier."""
    if "num_labels" in given.known and given.get("metric_for_best_model") in ("acc", "eval_acc"):
        given.values["metric_for_best_model"] = "accuracy"


def _model_arguments(given: GivenKeys) -> None:
    """Arguments of single models: a language model sees no images, videos or sounds, and reads none of theirs."""
    if not given.foreign("model_kwargs"):
        return
    value = given.get("model_kwargs")
    if not value or (isinstance(value, Mapping) and OF_PICTURES.issuperset(str(name).lower() for name in value)):
        given.take("model_kwargs")


def _templates(given: GivenKeys) -> None:
    """Templates that are no model's own. Tools in the form of Hermes are what those of Qwen and others write."""
    if given.foreign("template") and "chat_template" in given.known and str(given.get("template")) in TEMPLATES:
        given.put("chat_template", TEMPLATES[given.get("template")], "template")
        given.values.pop("template", None)
    if given.foreign("agent_template") and given.get("agent_template") == "hermes":
        given.take("agent_template")
        given.notes["agent_template"] = "tools are written as the model's own chat template writes them"


def _cached(given: GivenKeys) -> None:
    """``cached_dataset`` is a dataset that was tokenized before. Its rows are tokenized where they are used."""
    for name, ours in (("cached_dataset", "dataset"), ("cached_val_dataset", "eval_dataset")):
        if given.foreign(name) and ours in given.known:
            value, where = given.values.pop(name), given.where[name]
            value = value.split() if isinstance(value, str) else value
            beside = given.values.get(ours, [])
            beside = beside.split() if isinstance(beside, str) else list(beside or [])
            if value:
                given.values[ours], given.where[ours] = [*beside, *value], where


def choose_backend(given: GivenKeys) -> None:
    """A model in parts is Megatron's: keys of its layout choose the backend that reads them."""
    if "backend" not in given.known or "backend" in given.values:
        return
    sizes = [name for name in SIZE_KEYS if name != VLLM_KEY and name in given.values]
    for name in sizes:
        value = given.get(name)
        if isinstance(value, int) and value > 1 and name != "expert_tensor_parallel_size":
            given.put("backend", "megatron", name)
            break


def _without_megatron(given: GivenKeys) -> None:
    """``backend: fsdp`` beside Megatron's keys, such as those of a ``megatron`` command, means what fsdp does instead.

    Its layout changes no number where ``global_batch_size`` says the sequences of a step.
    """
    if "megatron" not in given.known or given.get("backend") != "fsdp" or given.get("global_batch_size") is None:
        return
    sizes = dict.fromkeys((key for key in SIZE_KEYS if key != VLLM_KEY), "fsdp shards weights over all workers")
    for name, note in (sizes | OF_SPEED).items():
        if type(value := given.get(name)) in (int, bool):
            del given.values[name]
            if value not in (1, False):
                given.notes[name] = note
    name = "moe_aux_loss_coeff"
    if given.foreign(name) and given.get(name):
        given.refuse(name, f"{name} is Megatron's. Write router_aux_loss_coef in its place, or remove it")
        del given.values[name]
    for name in [name for name in given.values if name.startswith(("moe_", "fp8_")) and given.foreign(name)]:
        if not is_neutral(name, given.get(name)):
            given.refuse(name, f"{name} is Megatron's, and fsdp has no such setting. Remove it")
            del given.values[name]


def _eight_bits(given: GivenKeys) -> None:
    """Megatron's products in fp8 are fields of ``megatron``; without ``fp8_format`` nothing reads the other keys."""
    if "megatron" not in given.known or given.get("backend") != "megatron":
        return
    form, recipe, gathers = (given.take(name) if given.foreign(name) else None for name in EIGHT_BITS)
    for name in OF_DELAYED:
        if given.foreign(name) and (form is None or recipe not in (None, "delayed")):
            given.take(name)
    if form is not None:
        given.put_inner("megatron", "fp8", form, EIGHT_BITS[0])
        given.put_inner("megatron", "fp8_recipe", recipe or "delayed", EIGHT_BITS[1 if recipe else 0])
        if gathers is True:
            given.notes[EIGHT_BITS[2]] = "weights are gathered in bfloat16, and become fp8 where they are multiplied"


def _experts(given: GivenKeys) -> None:
    """transformers' implementation of the experts of a mixture; Megatron's experts are whole unless asked otherwise."""
    speaks_megatron = given.written.get("per_device_train_batch_size") == "micro_batch_size"
    asks = given.get("expert_model_parallel_size", 1), given.get("tensor_model_parallel_size", 1)
    if speaks_megatron and "expert_tensor_parallel_size" not in given.values and asks[0] != 1 != asks[1]:
        given.put("expert_tensor_parallel_size", 1, "expert_model_parallel_size")
    if given.foreign("experts_impl") and "model_init_kwargs" in given.known:
        value = given.take("experts_impl")
        if value is not None and given.get("backend") != "megatron":
            given.put_inner("model_init_kwargs", "experts_implementation", value, "experts_impl")


def _optimizer(given: GivenKeys) -> None:
    """Megatron's optimizer in the memory of the host, and its states in other precisions."""
    name = "optimizer"
    if given.foreign(name) and "optim" in given.known and given.get(name) == "sgd":
        given.put("optim", given.take(name), name)
    if given.foreign(name) and "optim" in given.known and given.get("backend") != "megatron":
        value = given.get(name)
        if value == "muon":
            given.put("optim", given.take(name), name)
            if not {"deepspeed", "fsdp", "fsdp_sharding_strategy"} & given.values.keys():
                given.put("fsdp_sharding_strategy", "no_shard", name)  # as its weights lie there too
        elif value == "muonclip":
            given.take(name)
            given.refuse(
                name,
                "optimizer muonclip is not supported: it needs the largest score of attention, which torch's "
                "attention does not return. Write optimizer: muon, and remove optim_args",
            )
    _of_optimizers(given)
    name = "optimizer_cpu_offload"
    if given.foreign(name) and "optimizer_offload" in given.known and given.get(name) is True:
        given.take(name)
        given.put("optimizer_offload", True, name)
        given.notes[name] = "the optimizer's states are in the memory of the host, and the device computes with them"
        fraction = given.take("optimizer_offload_fraction") if given.foreign("optimizer_offload_fraction") else 1
        if fraction not in (1, 1.0):
            given.notes["optimizer_offload_fraction"] = "all states of the optimizer are in the memory of the host"
    elif given.foreign("optimizer_offload_fraction"):
        given.take("optimizer_offload_fraction")  # read with optimizer_cpu_offload alone
    precisions = [key for key in PRECISIONS if given.foreign(key)]
    for key in precisions:
        if given.get(key) in FULL_PRECISION:
            given.take(key)
    if given.foreign("use_precision_aware_optimizer"):
        given.take("use_precision_aware_optimizer")
        lower = [key for key in precisions if key in given.values]
        if not lower:
            given.notes["use_precision_aware_optimizer"] = "all states of the optimizer are float32"


def _of_optimizers(given: GivenKeys) -> None:
    """Settings of Megatron's SGD and Muon, which nobody reads with another optimizer."""
    optim = given.get("optim", given.get("optimizer", "adam"))
    momentum = given.take("sgd_momentum") if given.foreign("sgd_momentum") and "optim_kwargs" in given.known else None
    if momentum is not None and optim == "sgd":
        given.put_inner("optim_kwargs", "momentum", momentum, "sgd_momentum")
    for name in [name for name in given.values if name.startswith("muon_") and given.foreign(name)]:
        if "muon" not in str(optim):
            given.take(name)
            given.notes[name] = "the optimizer is not Muon"


def _fsdp(given: GivenKeys) -> None:
    """``fsdp: fsdp2`` is a file of ms-swift's: FSDP2, weights freed after the forward pass, layers recomputed.

    Another file, or such a mapping itself, holds transformers' ``fsdp`` and ``fsdp_config``, which are read next.
    """
    if not given.foreign("fsdp") or "fsdp_sharding_strategy" not in given.known:
        return
    value = given.get("fsdp")
    if value == "fsdp2":
        given.take("fsdp")
        for name, meant in FSDP2.items():
            if name not in given.values:
                given.put(name, meant, "fsdp")
    elif isinstance(value, Mapping) or str(value).endswith(".json"):
        del given.values["fsdp"]
        try:
            held = _held(value)
        except ConfigError as error:
            given.refuse("fsdp", str(error))
            return
        for name in held.keys() - {"fsdp", "fsdp_config"}:
            given.refuse("fsdp", f"fsdp: {name} is not supported: it holds fsdp and fsdp_config. Remove it there")
        for name in ("fsdp", "fsdp_config"):
            if name in given.values:
                given.refuse(name, f"{name} stands beside fsdp: {value}, which also sets it. Remove one of them")
            given.values[name] = held.get(name, FSDP[name])
            given.where.setdefault(name, given.where["fsdp"])


def _held(value: Any) -> dict[str, Any]:
    """What a mapping, or a file that holds one, says beside comments. Raises ConfigError if it cannot be read."""
    if not isinstance(value, Mapping):
        path = Path(value).expanduser()
        if not path.is_file():
            raise ConfigError(f"fsdp: there is no file {value!r} (looked for from {Path.cwd()}). Name one, or fsdp2")
        value = parse_text(path.read_text(encoding="utf-8"), f"fsdp: {path}")
        if not isinstance(value, Mapping):
            raise ConfigError(f"fsdp: {path} must hold a mapping of keys to values")
    return {str(name): one for name, one in value.items() if not str(name).startswith("_")}


def _checkpoints(given: GivenKeys) -> None:
    """transformers keeps all checkpoints where ``save_total_limit`` is not positive."""
    limit = given.get("save_total_limit")
    if isinstance(limit, int) and limit <= 0:
        del given.values["save_total_limit"]
    if given.get("early_stop_interval") in (0, None):  # which is never there
        given.values.pop("early_stop_interval", None)
    if given.foreign("save_safetensors") and given.get("save_safetensors") is False:
        given.take("save_safetensors")
        given.notes["save_safetensors"] = "a checkpoint has all that a resumed run needs; the folder final has the "
        "model"
    if given.foreign("eval_iters") and given.get("eval_iters") == 0:
        given.take("eval_iters")
        for name in ("eval_dataset", "split_dataset_ratio", "eval_steps"):
            given.values.pop(name, None)
