"""A table of names and values that processes which know one key share: there they learn of each other.

    point = MeetingPoint("10.0.0.1", key, "channel 7")                      # on one process
    client = Client(point.address, key, "channel 7", timeout_s=60)          # on the others
    put(client, "sender", [address, port], 60); find(client, "sender", 60)  # any value that JSON has
    store_over(client, timeout_s=60)                                        # the same for torch's process groups

Strangers can neither read it nor write to it, other than a ``TCPStore``, which has no password.
"""

from __future__ import annotations

import base64
import functools
import time
from datetime import timedelta
from typing import Any

from rayhelper.authenticated.client import Client
from rayhelper.authenticated.server import Server

_LOOK_S = 0.002  # how often it is looked whether a name is there


class MeetingPoint:
    """The process that keeps the table. Raises OSError if the machine does not have the address ``host``."""

    def __init__(self, host: str, key: bytes, purpose: str) -> None:
        table: dict[str, Any] = {}
        self.server = Server(host, key, purpose, functools.partial(_answered, table), "rayhelper-meeting")
        self.address = self.server.address
        self.close = self.server.close


def put(client: Client, name: str, value: Any, timeout_s: float) -> None:
    """From now on all find ``value`` by this name."""
    client.ask(["put", name, value], timeout_s)


def find(client: Client, name: str, timeout_s: float) -> Any:
    """The value of this name; None if it has none yet."""
    return client.ask(["find", name], timeout_s)


def _answered(table: dict[str, Any], question: list[Any]) -> Any:
    operation, name, *values = question
    if operation == "find":
        return table.get(name)
    if operation == "put":
        table[name] = values[0]
        return None
    if operation == "remove":
        return table.pop(name, None) is not None
    if operation == "add":  # as torch's stores, which write numbers as text
        number = int(base64.b64decode(table.get(name, "")) or 0) + values[0]
        table[name] = base64.b64encode(str(number).encode()).decode()
        return number
    if operation == "exchange":
        expected, desired = values
        if table.get(name, expected) == expected:
            table[name] = desired
        return table[name]
    raise ValueError(f"a meeting point does not support {operation!r}")


def store_over(client: Client, timeout_s: float) -> Any:
    """A ``torch.distributed.Store`` in the table that the client reaches; to be kept as long as a group uses it."""
    return _store_class()(client, timeout_s)


@functools.cache
def _store_class() -> Any:
    from torch.distributed import Store  # type: ignore[attr-defined]

    class MeetingStore(Store):
        """As torch describes its stores: ``get`` and ``wait`` wait until a key is set."""

        def __init__(self, client: Client, timeout_s: float) -> None:
            super().__init__()
            self.client, self.timeout_s = client, timeout_s

        def set(self, key: str, value: bytes | str) -> None:
            put(self.client, key, _text(value), self.timeout_s)

        def get(self, key: str) -> bytes:
            return base64.b64decode(self._waited(key, self.timeout_s))

        def add(self, key: str, value: int) -> int:
            return int(self.client.ask(["add", key, value], self.timeout_s))

        def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
            question = ["exchange", key, _text(expected), _text(desired)]
            return base64.b64decode(self.client.ask(question, self.timeout_s))

        def delete_key(self, key: str) -> bool:
            return bool(self.client.ask(["remove", key], self.timeout_s))

        def check(self, keys: list[str]) -> bool:
            return all(find(self.client, key, self.timeout_s) is not None for key in keys)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            for key in keys:
                self._waited(key, self.timeout_s if timeout is None else timeout.total_seconds())

        def set_timeout(self, timeout: timedelta) -> None:
            self.timeout_s = timeout.total_seconds()

        def _waited(self, key: str, timeout_s: float) -> str:
            end = time.monotonic() + timeout_s
            while (value := find(self.client, key, self.timeout_s)) is None:
                if time.monotonic() > end:
                    raise TimeoutError(f"nobody has set {key!r} within {timeout_s:g} s")
                time.sleep(_LOOK_S)
            return str(value)

    return MeetingStore


def _text(value: bytes | str) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()
