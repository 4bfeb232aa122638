"""A tiny random Qwen3 with a chat template, and rows, for dry runs: ``python examples/tiny_model.py FOLDER``.

Use them as ``--model FOLDER/model --dataset FOLDER/rows.jsonl``. The model knows 4096 positions; its tokens are bytes.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role + '\n' + message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(folder: Path) -> None:
    """Writes ``folder/model`` and ``folder/rows.jsonl``."""
    symbols = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokens.add_special_tokens(SPECIAL)
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    ends = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    PreTrainedTokenizerFast(tokenizer_object=tokens, chat_template=TEMPLATE, **ends).save_pretrained(folder / "model")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **heads}
    set_seed(0)
    ids = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **ids, max_position_embeddings=4096)).save_pretrained(folder / "model")
    pairs = [(f"{n}+{n}=", str(2 * n)) for n in range(64)]
    chats = [[{"role": "user", "content": asked}, {"role": "assistant", "content": right}] for asked, right in pairs]
    rows = [{"messages": chat, "solution": chat[1]["content"]} for chat in chats]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
