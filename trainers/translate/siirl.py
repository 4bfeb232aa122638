"""siiRL's keys in ours: verl's, whose configuration it began from, but for those below.

Read from siirl/params (model_args.py, data_args.py, training_args.py).
"""

from __future__ import annotations

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.names import ACTOR, MEGATRON, MODEL, ROLLOUT
from trainers.translate.verl.names import DEFAULTS as DEFAULTS_OF_VERL
from trainers.translate.verl.translation import translate as translate_verl

DEFAULTS = {
    **DEFAULTS_OF_VERL,
    f"{MODEL}.use_remove_padding": False,
    f"{MEGATRON}.param_offload": True,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.enforce_eager": True,
    "trainer.project_name": "siirl_examples",
}
OF_CPGD = ("algorithm.weight_factor_in_cpgd", f"{ACTOR}.policy_drift_coeff", "algorithm.adv_estimator_cpgd")


def translate(theirs: Theirs, ours: Ours) -> None:
    """Fills ``ours`` from the keys of siiRL."""
    if theirs.values.get(f"{ACTOR}.use_cpgd_loss"):
        ours.refuse(f"{ACTOR}.use_cpgd_loss", "the loss of CPGD is not built")
    else:
        ours.drop(theirs, [*OF_CPGD, f"{ACTOR}.use_cpgd_loss"], "it belongs to CPGD, which this run does not use")
    for name in ("dag.workflow_path", "dag.custom_pipeline_fn"):
        if theirs.take(name):
            ours.refuse(name, "a pipeline of one's own is a trainer of one's own here: docs/own_trainer.md")
    ours.drop(theirs, ["dag.env_enable"], "an environment is the key environment")
    ours.drop(theirs, ["dag.enable_perf"], "metrics have the time of each phase, always")
    ours.drop(theirs, ["data.auto_repeat"], "an epoch goes through the rows once")
    profiler = [name for name in theirs.values if name.startswith("profiler.")]
    ours.drop(theirs, profiler, "rayhelper timeline shows a run")
    translate_verl(theirs, ours)
