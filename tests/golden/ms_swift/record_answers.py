"""Writes answers.json: the tokens that ms-swift's own template learns of conversations, by loss_scale.

pip install ms-swift==4.6.0 --no-deps --target FOLDER      # and modelscope, modelscope_hub, cryptography, cffi
PYTHONPATH=FOLDER python -m tests.golden.ms_swift.record_answers > tests/golden/ms_swift/answers.json
"""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

from tests.golden.tiny import tiny_tokenizer

SYSTEM = {"role": "system", "content": "be brief"}
TWO_TURNS = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "two."},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "three."},
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    TWO_TURNS,
    [SYSTEM, *TWO_TURNS],
    [SYSTEM, *TWO_TURNS[:2]],
    [TWO_TURNS[0], {**TWO_TURNS[1], "loss": False}, *TWO_TURNS[2:]],
    [TWO_TURNS[0], {**TWO_TURNS[1], "loss": True}, *TWO_TURNS[2:]],
]
SCALES = ("default", "last_round", "all")


def encoded_by_ms_swift(messages: list[dict[str, Any]], scale: str) -> dict[str, Any]:
    """What ms-swift's template chatml makes of a conversation in training."""
    from swift.template import TemplateInputs, get_template

    tokenizer = tiny_tokenizer()
    tokenizer.model_info = SimpleNamespace(
        config=None, task_type="causal_lm", max_model_len=4096, model_dir=".", torch_dtype=None
    )
    tokenizer.model_meta = SimpleNamespace(is_multimodal=False, template="chatml", model_type="qwen2")
    template = get_template(tokenizer, template_type="chatml", loss_scale=scale)
    template.set_mode("train")
    encoded: dict[str, Any] = template.encode(TemplateInputs.from_dict({"messages": copy.deepcopy(messages)}))
    return encoded


def main() -> None:
    found = []
    for messages in CONVERSATIONS:
        for scale in SCALES:
            encoded = encoded_by_ms_swift(messages, scale)
            learned = [k for k, label in enumerate(encoded["labels"]) if label != -100]
            row = {"messages": messages, "loss_scale": scale, "input_ids": encoded["input_ids"], "learned": learned}
            found.append(row)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
