"""How a model's weights get from the workers that train it to those that use it.

weights = self.export_weights.defer()    # role train: exported(backend), collect=first_of
self.load_weights(weights)               # role rollout or reference: from worker to workers, not through the driver
"""

from __future__ import annotations

from typing import Any

import torch

from rayhelper import RayHelper
from trainers.backends.base import Backend


def exported(backend: Backend) -> dict[str, torch.Tensor]:
    """On worker 0 all weights by their Hugging Face names, on the CPU; on the others, which gather with it, nothing.

    Every worker of the role calls it.
    """
    is_first = RayHelper.current().rank == 0
    weights = {}
    for name, weight in backend.named_weights():
        if is_first:
            weights[name] = weight.detach().cpu()
    return weights


def first_of(values: list[Any]) -> Any:
    """A ``collect``: worker 0's value."""
    return values[0]
