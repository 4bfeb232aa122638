"""What a worker answers to a call: the value, packed if that is worth it, and what else its driver must know.

That is: shards that the worker reported meanwhile, and names of attributes that the call has changed there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayhelper.values.packing import Ledger, Packed, unpack
from rayhelper.values.shards import Reports

Changes = dict[str, dict[str, str]]  # by address and attribute: the method that has changed it, as messages name it


@dataclass(frozen=True)
class Reported:
    """A value together with what the worker reports since the last call."""

    value: Any
    shards: Reports
    changes: Changes = field(default_factory=dict)


def opened(reply: Any, *, writable: bool = False, ledger: Ledger | None = None) -> Any:
    """The value of a worker's reply."""
    value = reply.value if isinstance(reply, Reported) else reply
    return unpack(value, writable=writable, ledger=ledger) if type(value) is Packed else value
