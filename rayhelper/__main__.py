"""``rayhelper plan | check | prove | stacks | debug | timeline``: a run before, while and after it runs.

    rayhelper --version
    rayhelper grpo --config x.yaml    what an installed package has: see programs.py

argparse rather than jsonargparse: these read their configuration themselves, and answer in a fraction of a second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from rayhelper import __version__
from rayhelper.text import nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a subcommand: 0 all is well, 1 something was found, 2 the input cannot be read.

    ``arguments``: those of the process, if None.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser, own = _parser()
    if words and not words[0].startswith("-") and words[0] not in own:
        from rayhelper.programs import help_lines, run

        code = run(words)
        if code is None:
            known = [*own, *(name for names in help_lines() for name in names.split(", "))]
            near = nearest(words[0], known)
            print(f"error: there is no command {words[0]!r}{near}. Known: {', '.join(known)}.", file=sys.stderr)
            return 2
        return code
    if not words or {"-h", "--help"} & {words[0]}:
        from rayhelper.programs import help_lines

        found = help_lines()
        width = max(map(len, found), default=0)
        lines = [f"  {names:<{width}}  {line}" for names, line in found.items()]
        more = ["more commands, of installed packages:", *lines, "\nEach command has its own --help."] if lines else []
        parser.epilog = "\n".join(more) or None
        parser.print_help()
        return 0 if words else 2
    if words[0] in ("plan", "check") and "--" in words:
        return _of_command(parser, words[0], words[1 : words.index("--")], words[words.index("--") + 1 :])
    if words[0] == "plan" and len(words) > 1 and not words[1].startswith("-"):
        told = f"to plan a whole command, write -- before it: rayhelper plan -- {' '.join(words[1:])}"
        print(f"error: {told}", file=sys.stderr)
        return 2
    options = vars(parser.parse_args(words))
    subcommand = options.pop("subcommand")
    if subcommand == "plan":
        from rayhelper.planning.plan_report import plan

        return plan(**options)
    if subcommand == "check":
        from rayhelper.check import check

        return check(**options)
    if subcommand == "prove":
        from rayhelper.prove.command import prove

        return prove(**options)
    if subcommand == "stacks":
        from rayhelper.runtimes.announced import stacks

        return stacks(**options)
    if subcommand == "debug":
        from rayhelper.runtimes.debugging import debug

        return debug(**options)
    from rayhelper.timeline import timeline

    return timeline(**options)


def _of_command(parser: argparse.ArgumentParser, subcommand: str, options: list[str], command: list[str]) -> int:
    """The exit code of ``plan OPTIONS -- COMMAND``: a plan of the configuration that the command would run with."""
    from tempfile import TemporaryDirectory

    from rayhelper.errors import ConfigError
    from rayhelper.planning.plan_report import plan
    from rayhelper.programs import as_file

    if subcommand == "check":
        told = f"check reads a class. To plan a command, write rayhelper plan -- {' '.join(command)}"
        print(f"error: {told}", file=sys.stderr)
        return 2
    try:
        found = as_file(command)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if found is None:
        print(f"error: no command {' '.join(command[:1])!r} has a configuration to plan.", file=sys.stderr)
        return 2
    with TemporaryDirectory() as folder:
        file = Path(folder, "command.yaml")
        file.write_text(found[1], encoding="utf-8")
        given = vars(parser.parse_args([subcommand, *options, "--config", str(file), "--trainer", found[0]]))
        del given["subcommand"]
        return plan(**given, shown=" ".join(takewhile(lambda word: not word.startswith("-"), command)))


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and the names of its subcommands."""
    is_script = Path(sys.argv[0]).stem == "rayhelper"
    parser = argparse.ArgumentParser(
        prog="rayhelper" if is_script else "python -m rayhelper",
        description="Commands for a run on device groups: before it starts, while it runs, and after its end.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rayhelper {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND", title="commands")
    plan = subcommands.add_parser(
        "plan",
        help="the GPUs and memory that a configuration needs, and every rule that it breaks",
        epilog="It also takes a whole command: rayhelper plan --nodes 1 -- swift rlhf --rlhf_type grpo --model m ...",
    )
    plan.add_argument("--config", required=True, help="a trainer's whole YAML or JSON file, or only device groups")
    plan.add_argument(
        "--nodes", type=int, help="nodes of the cluster (default: nnodes, or the number that the run needs)"
    )
    plan.add_argument("--gpus-per-node", "--gpus_per_node", type=int, help="default: nproc_per_node, or 8")
    plan.add_argument("--model", help="folder or config.json of the model, or its sizes as a mapping")
    plan.add_argument("--gpu-memory-gib", "--gpu_memory_gib", type=float, default=80.0, help="default: 80")
    plan.add_argument("--trainer", help="module:Class, file.py:Class, or the name of an installed one")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--html", metavar="FILE", help="also write a picture of the devices that a browser opens")
    check = subcommands.add_parser("check", help="mistakes of a decorated class, by line")
    check.add_argument("target", metavar="module:Class")
    check.add_argument("--device-groups", "--device_groups", help="as JSON or YAML text")
    check.add_argument("--config", help="a file with device_groups")
    prove = subcommands.add_parser(
        "prove", help="whether a class gives the same numbers in every runtime, call by call"
    )
    prove.add_argument("target", metavar="module:Class", help="or path/to/file.py:Class")
    prove.add_argument("--config", help="a YAML or JSON file with the arguments of the constructor")
    prove.add_argument("--entry", default="", help="the method that does the work (default: train, run, fit or main)")
    prove.add_argument("--steps", type=int, default=3, help="max_steps of the configuration (default: 3)")
    prove.add_argument(
        "--no-ray", "--no_ray", dest="ray", action="store_false", help="leave out the runs on Ray and under torchrun"
    )
    prove.add_argument("--torchrun", action="store_true", default=None, help="also run under torchrun with --no-ray")
    prove.add_argument(
        "--no-torchrun",
        "--no_torchrun",
        dest="torchrun",
        action="store_false",
        help="leave out the runs under torchrun",
    )
    stacks = subcommands.add_parser(
        "stacks", help="where every rank of a run on this machine is, while it runs or hangs"
    )
    stacks.add_argument("process", nargs="?", type=int, help="process id of the run's driver (default: the only run)")
    debug = subcommands.add_parser(
        "debug", help="the ranks of runs on this machine that wait at a breakpoint(), or pdb at one of them"
    )
    debug.add_argument("choice", nargs="?", metavar="GROUP:RANK", help="attach to this rank (default: list all ranks)")
    debug.add_argument("--process", type=int, help="process id of the driver, if several runs have such a rank")
    timeline = subcommands.add_parser("timeline", help="how a traced run spent its time")
    timeline.add_argument("file", help="the file that trace=... wrote")
    timeline.add_argument("--html", help="also write a picture that a browser opens")
    return parser, list(subcommands.choices)


if __name__ == "__main__":
    sys.exit(main())
