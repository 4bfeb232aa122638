"""The recorded matrix, and the page of the documentation that is made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.tiny.architectures import ARCHITECTURES
from tests.models.cells import CELLS, NOT_TRIED

RECORD = Path(__file__).with_name("record.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
Record = dict[str, dict[str, str]]  # by model and cell

HEAD = """# Models

This page lists the tests of each architecture. They use a tiny random model of transformers' own class, in float32 on
a CPU. `python -m tests.models.run` runs the tests again and writes this page.

| column | compares |
|---|---|
| log-probabilities | with the model's own logits, eager, at temperature 1 and 0.7 |
| SFT | the loss of the first step with the model's own logits; two steps |
| SFT packed | loss and weights of a step on rows of several documents with the same documents in separate rows |
| LoRA | an adapter of all linear layers lowers the loss |
| GRPO, hf; hf at 0.7 | two steps; the engine's log-probabilities of its own tokens with the policy's |
| GRPO, vLLM; vLLM at 0.7 | the same with vLLM in the training process; weights are copied and compared |
| vLLM apart; apart at 0.7 | the same on Ray, with vLLM on its own worker. Weights are sent |
| LoRA, vLLM | vLLM in the training process; an adapter of all linear layers is merged for it; both temperatures |
| adapter in vLLM | the same with `vllm_enable_lora: true`: the engine keeps the adapter separate from the model |

Gemma 2 runs with eager attention, because sdpa ignores the soft cap of its attention scores. Recurrent and convolution
layers need GPU kernels to separate the documents of a packed row (flash-linear-attention, causal-conv1d). Llama 4
attends in chunks of 16 tokens, and with vLLM in chunks of 128.

`no`: not equal, or refused in one line before the first step. The number refers to the notes below. `-`: not tested.
"""


def read() -> Record:
    """What was recorded."""
    record: Record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return record


def write(record: Record) -> None:
    """Keeps a record, and makes the page of it."""
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


def page(record: Record) -> str:
    """The page's text."""
    notes: list[str] = []

    def shown(told: str) -> str:
        if told in ("ok", NOT_TRIED):
            return {"ok": "yes", NOT_TRIED: "-"}[told]
        told = re.sub(r"^refused: \w+For\w+ ", "refused: the model ", told)
        if told not in notes:
            notes.append(told)
        return f"no ({notes.index(told) + 1})"

    rows = [["model", *CELLS]]
    for name in ARCHITECTURES:
        cells: dict[str, Any] = record.get(name, {})
        rows.append([f"`{name}`", *(shown(cells.get(cell, NOT_TRIED)) for cell in CELLS)])
    table = [f"| {' | '.join(row)} |" for row in rows]
    table.insert(1, "|" + "---|" * len(rows[0]))
    said = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([HEAD, *table, "", *said]).rstrip() + "\n"
