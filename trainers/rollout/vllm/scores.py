"""Log-probabilities of tokens that are given, put together from what vLLM gives out step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainers.batch import Ragged


class Scores:
    """At each row's targets the k likeliest ids and their log-probabilities; k = 0: the targets' own.

    ``masks``: of each row, which of its tokens after the first are targets.
    """

    def __init__(self, masks: Sequence[np.ndarray], k: int) -> None:
        self.masks, self.k = masks, k
        self.parts: list[list[Sequence[np.ndarray]]] = [[] for _ in masks]  # of consecutive tokens, a row each

    def add(self, row: int, output: Any) -> None:
        """What vLLM gave out of a row: of tokens of the prompt, and of the one behind it."""
        if output.new_prompt_logprobs_tensors is not None:
            self.parts[row].append([tensor.numpy() for tensor in output.new_prompt_logprobs_tensors[:2]])
        if output.finish_reason is not None and self.k:
            self.parts[row].append(output.new_logprobs[:2])

    def ragged(self) -> tuple[Ragged, Ragged]:
        """Ids (int64) and log-probabilities (float32), (N, k); with k = 0 (N,)."""
        k = self.k
        columns = slice(1, k + 1) if k else slice(0, 1)
        shape = (0, k) if k else (0, 1)
        found: list[list[np.ndarray]] = [[np.zeros(shape, np.int64)], [np.zeros(shape, np.float32)]]
        for mask, part in zip(self.masks, self.parts, strict=True):
            for column, values in zip(found, zip(*part, strict=True), strict=False):
                column.append(np.concatenate([array[:, columns] for array in values])[mask].astype(column[0].dtype))
        ids, logps = np.concatenate(found[0]), np.concatenate(found[1])
        if not k:
            ids, logps = ids[:, 0], logps[:, 0]
        counts = [int(mask.sum()) for mask in self.masks]
        return Ragged.split(ids, counts), Ragged.split(logps, counts)
