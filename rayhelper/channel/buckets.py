"""How named tensors are laid into flat buckets of bytes, and read out of them again.

A bucket holds many small tensors, each at a multiple of ``ALIGNMENT``; a tensor larger than a bucket spans several. A
tensor that would fit into an empty bucket is never cut, so that it can be read in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rayhelper.errors import ChannelError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64  # bytes
BLOCK = 4096  # bytes; what is in use of a bucket is a multiple of it


class Piece(NamedTuple):
    """Bytes [start, start + nbytes) of one tensor, at ``offset`` of a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    offset: int
    nbytes: int

    @property
    def is_last(self) -> bool:
        """Whether the tensor is complete with this piece."""
        return self.start + self.nbytes == self.tensor_bytes

    @property
    def tensor_bytes(self) -> int:
        return math.prod(self.shape) * _dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Bucket:
    """A filled bucket: the first ``used`` bytes count."""

    data: torch.Tensor  # uint8
    used: int
    pieces: list[Piece]


def checked(named_tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same items, one by one. Raises ChannelError for a name that came before and for what is no plain tensor."""
    import torch

    seen = set()
    for name, tensor in named_tensors:
        if name in seen:
            raise ChannelError(f"two tensors are named {name!r}. Send each name once.")
        seen.add(name)
        if not isinstance(tensor, torch.Tensor):
            raise ChannelError(f"{name!r} is a {type(tensor).__name__}, not a tensor.")
        if hasattr(tensor, "full_tensor"):
            raise ChannelError(f"{name!r} is distributed over several processes. Send tensor.full_tensor().")
        if tensor.is_meta or tensor.layout != torch.strided:
            raise ChannelError(f"{name!r} holds no plain data (device {tensor.device}, layout {tensor.layout}).")
        yield name, tensor.detach()


def fill(
    named_tensors: Iterable[tuple[str, torch.Tensor]], empty_bucket: Callable[[], torch.Tensor], device: torch.device
) -> Iterator[Bucket]:
    """Buckets as they become full; ``empty_bucket`` is asked for room once a bucket; tensors are taken one at a time.

    Copies from ``device``, if that is a GPU, are only queued on its current stream.
    """
    data, used, pieces = empty_bucket(), 0, list[Piece]()
    for name, tensor in named_tensors:
        flat, start = _bytes_of(tensor), 0
        while start < len(flat) or not len(flat):
            room = len(data) - used
            if room == 0 or (start == 0 and room < len(flat) <= len(data)):
                yield Bucket(data, _rounded(used, BLOCK), pieces)
                data, used, pieces = empty_bucket(), 0, []
                room = len(data)
            nbytes = min(room, len(flat) - start)
            data[used : used + nbytes].copy_(
                flat[start : start + nbytes], non_blocking=flat.is_cuda and flat.device == device
            )
            pieces.append(Piece(name, str(tensor.dtype), tuple(tensor.shape), start, used, nbytes))
            used, start = _rounded(used + nbytes, ALIGNMENT), start + nbytes
            if not nbytes:
                break
    yield Bucket(data, _rounded(used, BLOCK), pieces)


class Reader:
    """Turns pieces back into tensors.

    ``copy``: whether a tensor that lies in one bucket on ``device`` is copied out of it. Copies to a GPU are only
    queued on its current stream.
    """

    def __init__(self, device: torch.device, copy: bool) -> None:
        self.device = device
        self.copy = copy
        self._partial: torch.Tensor | None = None  # uint8, of a tensor that spans buckets

    def read(self, piece: Piece, data: torch.Tensor) -> torch.Tensor | None:
        """The tensor that ends with this piece of the bucket ``data``; None if more pieces are to come."""
        import torch

        found = data[piece.offset : piece.offset + piece.nbytes]
        queued = self.device.type == "cuda"
        if piece.nbytes == piece.tensor_bytes:
            tensor = found.to(self.device, non_blocking=queued, copy=self.copy)
        else:
            if piece.start == 0:
                self._partial = torch.empty(piece.tensor_bytes, dtype=torch.uint8, device=self.device)
            assert self._partial is not None, "a tensor begins with its first piece"
            self._partial[piece.start : piece.start + piece.nbytes].copy_(found, non_blocking=queued)
            if not piece.is_last:
                return None
            tensor, self._partial = self._partial, None
        return tensor.view(_dtype(piece.dtype)).view(piece.shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype
