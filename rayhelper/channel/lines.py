"""The TCP connections over which both sides of a channel tell each other what to do next, and notice a death.

Messages are small JSON objects, each with a code that only those who know the channel's key can make; the tensors'
bytes travel elsewhere (``transports.py``). A process that dies, however it dies, closes its connections, and whoever
waits here is told at once. Every wait also watches a connection to the driver, so that a channel that was closed there,
or whose driver died, ends too.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from rayhelper.authenticated.sealing import AuthenticationError, Session
from rayhelper.errors import ChannelError, DeadlineError

Message = dict[str, Any]
_READ_BYTES = 1 << 20


class Line:
    """One connection to a peer, and the messages that came over it and were not taken yet."""

    def __init__(self, connection: socket.socket, session: Session, peer: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.connection = connection
        self.session = session
        self.peer = peer
        self.inbox: deque[Message] = deque()
        self.ended = False  # whether the peer has left when nothing more was asked of it

    def read(self) -> None:
        """Takes what has arrived into the inbox.

        Raises:
            AuthenticationError: a message is not what the peer sent.
            ConnectionError: the stream has ended.
        """
        with contextlib.suppress(BlockingIOError):
            data = self.connection.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("end of stream")
            self.inbox.extend(map(json.loads, self.session.feed(data)))

    def send(self, payload: bytes, timeout_s: float) -> None:
        """Hands one message to the kernel. Raises ConnectionError or TimeoutError."""
        self.connection.settimeout(timeout_s)
        try:
            self.connection.sendall(self.session.seal(payload))
        finally:
            self.connection.setblocking(False)


class Lines:
    """The lines of one side of a channel. ``where`` tells who is waiting, for messages."""

    def __init__(self, watch: socket.socket, timeout_s: float, where: Callable[[], str]) -> None:
        self.watch = watch  # a silent connection to the driver: readable once the channel is closed there
        self.timeout_s = timeout_s
        self.where = where
        self.peers: list[Line] = []

    def send(self, message: Message, to: Sequence[Line] | None = None) -> None:
        """Sends to every peer, or to those given. Raises ChannelError, DeadlineError."""
        payload = json.dumps(message).encode()
        for line in self.peers if to is None else to:
            if line.ended:
                raise self._gone(line)
            try:
                line.send(payload, self.timeout_s)
            except TimeoutError:
                raise self._late([line], "to take a message") from None
            except OSError:
                with contextlib.suppress(ConnectionError):  # it may have said why it left
                    self._read(line)
                raise self._gone(line) from None

    def receive(self, what: str) -> Message:
        """The next message of the only peer. Raises ChannelError, DeadlineError."""
        (line,) = self.peers
        self.wait(lambda line: len(line.inbox) > 0, what)
        return line.inbox.popleft()

    def wait(self, ready: Callable[[Line], bool], what: str) -> None:
        """Returns when every line is ready. Raises ChannelError, or DeadlineError naming those that are not."""
        deadline = time.monotonic() + self.timeout_s
        while waiting := [line for line in self.peers if not ready(line)]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._late(waiting, what)
            if left := [line for line in waiting if line.ended]:
                raise self._gone(left[0])
            self.pump(remaining, may_leave=ready)

    def pump(
        self,
        timeout_s: float,
        others: Sequence[socket.socket] = (),
        may_leave: Callable[[Line], bool] = lambda line: False,
    ) -> list[socket.socket]:
        """Waits until something arrives and takes it in; those of ``others`` that are ready.

        Raises:
            ChannelError: a peer failed and said so, or its process ended, or the channel was closed on the driver.
        """
        peers = [line for line in self.peers if not line.ended]
        ready = wait([*(line.connection for line in peers), self.watch, *others], max(0.0, timeout_s))
        for line in peers:
            if line.connection in ready:
                try:
                    self._read(line)
                except ConnectionError:
                    if not may_leave(line):
                        raise self._gone(line) from None
                    line.ended = True
        if ready == [self.watch]:
            raise ChannelError(f"{self.where()}: the channel was closed on the driver, or the driver's process ended.")
        return [other for other in others if other in ready]

    def hang_up(self, reason: str) -> None:
        """Tells every peer why this side stops and sends nothing more.

        The connections stay open for reading: closing one with unread bytes would make the peer lose the reason.
        """
        payload = json.dumps({"op": "error", "text": reason}).encode()
        for line in self.peers:
            with contextlib.suppress(OSError):
                line.send(payload, 1.0)
                line.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes every connection."""
        for line in self.peers:
            line.connection.close()
        self.watch.close()

    def _read(self, line: Line) -> None:
        try:
            line.read()
        except AuthenticationError as error:
            raise ChannelError(f"{self.where()}: the message from {line.peer} is not authentic: {error}.") from None
        finally:
            if line.inbox and line.inbox[-1]["op"] == "error":
                raise ChannelError(f"{self.where()}: {line.peer} failed: {line.inbox[-1]['text']}")

    def _gone(self, line: Line) -> ChannelError:
        return ChannelError(
            f"{self.where()}: {line.peer} has disconnected: its process ended, or it closed the channel."
        )

    def _late(self, lines: Sequence[Line], what: str) -> DeadlineError:
        names = ", ".join(line.peer for line in lines)
        return DeadlineError(
            f"{self.where()}: waited {self.timeout_s:g} s for {names} {what}. "
            "If that may take longer, give the Channel a larger timeout_s."
        )
