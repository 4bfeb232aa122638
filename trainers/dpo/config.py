"""DPO's keys, and which values of them have a meaning. Imports no torch unless the loss is another than the default."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, get_args

from rayhelper import ConfigError
from trainers.configuration.fixed_rows import ReferenceConfig
from trainers.configuration.roles import REFERENCE, TRAIN
from trainers.configuration.values import at_least, one_of
from trainers.data.rows import TruncationMode
from trainers.losses.types import FDivergenceType, PreferenceLossType


@dataclass(frozen=True, kw_only=True)
class DPOConfig(ReferenceConfig):
    """DPO's keys beside the shared ones. Batch sizes count pairs."""

    RLHF_TYPE: ClassVar = "dpo"
    ROLES: ClassVar = {
        "default": replace(TRAIN, also=("train",)),
        "reference": replace(REFERENCE, host="default"),
    }

    output_dir: str = "outputs/dpo"
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
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    """One type, or several. For pairs: sigmoid, sigmoid_norm, cdpo, hinge, ipo, exo_pair, robust, discopop. For each
    completion: nca_pair, bco_pair, sppo_hard, apo_zero, apo_down. For sorted pairs of a step: aot, aot_unpaired. For
    the chosen completion: sft. Formulas and papers are in losses/preference.py."""
    loss_weights: list[float] | None = None
    """One weight per loss type. null: 1 for each."""
    rpo_alpha: float | None = None
    """Adds the loss type sft with this weight (RPO, arXiv 2404.19733). null: it is not added."""
    nll_batch_size: int | None = None
    """Pairs in a batch of the likelihood of the chosen completions. It is a mean over the tokens of each batch, then a
    mean over the pairs. null: a mean over all tokens of the step."""
    beta: float = 0.1
    """How strongly the policy is kept close to the reference. A larger value keeps it closer."""
    label_smoothing: float = 0.0
    """Share of pairs that are assumed to be labelled wrongly (cdpo, robust, exo_pair, aot, aot_unpaired)."""
    f_divergence_type: FDivergenceType = "reverse_kl"
    """Divergence that keeps the policy close to the reference (f-DPO, arXiv 2309.16240)."""
    f_alpha_divergence_coef: float = 0.5
    """The alpha of alpha_divergence."""
    ld_alpha: float | None = None
    """Weight of the tokens by which one completion is longer (LD-DPO, arXiv 2409.06411). null: 1."""
    use_weighting: bool = False
    """Weigh each pair by how likely the policy is to write it (WPO, arXiv 2406.11827)."""
    discopop_tau: float = 0.05
    """Temperature of the mixture in loss type discopop."""
    bco_shift: bool = False
    """With bco_pair: subtract the mean of all rewards up to and including this step (BCO, arXiv 2404.04656)."""

    # Reference
    reference_free: bool = False
    """Train without a reference. Its log-probabilities count as 0."""

    # Evaluation
    per_device_eval_batch_size: int = 8
    """Pairs that a worker passes through the model at once in evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dpo(self)


def weighted_losses(config: DPOConfig) -> tuple[list[Any], list[float]]:
    """The loss types with what ``rpo_alpha`` adds, and their weights."""
    types: list[Any] = [config.loss_type] if isinstance(config.loss_type, str) else list(config.loss_type)
    weights = [1.0] * len(types) if config.loss_weights is None else list(config.loss_weights)
    is_there = config.rpo_alpha == 0 and "sft" in types  # and rpo_alpha adds nothing to it
    if config.rpo_alpha is None or is_there:
        return types, weights
    return [*types, "sft"], [*weights, config.rpo_alpha]


def check_dpo(config: DPOConfig) -> None:
    """Raises ConfigError naming the first key whose value has no meaning."""
    at_least(config, 2, "max_length")
    at_least(config, 1, "dataset_num_proc", "per_device_eval_batch_size", "nll_batch_size")
    at_least(config, 0, "rpo_alpha")
    defaults = {one.name: one.default for one in fields(config)}
    others = [name for name in ("ref_model", "precompute_ref_log_probs", "sync_ref_model") if getattr(config, name)]
    if config.reference_free and others:
        raise ConfigError(f"reference_free leaves the reference out, and {others[0]} needs one; remove one of the two")
    types, weights = weighted_losses(config)
    if config.rpo_alpha is not None and types.count("sft") > 1:
        raise ConfigError("rpo_alpha adds the loss type sft, which loss_type already holds; remove one of the two")
    for name, user, is_used in (
        ("f_alpha_divergence_coef", "f_divergence_type: alpha_divergence", "alpha" in config.f_divergence_type),
        ("discopop_tau", "loss_type: discopop", "discopop" in types),
        ("bco_shift", "loss_type: bco_pair", "bco_pair" in types),
        ("nll_batch_size", "loss_type: sft, or rpo_alpha, without packing,", "sft" in types and not config.packing),
    ):
        if getattr(config, name) != defaults[name] and not is_used:
            raise ConfigError(
                f"{name} is {getattr(config, name)}, which only {user} uses. Remove {name}, or change the other key."
            )
    if config.bco_shift and config.ld_alpha is not None:
        raise ConfigError(
            "bco_shift is a mean over whole completions, and ld_alpha weighs their tokens. Remove one of the two."
        )
    _check_loss(config, types, weights)


def _check_loss(config: DPOConfig, types: list[Any], weights: list[float]) -> None:
    """Raises ConfigError if the loss cannot be computed."""
    for name in types:
        one_of("loss_type", name, get_args(PreferenceLossType))
    options: dict[str, Any] = {
        "beta": config.beta,
        "label_smoothing": config.label_smoothing,
        "f_divergence_type": config.f_divergence_type,
        "ld_alpha": config.ld_alpha,
        "discopop_tau": config.discopop_tau,
        "use_weighting": config.use_weighting,
        "reference_free": config.reference_free,
    }
    defaults = {one.name: one.default for one in fields(config)}
    if types == ["sigmoid"] and weights == [1.0] and all(value == defaults[name] for name, value in options.items()):
        return  # without importing torch, so that a typo elsewhere is answered at once
    from trainers.losses.preference import check_preference_options

    try:
        check_preference_options(types, weights, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from None
