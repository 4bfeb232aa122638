"""Which rows ms-swift takes, in our keys: in a file of its names.

    dataset_shuffle: false      dataset: name#100 is name#:100, the first rows; split_dataset_ratio holds out the last
    val_dataset: name#100       the first rows, unless val_dataset_shuffle is true
    streaming: true             the first rows of both

Its meanings are those of ms-swift's ``swift/dataset/dataset_meta.py``.
"""

from __future__ import annotations

import re
from typing import Any

from trainers.configuration.reading.given_keys import GivenKeys

COUNT = re.compile(r"#(\d+)(?=\s|$)")  # of name#100, and of several such names in one text


def rows_as_there(given: GivenKeys) -> None:
    """Puts our keys in place of ms-swift's in ``given``."""
    streams = given.get("streaming") is True
    shuffles = given.written.get("shuffle_dataset") != "dataset_shuffle" or given.get("shuffle_dataset") is not False
    if streams or not shuffles:
        _take_first(given, "dataset")
        if given.get("split_dataset_ratio") and "split_dataset_rows" in given.known:
            given.put("split_dataset_rows", "last", "shuffle_dataset")
    draws = given.foreign("val_dataset_shuffle") and given.get("val_dataset_shuffle") is True
    if draws:
        given.take("val_dataset_shuffle")
        given.notes["val_dataset_shuffle"] = "the order of rows changes no evaluation"
    if (streams or not draws) and given.written.get("eval_dataset") == "val_dataset":
        _take_first(given, "eval_dataset")


def _take_first(given: GivenKeys, name: str) -> None:
    if name in given.values:
        given.values[name] = _firsts(given.get(name))


def _firsts(source: Any) -> Any:
    if isinstance(source, list):
        return [_firsts(one) for one in source]
    return COUNT.sub(r"#:\1", source) if isinstance(source, str) else source
