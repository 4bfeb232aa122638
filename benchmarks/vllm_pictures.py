"""Does vLLM complete prompts with pictures as the trainer's own model does, for each kind of vision model?

    python -m benchmarks.vllm_pictures [KIND ...] [--out FILE]

Each kind is a tiny random model (``benchmarks/tiny/vision.py``) in a process of its own, on a CPU, in float32. Both
engines complete the same prompts greedily. Then all weights change, those of the vision tower too, and the engines
complete them again.

Prints a row per kind: whether prompts and completions are equal, the largest distance of log-probabilities in nats, and
whether fingerprints of all parts agree. Or the line by which the kind is refused. Exit 1 if a kind has other numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tiny.vision import IN_VLLM
from tests import torchvision_on_cpu

NATS = 1e-4  # the most by which log-probabilities may differ


def compared(kind: str, folder: Path) -> dict[str, Any]:
    """Of one kind, in this process."""
    from rayhelper import ConfigError
    from tests.images.vllm_cases import both_engines

    found: dict[str, Any] = {"kind": kind, "refused": ""}
    try:
        for name, value in both_engines(folder, kind):
            found[name] = value
    except ConfigError as error:
        found["refused"] = str(error)
    return found


def row(found: dict[str, Any]) -> tuple[list[str], bool]:
    """The cells of a table, and whether all is as it should be."""
    if "first" not in found:
        return [found["kind"], "", "", "", found["refused"] or found["said"]], bool(found["refused"])
    pairs = [found[name] for name in ("first", "new") if name in found]
    equal = all(expected == given for expected, given, _ in pairs)
    nats = max(gap for _, _, gap in pairs)
    parts = found.get("parts", 0)
    several = "several pictures of a prompt: " + found["several"] if found.get("several") else ""
    said = found["refused"] or found["said"] or several
    cells = [found["kind"], "yes" if equal else "no", f"{nats:.1e}", str(parts), said]
    return cells, equal and nats < NATS and parts > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(IN_VLLM)}; all when left out")
    parser.add_argument("--out", type=Path, help="a file for the numbers as JSON")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone is not None:
        (kind,) = options.kinds
        answer = compared(kind, options.alone)
        (options.alone / "found.json").write_text(json.dumps(answer))
        return
    results, failed = [], False
    print(
        "| kind | equal completions | nats | parts with equal fingerprints | said |\n|---|---|---|---|---|", flush=True
    )
    with tempfile.TemporaryDirectory() as place:
        environment = torchvision_on_cpu.environment(Path(place) / "operators")
        for kind in options.kinds or IN_VLLM:
            folder = Path(place) / kind
            folder.mkdir()
            command = [sys.executable, "-m", "benchmarks.vllm_pictures", kind, "--alone", str(folder)]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            written = folder / "found.json"
            found = json.loads(written.read_text()) if written.exists() else {"kind": kind, "refused": ""}
            found["said"] = "" if not ended.returncode else (ended.stderr.strip().splitlines() or [""])[-1]
            cells, is_right = row(found)
            failed |= not is_right
            results.append(found)
            print(f"| {' | '.join(cells)} |", flush=True)
            if ended.returncode:
                print(ended.stderr[-3000:], file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
