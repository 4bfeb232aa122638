"""The questions a rollout engine answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from trainers.batch import Prompts, Rollouts


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; transformers' names and meanings."""

    max_completion_length: int
    temperature: float = 1.0  # 0.0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    clips: bool = False  # the length of vLLM's model ends a completion that it has no more room for
    generation_kwargs: dict[str, Any] = field(default_factory=dict)  # of GenerationConfig, or vLLM's SamplingParams


@dataclass(frozen=True)
class Completion:
    """What became of one prompt of ``ContinuousEngine.submit``, or of ``Engine.generate``."""

    number: int
    prompt_ids: np.ndarray
    ids: np.ndarray
    logps: np.ndarray
    versions: np.ndarray  # (T,) int64: which weights drew each token
    truncated: bool


class Engine(Protocol):
    """Completes prompts. One instance a worker; a batch may be empty."""

    shares_weights: bool  # whether it runs the very module that is trained

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        *,
        seed: int,
        finished: Callable[[Completion], object] | None = None,
    ) -> Rollouts:
        """One completion a prompt, in order. A completion depends on weights, its prompt, the seed and its number.

        ``finished`` is called for each as soon as it is there; its ``number`` is the prompt's place.
        """
        ...

    @property
    def has_weights(self) -> bool:
        """Whether there are any: some engines drop them in their sleep, and must get all of them again."""
        ...

    @property
    def version(self) -> int | None:
        """Of the policy whose weights it has, as ``load_weights`` was told; None where it runs the policy itself."""
        ...

    def load_weights(
        self, named_weights: Iterable[tuple[str, torch.Tensor]], *, part: bool = False, version: int | None = None
    ) -> None:
        """Takes the given weights (Hugging Face names), in place; each is valid until the next one is asked for.

        ``part``: what is not given stays as it is. ``version``: what they are called; None: one more than before.
        """
        ...

    def fingerprints(self) -> dict[str, int]:
        """Of the weights that the engine holds: equal to ``fingerprints`` of all that ``load_weights`` was given."""
        ...

    def sleep(self) -> None:
        """Frees what memory the engine can do without until ``wake``."""
        ...

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Gets the memory of a part back: weights first."""
        ...


@runtime_checkable
class ContinuousEngine(Protocol):
    """An engine that prompts may enter while others are completed, and whose weights may change meanwhile.

    Its ``generate`` also takes ``between``, which is called after every ``interval`` steps and may load weights.
    """

    def submit(self, prompts: Prompts, sampling: Sampling, *, seed: int) -> range:
        """The numbers under which ``advance`` gives out the prompts' completions."""
        ...

    def advance(self) -> list[Completion]:
        """One step of everything that is running; those that have finished with it."""
        ...

    def abort(self) -> None:
        """Gives up all that is running."""
        ...

    @property
    def num_running(self) -> int:
        """Completions that were submitted and have not finished."""
        ...

    def kv_cache_usage(self) -> float:
        """The share of the KV cache that is in use."""
        ...

    def all_agree(self, is_so: bool) -> bool:
        """Whether it is so for all workers that hold one model together; each of them calls it after the same step."""
        ...
