"""How the two sides of a channel meet and agree on a transport; what each holds from then on.

    sender                                              each receiver
    opens a port, leaves it at the driver's             looks it up, connects, says where its tensors shall be: "hello"
    meeting point
    chooses a transport by them and by its own     ->   looks whether this transport fits it, builds its side of it
    tensors: "open"

Every connection begins with a proof that both sides know the channel's key, and every message carries a code
(``rayhelper/authenticated``). The key travels with the channel itself: through Ray's calls. Under torchrun it does not
travel at all: it follows from the key of the run, which every process has.

This costs some milliseconds (a second for nccl), once; rounds follow (``rounds.py``). A side that fails tells
the others why, and its link is of no further use, so nobody waits for somebody who has given up.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from rayhelper.authenticated.client import Client, dial
from rayhelper.authenticated.meeting import find, put, store_over
from rayhelper.authenticated.sealing import AuthenticationError, Handshake, code
from rayhelper.authenticated.server import MAX_STRANGERS, Visitor, listener
from rayhelper.channel.checksums import payload_code
from rayhelper.channel.lines import Line, Lines, Message
from rayhelper.channel.transports import TRANSPORTS, Endpoint, Transport, accept, choose, obstacle, offer
from rayhelper.errors import ChannelError, DeadlineError
from rayhelper.roles.runtime import state

if TYPE_CHECKING:
    import torch

_LOOK_UP_S = 0.005  # how often a receiver looks for the sender's address


@dataclass(frozen=True)
class Terms:
    """What both sides of a channel know beforehand."""

    name: str
    id: str
    secret: bytes | None = field(repr=False)  # None: what is secret is the key of the torchrun run
    num_receivers: int
    bucket_bytes: int
    timeout_s: float
    transport: str
    authenticate_payload: bool = True

    @property
    def purpose(self) -> str:
        """What the connections of this channel are for; the driver's meeting point is for the same."""
        return f"channel {self.id}"

    def key(self) -> bytes:
        """What both sides must know. Raises ChannelError."""
        secret = self.secret or getattr(state.active, "run_key", None)
        if secret is None:
            raise ChannelError(
                f"channel {self.name!r} was made under torchrun with the key of the run, which this process does not "
                "have. Start the run with the same RAYHELPER_KEY in the environment on every node."
            )
        return code(secret, self.purpose.encode())


class Link:
    """What one side holds while a channel is in use: connections to its peers and, once agreed, a transport."""

    def __init__(self, terms: Terms, driver: tuple[str, int], side: str) -> None:
        """Connects to the meeting point on the driver. Raises ChannelError."""
        self.terms = terms
        self.key = terms.key()
        self.side = side
        self.transport: Transport | None = None
        self.transport_name = "not connected yet"
        self.device: torch.device | None = None  # on whose stream this side copies
        self.last_tensor: str | None = None
        self.broken: str | None = None
        self.store: Any = None  # where a transport's process group meets
        try:
            self.meeting = Client(driver, self.key, terms.purpose, terms.timeout_s)
            with contextlib.ExitStack() as failing:
                failing.callback(self.meeting.close)
                watch, _ = dial(driver, self.key, terms.purpose, terms.timeout_s)
                failing.pop_all()
        except AuthenticationError as error:
            raise ChannelError(
                f"{self.where()}: the process that listens at {driver[0]}:{driver[1]} is not this channel's driver: "
                f"{error}."
            ) from error
        except OSError as error:
            raise ChannelError(
                f"{self.where()}: cannot reach the driver at {driver[0]}:{driver[1]} ({error}). "
                "Either the channel was closed there, or this machine reaches the driver at another address: "
                "Channel(..., host='ADDRESS'). Under torchrun all nodes must have the same RAYHELPER_KEY."
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
        self.store = store_over(self.meeting, self.terms.timeout_s)
        transport.connect(PrefixStore("group", self.store), self.address, self.terms.timeout_s)

    def payload_code(self, data: torch.Tensor) -> str | None:
        """The code of a bucket's bytes, where they travel over sockets to which a stranger might connect."""
        if self.transport_name != "gloo" or not self.terms.authenticate_payload:
            return None
        return payload_code(self.key, data)

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
        self.meeting.close()

    def _free(self) -> None:
        transport, self.transport, self.store = self.transport, None, None
        if transport is not None:
            transport.close()


def meet_receivers(link: Link) -> list[Endpoint]:
    """Where the receivers are, once all have connected. Raises ChannelError, DeadlineError."""
    terms, lines, ends, visitors = link.terms, link.lines, list[Endpoint](), list[Visitor]()
    with listener(link.address) as door, contextlib.ExitStack() as leaving:
        leaving.callback(lambda: _show_out(visitors, list(visitors)))
        put(link.meeting, "sender", door.getsockname()[:2], terms.timeout_s)
        deadline = time.monotonic() + terms.timeout_s
        while len(ends) < terms.num_receivers:
            now = time.monotonic()
            if now > deadline:
                raise DeadlineError(
                    f"{link.where()}: waited {terms.timeout_s:g} s for receivers; {len(ends)} of {terms.num_receivers} "
                    "came. Every receiver must call receive(), and num_receivers must be their number."
                )
            _show_out(visitors, [visitor for visitor in visitors if visitor.until <= now])
            until = min([deadline, *(visitor.until for visitor in visitors)])
            ready = lines.pump(until - now, [door, *(visitor.connection for visitor in visitors)])
            for visitor in [visitor for visitor in visitors if visitor.connection in ready]:
                end = _hello(visitor, link.terms.num_receivers - len(ends))
                if isinstance(end, Endpoint):
                    assert visitor.session is not None, "it has said hello"
                    visitors.remove(visitor)
                    peer = f"receiver {len(ends) + 1} ({end.process})"
                    lines.peers.append(Line(visitor.connection, visitor.session, peer))
                    ends.append(end)
                elif end == "leave":
                    _show_out(visitors, [visitor])
            if door in ready:
                visitors += _let_in(link, door)
                _show_out(visitors, visitors[:-MAX_STRANGERS])
    return ends


def _let_in(link: Link, door: socket.socket) -> list[Visitor]:
    """Who has connected, if it is still there."""
    with contextlib.suppress(OSError):
        connection, _ = door.accept()
        visitor = Visitor(connection, Handshake(link.key, link.terms.purpose, listens=True))
        visitor.greet()
        return [visitor]
    return []


def _show_out(visitors: list[Visitor], leaving: Sequence[Visitor]) -> None:
    for visitor in leaving:
        visitors.remove(visitor)
        visitor.connection.close()


def _hello(visitor: Visitor, num_missing: int) -> Endpoint | str:
    """Where a receiver is; "wait" if it has yet to prove that it is one, "leave" if it is none, or one too many."""
    try:
        payloads = visitor.read()
        if not payloads:
            return "wait"
        return _endpoint(json.loads(payloads[0])) if num_missing else "leave"
    except (OSError, ValueError, KeyError, TypeError):
        return "leave"


def _endpoint(message: Message) -> Endpoint:
    end = message["endpoint"]
    return Endpoint(end["machine"], end["process"], end["gpu"], tuple(end["visible_gpus"]))


def open_transport(link: Link, ends: Sequence[Endpoint], device: torch.device) -> None:
    """Sender: chooses the transport for tensors on ``device`` and lets the receivers at ``ends`` know."""
    terms = link.terms
    link.device = device
    own = Endpoint.here(device)
    name = choose(terms.transport, own, ends)
    transport, setups = offer(name, device, terms.bucket_bytes, len(ends))
    for line, setup in zip(link.lines.peers, setups, strict=True):
        link.lines.send({"op": "open", "transport": name, "setup": setup, "endpoint": asdict(own)}, [line])
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
    link.lines.send({"op": "hello", "endpoint": asdict(end)})
    message = link.lines.receive(
        "to choose a transport (it does so after all receivers have connected and its first tensor is ready)"
    )
    name = _fitting(link, message, end)
    if name in ("shared_memory", "gloo"):
        link.device = device or torch.device("cpu")
    link.connect(accept(name, link.device, link.terms.bucket_bytes, message["setup"]), name)


def _fitting(link: Link, message: Message, own: Endpoint) -> str:
    """The transport that the sender chose. Raises ChannelError if it is none for this process and channel."""
    name, wanted = str(message.get("transport")), link.terms.transport
    if name not in TRANSPORTS or wanted not in ("auto", name):
        raise ChannelError(f"{link.where()}: the sender chose transport {name!r}; this channel's is {wanted!r}.")
    reason = obstacle(name, _endpoint(message), [own])
    if reason is not None:
        raise ChannelError(f"{link.where()}: the sender chose transport {name!r}, which does not fit: {reason}.")
    return name


def _dial(link: Link) -> Line:
    timeout_s = link.terms.timeout_s
    deadline = time.monotonic() + timeout_s
    while (address := _sender(link)) is None:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{link.where()}: waited {timeout_s:g} s for the sender to call send(). Was the sending method called, "
                "and with .defer(...) if it comes first?"
            )
        if wait([link.lines.watch], _LOOK_UP_S):
            raise _closed(link)
    try:
        connection, session = dial(address, link.key, link.terms.purpose, timeout_s)
    except OSError as error:
        raise ChannelError(
            f"{link.where()}: the sender at {address[0]}:{address[1]} accepts no connection ({error}). Either it has "
            f"ended, or it already has its {link.terms.num_receivers} receivers: is num_receivers correct?"
        ) from error
    return Line(connection, session, "the sender")


def _sender(link: Link) -> tuple[str, int] | None:
    """Where the sender listens, once it does. Raises ChannelError."""
    try:
        found = find(link.meeting, "sender", link.terms.timeout_s)
    except OSError:
        raise _closed(link) from None
    return None if found is None else (str(found[0]), int(found[1]))


def _closed(link: Link) -> ChannelError:
    return ChannelError(f"{link.where()}: the channel was closed on the driver, or the driver's process ended.")
