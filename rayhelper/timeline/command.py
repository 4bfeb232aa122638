"""``rayhelper timeline FILE [--html OUT.html]``."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rayhelper.errors import ConfigError
from rayhelper.timeline import page, trace
from rayhelper.timeline.summary import headline, num_ranks, printable, summarise, table


def timeline(file: str, html: str | None = None) -> int:
    """Prints how a traced run spent its time; 0, or 2 with one line about what is wrong.

    Args:
        file: the trace, .json or .json.gz.
        html: also write the timeline to this file, as a page for a browser.
    """
    try:
        spans, metadata = trace.read(file)
        if html is not None:
            Path(html).write_text(page.html(spans, metadata), encoding="ascii")
    except (ConfigError, OSError) as error:
        print(f"timeline: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    summary = summarise(spans, num_ranks(metadata))
    console.print(Text(printable(f"{file}: {headline(summary, metadata)}")))
    console.print(table(summary))
    if html is not None:
        console.print(Text(f"The timeline is in {html}."))
    return 0
