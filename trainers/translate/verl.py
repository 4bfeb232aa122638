"""verl's keys in ours, and siiRL's, which has the same ones and a few of its own: ``siirl.py``.

Units differ. verl counts prompts (``train_batch_size``, ``ppo_mini_batch_size``) where sequences are counted here, and
generations (``save_freq``, ``test_freq``, ``lr_warmup_steps``, ``total_training_steps``) where optimizer steps are.
Read from verl/trainer/config (ppo_trainer.yaml and what it includes) and verl/trainer/ppo/core_algos.py.
"""

from __future__ import annotations

from typing import Any

from rayhelper import ConfigError
from trainers.configuration.reading.given_keys import plain
from trainers.run.trackers import BUILT_IN
from trainers.translate.table import Line, Ours, Theirs
from trainers.translate.verl_batches import micro_batch
from trainers.translate.verl_images import columns, sees, tower
from trainers.translate.verl_names import (
    ACTOR,
    AGGREGATIONS,
    AVERAGED_BY_SEQUENCE,
    DIVIDED,
    ESTIMATORS,
    K3,
    MEGATRON,
    MODEL,
    MODES,
    OF_ENGINE,
    REF,
    REFUSED,
    ROLLOUT,
    SCHEDULES,
    STAGES,
    TRANSFORMER,
    ULYSSES,
    WITHOUT,
)


def translate(theirs: Theirs, ours: Ours) -> None:
    """Fills ``ours`` from the keys of verl."""
    estimator = theirs.take("algorithm.adv_estimator")
    if estimator not in ESTIMATORS:
        ours.refuse(
            "algorithm.adv_estimator",
            f"{estimator} is not translated; GRPO's family is ({', '.join(ESTIMATORS)}). gae is rayhelper "
            "ppo, whose keys docs/trainers/ppo.md has",
        )
        theirs.taken |= theirs.values.keys()
        return
    _model(theirs, ours)
    _data(theirs, ours)
    _rewards(theirs, ours)
    _advantages(theirs, ours, estimator)
    _loss(theirs, ours)
    _batches(theirs, ours)
    _optimizer(theirs, ours)
    if theirs.take(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum":
        ours.divide_gradients(int(theirs.take("data.max_response_length")), DIVIDED)
    _engine(theirs, ours)
    _backend(theirs, ours)
    _run(theirs, ours)
    _placement(theirs, ours)
    if not theirs.take(f"{ROLLOUT}.multi_turn.enable"):
        turns = [name for name in theirs.left() if name.startswith(f"{ROLLOUT}.multi_turn")]
        ours.drop(theirs, turns, "multi_turn.enable is off")
    for beginning, reason in REFUSED.items():
        found = [
            name for name in theirs.left() if name == beginning or name.startswith((f"{beginning}.", f"{beginning}_"))
        ]
        for name in found:
            theirs.taken.add(name)
            if theirs.values[name] not in (None, False, {}, []):
                ours.refuse(name, reason)
    for beginning, reason in WITHOUT.items():
        ours.drop(theirs, [name for name in theirs.left() if name.startswith(beginning)], reason)


def _model(theirs: Theirs, ours: Ours) -> None:
    ours.say("model", theirs.take(f"{MODEL}.path"), theirs, f"{MODEL}.path")
    if theirs.take(f"{MODEL}.tokenizer_path"):
        ours.say("tokenizer", theirs.take(f"{MODEL}.tokenizer_path"), theirs, f"{MODEL}.tokenizer_path")
    if theirs.take(f"{MODEL}.custom_chat_template"):
        ours.say("chat_template", theirs.take(f"{MODEL}.custom_chat_template"), theirs, f"{MODEL}.custom_chat_template")
    if theirs.take(f"{MODEL}.trust_remote_code"):
        ours.say("trust_remote_code", True, theirs, f"{MODEL}.trust_remote_code")
    rank_key = f"{MODEL}.lora.rank" if f"{MODEL}.lora.rank" in theirs else f"{MODEL}.lora_rank"
    rank = theirs.take(rank_key)
    part = rank_key.removesuffix("rank")
    if rank:
        ours.say("tuner_type", "lora", theirs, rank_key)
        ours.say("lora_rank", rank, theirs, rank_key)
        ours.say("lora_alpha", theirs.take(f"{part}alpha", 32), theirs, f"{part}alpha")
        targets = theirs.take(f"{MODEL}.target_modules")
        ours.say(
            "lora_target_modules",
            targets if isinstance(targets, list) else [targets],
            theirs,
            f"{MODEL}.target_modules",
        )
        if (excluded := theirs.take(f"{MODEL}.exclude_modules")) is not None:
            ours.say("lora_kwargs", {"exclude_modules": excluded}, theirs, f"{MODEL}.exclude_modules")
    ours.drop(
        theirs,
        [
            *(f"{part}alpha", f"{MODEL}.target_modules", f"{MODEL}.exclude_modules"),
            *(f"{MODEL}.lora.{name}" for name in ("lora_A_init_method", "dtype", "merge", "type")),
        ],
        "LoRA is off, or peft and megatron choose it",
    )


def _data(theirs: Theirs, ours: Ours) -> None:
    ours.say("dataset", _files(theirs.take("data.train_files")), theirs, "data.train_files")
    if theirs.take("data.val_files"):
        ours.say("eval_dataset", _files(theirs.take("data.val_files")), theirs, "data.val_files")
    columns(theirs, ours)
    ours.say("shuffle_dataset", theirs.take("data.shuffle"), theirs, "data.shuffle")
    ours.add("dataloader_drop_last", True, f"{theirs.system} leaves out the rows of an epoch that fill no batch")
    if (seed := theirs.take("data.seed")) is not None:
        ours.say("seed", seed, theirs, "data.seed")
    ours.say("max_prompt_length", theirs.take("data.max_prompt_length"), theirs, "data.max_prompt_length")
    if theirs.take("data.filter_overlong_prompts", False):
        ours.say("drop_long_prompts", True, theirs, "data.filter_overlong_prompts")
    ours.say("max_completion_length", theirs.take("data.max_response_length"), theirs, "data.max_response_length")
    if kwargs := theirs.below("data.apply_chat_template_kwargs."):
        ours.say(
            "chat_template_kwargs", kwargs, theirs, *(f"data.apply_chat_template_kwargs.{name}" for name in kwargs)
        )
    for name in ("train_max_samples", "val_max_samples"):
        if theirs.take(f"data.{name}", -1) not in (-1, None):
            ours.refuse(f"data.{name}", "write dataset: FILE#COUNT, which draws so many rows")


def _rewards(theirs: Theirs, ours: Ours) -> None:
    path = theirs.take("custom_reward_function.path")
    name = theirs.take("custom_reward_function.name", "compute_score")
    arguments = theirs.below("custom_reward_function.reward_kwargs.")
    spec: dict[str, Any] = {"name": "trainers.rewards.ground_truth:GroundTruth"}
    if path:
        spec |= {"path": path, "function": name, **({"arguments": arguments} if arguments else {})}
        ours.say("reward_funcs", [spec], theirs, "custom_reward_function.path", "custom_reward_function.name")
    else:
        ours.add("reward_funcs", [spec], "theirs chooses a rule by the column data_source. See below")
        ours.without["the rule of data_source"] = (
            "RayHelper has the rule of openai/gsm8k. Other rules are verl's own, and the run needs verl. Or write "
            "custom_reward_function"
        )
    _overlong(theirs, ours)
    if theirs.take("reward_model.enable") in (True, None) and theirs.take("reward_model.model.path"):
        ours.say("reward_model", [theirs.take("reward_model.model.path")], theirs, "reward_model.model.path")
        ours.lines = [line for line in ours.lines if line.key != "reward_funcs" or path]
        ours.without.pop("the rule of data_source", None)
        ours.drop(
            theirs,
            [name for name in theirs.left() if name.startswith("reward_model.") and "kwargs" not in name],
            "the reward model is a sequence classifier that role reward scores with",
        )


def _overlong(theirs: Theirs, ours: Ours) -> None:
    """DAPO's punishment of long completions, which the reward manager ``dapo`` adds."""
    kwargs = next(
        (one for one in ("reward_model.reward_kwargs", "reward.reward_kwargs") if f"{one}.max_resp_len" in theirs), ""
    )
    values = theirs.below(f"{kwargs}.overlong_buffer_cfg.") if kwargs else {}
    longest = theirs.take(f"{kwargs}.max_resp_len")
    if not values.get("enable"):
        return
    factor = values.get("penalty_factor", 1.0)
    line = next(line for line in ours.lines if line.key == "reward_funcs")
    punishment = {"name": "soft_overlong", "soft_max_length": longest, "soft_cache_length": values.get("len")}
    ours.lines[ours.lines.index(line)] = Line(
        "reward_funcs", [*line.value, punishment], f"{line.comment}; {kwargs}.overlong_buffer_cfg: tokens, as there"
    )
    ours.add("reward_weights", [1.0, float(factor)], f"from {kwargs}.overlong_buffer_cfg.penalty_factor")


def _advantages(theirs: Theirs, ours: Ours, estimator: str) -> None:
    ours.say("advantage_estimator", ESTIMATORS[estimator], theirs, "algorithm.adv_estimator")
    scales = theirs.take("algorithm.norm_adv_by_std_in_grpo")
    if estimator == "grpo":
        ours.say("scale_rewards", "group" if scales else "none", theirs, "algorithm.norm_adv_by_std_in_grpo")
        if scales:
            ours.without["the floor of deviations"] = "rewards are divided by their deviation + 1e-4; verl adds 1e-6"
    ours.drop(theirs, ["algorithm.gamma", "algorithm.lam"], "GRPO discounts nothing")
    if theirs.take("algorithm.kl_penalty", "kl") not in ("kl", "k1"):
        ours.refuse("algorithm.kl_penalty", f"{theirs.take('algorithm.kl_penalty')} is not built; write kl")
    if theirs.take("algorithm.kl_ctrl.type", "fixed") != "fixed":
        ours.refuse("algorithm.kl_ctrl.type", "the weight of the KL is fixed here")
    theirs.taken |= {"algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"}
    in_loss, in_reward = theirs.take(f"{ACTOR}.use_kl_loss"), theirs.take("algorithm.use_kl_in_reward")
    kind = theirs.take(f"{ACTOR}.kl_loss_type")
    coef, reward_coef = theirs.take(f"{ACTOR}.kl_loss_coef"), theirs.take("algorithm.kl_ctrl.kl_coef")
    if in_loss and in_reward:
        ours.refuse("algorithm.use_kl_in_reward", "the KL is in the loss, or in the reward, not in both")
    elif in_loss and kind not in K3:
        ours.refuse(f"{ACTOR}.kl_loss_type", f"{kind} is not built; the KL of the loss is {' or '.join(K3)}")
    elif in_loss:
        ours.say("beta", coef, theirs, f"{ACTOR}.kl_loss_coef", note="k3 in the loss")
        if coef:
            ours.add("kl_clip_max", 10.0, "theirs holds the k3 of a token within 10")
        if coef and estimator not in ("rloo", "remax") and not estimator.startswith("reinforce"):
            ours.say("use_bias_correction_kl", False, theirs, f"{ACTOR}.kl_loss_type", note="without the ratio")
        elif coef:
            ours.add("kl_in_reward", False, f"from {ACTOR}.use_kl_loss")
            ours.add("use_bias_correction_kl", False, f"from {ACTOR}.kl_loss_type; without the ratio")
    elif in_reward:
        ours.say("beta", reward_coef, theirs, "algorithm.kl_ctrl.kl_coef")
        ours.say("kl_in_reward", True, theirs, "algorithm.use_kl_in_reward")
    else:
        ours.say("beta", 0.0, theirs, f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward", note="no KL")
    if not theirs.take("algorithm.use_kl_in_reward"):
        ours.drop(theirs, ["algorithm.kl_ctrl.kl_coef"], "it weighs a KL in the reward, which is off")


def _loss(theirs: Theirs, ours: Ours) -> None:
    mode = theirs.take(f"{ACTOR}.policy_loss.loss_mode") or "vanilla"
    how = theirs.take(f"{ACTOR}.loss_agg_mode")
    if mode in MODES:
        ours.say("loss_type", MODES[mode], theirs, f"{ACTOR}.policy_loss.loss_mode")
        if mode not in AVERAGED_BY_SEQUENCE and (how != "token-mean" or _mini_batches(theirs) > 1):
            ours.without[f"the average of {MODES[mode]}"] = (
                f"over the tokens of a generation; theirs is {how} of a mini-batch"
            )
        for name, key in (("clip_cov_ratio",) * 2, ("clip_cov_lb",) * 2, ("clip_cov_ub",) * 2, ("kl_cov_ratio",) * 2):
            if f"{ACTOR}.policy_loss.{name}" in theirs:
                value = theirs.take(f"{ACTOR}.policy_loss.{name}")
                ours.say(key, value, theirs, f"{ACTOR}.policy_loss.{name}")
        if mode == "kl_cov":
            value = theirs.take(f"{ACTOR}.policy_loss.ppo_kl_coef", 0.1)
            ours.say("kl_cov_coef", value, theirs, f"{ACTOR}.policy_loss.ppo_kl_coef")
    elif mode not in ("vanilla", "gspo"):
        ours.refuse(
            f"{ACTOR}.policy_loss.loss_mode", f"{mode} is not translated (known: vanilla, gspo, {', '.join(MODES)})"
        )
        return
    elif how not in AGGREGATIONS:
        ours.refuse(f"{ACTOR}.loss_agg_mode", f"{how} is not built (known: {', '.join(AGGREGATIONS)})")
    else:
        note = "verl does not divide it by the number of sequences" if how == "seq-mean-token-sum-norm" else ""
        ours.say("loss_type", AGGREGATIONS[how], theirs, f"{ACTOR}.loss_agg_mode", note=note)
    if mode == "gspo":
        ours.say("importance_sampling_level", "sequence_token", theirs, f"{ACTOR}.policy_loss.loss_mode")
    low, high = (f"{ACTOR}.clip_ratio_{side}" for side in ("low", "high"))
    both = theirs.take(f"{ACTOR}.clip_ratio")
    low_value = theirs.take(low) if low in theirs else both
    high_value = theirs.take(high) if high in theirs else both
    if MODES.get(mode) in (None, "gmpo", "clip_cov", "dppo_tv", "dppo_kl"):
        ours.say("epsilon", low_value, theirs, low if low in theirs else f"{ACTOR}.clip_ratio")
        if high_value != low_value:
            ours.say("epsilon_high", high_value, theirs, high)
    elif mode == "cispo":
        ours.say("epsilon_high", 1 + high_value, theirs, high, note="the cap of the ratio itself")
    cap = theirs.take(f"{ACTOR}.clip_ratio_c")
    if mode in ("vanilla", "clip_cov"):
        ours.say("delta", cap, theirs, f"{ACTOR}.clip_ratio_c", note="dual clip: the ratio of negative advantages")
    for name, key in (("tau_pos", "sapo_temperature_pos"), ("tau_neg", "sapo_temperature_neg")):
        if f"{ACTOR}.{name}" in theirs and mode == "sapo":
            ours.say(key, theirs.take(f"{ACTOR}.{name}"), theirs, f"{ACTOR}.{name}")
    ours.drop(theirs, [f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg", f"{ACTOR}.clip_ratio_c"], "this loss does not read it")
    ours.drop(theirs, [low, high, f"{ACTOR}.clip_ratio"], "this loss does not clip, or low and high say it")
    ours.say("entropy_coef", theirs.take(f"{ACTOR}.entropy_coeff"), theirs, f"{ACTOR}.entropy_coeff")
    kind = theirs.take("algorithm.rollout_correction.rollout_is")
    limit = theirs.take("algorithm.rollout_correction.rollout_is_threshold", 2.0)
    if kind:
        ours.say(
            "rollout_importance_sampling_mode", f"{kind}_truncate", theirs, "algorithm.rollout_correction.rollout_is"
        )
        ours.say(
            *("rollout_importance_sampling_clip_max", limit, theirs),
            "algorithm.rollout_correction.rollout_is_threshold",
        )
    else:
        ours.add("rollout_importance_sampling_correction", False, "verl's default of algorithm.rollout_correction")
        ours.drop(theirs, ["algorithm.rollout_correction.rollout_is_threshold"], "rollout_is is off")


def _mini_batches(theirs: Theirs) -> int:
    """Optimizer steps of a generation, each of its own completions."""
    prompts, mini = theirs.take("data.train_batch_size"), theirs.take(f"{ACTOR}.ppo_mini_batch_size")
    return max(1, -(-int(prompts) // int(mini)))


def generations(theirs: Theirs) -> tuple[int, int]:
    """Optimizer steps of a generation, and completions of a prompt."""
    return _mini_batches(theirs) * int(theirs.take(f"{ACTOR}.ppo_epochs")), int(theirs.take(f"{ROLLOUT}.n"))


def _batches(theirs: Theirs, ours: Ours) -> None:
    prompts, mini = theirs.take("data.train_batch_size"), theirs.take(f"{ACTOR}.ppo_mini_batch_size")
    _, draws = generations(theirs)
    if not all(type(one) is int for one in (prompts, mini)) or prompts % mini:
        ours.refuse(f"{ACTOR}.ppo_mini_batch_size", f"{mini} does not divide data.train_batch_size, {prompts} prompts")
        return
    ours.say("num_generations", draws, theirs, f"{ROLLOUT}.n")
    ours.say(
        "generation_batch_size",
        prompts * draws,
        theirs,
        "data.train_batch_size",
        f"{ROLLOUT}.n",
        note=f"{prompts} prompts x {draws}",
    )
    ours.say(
        "global_batch_size",
        mini * draws,
        theirs,
        f"{ACTOR}.ppo_mini_batch_size",
        f"{ROLLOUT}.n",
        note=f"{mini} prompts x {draws}",
    )
    ours.say("num_iterations", theirs.take(f"{ACTOR}.ppo_epochs"), theirs, f"{ACTOR}.ppo_epochs")
    if draws == 1 and theirs.take("algorithm.adv_estimator") == "grpo":
        ours.refuse(f"{ROLLOUT}.n", "a group of one has no other reward to compare with. Write 2 or more")
    micro = micro_batch(theirs, ours)
    if theirs.take(f"{ACTOR}.use_dynamic_bsz"):
        name, ranks = f"{ACTOR}.ppo_max_token_len_per_gpu", theirs.values.get(ULYSSES, 1)
        names = (name, ULYSSES) if ranks > 1 else (name,)
        ours.say("token_budget", theirs.take(name) * ranks, theirs, *names, note="tokens of a micro-batch")
        ours.drop(theirs, [f"{ACTOR}.ppo_micro_batch_size_per_gpu"], "use_dynamic_bsz counts tokens instead")
    elif micro is None:
        ours.refuse(
            f"{ACTOR}.ppo_micro_batch_size_per_gpu", "neither it nor use_dynamic_bsz is given, which verl needs"
        )
    else:
        name = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
        ours.say("per_device_train_batch_size", micro, theirs, name, note="sequences, as there")
        ours.drop(theirs, [f"{ACTOR}.ppo_max_token_len_per_gpu"], "use_dynamic_bsz is off")
    ours.drop(theirs, [f"{ACTOR}.shuffle", f"{ACTOR}.data_loader_seed"], "a generation is divided in a random order")


def _optimizer(theirs: Theirs, ours: Ours) -> None:
    optim = f"{ACTOR}.optim"
    ours.say("learning_rate", theirs.take(f"{optim}.lr"), theirs, f"{optim}.lr")
    ours.say("weight_decay", theirs.take(f"{optim}.weight_decay"), theirs, f"{optim}.weight_decay")
    betas = theirs.take(f"{optim}.betas")
    ours.say("adam_beta1", betas[0], theirs, f"{optim}.betas")
    ours.say("adam_beta2", betas[1], theirs, f"{optim}.betas")
    clip = f"{optim}.clip_grad" if f"{optim}.clip_grad" in theirs else f"{ACTOR}.grad_clip"
    ours.say("max_grad_norm", theirs.take(clip), theirs, clip)
    theirs.taken |= {f"{optim}.clip_grad", f"{ACTOR}.grad_clip"}
    styles = [f"{optim}.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    style = next((name for name in reversed(styles) if theirs.values.get(name) is not None), styles[0])
    kind = theirs.take(style)
    theirs.taken |= set(styles)
    floor = theirs.take(f"{optim}.min_lr_ratio")
    if kind not in SCHEDULES:
        ours.refuse(style, f"{kind} is not translated (known: {', '.join(SCHEDULES)})")
        return
    if kind == "cosine" and floor:
        ours.say("lr_scheduler_type", "cosine_with_min_lr", theirs, style, f"{optim}.min_lr_ratio")
        ours.say("lr_scheduler_kwargs", {"min_lr_rate": floor}, theirs, f"{optim}.min_lr_ratio")
    else:
        ours.say("lr_scheduler_type", SCHEDULES[kind], theirs, style)
    steps, _ = generations(theirs)
    warmup, ratio = theirs.take(f"{optim}.lr_warmup_steps"), theirs.take(f"{optim}.lr_warmup_steps_ratio")
    if warmup is not None and warmup > 0:
        note = f"{warmup} generations of {steps} optimizer steps"
        ours.say("warmup_steps", warmup * steps, theirs, f"{optim}.lr_warmup_steps", note=note)
    elif ratio:
        ours.say("warmup_ratio", ratio, theirs, f"{optim}.lr_warmup_steps_ratio")
    ours.drop(theirs, [f"{optim}.total_training_steps", f"{optim}.num_cycles"], "the schedule ends with the run")
    if theirs.take(f"{optim}.optimizer", "AdamW").lower() not in ("adam", "adamw"):
        ours.refuse(f"{optim}.optimizer", "only AdamW is translated; write optim")
    theirs.taken.add(f"{optim}.optimizer_impl")


def _engine(theirs: Theirs, ours: Ours) -> None:
    name = theirs.take(f"{ROLLOUT}.name")
    if name not in ("vllm", "sglang", "trtllm", "hf"):
        ours.refuse(f"{ROLLOUT}.name", f"{name!r} is no engine that is known here (vllm, hf)")
        return
    note = "" if name in ("vllm", "hf") else f"{name} is not implemented; vLLM completes instead"
    if "data.video_key" in theirs and name != "hf":
        name, note = "hf", f"{name} takes no videos here. The policy completes prompts itself"
    ours.say("rollout_engine", "hf" if name == "hf" else "vllm", theirs, f"{ROLLOUT}.name", note=note)
    if note:
        ours.without[f"{ROLLOUT}.name: {name}"] = note
    ours.say("temperature", theirs.take(f"{ROLLOUT}.temperature"), theirs, f"{ROLLOUT}.temperature")
    ours.say("top_p", float(theirs.take(f"{ROLLOUT}.top_p")), theirs, f"{ROLLOUT}.top_p")
    ours.say("top_k", max(0, theirs.take(f"{ROLLOUT}.top_k")), theirs, f"{ROLLOUT}.top_k", note="0: all tokens")
    if theirs.take(f"{ROLLOUT}.do_sample", True) is False:
        ours.refuse(f"{ROLLOUT}.do_sample", "GRPO draws completions; write true")
    if theirs.take(f"{ROLLOUT}.ignore_eos"):
        ours.say("generation_kwargs", {"ignore_eos": True}, theirs, f"{ROLLOUT}.ignore_eos")
    greedy = not theirs.take(f"{ROLLOUT}.val_kwargs.do_sample")
    heat = 0.0 if greedy else theirs.take(f"{ROLLOUT}.val_kwargs.temperature")
    ours.say("eval_temperature", heat, theirs, f"{ROLLOUT}.val_kwargs.temperature", note="0: greedy")
    ours.say("num_generations_eval", theirs.take(f"{ROLLOUT}.val_kwargs.n"), theirs, f"{ROLLOUT}.val_kwargs.n")
    theirs.taken.add(f"{ROLLOUT}.val_kwargs.temperature")
    ours.drop(
        theirs,
        [f"{ROLLOUT}.val_kwargs.top_p", f"{ROLLOUT}.val_kwargs.top_k"],
        "evaluation draws with top_p and top_k of training",
    )
    if name == "hf":
        beginnings = tuple(f"{ROLLOUT}.{one}" for one in OF_ENGINE)
        ours.drop(
            theirs, [one for one in theirs.left() if one.startswith(beginnings)], "the engine hf does not read it"
        )
        return
    share = f"{ROLLOUT}.gpu_memory_utilization"
    ours.say("vllm_gpu_memory_utilization", theirs.take(share), theirs, share)
    for key in ("max_model_len", "max_num_seqs", "enforce_eager", "enable_prefix_caching"):
        if (value := theirs.take(f"{ROLLOUT}.{key}")) is not None:
            ours.say(f"vllm_{key}", value, theirs, f"{ROLLOUT}.{key}")
    further = {}
    for key in ("max_num_batched_tokens", "enable_chunked_prefill", "disable_log_stats"):
        if (value := theirs.take(f"{ROLLOUT}.{key}")) is not None:
            further[key] = (value, f"{ROLLOUT}.{key}")
    for key, value in theirs.below(f"{ROLLOUT}.engine_kwargs.vllm.").items():
        if key == "disable_mm_preprocessor_cache":
            ours.without[f"{ROLLOUT}.engine_kwargs.vllm.{key}"] = "a language model has no images"
        else:
            further[key] = (value, f"{ROLLOUT}.engine_kwargs.vllm.{key}")
    if further:
        values = {key: value for key, (value, _) in further.items()}
        ours.say("vllm_engine_kwargs", values, theirs, *(source for _, source in further.values()))
    sleeps = theirs.take(f"{ROLLOUT}.free_cache_engine")
    ours.say("sleep_level", 1 if sleeps else 0, theirs, f"{ROLLOUT}.free_cache_engine")


def _backend(theirs: Theirs, ours: Ours) -> None:
    strategy = theirs.take(f"{ACTOR}.strategy")
    named = theirs.take("--config-name", "")
    if strategy == "megatron" or "megatron" in str(named) or theirs.below(f"{MEGATRON}.tensor_model_parallel_size"):
        if sees(theirs):
            ours.refuse("data.image_key", "the translation takes pictures only with the strategy fsdp. Write that")
        _megatron(theirs, ours)
        return
    if sees(theirs) or f"{ACTOR}.freeze_vision_tower" in theirs:
        tower(theirs, ours)
    if strategy not in ("fsdp", "fsdp2"):
        ours.refuse(f"{ACTOR}.strategy", f"{strategy} is not built (known: fsdp, fsdp2, megatron)")
    ours.say("backend", "fsdp", theirs, f"{ACTOR}.strategy")
    if (ranks := theirs.take(ULYSSES, 1)) > 1:
        ours.say("sequence_parallel_size", ranks, theirs, ULYSSES)
    config = f"{ACTOR}.fsdp_config"
    for key, name in (("offload_model", "param_offload"), ("offload_optimizer", "optimizer_offload")):
        ours.say(
            key, bool(theirs.take(f"{config}.{name}")), theirs, f"{config}.{name}", note="while an engine generates"
        )
    if theirs.take(f"{config}.offload_policy"):
        ours.say("fsdp_offload_params", True, theirs, f"{config}.offload_policy")
    frees = theirs.take(f"{config}.reshard_after_forward")
    ours.say("fsdp_reshard_after_forward", bool(frees), theirs, f"{config}.reshard_after_forward")
    ours.drop(theirs, [f"{config}.grad_offload"], "there are no gradients while the engine generates")
    checkpoints = f"{MODEL}.enable_gradient_checkpointing"
    ours.say("gradient_checkpointing", bool(theirs.take(checkpoints)), theirs, checkpoints)
    ours.say("padding_free", bool(theirs.take(f"{MODEL}.use_remove_padding")), theirs, f"{MODEL}.use_remove_padding")


def _megatron(theirs: Theirs, ours: Ours) -> None:
    ours.say("backend", "megatron", theirs, f"{ACTOR}.strategy")
    ours.drop(theirs, [ULYSSES], "megatron divides sequences by context_parallel_size")
    for name in (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    ):
        if (value := theirs.take(f"{MEGATRON}.{name}")) is not None:
            ours.say(name, value, theirs, f"{MEGATRON}.{name}")
        if (other := theirs.values.get(f"{REF}.megatron.{name}", value)) not in (value, 1, None):
            ours.without[f"{REF}.megatron.{name}"] = f"the reference lies as the policy does ({other} there)"
        theirs.taken.add(f"{REF}.megatron.{name}")
    for name in ("param_offload", "grad_offload", "optimizer_offload", "use_distributed_optimizer"):
        if (value := theirs.take(f"{MEGATRON}.{name}")) is not None:
            ours.say(name, value, theirs, f"{MEGATRON}.{name}")
    if f"{MEGATRON}.sequence_parallel" in theirs:
        theirs.take(f"{MEGATRON}.sequence_parallel")
        ours.without[f"{MEGATRON}.sequence_parallel"] = "verl does not read it: it is on with tensor parallelism, as "
        "here"
    if (seed := theirs.take(f"{MEGATRON}.seed")) is not None:
        ours.say("seed", seed, theirs, f"{MEGATRON}.seed")
    fields = theirs.below(TRANSFORMER)
    own = {
        **{f"recompute_{name}": f"recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")},
        **STAGES,
    }
    for name, key in own.items():
        if fields.get(name) is not None:
            ours.say(key, fields.pop(name), theirs, f"{TRANSFORMER}{name}")
        fields.pop(name, None)
    checkpoints = f"{MODEL}.enable_gradient_checkpointing"
    recomputes = any(line.key == "recompute_granularity" for line in ours.lines)
    if theirs.take(checkpoints) and not recomputes:
        ours.say("gradient_checkpointing", True, theirs, checkpoints)
    for name in ("moe_token_dispatcher_type", "moe_grouped_gemm"):
        if fields.get(name) == "flex":
            ours.without[f"{TRANSFORMER}{name}"] = "flex needs TransformerEngine and DeepEP; alltoall sends the tokens"
            del fields[name]
        elif name in fields:
            ours.say(name, fields.pop(name), theirs, f"{TRANSFORMER}{name}")
    fields |= theirs.below(f"{MEGATRON}.override_ddp_config.")
    if fields:
        _fields(fields, theirs, ours)
    ours.drop(theirs, [f"{MODEL}.use_remove_padding"], "backend: megatron never pads")
    sharding = [name for name in theirs.left() if name.startswith(f"{ACTOR}.fsdp_config")]
    ours.drop(theirs, sharding, "the strategy is megatron")


def _fields(fields: dict[str, Any], theirs: Theirs, ours: Ours) -> None:
    """Fields of megatron-core: those that it has, and that the backend does not set itself."""
    from trainers.backends.megatron.fields import check_fields

    kept = {}
    for name, value in fields.items():
        try:
            check_fields({name: value})
            kept[name] = value
        except ConfigError as error:
            ours.without[f"{TRANSFORMER}{name}"] = str(error).removeprefix("megatron: ")
    if kept:
        ours.say("megatron", kept, theirs, *(f"{TRANSFORMER}{name}" for name in kept))


def _run(theirs: Theirs, ours: Ours) -> None:
    steps, _ = generations(theirs)
    each = f"generations of {steps} optimizer steps"
    total = theirs.take("trainer.total_training_steps")
    epochs = theirs.take("trainer.total_epochs")
    if total is not None:
        ours.say("max_steps", total * steps, theirs, "trainer.total_training_steps", note=f"{total} {each}")
        ours.drop(theirs, ["trainer.total_epochs"], "total_training_steps says it")
    else:
        ours.say("num_train_epochs", epochs, theirs, "trainer.total_epochs")
    save, test = theirs.take("trainer.save_freq"), theirs.take("trainer.test_freq")
    note = f"{save} {each}" if save > 0 else "the final model alone"
    ours.say("save_steps", max(0, save) * steps, theirs, "trainer.save_freq", note=note)
    evaluates = any(line.key == "eval_dataset" for line in ours.lines)
    before = bool(theirs.take("trainer.val_before_train")) and evaluates
    if evaluates and test > 0:
        ours.say("eval_steps", test * steps, theirs, "trainer.test_freq", note=f"{test} {each}")
    elif before:
        ours.without["trainer.test_freq"] = (
            "verl evaluates only before the first step, RayHelper also after the last one"
        )
    elif evaluates:
        ours.lines = [line for line in ours.lines if line.key != "eval_dataset"]
        ours.without["data.val_files"] = "trainer.test_freq switches evaluation off"
    ours.say("val_before_train", before, theirs, "trainer.val_before_train")
    if theirs.take("trainer.val_only"):
        ours.refuse("trainer.val_only", "a run trains; rayhelper sample only completes")
    keep = theirs.take("trainer.max_actor_ckpt_to_keep")
    if keep is not None:
        ours.say("save_total_limit", keep, theirs, "trainer.max_actor_ckpt_to_keep")
    theirs.taken.add("trainer.max_critic_ckpt_to_keep")
    project, name = theirs.take("trainer.project_name"), theirs.take("trainer.experiment_name")
    folder = theirs.take("trainer.default_local_dir")
    if folder is None:
        parts = ("trainer.project_name", "trainer.experiment_name")
        ours.say("output_dir", f"checkpoints/{project}/{name}", theirs, *parts)
    else:
        ours.say("output_dir", str(folder), theirs, "trainer.default_local_dir")
    mode, path = theirs.take("trainer.resume_mode"), theirs.take("trainer.resume_from_path")
    if mode == "resume_path" or (path and isinstance(path, str)):
        ours.say("resume_from_checkpoint", path, theirs, "trainer.resume_from_path")
    elif mode == "auto":
        ours.say("resume_from_checkpoint", "auto", theirs, "trainer.resume_mode")
    loggers = plain(theirs.take("trainer.logger"))
    loggers = loggers if isinstance(loggers, list) else [loggers]
    known = [one for one in loggers if one in BUILT_IN]
    ours.say("report_to", known or ["none"], theirs, "trainer.logger")
    for one in loggers:
        if one not in (*BUILT_IN, "console"):
            ours.without[f"trainer.logger: {one}"] = f"report_to is {', '.join(BUILT_IN)} or none"
    if "wandb" in known:
        ours.say("run_name", str(name), theirs, "trainer.experiment_name")
        ours.say("env", {"WANDB_PROJECT": str(project)}, theirs, "trainer.project_name")
    ours.add("logging_steps", steps, "a line for each generation, as in verl")


def _placement(theirs: Theirs, ours: Ours) -> None:
    nodes, each = theirs.take("trainer.nnodes"), theirs.take("trainer.n_gpus_per_node")
    tensor = theirs.take(f"{ROLLOUT}.tensor_model_parallel_size")
    if not all(type(one) is int for one in (nodes, each, tensor)):
        ours.refuse(
            "trainer.nnodes",
            f"nnodes, n_gpus_per_node and tensor_model_parallel_size must be numbers, got {nodes}, {each}, {tensor}",
        )
        return
    is_vllm = any(line.key == "rollout_engine" and line.value == "vllm" for line in ours.lines)
    ours.add("use_ray", True, f"{theirs.system} runs on Ray")
    ours.say("nnodes", nodes, theirs, "trainer.nnodes")
    ours.say("nproc_per_node", each, theirs, "trainer.n_gpus_per_node")
    if is_vllm and tensor > 1:
        ours.say("vllm_tensor_parallel_size", tensor, theirs, f"{ROLLOUT}.tensor_model_parallel_size")
        ours.say("train", {"gpus": nodes * each}, theirs, "trainer.nnodes", "trainer.n_gpus_per_node")
        note = "separate processes on the devices of train: an engine uses several workers"
        ours.add("rollout", {"gpus": nodes * each, "shares_devices_with": "train"}, note)
    else:
        ours.add("colocate_groups", [["train", "rollout"]], "policy and engine share their workers, as in verl")
        for role in ("train", "rollout"):
            ours.say(role, {"gpus": nodes * each}, theirs, "trainer.nnodes", "trainer.n_gpus_per_node")


def _files(value: Any) -> Any:
    """One file or a list of them; text may say a list."""
    found = plain(value.replace("'", '"')) if isinstance(value, str) and value.startswith("[") else value
    return found[0] if isinstance(found, list) and len(found) == 1 else found
