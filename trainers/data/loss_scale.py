"""Which tokens of an answer are learned: ms-swift's ``loss_scale``.

    scale = parsed("last_round+ignore_empty_think")
    scale.base                                   # whose turns: default (every answer), last_round, all (all tokens)
    scale.masked(ids, mask, tokenizer)           # the mask without what the names behind it leave out

A *run* is the tokens of one answer, which stand together in the mask. The names that ignore thoughts look at the
beginning of each run. Source: ms-swift's ``swift/loss_scale``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rayhelper.text import DID_YOU_MEAN, nearest

BASES = ("default", "last_round", "all")
IGNORED = {  # what is not learned at the beginning of an answer
    "ignore_empty_think": re.compile(
        r"<think>\s*</think>\s*|</think>\s*|<\|channel>thought\n<channel\|>|</mm:think>\s*"
    ),
    "ignore_think_prefix": re.compile(r"<think>\n?"),
}
WEIGHTED = ("hermes", "react", "qwen", "agentflan", "alpha_umi")


@dataclass(frozen=True)
class LossScale:
    """``base`` is one of BASES, ``names`` of IGNORED."""

    base: str = "default"
    names: tuple[str, ...] = ()

    def masked(self, ids: Sequence[int], mask: Sequence[bool], tokenizer: Any) -> list[bool]:
        """The mask of a row of tokens without what the names leave out of its answers."""
        kept = list(mask)
        for name in self.names:
            for start, end in _runs(kept):
                text = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
                found = IGNORED[name].match(text)
                size = 0 if found is None else _tokens_of(found.end(), ids[start:end], tokenizer)
                kept[start : start + size] = [False] * size
        return kept


def parsed(text: str | None) -> LossScale | None:
    """What the value of ``loss_scale`` says; None for none.

    Raises:
        ValueError: an unknown name, or one that weighs tokens.
    """
    if text is None:
        return None
    first, *others = text.split("+")
    base, names = (first, others) if first in BASES else ("default", [first, *others])
    names = [name for name in names if name != "base"]
    for name in names:
        if name in WEIGHTED:
            raise ValueError(
                f"loss_scale {name} weighs tokens by other numbers than 0 and 1, which is not built. Write one of "
                f"{', '.join((*BASES, *IGNORED))}, or several with +"
            )
        if name not in IGNORED:
            known = (*BASES, *IGNORED)
            raise ValueError(
                f"loss_scale {name!r} is unknown.{nearest(name, known, DID_YOU_MEAN)} Known: {', '.join(known)}"
            )
    if base == "all" and names:
        raise ValueError(f"loss_scale {text} learns every token, so that no answer begins. Write {'+'.join(names)}")
    return LossScale(base, tuple(names))


def _runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """First token and the one behind the last of what stands together in the mask."""
    places = [list(group) for is_in, group in groupby(range(len(mask)), key=lambda k: mask[k]) if is_in]
    return [(group[0], group[-1] + 1) for group in places]


def _tokens_of(length: int, ids: Sequence[int], tokenizer: Any) -> int:
    """How many of the first tokens hold the first ``length`` characters."""
    size = 0
    while size < len(ids) and len(tokenizer.decode(list(ids[:size]), skip_special_tokens=False)) < length:
        size += 1
    return size
