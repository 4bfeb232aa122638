"""What a run has left behind, as the golden file keeps it, and the first number in which two runs differ."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

Result = dict[str, Any]  # steps, metrics, and weights or rows
NOT_A_NUMBER = "nan"  # metrics.jsonl writes null; here null says that a line has no such metric


def result_of(folder: Path) -> Result:
    """The numbers of a finished run.

    ``steps``: the step of each line of ``metrics.jsonl``, which a line of a step and one of an evaluation may share.
    ``metrics``: by name, a value a line. ``weights``, or ``rows`` of a run that samples: a checksum.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = sorted({name for line in lines for name in line if name != "step" and not tells_time(name)})
    values = [{name: NOT_A_NUMBER if value is None else value for name, value in line.items()} for line in lines]
    numbers = {
        "steps": [line["step"] for line in lines],
        "metrics": {name: [line.get(name) for line in values] for name in names},
    }
    if (folder / "samples.jsonl").exists():
        return {**numbers, "rows": hashlib.sha256((folder / "samples.jsonl").read_bytes()).hexdigest()}
    return {**numbers, "weights": checksum(folder / "final")}


def tells_time(name: str) -> bool:
    """Whether a metric is another every time that the same run is made."""
    begins = ("time/", "time_share/", "throughput/")
    return name in ("step_time", "tokens_per_second") or name.startswith(begins) or name.endswith("pool_seconds")


def checksum(folder: Path) -> str:
    """Of the names, shapes and bytes of all weights of an exported model, in whatever files they lie."""
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                tensor = weights.get_tensor(name).contiguous()
                about = f"{file.parent.relative_to(folder)} {name} {tensor.dtype} {tuple(tensor.shape)}"
                found[about] = tensor.flatten().numpy().tobytes()
    assert found, f"{folder} has no weights"
    digest = hashlib.sha256()
    for about in sorted(found):
        digest.update(about.encode() + found[about])
    return digest.hexdigest()


def first_difference(found: Result, expected: Result) -> str | None:
    """Words for it, by the order of lines; None: they are equal to the last bit."""
    if found["steps"] != expected["steps"]:
        return f"its lines are of steps {found['steps']}, not {expected['steps']}"
    names = sorted(found["metrics"].keys() | expected["metrics"].keys())
    for line, step in enumerate(expected["steps"]):
        for name in names:
            ours, theirs = (numbers["metrics"].get(name, {}) for numbers in (found, expected))
            one, other = (values[line] if values else None for values in (ours, theirs))
            if repr(one) != repr(other):
                return f"step {step}: {name} is {one!r}, not {other!r}"
    for kind in ("weights", "rows"):
        if found.get(kind) != expected.get(kind):
            return f"all metrics are equal, but not the {kind} after step {expected['steps'][-1]}"
    return None


def folded(results: dict[str, Result]) -> dict[str, Any]:
    """The same, with ``same_as`` in the place of what another case has given too."""
    kept: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for name, result in results.items():
        text = json.dumps(result, sort_keys=True)
        kept[name] = {"same_as": seen[text]} if text in seen else result
        seen.setdefault(text, name)
    return kept


def unfolded(cases: dict[str, Any]) -> dict[str, Result]:
    """The inverse of ``folded``."""
    return {name: cases[case["same_as"]] if "same_as" in case else case for name, case in cases.items()}
