"""``python -m rayhelper prove module:Class``: runs the class in every runtime and prints what differs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rayhelper.errors import ConfigError, RayHelperError
from rayhelper.named_class import class_named
from rayhelper.prove.runs import prove_class, same_rows_per_step
from rayhelper.text import parse_text


def prove(target: str, config: str | None, entry: str, steps: int, ray: bool) -> int:
    """Prints the first difference of each pair of runs: 0 if there is none, 1 if there is, 2 if nothing can be run."""
    try:
        cls = class_named(target)
        settings = _settings(config)
        if size := same_rows_per_step(cls, settings).get("global_batch_size"):
            print(f"global_batch_size is {size} in all runs, so that two workers take the rows of one")
        differences = prove_class(cls, settings, entry=entry, steps=steps, ray=ray)
    except (RayHelperError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for difference in differences:
        print(difference)
    runs = "off, strict, with two workers and on Ray" if ray else "off, strict and with two workers"
    print(f"{target}: {len(differences)} of the comparisons differ" if differences else f"{target}: the same {runs}")
    return 1 if differences else 0


def _settings(config: str | None) -> dict[str, Any]:
    if config is None:
        return {}
    settings = parse_text(Path(config).read_text(), config)
    if not isinstance(settings, dict):
        raise ConfigError(f"{config} holds a {type(settings).__name__}, not keys and values.")
    return settings
