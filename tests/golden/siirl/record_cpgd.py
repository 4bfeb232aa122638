"""Writes cpgd.json: siiRL's own advantages, loss and drift of CPGD (its siirl/dag_worker/core_algos.py).

The drift is a formula inside ``update_policy`` of siirl/engine/actor/dp_actor.py, which trains a model. Its two lines
are taken from that file, and run.

PYTHONPATH=SIIRL:FOLDER python -m tests.golden.siirl.record_cpgd > tests/golden/siirl/cpgd.json
SIIRL is a clone of siiRL, FOLDER as in ``tests/golden/verl/record_ppo.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from tests.golden.verl import record_ppo
from tests.golden.verl.record_ppo import LENGTHS, LONGEST

GROUP = 2
CLIP_LOW, CLIP_HIGH, DRIFT = 0.2, 0.28, 0.5


def tables() -> dict[str, torch.Tensor]:
    """float32 (4, 5) tables of random numbers, a score a row, and which entries are tokens."""
    return record_ppo.tables(("logps", "old_logps"), seed=5)


def main() -> None:
    from siirl.dag_worker import core_algos
    from siirl.params.model_args import ActorArguments

    drawn = tables()
    mask = drawn["mask"].float()
    rewards = torch.zeros(len(LENGTHS), LONGEST)
    rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = drawn["scores"]
    groups: Any = [place // GROUP for place in range(len(LENGTHS))]
    told: dict[str, Any] = {}
    for weight in ("STD_weight", "naive"):
        advantages, _ = core_algos.compute_cpgd_outcome_advantage(rewards, mask, groups, weight_factor_in_cpgd=weight)
        told[weight] = advantages[:, 0].tolist()
        logps = drawn["logps"].clone().requires_grad_()
        config = ActorArguments(clip_ratio_low=CLIP_LOW, clip_ratio_high=CLIP_HIGH)
        loss, clipped, _, _ = core_algos.compute_policy_loss_cpgd(
            drawn["old_logps"], logps, advantages, mask, "token-mean", config
        )
        loss = loss + core_algos.agg_loss(drift(logps, drawn["old_logps"]), mask, "token-mean") * DRIFT
        loss.backward()
        assert logps.grad is not None
        told[f"{weight} loss"], told[f"{weight} clipped"] = loss.item(), clipped.item()
        told[f"{weight} gradient"] = logps.grad[drawn["mask"]].tolist()
    print(json.dumps(told, indent=1))


def drift(log_prob: torch.Tensor, old_log_prob: torch.Tensor) -> torch.Tensor:
    """siiRL's own expression of ``policy_drift``."""
    import siirl

    text = (Path(siirl.__file__).parent / "engine/actor/dp_actor.py").read_text()
    found = re.search(r"policy_drift = (\(.*\* log_prob)$", text, re.MULTILINE)
    assert found is not None, "update_policy computes the drift in another way"
    value: torch.Tensor = eval(found[1], {"log_prob": log_prob, "old_log_prob": old_log_prob})
    return value


if __name__ == "__main__":
    main()
