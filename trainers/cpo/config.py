"""The keys of CPO, SimPO and ORPO, and which values of them have a meaning. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rayhelper import ConfigError
from trainers.configuration.fixed_rows import AnswersConfig
from trainers.configuration.roles import TRAIN
from trainers.configuration.shared import unread
from trainers.configuration.values import at_least
from trainers.data.rows import TruncationMode
from trainers.losses.types import CPOLossType


@dataclass(frozen=True, kw_only=True)
class PairConfig(AnswersConfig):
    """What the three have beside the shared keys: they learn from pairs, without a reference."""

    NAMES: ClassVar[tuple[str, ...]] = ()
    ROLES: ClassVar = {"train": TRAIN}

    learning_rate: float = 1e-6

    # Data
    max_length: int | None = 1024
    """Tokens of prompt and completion; truncation_mode sets how longer sequences are cut."""
    truncation_mode: TruncationMode = "keep_start"
    """For a sequence that is too long: keep_start, keep_end, or drop (the whole pair)."""
    dataset_num_proc: int | None = None
    """Processes that tokenize."""
    packing: bool = False
    """Batch sizes count packs instead of pairs: a pack has pairs of at most max_length tokens. Its sequences pass
    through the model without padding, as with padding_free."""

    # Loss
    nll_batch_size: int | None = None
    """Pairs in a batch of the likelihood of the chosen completions. It is a mean over the tokens of each batch, then a
    mean over the pairs. null: a mean over all tokens of the step."""
    beta: float = 0.1
    """Weight of the difference between the log-probabilities of the two completions."""

    # Evaluation
    per_device_eval_batch_size: int = 8
    """Pairs that a worker passes through the model at once in evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 2, "max_length")
        at_least(self, 1, "dataset_num_proc", "per_device_eval_batch_size", "nll_batch_size")
        if self.packing:
            unread(self, "batch sizes count packs with packing", "nll_batch_size")
        if not self.beta > 0:
            raise ConfigError(f"beta must be positive, got {self.beta}")


@dataclass(frozen=True, kw_only=True)
class CPOConfig(PairConfig):
    """CPO's keys beside the shared ones. Batch sizes count pairs."""

    NAMES: ClassVar = ("cpo",)
    RLHF_TYPE: ClassVar = "cpo"

    output_dir: str = "outputs/cpo"

    # Loss
    loss_type: CPOLossType = "sigmoid"
    """sigmoid, hinge, ipo or simpo. Formulas and papers are in losses/preference.py."""
    cpo_alpha: float = 1.0
    """Weight of the likelihood of the chosen completions."""
    simpo_gamma: float = 0.5
    """With loss_type simpo: the margin by which the chosen completion must win."""
    alpha: float = 0.0
    """Shape of the rewards (AlphaPO, arXiv 2501.03884). 0: the rewards are log-probabilities."""
    label_smoothing: float = 0.0
    """Share of pairs that are assumed to be labelled wrongly (sigmoid and simpo)."""

    def __post_init__(self) -> None:
        if self.loss_type == "alphapo":  # type: ignore[comparison-overlap]
            raise ConfigError("loss_type alphapo is simpo with shaped rewards: write simpo, cpo_alpha: 0 and alpha")
        super().__post_init__()
        at_least(self, 0, "cpo_alpha", "simpo_gamma")
        if not -10 <= self.alpha <= 10:
            raise ConfigError(f"alpha must lie in [-10, 10], got {self.alpha}: outside of it, rewards are not finite")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing must lie in [0, 0.5), got {self.label_smoothing}")
        if self.loss_type in ("hinge", "ipo"):
            unread(self, f"loss_type is {self.loss_type}", "label_smoothing")
        if self.loss_type != "simpo":
            unread(self, f"loss_type is {self.loss_type}", "simpo_gamma")


@dataclass(frozen=True, kw_only=True)
class SimPOConfig(CPOConfig):
    """CPO on mean log-probabilities, with a margin; defaults are ms-swift's for ``rlhf_type: simpo``."""

    NAMES: ClassVar = ("simpo",)
    RLHF_TYPE: ClassVar = "simpo"

    output_dir: str = "outputs/simpo"
    loss_type: CPOLossType = "simpo"
    beta: float = 2.0
    simpo_gamma: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ORPOConfig(PairConfig):
    """ORPO's keys beside the shared ones. Batch sizes count pairs. ``beta`` is the paper's lambda."""

    NAMES: ClassVar = ("orpo",)
    RLHF_TYPE: ClassVar = "orpo"

    output_dir: str = "outputs/orpo"

    # Loss
    learns_prompts: bool | Literal["answers"] = True
    """Whether the likelihood also counts the prompt, as in TRL. false: only the chosen completion, as in the paper.
    answers: the loss also counts earlier answers of the conversation, as in ms-swift."""
