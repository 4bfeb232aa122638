"""``python -m trainers NAME --config x.yaml``: see ``commands.py`` for what NAME may be. Or ``translate``.

``python -m trainers swift sft x.yaml --key value``: a command of ms-swift, as its scripts have it.
"""

from __future__ import annotations

import os
import sys

from rayhelper import ConfigError
from trainers.cli import main, uses_ray
from trainers.commands import commands
from trainers.configuration.others.ms_swift import (
    COMMANDS,
    PROGRAMS,
    ROLLOUT,
    engine_in_parts,
    spelled,
    torchrun_options,
)
from trainers.configuration.reading.command_line import given_keys

ON_RAY_BECAUSE = "workers that train hold no part of an engine: role rollout has processes of its own on their GPUs"


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


if __name__ == "__main__":
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name == "translate":
        from trainers.translate.command import main as translate

        sys.exit(translate(arguments))
    if name in PROGRAMS:
        try:
            if arguments[:1] == [ROLLOUT]:
                from trainers.swift_rollout import serve

                serve(arguments[1:], os.environ)
                sys.exit(0)
            name, arguments = spelled(sys.argv[1:])
            arguments += on_ray(arguments)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        options = torchrun_options(os.environ)
        if options and not uses_ray(arguments):  # each of torchrun's processes comes here again
            command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "trainers", *sys.argv[1:]]
            os.execv(sys.executable, command)
    if name and not name.startswith("-"):
        main(name, arguments)
    else:
        print("usage: python -m trainers NAME --config FILE [--key VALUE ...]", file=sys.stderr)
        print(f"NAME is one of {', '.join(commands())},", file=sys.stderr)
        print("or translate FILE|-- COMMAND, which writes another system's in our keys,", file=sys.stderr)
        print("or your own trainer: my_package.my_module:MyTrainer, or path/to/file.py:MyTrainer,", file=sys.stderr)
        print(f"or a command of ms-swift: swift (or megatron) {', '.join([*COMMANDS, ROLLOUT])}.", file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
