"""What a worker answers to a call: the value, packed if that is worth it, and shards that it reported meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rayhelper.values.packing import Ledger, Packed, unpack
from rayhelper.values.shards import Reports


@dataclass(frozen=True)
class Reported:
    """A value together with the shards that the worker reported since the last call."""

    value: Any
    shards: Reports


def opened(reply: Any, *, writable: bool = False, ledger: Ledger | None = None) -> Any:
    """The value of a worker's reply."""
    value = reply.value if isinstance(reply, Reported) else reply
    return unpack(value, writable=writable, ledger=ledger) if type(value) is Packed else value
