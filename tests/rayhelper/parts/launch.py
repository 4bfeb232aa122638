"""Tells every story under torchrun: ``torchrun -m tests.rayhelper.parts.launch FOLDER ATTEMPT LAYOUT...``

Each process writes to ``FOLDER/<rank>-<attempt>.jsonl`` that it begins a story, and then what the story came to. A
launch that ended in one story is made again for those that no process had begun.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from tests.frozen import freeze_heap
from tests.rayhelper.parts.layouts import LAYOUTS, Layout
from tests.rayhelper.parts.stories import Story, all_stories, opener, plain, session_of

LONGEST_S = 60  # of one story: a hang ends with the stacks of all threads


def main(folder: Path, rank: int, attempt: int, layouts: list[str]) -> None:
    begun = {story for earlier in range(attempt) for story in outcomes(folder, f"*-{earlier}.jsonl")}
    import torch.distributed  # noqa: F401  # now: imported modules are most of the heap, and stories look for garbage

    stories = all_stories()
    freeze_heap()
    with (folder / f"{rank}-{attempt}.jsonl").open("w") as file:
        for layout in layouts:
            for name, told in stories.items():
                if (layout, name) not in begun and layout in told.layouts:  # type: ignore[attr-defined]
                    write(file, layout, name, {"failed": "the launch ended in it"})
                    write(file, layout, name, outcome(told, LAYOUTS[layout]))


def write(file: TextIO, layout: str, name: str, came_to: dict[str, Any]) -> None:
    print(json.dumps({"layout": layout, "story": name, **came_to}), file=file, flush=True)


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


def outcomes(folder: Path, pattern: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What was written to these files, by layout and story."""
    lines = [json.loads(line) for path in sorted(folder.glob(pattern)) for line in path.read_text().splitlines()]
    return {(line["layout"], line["story"]): line for line in lines}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]), int(sys.argv[2]), sys.argv[3:])
