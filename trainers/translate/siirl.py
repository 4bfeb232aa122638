"""siiRL's keys in ours: verl's, whose configuration it began from, but for those below.

Read from siirl/params (model_args.py, data_args.py, training_args.py), main_dag.py, and from what reads them.
"""

from __future__ import annotations

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.names import ACTOR, MEGATRON, MODEL, ROLLOUT
from trainers.translate.verl.names import DEFAULTS as DEFAULTS_OF_VERL
from trainers.translate.verl.rewards import OVERLONG
from trainers.translate.verl.translation import translate as translate_verl

DEFAULTS = {
    **DEFAULTS_OF_VERL,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    f"{MODEL}.use_remove_padding": False,
    f"{MEGATRON}.param_offload": True,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.enforce_eager": True,
    "algorithm.filter_groups.metric": "acc",
    "trainer.project_name": "siirl_examples",
    "trainer.default_local_dir": "checkpoints/siirl_examples/gsm8k",
}
WEIGHT, DRIFT = "algorithm.weight_factor_in_cpgd", f"{ACTOR}.policy_drift_coeff"
SCALES_OF_CPGD = {"STD_weight": True, "naive": False}  # of weight_factor_in_cpgd: whether a group's deviation divides
METRICS = ("acc", "seq_reward", "seq_final_reward")  # of filter_groups; acc is the score of the rule alone
UNREAD = ("data.gen_batch_size", "algorithm.algorithm_name", "algorithm.filter_groups.max_num_gen_batches")


def translate(theirs: Theirs, ours: Ours) -> None:
    """Fills ``ours`` from the keys of siiRL."""
    if _another_workflow(theirs, ours):
        theirs.taken |= theirs.values.keys()
        return
    ours.drop(theirs, UNREAD, "siirl does not read it")
    _cpgd(theirs, ours)
    _filter(theirs, ours)
    if theirs.take("reward_model.reward_manager") == "dapo":
        theirs.rename(OVERLONG)
        longest = theirs.take("data.max_response_length")
        theirs.put("reward_model.reward_kwargs.max_resp_len", longest, "data.max_response_length")
    else:
        ours.drop(theirs, OVERLONG, "only the reward manager dapo reads it")
    ours.drop(theirs, ["data.auto_repeat"], "an epoch goes through the rows once")
    profiler = [name for name in theirs.values if name.startswith("profiler.")]
    ours.drop(theirs, profiler, "rayhelper timeline shows a run")
    translate_verl(theirs, ours, style="linear", rules="siirl")


def _another_workflow(theirs: Theirs, ours: Ours) -> bool:
    """Refuses a workflow or a loss that RayHelper does not have. True: nothing else of the file matters."""
    before = len(ours.mistakes)
    workflow = theirs.take("algorithm.workflow_type", "default")
    if workflow not in ("default", "dapo"):
        ours.refuse("algorithm.workflow_type", f"the workflow {workflow} is not built (known: default, dapo)")
    for name in ("dag.workflow_path", "dag.custom_pipeline_fn"):
        if theirs.take(name):
            ours.refuse(name, "a pipeline of one's own is a trainer of one's own here: docs/own_trainer.md")
    ours.drop(theirs, ["dag.env_enable"], "an environment is the key environment")
    ours.drop(theirs, ["dag.enable_perf"], "metrics have the time of each phase, always")
    return len(ours.mistakes) > before


def _cpgd(theirs: Theirs, ours: Ours) -> None:
    """CPGD: GRPO's advantages, and a drift beside the loss of ``policy_loss.loss_mode``, whatever that is.

    Source: main_dag.py (use_cpgd_loss), dag_worker/core_algos.py, engine/actor/dp_actor.py, the one that has the drift.
    """
    is_estimator = theirs.take("algorithm.adv_estimator") == "cpgd"
    drifts = theirs.take(f"{ACTOR}.use_cpgd_loss", False) or is_estimator
    if is_estimator:
        weight = theirs.take(WEIGHT, "STD_weight")
        if weight not in SCALES_OF_CPGD:
            known = ", ".join(SCALES_OF_CPGD)
            ours.refuse(WEIGHT, f"{weight} is not built (known: {known}). It is naive with advantages 3 times as large")
        theirs.put("algorithm.adv_estimator", "grpo", "algorithm.adv_estimator")
        theirs.put("algorithm.norm_adv_by_std_in_grpo", SCALES_OF_CPGD.get(weight, True), WEIGHT)
    ours.drop(theirs, [WEIGHT], "it belongs to the advantages of CPGD, which this run does not use")
    coefficient = theirs.take(DRIFT, 0.0)
    if drifts and theirs.take(f"{ACTOR}.strategy") == "megatron":
        ours.drop(theirs, [DRIFT], "siirl does not read it with the strategy megatron")
    elif drifts and coefficient:
        ours.say("policy_drift_coef", coefficient, theirs, DRIFT)
    ours.drop(theirs, [DRIFT], "it belongs to CPGD, which this run does not use")
    ours.drop(theirs, [f"{ACTOR}.use_cpgd_loss"], "policy_drift_coef says it")


def _filter(theirs: Theirs, ours: Ours) -> None:
    """DAPO's choice of prompts, which only its workflow makes."""
    names = ("algorithm.filter_groups.enable", "algorithm.filter_groups.metric")
    enabled, metric = (theirs.take(name) for name in names)
    if enabled and theirs.take("algorithm.workflow_type") == "dapo":
        if metric not in METRICS:
            ours.refuse(names[1], f"{metric} is not built (known: {', '.join(METRICS)})")
        path, function = (theirs.values.get(f"custom_reward_function.{name}") for name in ("path", "name"))
        rule = (function or "compute_score") if path else "ground_truth"
        ours.say(
            "dynamic_sample", rule if metric == "acc" else True, theirs, *names, note="the rewards that must differ"
        )
        ours.without["the prompts that are chosen"] = (
            "siirl draws until there are enough, and keeps the others for the next step. RayHelper draws only what is "
            "missing, at most max_resample_times times, and then fills the generation with prompts of equal rewards"
        )
    else:
        ours.drop(theirs, names, "no prompts are left out by their rewards")
