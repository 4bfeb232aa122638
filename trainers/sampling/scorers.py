"""One number per candidate, from a reward function or a reward model, as a process or an outcome reward.

    scorer = ProcessScorer(config)                 # role prm; OutcomeScorer: role orm
    scorer.build(spec)                             # finds the function, or loads the model where the role runs
    rewards = scorer.score(candidates)             # one list per row, one number per text

A reward model scores row by row, so that the numbers of a row are the same, to the last bit, for any number of workers.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rayhelper import RayHelper
from trainers.data.images.conversations import COLUMNS
from trainers.data.rows import prompt_of
from trainers.parts.models import resolve_dtype
from trainers.plugins import load_plugins
from trainers.rewards.functions import is_async, resolve_rewards, reward_name, score
from trainers.rewards.models import RewardModel, names_reward_model
from trainers.rewards.texts import chat_completions
from trainers.sampling.candidates import Candidates
from trainers.sampling.config import SamplingConfig

Rewards = list[list[float]]  # one list a row, one number a text


class CandidateScorer:
    """Scores candidates by what ``spec`` names: a reward function as in ``rewards/functions.py``, or a reward model."""

    takes_steps: ClassVar[bool] = False  # a function may give a list of numbers for a completion

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self.model: RewardModel | None = None

    @RayHelper.function(group="own")
    def build(self, spec: Any) -> None:
        """Finds the function, or loads the model."""
        config = self.config
        load_plugins(config.external_plugins)
        if names_reward_model(spec):
            self.model = RewardModel(
                spec,
                dtype=resolve_dtype(config),
                batch_size=config.reward_batch_size,
                trust_remote_code=config.trust_remote_code,
            )
        else:
            self.function = scoring_function(spec, takes_steps=self.takes_steps)
            self.runner = asyncio.Runner()  # one event loop for all calls: clients may hold connections

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def score(self, candidates: Candidates) -> Rewards:
        """The rewards of every row's texts; NaN where a function had nothing to say."""
        if self.model is not None:
            scored = [self._by_model(*row) for row in zip(candidates.rows, candidates.texts, strict=True)]
        else:
            scored = self._by_function(candidates)
        return scored

    def _by_model(self, row: dict[str, Any], texts: Sequence[str]) -> list[float]:
        assert self.model is not None
        prompts, completions = _of_row(row, texts)
        pictures = {name: [row[name]] * len(prompts) for name in COLUMNS if name in row}
        return self.model(prompts, completions, **pictures)

    def _by_function(self, candidates: Candidates) -> Rewards:
        """One call for all rows: a function that asks a server asks for all at once."""
        pairs = [_of_row(*row) for row in zip(candidates.rows, candidates.texts, strict=True)]
        prompts = [prompt for prompts, _ in pairs for prompt in prompts]
        completions = [completion for _, completions in pairs for completion in completions]
        if not prompts:
            return [[] for _ in candidates.texts]
        counts = [len(texts) for texts in candidates.texts]
        repeated = [row for row, count in zip(candidates.rows, counts, strict=True) for _ in range(count)]
        columns = {name: [row[name] for row in repeated] for name in repeated[0]}
        ids: list[list[int]] = [[]] * len(prompts)
        found = iter(score([self.function], prompts, completions, ids, columns, runner=self.runner)[:, 0].tolist())
        return [[next(found) for _ in range(count)] for count in counts]


@RayHelper.worker(group="prm")
class ProcessScorer(CandidateScorer):
    """Process rewards, of role prm.

    A function may also give a list of numbers for a completion, one per step of its reasoning. The lowest of them
    counts, as a chain is as good as its worst step.
    """

    takes_steps = True


@RayHelper.worker(group="orm")
class OutcomeScorer(CandidateScorer):
    """Outcome rewards, of role orm."""


def scoring_function(spec: Any, *, takes_steps: bool) -> tuple[Callable[..., Any], str]:
    """The reward function that ``spec`` names, and its name.

    Raises:
        ValueError, TypeError: there is none, or it asks for token ids, which only texts are left of here.
    """
    ((function, name),), _ = resolve_rewards([spec])
    parameter = inspect.signature(function).parameters.get("completion_ids")
    if parameter is not None and parameter.default is parameter.empty:
        raise ValueError(
            f"reward function {name!r} needs completion_ids, but sampling keeps only texts. Tokenize there."
        )
    return (step_minimum(function) if takes_steps else function), name


def step_minimum(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the lowest number where it gives several for a completion; None where it gives none."""

    async def awaited(**columns: Any) -> Any:
        return _lowest(await function(**columns))

    def called(**columns: Any) -> Any:
        return _lowest(function(**columns))

    wrapped: Any = awaited if is_async(function) else called
    wrapped.__name__ = reward_name(function)
    wrapped.__signature__ = inspect.signature(function)
    return wrapped  # type: ignore[no-any-return]


def _lowest(values: Any) -> Any:
    if isinstance(values, str) or not hasattr(values, "__len__"):
        return values  # rewards/functions.py says what is wrong with it
    return [(min(value) if len(value) else None) if hasattr(value, "__len__") else value for value in values]


def _of_row(row: dict[str, Any], texts: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """A row's prompt, once a text, and the texts in the form of the prompt."""
    prompts = [prompt_of(row)] * len(texts) if texts else []  # a row that failed may have none
    return prompts, chat_completions(prompts, texts)
