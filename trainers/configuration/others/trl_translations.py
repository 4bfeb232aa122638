"""What TRL's and transformers' keys mean in ours, where that takes more than another name; names are ``trl_names.py``.

dataset_name, dataset_config, datasets        a source of rows, and of evaluation rows if eval_strategy asks for them
use_peft, lora_*                              tuner_type: lora, with ModelConfig's and peft's choices
fsdp, fsdp_config, accelerate_config          how weights lie on the workers
optim_args, warmup_steps below 1              optim_kwargs, warmup_ratio
train_sampling_strategy                       shuffle_dataset, group_by_length
vllm_* without use_vllm                       nothing, as there
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.configuration.others.trl_names import PEFT_DEFAULTS, VLLM_DEFAULTS
from trainers.configuration.reading.given_keys import GivenKeys, plain

OF_TRL = ("dataset_name", "datasets", "dataset_config", "dataset_streaming", "use_peft", "train_sampling_strategy")
WRITTEN_BY_TRL = ("dataset_train_split", "dataset_test_split", "dataset_streaming", "reward_model_name_or_path")
NULL_BY_DEFAULT = ("output_dir", "reward_funcs", "reward_model", "dataset", "model")  # there, and never null here
FILES = (".jsonl", ".json", ".parquet", ".csv")
MIXTURE_KEYS = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")
SHARDING: dict[str, tuple[str, bool | None]] = {  # words of fsdp, and names of TRL's accelerate_config
    **dict.fromkeys(("full_shard", "fsdp1", "fsdp2", "zero3"), ("full_shard", True)),
    **dict.fromkeys(("shard_grad_op", "zero2"), ("full_shard", False)),
    **dict.fromkeys(("no_shard", "multi_gpu", "single_gpu"), ("no_shard", None)),
}
IN_FSDP_CONFIG = {
    "reshard_after_forward": "fsdp_reshard_after_forward",
    "cpu_offload": "fsdp_offload_params",
    "offload_params": "fsdp_offload_params",
    "activation_checkpointing": "gradient_checkpointing",
}
DONE_BY_FSDP2 = {  # keys of fsdp_config whose value asks for what is done
    "version": (2, "2"),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", None),
    "cpu_ram_efficient_loading": (True, False),
    "sync_module_states": (True, False),
    "use_orig_params": (True, False),
    "min_num_params": (0,),
    "xla": (False,),
    "xla_fsdp_v2": (False,),
    "xla_fsdp_grad_ckpt": (False,),
}
SAME_NUMBERS = {  # keys of fsdp_config that are of memory or speed alone, and what is done instead
    **dict.fromkeys(
        ("backward_prefetch", "forward_prefetch", "limit_all_gathers"), "FSDP2 gathers weights ahead itself"
    ),
    "state_dict_type": "a checkpoint has all that a resumed run needs; the folder final has the whole model",
    "transformer_layer_cls_to_wrap": "each layer of the model is a unit of FSDP2",
    "activation_cpu_offload": "activations stay on the device; gradient_checkpointing recomputes them",
}
READ_OF_OPTIM_ARGS = {  # transformers' trainer_optimizer.py; of torch's other optimizers it reads none
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay", "centered"),
}
SOFT_OVERLONG = {"name": "soft_overlong_punishment", "max_completion_len": 1280, "soft_punish_cache": 256}


def is_trl(given: GivenKeys) -> bool:
    """Whether a key of the file, or of the command line, has a name that TRL's scripts alone have."""
    return any(given.foreign(name) for name in OF_TRL) or any(
        written in WRITTEN_BY_TRL for written in given.written.values()
    )


def translate_trl(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Puts our keys in place of TRL's and transformers' in ``given``; before other systems' keys are looked at."""
    trl = is_trl(given)
    for name in [name for name in NULL_BY_DEFAULT if name in given.values and given.get(name) is None]:
        del given.values[name]
    _engine_defaults(given, defaults)
    _peft(given, defaults)
    _rows(given)
    _evaluation(given, trl, defaults)
    _order(given, trl)
    _optimizer(given, defaults)
    _sharding(given)
    _rewards(given, trl)
    _model(given)
    _columns(given)


def _engine_defaults(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Without ``use_vllm``, what stands at its default is not read by TRL, and would be refused here."""
    if given.get("use_vllm") is True or given.get("rollout_engine", defaults.get("rollout_engine")) == "vllm":
        return
    for name, default in VLLM_DEFAULTS.items():
        written = given.written.get(name, name)
        is_default = given.get(name) == default and given.get(name) is not True
        is_default = is_default or written == "vllm_importance_sampling_cap"
        if name in given.values and is_default and written.startswith("vllm_"):
            del given.values[name]


def _peft(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    uses = given.take("use_peft") if given.foreign("use_peft") else None
    if uses not in (True, False, None):
        given.refuse("use_peft", f"use_peft must be true or false, got {uses!r}")
        return
    if "tuner_type" not in given.known:
        return
    if uses is not None:
        given.put("tuner_type", "lora" if uses else "full", "use_peft")
    if given.get("tuner_type", defaults["tuner_type"]) == "full":
        for name, default in PEFT_DEFAULTS.items():
            if name in given.values and given.get(name) == default and type(given.get(name)) is type(default):
                del given.values[name]
    elif given.get("lora_target_modules", "") is None:
        del given.values["lora_target_modules"]
    if uses:  # the defaults of ModelConfig, and the layers that peft chooses
        for name, value in (("lora_rank", 16), ("lora_dropout", 0.05), ("lora_target_modules", ["auto"])):
            if name not in given.values:
                given.put(name, value, "use_peft")
    for name, field in (("lora_target_parameters", "target_parameters"), ("lora_modules_to_save", "modules_to_save")):
        if given.foreign(name) and (value := given.take(name)):
            given.put_inner("lora_kwargs", field, [value] if isinstance(value, str) else value, name)
    if given.foreign("lora_task_type"):
        meant = ("SEQ_CLS", "CAUSAL_LM") if "center_rewards_coefficient" in given.known else ("CAUSAL_LM",)
        if given.take("lora_task_type") not in meant:
            given.refuse("lora_task_type", f"lora_task_type must be {meant[0]}, which the trainer says. Remove it")


def _rows(given: GivenKeys) -> None:
    """``dataset_name`` and ``datasets`` to a source of ``data/sources.py``."""
    if given.foreign("dataset_streaming") and given.take("dataset_streaming") is True:
        given.refuse(
            "dataset_streaming", "dataset_streaming: SFT and pretraining stream; this trainer reads rows whole"
        )
    listed = given.take("datasets") if given.foreign("datasets") else None
    size = given.take("test_split_size") if given.foreign("test_split_size") else None
    name = given.take("dataset_name") if given.foreign("dataset_name") else None
    configuration = given.take("dataset_config") if given.foreign("dataset_config") else None
    if listed:
        mistake = mixture_mistake(listed)
        if mistake:
            given.refuse("datasets", mistake)
        source = {"datasets": listed} if size is None else {"datasets": listed, "test_split_size": size}
        given.put("dataset", source, "datasets")
        if name is not None:
            given.notes["dataset_name"] = "datasets sets the rows"
    elif size is not None:
        given.refuse("test_split_size", "test_split_size divides the rows of datasets, which is not given")
    elif name is not None:
        source = name if configuration is None else {"path": name, "name": configuration}
        given.put("dataset", source, "dataset_name")
    elif configuration is not None and isinstance(given.get("dataset"), str):
        given.values["dataset"] = {"path": given.get("dataset"), "name": configuration}


def mixture_mistake(listed: Any) -> str | None:
    """What is wrong with TRL's ``datasets``."""
    if not isinstance(listed, list) or not all(isinstance(one, Mapping) and "path" in one for one in listed):
        return f"datasets must be a list of mappings with the key path, got {listed!r}"
    for one in listed:
        for key in one:
            if key not in MIXTURE_KEYS:
                return f"datasets: {one['path']} has {key}, but only {', '.join(MIXTURE_KEYS)} are read"
    shares = [one.get("fraction") for one in listed]
    if any(share is not None for share in shares) and any(share is None for share in shares):
        return "datasets: fraction is given for only some. Give it for all, or for none"
    return None


def _evaluation(given: GivenKeys, trl: bool, defaults: Mapping[str, Any]) -> None:
    """TRL's scripts evaluate on another split of the same rows, every ``logging_steps`` unless told otherwise."""
    strategy = given.get("eval_strategy")
    if not trl or strategy not in ("steps", "epoch") or "eval_dataset" not in given.known:
        return
    source = given.get("dataset")
    if not given.get("eval_dataset") and source:
        is_file = isinstance(source, str) and source.endswith(FILES)
        whole = isinstance(source, Mapping) and "datasets" in source and "test_split_size" not in source
        if is_file or whole:
            given.refuse(
                "eval_strategy",
                f"eval_strategy is {strategy}, but {source if is_file else 'datasets'} has no split "
                f"{given.get('eval_dataset_split', 'test')!r}. Write eval_dataset"
                f"{'' if is_file else ', or test_split_size'}",
            )
        else:
            given.put("eval_dataset", source, "eval_strategy")
    if given.get("eval_steps") is None and strategy == "steps":
        given.values.pop("eval_steps", None)
        given.put("eval_steps", given.get("logging_steps", defaults["logging_steps"]), "eval_strategy")


def _order(given: GivenKeys, trl: bool) -> None:
    """In SFT, TRL's ``shuffle_dataset`` is a shuffle before the sampler, which draws a new order every epoch anyway."""
    if trl and given.get("streaming") is True and "streaming" in given.known and "shuffle_dataset" not in given.values:
        given.put("shuffle_dataset", False, "streaming")  # the default of TRL's SFTConfig
    is_written = given.written.get("shuffle_dataset") == "shuffle_dataset"
    is_sampled = trl and "dataset_text_field" in given.known and given.get("streaming") is not True
    if is_sampled and is_written and given.get("shuffle_dataset") in (True, False):
        del given.values["shuffle_dataset"]
    if given.foreign("train_sampling_strategy"):
        strategy = given.take("train_sampling_strategy")
        if strategy in ("random", "sequential"):
            if strategy == "sequential" or "reward_funcs" not in given.known:
                given.put("shuffle_dataset", strategy == "random", "train_sampling_strategy")
        elif strategy == "group_by_length" and "reward_funcs" not in given.known:
            given.put("group_by_length", True, "train_sampling_strategy")
        elif strategy is not None:
            given.refuse(
                "train_sampling_strategy",
                f"train_sampling_strategy {strategy} is not supported: write random or sequential",
            )


def _optimizer(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    if given.foreign("optim_args") and "optim_kwargs" in given.known:
        text = given.take("optim_args")
        optim = str(given.get("optimizer") or given.get("optim", defaults.get("optim")))
        for pair in text.replace(" ", "").split(",") if isinstance(text, str) and text else ():
            key, _, value = pair.partition("=")
            if "muon" not in optim and key not in READ_OF_OPTIM_ARGS.get(optim, ()):
                told = f"transformers does not read {key} of optim_args with optim: {optim}. Remove it, or write "
                given.refuse("optim_args", f"{told}optim_kwargs: {{{key}: {value}}}")
                continue
            given.put_inner("optim_kwargs", key, plain(value), "optim_args")
        if text is not None and not isinstance(text, str):
            given.refuse("optim_args", f"optim_args must be text such as 'momentum=0.9', got {text!r}")
    steps = given.get("warmup_steps")
    if "warmup_ratio" in given.known and isinstance(steps, float) and 0 < steps < 1:  # a share, since transformers 5
        del given.values["warmup_steps"]
        given.put("warmup_ratio", steps, "warmup_steps")


def _sharding(given: GivenKeys) -> None:
    if "fsdp_sharding_strategy" not in given.known:
        return
    inner = given.take("fsdp_config") if given.foreign("fsdp_config") else None
    said = {str(key).removeprefix("fsdp_") for key in inner} if isinstance(inner, Mapping) else set()
    is_said = not said.isdisjoint(("reshard_after_forward", "sharding_strategy"))  # which the words of fsdp say too
    for name in ("fsdp", "accelerate_config"):
        words = given.take(name) if given.foreign(name) else None
        if words in (None, "", [], False):
            continue
        words = "full_shard" if words is True else words
        words = words.split() if isinstance(words, str) else words
        for word in words if isinstance(words, list) else [words]:
            if word in SHARDING:
                strategy, frees = SHARDING[word]
                given.put("fsdp_sharding_strategy", strategy, name)
                if frees is not None and not is_said:
                    given.put("fsdp_reshard_after_forward", frees, name)
            elif word == "offload":
                given.put("fsdp_offload_params", True, name)
            elif word != "auto_wrap":
                given.refuse(
                    name,
                    f"{name} {word} is not supported: weights, gradients and optimizer are all sharded, or none of "
                    f"them. Write one of {', '.join(SHARDING)}",
                )
    if inner is not None and not isinstance(inner, Mapping):
        given.refuse("fsdp_config", f"fsdp_config must be a mapping, got {inner!r}. Write the fsdp_* keys")
        return
    for key, value in (inner or {}).items():
        bare = str(key).removeprefix("fsdp_")
        if bare in IN_FSDP_CONFIG and isinstance(value, bool):
            if value or bare == "reshard_after_forward":
                given.put(IN_FSDP_CONFIG[bare], value, "fsdp_config")
        elif bare == "sharding_strategy" and str(value).lower() in SHARDING:
            strategy, frees = SHARDING[str(value).lower()]
            given.put("fsdp_sharding_strategy", strategy, "fsdp_config")
            if frees is not None:
                given.put("fsdp_reshard_after_forward", frees, "fsdp_config")
        elif bare in SAME_NUMBERS:
            given.notes[f"fsdp_config.{bare}"] = SAME_NUMBERS[bare]
        elif value not in DONE_BY_FSDP2.get(bare, ()):
            known = ", ".join([*IN_FSDP_CONFIG, "sharding_strategy", *DONE_BY_FSDP2, *SAME_NUMBERS])
            given.refuse("fsdp_config", f"fsdp_config: {key}: {value} is not supported (known: {known}). Remove it")


def _rewards(given: GivenKeys, trl: bool) -> None:
    """TRL's script puts the reward model before the functions, and gives the soft punishment its lengths."""
    if "reward_funcs" not in given.known:
        return
    names = given.get("reward_funcs")
    weights = given.get("reward_weights")
    is_first = given.written.get("reward_model") == "reward_model_name_or_path" and given.get("reward_model")
    if is_first and names and isinstance(weights, list):
        given.values["reward_weights"] = [*weights[1:], weights[0]]
    if trl and isinstance(names, list) and "get_soft_overlong_punishment" in names:
        given.values["reward_funcs"] = [
            dict(SOFT_OVERLONG) if name == "get_soft_overlong_punishment" else name for name in names
        ]


def _model(given: GivenKeys) -> None:
    if given.foreign("attn_implementation") and "model_init_kwargs" in given.known:
        value = given.take("attn_implementation")
        if value is not None:
            given.put_inner("model_init_kwargs", "attn_implementation", value, "attn_implementation")
    if given.foreign("chat_template_path"):
        value = given.take("chat_template_path")
        path = Path(str(value))
        if value is not None and (path.suffix == ".jinja" or (path / "chat_template.jinja").is_file()):
            given.put("chat_template", str(path if path.suffix else path / "chat_template.jinja"), "chat_template_path")
        elif value is not None:
            given.refuse(
                "chat_template_path",
                f"chat_template_path: {value!r} is neither a .jinja file nor a folder with chat_template.jinja. "
                "Write the file as chat_template",
            )
    if given.foreign("data_seed") and given.get("data_seed") is None:
        given.take("data_seed")
    if "router_aux_loss_coef" in given.values and given.get("router_aux_loss_coef") is None:  # as if it were not there
        given.take("router_aux_loss_coef")


def _columns(given: GivenKeys) -> None:
    """Columns that nobody reads change nothing, but reward functions read all."""
    if given.foreign("remove_unused_columns") and "reward_funcs" not in given.known:
        given.take("remove_unused_columns")
    if given.foreign("eval_packing") and given.get("eval_packing") is given.get("packing", False):
        given.take("eval_packing")
