"""How many test problems models solve, greedily: ``python -m benchmarks.real.learning.accuracy ASKED.json``.

``ASKED.json`` has ``models`` (folders), ``data`` (prompts with their ``answer``), ``length`` and ``out``, the file for
the list of results. All models are measured in one process, one after the other.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from trainers.batch import Prompts, Ragged
from trainers.rewards.functions import exact_answer
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine


def accuracy(model: str, rows: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """``accuracy`` of greedy completions of at most ``length`` tokens, their number, and the seconds that it took."""
    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows]
    engine = HfEngine(model, tokenizer, dtype="bfloat16" if torch.cuda.is_available() else "float32")
    drawn = engine.generate(Prompts(Ragged.of(ids, np.int64)), Sampling(length, temperature=0.0), seed=0)
    texts = tokenizer.batch_decode([list(row) for row in drawn.completion_ids], skip_special_tokens=True)
    right = exact_answer(texts, answer=[row["answer"] for row in rows])
    return {
        "accuracy": sum(map(bool, right)) / len(rows),
        "problems": len(rows),
        "truncated": float(drawn.truncated.mean()),
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    problems = [json.loads(line) for line in Path(asked["data"]).read_text(encoding="utf-8").splitlines()]
    found = [accuracy(model, problems, asked["length"]) for model in asked["models"]]
    Path(asked["out"]).write_text(json.dumps(found))
