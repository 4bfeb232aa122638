"""How many of ms-swift's own training commands are taken here, and why the others are not.

    python -m benchmarks.ms_swift_commands PATH_TO_MS_SWIFT [--list OUTCOME] [--only TEXT] [--senses]

Finds every training command in the shell scripts of its examples, and the files of examples/ray, and gives each to our
parser, translation, placement and the trainer's checks. Nothing is trained. Models and data are replaced by small local
ones (``stand_ins.py``). Videos need torchvision: the one is taken that ``make setup`` installs apart. Commands of other
products (infer, export, deploy, eval, app, rollout) are counted alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from benchmarks.ms_swift_commands.cases import Case, cases_of
from benchmarks.ms_swift_commands.outcome import OUTCOMES, Outcome, outcomes_of
from tests.torchvision_on_cpu import TORCHVISION, environment


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ms_swift", type=Path)
    parser.add_argument("--list", choices=OUTCOMES, help="names the commands of an outcome, with what was said")
    parser.add_argument("--only", default="", help="commands of scripts whose path holds this")
    parser.add_argument("--senses", action="store_true", help="commands for images, videos or sounds alone")
    options = parser.parse_args()
    cases, others = cases_of(options.ms_swift)
    cases = [case for case in cases if options.only in case.name and (case.senses or not options.senses)]
    found = outcomes_of(cases, options.ms_swift)
    if options.list:
        for case, outcome in zip(cases, found, strict=True):
            if outcome.kind == options.list:
                print(f"{case.name}: {case.told}\n    " + "\n    ".join(outcome.lines))
    print(table(options.ms_swift, cases, found, others))


def table(ms_swift: Path, cases: list[Case], found: list[Outcome], others: Counter[str]) -> str:
    """Counts by outcome, then by reason, as Markdown."""
    asked = ["git", "-C", str(ms_swift), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    lines = [f"{len(cases)} training commands of ms-swift, commit {commit}", ""]
    lines += ["| outcome | commands | of them on images, videos, sounds | of them on models of no Megatron here |"]
    lines += ["|---|---|---|---|"]
    for kind in OUTCOMES:
        here = [case for case, outcome in zip(cases, found, strict=True) if outcome.kind == kind]
        sensing, replaced = sum(case.senses for case in here), sum(case.is_of_no_megatron for case in here)
        lines.append(f"| {kind} | {len(here)} | {sensing} | {replaced} |")
    for kind in OUTCOMES[1:]:
        reasons = Counter(reason for outcome in found if outcome.kind == kind for reason in set(outcome.reasons))
        lines += ["", f"| {kind}: reason | commands |", "|---|---|"]
        lines += [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    told = ", ".join(f"{name} {count}" for name, count in others.most_common())
    lines += ["", f"Commands of other products, not counted: {told}"]
    return "\n".join(lines)


def start_with_torchvision() -> None:
    """Starts this program again, in an environment where torchvision can be imported."""
    if find_spec("torchvision") is None and TORCHVISION.is_dir():
        found = environment(Path(tempfile.mkdtemp(prefix="torchvision_")))
        os.execve(sys.executable, [sys.executable, "-m", __spec__.parent, *sys.argv[1:]], os.environ | found)


if __name__ == "__main__":
    start_with_torchvision()
    main()
