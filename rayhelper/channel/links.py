"""How the two sides of a channel meet and agree on a transport; what each holds from then on.

    sender                                              each receiver
    opens a port, leaves it in the driver's store       looks it up, connects, says where its tensors shall be: "hello"
    chooses a transport by them and by its own     ->   builds its side of the transport
    tensors: "open"

This costs some milliseconds (a second for nccl), once; rounds follow (``rounds.py``). A side that fails tells
the others why, and its link is of no further use, so nobody waits for somebody who has given up.
"""

from __future__ import annotations

import datetime
import hmac
import json
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from rayhelper.channel.lines import Line, Lines
from rayhelper.channel.transports import Endpoint, Transport, accept, choose, offer
from rayhelper.errors import ChannelError, DeadlineError

if TYPE_CHECKING:
    import torch

_HELLO_S = 5.0  # how long somebody who connects to the sender may stay silent
_LOOK_UP_S = 0.005  # how often a receiver looks for the sender's address


@dataclass(frozen=True)
class Terms:
    """What both sides of a channel know beforehand."""

    name: str
    id: str
    token: str  # who does not know it is not let in
    num_receivers: int
    bucket_bytes: int
    timeout_s: float
    transport: str


class Link:
    """What one side holds while a channel is in use: connections to its peers and, once agreed, a transport."""

    def __init__(self, terms: Terms, driver: tuple[str, int], side: str) -> None:
        """Connects to the store on the driver. Raises ChannelError."""
        self.terms = terms
        self.side = side
        self.transport: Transport | None = None
        self.transport_name = "not connected yet"
        self.device: torch.device | None = None  # on whose stream this side copies
        self.last_tensor: str | None = None
        self.broken: str | None = None
        try:
            watch = socket.create_connection(driver, timeout=terms.timeout_s)
            self.store = _store(driver, terms.timeout_s)
        except (OSError, RuntimeError) as error:
            raise ChannelError(
                f"{self.where()}: cannot reach the driver at {driver[0]}:{driver[1]} ({str(error).splitlines()[0]}). "
                "Either the channel was closed there, or this machine knows the driver by another address: "
                "Channel(..., host='ADDRESS')."
            ) from error
        self.lines = Lines(watch, terms.timeout_s, self.where)
        self.address = str(watch.getsockname()[0])  # under which the others can reach this machine

    def where(self) -> str:
        """Who speaks, for messages: the channel, the transport, the side, how far it came."""
        after = f", after tensor {self.last_tensor!r}" if self.last_tensor is not None else ""
        return f"channel {self.terms.name!r} ({self.transport_name}), {self.side}{after}"

    def is_stale(self) -> bool:
        """Whether the driver has closed the channel."""
        return bool(wait([self.lines.watch], 0.0))

    def connect(self, transport: Transport, name: str) -> None:
        """Makes a transport that was offered or accepted usable. Raises ChannelError."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.transport, self.transport_name = transport, name
        transport.connect(PrefixStore(f"{self.terms.id}/group", self.store), self.address, self.terms.timeout_s)

    def fail(self, error: BaseException) -> None:
        """Tells the peers and frees the buckets; the link cannot be used again."""
        if self.broken is None:
            summary = "".join(traceback.format_exception_only(error)).strip()
            self.broken = str(error) if isinstance(error, (ChannelError, DeadlineError)) else summary
            self.lines.hang_up(self.broken)
            self._free()

    def close(self) -> None:
        """Closes every connection and frees the buckets."""
        self.lines.close()
        self._free()

    def _free(self) -> None:
        transport, self.transport, self.store = self.transport, None, None
        if transport is not None:
            transport.close()


def meet_receivers(link: Link) -> list[Endpoint]:
    """Where the receivers are, once all have connected. Raises ChannelError, DeadlineError."""
    terms, lines, ends = link.terms, link.lines, list[Endpoint]()
    with _listener(link.address) as listener:
        link.store.set(f"{terms.id}/sender", json.dumps(listener.getsockname()[:2]))
        deadline = time.monotonic() + terms.timeout_s
        while len(ends) < terms.num_receivers:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{link.where()}: waited {terms.timeout_s:g} s for receivers; {len(ends)} of {terms.num_receivers} "
                    "came. Every one of them must call receive(); num_receivers must be their number."
                )
            if lines.pump(deadline - time.monotonic(), [listener]):
                connection, _ = listener.accept()
                line = Line(connection, f"receiver {len(ends) + 1}")
                end = _hello(line, terms.token)
                if end is None:
                    connection.close()
                    continue
                line.peer = f"receiver {len(ends) + 1} ({end.process})"
                lines.peers.append(line)
                ends.append(end)
    return ends


def open_transport(link: Link, ends: Sequence[Endpoint], device: torch.device) -> None:
    """Sender: chooses the transport for tensors on ``device`` and lets the receivers at ``ends`` know."""
    terms = link.terms
    link.device = device
    name = choose(terms.transport, Endpoint.here(device), ends)
    transport, setups = offer(name, device, terms.bucket_bytes, len(ends))
    for line, setup in zip(link.lines.peers, setups, strict=True):
        link.lines.send({"op": "open", "transport": name, "setup": setup}, [line])
    link.connect(transport, name)


def meet_sender(link: Link, device: torch.device | None) -> None:
    """Receiver: connects to the sender and builds the transport that it chooses.

    ``device``: where the tensors shall be; None: on the current GPU if this process uses one and the transport ends
    there, else on the CPU. Raises ChannelError, DeadlineError.
    """
    import torch

    link.device = device or torch.device("cpu")
    if device is None and torch.cuda.is_initialized():
        link.device = torch.device("cuda", torch.cuda.current_device())
    link.lines.peers.append(_dial(link))
    end = Endpoint.here(link.device)
    link.lines.send({"op": "hello", "token": link.terms.token, "endpoint": asdict(end)})
    message = link.lines.receive("to choose a transport (it does so when all receivers and its first tensor are there)")
    name = message["transport"]
    if name in ("shared_memory", "gloo"):
        link.device = device or torch.device("cpu")
    link.connect(accept(name, link.device, link.terms.bucket_bytes, message["setup"]), name)


def _dial(link: Link) -> Line:
    key, timeout_s = f"{link.terms.id}/sender", link.terms.timeout_s
    deadline = time.monotonic() + timeout_s
    while not link.store.check([key]):
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{link.where()}: waited {timeout_s:g} s for the sender to call send(). Was the sending method called, "
                "and with .defer(...) if it comes first?"
            )
        if wait([link.lines.watch], _LOOK_UP_S):
            raise ChannelError(f"{link.where()}: the channel was closed on the driver, or the driver's process ended.")
    address, port = json.loads(link.store.get(key))
    try:
        return Line(socket.create_connection((address, port), timeout=timeout_s), "the sender")
    except OSError as error:
        raise ChannelError(
            f"{link.where()}: the sender at {address}:{port} lets nobody in ({error}). Either it is gone, or it "
            f"already has its {link.terms.num_receivers} receivers: is num_receivers right?"
        ) from error


def _hello(line: Line, token: str) -> Endpoint | None:
    """Where somebody who connected is, or None if it is not a receiver of this channel."""
    deadline = time.monotonic() + _HELLO_S
    try:
        while not line.inbox:
            if not wait([line.connection], max(0.0, deadline - time.monotonic())):
                return None
            line.read()
        message = line.inbox.popleft()
        if not hmac.compare_digest(message["token"], token):
            return None
        end = message["endpoint"]
        return Endpoint(end["machine"], end["process"], end["gpu"], tuple(end["visible_gpus"]))
    except (ConnectionError, ValueError, KeyError, TypeError):
        return None


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def _store(driver: tuple[str, int], timeout_s: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(*driver, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
