"""verl's supervised fine-tuning in ours: ``fsdp_sft_trainer``, and ``sft_trainer`` with its engines.

A step is an optimizer step in both. Read from the two trainers in verl/trainer, from sft_trainer.yaml and
sft_trainer_engine.yaml in verl/trainer/config, from verl/utils/dataset and from ``sft_loss`` in verl/workers.
"""

from __future__ import annotations

from typing import Any

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.model import SIZES, data_files, model, on_ray, rest
from trainers.translate.verl.schedule import optimizer, records

SHARED = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_length": 1024,
    "data.truncation": "error",
    "model.enable_gradient_checkpointing": True,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "optim.weight_decay": 0.01,
    "optim.lr_warmup_steps": -1,
    "optim.min_lr_ratio": 0.0,
    "optim.clip_grad": 1.0,
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.resume_mode": "auto",
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.logger": ["console", "wandb"],
}
DEFAULTS: dict[str, Any] = {
    **SHARED,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "data.multiturn.enable": False,
    "data.multiturn.messages_key": "messages",
    "data.multiturn.tools_key": "tools",
    "model.strategy": "fsdp2",
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler_type": "cosine",
    "use_remove_padding": False,
}
ENGINE_DEFAULTS: dict[str, Any] = {
    **SHARED,
    "data.messages_key": "messages",
    "data.tools_key": "tools",
    "data.use_dynamic_bsz": True,
    "data.max_token_len_per_gpu": 8192,
    "data.pad_mode": "no_padding",
    "engine": "fsdp",
    "engine.strategy": "fsdp",
    "engine.reshard_after_forward": True,
    "model.use_remove_padding": True,
    "optim": "fsdp",
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler_type": "constant",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
}
TRUNCATIONS = {"error": "keep_start", "right": "keep_start", "left": "keep_end"}
REFUSED = {
    "data.custom_cls": "rows come from files or a plugin's dataset (register_dataset). Convert the class",
    "data.chat_template": "verl refuses it, too. Write chat_template",
    "data.apply_chat_template_kwargs": "write the column chat_template_kwargs into the rows",
    "data.ignore_input_ids_mismatch": "a conversation gets the chat template as a whole",
    "model.lora_adapter_path": "merge the adapter into its model, and name that folder",
    "model.override_config": "the model's config.json sets it. Change that file",
    "model.mtp": "multi-token prediction is not built",
    "optim.override_optimizer_config": "write optim_kwargs",
}
WITHOUT = {
    "data.use_shm": "data are read from their folders",
    "data.micro_batch_size": "verl does not read it. It reads micro_batch_size_per_gpu",
    "data.enable_thinking_key": "the column chat_template_kwargs of the rows says it",
    "data.multiturn.": "the column chat_template_kwargs of the rows says it, or multiturn.enable is off",
    "model.use_shm": "models are read from their folders",
    "model.use_liger": "log-probabilities are computed a chunk of tokens at a time",
    "model.use_fused_kernels": "log-probabilities are computed a chunk of tokens at a time",
    "model.enable_activation_offload": "activations stay on the device",
    "model.external_lib": "external_plugins registers models",
    "model.fsdp_config": "FSDP2 wraps layers. Trained weights are float32",
    "engine.fsdp_size": "weights are sharded over all workers",
    "engine.model_dtype": "trained weights are float32",
    "engine.dtype": "dtype is the type of the forward pass",
    "engine.forward_prefetch": "FSDP2 prefetches what it can",
    "engine.use_orig_params": "FSDP2 keeps parameters as they are",
    "engine.wrap_policy": "FSDP2 wraps layers",
    "engine.use_torch_compile": "torch_compile here compiles layers",
    "engine.entropy_": "log-probabilities and entropy are computed a chunk of tokens at a time",
    "profiler": "rayhelper timeline shows a run",
    "checkpoint": "a checkpoint holds model, optimizer and random states",
    "trainer.checkpoint": "a checkpoint holds model, optimizer and random states",
    "trainer.seed": "verl does not read it. Its order of rows is another one than ours with every seed",
    "trainer.device": "device_groups say which devices",
    "trainer.default_hdfs_dir": "checkpoints lie in output_dir",
    "trainer.profile_interval": "rayhelper timeline shows a run",
    "trainer.nnodes": "torchrun says it",
    "trainer.n_gpus_per_node": "torchrun says it",
}
TORCHRUN = "start RayHelper the same way: torchrun --nproc-per-node N -m trainers.sft --config THIS_FILE"
MEAN = (
    "verl averages the rows of each micro-batch over their tokens, and then the micro-batches and GPUs. RayHelper "
    "averages all tokens of a step"
)
SHIFTED = (
    "verl's newest fsdp_sft_trainer learns the last token of the prompt, and not the token that ends the answer. "
    "RayHelper learns the answer and its end"
)
TEMPLATE_ENDS = (
    "verl adds the tokenizer's eos_token. Here the chat template ends the answer, and all that it writes there is "
    "learned, such as a line break"
)


def translate(theirs: Theirs, ours: Ours) -> None:
    """Fills ``ours`` from the keys of verl's ``fsdp_sft_trainer``."""
    if theirs.take("model.strategy") not in ("fsdp", "fsdp2"):
        ours.refuse("model.strategy", f"{theirs.take('model.strategy')} is not built (known: fsdp, fsdp2)")
    unread = {"lr_scheduler_type", "warmup_style", "min_lr_ratio", "lr_warmup_steps", "num_cycles"}
    for name in sorted(f"optim.{one}" for one in unread):
        if name in theirs:
            ours.refuse(name, "fsdp_sft_trainer does not read it. Remove it")
    if "optim.lr_scheduler" in theirs:
        theirs.put("optim.lr_scheduler_type", theirs.take("optim.lr_scheduler"), "optim.lr_scheduler")
    _begin(theirs, ours, "partial_pretrain")
    if theirs.take("data.multiturn.enable"):
        _conversations(theirs, ours, "data.multiturn.messages_key", "data.multiturn.tools_key")
    else:
        _answers(theirs, ours)
    cut = theirs.take("data.truncation")
    _longest(theirs, ours, cut)
    micro = "data.micro_batch_size_per_gpu"
    ours.say("per_device_train_batch_size", theirs.take(micro), theirs, micro)
    ours.without["the mean of the loss"] = MEAN
    theirs.taken.add("data.balance_dp_token")
    sharding = ("model.fsdp_config.cpu_offload", "model.fsdp_config.offload_params")
    theirs.taken |= set(sharding)
    if all(theirs.take(name) for name in sharding):
        ours.say("fsdp_offload_params", True, theirs, *sharding)
    _sequences(theirs, ours, "ulysses_sequence_parallel_size", "use_remove_padding")
    if "trainer.total_training_steps" in theirs:
        ours.without["the end of the schedule"] = (
            "verl's schedule always has the length of total_epochs, and total_training_steps only stops the run. Here "
            "the schedule ends with max_steps"
        )
    _finish(theirs, ours)
    ours.without["torchrun"] = TORCHRUN


def translate_engine(theirs: Theirs, ours: Ours) -> None:
    """Fills ``ours`` from the keys of verl's ``sft_trainer``."""
    _with_engine(theirs, ours)
    _finish(theirs, ours)
    ours.without["torchrun"] = TORCHRUN


def translate_on_ray(theirs: Theirs, ours: Ours) -> None:
    """Fills ``ours`` from the keys of verl's ``sft_trainer_ray``."""
    _with_engine(theirs, ours)
    if (gpus := on_ray(theirs, ours)) is not None:
        ours.say("train", {"gpus": gpus}, theirs, *SIZES)
    _finish(theirs, ours)


def _with_engine(theirs: Theirs, ours: Ours) -> None:
    for name in ("engine", "optim"):
        if theirs.take(name) != "fsdp":
            ours.refuse(name, f"{theirs.take(name)} is not translated for fine-tuning (known: fsdp)")
    if theirs.take("engine.strategy") not in ("fsdp", "fsdp2"):
        ours.refuse("engine.strategy", f"{theirs.take('engine.strategy')} is not built (known: fsdp, fsdp2)")
    _begin(theirs, ours, "path")
    _conversations(theirs, ours, "data.messages_key", "data.tools_key")
    padding = theirs.take("data.pad_mode")
    if padding not in ("no_padding", "right"):
        ours.refuse("data.pad_mode", f"{padding} is unknown (known: no_padding, right)")
    if padding == "no_padding":
        ours.drop(theirs, ["data.truncation"], "verl reads it only with pad_mode right, and cuts the end of long rows")
    _longest(theirs, ours, "right" if padding == "no_padding" else theirs.take("data.truncation"))
    micro, tokens = "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"
    ranks = "engine.ulysses_sequence_parallel_size"
    if theirs.take("data.use_dynamic_bsz"):
        size = theirs.take(ranks, 1)
        ours.say("token_budget", theirs.take(tokens) * size, theirs, *((tokens, ranks) if size > 1 else (tokens,)))
        ours.drop(theirs, [micro], "use_dynamic_bsz counts tokens instead")
    else:
        ours.say("per_device_train_batch_size", theirs.take(micro), theirs, micro)
        ours.drop(theirs, [tokens], "use_dynamic_bsz is off")
    ours.drop(theirs, ["data.balance_dp_token"], "sequences are balanced over workers by tokens, always")
    frees = "engine.reshard_after_forward"
    ours.say("fsdp_reshard_after_forward", bool(theirs.take(frees)), theirs, frees)
    if theirs.take("engine.offload_policy"):
        ours.say("fsdp_offload_params", True, theirs, "engine.offload_policy")
    elif theirs.take("engine.optimizer_offload"):
        ours.say("optimizer_offload", True, theirs, "engine.optimizer_offload")
    theirs.taken.add("engine.optimizer_offload")
    if theirs.take("engine.param_offload"):
        ours.without["engine.param_offload"] = "weights stay on the device, or with fsdp_offload_params on the host"
    if (seed := theirs.take("engine.seed")) is not None:
        ours.say("seed", seed, theirs, "engine.seed")
    _sequences(theirs, ours, ranks, "model.use_remove_padding")


def _begin(theirs: Theirs, ours: Ours, path: str) -> None:
    ours.trainer = "sft"
    model(theirs, ours, "model", path)
    data_files(theirs, ours)


def _conversations(theirs: Theirs, ours: Ours, messages: str, tools: str) -> None:
    """All answers of a conversation are learned."""
    names = {name: meant for name, meant in ((messages, "messages"), (tools, "tools")) if theirs.take(name) != meant}
    if names:
        ours.say("columns", {theirs.take(name): meant for name, meant in names.items()}, theirs, *names)
    ours.add(
        "loss_scale", "default", "all answers are learned, with all that the template writes after them, as in verl"
    )


def _answers(theirs: Theirs, ours: Ours) -> None:
    """A prompt of the user, and one answer, which is learned. Either may be a field of a column."""
    found, names = {}, []
    for part, meant in (("prompt", "prompt"), ("response", "completion")):
        fields = [f"data.{part}_key", f"data.{part}_dict_keys"]
        path = [step for name in fields for step in _steps(theirs.take(name))]
        if len(_steps(theirs.take(fields[0]))) != 1:
            ours.refuse(fields[0], "it must name one column")
        found[".".join(path)] = meant
        names += [name for name in fields if theirs.take(name) is not None]
    ours.say("columns", found, theirs, *names)
    ours.add("system", "", "prompt and answer are the turns of a conversation, as in verl")
    ours.add("loss_scale", "default", "only the answer is learned, with its end")
    ours.without["the tokens that are learned"] = SHIFTED
    ours.without["the end of an answer"] = TEMPLATE_ENDS


def _steps(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [] if value is None else [str(value)]


def _longest(theirs: Theirs, ours: Ours, cut: str) -> None:
    ours.say("max_length", theirs.take("data.max_length"), theirs, "data.max_length")
    if cut not in TRUNCATIONS:
        ours.refuse("data.truncation", f"{cut} is unknown (known: {', '.join(TRUNCATIONS)})")
        return
    note = "verl stops at a row that is too long" if cut == "error" else ""
    ours.say("truncation_mode", TRUNCATIONS[cut], theirs, "data.truncation", note=note)
    if cut == "error":
        ours.without["data.truncation: error"] = "verl stops at a row that is too long. RayHelper cuts its end"


def _sequences(theirs: Theirs, ours: Ours, ranks: str, removes: str) -> None:
    if (size := theirs.take(ranks, 1)) > 1:
        ours.say("sequence_parallel_size", size, theirs, ranks)
    ours.say("padding_free", bool(theirs.take(removes)), theirs, removes)


def _finish(theirs: Theirs, ours: Ours) -> None:
    """Batch, optimizer, length of the run and what is left."""
    size = "data.train_batch_size"
    ours.say("global_batch_size", theirs.take(size), theirs, size, note="rows of a step, over all GPUs")
    ours.add("dataloader_drop_last", True, "verl leaves out the rows of an epoch that fill no batch")
    checkpoints = "model.enable_gradient_checkpointing"
    ours.say("gradient_checkpointing", bool(theirs.take(checkpoints)), theirs, checkpoints)
    optimizer(theirs, ours, "optim", steps=1)
    if theirs.take("optim.weight_decay"):
        ours.without["weight_decay of biases and norms"] = "in verl they decay, too"
    total, epochs = theirs.take("trainer.total_training_steps"), theirs.take("trainer.total_epochs")
    if total is not None:
        ours.say("max_steps", total, theirs, "trainer.total_training_steps")
        ours.drop(theirs, ["trainer.total_epochs"], "total_training_steps says it")
    else:
        ours.say("num_train_epochs", epochs, theirs, "trainer.total_epochs")
    _events(theirs, ours)
    records(theirs, ours)
    ours.add("logging_steps", 1, "a line for each step, as in verl")
    rest(theirs, ours, REFUSED, WITHOUT)


def _events(theirs: Theirs, ours: Ours) -> None:
    """When is saved and evaluated. Both happen at the end as well."""
    save, test = theirs.take("trainer.save_freq"), theirs.take("trainer.test_freq")
    if save == "after_each_epoch":
        ours.say("save_strategy", "epoch", theirs, "trainer.save_freq")
    else:
        note = "" if save > 0 else "the final model alone"
        ours.say("save_steps", max(0, save), theirs, "trainer.save_freq", note=note)
    evaluates = any(line.key == "eval_dataset" for line in ours.lines)
    if evaluates and test == "after_each_epoch":
        ours.say("eval_strategy", "epoch", theirs, "trainer.test_freq")
    elif evaluates and test > 0:
        ours.say("eval_steps", test, theirs, "trainer.test_freq")
    if (keep := theirs.take("trainer.max_ckpt_to_keep")) is not None:
        ours.say("save_total_limit", keep, theirs, "trainer.max_ckpt_to_keep")
