"""Weights that vLLM has no place for, as nothing reads them: of a vision tower, behind the layer whose features count.

LLaVA takes the features of the last layer but one. vLLM then builds neither the last layer nor the norm behind it. Both
are sent all the same, and a fingerprint of what was sent stands for what no engine could have wrongly.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from trainers.parts.fingerprints import added_up, fingerprint, rows_of

BEHIND = ("post_layernorm", "head")  # parts of CLIP's and SigLIP's towers behind their layers
LAYER = re.compile(r"encoder\.layers\.(\d+)\.")
Towers = dict[str, tuple[int, list[str]]]  # by name: the number of layers that are there, and parts that are not


def cut_towers(model: Any) -> Towers:
    """The towers of vLLM's model which lack parts that checkpoints have."""
    found: Towers = {}
    for name, module in model.named_modules():
        layers = getattr(getattr(module, "encoder", None), "layers", None)
        missing = [part for part in BEHIND if getattr(module, part, module) is None]
        if layers is not None and missing:
            found[name] = len(layers), missing
    return found


class LeftOut:
    """Fingerprints of the weights that were sent and that no tower has a place for."""

    def __init__(self, towers: Towers) -> None:
        self.towers = towers
        self._prints: dict[str, torch.Tensor] = {}

    def note(self, name: str, weight: torch.Tensor) -> None:
        """Keeps the fingerprint of a weight with this name of the checkpoint, if it is one of them."""
        if self._is_one(name):
            self._prints[name] = fingerprint(rows_of(name, weight))

    def fingerprints(self) -> dict[str, int]:
        """By layer, as ``fingerprints`` of all weights has them."""
        return added_up(self._prints.items())

    def _is_one(self, name: str) -> bool:
        for tower, (num_layers, missing) in self.towers.items():
            within = f".{name}".partition(f".{tower}.")[2]
            layer = LAYER.match(within)
            if (layer and int(layer[1]) >= num_layers) or within.partition(".")[0] in missing:
                return True
        return False
