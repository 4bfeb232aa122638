"""What a worker answers to a call: the value, packed if that is worth it, and what else its driver must know.

That is: shards that the worker reported, and names of attributes and arguments that the call has changed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from rayhelper.values.packing import Ledger, Packed, unpack
from rayhelper.values.shards import Reports


class Changes(NamedTuple):
    """What calls have changed on a worker, and the driver has another copy of."""

    attributes: dict[str, dict[str, str]]  # by address and name: the method that has changed it, as messages name it
    others: list[tuple[str, str]]  # methods, and what they change of their arguments and classes, as messages name it


@dataclass(frozen=True)
class Reported:
    """A value together with what the worker reports since the last call."""

    value: Any
    shards: Reports
    changes: Changes | None = None


def opened(reply: Any, *, writable: bool = False, ledger: Ledger | None = None) -> Any:
    """The value of a worker's reply."""
    value = reply.value if isinstance(reply, Reported) else reply
    return unpack(value, writable=writable, ledger=ledger) if type(value) is Packed else value
