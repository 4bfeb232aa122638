"""What ``rayhelper WORDS`` does, and ``python -m trainers WORDS``: run a trainer, or one of the commands beside them.

    rayhelper grpo --config x.yaml            any name of commands.py, also my_package.my_module:MyTrainer
    rayhelper swift sft --model m ...         a command of ms-swift, as its scripts have it
    rayhelper translate FILE                  another system's file in our keys
    rayhelper report RUN                      a page about a run
    rayhelper examples copy FOLDER            the examples of the documentation

``rayhelper/`` finds ``COMMANDS`` and ``run`` by this package's entry point of the group ``rayhelper.commands``.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from rayhelper import ConfigError
from trainers.cli import check_before_torchrun, command_of, main, program_name, uses_ray
from trainers.commands import OF_TRL, RLHF, commands
from trainers.configuration.others import ms_swift
from trainers.configuration.others.ms_swift import (
    PROGRAMS,
    ROLLOUT,
    engine_in_parts,
    num_processes,
    spelled,
    torchrun_options,
)
from trainers.configuration.reading.command_line import given_keys, read_keys
from trainers.configuration.reading.folders import configuration_named, configurations, names_of, rlhf_types
from trainers.configuration.reading.secrets import masked
from trainers.configuration.reading.text import as_yaml

ON_RAY_BECAUSE = "workers that train hold no part of an engine: role rollout has its own processes on their GPUs"
ASKS = {"--help", "-h", "--print_config"}
SAID = re.compile(r"[A-Za-z_]\w*=")  # a variable before a command
MODULE = "rayhelper.trainers"  # as processes are told to run it: no folder of a user's has that name
BESIDE = {  # commands that are no trainers: a module whose main(arguments) returns the exit code, and a line of help
    "translate": ("trainers.translate.command", "another system's command or file, in the keys of RayHelper"),
    "report": ("trainers.report.command", "one page about a run, or about several side by side"),
    "examples": ("trainers.examples_command", "list or copy the example configurations"),
}


def help_lines() -> dict[str, str]:
    """Every command, the names of one thing together, with a line that says what it is for."""
    folders: dict[str, list[str]] = {}
    for name, kind in configurations().items():
        folders.setdefault(kind.__module__.rpartition(".")[0], []).append(name)
    trainers = {
        ", ".join(names): (import_module(folder).__doc__ or "").rstrip(".") for folder, names in folders.items()
    }
    of_type = {RLHF: "the trainer that the key rlhf_type names"}
    swift = {", ".join(PROGRAMS): f"a command of ms-swift: {', '.join([*ms_swift.COMMANDS, ROLLOUT])}"}
    return trainers | of_type | swift | {name: line for name, (_, line) in BESIDE.items()}


def run(words: Sequence[str]) -> int | None:
    """The exit code of a command, of which the first word is the name; None if there is no such command.

    A trainer that ends early or was given a mistake leaves by SystemExit.
    """
    name, arguments = words[0], list(words[1:])
    if name in BESIDE:
        code: int = import_module(BESIDE[name][0]).main(arguments)
        return code
    if told := _help_of(words):
        print(told)
        return 0
    if name in PROGRAMS:
        name, arguments = _of_ms_swift(words)
    elif ":" not in name and name not in (RLHF, *OF_TRL) and configuration_named(name) is None:
        return None
    main(name, arguments)
    return 0


def as_file(words: Sequence[str]) -> tuple[str, str] | None:
    """The trainer and the configuration of a command, as YAML: what ``rayhelper plan -- COMMAND`` plans.

    ``NPROC_PER_NODE=8 swift ...`` may stand as in a script. None if there is no such command. Raises ConfigError.
    """
    said = [*itertools.takewhile(lambda word: SAID.match(word), words)]
    environment = {**os.environ, **dict(word.split("=", 1) for word in said)}
    words = words[len(said) :]
    if not words or (words[0] not in (*PROGRAMS, RLHF) and configuration_named(words[0]) is None):
        return None
    name, arguments, size = words[0], list(words[1:]), 1
    if name in PROGRAMS:
        name, arguments = spelled(list(words))
        keys = given_keys(arguments, [])[0].values
        arguments += engine_in_parts(keys, environment)
        size = num_processes(environment) if torchrun_options(environment) else 1
    config_type = command_of(name, arguments).config_type
    values = read_keys(config_type, [one for one in arguments if not one.startswith("--print_config")])
    if size and values["device_groups"] is None and not values["use_ray"]:
        nodes = int(environment.get("NNODES") or "1") if size > 1 else 1
        shape = {"nnodes": nodes, "nproc_per_node": size // nodes}
        roles = [role for role, kind in config_type.ROLES.items() if kind.host is None]
        values["device_groups"] = {**shape, "every_process": {"device": "GPU", "ranks": size, "workers": roles}}
    return names_of(config_type)[0], as_yaml(masked(values))


def python_m_trainers(words: Sequence[str]) -> int:
    """The exit code of ``python -m trainers WORDS``."""
    if not words or words[0].startswith("-"):
        print("usage: python -m trainers NAME --config FILE [--key VALUE ...]", file=sys.stderr)
        print(f"NAME is one of {', '.join(commands())},", file=sys.stderr)
        print(
            "or translate FILE|-- COMMAND, which writes another system's file or command in RayHelper's keys,",
            file=sys.stderr,
        )
        print("or your own trainer: my_package.my_module:MyTrainer, or path/to/file.py:MyTrainer,", file=sys.stderr)
        print(
            f"or a command of ms-swift: swift (or megatron) {', '.join([*ms_swift.COMMANDS, ROLLOUT])},",
            file=sys.stderr,
        )
        print("or report RUN, which writes a page about a run, or examples copy FOLDER.", file=sys.stderr)
        return 0 if words and words[0] in ("-h", "--help") else 2
    code = run(words)
    if code is None:
        main(words[0], words[1:])  # which says what there is
        return 2
    return code


def _help_of(words: Sequence[str]) -> str:
    """The help of ``swift``, and of ``rlhf`` before a type is named; empty for all that has a trainer's own help."""
    asks = {"--help", "-h"} & set(words[1:])
    if words[0] in PROGRAMS and (len(words) == 1 or words[1] in ("--help", "-h")):
        known = [name for name in [*ms_swift.COMMANDS, ROLLOUT] if words[0] == "swift" or name != "sample"]
        return (
            f"usage: {program_name()} {words[0]} COMMAND [FILE] [--key VALUE ...]\nA command of ms-swift, with its "
            f"keys and defaults. COMMAND is one of {', '.join(known)}.\n"
            f"Help of one command: {program_name()} {words[0]} sft --help"
        )
    is_rlhf = words[0] == RLHF or (words[0] in PROGRAMS and words[1] == RLHF)
    if asks and is_rlhf and not any(word.partition("=")[0] in ("--rlhf_type", "--config") for word in words):
        of_what = " ".join(words[: 1 + (words[0] in PROGRAMS)])
        return (
            f"usage: {program_name()} {of_what} --rlhf_type TYPE [--config FILE] [--key VALUE ...]\nThe trainer that "
            f"TYPE names: {', '.join(rlhf_types())}.\n"
            f"Help of one type: {program_name()} {of_what} --rlhf_type dpo --help"
        )
    return ""


def _of_ms_swift(words: Sequence[str]) -> tuple[str, list[str]]:
    """The trainer and the arguments of a command of ms-swift. Leaves where it serves, or starts torchrun."""
    arguments = list(words[1:])
    try:
        if arguments[:1] == [ROLLOUT]:
            from trainers.swift_rollout import serve

            serve(arguments[1:], os.environ)
            sys.exit(0)
        name, arguments = spelled(list(words))
        arguments += on_ray(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    options = torchrun_options(os.environ)
    if options and not uses_ray(arguments):  # each of torchrun's processes comes here again
        if ASKS & {argument.partition("=")[0] for argument in arguments} and not num_processes(os.environ):
            return name, arguments  # printed once, of one process
        if size := num_processes(os.environ):
            first = os.environ.get("NODE_RANK", "0") == "0"
            check_before_torchrun(name, arguments, size, is_first_node=first)
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *options, "-m", MODULE, *words])
    return name, arguments


def on_ray(arguments: list[str]) -> list[str]:
    """What a command of ms-swift needs beside its own arguments where its engine has processes of its own."""
    from trainers.swift_rollout import engine_of_server

    if {"--help", "-h"} & set(arguments):
        return []
    try:
        keys = given_keys(arguments, [])[0].values
    except ConfigError:
        return []  # reported by ``main``
    if in_parts := engine_in_parts(keys, os.environ):
        print(f"on Ray, not torchrun, as {ON_RAY_BECAUSE}", file=sys.stderr)
        return in_parts
    served, variables = engine_of_server(keys, os.environ)
    os.environ.update(variables)
    if served:
        print(f"on Ray, not torchrun, with the devices of swift rollout: {' '.join(served)}", file=sys.stderr)
    return served
