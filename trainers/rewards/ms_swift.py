"""The reward functions that come with ms-swift (4.6), by its formulas (``swift/rewards/orm.py``).

    there           here                      else, under the name that it has there
    accuracy        ms_swift_accuracy         TRL's accuracy_reward: no <answer>, None where the solution has no number
    format          ms_swift_format           ours: each tag once
    cosine          ms_swift_cosine           none; TRL's cosine_scaled
    repetition      ms_swift_repetition       none; TRL's repetition_penalty counts tokens
    soft_overlong   ms_swift_soft_overlong    TRL's, which stops at -1
    math            ms_swift_math             none; an orm_model of sampling

In a file of ms-swift's names the names there mean these (``configuration/others/ms_swift_meanings.py``). Lengths are in
tokens, with the end token.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
from collections.abc import Sequence
from typing import Any

from trainers.plugins import register_reward
from trainers.rewards.texts import last_turn_text

logger = logging.getLogger(__name__)

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>\Z", re.DOTALL)


@register_reward("ms_swift_accuracy")
def ms_swift_accuracy(completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float]:
    """1.0 where completion and ``solution`` are the same by math_verify, else 0.0.

    Of both, what stands in the first ``<answer>``...``</answer>`` is read, or the whole; a completion without the tags
    must answer in LaTeX (in a box first). A solution that cannot be read gives 0.0.
    """
    return [_is_right(last_turn_text(c), truth) for c, truth in zip(completions, solution, strict=True)]


def _is_right(text: str, truth: str) -> float:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    has_alarm = threading.current_thread() is threading.main_thread()  # by which math_verify limits its time
    limit: dict[str, Any] = {} if has_alarm else {"parsing_timeout": None}
    wanted = parse(_answer(truth) or truth, extraction_mode="first_match", **limit)
    if not wanted:
        return 0.0
    tagged = _answer(text)
    if tagged is not None:
        found = parse(tagged, extraction_mode="first_match", **limit)
    else:
        boxed: Any = True  # as it is there, which is neither "all" nor "last"
        latex = LatexExtractionConfig(
            normalization_config=NormalizationConfig(
                nits=False, malformed_operators=False, basic_latex=True, boxed=boxed, units=True
            ),
            boxed_match_priority=0,
            try_extract_without_anchor=False,
        )
        found = parse(text, extraction_config=[latex], extraction_mode="first_match", **limit)
    try:
        return float(verify(wanted, found, **({} if has_alarm else {"timeout_seconds": None})))
    except Exception:  # of sympy, by what a model wrote
        return 0.0


def _answer(text: str) -> str | None:
    match = _ANSWER.search(text)
    return None if match is None else match[1].strip()


NO_ANSWERS = "ms_swift_math needs the right answers: a last turn of the assistant in messages, or a column solution"


@register_reward("ms_swift_math")
def ms_swift_math(
    completions: Sequence[Any],
    messages: Sequence[Any] | None = None,
    solution: Sequence[str] | None = None,
    **_: Any,
) -> list[float]:
    """1.0 where completion and right answer are the same text or, by sympy, the same expression; else 0.0.

    The right answer is the last turn of the assistant in ``messages``, or ``solution``. Of both, the text behind
    ``# Answer`` is read if there is one, of that the first ``\\boxed{...}`` up to its first closing brace. sympy reads
    LaTeX only with antlr4-python3-runtime 4.11; without it texts are compared, and a warning says so once.

    Raises:
        ValueError: rows have neither.
    """
    if messages is not None and all(turns and turns[-1]["role"] == "assistant" for turns in messages):
        truths = [str(turns[-1]["content"]) for turns in messages]
    elif solution is not None:
        truths = [str(one) for one in solution]
    else:
        raise ValueError(NO_ANSWERS)
    found = [last_turn_text(completion) for completion in completions]
    return [float(_same_expression(*map(_in_box, pair))) for pair in zip(found, truths, strict=True)]


@functools.cache
def _reads_latex() -> bool:
    """Whether sympy's parser of LaTeX works here. Warns once if it does not."""
    from sympy.parsing.latex import parse_latex

    try:
        parse_latex("1")
    except ImportError as error:
        logger.warning("ms_swift_math compares texts only, as ms-swift would here: %s", error)
        return False
    return True


def _in_box(text: str) -> str:
    """What is compared of a text, without the delimiters and the braces of LaTeX."""
    if "# Answer" in text:
        text = text.split("# Answer")[1]
    text = text.strip()
    if match := re.search(r"\\boxed{([^}]*)}", text):
        text = match[1].strip()
    bare = re.sub(r"\\[()\[\]]", "", text)
    return bare.replace("{", "").replace("}", "").strip()


def _same_expression(first: str, second: str) -> bool:
    if first == second:
        return True
    from sympy import simplify
    from sympy.parsing.latex import parse_latex

    if not _reads_latex():
        return False
    try:
        one, other = (simplify(parse_latex(text)) for text in (first, second))
        return bool(one.equals(other)) if hasattr(one, "equals") and hasattr(other, "equals") else bool(one == other)
    except Exception:  # of the parser and of sympy, by what a model wrote
        return False


@register_reward("ms_swift_format")
def ms_swift_format(completions: Sequence[Any], **_: Any) -> list[float]:
    """1.0 where the whole completion is ``<think>...</think>``, spaces, ``<answer>...</answer>``; else 0.0.

    Tags may come again inside; nothing may stand before or after.
    """
    return [float(_FORMAT.match(last_turn_text(completion)) is not None) for completion in completions]


@register_reward("ms_swift_cosine")
class MsSwiftCosine:
    """A cosine of the length between two values, of right and of wrong completions (arXiv 2502.03373).

    From ``min_len_value_*`` at no token to ``max_len_value_*`` at ``max_len`` tokens; right is what
    ``ms_swift_accuracy`` gives 1.0.
    """

    __name__ = "ms_swift_cosine"

    def __init__(
        self,
        max_len: int,
        min_len_value_wrong: float = -0.5,
        max_len_value_wrong: float = 0.0,
        min_len_value_correct: float = 1.0,
        max_len_value_correct: float = 0.5,
    ) -> None:
        self.max_len = max_len
        self.wrong = (min_len_value_wrong, max_len_value_wrong)
        self.correct = (min_len_value_correct, max_len_value_correct)

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Any], solution: Sequence[str], **_: Any
    ) -> list[float]:
        rewards = []
        for right, ids in zip(ms_swift_accuracy(completions, solution), completion_ids, strict=True):
            shortest, longest = self.correct if right >= 1 else self.wrong
            share = (1 - math.cos(len(ids) * math.pi / self.max_len)) / 2
            rewards.append(shortest - (shortest - longest) * share)
        return rewards


@register_reward("ms_swift_repetition")
class MsSwiftRepetition:
    """``max_penalty`` x the share of n-grams of words that are repetitions (arXiv 2502.03373); 0 of shorter texts."""

    __name__ = "ms_swift_repetition"

    def __init__(self, n_grams: int = 3, max_penalty: float = -1.0) -> None:
        if n_grams < 1:
            raise ValueError(f"n_grams must be at least 1, got {n_grams}")
        self.n_grams, self.max_penalty = n_grams, max_penalty

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        return [self._of(last_turn_text(completion).lower().split()) for completion in completions]

    def _of(self, words: list[str]) -> float:
        grams = [tuple(words[k : k + self.n_grams]) for k in range(len(words) - self.n_grams + 1)]
        return (1 - len(set(grams)) / len(grams)) * self.max_penalty if grams else 0.0


@register_reward("ms_swift_soft_overlong")
class MsSwiftSoftOverlong:
    """0 up to soft_max_length - soft_cache_length tokens, then falling by 1 every soft_cache_length, without an end."""

    __name__ = "ms_swift_soft_overlong"

    def __init__(self, soft_max_length: int, soft_cache_length: int) -> None:
        if not 0 < soft_cache_length < soft_max_length:
            raise ValueError(
                f"soft_cache_length={soft_cache_length} must lie in (0, soft_max_length={soft_max_length}): over so "
                "many tokens the reward falls to -1"
            )
        self.free, self.over = soft_max_length - soft_cache_length, soft_cache_length

    def __call__(self, completion_ids: Sequence[Any], **_: Any) -> list[float]:
        return [min((self.free - len(ids)) / self.over, 0.0) for ids in completion_ids]
