"""Where the weights of a model lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rayhelper import ConfigError

SINGLE = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers looks for them


def model_folder(model: str | Path, *further: str) -> Path:
    """The folder itself, or that of a model of the hub, which is downloaded where it is not there yet.

    ``further``: files that are wanted beside the weights.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(model), allow_patterns=["model*.safetensors", *further]))


def on_disk(model: str) -> str:
    """The folder of a model of the hub that is on this disk already; else the model as it is named."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a path
        return model
    return str(Path(found).parent) if isinstance(found, str) else model


def safetensors_files(folder: Path) -> list[Path]:
    """The files of the weights. Raises FileNotFoundError if there are none."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no model*.safetensors, so it is not a checkpoint of a model")
    return files


def weights_mistake(folder: Path) -> str | None:
    """What is wrong with the files of a model's weights, in words; None: nothing, as far as their headers tell."""
    for single in SINGLE:
        if (folder / single).is_file():
            return file_mistake(folder / single)
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _index_mistake(index)
    return f"it has neither {SINGLE[0]} nor shards with {SINGLE[0]}.index.json"


def generation_mistake(folder: Path) -> str | None:
    """What is wrong with ``generation_config.json``, in words; None: nothing, or the folder has none."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_bytes())
        ends = found.get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return f"{file.name} is not a JSON object"
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if any(type(one) is not int or one < 0 for one in ids):
        return f"{file.name} has eos_token_id {ends!r}, which is not a token id"
    return None


def _index_mistake(index: Path) -> str | None:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{index.name} cannot be read"
    for file in files:
        if not file.is_file():
            return f"{index.name} names {file.name}, which is not there"
        if mistake := file_mistake(file):
            return mistake
    return None


def read_adapter(file: Path) -> dict[str, Any]:
    """The tensors of an adapter, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it is damaged.
    """
    from safetensors.torch import load_file

    if not file.is_file():
        raise FileNotFoundError(
            f"{file.parent} holds no {file.name}, so it is not a checkpoint of a LoRA run or of another tuner"
        )
    if mistake := file_mistake(file):
        raise ConfigError(f"{file.parent} cannot be read: {mistake}. Use another checkpoint.")
    found: dict[str, Any] = load_file(file)
    return found


def file_mistake(file: Path) -> str | None:
    """What is wrong with a file of weights. Of safetensors the header is read, of other files nothing."""
    if file.suffix != ".safetensors":
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            return None
    except (OSError, SafetensorError) as error:
        return f"{file.name} is damaged ({error})"
