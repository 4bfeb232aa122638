"""Which tokens of an answer are learned, and how much each counts: ms-swift's ``loss_scale``.

    scale = parsed("last_round+hermes")
    scale.base                                   # whose turns: default (every answer), last_round, all (all tokens)
    scale.weights(text, answers, offsets)        # a weight a token; 0: it is not learned
    scale.is_weighted                            # whether a name can give another weight than 0 and 1

Every name cuts an answer into pieces and weighs them. A name behind a + cuts the pieces of the one before, and weights
are multiplied. What ends an answer, such as ``<|im_end|>``, is no part of it and weighs 1. The loss is the sum of
weight x nll over the tokens learned, divided by their number: weights do not enter the divisor.

Source: ms-swift's ``swift/loss_scale`` and ``swift/trainers/seq2seq_trainer.py``. Departure: ms-swift tokenizes each
piece by itself. Here a row has the tokens that it has without weights, and a token has the weight of its first
character.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rayhelper.text import DID_YOU_MEAN, nearest
from trainers.data.answers import Answer

BASES = ("default", "last_round", "all")
PATTERNS = {  # what is weighed as a whole
    "hermes": (re.compile(r"<tool_call>.+?</tool_call>", re.DOTALL), 2.0),
    "ignore_empty_think": (
        re.compile(
            r"\A(?:<think>\s*</think>\s*"
            r"|<seed:think><seed:cot_budget_reflect>The current thinking budget is 0, so I will directly start "
            r"answering the question\.</seed:cot_budget_reflect>\n</seed:think>\s*"
            r"|</think>\s*|<\|channel>thought\n<channel\|>|</mm:think>\s*)"
        ),
        0.0,
    ),
    "ignore_think_prefix": (re.compile(r"\A<think>\n?"), 0.0),
}
_REACT = {
    "Action:": (2.0, 2.0),
    "Action Input:": (2.0, 2.0),
    "Thought:": (1.0, 1.0),
    "Final Answer:": (1.0, 1.0),
    "Observation:": (2.0, 0.0),
}
_AGENT_NAMES = ("Name:", "Action:", "ACTION:", "Tool:", "Command")
_AGENT_ARGUMENTS = ("Arguments:", "action input", "ACTION_INPUT:", "Action Input:")
MARKERS = {  # the weight of a marker, and of what follows it up to the next one
    "react": _REACT,
    "alpha_umi": _REACT | {"Next:": (2.0, 2.0)},
    "qwen": {
        "✿FUNCTION✿:": (2.0, 2.0),
        "✿ARGS✿:": (2.0, 2.0),
        "✿RETURN✿:": (1.0, 1.0),
        "✿RESULT✿:": (2.0, 0.0),
    },
    "agentflan": {
        **dict.fromkeys((*_AGENT_NAMES, *_AGENT_ARGUMENTS), (1.0, 3.0)),
        **dict.fromkeys(("Thought:", "Final Answer:"), (1.0, 1.0)),
        "Observation:": (2.0, 0.0),
    },
}
QUERIES = {  # the weight of a whole answer, by what the turns before it say
    "agentflan": {
        "What is the tool you want to use": 3.0,
        "What are the required parameter names": 3.0,
        "What is the value of": 3.0,
    }
}
NAMES = tuple(sorted({*PATTERNS, *MARKERS}))
Pieces = list[tuple[str, float]]


@dataclass(frozen=True)
class LossScale:
    """``base`` is one of BASES, ``names`` of NAMES."""

    base: str = "default"
    names: tuple[str, ...] = ()

    @property
    def is_weighted(self) -> bool:
        """Whether a weight can be another number than 0 and 1."""
        return any(name in MARKERS or PATTERNS[name][1] != 0.0 for name in self.names)

    def weights(self, text: str, answers: Sequence[Answer], offsets: Sequence[tuple[int, int]]) -> list[float]:
        """The weight of each token of ``text``, of which ``offsets`` says first character and the one behind the last.

        0 outside of the answers.
        """
        places, weights = [-1], [0.0]  # a weight holds from its place on
        for answer in answers:
            content = text[answer.start : answer.content_end]
            place = answer.start
            for piece, weight in [*self._weighed(content, answer), (text[answer.content_end : answer.end], 1.0)]:
                places.append(place)
                weights.append(weight)
                place += len(piece)
            places.append(answer.end)
            weights.append(0.0)
        found, end = [], 0
        for first, last in offsets:
            begin = min(first, end) if last else end  # some tokenizers leave spaces out of a token's offsets
            found.append(weights[bisect_right(places, begin) - 1])
            end = max(end, last)
        return found

    def _weighed(self, content: str, answer: Answer) -> Pieces:
        if answer.weight is not None:
            return [(content, answer.weight)]
        pieces = [(content, 1.0)]
        for name in self.names:
            pieces = [(part, weight * by) for piece, weight in pieces for part, by in _cut(name, piece, answer.query)]
        return pieces


def parsed(text: str | None) -> LossScale | None:
    """What the value of ``loss_scale`` says; None for none.

    Raises:
        ValueError: an unknown name, or names that look for answers where all is learned.
    """
    if text is None:
        return None
    first, *others = text.split("+")
    base, names = (first, others) if first in BASES else ("default", [first, *others])
    names = [name for name in names if name != "base"]
    for name in names:
        if name not in NAMES:
            known = (*BASES, *NAMES)
            raise ValueError(
                f"loss_scale {name!r} is unknown.{nearest(name, known, DID_YOU_MEAN)} Known: {', '.join(known)}"
            )
    if base == "all" and names:
        raise ValueError(
            f"loss_scale {text} learns every token, so there is no first token of an answer. Write {'+'.join(names)}"
        )
    return LossScale(base, tuple(names))


def _cut(name: str, text: str, query: str) -> Pieces:
    """The pieces that a name makes of ``text``, which they add up to, each with its weight."""
    for question, weight in QUERIES.get(name, {}).items():
        if question in query:
            return [(text, weight)]
    if name in PATTERNS:
        pattern, weight = PATTERNS[name]
        ends, pieces = 0, []
        for match in pattern.finditer(text):
            pieces += [(text[ends : match.start()], 1.0), (match.group(), weight)]
            ends = match.end()
        return [*pieces, (text[ends:], 1.0)]
    markers = MARKERS[name]
    parts = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    pieces = [(parts[0], 1.0)]
    for marker, content in zip(parts[1::2], parts[2::2], strict=True):
        pieces += zip((marker, content), markers[marker], strict=True)
    return pieces
