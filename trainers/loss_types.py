"""The names of the losses, as configurations write them; what they mean stands in ``losses.py``."""

from __future__ import annotations

from typing import Literal

PolicyLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
ImportanceLevel = Literal["token", "sequence"]
SFTLossType = Literal["nll", "dft"]
