"""What to tell of a key that the trainer of a run does not have, so that a remedy never names another such key.

rayhelper sft    stop_words: [x]         it is for trainers with stop_token_ids. Remove it
rayhelper dpo    num_iterations: 2       it is a key of grpo. Remove it
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import fields

from trainers.configuration.others.ms_swift_only import MS_SWIFT_ONLY
from trainers.configuration.others.other_names import ALIASES, NEUTRAL, TRANSLATED, why_refused
from trainers.configuration.reading.folders import configurations, names_of

WORD = re.compile(r"[A-Za-z_]\w*")
MOST_TRAINERS = 4  # that a line names


def why_not_here(name: str, known: Collection[str]) -> str | None:
    """Why a trainer with the keys ``known`` does not have ``name``, and what to do; None if nobody knows it, or as
    what it is another name of."""
    reason = why_refused(name)
    if reason is None:
        return None if name in known or name in ALIASES else _of_others(name, known)
    missing = [key for key in named_keys(reason) if key != name and not _is_taken(key, known)]
    return f"it is for trainers with {_listed(missing, 'or')}. Remove it" if missing else reason


def named_keys(text: str) -> list[str]:
    """The keys of trainers that a text names: words with an underscore, and others after write or before a colon."""
    found: dict[str, None] = {}
    for match in WORD.finditer(text):
        is_marked = (
            "_" in match[0] or text[: match.start()].lower().endswith("write ") or text[match.end() :][:1] == ":"
        )
        if is_marked and match[0] in _every_key():
            found[match[0]] = None
    return list(found)


@functools.cache
def _every_key() -> frozenset[str]:
    """Of all trainers, and their other names."""
    return frozenset(ALIASES).union(*_keys_by_trainer().values())


@functools.cache
def _keys_by_trainer() -> dict[str, frozenset[str]]:
    return {names_of(kind)[0]: frozenset(one.name for one in fields(kind)) for kind in configurations().values()}


def _is_taken(key: str, known: Collection[str]) -> bool:
    """Whether a file of a trainer with the keys ``known`` may hold the key, at least with one value."""
    return key in known or ALIASES.get(key) in known or key in NEUTRAL or key in TRANSLATED


def _of_others(name: str, known: Collection[str]) -> str | None:
    """What to tell of a key that other trainers have."""
    every = _keys_by_trainer()
    trainers = [trainer for trainer, keys in every.items() if name in keys]
    if trainers and all(map(_has_preferences, (known, *(every[trainer] for trainer in trainers)))):
        return f"it is a key of {_listed(trainers, 'and')}. Write rlhf_type: {_listed(trainers, 'or')}, or remove it"
    if len(trainers) > MOST_TRAINERS:
        trainers = [*trainers[:MOST_TRAINERS], "others"]
    if trainers:
        return f"it is a key of {_listed(trainers, 'and')}. Remove it"
    return "it is a key of ms-swift that RayHelper does not have. Remove it" if name in MS_SWIFT_ONLY else None


def _has_preferences(keys: Collection[str]) -> bool:
    """Whether a trainer learns what was preferred, from rows that have it, as rlhf_type then says."""
    return "beta" in keys and "max_completion_length" not in keys


def _listed(words: list[str], joint: str) -> str:
    """``a, b and c``."""
    *others, last = words
    return f"{', '.join(others)} {joint} {last}" if others else last
