"""Qwen3 shapes with random weights, built on the spot: what a benchmark on a machine without a network can have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
        **{"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152},
    },
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "30b-a3b": {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32},
        **{"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **{"norm_topk_prob": True, "decoder_sparse_step": 1},
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def save_shape(shape: str, folder: Path, *, seed: int = 0, **changes: Any) -> int:
    """The number of parameters of the model that is written to ``folder``, with a tokenizer that TRL accepts.

    ``tiny`` is for trying a benchmark without a GPU. ``changes`` are fields of the model's configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        "vocab_size": 260 if shape == "tiny" else 151_936,
        "num_key_value_heads": 2 if shape == "tiny" else 8,
        "head_dim": 32 if shape == "tiny" else 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": shape not in ("7b", "8b", "30b-a3b"),
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = "qwen3_moe" if "num_experts" in SHAPES[shape] else "qwen3"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        config = AutoConfig.for_model(kind, **fields | SHAPES[shape] | changes)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def saved_apart(shape: str, folder: Path, name: str = "model", **changes: Any) -> dict[str, int]:
    """``save_shape`` into ``folder / name`` by a process of its own, which leaves nothing on a GPU.

    Where the variable MODELS names a folder, models are kept there for the next benchmark, and linked to.
    """
    if "MODELS" not in os.environ:
        return {"parameters": _saved(shape, folder / name, changes)}
    words = "-".join([shape, *(f"{field}_{value}" for field, value in sorted(changes.items()))])
    models = Path(os.environ["MODELS"])
    models.mkdir(parents=True, exist_ok=True)
    kept, count = models / words, models / f"{words}.parameters"
    with FileLock(models / f"{words}.lock"):
        if not count.exists():
            count.write_text(str(_saved(shape, kept, changes)))
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(kept)
    return {"parameters": int(count.read_text())}


def _saved(shape: str, folder: Path, changes: dict[str, Any]) -> int:
    command = [sys.executable, "-m", "benchmarks.gpu.shapes", shape, str(folder), json.dumps(changes)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])


def tokenizer() -> Any:
    """One that TRL accepts: a token a byte."""
    from benchmarks.tiny.text import tiny_tokenizer

    return tiny_tokenizer()


if __name__ == "__main__":
    print(save_shape(sys.argv[1], Path(sys.argv[2]), **json.loads(sys.argv[3])))
