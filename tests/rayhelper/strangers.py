"""What somebody who does not know a key may try at a port, and what is seen of a process from outside."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayhelper.authenticated.sealing import NONCE_BYTES, TAG_BYTES

Address = tuple[str, int]

LOOPBACK = "0100007F"  # 127.0.0.1 in /proc, and as an IPv6 socket has it
_MAPPED = "0000000000000000FFFF00000100007F"


class Payload:
    """What makes a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return open, (str(self.made), "w")


def tries(made: Path) -> dict[str, bytes]:
    """What strangers send, by what it is."""
    pickled = pickle.dumps(("stacks", Payload(made)))
    proof = os.urandom(NONCE_BYTES + TAG_BYTES)
    return {
        "garbage": os.urandom(5000),
        "zeros": bytes(5000),
        "half a handshake": proof[:40],
        "a wrong proof, and a pickle in a message": proof
        + struct.pack("!I", len(pickled))
        + bytes(TAG_BYTES)
        + pickled,
        "a pickle": pickled,
        "multiprocessing's": struct.pack("!i", len(pickled)) + pickled,
        "http": b"GET / HTTP/1.1\r\n\r\n",
        "an endless length": b"\xff" * 200,
    }


def told(address: Address, sent: bytes, wait_s: float = 5.0) -> bytes:
    """What somebody who sends this hears until the connection ends, or for ``wait_s``."""
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=wait_s) as connection:
        connection.sendall(sent)
        end = time.monotonic() + wait_s
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            data = connection.recv(1 << 16)
            if not data:
                break
            heard += data
    return heard


@contextlib.contextmanager
def silent(address: Address, count: int) -> Iterator[list[socket.socket]]:
    """Inside, so many are connected who say nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


def listening() -> dict[int, str]:
    """The addresses at which this process listens, as /proc writes them, by port."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *others = line.split()
            if state == "0A" and f"socket:[{others[5]}]" in own:
                host, port = local.split(":")
                found[int(port, 16)] = LOOPBACK if host == _MAPPED else host
    return found
