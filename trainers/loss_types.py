"""The names of the losses, as configurations write them; their meaning: ``losses.py``, ``preference_losses.py``."""

from __future__ import annotations

from typing import Literal

PolicyLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
ImportanceLevel = Literal["token", "sequence"]
SFTLossType = Literal["nll", "dft"]
PreferenceLossType = Literal[
    "sigmoid",
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
FDivergenceType = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
