"""torchvision in a process of its own, beside a CPU torch: vLLM reads pictures with it.

The build of the package index is for CUDA, and its operators cannot be loaded here. Nothing calls them, but its import
registers further kernels of two. So they are declared, in every process that imports torch: torch asks the entry points
``torch.backends`` for what to call.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCHVISION = ROOT / ".venv" / "torchvision"  # make setup installs it there
DECLARES = """
import torch

def declare():
    global library
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def environment(folder: Path) -> dict[str, str]:
    """Variables of processes that can import torchvision; ``folder``: for what declares its operators."""
    written = folder / "torchvision_operators-1.dist-info"
    written.mkdir(parents=True)
    (folder / "torchvision_operators.py").write_text(DECLARES)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision-operators\nVersion: 1\n")
    (written / "entry_points.txt").write_text("[torch.backends]\nvision = torchvision_operators:declare\n")
    paths = (ROOT, TORCHVISION, folder, *filter(None, [os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
