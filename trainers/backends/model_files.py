"""Where the weights of a model lie."""

from __future__ import annotations

from pathlib import Path


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
