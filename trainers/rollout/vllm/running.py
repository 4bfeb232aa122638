"""Completions while they grow, token by token, and once they are whole."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trainers.rollout.base import Completion


@dataclass
class Running:
    """A completion while it grows."""

    number: int  # as ``submit`` counted
    prompt_ids: np.ndarray
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # a version, and where it begins

    def begin(self, version: int) -> None:
        """What is added from now on was drawn by weights of this version."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.ids)))

    def completion(self, reason: str) -> Completion:
        """What it has become; ``reason``: vLLM's, why it ended.

        Raises:
            RuntimeError: it has not ended, but was given up.
        """
        if reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM abandoned prompt {self.number} ({reason}) after {len(self.ids)} tokens")
        starts = [start for _, start in self.versions]
        return Completion(
            self.number,
            self.prompt_ids,
            np.array(self.ids, np.int64),
            np.array(self.logps, np.float32),
            np.repeat([version for version, _ in self.versions], np.diff([*starts, len(self.ids)])),
            truncated=reason == "length",
        )
