"""Tells every story under torchrun: ``torchrun -m tests.rayhelper.parts.launch FOLDER LAYOUT...``

Each process writes to ``FOLDER/<rank>.jsonl`` that it begins a story, and then what the story came to. A launch that
ended in one story is made again for those that no process has begun.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.rayhelper.parts.layouts import LAYOUTS, Layout
from tests.rayhelper.parts.stories import Story, all_stories, opener, plain, session_of

LONGEST_S = 60  # of one story: a hang ends with the stacks of all threads


def main(folder: Path, rank: int, layouts: list[str]) -> None:
    begun = {story for path in folder.glob("*.jsonl") for story in outcomes(path)}
    with (folder / f"{rank}.jsonl").open("a") as file:
        for layout in layouts:
            for name, told in all_stories().items():
                if (layout, name) not in begun and (not told.opens or layout in told.layouts):  # type: ignore[attr-defined]
                    for each in ({"failed": "the launch ended in it"}, outcome(told, LAYOUTS[layout])):
                        print(json.dumps({"layout": layout, "story": name, **each}), file=file, flush=True)


def outcome(told: Story, layout: Layout) -> dict[str, Any]:
    """The story's value, or the traceback of what it raised."""
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    try:
        if told.opens:  # type: ignore[attr-defined]
            return {"value": plain(told(opener("torchrun", layout)))}
        with session_of("torchrun", layout):
            return {"value": plain(told())}
    except Exception:
        return {"failed": traceback.format_exc()}
    finally:
        faulthandler.cancel_dump_traceback_later()
        gc.collect()


def outcomes(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What one process has written, by layout and story."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["layout"], line["story"]): line for line in lines}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]), sys.argv[2:])
