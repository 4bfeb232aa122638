"""A tokenizer and a model small enough for one core, built in process: nothing is downloaded.

The tokenizer maps every byte to one token, so that any text round-trips; the model is a two-layer Qwen with random
weights. Both save to an ordinary Hugging Face folder, which is what configurations and TRL's reference models need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2 import Qwen2ForCausalLM

SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]  # ids 0, 1, 2, 3
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 260 tokens: pad 0, im_start 1, im_end 2 (the eos), endoftext 3, then one a byte.

    Its ChatML template marks what the assistant wrote with ``{% generation %}``.
    """
    symbols = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


SIZES: dict[str, Any] = {  # of every tiny language model
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
    "initializer_range": 0.1,
}


def tiny_model(seed: int = 0, *, family: str = "qwen3", **config: Any) -> PreTrainedModel:
    """A float32 Qwen (``family`` qwen3 or qwen2), hidden 64, 2 layers, 260 tokens, random weights drawn from ``seed``.

    ``config`` overrides fields of the configuration. The global generator is left as it was.
    """
    fields: dict[str, Any] = {
        **SIZES,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "dtype": "float32",
    }
    if family == "qwen3":
        fields["head_dim"] = 16
    fields |= config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (
            Qwen3ForCausalLM(Qwen3Config(**fields)) if family == "qwen3" else Qwen2ForCausalLM(Qwen2Config(**fields))
        )
    return model.float().eval()


def save_tiny(folder: str | Path, seed: int = 0, *, family: str = "qwen3", **config: Any) -> str:
    """Writes ``tiny_model`` and ``tiny_tokenizer`` to ``folder`` and returns it: a model path as users give one."""
    tiny_model(seed, family=family, **config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
