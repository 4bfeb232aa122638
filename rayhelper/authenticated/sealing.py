"""Who speaks, and that it is what they said: a handshake and messages with codes, without a socket.

    the side that listens                       the side that dials
    nonce (32 bytes)                       ->
                                           <-   nonce (32), HMAC(key, purpose, "dials", both nonces) (32)
    HMAC(key, purpose, "listens", ...)     ->
    then, either way: length (4), HMAC(key of this direction and connection, number, length, payload) (32), payload

All parts of the handshake have fixed lengths, so nothing is parsed before both sides have proved that they know the
key. The keys of a connection follow from both nonces: what was recorded elsewhere is worth nothing here. Messages are
numbered, so none can be repeated, left out or moved. They are not encrypted. HMAC is that of RFC 2104 with SHA-256.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Any

NONCE_BYTES = TAG_BYTES = 32
MAX_BYTES = 1 << 28  # of a message
_LENGTH = struct.Struct("!I")
_NUMBERED = struct.Struct("!QI")
_HEAD_BYTES = _LENGTH.size + TAG_BYTES


class AuthenticationError(ConnectionError):
    """Somebody does not know the key, or a received message differs from the message that was sent."""


def code(key: bytes, *parts: Any) -> bytes:
    """The HMAC (32 bytes) of all parts (bytes or alike), each with its length: no two lists of parts are alike."""
    made = hmac.new(key, digestmod="sha256")
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.digest()


class Session:
    """One connection after the handshake: payloads to bytes of the wire, and back."""

    def __init__(self, sends: bytes, receives: bytes) -> None:
        self._sends, self._receives = sends, receives  # the keys of both directions
        self._num_sent = self._num_received = 0
        self._unread = bytearray()

    def seal(self, payload: bytes) -> bytes:
        """What goes over the wire. Raises ValueError for more than ``MAX_BYTES``."""
        if len(payload) > MAX_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes; at most {MAX_BYTES} can be sent")
        tag = _tag(self._sends, self._num_sent, payload)
        self._num_sent += 1
        return _LENGTH.pack(len(payload)) + tag + payload

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete with this data. Raises AuthenticationError."""
        self._unread += data
        payloads = []
        while len(self._unread) >= _HEAD_BYTES:
            (length,) = _LENGTH.unpack_from(self._unread)
            if length > MAX_BYTES:
                raise AuthenticationError("a received message is longer than any message that RayHelper sends")
            end = _HEAD_BYTES + length
            if len(self._unread) < end:
                break
            payload, tag = bytes(self._unread[_HEAD_BYTES:end]), bytes(self._unread[_LENGTH.size : _HEAD_BYTES])
            del self._unread[:end]
            if not hmac.compare_digest(tag, _tag(self._receives, self._num_received, payload)):
                raise AuthenticationError("a received message differs from the message that was sent")
            self._num_received += 1
            payloads.append(payload)
        return payloads


def _tag(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, _NUMBERED.pack(number, len(payload)) + payload, "sha256")


class Handshake:
    """One side of a connection until both sides are known.

    key: what both sides know.
    purpose: what the connection is for; a key that serves several purposes opens each by its own name only.
    listens: whether this is the side that was dialled.
    """

    def __init__(self, key: bytes, purpose: str, *, listens: bool) -> None:
        self._key, self._purpose, self._listens = key, purpose.encode(), listens
        self._own = secrets.token_bytes(NONCE_BYTES)
        self._other = b""
        self._unread = bytearray()
        self.session: Session | None = None

    def start(self) -> bytes:
        """What this side sends first."""
        return self._own if self._listens else b""

    def feed(self, data: bytes) -> tuple[bytes, list[bytes]]:
        """What this side answers, and payloads that came right behind the handshake. Raises AuthenticationError."""
        self._unread += data
        reply = self._listening() if self._listens else self._dialling()
        if self.session is None:
            return reply, []
        rest, self._unread = bytes(self._unread), bytearray()
        return reply, self.session.feed(rest)

    def _listening(self) -> bytes:
        if len(self._unread) < NONCE_BYTES + TAG_BYTES:
            return b""
        self._other, tag = self._taken(NONCE_BYTES), self._taken(TAG_BYTES)
        self._check(tag, b"dials")
        self.session = Session(self._derived(b"from listener"), self._derived(b"from dialler"))
        return self._derived(b"listens")

    def _dialling(self) -> bytes:
        reply = b""
        if not self._other:
            if len(self._unread) < NONCE_BYTES:
                return b""
            self._other = self._taken(NONCE_BYTES)
            reply = self._own + self._derived(b"dials")
        if len(self._unread) >= TAG_BYTES:
            self._check(self._taken(TAG_BYTES), b"listens")
            self.session = Session(self._derived(b"from dialler"), self._derived(b"from listener"))
        return reply

    def _taken(self, count: int) -> bytes:
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken

    def _check(self, tag: bytes, what: bytes) -> None:
        if not hmac.compare_digest(tag, self._derived(what)):
            raise AuthenticationError("the other side does not have the key")

    def _derived(self, what: bytes) -> bytes:
        nonces = (self._own, self._other) if self._listens else (self._other, self._own)
        return code(self._key, self._purpose, what, *nonces)
