"""The training commands of ms-swift's examples: each with its words, its keys and its environment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.ms_swift_commands.shell import Command, commands_of, launched, uncommented
from benchmarks.ms_swift_commands.stand_ins import (
    DATA_KEYS,
    JUDGE_KEYS,
    MODEL_KEYS,
    data_for,
    has_stand_in_on_megatron,
    judge_for,
    model_for,
    senses,
)
from trainers.configuration.others.ms_swift import COMMANDS, ROLLOUT

FILES_ALONE = ("examples/ray",)  # YAML that no script names
TO_DROP = ("output_dir", "save", "run_name")


@dataclass
class Case:
    """One command: ``words`` as in the script, ``keys`` of its file and its words together."""

    name: str
    words: list[str]
    environment: dict[str, str]
    file: dict[str, Any] = field(default_factory=dict)
    options: list[tuple[str, list[str]]] = field(default_factory=list)
    servers: list[Command] = field(default_factory=list)  # swift rollout, as its script says to start it

    @property
    def keys(self) -> dict[str, Any]:
        return self.file | {name: " ".join(values) for name, values in self.options}

    @property
    def senses(self) -> bool:
        """Whether it is one for images, videos or sounds."""
        return senses(self.keys)

    @property
    def is_of_no_megatron(self) -> bool:
        """Whether the architecture of its model is one that no Megatron builds here, and is replaced by another."""
        return self.words[0] == "megatron" and has_stand_in_on_megatron(self.keys)

    @property
    def told(self) -> str:
        return " ".join(self.words)[:200]

    def replaced(self, folder: Path, number: int) -> list[str]:
        """The words with models, data and folders of ``folder``; a file is written there with the same keys."""
        words = self.words[:2]
        data = data_for(self.words[1], self.keys, folder)
        if self.file:
            path = folder / f"case_{number}.yaml"
            path.write_text(yaml.safe_dump(_file_replaced(self.file, folder, data, self.words[0])))
            words.append(str(path))
        for name, values in self.options:
            if name in TO_DROP or name == "config":
                continue
            words += [f"--{name}", *_replaced(name, values, folder, data, self.words[0])]
        return [*words, "--output_dir", str(folder / "output" / str(number))]


def cases_of(ms_swift: Path) -> tuple[list[Case], Counter[str]]:
    """All training commands, and how many there are of other products."""
    cases: list[Case] = []
    others: Counter[str] = Counter()
    for script in sorted((ms_swift / "examples").rglob("*.sh")):
        text = script.read_text(encoding="utf-8")
        servers = [one for one in map(launched, commands_of(uncommented(text))) if one and one.words[1] == ROLLOUT]
        for written in commands_of(text):
            command = launched(written)
            if command is None:
                continue
            name = str(script.relative_to(ms_swift / "examples"))
            if command.words[1] in COMMANDS:
                cases.append(replace(_case(name, command, ms_swift), servers=servers))
            else:
                others[" ".join(command.words[:2])] += 1
    named = {Path(file).name for case in cases for file in case.words if file.endswith(".yaml")}
    for folder in FILES_ALONE:
        for path in sorted((ms_swift / folder).rglob("*.yaml")):
            relative = str(path.relative_to(ms_swift))
            if path.name not in named:
                words = ["megatron", "rlhf", relative, "--use_ray", "true"]
                cases.append(_case(relative.removeprefix("examples/"), Command(words), ms_swift))
    return cases, others


def _case(name: str, command: Command, ms_swift: Path) -> Case:
    case = Case(name, command.words, command.environment)
    words = command.words[2:]
    if words and not words[0].startswith("--"):
        case.file = _read(words[0], name, ms_swift)
    for word in words:
        if word.startswith("--"):
            option, _, value = word[2:].partition("=")
            case.options.append((option, [value] if value else []))
        elif case.options:
            case.options[-1][1].append(word)
            if case.options[-1][0] == "config":
                case.file = _read(word, name, ms_swift)
    return case


def _read(file: str, script: str, ms_swift: Path) -> dict[str, Any]:
    """The keys of a file that is named from the root of ms-swift, or lies beside the script."""
    path = ms_swift / file.lstrip("/")
    beside = (ms_swift / "examples" / script).parent / Path(file).name
    keys: dict[str, Any] = yaml.safe_load((path if path.is_file() else beside).read_text(encoding="utf-8"))
    return keys


def _file_replaced(keys: dict[str, Any], folder: Path, data: str, program: str) -> dict[str, Any]:
    changed = {}
    for name, value in keys.items():
        if isinstance(value, dict) and name != "ENV":
            changed[name] = _file_replaced(value, folder, data, program)
        elif name in MODEL_KEYS or name in DATA_KEYS:
            values = value if isinstance(value, list) else [value]
            new = _replaced(name, [str(one) for one in values], folder, data, program)
            changed[name] = new if isinstance(value, list) else new[0]
        elif name not in TO_DROP:
            changed[name] = value
    return changed


def _replaced(name: str, values: list[str], folder: Path, data: str, program: str) -> list[str]:
    if name in JUDGE_KEYS:
        return [judge_for(value, folder) for value in values]
    if name in MODEL_KEYS:
        seed = int(name == "teacher_model")  # a teacher knows something else
        return [model_for(value, folder, program, seed) for value in values]
    if name in DATA_KEYS:
        return [data + (f"#{value.rpartition('#')[2]}" if "#" in value else "") for value in values]
    return values
