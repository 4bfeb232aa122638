"""verl's keys in ours, and siiRL's, which has the same ones and a few of its own: ``siirl.py``.

Units differ. verl counts prompts (``train_batch_size``, ``ppo_mini_batch_size``) where sequences are counted here, and
generations (``save_freq``, ``test_freq``, ``lr_warmup_steps``, ``total_training_steps``) where optimizer steps are.
Read from verl/trainer/config (ppo_trainer.yaml and what it includes) and verl/trainer/ppo/core_algos.py.
"""

from __future__ import annotations

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl import grpo, ppo
from trainers.translate.verl.backend import backend, on_megatron
from trainers.translate.verl.engine import engine
from trainers.translate.verl.images import columns
from trainers.translate.verl.model import SIZES, data_files, model, on_ray, rest
from trainers.translate.verl.names import ACTOR, DIVIDED, ESTIMATORS, REFUSED, RENAMED, ROLLOUT, WITHOUT
from trainers.translate.verl.rewards import rewards
from trainers.translate.verl.schedule import of_megatron, optimizer, run


def translate(theirs: Theirs, ours: Ours, style: str = "constant", rules: str = "verl") -> None:
    """Fills ``ours`` from the keys of verl.

    ``style``: the default of Megatron's lr_decay_style. ``rules``: whose rules score rows by their data_source.
    """
    theirs.rename(RENAMED)
    if (chosen := theirs.take("model_engine")) not in (None, "dp"):
        theirs.put(f"{ACTOR}.strategy", chosen, "model_engine")
    estimator = theirs.take("algorithm.adv_estimator")
    if estimator == "gae":
        ours.trainer = "ppo"
    elif estimator not in ESTIMATORS:
        ours.refuse(
            "algorithm.adv_estimator",
            f"{estimator} is not translated (known: gae, which is PPO, and of GRPO's family {', '.join(ESTIMATORS)})",
        )
        theirs.taken |= theirs.values.keys()
        return
    model(theirs, ours)
    _data(theirs, ours)
    rewards(theirs, ours, rules)
    (ppo if ours.trainer == "ppo" else grpo).translate(theirs, ours)
    if on_megatron(theirs):
        of_megatron(theirs, ours, style)
    optimizer(theirs, ours)
    if ours.trainer == "ppo":
        ppo.critic(theirs, ours)
    if theirs.take(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum":
        ours.divide_gradients(int(theirs.take("data.max_response_length")), DIVIDED)
    engine(theirs, ours)
    backend(theirs, ours)
    run(theirs, ours)
    _placement(theirs, ours)
    if not theirs.take(f"{ROLLOUT}.multi_turn.enable"):
        turns = [name for name in theirs.left() if name.startswith(f"{ROLLOUT}.multi_turn")]
        ours.drop(theirs, turns, "multi_turn.enable is off")
    rest(theirs, ours, REFUSED, WITHOUT)


def _data(theirs: Theirs, ours: Ours) -> None:
    data_files(theirs, ours)
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


def _placement(theirs: Theirs, ours: Ours) -> None:
    """Which role runs on which GPUs."""
    parallel = f"{ROLLOUT}.tensor_model_parallel_size"
    if (gpus := on_ray(theirs, ours, parallel)) is None:
        return
    tensor = theirs.take(parallel)
    is_vllm = any(line.key == "rollout_engine" and line.value == "vllm" for line in ours.lines)
    if is_vllm and tensor > 1:
        ours.say("vllm_tensor_parallel_size", tensor, theirs, parallel)
        ours.say("train", {"gpus": gpus}, theirs, *SIZES)
        note = "separate processes on the devices of train: an engine uses several workers"
        ours.add("rollout", {"gpus": gpus, "shares_devices_with": "train"}, note)
    else:
        ours.add("colocate_groups", [["train", "rollout"]], "policy and engine share their workers, as in verl")
        for role in ("train", "rollout"):
            ours.say(role, {"gpus": gpus}, theirs, *SIZES)
