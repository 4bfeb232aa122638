"""The keys of trainers that learn fixed answers: their thoughts, and the reference model that scores them (DPO, KTO).

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayhelper import ConfigError
from trainers.configuration.shared import TrainConfig, unread
from trainers.configuration.values import at_least


@dataclass(frozen=True, kw_only=True)
class AnswersConfig(TrainConfig):
    """What conversations with thoughts become, beside the shared keys."""

    # Data
    preserve_thinking: bool | None = None
    """Thoughts (<think>...</think>) of earlier answers in a conversation. true: they stay, as in the rows. false: they
    are removed, up to the last turn of the user or a tool. null: the chat template decides about all thoughts. With
    true or false, preference trainers do not learn empty thoughts."""
    add_non_thinking_prefix: bool = True
    """With preserve_thinking: true or false. Put empty thoughts before answers without thoughts, if the chat template
    can write empty thoughts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preserve_thinking is None:
            unread(self, "preserve_thinking is null", "add_non_thinking_prefix")


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(AnswersConfig):
    """The keys of the reference model beside the shared ones."""

    # Reference
    ref_model: str | None = None
    """Folder, hub name or a plugin's model. null: the starting model (with LoRA, the policy without its adapter)."""
    precompute_ref_log_probs: bool = False
    """Score all rows with the reference before training, then free the reference. The scores stay in output_dir for a
    resumed run."""
    precompute_ref_batch_size: int | None = None
    """Rows that a worker scores at once with the reference. null: per_device_train_batch_size."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv 2404.09656)."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the policy when it is mixed into the reference."""
    ref_model_sync_steps: int = 512
    """Optimizer steps between mixing the policy into the reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "precompute_ref_batch_size", "ref_model_sync_steps")
        if not self.sync_ref_model:
            unread(self, "sync_ref_model is false", "ref_model_mixup_alpha", "ref_model_sync_steps")
        if not self.precompute_ref_log_probs:
            unread(self, "precompute_ref_log_probs is false", "precompute_ref_batch_size")
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise ConfigError(f"ref_model_mixup_alpha must lie in (0, 1], got {self.ref_model_mixup_alpha}")
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ConfigError(
                "sync_ref_model changes the reference, but precompute_ref_log_probs needs a fixed reference; "
                "remove one of the two"
            )
        if self.sync_ref_model and self.is_own_reference:
            raise ConfigError(
                "sync_ref_model needs a reference model that can change: with tuner_type: lora it is the policy "
                "without its adapter. Name the starting model as ref_model too, or remove sync_ref_model."
            )

    @property
    def is_own_reference(self) -> bool:
        """Whether the policy without its adapter is the reference, so that no other model is needed."""
        return self.has_adapter and self.ref_model is None
