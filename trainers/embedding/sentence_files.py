"""The files by which sentence-transformers knows an embedding model: read, and written beside a trained one.

modules.json              the parts: a transformer, pooling, and perhaps a normalization
1_Pooling/config.json     what of the hidden states is the embedding
config_sentence_transformers.json, sentence_bert_config.json      kept as they are
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayhelper import ConfigError
from trainers.embedding.config import Pooling

MODULES = "modules.json"
KEPT = (MODULES, "config_sentence_transformers.json", "sentence_bert_config.json")
MODES: dict[str, Pooling] = {  # by sentence-transformers' keys, and by the values of its pooling_mode
    **{"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"},
    **{"lasttoken": "last", "mean": "mean", "cls": "cls"},
}
PACKAGE = "sentence_transformers.models"


@dataclass(frozen=True)
class SentenceFiles:
    """What the files say; without any, ``folders`` is empty and embeddings have length 1."""

    pooling: Pooling | None = None
    normalize: bool = True
    folders: tuple[str, ...] = ()

    @property
    def are_there(self) -> bool:
        return bool(self.folders)


def sentence_files(model: str) -> SentenceFiles:
    """The files of a folder or hub name.

    Raises:
        ConfigError: a part or a pooling that is not built here.
    """
    modules = _read(model, MODULES)
    if modules is None:
        return SentenceFiles()
    pooling: Pooling | None = None
    normalizes = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(model, f"{module['path']}/config.json")
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise ConfigError(
                f"model: {MODULES} of {model!r} has a part {kind}, which is not supported. A transformer, pooling "
                "and a normalization are supported"
            )
    return SentenceFiles(pooling, normalizes, tuple(str(module.get("path", "")) for module in modules))


def write_sentence_files(folder: Path, model: str, files: SentenceFiles, pooling: Pooling, hidden_size: int) -> None:
    """Writes them beside a trained model: those of the model that it began as, or new ones. One process calls it."""
    if files.are_there:
        for name in (*KEPT, *(f"{path}/config.json" for path in files.folders if path)):
            if (found := _path(model, name)) is not None:
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(found, folder / name)
    else:
        kinds = ("Transformer", "Pooling", "Normalize")
        paths = ("", "1_Pooling", "2_Normalize")
        modules = [
            {"idx": number, "name": str(number), "path": path, "type": f"{PACKAGE}.{kind}"}
            for number, (path, kind) in enumerate(zip(paths, kinds, strict=True))
        ]
        for path in paths:
            (folder / path).mkdir(exist_ok=True)
        (folder / MODULES).write_text(json.dumps(modules, indent=2))
    if not files.are_there or files.pooling != pooling:
        place = next((path for path in files.folders if "Pooling" in path), "1_Pooling")
        modes = {name: mode == pooling for name, mode in MODES.items() if name.startswith("pooling_mode")}
        (folder / place).mkdir(exist_ok=True)
        config = {"word_embedding_dimension": hidden_size, **modes}
        (folder / place / "config.json").write_text(json.dumps(config, indent=2))


def _pooling(model: str, name: str) -> Pooling:
    config = _read(model, name) or {}
    said = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    said = [str(config["pooling_mode"])] if not said and "pooling_mode" in config else said
    if len(said) != 1 or said[0] not in MODES:
        raise ConfigError(
            f"model: {name} of {model!r} has pooling by {', '.join(said) or 'nothing'}. Last token, mean and cls are "
            "supported; write pooling to choose one"
        )
    return MODES[said[0]]


def _read(model: str, name: str) -> Any:
    found = _path(model, name)
    return None if found is None else json.loads(found.read_text(encoding="utf-8"))


def _path(model: str, name: str) -> Path | None:
    """A file of the model; None: it has none of that name, or it cannot be reached."""
    from huggingface_hub import hf_hub_download

    if Path(model).is_dir():
        return Path(model, name) if Path(model, name).is_file() else None
    try:
        return Path(hf_hub_download(model, name))
    except (OSError, ValueError):
        return None
