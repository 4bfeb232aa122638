"""A thread that answers the questions of those who know the key.

Visitors are served in turns, as their bytes arrive. So a silent one holds nobody up, and it is shown out after a few
seconds; of those who have not proved that they know the key only so many are let in at a time, the newest.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from rayhelper.authenticated.sealing import Handshake, Session

HANDSHAKE_S = 5.0  # how long a visitor may take to prove that it knows the key
MAX_STRANGERS = 64  # visitors that have yet to prove it
_SEND_S = 2.0  # how long a visitor may take to take an answer
_PAUSE_S = 0.01
_READ_BYTES = 1 << 16

Address = tuple[str, int]


class Server:
    """Answers questions at one address of this machine.

    host: the address to listen on.
    key, purpose: what a visitor must know (``Handshake``).
    answer: from a question to its answer, both of what JSON has. A visitor whose question raises is shown out.
    name: of the thread.
    """

    def __init__(self, host: str, key: bytes, purpose: str, answer: Callable[[Any], Any], name: str) -> None:
        self._listener = listener(host)
        self._key, self._purpose, self._answer = key, purpose, answer
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._visitors: dict[socket.socket, Visitor] = {}
        self.address: Address = self._listener.getsockname()[:2]
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Nobody is answered any more, and every connection ends. Again is harmless."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if threading.current_thread() is not self.thread:
            self.thread.join(10.0)
        if not self.thread.is_alive():
            self._wake.close()

    def _serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(self._show_out_late()):
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._let_in()
                    elif key.fileobj in self._visitors:  # it may have been shown out in this turn
                        self._hear(self._visitors[key.fileobj])
        finally:
            for visitor in list(self._visitors.values()):
                self._show_out(visitor)
            self._selector.close()
            self._listener.close()
            self._woken.close()

    def _strangers(self) -> list[Visitor]:
        return [visitor for visitor in self._visitors.values() if visitor.session is None]

    def _show_out_late(self) -> float | None:
        """Ends connections of those who took too long; seconds until the next does."""
        now = time.monotonic()
        for visitor in self._strangers():
            if visitor.until <= now:
                self._show_out(visitor)
        return min((visitor.until - now for visitor in self._strangers()), default=None)

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left already, or this process has no descriptor left, and should not ask without pause
            time.sleep(_PAUSE_S)
            return
        strangers = self._strangers()
        if len(strangers) >= MAX_STRANGERS:
            self._show_out(min(strangers, key=lambda visitor: visitor.until))
        visitor = Visitor(connection, Handshake(self._key, self._purpose, listens=True))
        self._visitors[connection] = visitor
        self._selector.register(connection, selectors.EVENT_READ)
        self._guarded(visitor, visitor.greet)

    def _hear(self, visitor: Visitor) -> None:
        def answer() -> None:
            for payload in visitor.read():
                reply = json.dumps(self._answer(json.loads(payload))).encode()
                assert visitor.session is not None, "payloads come behind the handshake"
                visitor.send(visitor.session.seal(reply))

        self._guarded(visitor, answer)

    def _guarded(self, visitor: Visitor, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # of any type: the visitor does not know the key, has left, or asked what nobody can answer
            self._show_out(visitor)

    def _show_out(self, visitor: Visitor) -> None:
        del self._visitors[visitor.connection]
        self._selector.unregister(visitor.connection)
        visitor.connection.close()


class Visitor:
    """Somebody who connected, and who may turn out to know the key."""

    def __init__(self, connection: socket.socket, handshake: Handshake) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.connection = connection
        self.handshake = handshake
        self.until = time.monotonic() + HANDSHAKE_S  # it is shown out then if it has not proved it

    @property
    def session(self) -> Session | None:
        return self.handshake.session

    def greet(self) -> None:
        """Sends what comes first."""
        self.send(self.handshake.start())

    def read(self) -> list[bytes]:
        """The payloads that have arrived. Raises ConnectionError: the stream has ended, or is not authentic."""
        try:
            data = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("end of stream")
        if self.session is not None:
            return self.session.feed(data)
        reply, payloads = self.handshake.feed(data)
        self.send(reply)
        return payloads

    def send(self, data: bytes) -> None:
        self.connection.settimeout(_SEND_S)
        try:
            self.connection.sendall(data)
        finally:
            self.connection.setblocking(False)


def listener(host: str) -> socket.socket:
    """A socket that listens at a port of this one address. Raises OSError if the machine does not have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024)
