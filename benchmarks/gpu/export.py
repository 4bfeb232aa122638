"""Does vLLM load what a trainer exports, and say what transformers says?

    python -m benchmarks.gpu.export

Trains a tiny model for a few steps, whole and with a LoRA adapter, and completes prompts greedily with the folder
``final`` in vLLM and in transformers, both in float32. Prints the shares of equal tokens; exits with 1 below 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.smoke import ROWS
from tests.golden.tiny import save_tiny

PROMPTS = ["2+3=", "7+1=", "9+9=", "4+0="]
TOKENS = 12


def trained(folder: Path, tuner_type: str) -> Path:
    """The folder that SFT leaves."""
    keys = {
        "model": str(folder / "model"),
        "output_dir": str(folder / tuner_type),
        "tuner_type": tuner_type,
        "dtype": "float32",
        "max_steps": 8,
        "learning_rate": 5e-3,
        "report_to": "none",
    }
    (folder / "config.json").write_text(json.dumps({"dataset": ROWS}))
    arguments = [f"--{name}={value}" for name, value in keys.items()]
    command = [sys.executable, "-m", "trainers.sft", "--config", str(folder / "config.json"), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder / tuner_type / "final"


def by_transformers(model: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    built, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        AutoTokenizer.from_pretrained(model),
    )
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = built.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


def by_vllm(model: Path) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    engine = LLM(str(model), dtype="float32", enforce_eager=True, gpu_memory_utilization=0.2, max_model_len=128)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS)
    return [list(found.outputs[0].token_ids) for found in engine.generate(PROMPTS, sampling)]


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    shares = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny(folder / "model")
        for tuner_type in ("full", "lora"):
            final = trained(folder, tuner_type)
            pairs = zip(by_transformers(final), by_vllm(final), strict=True)
            equal = [one == other for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True)]
            shares[tuner_type] = sum(equal) / len(equal)
            torch.cuda.empty_cache()
    for tuner_type, share in shares.items():
        print(f"{tuner_type}: {share:.1%} of {len(PROMPTS) * TOKENS} greedy tokens equal")
    sys.exit(min(shares.values()) < 1)


if __name__ == "__main__":
    main()
