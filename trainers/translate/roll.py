"""ROLL's configuration of an RLVR pipeline in ours: sections of roles, each with its strategy.

Units: ``rollout_batch_size`` counts prompts, ``per_device_train_batch_size`` and ``gradient_accumulation_steps``
sequences of a data-parallel rank, ``max_steps``, ``save_steps`` and ``eval_steps`` generations. Read from
roll/configs (base_config.py, worker_config.py) and roll/pipeline/rlvr/rlvr_config.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from rayhelper import ConfigError
from trainers.run.trackers import BUILT_IN
from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.names import DIVIDED, STAGES

ESTIMATORS = {"grpo": "grpo", "reinforce": "reinforce_plus_plus_token", "rloo": "rloo"}
SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
)
OF_MEGATRON = (
    *("sequence_parallel", "use_distributed_optimizer", "recompute_granularity", "recompute_method"),
    *("recompute_num_layers", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_layer_recompute"),
    "overlap_grad_reduce",
)
TRAIN = {"megatron_train": "megatron", "fsdp2_train": "fsdp", "deepspeed_train": "fsdp"}
WITHOUT = {
    "hydra.": "hydra writes no folders here",
    "defaults": "RayHelper has no presets: write the keys of the preset",
    "logging_dir": "logs lie in output_dir",
    "checkpoint_config.": "checkpoints lie in output_dir",
    "tracker_kwargs.": "write env: {WANDB_PROJECT: ...}, and no key of an account into a file",
    "rpc_timeout": "timeout_s limits a call to a role",
    "system_envs.": "write env",
    "exp_name": "output_dir and run_name name the run",
    "reward_pretrain": "a rule needs no model",
    "validation.": "write eval_dataset",
    "actor_train.data_args.preprocessing_num_workers": "rows are tokenized where they are used",
    "actor_train.data_args.dataset_dir": "file_name is the place of the rows",
    "actor_train.data_args.interleave_probs": "rows of several files are read in a random order",
    "actor_train.data_args.domain_interleave_probs.": "rows of several domains are read in a random order. Write "
    "datasets "
    "with fraction for shares",
    "actor_infer.num_gpus_per_worker": "vllm_tensor_parallel_size is the number of workers per model",
    "actor_train.use_remove_padding": "padding_free decides it, and backend: megatron never pads",
    "actor_train.use_sequence_packing": "padding_free decides it, and backend: megatron never pads",
    "critic.": "this estimator has no critic",
    "num_nodes": "the devices of the roles determine the number of nodes",
    "val_": "evaluation reads eval_dataset",
    "is_num_return_sequences_expand": "an engine gets the prompts of a group as it chooses",
    "generate_opt_level": "prompts enter the engine while others are completed",
    "save_logging_board_dir": "logs lie in output_dir",
    "offload_nccl": "process groups stay",
    "actor_train.offload_nccl": "process groups stay",
    "actor_infer.offload_nccl": "process groups stay",
    "reference.offload_nccl": "process groups stay",
    "global_template": "the model's own chat template is used",
    "query_filter_config.": "dynamic_sample: true leaves out prompts with equal rewards",
    "max_running_requests": "vllm_max_num_seqs says it",
}
REFUSED_ON = {  # switches that change numbers, and are not built
    "value_clip": None,  # of a critic
    "difficulty_mask": "prompts are not masked by their difficulty. Write false; dynamic_sample is near",
    "difficulty_loss_weight": "losses are not weighed by difficulty. Write false",
    "length_loss_weight": "losses are not weighed by length. Write false",
    "error_max_len_clip": "rewards of long completions are not clipped. Write false",
    "add_token_level_kl": "write kl_in_reward and beta by hand: ROLL adds its KL to each token",
    "use_reward_scaling": "rewards are not scaled by a running mean. Write false",
    "use_reward_norm": "rewards are not normalised by a running mean. Write false",
    "reward_norm": "write norm_mean_type and norm_std_type, which took its place",
    "reward_shift": "write norm_mean_type, which took its place",
    "reward_scale": "write norm_std_type, which took its place",
    "async_generation_ratio": "it counts asynchronous requests. Write 0, and max_staleness: 1 into the translated file",
    "actor_train.model_args.freeze_module_prefix": "translate the file without it, and write freeze_vit: true",
    "actor_train.data_args.image_max_pixels": "translate the file without it, and write image_processor_kwargs: "
    "{max_pixels: ...}",
}
LEVELS = {"token": "token", "seq": "sequence"}  # of importance_sampling


AGENTIC = "grpo, with environment: NAME in a file of external_plugins (docs/rollouts.md)"
# ROLL's other pipelines: keys that each alone has, and the trainer here
PIPELINES = {
    "agentic": (("train_env_manager", "custom_envs"), AGENTIC),
    "SFT": (("sft_train",), "sft (docs/trainers/sft.md)"),
    "DPO": (("chosen_key",), "dpo (docs/trainers/dpo.md)"),
    "distillation": (("student_train", "student"), "gkd (docs/trainers/gkd.md)"),
}


def translate(theirs: Theirs, ours: Ours) -> None:
    """Fills ``ours`` from the keys of ROLL's RLVR pipeline."""
    sections = {name.partition(".")[0] for name in theirs.values}
    for pipeline, (keys, trainer) in PIPELINES.items():
        if found := [key for key in keys if key in sections]:
            ours.refuse(
                found[0],
                f"this file is of ROLL's {pipeline} pipeline, and only RLVR is translated. Here that is rayhelper "
                f"{trainer}",
            )
            theirs.taken |= set(theirs.values)
            return
    if "pretrain" not in theirs and "rollout_batch_size" not in theirs:
        ours.without["pretrain, rollout_batch_size, rewards, ..."] = (
            "a part of a file: write model, dataset, reward_funcs and the sizes of batches"
        )
        _strategies(theirs, ours)
        return
    ours.say("model", theirs.take("pretrain"), theirs, "pretrain")
    _data(theirs, ours)
    _rewards(theirs, ours)
    _algorithm(theirs, ours)
    _batches(theirs, ours)
    _strategies(theirs, ours)
    _run(theirs, ours)
    for name, reason in REFUSED_ON.items():
        value = theirs.take(name)
        if value not in (None, False, 0, "None") and reason:
            ours.refuse(name, reason)
        elif name in theirs and value and reason is None:
            ours.without[name] = "there is no critic"
    ours.drop(theirs, ["difficulty_low_threshold", "difficulty_high_threshold"], "difficulty_mask is off")
    for beginning, reason in WITHOUT.items():
        ours.drop(theirs, [name for name in theirs.left() if name.startswith(beginning)], reason)
    for name in theirs.left():
        if re.search(r"\.(model_type|attn_implementation|flash_attn|template|use_flash_attn)$", name):
            ours.drop(theirs, [name], "the model's own config.json and chat template say it")


def _data(theirs: Theirs, ours: Ours) -> None:
    files = theirs.take("actor_train.data_args.file_name")
    if files is None:
        ours.refuse("actor_train.data_args.file_name", "there is none: where do the rows come from?")
    else:
        files = files[0] if isinstance(files, list) and len(files) == 1 else files
        ours.say("dataset", files, theirs, "actor_train.data_args.file_name")
    column = theirs.take("actor_train.data_args.messages", "messages")
    ours.say("columns", {column: "prompt"}, theirs, "actor_train.data_args.messages")
    ours.say("max_prompt_length", theirs.take("prompt_length"), theirs, "prompt_length")
    longest = theirs.take("actor_infer.generating_args.max_new_tokens")
    ours.say("max_completion_length", theirs.take("response_length", longest), theirs, "response_length")


def _rewards(theirs: Theirs, ours: Ours) -> None:
    domains = sorted({name.split(".")[1] for name in theirs.values if name.startswith("rewards.")})
    rules = [domain for domain in domains if "rule" in domain or "ifeval" in domain]
    ours.drop(theirs, [name for name in theirs.left() if name.startswith("rewards.")], "see reward_funcs")
    for name in [name for name in ours.without if name.startswith("rewards.")]:
        del ours.without[name]
    other = [domain for domain in domains if domain not in rules]
    if other:
        ours.refuse(
            f"rewards.{other[0]}",
            f"rewards of {', '.join(other)} are workers of ROLL's own. Write a reward function in a file of "
            "external_plugins, and translate the file without them",
        )
    ours.add("reward_funcs", ["exact_answer"], f"theirs chooses a worker by the column tag ({', '.join(domains)})")
    ours.without["rewards"] = (
        f"{', '.join(domains) or 'none'}: the last number, or the one in \\boxed{{}}, is compared with the column "
        "answer or solution. For another rule write reward_funcs"
    )
    columns = next(line for line in ours.lines if line.key == "columns")
    ours.lines[ours.lines.index(columns)] = type(columns)(
        "columns", {**columns.value, "ground_truth": "answer"}, f"{columns.comment}; ground_truth is ROLL's answer"
    )


def _algorithm(theirs: Theirs, ours: Ours) -> None:
    estimator = theirs.take("adv_estimator", "gae")
    whitens = theirs.take("whiten_advantages", False)
    means, deviations = theirs.take("norm_mean_type"), theirs.take("norm_std_type")
    theirs.taken |= {"whiten_advantages", "norm_mean_type", "norm_std_type"}
    if estimator == "gae":
        ours.refuse("adv_estimator", "gae has a critic: rayhelper ppo, whose keys docs/trainers/ppo.md has")
    elif estimator not in ESTIMATORS:
        ours.refuse("adv_estimator", f"{estimator} is not translated (known: {', '.join(ESTIMATORS)})")
    elif estimator == "reinforce" and (means, deviations) == ("group", "group") and not whitens:
        ours.say("advantage_estimator", "grpo", theirs, "adv_estimator", "norm_mean_type", "norm_std_type")
    elif estimator == "reinforce" and not whitens:
        ours.refuse("adv_estimator", "reinforce without whiten_advantages has no estimator here. Write grpo, or whiten")
    else:
        ours.say("advantage_estimator", ESTIMATORS[estimator], theirs, "adv_estimator")
        if estimator == "grpo" and whitens:
            ours.refuse("whiten_advantages", "advantages of grpo are divided within the group. Write false")
    for name in ("reward_clip", "advantage_clip"):
        if theirs.take(name) is not None:
            ours.without[name] = f"nothing clips {name.split('_')[0]}s: rules give 0 and 1"
    if theirs.take("use_pg_clip_range", False):
        ours.say("epsilon", theirs.take("pg_clip_low", 0.2), theirs, "pg_clip_low")
        ours.say("epsilon_high", theirs.take("pg_clip_high", 0.2), theirs, "pg_clip_high")
    else:
        ours.say("epsilon", theirs.take("pg_clip", 0.2), theirs, "pg_clip")
    ours.drop(theirs, ["pg_clip", "pg_clip_low", "pg_clip_high"], "use_pg_clip_range says which are read")
    ours.say("max_grad_norm", theirs.take("max_grad_norm", 1.0), theirs, "max_grad_norm")
    if theirs.take("dual_clip_loss", False):
        ours.say("delta", 3.0, theirs, "dual_clip_loss", note="dual clip: the ratio of negative advantages")
    level = theirs.take("importance_sampling", "token")
    if level in LEVELS:
        ours.say("importance_sampling_level", LEVELS[level], theirs, "importance_sampling")
    else:
        ours.refuse("importance_sampling", f"{level} is not built (known: {', '.join(LEVELS)})")
    how = theirs.take("loss_agg_mode", "seq-mean-token-sum")
    kinds = {"token-mean": "bnpo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "dr_grpo"}
    if how in kinds:
        ours.say("loss_type", kinds[how], theirs, "loss_agg_mode")
        if how == "seq-mean-token-sum":
            longest = theirs.take("response_length", theirs.take("actor_infer.generating_args.max_new_tokens"))
            if isinstance(longest, int):
                ours.divide_gradients(longest, DIVIDED)
            else:
                ours.refuse("response_length", "it is not given, and loss_agg_mode seq-mean-token-sum divides by it")
    else:
        ours.refuse("loss_agg_mode", f"{how} is not built (known: {', '.join(kinds)})")
    ours.say("mask_truncated_completions", bool(theirs.take("max_len_mask", False)), theirs, "max_len_mask")
    coef = theirs.take("init_kl_coef") if theirs.values.get("add_token_level_kl") else None
    weight = theirs.take("kl_loss_coef", 0.0) if theirs.take("use_kl_loss", False) else 0.0
    ours.drop(theirs, ["init_kl_coef", "kl_penalty"], "add_token_level_kl is off")
    ours.say("beta", float(coef or weight or 0.0), theirs, "use_kl_loss", "kl_loss_coef")
    if weight:
        ours.add("use_bias_correction_kl", False, "from kl_loss_coef; without the ratio")
    ours.say("entropy_coef", float(theirs.take("entropy_loss_coef", 0.0)), theirs, "entropy_loss_coef")


def _batches(theirs: Theirs, ours: Ours) -> None:
    prompts, draws = theirs.take("rollout_batch_size"), theirs.take("num_return_sequences_in_group", 1)
    epochs = theirs.take("ppo_epochs", 1)
    ours.say("num_generations", draws, theirs, "num_return_sequences_in_group")
    ours.say(
        *("generation_batch_size", prompts * draws, theirs, "rollout_batch_size", "num_return_sequences_in_group"),
        note=f"{prompts} prompts x {draws}",
    )
    ours.say("num_iterations", epochs, theirs, "ppo_epochs")
    arguments = "actor_train.training_args"
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        ours.say(name, theirs.take(f"{arguments}.{name}", 1), theirs, f"{arguments}.{name}")
    for name, default in (
        *(("learning_rate", 5e-5), ("weight_decay", 0.0), ("num_train_epochs", None)),
        *(("lr_scheduler_type", "linear"), ("adam_beta1", 0.9), ("adam_beta2", 0.999)),
    ):
        if (value := theirs.take(f"{arguments}.{name}", default)) is not None:
            ours.say(name, float(value) if name == "weight_decay" else value, theirs, f"{arguments}.{name}")
    ours.say("warmup_steps", theirs.take(f"{arguments}.warmup_steps", 0), theirs, f"{arguments}.warmup_steps")


def _strategies(theirs: Theirs, ours: Ours) -> None:
    name = theirs.take("actor_train.strategy_args.strategy_name")
    if name is None:
        ours.refuse("actor_train.strategy_args.strategy_name", "it is missing, and decides how the policy is trained")
        return
    config = theirs.below("actor_train.strategy_args.strategy_config.")
    preset = theirs.take("actor_train.strategy_args.strategy_config")
    if name not in TRAIN:
        ours.refuse("actor_train.strategy_args.strategy_name", f"{name} is not built (known: {', '.join(TRAIN)})")
        return
    ours.say("backend", TRAIN[name], theirs, "actor_train.strategy_args.strategy_name")
    if name == "deepspeed_train":
        _deepspeed(preset, ours)
    for key in (*SIZES, *OF_MEGATRON, *STAGES) if TRAIN[name] == "megatron" else ():
        if config.get(key) is not None:
            source = f"actor_train.strategy_args.strategy_config.{key}"
            ours.say(STAGES.get(key, key), config.pop(key), theirs, source)
    for key in ("use_flash_attn", *SIZES, *OF_MEGATRON, *STAGES):
        config.pop(key, None)
    if TRAIN[name] == "megatron" and config:
        ours.say("megatron", config, theirs, *(f"actor_train.strategy_args.strategy_config.{key}" for key in config))
    if (size := theirs.take("actor_train.infer_batch_size")) is not None and TRAIN[name] == "megatron":
        ours.say("infer_batch_size", size, theirs, "actor_train.infer_batch_size")
    dtype = theirs.take("actor_train.model_args.dtype")
    names = {"bf16": "bfloat16", "fp32": "float32", "bfloat16": "bfloat16", "float32": "float32"}
    if dtype is not None and dtype not in names:
        ours.refuse("actor_train.model_args.dtype", f"{dtype} is not offered. Write bf16")
    elif dtype is not None:
        ours.say("dtype", names[dtype], theirs, "actor_train.model_args.dtype")
    off = theirs.take("actor_train.model_args.disable_gradient_checkpointing", False)
    if not any(line.key in ("recompute_granularity", "moe_layer_recompute") for line in ours.lines):
        source = "actor_train.model_args.disable_gradient_checkpointing"
        ours.say("gradient_checkpointing", not off, theirs, source, note="the other way round")
    _adapter(theirs, ours)
    if "actor_infer.strategy_args.strategy_name" in theirs:
        _engine(theirs, ours)
    for role in ("reference", "actor_infer", "actor_train"):
        left = [one for one in theirs.left() if one.startswith(f"{role}.")]
        told = (
            "the reference has the placement of the policy" if role == "reference" else "the policy's keys hold for it"
        )
        same = ("model_args", "data_args", "strategy_args", "infer_batch_size")
        if role != "actor_train":
            ours.drop(theirs, [one for one in left if one.split(".")[1] in same], told)
    if "actor_infer.device_mapping" in theirs or "rollout_batch_size" in theirs:
        _placement(theirs, ours)
        return
    for role, ours_role in (("actor_train", "train"), ("reference", "reference")):
        if ranks := ranks_of(theirs.take(f"{role}.device_mapping")):
            ours.say(ours_role, {"gpus": len(ranks)}, theirs, f"{role}.device_mapping")


def _deepspeed(preset: Any, ours: Ours) -> None:
    stage = re.fullmatch(r"\$\{deepspeed_(zero\d?)(_cpuoffload)?\}", str(preset))
    kinds = {"zero": ("no_shard", None), "zero2": ("full_shard", False), "zero3": ("full_shard", True)}
    if stage is None or stage[1] not in kinds:
        ours.refuse("actor_train.strategy_args.strategy_config", f"{preset} is no preset that is known: write fsdp_*")
        return
    strategy, frees = kinds[stage[1]]
    source = "from actor_train.strategy_args.strategy_config"
    ours.add("fsdp_sharding_strategy", strategy, source)
    if frees is not None:
        ours.add("fsdp_reshard_after_forward", frees, source)
    if stage[2]:
        ours.add("fsdp_offload_params", True, source)


def _adapter(theirs: Theirs, ours: Ours) -> None:
    arguments = "actor_train.model_args"
    rank = theirs.take(f"{arguments}.lora_rank")
    if rank is None:
        return
    ours.add("tuner_type", "lora", f"from {arguments}.lora_rank")
    ours.say("lora_rank", rank, theirs, f"{arguments}.lora_rank")
    target = theirs.take(f"{arguments}.lora_target", "all-linear")
    names = ["all-linear"] if target in ("all", "all-linear") else str(target).split(",")
    ours.say("lora_target_modules", names, theirs, f"{arguments}.lora_target")
    for name, default in (("lora_alpha", 2 * rank), ("lora_dropout", 0.0)):
        ours.say(name, theirs.take(f"{arguments}.{name}", default), theirs, f"{arguments}.{name}")


def _engine(theirs: Theirs, ours: Ours) -> None:
    name = theirs.take("actor_infer.strategy_args.strategy_name")
    note = "" if name in ("vllm", "hf_infer") else f"{name} is not implemented; vLLM completes instead"
    ours.say(
        "rollout_engine",
        "hf" if name == "hf_infer" else "vllm",
        theirs,
        "actor_infer.strategy_args.strategy_name",
        note=note,
    )
    config = theirs.below("actor_infer.strategy_args.strategy_config.")
    renamed = {"tensor_parallel_size": "vllm_tensor_parallel_size"}
    further: dict[str, Any] = {}
    for key, value in config.items() if name == "vllm" else ():
        source = f"actor_infer.strategy_args.strategy_config.{key}"
        if key in ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "enforce_eager", "enable_prefix_caching"):
            ours.say(f"vllm_{key}", value, theirs, source)
        elif key in renamed:
            ours.say(renamed[key], value, theirs, source)
        elif key == "load_format":
            ours.without[source] = "the engine gets the policy's weights"
        else:
            further[key] = value
    if further:
        ours.add("vllm_engine_kwargs", further, "from actor_infer.strategy_args.strategy_config")
    if name not in ("vllm", "hf_infer"):
        ours.without["actor_infer.strategy_args"] = note
    arguments = "actor_infer.generating_args"
    for key in ("temperature", "top_p", "top_k"):
        if (value := theirs.take(f"{arguments}.{key}")) is not None:
            ours.say(key, max(0, value) if key == "top_k" else value, theirs, f"{arguments}.{key}")
    if theirs.take(f"{arguments}.num_beams", 1) != 1:
        ours.refuse(f"{arguments}.num_beams", "completions are drawn, not searched for. Write 1")
    theirs.taken |= {f"{arguments}.max_new_tokens", f"{arguments}.num_return_sequences"}


def _placement(theirs: Theirs, ours: Ours) -> None:
    ranks = {
        role: ranks_of(theirs.take(f"{role}.device_mapping")) for role in ("actor_train", "actor_infer", "reference")
    }
    if not ranks["actor_train"] or not ranks["actor_infer"]:
        ours.refuse("actor_train.device_mapping", "device_mapping of actor_train and actor_infer say where roles run")
        return
    groups: dict[str, Any] = {"nproc_per_node": theirs.take("num_gpus_per_node", 8)}
    for role in ("actor_infer", "reference"):
        shared = set(ranks[role]) & set(ranks["actor_train"])
        if shared and set(ranks[role]) != set(ranks["actor_train"]):
            ours.refuse(
                f"{role}.device_mapping",
                f"{len(shared)} of the {len(ranks['actor_train'])} devices of actor_train: here a role has all devices "
                "of another role, or none of them. Give both the same device_mapping, or others",
            )
            return
    engine = next((line.value for line in ours.lines if line.key == "vllm_tensor_parallel_size"), 1)
    colocated = ranks["actor_infer"] == ranks["actor_train"]
    groups["trainers"] = {"device": "GPU", "ranks": ranks["actor_train"], "workers": ["train"]}
    if colocated and engine > 1:
        groups["engines"] = {"device": "GPU", "shares_devices_with": "trainers", "workers": ["rollout"]}
    elif colocated:
        groups["trainers"]["workers"].append("rollout")
    else:
        groups["engines"] = {"device": "GPU", "ranks": ranks["actor_infer"], "workers": ["rollout"]}
    has_reference = any(line.key == "beta" and line.value for line in ours.lines)
    if not has_reference:
        ours.drop(theirs, ["reference.device_mapping"], "no KL is asked for, so that there is no reference")
    elif ranks["reference"] and ranks["reference"] != ranks["actor_train"]:
        groups["references"] = {"device": "GPU", "ranks": ranks["reference"], "workers": ["reference"]}
    else:
        groups["trainers"]["workers"].append("reference")
    if colocated:
        ours.add("sleep_level", 1, "ROLL's engines sleep while they share devices")
    ours.add("use_ray", True, "ROLL runs on Ray")
    ours.say(*("device_groups", groups, theirs, "actor_train.device_mapping", "actor_infer.device_mapping"))


def ranks_of(mapping: Any) -> list[int]:
    """The ranks of a device_mapping: ``list(range(0, 4))``, a list, several of them with ``+``, or text that holds one.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return [] if mapping is None else _listed(ast.parse(str(mapping).strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        raise ConfigError(f"device_mapping {mapping} is not a list of ranks, such as list(range(0, 4))") from None


def _listed(node: ast.expr) -> list[int]:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_listed(left), *_listed(right)]
        case ast.Call(
            func=ast.Name("list"), args=[ast.Call(func=ast.Name("range"), args=ends, keywords=[])], keywords=[]
        ):
            return list(range(*map(ast.literal_eval, ends)))
        case ast.Call(func=ast.Name("list"), args=[ast.List() as inner], keywords=[]):
            return _listed(inner)
        case ast.List(elts=elements):
            return [int(ast.literal_eval(one)) for one in elements]
    raise ValueError


def _run(theirs: Theirs, ours: Ours) -> None:
    prompts, draws = theirs.take("rollout_batch_size"), theirs.take("num_return_sequences_in_group", 1)
    values = {line.key: line.value for line in ours.lines}
    groups: Mapping[str, Any] = values.get("device_groups", {})
    workers = len(groups["trainers"]["ranks"]) if groups else 1
    layout = 1
    for name in SIZES[:3]:
        layout *= values.get(name) or 1
    a_step = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] * max(1, workers // layout)
    steps = max(1, prompts * draws // a_step) * values["num_iterations"]
    note = f"generations of {steps} optimizer steps ({prompts * draws} completions, {a_step} a step)"
    for name in ("max_steps", "save_steps", "logging_steps"):
        value = theirs.take(name)
        if value is not None and value > 0:
            ours.say(name, value * steps, theirs, name, note=f"{value} {note}")
    ours.drop(theirs, ["eval_steps"], "there is no eval_dataset. Write both")
    ours.say("output_dir", theirs.take("output_dir", "outputs"), theirs, "output_dir")
    ours.say("seed", theirs.take("seed", 42), theirs, "seed")
    resume = theirs.take("resume_from_checkpoint", False)
    if resume:
        ours.say("resume_from_checkpoint", resume, theirs, "resume_from_checkpoint")
    tracker = theirs.take("track_with")
    ours.say("report_to", [tracker if tracker in BUILT_IN else "none"], theirs, "track_with")
