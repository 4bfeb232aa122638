"""What a checkpoint has beside the tensors that are trained: it comes out of an export byte for byte as it came.

Layers that predict further tokens (``mtp.``), and what is frozen of the vision tower of a model that also sees.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

TOWER = ("model.visual.", "visual.")  # beginnings of names; the second in files of Qwen2.5-VL
KEPT = ("mtp.", *TOWER)
FILES = "*processor_config.json"  # of the processor, which a model that also sees has


@dataclass(frozen=True)
class KeptTensors:
    """They stay in the files of the model that was loaded, until they are written."""

    files: dict[str, Path] = field(default_factory=dict)  # by name
    sizes: dict[str, int] = field(default_factory=dict)  # bytes, by name
    folder: Path | None = None

    @classmethod
    def of(
        cls, folder: Path, files: Iterable[Path], beginnings: tuple[str, ...] = KEPT, without: Collection[str] = ()
    ) -> KeptTensors:
        """``without``: names of tensors that are trained."""
        found, sizes = {}, {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name.startswith(beginnings) and name not in without:
                        found[name] = file
                        tensor = opened.get_slice(name)
                        sizes[name] = math.prod(tensor.get_shape()) * _bytes_each(tensor.get_dtype())
        return cls(found, sizes, folder)

    def read(self, name: str) -> Tensor:
        """Raises FileNotFoundError where the model's files are gone."""
        with safe_open(self.files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def copy_files(self, folder: Path) -> None:
        """Those of the processor, into a folder that may be the same."""
        for file in sorted(self.folder.glob(FILES)) if self.folder is not None else ():
            if folder.resolve() != file.parent.resolve():
                (folder / file.name).write_bytes(file.read_bytes())


def _bytes_each(dtype: str) -> int:
    """Of a number in safetensors' word for its dtype: F32, BF16, F8_E4M3, BOOL."""
    bits = "".join(character for character in dtype.split("_")[0] if character.isdigit())
    return max(1, int(bits or 8) // 8)
