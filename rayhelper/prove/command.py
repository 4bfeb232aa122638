"""``rayhelper prove module:Class``: runs the class in every runtime and prints what differs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rayhelper.errors import ConfigError, RayHelperError
from rayhelper.named_class import class_named
from rayhelper.prove.runs import TORCHRUN, proof_of_class, same_rows_per_step
from rayhelper.text import parse_text


def prove(target: str, config: str | None, entry: str, steps: int, ray: bool, torchrun: bool | None = None) -> int:
    """Prints the first difference of each pair of runs: 0 if there is none, 1 if there is, 2 if nothing can be run.

    Sums in another order are printed, and count as none.
    """
    try:
        cls = class_named(target)
        settings = _settings(config)
        if size := same_rows_per_step(cls, settings).get("global_batch_size"):
            print(f"global_batch_size is {size} in all runs, so that two workers take the rows of one")
        proof = proof_of_class(cls, settings, entry=entry, steps=steps, ray=ray, torchrun=torchrun)
    except (RayHelperError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, why in proof.left_out.items():
        print(f"{name} could not be run: {why}")
    for difference in proof.differences:
        print(difference)
    mistakes = [one for one in proof.differences if one.is_error]
    names = {"one worker, strict": "strict", "two workers on Ray": "on Ray", TORCHRUN: "under torchrun"}
    runs = [names.get(name, name if name == "off" else f"with {name}") for name in proof.runs]
    same = f"the same {', '.join(runs[:-1])} and {runs[-1]}"
    print(f"{target}: {len(mistakes)} of the comparisons differ" if mistakes else f"{target}: {same}")
    return 1 if mistakes else 0


def _settings(config: str | None) -> dict[str, Any]:
    if config is None:
        return {}
    settings = parse_text(Path(config).read_text(), config)
    if not isinstance(settings, dict):
        raise ConfigError(f"{config} holds a {type(settings).__name__}, not keys and values.")
    return settings
