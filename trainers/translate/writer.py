"""Our keys as a YAML file: a line each, with a comment that says where it came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from trainers.translate.table import Ours


def as_yaml(ours: Ours, source: str, system: str) -> Iterator[str]:
    """The lines of the file. What has no equivalent stands at its end."""
    yield f"# Translated from {system}: {source}"
    yield f"# rayhelper {ours.trainer} --config THIS_FILE"
    for line in ours.lines:
        yield f"{line.key}: {flow(line.value)}  # {line.comment}"
    if ours.without:
        yield ""
        yield "# Without an equivalent:"
        yield from (f"# {name}: {reason}" for name, reason in ours.without.items())


def flow(value: Any) -> str:
    """One value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()
