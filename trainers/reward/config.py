"""The keys of reward-model training, and which values of them have a meaning. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainers.configuration.fixed_rows import AnswersConfig
from trainers.configuration.roles import TRAIN
from trainers.configuration.shared import unread
from trainers.configuration.values import at_least


@dataclass(frozen=True, kw_only=True)
class RewardConfig(AnswersConfig):
    """The keys of reward-model training beside the shared ones. Batch sizes count pairs."""

    NAMES: ClassVar = ("reward", "rm")
    RLHF_TYPE: ClassVar = "rm"
    ROLES: ClassVar = {"train": TRAIN}
    SCORES: ClassVar = True

    output_dir: str = "outputs/reward"
    learning_rate: float = 1e-4
    max_length: int | None = 1024
    """Tokens of prompt and completion; pairs with a longer sequence are left out."""
    dataset_num_proc: int | None = None
    """Processes that tokenize."""
    packing: bool = False
    """Batch sizes count packs instead of pairs: a pack has pairs of at most max_length tokens. Its sequences pass
    through the model without padding, as with padding_free."""
    center_rewards_coefficient: float | None = None
    """Weight of a term that keeps the mean reward near 0 (arXiv 2312.09244). null: none."""
    per_device_eval_batch_size: int = 8
    """Pairs that a worker passes through the model at once in evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unread(self, "transformers' sequence classifiers give no logits of their routers", "router_aux_loss_coef")
        at_least(self, 1, "max_length", "dataset_num_proc", "per_device_eval_batch_size")
        at_least(self, 0, "center_rewards_coefficient")
