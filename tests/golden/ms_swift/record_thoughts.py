"""Writes thoughts.json: what ms-swift's templates make of conversations with thoughts, at its defaults.

PYTHONPATH=. PYTHON_OF_MS_SWIFT -m tests.golden.ms_swift.record_thoughts > tests/golden/ms_swift/thoughts.json

Its Python is that of record_steps.py. Each row is encoded as a command of SFT, or of DPO, does it.
"""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

from tests.golden.tiny import tiny_tokenizer

HYBRID = "+ignore_empty_think"  # which a command adds to loss_scale for models that may think or not
ASKED = [{"role": "user", "content": text} for text in ("one?", "and? ", "so?")]
THOUGHTS = ["<think>\nhm\n</think>\n\ntwo.", "three. ", "<think>\nah\n</think>\n\n four."]
CALL = '<tool_call>\n{"name": "w", "arguments": {}}\n</tool_call>'
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "thoughts, none, thoughts": [
        turn
        for asked, said in zip(ASKED, THOUGHTS, strict=True)
        for turn in (asked, {"role": "assistant", "content": said})
    ],
    "thoughts, none": [
        {"role": "system", "content": "be brief"},
        ASKED[0],
        {"role": "assistant", "content": THOUGHTS[0]},
        ASKED[1],
        {"role": "assistant", "content": THOUGHTS[1]},
    ],
    "one answer": [ASKED[0], {"role": "assistant", "content": "two."}],
    "only one is learned": [
        ASKED[0],
        {"role": "assistant", "content": THOUGHTS[0], "loss": False},
        ASKED[1],
        {"role": "assistant", "content": "<think>\n\n</think>\n\nthree."},
    ],
    "a tool": [
        ASKED[0],
        {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{CALL}"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "it is 5."},
    ],
}
TEMPLATES = {  # the chat template that TRL has of such a model, and ms-swift's name
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3_5",
    "qwen3_thinking": "qwen3_thinking",  # which always thinks: written in the test
}
SETTINGS: list[dict[str, Any]] = [
    {"loss_scale": "default"},
    {"loss_scale": "last_round"},
    {"loss_scale": "default", "preserve_thinking": False},
    {"loss_scale": "last_round", "preserve_thinking": True},
    {"loss_scale": "default", "add_non_thinking_prefix": False},
]


def template_of(name: str, mode: str, **settings: Any) -> Any:
    from swift.template import get_template

    tokenizer = tiny_tokenizer()
    told = {"config": None, "task_type": "causal_lm", "max_model_len": 4096, "model_dir": ".", "torch_dtype": None}
    tokenizer.model_info = SimpleNamespace(**told)
    tokenizer.model_meta = SimpleNamespace(is_multimodal=False, template=name, model_type="qwen3")
    if name != "qwen3_thinking":
        settings["loss_scale"] += HYBRID
    template = get_template(tokenizer, template_type=name, **settings)
    template.set_mode(mode)
    return template


def encoded(template: Any, row: dict[str, Any]) -> dict[str, Any]:
    from swift.template import TemplateInputs

    found: dict[str, Any] = template.encode(TemplateInputs.from_dict(copy.deepcopy(row)))
    return found


def learned(labels: list[int]) -> list[int]:
    return [place for place, label in enumerate(labels) if label != -100]


def main() -> None:
    supervised, pairs = [], []
    for ours, theirs in TEMPLATES.items():
        for settings in SETTINGS:
            template = template_of(theirs, "train", **settings)
            for name, messages in CONVERSATIONS.items():
                found = encoded(template, {"messages": messages})
                case = {"template": ours, "settings": settings, "name": name, "messages": messages}
                supervised.append(case | {"input_ids": found["input_ids"], "learned": learned(found["labels"])})
        for scale in ("last_round", "default"):  # of most trainers, and of ORPO
            template = template_of(theirs, "rlhf", loss_scale=scale)
            for name in ("thoughts, none", "one answer", "thoughts, none, thoughts"):
                row = {"messages": CONVERSATIONS[name], "rejected_response": "no."}
                found = encoded(template, row)
                case = {"template": ours, "name": name, "loss_scale": scale, **row}
                for side in ("chosen", "rejected"):
                    ids, labels = found[f"{side}_input_ids"], found[f"{side}_labels"]
                    case[side] = {"input_ids": ids, "learned": learned(labels)}
                pairs.append(case)
    print(json.dumps({"supervised": supervised, "pairs": pairs}))


if __name__ == "__main__":
    main()
