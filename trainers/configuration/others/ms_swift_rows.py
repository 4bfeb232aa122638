"""Which rows ms-swift takes, in our keys: in a file of its names.

    dataset_shuffle: false      dataset: name#100 is name#:100, the first rows; split_dataset_ratio holds out the last
    val_dataset: name#100       the first rows, unless val_dataset_shuffle is true
    streaming: true             the first rows of both
    train_dataloader_shuffle    a new order in every epoch, which is shuffle_dataset here

There two shuffles follow each other. ``dataset_shuffle`` is before the first epoch, and of GRPO it is the only one.
Other data loaders draw an order for every epoch, unless ``train_dataloader_shuffle`` is false: transformers' backend
reads that in SFT, pretraining and DPO alone, Megatron's everywhere.

Its meanings are those of ms-swift's ``dataset/dataset_meta.py``, ``dataloader/shard.py`` and ``megatron/trainers``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainers.configuration.reading.given_keys import GivenKeys

LOADER = "train_dataloader_shuffle"
READS_LOADER = {
    "SFTConfig",
    "ClassificationConfig",
    "EmbeddingConfig",
    "RerankingConfig",
    "DPOConfig",
}  # with transformers' backend
SHUFFLES_BEFORE = {"GRPOConfig", "SamplingConfig"}  # rows have one shuffle: dataset_shuffle
COUNT = re.compile(r"#(\d+)(?=\s|$)")  # of name#100, and of several such names in one text


def rows_as_there(given: GivenKeys, config_type: type, defaults: Mapping[str, Any]) -> None:
    """Puts our keys in place of ms-swift's in ``given``, once its backend is chosen."""
    _take_rows(given)
    _order(given, {kind.__name__ for kind in config_type.__mro__}, defaults)


def _take_rows(given: GivenKeys) -> None:
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


def _order(given: GivenKeys, names: set[str], defaults: Mapping[str, Any]) -> None:
    """``shuffle_dataset`` as the data loader there draws; ``names``: of the configuration's class and its bases."""
    loader = given.take(LOADER) if given.foreign(LOADER) else None
    is_written = given.written.get("shuffle_dataset") == "dataset_shuffle"
    before = given.get("shuffle_dataset") if is_written else True
    if loader not in (None, True, False) or before not in (True, False):
        if loader not in (None, True, False):
            given.refuse(LOADER, f"{LOADER} must be true or false, got {loader!r}")
        return
    is_megatron = given.get("backend") == "megatron"
    is_ignored = not is_megatron and not names & READS_LOADER
    if names & SHUFFLES_BEFORE or given.get("streaming") is True or is_ignored:
        if loader is not None:
            given.notes[LOADER] = "ms-swift does not read it with this trainer"
        loader = None
    if names & SHUFFLES_BEFORE or given.get("streaming") is True:
        return
    if loader is False and before is True:
        epochs = given.get("num_train_epochs", defaults.get("num_train_epochs"))
        is_one = isinstance(epochs, (int, float)) and epochs <= 1 and (given.get("max_steps") or 0) < 1
        if not is_one:
            given.refuse(
                LOADER,
                f"{LOADER}: false with dataset_shuffle: true goes through one random order in every epoch, which is "
                "not supported. Write dataset_shuffle: false too (the order of the file), or remove it",
            )
            return
        loader = True
    if is_written:
        given.values["shuffle_dataset"] = loader is not False
        if before is False and loader is not False:
            given.notes["dataset_shuffle"] = "the data loader draws an order for every epoch, as in ms-swift"
    elif loader is not None:
        given.put("shuffle_dataset", loader, LOADER)


def _take_first(given: GivenKeys, name: str) -> None:
    if name in given.values:
        given.values[name] = _firsts(given.get(name))


def _firsts(source: Any) -> Any:
    if isinstance(source, list):
        return [_firsts(one) for one in source]
    return COUNT.sub(r"#:\1", source) if isinstance(source, str) else source
