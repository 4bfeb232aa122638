"""The models that golden runs start from, written to one folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from tests.golden.tiny import save_tiny, tiny_model, tiny_tokenizer


def save_models(folder: Path) -> None:
    """policy; policy that drops out; teacher; judge, a reward model; and wide, whose heads suit vLLM."""
    save_tiny(folder / "policy")
    save_tiny(folder / "dropping", attention_dropout=0.1)
    save_tiny(folder / "teacher", seed=1)
    save_tiny(folder / "wide", head_dim=32)
    save_tiny(folder / "wide teacher", seed=1, head_dim=32)
    save_judge(folder / "judge")


def save_judge(folder: Path) -> None:
    """A sequence classifier of one label."""
    fields = tiny_model().config.to_dict() | {"num_labels": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        Qwen3ForSequenceClassification(Qwen3Config(**fields)).float().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    save_models(Path(sys.argv[1]))
