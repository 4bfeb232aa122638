"""What verl's keys of PPO mean in ours: advantages, the losses of policy and critic, batches, the critic's optimizer.

There the score is the reward of the last token, the critic's loss has no weight beside the learning rate, and ratios of
negative advantages are limited.
"""

from __future__ import annotations

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.backend import on_megatron
from trainers.translate.verl.batches import micro_batches, mini_batches, prompts_of_batches
from trainers.translate.verl.clipping import UNREAD_CLIP, clip_range, mean_of_tokens
from trainers.translate.verl.names import ACTOR, K3, MODEL, ROLLOUT
from trainers.translate.verl.rewards import fixed_kl

OPTIM = "optim.lr_scheduler_type optim.min_lr_ratio optim.weight_decay optim.betas".split()
LENGTHS = ("ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode")
WITHOUT = {
    "critic.model.": "the critic is loaded, sharded and offloaded as the policy is",
    "critic.fsdp": "the critic is loaded, sharded and offloaded as the policy is",
    "critic.megatron.": "the critic is placed like the policy",
    "critic.strategy": "one backend holds for all roles that train or score",
    "critic.ulysses_sequence_parallel_size": "the critic is placed like the policy",
    "critic.ppo_micro_batch_size": "the critic learns in micro-batches of the policy's size",
    "critic.ppo_max_token_len_per_gpu": "the critic learns in micro-batches of the policy's size",
    "critic.use_dynamic_bsz": "the critic learns in micro-batches of the policy's size",
    "critic.forward_": "values are computed in micro-batches of training's size",
    "critic.profiler": "rayhelper timeline shows a run",
    "critic.checkpoint": "a checkpoint holds model, optimizer and random states",
    "critic.shuffle": "a generation is divided in a random order",
    "critic.data_loader_seed": "a generation is divided in a random order",
    "critic.rollout_n": "rollout.n says it",
    "critic.enable": "PPO has a critic",
    "critic.optim.total_training_steps": "the schedule ends with the run",
    "critic.optim.num_cycles": "the schedule ends with the run",
}


def translate(theirs: Theirs, ours: Ours) -> None:
    """Advantages, the two losses, and batches."""
    advantages(theirs, ours)
    loss(theirs, ours)
    batches(theirs, ours)


def advantages(theirs: Theirs, ours: Ours) -> None:
    """GAE, and the KL in the reward."""
    for key, name in (("gamma", "algorithm.gamma"), ("lam", "algorithm.lam")):
        ours.say(key, float(theirs.take(name)), theirs, name)
    ours.add("score_on_last_token", True, f"the score is the reward of the last token in {theirs.system}")
    ours.drop(theirs, ["algorithm.norm_adv_by_std_in_grpo"], "PPO has no groups")
    fixed_kl(theirs, ours)
    coefficient, kind = f"{ACTOR}.kl_loss_coef", theirs.take(f"{ACTOR}.kl_loss_type")
    if theirs.take(f"{ACTOR}.use_kl_loss") and kind not in K3:
        ours.refuse(f"{ACTOR}.kl_loss_type", f"{kind} is not built; the KL of the loss is {' or '.join(K3)}")
    elif theirs.take(f"{ACTOR}.use_kl_loss") and theirs.take(coefficient):
        ours.say("kl_loss_coef", theirs.take(coefficient), theirs, coefficient, note="k3 in the loss")
        ours.add("kl_clip_max", 10.0, "theirs holds the k3 of a token within 10")
    ours.drop(theirs, [coefficient, f"{ACTOR}.kl_loss_type"], "there is no KL in the loss")
    in_reward, name = theirs.take("algorithm.use_kl_in_reward"), "algorithm.kl_ctrl.kl_coef"
    if in_reward:
        ours.say("kl_coef", theirs.take(name), theirs, name, note="k1 in the rewards of tokens")
    else:
        ours.say("kl_coef", 0.0, theirs, "algorithm.use_kl_in_reward", note="no KL")
        ours.drop(theirs, [name], "it weighs a KL in the reward, which is off")


def loss(theirs: Theirs, ours: Ours) -> None:
    """The losses of policy and critic."""
    mode, how = theirs.take(f"{ACTOR}.policy_loss.loss_mode"), theirs.take(f"{ACTOR}.loss_agg_mode")
    if mode not in (None, "vanilla"):
        ours.refuse(f"{ACTOR}.policy_loss.loss_mode", f"PPO has one loss, the clipped one, not {mode}. Write vanilla")
    if how != "token-mean":
        ours.refuse(f"{ACTOR}.loss_agg_mode", f"PPO averages over tokens, not as {how}. Write token-mean")
    mean_of_tokens(theirs, ours)
    if theirs.take(f"{ACTOR}.entropy_coeff"):
        ours.refuse(f"{ACTOR}.entropy_coeff", "the loss of PPO has no entropy term. Write 0")
    (low_value, low), (high_value, high) = clip_range(theirs)
    ours.say("cliprange", low_value, theirs, low)
    if high_value != low_value:
        ours.say("cliprange_high", high_value, theirs, high)
    ours.drop(theirs, [f"{ACTOR}.clip_ratio"], UNREAD_CLIP)
    cap = f"{ACTOR}.clip_ratio_c"
    ours.say("delta", theirs.take(cap), theirs, cap, note="dual clip: the ratio of negative advantages")
    ours.say("cliprange_value", theirs.take("critic.cliprange_value"), theirs, "critic.cliprange_value")
    ours.add("vf_coef", 1.0, f"the critic's loss has no weight in {theirs.system}")
    if theirs.take("algorithm.rollout_correction.rollout_is"):
        ours.refuse("algorithm.rollout_correction.rollout_is", "PPO has no correction for the engine. Write null")
    ours.drop(theirs, ["algorithm.rollout_correction.rollout_is_threshold"], "rollout_is is off")


def batches(theirs: Theirs, ours: Ours) -> None:
    """Prompts of a generation and of an optimizer step; each has one completion."""
    sizes = prompts_of_batches(theirs, ours)
    if sizes is None:
        return
    draws = theirs.take(f"{ROLLOUT}.n")
    if draws != 1:
        ours.refuse(f"{ROLLOUT}.n", f"PPO draws one completion of each prompt, not {draws}. Write 1")
    name = f"{ACTOR}.ppo_mini_batch_size"
    ours.say("global_batch_size", sizes[1], theirs, name, note="prompts, each with one completion")
    note = f"{sizes[0]} prompts a generation, {sizes[1]} a step"
    ours.say("num_mini_batches", mini_batches(theirs), theirs, "data.train_batch_size", name, note=note)
    ours.say("num_ppo_epochs", theirs.take(f"{ACTOR}.ppo_epochs"), theirs, f"{ACTOR}.ppo_epochs")
    micro_batches(theirs, ours)


def critic(theirs: Theirs, ours: Ours) -> None:
    """The critic's first weights and optimizer. What it shares with the policy here must be equal there."""
    path = theirs.take("critic.model.path")
    if path is None:
        ours.refuse("critic.model.path", f"{theirs.system}'s default is a folder of its own. Name the critic's model")
    ours.say("value_model", path, theirs, "critic.model.path")
    ours.without["the critic's head"] = "it has no bias here, and begins with other random numbers"
    if theirs.take("critic.model.tokenizer_path") not in (None, path, theirs.take(f"{MODEL}.path")):
        ours.refuse("critic.model.tokenizer_path", "the critic reads the policy's tokens. Remove it")
    ours.say("value_learning_rate", theirs.take("critic.optim.lr"), theirs, "critic.optim.lr")
    _warmup(theirs, ours)
    norm = "optim.clip_grad" if on_megatron(theirs) else "grad_clip"
    if (limit := theirs.take(f"critic.{norm}", 1.0)) != theirs.take(f"{ACTOR}.{norm}", 1.0):
        ours.say("value_max_grad_norm", limit, theirs, f"critic.{norm}")
    theirs.taken |= {"critic.grad_clip", "critic.optim.clip_grad"}
    for name in OPTIM:
        _equal(f"critic.{name}", theirs.take(f"critic.{name}"), theirs.take(f"{ACTOR}.{name}"), ours)
    for name in LENGTHS:
        policys = theirs.take(f"{ACTOR}.{name}")
        _equal(f"critic.{name}", theirs.take(f"critic.{name}", policys), policys, ours)
    for name in ("warmup_style", "lr_decay_style", "optimizer"):
        policys = theirs.take(f"{ACTOR}.optim.{name}")
        _equal(f"critic.optim.{name}", theirs.take(f"critic.optim.{name}", policys), policys, ours)
    rank = theirs.take(f"{MODEL}.lora_rank")
    _equal("critic.model.lora_rank", theirs.take("critic.model.lora_rank"), rank, ours)
    if theirs.take("trainer.critic_warmup"):
        ours.refuse("trainer.critic_warmup", "policy and critic learn from the first step on. Write 0")
    for beginning, reason in WITHOUT.items():
        ours.drop(theirs, [name for name in theirs.left() if name.startswith(beginning)], reason)


def _warmup(theirs: Theirs, ours: Ours) -> None:
    """The critic's warm-up, where it is not the policy's."""
    names = ("lr_warmup_steps", "lr_warmup_steps_ratio")
    (steps, ratio), (policys_steps, policys_ratio) = (
        [theirs.take(f"{whose}.optim.{name}") for name in names] for whose in ("critic", ACTOR)
    )
    if steps is not None and steps > 0:
        _equal("critic.optim.lr_warmup_steps", steps, policys_steps, ours)
    elif ratio != policys_ratio or (policys_steps is not None and policys_steps > 0):
        ours.say("value_warmup_ratio", float(ratio), theirs, "critic.optim.lr_warmup_steps_ratio")


def _equal(name: str, critics: object, policys: object, ours: Ours) -> None:
    """Refuses a key of the critic that differs from the policy's."""
    if critics != policys:
        ours.refuse(name, f"it is {critics} for the critic and {policys} for the policy, which share it. Write one")
