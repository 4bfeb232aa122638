"""Two-digit addition, made from nothing: the problems, and a tiny transformer that has learned a little of them.

    "12+34="  ->  "46"      one token a character

Registers, for ``external_plugins``: the dataset ``addition``, whose splits ``train`` and ``test`` share no problem; the
reward ``correct_sum``; and the model ``addition``, which starts out solving 15 to 35 % of the problems.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rayhelper import RayHelper
from trainers.plugins import register_dataset, register_model, register_reward

CHARACTERS = "0123456789+="
NUM_TEST_PROBLEMS = 500
WARM_START_STEPS = 150


@register_dataset("addition")
def addition(split: str) -> list[dict[str, str]]:
    """The sums of all pairs of two-digit numbers, in an order of their own: the first 500 are ``test``."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    order = np.random.default_rng(0).permutation(len(pairs))
    chosen = order[:NUM_TEST_PROBLEMS] if split == "test" else order[NUM_TEST_PROBLEMS:]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in (pairs[k] for k in chosen)]


@register_reward("correct_sum")
def correct_sum(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion is the sum and nothing else."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


@register_model("addition")
def warm_start(output_dir: Path, seed: int) -> Path:
    """The folder of a model that was taught some addition by SFT; GRPO teaches it the rest."""
    from trainers.sft import SFTConfig, SFTTrainer

    untrained = output_dir / "untrained"
    write_tokenizer(untrained)
    write_model(untrained, seed)
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in addition("train")]
    config = SFTConfig(
        model=str(untrained),
        dataset=rows,
        output_dir=str(output_dir / "warm_start"),
        seed=seed,
        max_steps=WARM_START_STEPS,
        per_device_train_batch_size=128,
        learning_rate=2e-3,
        warmup_steps=20,
        lr_scheduler_type="constant_with_warmup",
        logging_steps=50,
        save_steps=0,
        report_to=["none"],
    )
    with RayHelper.local():  # this comes before GRPO's workers are asked for anything, and is soon done
        SFTTrainer(config).train()
    return output_dir / "warm_start" / "final"


def write_tokenizer(folder: Path) -> None:
    """Saves a tokenizer whose tokens are characters."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: k for k, token in enumerate([*CHARACTERS, "<pad>", "<eos>"])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)


def write_model(folder: Path, seed: int) -> None:
    """Saves a Qwen3 of 0.13 million random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    set_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    tokens = {"vocab_size": len(CHARACTERS) + 2, "pad_token_id": 12, "eos_token_id": 13, "bos_token_id": None}
    config = Qwen3Config(
        **sizes,
        **heads,
        **tokens,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10.0},  # sequences have ten tokens
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
