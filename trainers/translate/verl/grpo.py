"""What verl's keys of GRPO's family mean in ours: advantages, losses, batches."""

from __future__ import annotations

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.batches import generations, micro_batches, mini_batches, prompts_of_batches
from trainers.translate.verl.clipping import UNREAD_CLIP, clip_range, mean_of_tokens
from trainers.translate.verl.names import (
    ACTOR,
    AGGREGATIONS,
    AVERAGED_BY_SEQUENCE,
    AVERAGED_BY_STEP,
    ESTIMATORS,
    K3,
    MODES,
    ROLLOUT,
)
from trainers.translate.verl.rewards import fixed_kl


def translate(theirs: Theirs, ours: Ours) -> None:
    """Advantages, losses and batches of GRPO's family."""
    advantages(theirs, ours, theirs.take("algorithm.adv_estimator"))
    loss(theirs, ours)
    batches(theirs, ours)
    ours.drop(theirs, [name for name in theirs.values if name.startswith("critic.")], "GRPO has no critic")
    ours.drop(theirs, ["trainer.critic_warmup"], "GRPO has no critic")


def advantages(theirs: Theirs, ours: Ours, estimator: str) -> None:
    """How rewards become advantages, and where the KL goes."""
    ours.say("advantage_estimator", ESTIMATORS[estimator], theirs, "algorithm.adv_estimator")
    scales = theirs.take("algorithm.norm_adv_by_std_in_grpo")
    if estimator == "grpo":
        ours.say("scale_rewards", "group" if scales else "none", theirs, "algorithm.norm_adv_by_std_in_grpo")
        if scales:
            ours.without["the floor of deviations"] = (
                f"rewards are divided by their deviation + 1e-4; {theirs.system} adds 1e-6"
            )
    ours.drop(theirs, ["algorithm.gamma", "algorithm.lam"], "GRPO discounts nothing")
    fixed_kl(theirs, ours)
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


def loss(theirs: Theirs, ours: Ours) -> None:
    """The policy's loss, and the correction for the engine's log-probabilities."""
    mode = theirs.take(f"{ACTOR}.policy_loss.loss_mode") or "vanilla"
    how = theirs.take(f"{ACTOR}.loss_agg_mode")
    if mode in MODES:
        ours.say("loss_type", MODES[mode], theirs, f"{ACTOR}.policy_loss.loss_mode")
        by_step = mode in AVERAGED_BY_STEP
        if by_step and how == "token-mean":
            mean_of_tokens(theirs, ours)
        elif mode not in AVERAGED_BY_SEQUENCE and (how != "token-mean" or mini_batches(theirs) > 1):
            ours.without[f"the average of {MODES[mode]}"] = (
                f"over the tokens of {'an optimizer step' if by_step else 'a generation'}; theirs is {how} of a "
                "mini-batch"
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
        note = (
            f"{theirs.system} does not divide it by the number of sequences" if how == "seq-mean-token-sum-norm" else ""
        )
        ours.say("loss_type", AGGREGATIONS[how], theirs, f"{ACTOR}.loss_agg_mode", note=note)
        mean_of_tokens(theirs, ours)
    if mode == "gspo":
        ours.say("importance_sampling_level", "sequence_token", theirs, f"{ACTOR}.policy_loss.loss_mode")
    (low_value, low), (high_value, high) = clip_range(theirs)
    if MODES.get(mode) in (None, "gmpo", "clip_cov", "dppo_tv", "dppo_kl", "cpgd"):
        ours.say("epsilon", low_value, theirs, low)
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
    ours.drop(theirs, [f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"], "this loss does not clip, or says it")
    ours.drop(theirs, [f"{ACTOR}.clip_ratio"], UNREAD_CLIP)
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


def batches(theirs: Theirs, ours: Ours) -> None:
    """How many prompts a generation has, and how many an optimizer step."""
    sizes = prompts_of_batches(theirs, ours)
    if sizes is None:
        return
    prompts, mini = sizes
    _, draws = generations(theirs)
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
    micro_batches(theirs, ours)
