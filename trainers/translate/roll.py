"""ROLL's configuration of an RLVR pipeline in ours: sections of roles, each with its strategy.

Units: ``rollout_batch_size`` counts prompts, ``per_device_train_batch_size`` and ``gradient_accumulation_steps``
sequences of a data-parallel rank, ``max_steps``, ``save_steps`` and ``eval_steps`` generations. Read from
roll/configs (base_config.py, worker_config.py) and roll/pipeline/rlvr/rlvr_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainers.run.trackers import BUILT_IN
from trainers.translate import roll_sft
from trainers.translate.roll_strategies import SIZES, own_devices, ranks_of, strategies, training_arguments
from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.names import DIVIDED

ESTIMATORS = {"grpo": "grpo", "reinforce": "reinforce_plus_plus_token", "rloo": "rloo"}
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
    "DPO": (("chosen_key",), "dpo (docs/trainers/dpo.md)"),
    "distillation": (("student_train", "student"), "gkd (docs/trainers/gkd.md)"),
}


def translate(theirs: Theirs, ours: Ours) -> None:
    """Fills ``ours`` from the keys of ROLL's RLVR or SFT pipeline."""
    sections = {name.partition(".")[0] for name in theirs.values}
    if roll_sft.SECTION in sections:
        roll_sft.translate(theirs, ours)
        _without(theirs, ours)
        return
    for pipeline, (keys, trainer) in PIPELINES.items():
        if found := [key for key in keys if key in sections]:
            ours.refuse(
                found[0],
                f"this file is of ROLL's {pipeline} pipeline. RLVR and SFT are translated. Here that is rayhelper "
                f"{trainer}",
            )
            theirs.taken |= set(theirs.values)
            return
    if "pretrain" not in theirs and "rollout_batch_size" not in theirs:
        ours.without["pretrain, rollout_batch_size, rewards, ..."] = (
            "a part of a file: write model, dataset, reward_funcs and the sizes of batches"
        )
        strategies(theirs, ours)
        _place(theirs, ours)
        return
    ours.say("model", theirs.take("pretrain"), theirs, "pretrain")
    _data(theirs, ours)
    _rewards(theirs, ours)
    _algorithm(theirs, ours)
    _batches(theirs, ours)
    strategies(theirs, ours)
    _place(theirs, ours)
    _run(theirs, ours)
    for name, reason in REFUSED_ON.items():
        value = theirs.take(name)
        if value not in (None, False, 0, "None") and reason:
            ours.refuse(name, reason)
        elif name in theirs and value and reason is None:
            ours.without[name] = "there is no critic"
    _without(theirs, ours)


def _without(theirs: Theirs, ours: Ours) -> None:
    """Notes what has no equivalent."""
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
    thresholds = ("difficulty_low_threshold", "difficulty_high_threshold")
    masks = theirs.take("difficulty_mask", False) and theirs.take("num_return_sequences_in_group", 1) > 1
    if masks:
        bounds = [float(theirs.take(name, default)) for name, default in zip(thresholds, (0.0, 1.0), strict=True)]
        ours.say("difficulty_range", bounds, theirs, *thresholds, note="of the mean score of a prompt")
    ours.drop(theirs, thresholds, "difficulty_mask is off, or a prompt has one completion")
    if how != "token-mean" and (masks or theirs.take("max_len_mask", False)):
        ours.without["the number of sequences"] = (
            "ROLL divides by the sequences that the loss counts. RayHelper divides by all sequences of a step"
        )
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
    training_arguments(theirs, ours)


def _place(theirs: Theirs, ours: Ours) -> None:
    if "actor_infer.device_mapping" in theirs or "rollout_batch_size" in theirs:
        _placement(theirs, ours)
    else:
        own_devices(theirs, ours)


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
