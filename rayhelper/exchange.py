"""What the processes of a torchrun run tell one another: every process's object, on every process.

A gloo group of its own, over the store that torchrun's environment names, so that the default group stays the user's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rayhelper.packing import pack, unpack

_TOGETHER_BYTES = 64 * 1024  # up to here all are gathered at once, above one is sent after the other


class Exchange:
    """The processes of this run, ``size`` of them, of which this is ``rank``."""

    def __init__(self, rank: int, size: int) -> None:
        import torch.distributed as dist

        self.rank = rank
        self.size = size
        self.closed = False
        self.received_bytes = 0  # by the last gathering
        rendezvous: Any = vars(dist)["rendezvous"]
        self.store, _, _ = next(iter(rendezvous("env://", rank, size)))
        gloo: Any = dist.ProcessGroupGloo
        self.group = gloo(self.store_of("exchange"), rank, size, timedelta(seconds=300))

    def store_of(self, name: str) -> Any:
        """A part of the store with names of its own."""
        import torch.distributed as dist

        return dist.PrefixStore(f"rayhelper/{name}", self.store)  # type: ignore[attr-defined]

    def gather(self, value: Any, flag: Callable[[], bool], timeout_s: float) -> list[tuple[Any, bool]]:
        """Every process's value, in order of rank, each with its flag, which is read as late as possible.

        Raises:
            TimeoutError: not every process came within ``timeout_s``.
            ConnectionError: a process is gone.
        """
        import torch

        packed = pickle.dumps(pack(value), protocol=5)
        sizes = [int(size) for size in self._all(torch.tensor([1 + len(packed)]), timeout_s)]
        text = torch.frombuffer(bytearray(bytes([flag()]) + packed), dtype=torch.uint8)  # all have come by now
        if max(sizes) <= _TOGETHER_BYTES:
            texts = self._all(torch.nn.functional.pad(text, (0, max(sizes) - len(text))), timeout_s)
        else:
            texts = [self._from(source, text, size, timeout_s) for source, size in enumerate(sizes)]
        received = [text[:size].numpy() for text, size in zip(texts, sizes, strict=True)]
        self.received_bytes = sum(sizes)
        return [(unpack(pickle.loads(text[1:]), writable=True), bool(text[0])) for text in received]

    def _all(self, tensor: Any, timeout_s: float) -> list[Any]:
        """The tensors of all processes, which have one shape."""
        import torch
        import torch.distributed as dist

        received = [torch.empty_like(tensor) for _ in range(self.size)]
        options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.timeout = timedelta(seconds=timeout_s)
        self._waited(lambda: self.group.allgather([received], [tensor], options), timeout_s)
        return received

    def _from(self, source: int, own: Any, size: int, timeout_s: float) -> Any:
        """The tensor of one process."""
        import torch
        import torch.distributed as dist

        text = own if source == self.rank else torch.empty(size, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, timedelta(seconds=timeout_s)
        self._waited(lambda: self.group.broadcast([text], options), timeout_s)
        return text

    def _waited(self, start: Callable[[], Any], timeout_s: float) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise TimeoutError(f"not every process came within {timeout_s:g} s ({error})") from None
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        """Leaves the group."""
        self.closed = True
        self.group = None
        self.store = None
