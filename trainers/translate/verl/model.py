"""What verl's trainers share: the model with its adapter, files of rows, nodes, and the keys that are left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainers.configuration.reading.given_keys import plain
from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.names import MODEL

SIZES = ("trainer.nnodes", "trainer.n_gpus_per_node")


def model(theirs: Theirs, ours: Ours, section: str = MODEL, path: str = "path") -> None:
    """The model, its tokenizer and its adapter."""
    ours.say("model", theirs.take(f"{section}.{path}"), theirs, f"{section}.{path}")
    if theirs.take(f"{section}.tokenizer_path"):
        ours.say("tokenizer", theirs.take(f"{section}.tokenizer_path"), theirs, f"{section}.tokenizer_path")
    if theirs.take(f"{section}.custom_chat_template"):
        ours.say(
            "chat_template", theirs.take(f"{section}.custom_chat_template"), theirs, f"{section}.custom_chat_template"
        )
    if theirs.take(f"{section}.trust_remote_code"):
        ours.say("trust_remote_code", True, theirs, f"{section}.trust_remote_code")
    rank_key = f"{section}.lora.rank" if f"{section}.lora.rank" in theirs else f"{section}.lora_rank"
    rank = theirs.take(rank_key)
    part = rank_key.removesuffix("rank")
    if rank:
        ours.say("tuner_type", "lora", theirs, rank_key)
        ours.say("lora_rank", rank, theirs, rank_key)
        ours.say("lora_alpha", theirs.take(f"{part}alpha", 32), theirs, f"{part}alpha")
        targets = theirs.take(f"{section}.target_modules")
        ours.say(
            "lora_target_modules",
            targets if isinstance(targets, list) else [targets],
            theirs,
            f"{section}.target_modules",
        )
        if (excluded := theirs.take(f"{section}.exclude_modules")) is not None:
            ours.say("lora_kwargs", {"exclude_modules": excluded}, theirs, f"{section}.exclude_modules")
    ours.drop(
        theirs,
        [
            *(f"{part}alpha", f"{section}.target_modules", f"{section}.exclude_modules"),
            *(f"{section}.lora.{name}" for name in ("lora_A_init_method", "dtype", "merge", "type")),
        ],
        "LoRA is off, or peft and megatron choose it",
    )


def data_files(theirs: Theirs, ours: Ours) -> None:
    """Rows to learn from, and rows of the evaluation."""
    ours.say("dataset", _files(theirs.take("data.train_files")), theirs, "data.train_files")
    if theirs.take("data.val_files"):
        ours.say("eval_dataset", _files(theirs.take("data.val_files")), theirs, "data.val_files")
    for name in ("train_max_samples", "val_max_samples"):
        if theirs.take(f"data.{name}", -1) not in (-1, None):
            ours.refuse(f"data.{name}", "write dataset: FILE#COUNT, which draws so many rows")


def on_ray(theirs: Theirs, ours: Ours, *further: str) -> int | None:
    """Says nodes and their GPUs; gives the number of all GPUs. None: one of these or of ``further`` is no number."""
    names = (*SIZES, *further)
    values = [theirs.take(name) for name in names]
    if not all(type(one) is int for one in values):
        *short, last = (name.rpartition(".")[2] for name in names)
        told = f"{', '.join(short)} and {last} must be numbers, got {', '.join(map(str, values))}"
        ours.refuse("trainer.nnodes", told)
        return None
    nodes, each, *_ = values
    ours.add("use_ray", True, f"{theirs.system} runs on Ray")
    ours.say("nnodes", nodes, theirs, "trainer.nnodes")
    ours.say("nproc_per_node", each, theirs, "trainer.n_gpus_per_node")
    return int(nodes * each)


def _files(value: Any) -> Any:
    """One file or a list of them; text may say a list."""
    found = plain(value.replace("'", '"')) if isinstance(value, str) and value.startswith("[") else value
    return found[0] if isinstance(found, list) and len(found) == 1 else found


def rest(theirs: Theirs, ours: Ours, refused: Mapping[str, str], without: Mapping[str, str]) -> None:
    """Refuses the keys that are left where they are switched on, and passes over those that change no number."""
    for beginning, reason in refused.items():
        found = [
            name for name in theirs.left() if name == beginning or name.startswith((f"{beginning}.", f"{beginning}_"))
        ]
        for name in found:
            theirs.taken.add(name)
            if theirs.values[name] not in (None, False, {}, []):
                ours.refuse(name, reason)
    for beginning, reason in without.items():
        ours.drop(theirs, [name for name in theirs.left() if name.startswith(beginning)], reason)
