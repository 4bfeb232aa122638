"""A reward of rows in verl's form: ``reward_model: {ground_truth: ...}``, ``data_source`` and ``extra_info``.

    reward_funcs: [{name: trainers.rewards.ground_truth:GroundTruth, path: my_rule.py, function: compute_score}]

The function is called for each completion as verl calls it. Without ``path`` verl's rule for the row's ``data_source``
scores: that of openai/gsm8k is written here, other rules come from verl itself (``verl.utils.reward_score``), where it
is installed. ``rules: siirl`` takes siiRL's rules instead, which differ.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.rewards.texts import completion_text


class GroundTruth:
    """A reward function over the column ``reward_model``.

    ``function`` of the file ``path`` takes ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info`` and
    ``arguments``; it returns a number, or a mapping with ``score``.
    """

    def __init__(
        self,
        path: str | None = None,
        function: str = "compute_score",
        arguments: Mapping[str, Any] | None = None,
        rules: str = "verl",
    ) -> None:
        if rules not in GSM8K:
            raise ValueError(f"rules {rules!r} are unknown (known: {', '.join(GSM8K)})")
        self.rules = rules
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
            raise ValueError("rows need a column 'reward_model' of mappings with 'ground_truth', as in verl's rows")
        truths = [one["ground_truth"] for one in reward_model]
        nothing = [None] * len(truths)
        return [
            _number(
                (self.rule or rule_of(source, self.rules))(
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


def rule_of(data_source: Any, rules: str) -> Callable[..., Any]:
    """The rule of verl or siirl for rows of a source. Raises ValueError where it is neither here nor installed."""
    if data_source == "openai/gsm8k":
        return GSM8K[rules]
    try:
        found: Callable[..., Any] = importlib.import_module(f"{rules}.utils.reward_score").default_compute_score
    except ImportError:
        raise ValueError(
            f"rows of data_source {data_source!r} are scored by a rule of {rules}, which is not installed. Install it, "
            "or write the file of a rule: reward_funcs: [{name: 'trainers.rewards.ground_truth:GroundTruth', path: "
            "rule.py, function: compute_score}]"
        ) from None
    return found


def gsm8k_score(solution_str: str, ground_truth: Any, **_: Any) -> float:
    """1.0 if the last number that stands behind ``#### `` is the right answer, as text without commas; else 0.0.

    Looked for in the last 300 characters (verl 0.8, ``reward_score/gsm8k.py``, method strict).
    """
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str[-300:])
    return float(bool(found) and found[-1].replace(",", "") == ground_truth)


def first_gsm8k_score(solution_str: str, ground_truth: Any, **_: Any) -> float:
    """The same for the first such number of the whole text (siiRL, ``reward_score/gsm8k.py``, method strict)."""
    found = re.search(r"#### (-?[0-9.,]+)", solution_str)
    return float(found is not None and found[1].replace(",", "") == ground_truth)


GSM8K = {"verl": gsm8k_score, "siirl": first_gsm8k_score}


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
