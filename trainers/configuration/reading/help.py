"""What ``--help`` prints: the keys that most runs need, those of the trainer, and where the others are.

--help              common keys, keys of this trainer, and the names of the other groups
--help all          every key with its type, default and text
--help vllm         the group or the keys whose name has that word
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import yaml

from rayhelper.text import nearest
from trainers.configuration.defaults import TRL, Holding, defaults_of
from trainers.configuration.others.other_names import ALIASES
from trainers.configuration.reading.given_keys import GivenKeys
from trainers.configuration.reading.keys import Key, keys_of

COMMON = (
    *("model", "dataset", "eval_dataset", "output_dir", "external_plugins", "reward_funcs", "num_generations"),
    *("learning_rate", "lr_scheduler_type", "warmup_ratio", "num_train_epochs", "max_steps"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size"),
    *("max_length", "max_prompt_length", "max_completion_length", "temperature"),
    *("tuner_type", "lora_rank", "dtype", "gradient_checkpointing", "backend", "rollout_engine", "seed"),
    *("eval_steps", "save_steps", "logging_steps", "report_to", "report_every", "log_completions"),
    *("resume_from_checkpoint", "use_ray", "device_groups"),
)
ALL = "all"
BATCH = "per_device_train_batch_size"
INDENT = 30  # of what is told of a key
SHORT = 60  # characters up to which a first sentence is shown whole


def print_help(config_type: Any, prog: str | None, topic: str | None = None) -> NoReturn:
    """Prints what there is to say of a trainer's keys, or of a ``topic`` among them, and exits.

    The exit code is 2 for a topic that is none.
    """
    keys = _with_what_holds(config_type)
    if topic is None:
        lines = _short(keys, prog)
    elif topic == ALL:
        lines = [line for group, found in _groups(keys.values()) for line in _group(group, found, whole=True)]
    else:
        lines = _of_topic(keys, topic)
    if not lines:
        words = [ALL, *(name for name in keys), *(word for key in keys.values() for word in key.group.lower().split())]
        print(f"error: no key and no group of keys has {topic!r}{nearest(str(topic), words)}", file=sys.stderr)
        sys.exit(2)
    shown = [name for name in keys if topic is not None or name in COMMON or not keys[name].is_shared]
    other = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items() if name in shown)
    if other and topic in (None, ALL):
        lines += ["", *textwrap.wrap(f"Other names of keys: {other}", _width(), subsequent_indent="  ")]
    print("\n".join(lines))
    sys.exit(0)


def _with_what_holds(config_type: Any) -> dict[str, Key]:
    """Every key, with the default that holds in a file that has none of them: not always the class's own."""
    keys = keys_of(config_type)
    ours = {name: key.default for name, key in keys.items()}
    found = defaults_of(Holding(TRL), config_type, ours, GivenKeys(list(keys)))
    if found.get("token_budget") == "auto":  # by which a GPU chooses the micro-batch
        found[BATCH] = f"auto ({ours[BATCH]} per step)"
    return {name: dataclasses.replace(key, default=found[name]) for name, key in keys.items()}


def _short(keys: dict[str, Key], prog: str | None) -> list[str]:
    lines = [
        f"usage: {prog or 'rayhelper NAME'} --config FILE [--key VALUE ...]",
        "",
        "  --config FILE               a YAML file with any of the keys below; the command line overrides it",
        "  --print_config              print the configuration as YAML, and exit",
        "  --help all                  every key with its type and its full description",
        "  --help WORD                 the keys of this group, or the keys with this word in their names",
        "",
    ]
    common = [keys[name] for name in COMMON if name in keys]
    lines += _group("common keys", common, whole=False)
    own = [key for key in keys.values() if not key.is_shared and key.name not in COMMON]
    if own:
        lines.append("keys of this trainer:")
    for group, found in _groups(own):
        lines += _group(f"  {group}", found, whole=False)
    lines.append("further keys, of all trainers or of several:")
    for group, found in _groups(key for key in keys.values() if key.is_shared and key.name not in COMMON):
        names = ", ".join(key.name for key in found)
        told = f"{group} (--help {_word(group)}): {names}"
        lines += textwrap.wrap(told, _width(), initial_indent="  ", subsequent_indent="    ")
    return lines


def _of_topic(keys: dict[str, Key], topic: str) -> list[str]:
    """The groups that the topic names; or else the keys with that word in their names."""
    asked = topic.lower().lstrip("-")
    of_group = [key for key in keys.values() if asked == _word(key.group)]
    found = [key for key in keys.values() if key in of_group or asked in key.name]
    return [line for group, some in _groups(found) for line in _group(group, some, whole=True)]


def _word(group: str) -> str:
    """By which word a group is asked for: ``vllm`` for "vLLM, by its own names; needs rollout_engine: vllm"."""
    return group.split()[0].strip(",;:").lower()


def _groups(keys: Iterable[Key]) -> list[tuple[str, list[Key]]]:
    """The keys by their groups, in order."""
    found: dict[str, list[Key]] = {}
    for key in keys:
        found.setdefault(key.group, []).append(key)
    return list(found.items())


def _group(title: str, keys: Sequence[Key], *, whole: bool) -> list[str]:
    return [f"{title}:", *(line for key in keys for line in _told(key, whole=whole)), ""]


def _told(key: Key, *, whole: bool) -> list[str]:
    """What is told of a key: its first sentence and default, or everything."""
    text = key.text.replace("``", "")
    if whole:
        also = ", ".join(alias for alias, name in ALIASES.items() if name == key.name)
        must = "required, " if key.default is dataclasses.MISSING else ""
        default = "" if must else f", default: {_default(key)}"
        text = f"{text} ({must}type: {key.type}{default}{f'; also: {also}' if also else ''})"
    else:
        first = text.partition(". ")[0]
        first = (first.partition("; ")[0] if len(first) > SHORT else first).rstrip(" .,;:")
        text = f"{first} ({'required' if key.default is dataclasses.MISSING else f'default: {_default(key)}'})"
    head = f"  --{key.name}"
    lines = textwrap.wrap(text, max(30, _width() - INDENT), break_long_words=False, break_on_hyphens=False)
    if len(head) < INDENT - 1:
        return [f"{head:<{INDENT}}{lines[0]}", *(f"{'':<{INDENT}}{line}" for line in lines[1:])]
    return [head, *(f"{'':<{INDENT}}{line}" for line in lines)]


def _default(key: Key) -> str:
    """The default as YAML writes it."""
    text: str = yaml.safe_dump(key.default, default_flow_style=True, width=10_000)
    return text.removesuffix("\n...\n").strip()


def _width() -> int:
    return min(118, max(60, shutil.get_terminal_size((100, 24)).columns - 2))
