"""Writes ppo.json: verl's own advantages, returns and losses of PPO (its verl/trainer/ppo/core_algos.py).

pip install --no-deps --target FOLDER verl==0.9.1 tensordict omegaconf hydra-core codetiming pyvers torchdata orjson
PYTHONPATH=FOLDER python -m tests.golden.verl.record_ppo > tests/golden/verl/ppo.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

LENGTHS, LONGEST = (3, 5, 1, 4), 5
GAMMA, LAM, KL_COEF = 0.97, 0.9, 0.3
CLIP_LOW, CLIP_HIGH, CLIP_C, CLIP_VALUE = 0.2, 0.28, 1.6, 0.5


OF_PPO = ("logps", "old_logps", "ref_logps", "values", "old_values")


def tables(names: Sequence[str] = OF_PPO, seed: int = 3) -> dict[str, torch.Tensor]:
    """float32 (4, 5) tables of random numbers, a score a row, and which entries are tokens."""
    random = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(len(LENGTHS), LONGEST, generator=random).mul(0.7) for name in names}
    found["scores"] = torch.randn(len(LENGTHS), generator=random)
    found["mask"] = torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]
    return found


def main() -> None:
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig, OptimizerConfig

    drawn = tables()
    mask = drawn["mask"].float()
    rewards = -KL_COEF * core_algos.kl_penalty(drawn["old_logps"], drawn["ref_logps"], "kl") * mask
    rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] += drawn["scores"]
    advantages, returns = core_algos.compute_gae_advantage_return(rewards, drawn["old_values"], mask, GAMMA, LAM)
    config: Any = FSDPActorConfig(
        clip_ratio=CLIP_LOW,
        clip_ratio_low=CLIP_LOW,
        clip_ratio_high=CLIP_HIGH,
        clip_ratio_c=CLIP_C,
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        optim=OptimizerConfig(lr=1e-6),
    )
    policy, _ = core_algos.compute_policy_loss_vanilla(
        drawn["old_logps"], drawn["logps"], advantages, mask, loss_agg_mode="token-mean", config=config
    )
    kl = core_algos.kl_penalty(drawn["logps"], 3 * drawn["ref_logps"], "low_var_kl")
    kl_loss = core_algos.agg_loss(kl, mask, "token-mean")
    value, _ = core_algos.compute_value_loss(
        drawn["values"], returns, drawn["old_values"], mask, CLIP_VALUE, loss_agg_mode="token-mean"
    )
    kept = {"advantages": advantages, "returns": returns}
    told = {name: table[drawn["mask"]].tolist() for name, table in kept.items()}
    print(
        json.dumps(
            {**told, "policy_loss": policy.item(), "value_loss": value.item(), "kl_loss": kl_loss.item()}, indent=1
        )
    )


if __name__ == "__main__":
    main()
