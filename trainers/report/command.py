"""``rayhelper report RUN [RUN ...] [--output FILE]``: one page about a run, or about several side by side.

RUN is the ``output_dir`` of a run. The page of one run is ``report.html`` in its folder. The page of several runs is
``report.html`` in the current folder. It needs no network and may be sent to others.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from trainers.report.page import page
from trainers.report.recorded import recorded

REPORT_FILE = "report.html"
logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 the page is written, 2 a folder holds no run, or the page cannot be written."""
    parser = argparse.ArgumentParser(
        prog="rayhelper report", description="Writes one page about a run, or about several runs side by side."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the output_dir of a run")
    parser.add_argument(
        "--output", help="the file to write (default: report.html in RUN; with several runs, in this folder)"
    )
    options = parser.parse_args(list(arguments))
    folders = [Path(run) for run in options.runs]
    try:
        file = write(folders, None if options.output is None else Path(options.output))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"The report is in {file}. Open it in a browser.")
    return 0


def write(folders: Sequence[Path], file: Path | None = None) -> Path:
    """Writes the page of the runs in these folders; where it is.

    Raises:
        FileNotFoundError: a folder holds no run.
    """
    names = _names(folders)
    html = page([recorded(folder, name) for folder, name in zip(folders, names, strict=True)])
    if file is None:
        file = folders[0] / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE)
    unfinished = file.with_name(f"{file.name}.tmp")
    unfinished.write_bytes(html.encode("utf-8", errors="replace"))
    unfinished.replace(file)  # who reads it meanwhile has a whole one
    return file


def write_of(folder: Path) -> Path | None:
    """Writes the page of a run that is under way; None where that failed, which is no reason for the run to end."""
    try:
        return write([folder])
    except Exception as error:
        logger.warning("the report of %s could not be written (%s: %s)", folder, type(error).__name__, error)
        return None


def _names(folders: Sequence[Path]) -> list[str]:
    """The names of the folders; where two are equal, with what is above them."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({place})" for place, folder in enumerate(map(str, folders), start=1)]
