"""A reference model's log-probabilities of all rows, kept beside the checkpoints of a run that precomputed them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayhelper import RayHelper
from trainers.batch import Ragged, Sequences

FILE = "reference_logps.npz"
logger = logging.getLogger(__name__)


@RayHelper.function(group="driver", execute="first")
def write_reference_logps(folder: Path, parts: Sequence[Sequences], model: str, logps: Sequence[Ragged]) -> None:
    """Writes the log-probabilities that the reference ``model`` gives the targets of each of the ``parts``.

    Process 0 does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays: Any = {str(k): one.values for k, one in enumerate(logps)}
    unfinished = folder / f"unfinished_{FILE}"
    np.savez(unfinished, of=_fingerprint(parts, model), **arrays)
    os.replace(unfinished, folder / FILE)


@RayHelper.function(group="driver", execute="first")
def read_reference_logps(folder: Path, parts: Sequence[Sequences], model: str) -> list[Ragged] | None:
    """What ``write_reference_logps`` wrote; None if there is nothing, or if it is of other rows or another model."""
    if not (folder / FILE).is_file():
        return None
    with np.load(folder / FILE, allow_pickle=False) as arrays:
        if str(arrays["of"]) != _fingerprint(parts, model):
            logger.warning("%s belongs to other rows or to another reference: it is computed again", folder / FILE)
            return None
        return [_like(arrays[str(k)], part.target_mask) for k, part in enumerate(parts)]


def _like(values: np.ndarray, mask: Ragged) -> Ragged:
    """One value a target."""
    return Ragged.split(values, [int(row.sum()) for row in mask])


def _fingerprint(parts: Sequence[Sequences], model: str) -> str:
    seen = hashlib.sha256(model.encode())
    for part in parts:
        for column in (part.input_ids, part.target_mask):
            seen.update(column.values.tobytes())
            seen.update(column.offsets.tobytes())
    return seen.hexdigest()
