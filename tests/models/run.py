"""``python -m tests.models.run``: tries the matrix, prints it, and writes the record and docs/models.md.

python -m tests.models.run                        # every cell of every model; vLLM's take half a minute each
python -m tests.models.run --no-vllm              # without vLLM: what the tests try too
python -m tests.models.run --models qwen2 llama   # these alone; the others stay as recorded
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.models import table
from tests.models.architectures import ARCHITECTURES, FOR_VLLM, save
from tests.models.cells import VLLM_COOL, VLLM_RUN, fast_cells, vllm_cells

TIMEOUT_S = 600  # for the vLLM cells of one model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--one", choices=list(ARCHITECTURES), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        with tempfile.TemporaryDirectory() as place:
            folder = save(given.one, Path(place) / "model", **FOR_VLLM.get(given.one, {}))
            print(json.dumps(vllm_cells(given.one, folder, Path(place))))
        return
    record = table.read()
    for name in given.models:
        with tempfile.TemporaryDirectory() as place:
            found = fast_cells(name, save(name, Path(place) / "model"), Path(place))
        if not given.no_vllm:
            found |= in_own_process(name)
        record[name] = record.get(name, {}) | found
        for cell, told in found.items():
            print(f"{name:20} {cell:18} {told}", flush=True)
        table.write(record)
    print(table.page(record))


def in_own_process(name: str) -> dict[str, str]:
    """The vLLM cells of a model; an engine that ends its process is said, too."""
    command = [sys.executable, "-m", "tests.models.run", "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ.copy())
        found: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return dict.fromkeys((VLLM_RUN, VLLM_COOL), f"fails: no answer within {TIMEOUT_S} s")
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        return dict.fromkeys((VLLM_RUN, VLLM_COOL), f"fails: the process ended: {last[:150]}")
    return found


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()
