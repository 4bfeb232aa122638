"""GSM8K as both sides read it, and the models that a run begins with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import saved_apart

SYSTEM = "Think step by step. Write the final number alone after ####."
PLACES = ("shared/data/gsm8k", "../shared/data/gsm8k", "examples/grpo/gsm8k")  # the last has 64 problems


def problems(folder: str | None, split: str = "train") -> list[dict[str, str]]:
    """The rows, ``question`` and ``answer``; of the first place that is there, where no folder is named."""
    for place in PLACES if folder is None else [folder]:
        file = Path(place) / f"{split}.jsonl"
        if file.exists():
            return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    raise SystemExit(f"there is no {split}.jsonl in {folder or ', '.join(PLACES)}: name its folder with --data")


def write_prompts(rows: list[dict[str, str]], file: Path) -> None:
    """Conversations to complete, each with its ``answer``."""
    said = [{"role": "system", "content": SYSTEM}]
    _write(file, [{"prompt": [*said, _user(row["question"])], "answer": row["answer"]} for row in rows])


def write_solutions(rows: list[dict[str, str]], file: Path) -> None:
    """The same conversations with the worked solution, which alone is learned."""
    said = [{"role": "system", "content": SYSTEM}]
    _write(
        file,
        [
            {"prompt": [*said, _user(row["question"])], "completion": [{"role": "assistant", "content": row["answer"]}]}
            for row in rows
        ],
    )


def write_numbers(count: int, file: Path) -> None:
    """Prompts of some 16 tokens for a model of random weights, whose completions hardly ever stop."""
    _write(file, [{"prompt": f"{k:04d} is the number "} for k in range(count)])


def prepared_model(model: str | None, shape: str, folder: Path) -> str:
    """The folder of the model: a real one, or random weights of a ``shape`` in ``folder``."""
    if model is not None:
        if not (Path(model) / "config.json").exists():
            raise SystemExit(f"--model {model}: there is no config.json in it")
        return str(Path(model).resolve())
    saved_apart(shape, folder, shape)
    return str(folder / shape)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
