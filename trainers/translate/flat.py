"""TRL's and ms-swift's keys in ours: they are read as they are, so that what is written is what was understood."""

from __future__ import annotations

import dataclasses

from trainers.commands import RLHF, command_named, task_of
from trainers.configuration.reading.command_line import given_keys, translated
from trainers.configuration.reading.given_keys import plain
from trainers.translate.sources import Source
from trainers.translate.table import Ours


def translate(source: Source, ours: Ours, name: str | None) -> None:
    """Fills ``ours`` from a file or the words of a command; ``name``: the trainer, where the source does not say it."""
    words = list(source.words)
    if words and not words[0].startswith("--"):
        name = words.pop(0)
    if source.file is not None:
        words = ["--config", str(source.file)]
    values = given_keys(words, [])[0].values
    kind = values.get("rlhf_type")
    if name is None and kind is None:
        ours.refuse(source.name, "the file does not name its trainer. Write --trainer sft, dpo, grpo, ...")
        return
    name = RLHF if name is None else name
    command = command_named(name, kind, task_of(values))
    ours.trainer = name if name != RLHF else str(kind)
    given, mistakes = translated(words, command.config_type)
    ours.mistakes += mistakes
    fields = {field.name for field in dataclasses.fields(command.config_type)}
    for key in [key for key in given.values if key in fields]:
        ours.add(key, plain(given.values[key]), f"from {given.origins.get(key) or given.written.get(key, key)}")
    ours.without |= dict(given.notes)
