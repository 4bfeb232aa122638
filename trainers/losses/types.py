"""The names of the losses, as configurations write them; their meaning: the ``*tokens.py`` beside this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

LARGEST_LOG_RATIO = 20.0  # see ``tokens.held``
PolicyLossType = Literal[  # bundled ones
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "cispo",
    "sapo",
    "luspo",
    "vespo",
    "fipo",
    "gmpo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "real",
    "cpgd",
]
Average = Literal["tokens", "step_tokens", "sequence_means", "sequence_sums", "max_length"]
ImportanceLevel = Literal["token", "sequence", "sequence_token", "sequence_product"]
RolloutCorrection = Literal[
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
]
RolloutRejection = Literal[  # what is compared with the bounds: of a token, or of its completion
    "token_k1",
    "token_k2",
    "token_k3",
    "sequence_sum_k1",
    "sequence_sum_k2",
    "sequence_sum_k3",
    "sequence_mean_k1",
    "sequence_mean_k2",
    "sequence_mean_k3",
    "sequence_max_k2",
    "sequence_max_k3",
]
SFTLossType = Literal["nll", "dft"]
PreferenceLossType = Literal[
    "sigmoid",
    "cdpo",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
CPOLossType = Literal["sigmoid", "hinge", "ipo", "simpo"]
KTOLossType = Literal["kto", "apo_zero_unpaired"]
FDivergenceType = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


@dataclass(frozen=True)
class PolicyLoss:
    """What is registered as a loss: ``function`` turns a micro-batch into terms (``surrogates.py``), and the terms of
    an optimizer step are averaged as ``average`` says (``policy.grpo_normaliser``)."""

    function: Callable[..., Any]
    average: Average = "tokens"
    corrects_rollouts: bool = False  # reads the rollout ratios itself; False: its terms are multiplied by them

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function, as ``functools`` names it."""
        return self.function
