"""The side that asks: connections to a ``Server``, or to any other side that takes part in the handshake."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

from rayhelper.authenticated.sealing import Handshake, Session
from rayhelper.authenticated.server import Address

_READ_BYTES = 1 << 16


def dial(address: Address, key: bytes, purpose: str, timeout_s: float) -> tuple[socket.socket, Session]:
    """A connection whose other side has proved that it knows the key.

    Raises:
        AuthenticationError: it has not.
        OSError: nobody is there, or not within ``timeout_s``.
    """
    end = time.monotonic() + timeout_s
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = Handshake(key, purpose, listens=False)
        while handshake.session is None:
            data = _received(connection, end, "during the handshake: it has ended, or has another key")
            reply, _ = handshake.feed(data)
            connection.sendall(reply)
        return connection, handshake.session
    except BaseException:
        connection.close()
        raise


class Client:
    """A connection to a ``Server``; from any thread."""

    def __init__(self, address: Address, key: bytes, purpose: str, timeout_s: float) -> None:
        """Raises what ``dial`` raises."""
        self.connection, self._session = dial(address, key, purpose, timeout_s)
        self._lock = threading.Lock()

    def ask(self, question: Any, timeout_s: float) -> Any:
        """The answer. Raises OSError if the server has gone or does not answer in time."""
        with self._lock:
            end = time.monotonic() + timeout_s
            self.connection.settimeout(timeout_s)
            self.connection.sendall(self._session.seal(json.dumps(question).encode()))
            payloads: list[bytes] = []
            while not payloads:
                payloads = self._session.feed(_received(self.connection, end))
            return json.loads(payloads[0])

    def close(self) -> None:
        """Again is harmless."""
        self.connection.close()


def _received(connection: socket.socket, end: float, when: str = "") -> bytes:
    """What arrives next, until the clock shows ``end``. Raises OSError."""
    connection.settimeout(max(0.001, end - time.monotonic()))
    data = connection.recv(_READ_BYTES)
    if not data:
        raise ConnectionError(f"the other side closed the connection {when}".rstrip())
    return data
