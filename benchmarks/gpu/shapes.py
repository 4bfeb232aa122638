"""Qwen3 shapes with random weights, built on the spot: what a benchmark on a machine without a network can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def save_shape(shape: str, folder: Path, **changes: Any) -> int:
    """The number of parameters of the model that is written to ``folder``, with a tokenizer that TRL accepts.

    ``tiny`` is for trying a benchmark without a GPU.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.golden.tiny import tiny_tokenizer

    fields = {
        "vocab_size": 260 if shape == "tiny" else 151_936,
        "num_key_value_heads": 2 if shape == "tiny" else 8,
        "head_dim": 32 if shape == "tiny" else 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": shape != "7b",
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**fields | SHAPES[shape] | changes))
    model.to(torch.bfloat16 if device == "cuda" else torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())
