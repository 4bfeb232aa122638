"""verl's rewards in ours."""

from __future__ import annotations

from typing import Any

from trainers.translate.table import Line, Ours, Theirs

MANAGERS = ("naive", "batch", "prime", "dapo")  # who score a completion each, and add the punishment of dapo
OVERLONG = {  # of siiRL, and verl's names
    f"reward_model.overlong_buffer.{name}": f"reward_model.reward_kwargs.overlong_buffer_cfg.{name}"
    for name in ("enable", "len", "penalty_factor", "log")
}


def rewards(theirs: Theirs, ours: Ours, rules: str = "verl") -> None:
    """The functions and the model that reward completions. ``rules``: whose rules score rows by data_source."""
    path = theirs.take("custom_reward_function.path")
    name = theirs.take("custom_reward_function.name", "compute_score")
    arguments = theirs.below("custom_reward_function.reward_kwargs.")
    spec: dict[str, Any] = {"name": "trainers.rewards.ground_truth:GroundTruth"}
    if path:
        spec |= {"path": path, "function": name, **({"arguments": arguments} if arguments else {})}
        ours.say("reward_funcs", [spec], theirs, "custom_reward_function.path", "custom_reward_function.name")
    else:
        spec |= {"rules": rules} if rules != "verl" else {}
        ours.add("reward_funcs", [spec], "theirs chooses a rule by the column data_source. See below")
        ours.without["the rule of data_source"] = (
            f"RayHelper has the rule of openai/gsm8k. Other rules are {rules}'s own, and the run needs {rules}. Or "
            "write custom_reward_function"
        )
    _overlong(theirs, ours)
    manager = theirs.values.get("reward_model.reward_manager", "naive")
    if manager not in MANAGERS:
        ours.refuse("reward_manager", f"{manager} is not translated (known: {', '.join(MANAGERS)})")
    if theirs.take("reward_model.enable") in (True, None) and theirs.take("reward_model.model.path"):
        model = theirs.take("reward_model.model.path")
        ours.say("reward_model", model if ours.trainer == "ppo" else [model], theirs, "reward_model.model.path")
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


def fixed_kl(theirs: Theirs, ours: Ours) -> None:
    """Refuses a KL in the reward that is no k1, or whose weight changes."""
    if theirs.take("algorithm.kl_penalty", "kl") not in ("kl", "k1"):
        ours.refuse("algorithm.kl_penalty", f"{theirs.take('algorithm.kl_penalty')} is not built; write kl")
    if theirs.take("algorithm.kl_ctrl.type", "fixed") != "fixed":
        ours.refuse("algorithm.kl_ctrl.type", "the weight of the KL is fixed here")
    theirs.taken |= {"algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"}
