"""``python -m rayhelper plan | check | prove | stacks | debug | timeline``: a run before, while and after it runs.

argparse rather than jsonargparse: these read their configuration themselves, and answer in a fraction of a second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a subcommand: 0 all is well, 1 something was found, 2 the input cannot be read."""
    options = vars(_parser().parse_args(arguments))
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rayhelper", description=__doc__.splitlines()[0])
    subcommands = parser.add_subparsers(dest="subcommand", required=True)
    plan = subcommands.add_parser("plan", help="what a configuration would ask of a cluster, and every rule it breaks")
    plan.add_argument("--config", required=True, help="a trainer's whole YAML or JSON file, or device groups alone")
    plan.add_argument("--nodes", type=int, help="nodes of the cluster (default: nnodes, or as many as are needed)")
    plan.add_argument("--gpus-per-node", "--gpus_per_node", type=int, help="default: nproc_per_node, or 8")
    plan.add_argument("--model", help="folder or config.json of the model, or its sizes as a mapping")
    plan.add_argument("--gpu-memory-gib", "--gpu_memory_gib", type=float, default=80.0, help="default: 80")
    plan.add_argument("--trainer", help="module:Class, file.py:Class, or the name of an installed one")
    plan.add_argument("--json", action="store_true", help="print JSON")
    check = subcommands.add_parser("check", help="what is wrong with a decorated class, by line")
    check.add_argument("target", metavar="module:Class")
    check.add_argument("--device-groups", "--device_groups", help="as JSON or YAML text")
    check.add_argument("--config", help="a file with device_groups")
    prove = subcommands.add_parser(
        "prove", help="whether a class gives the same numbers in every runtime, call by call"
    )
    prove.add_argument("target", metavar="module:Class", help="or path/to/file.py:Class")
    prove.add_argument("--config", help="a YAML or JSON file: what the constructor takes")
    prove.add_argument("--entry", default="", help="the method that does the work (default: train, run, fit or main)")
    prove.add_argument("--steps", type=int, default=3, help="max_steps of the configuration (default: 3)")
    prove.add_argument(
        "--no-ray", "--no_ray", dest="ray", action="store_false", help="leave out the runs on Ray and under torchrun"
    )
    prove.add_argument("--torchrun", action="store_true", default=None, help="run under torchrun also with --no-ray")
    prove.add_argument("--no-torchrun", "--no_torchrun", dest="torchrun", action="store_false", help="leave it out")
    stacks = subcommands.add_parser(
        "stacks", help="where every rank of a run on this machine is, while it runs or hangs"
    )
    stacks.add_argument("process", nargs="?", type=int, help="its driver's process id (default: the only one there is)")
    debug = subcommands.add_parser(
        "debug", help="the ranks of runs on this machine that wait at a breakpoint(), or pdb at one of them"
    )
    debug.add_argument("choice", nargs="?", metavar="GROUP:RANK", help="attach to this one (default: list all)")
    debug.add_argument("--process", type=int, help="of this driver's process id, where several runs have such a rank")
    timeline = subcommands.add_parser("timeline", help="where the time of a traced run went")
    timeline.add_argument("file", help="the file that trace=... named")
    timeline.add_argument("--html", help="write a picture that a browser opens")
    return parser


if __name__ == "__main__":
    sys.exit(main())
