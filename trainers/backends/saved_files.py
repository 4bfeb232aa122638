"""What a checkpoint holds beside safetensors and JSON, read without running code that somebody may have put there.

Pickle runs whatever a file tells it to. Here a file may hold tensors, numbers, text and plain containers, and the few
classes that a function names; anything else is refused, and nothing of the file has run then.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from rayhelper import ConfigError

# What the ``.metadata`` of torch.distributed.checkpoint holds. Left out on purpose: ``BytesStorageMetadata``, for which
# torch would unpickle a part of a data file without any limit.
METADATA_CLASSES = {
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},  # the layout that a text names
}
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def read_saved(path: Path) -> Any:
    """What ``torch.save`` wrote, on the CPU: tensors, numbers, text and plain containers.

    Raises:
        ConfigError: the file asks for anything else; nothing of it was run.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there, so the checkpoint is not whole. Use another checkpoint.") from None
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:  # the last four: cut files
        raise _refused(path, str(error)) from None


def check_distributed(folder: Path) -> None:
    """Returns if torch and megatron-core may read the folder of a distributed checkpoint.

    They unpickle ``.metadata`` and ``common.pt``; the tensors themselves they read with ``weights_only``.

    Raises:
        ConfigError: a file holds what no such checkpoint holds; nothing of it was run.
    """
    if json.loads((folder / "metadata.json").read_text(encoding="utf-8")) != FORMAT:
        raise ConfigError(f"{folder / 'metadata.json'} has another format than {FORMAT}. Use another checkpoint.")
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise
    except Exception as error:  # of any type: bytes that are no pickle raise many
        raise _refused(path, str(error)) from None
    read_saved(folder / "common.pt")


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of ``METADATA_CLASSES`` and torch's dtypes only."""

    def find_class(self, module: str, name: str) -> Any:
        if name in METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _refused(path: Path, reason: str) -> ConfigError:
    named = re.search(r"GLOBAL (\S+)", reason)
    told = f"it asks for {named[1]}" if named else "torch.save did not write it"
    return ConfigError(
        f"{path} is not read: {told}, and a checkpoint of these trainers holds tensors, numbers and text only. Nothing "
        "of it was run. It was changed, damaged, or written by another program: use another checkpoint."
    )
