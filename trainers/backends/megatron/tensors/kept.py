"""What a checkpoint has beside the tensors that are trained: it comes out of an export byte for byte as it came.

Layers that predict further tokens (``mtp.``), and of a model that also sees what is frozen of its vision tower. Of one
that also hears and speaks the parts for that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from trainers.backends.megatron.tensors.names import BESIDE, SIGHT, canonical

FILES = ("*processor_config.json", "spk_dict.pt")  # of a model that also sees, and of one that speaks


@dataclass(frozen=True)
class KeptTensors:
    """They stay in the files of the model that was loaded, until they are written."""

    files: dict[str, Path] = field(default_factory=dict)  # by name
    sizes: dict[str, int] = field(default_factory=dict)  # bytes, by name
    folder: Path | None = None

    @classmethod
    def of(
        cls, folder: Path, files: Iterable[Path], beside: Collection[str] = BESIDE, without: Collection[str] = ()
    ) -> KeptTensors:
        """``beside``: how names begin of what is kept beside the parts that see; ``without``: what is trained of it."""
        found, sizes = {}, {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    is_kept = canonical(name).startswith(SIGHT) or name.startswith(tuple(beside))
                    if is_kept and name not in without:
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
        """``FILES``, into a folder that may be the same."""
        if self.folder is None or folder.resolve() == self.folder.resolve():
            return
        for pattern in FILES:
            for file in sorted(self.folder.glob(pattern)):
                (folder / file.name).write_bytes(file.read_bytes())


def _bytes_each(dtype: str) -> int:
    """Of a number in safetensors' word for its dtype: F32, BF16, F8_E4M3, BOOL."""
    bits = "".join(character for character in dtype.split("_")[0] if character.isdigit())
    return max(1, int(bits or 8) // 8)
