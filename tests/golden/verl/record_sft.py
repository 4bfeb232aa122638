"""Writes sft.json: the rows and learned tokens of verl's own MultiTurnSFTDataset, which its sft_trainer reads.

pip install --no-deps --target FOLDER verl==0.9.1 tensordict omegaconf hydra-core codetiming pyvers torchdata
PYTHONPATH=FOLDER python -m tests.golden.verl.record_sft > tests/golden/verl/sft.json

verl 0.9.1 is written for transformers 4, where apply_chat_template gives ids.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.tiny import tiny_tokenizer

CONVERSATIONS = [
    [("user", "hi"), ("assistant", "yes")],
    [("system", "Be short."), ("user", "2+2?"), ("assistant", "It is 4"), ("user", "3?"), ("assistant", "No")],
    [("user", ""), ("assistant", "")],
    [("user", "a\n\nb"), ("assistant", "one\ntwo\n"), ("user", "and?")],
    [("assistant", "I begin"), ("user", "well"), ("assistant", " spaces  ")],
]


def conversations() -> list[list[dict[str, str]]]:
    return [[{"role": role, "content": text} for role, text in one] for one in CONVERSATIONS]


def main() -> None:
    import pandas
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    tokenizer: Any = tiny_tokenizer()
    of_library = type(tokenizer).apply_chat_template

    def gives_ids(*args: Any, **kwargs: Any) -> Any:
        return of_library(*args, **{"return_dict": False, **kwargs})

    type(tokenizer).apply_chat_template = gives_ids
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        file = str(Path(folder) / "rows.parquet")
        pandas.DataFrame({"messages": conversations()}).to_parquet(file)
        dataset = MultiTurnSFTDataset(file, tokenizer, {"max_length": 256})
        rows = [dataset[k] for k in range(len(dataset))]
    told = []
    for row in rows:
        length = int(row["attention_mask"].sum())
        ids, is_learned = row["input_ids"][:length], row["loss_mask"][:length].bool()
        is_learned[0] = False  # nothing predicts it
        told.append({"input_ids": ids.tolist(), "learned": is_learned.nonzero()[:, 0].tolist()})
    print("[" + ",\n".join(map(json.dumps, told)) + "]")


if __name__ == "__main__":
    main()
