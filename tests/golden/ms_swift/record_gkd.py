"""Writes gkd.json: ms-swift's own divergence on the teacher's most probable tokens (its
swift/rlhf_trainers/gkd_loss.py).

pip install ms-swift==4.6.0 --no-deps --target FOLDER
python -m tests.golden.ms_swift.record_gkd FOLDER > tests/golden/ms_swift/gkd.json
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

TOKENS, WORDS, TOPK = 6, 12, 4


def main(folder: str) -> None:
    spec = importlib.util.spec_from_file_location("gkd_loss", Path(folder) / "swift/rlhf_trainers/gkd_loss.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["gkd_loss"] = module
    spec.loader.exec_module(module)
    random = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(1, TOKENS, WORDS, generator=random).mul(2) for _ in range(2))
    labels = torch.zeros(1, TOKENS, dtype=torch.long)
    sums = {}
    for beta in (0.0, 0.5, 1.0):
        for temperature in (1.0, 0.9):
            output = module.TeacherOutput(full_logits=teacher, labels=labels).to_topk(TOPK)
            total, _ = module.gkd_loss(student, output, labels, beta, temperature)
            sums[f"{beta} {temperature}"] = float(total)
    print(json.dumps({"student": student[0].tolist(), "teacher": teacher[0].tolist(), "sums": sums}))


if __name__ == "__main__":
    main(sys.argv[1])
