"""The sides of ``benchmarks/real``: what a side did before it failed or was ended is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.real.sides import median, parsed, report, run_side

WRITES = """
import json, sys, time
file = open(sys.argv[1], "w")
for k in range(4):
    print(json.dumps({"seconds": k}), file=file)
"""
ENDS = {
    "well": "file.close()",
    "failed": "file.close(); sys.exit('no memory')",
    "too long": "file.write('{\"sec'); file.flush(); print('waits', flush=True); time.sleep(60)",
}
COLUMNS = {"s": lambda one: f"{median(one, 'seconds'):.1f}", "steps": lambda one: str(len(one["steps"]))}


@pytest.mark.parametrize("how", ENDS)
def test_a_side_keeps_its_steps_however_it_ends(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", WRITES + ENDS[how], str(tmp_path / "steps")]
    found = run_side(command, tmp_path / "steps", tmp_path / "log", 8 if how == "too long" else 60)
    assert [step["seconds"] for step in found["steps"]] == [0, 1, 2, 3]
    assert len(found["ends"]) == 4
    assert median(found, "seconds") == 2.5, "without the two that warm up"
    reason, log = {"well": (None, ""), "failed": ("ended with 1", "no memory"), "too long": ("took", "waits")}[how]
    assert str(found.get("failed")).startswith(str(reason))
    report("GRPO", {"ours": found, "trl": {"steps": [], "failed": "ended with 1", "log": "nothing\n"}}, COLUMNS)
    printed = capsys.readouterr().out
    assert "ours  2.5      4" in printed
    assert "trl     -      -" in printed
    assert log in printed


def test_a_side_may_have_keys_of_its_own() -> None:
    found = parsed("ours:torch_compile=true,rollout_engine=vllm,token_budget=9")
    assert found == ("ours", {"torch_compile": True, "rollout_engine": "vllm", "token_budget": 9})
