"""A reward of rows in verl's form: ``reward_model: {ground_truth: ...}``, ``data_source`` and ``extra_info``.

    reward_funcs: [{name: trainers.rewards.ground_truth:GroundTruth, path: my_rule.py, function: compute_score}]

The function is called for each completion as verl calls it; without ``path`` the completion's number is compared with
the row's, as ``exact_answer`` does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.rewards.functions import exact_answer
from trainers.rewards.texts import completion_text


class GroundTruth:
    """A reward function over the column ``reward_model``.

    ``function`` of the file ``path`` takes ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info`` and
    ``arguments``; it returns a number, or a mapping with ``score``.
    """

    def __init__(
        self, path: str | None = None, function: str = "compute_score", arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.__name__ = function if path else "ground_truth"
        self.rule = _loaded(path, function) if path else None
        self.arguments = dict(arguments or {})

    def __call__(
        self,
        completions: Sequence[Any],
        reward_model: Sequence[Mapping[str, Any]] | None = None,
        data_source: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """One score for each completion. Raises ValueError for rows without the column ``reward_model``."""
        if reward_model is None or not all(isinstance(one, Mapping) and "ground_truth" in one for one in reward_model):
            raise ValueError("rows need a column 'reward_model' of mappings with 'ground_truth', as verl's have")
        truths = [one["ground_truth"] for one in reward_model]
        if self.rule is None:
            return exact_answer(completions, answer=truths)
        nothing = [None] * len(truths)
        return [
            _number(
                self.rule(
                    data_source=source,
                    solution_str=completion_text(completion),
                    ground_truth=truth,
                    extra_info=info,
                    **self.arguments,
                )
            )
            for completion, truth, source, info in zip(
                completions, truths, data_source or nothing, extra_info or nothing, strict=True
            )
        ]


def _number(score: Any) -> float:
    return float(score["score"] if isinstance(score, Mapping) else score)


def _loaded(path: str, function: str) -> Callable[..., Any]:
    """The function of a file. Raises ValueError if there is no such file or function."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"reward: there is no file {path!r}")
    spec = importlib.util.spec_from_file_location(f"ground_truth_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] | None = getattr(module, function, None)
    if found is None:
        raise ValueError(f"reward: {path} has no function {function!r}")
    return found
