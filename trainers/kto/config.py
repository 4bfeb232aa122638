"""KTO's keys, and which values of them have a meaning. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rayhelper import ConfigError
from trainers.configuration.fixed_rows import ReferenceConfig
from trainers.configuration.roles import REFERENCE, TRAIN
from trainers.configuration.shared import unread
from trainers.configuration.values import at_least
from trainers.data.rows import TruncationMode
from trainers.losses.types import KTOLossType


@dataclass(frozen=True, kw_only=True)
class KTOConfig(ReferenceConfig):
    """KTO's keys beside the shared ones. Batch sizes count completions."""

    RLHF_TYPE: ClassVar = "kto"
    ROLES: ClassVar = {
        "default": replace(TRAIN, also=("train",)),
        "reference": replace(REFERENCE, host="default"),
    }

    output_dir: str = "outputs/kto"
    learning_rate: float = 1e-6

    # Data
    max_length: int | None = 1024
    """Tokens of prompt and completion; truncation_mode sets how longer sequences are cut."""
    truncation_mode: TruncationMode = "keep_start"
    """For a sequence that is too long: keep_start, keep_end, or drop (the row). A prompt with another row's completion,
    for the KL, always keeps its start."""
    dataset_num_proc: int | None = None
    """Processes that tokenize."""
    packing: bool = False
    """Batch sizes count packs instead of completions. A pack has several completions of at most max_length tokens
    together. It passes through the model without padding, as with padding_free. If the KL is estimated, each row counts
    twice: its prompt is also scored with another completion."""

    # Loss
    loss_type: KTOLossType = "kto"
    """kto, or apo_zero_unpaired, which estimates no KL. Formulas and papers are in losses/kto.py."""
    beta: float = 0.1
    """How strongly the policy is kept close to the reference. A larger value keeps it closer."""
    desirable_weight: float = 1.0
    """Weight of the losses of desirable completions, for data with fewer of them."""
    undesirable_weight: float = 1.0
    """Weight of the losses of undesirable completions."""
    kl_batch_size: int | None = None
    """Number of completions in a KL batch. In a batch, each prompt also gets the completion of another prompt. null:
    all. 1: the completion of another prompt of the step, and each prompt has its own KL."""

    # Evaluation
    per_device_eval_batch_size: int = 8
    """Completions that a worker passes through the model at once in evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 2, "max_length")
        at_least(self, 1, "dataset_num_proc", "per_device_eval_batch_size", "kl_batch_size")
        at_least(self, 0, "desirable_weight", "undesirable_weight")
        if not self.beta > 0:
            raise ConfigError(f"beta must be positive, got {self.beta}")
        unread(self, "the rows of a step also give the completions that estimate the KL", "group_by_length")
        if not self.estimates_kl:
            unread(self, f"loss_type is {self.loss_type}, which estimates no KL", "kl_batch_size")
        if self.precompute_ref_log_probs and self.estimates_kl and self.shuffle_dataset:
            raise ConfigError(
                "precompute_ref_log_probs scores prompts with the completions of others, and shuffle_dataset puts "
                "other rows beside them in every epoch. Set shuffle_dataset: false, or loss_type: apo_zero_unpaired, "
                "which estimates no KL, or remove precompute_ref_log_probs."
            )

    @property
    def estimates_kl(self) -> bool:
        """Whether the loss asks how far the policy is from the reference."""
        return self.loss_type == "kto"
