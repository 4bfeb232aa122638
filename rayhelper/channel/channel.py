"""A stream of named tensors from one role to another: how weights get from a trainer to the rollout workers.

    channel = Channel(num_receivers=2, bucket_mb=64)  # on the driver
    sent = trainer.send_weights.defer(channel)        # one worker:   channel.send(named_tensors)
    got = trainer.load_weights(channel)               # every worker: for name, tensor in channel.receive(): ...

Tensors travel bucket by bucket, so neither side holds more than three buckets besides its own model, and nothing goes
through the driver, which only tells the two sides where to meet. In one process ``send`` hands over the tensors
themselves. Otherwise the way is chosen from where the two sides are (``transports.py``); the files beside this
one go from what is said (``lines``) over meeting (``links``) to a round (``rounds``). Nobody takes part who does not
know the channel's key, which comes with the channel itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import WeakValueDictionary

from rayhelper.authenticated.meeting import MeetingPoint
from rayhelper.channel.buckets import BLOCK, checked
from rayhelper.channel.links import Link, Terms
from rayhelper.channel.rounds import Receipt, receive, send
from rayhelper.channel.transports import TRANSPORTS, this_process
from rayhelper.errors import ChannelError, ConfigError
from rayhelper.roles.runtime import state

if TYPE_CHECKING:
    import torch

TransportName = Literal["auto", "local", "shared_memory", "cuda_ipc", "gloo", "nccl"]

# What this process holds of channels that it got as arguments: every round brings a new copy of the same Channel.
_LINKS: dict[tuple[str, str], Link] = {}


class Handover:
    """What the copies of a channel in one process share: what ``send`` leaves, and the driver's meeting point.

    Under torchrun the driver's channel is a copy of the one that it made.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] | None = None
        self.num_left = 0  # how many may yet receive it
        self.meeting: MeetingPoint | None = None  # on the process that made the channel

    def open(self, host: str, terms: Terms) -> tuple[str, int]:
        """The address of a meeting point that is open until ``close``, or until this is no longer referred to.

        Raises ConfigError for a host that is not this machine, ChannelError.
        """
        try:
            self.meeting = MeetingPoint(host, terms.key(), terms.purpose)
        except OSError as error:
            raise ConfigError(f"host={host!r} is not an address of this machine: {error}.") from error
        weakref.finalize(self, self.meeting.close)
        return self.meeting.address

    def close(self) -> None:
        self.tensors = None
        if self.meeting is not None:
            self.meeting.close()


_HANDOVERS: WeakValueDictionary[str, Handover] = WeakValueDictionary()  # by channel; its copies share one


class Channel:
    """A stream of tensors from one worker to others. Make it on the driver and pass it to both sides. It serves any
    number of rounds.

    num_receivers: the number of workers that call ``receive`` in each round. One worker calls ``send``.
    bucket_mb: megabytes per bucket. Each side holds three buckets. A larger tensor spans several buckets.
    timeout_s: the limit of each single wait of either side, not of a whole round.
    transport: how the bytes are sent. ``auto`` takes the first that fits of cuda_ipc, nccl, shared_memory, gloo.
        ``local``: sender and receivers are one process. ``auto`` takes it in the process that made the channel. If the
        driver itself sends to its workers, or receives from one, name another transport.
    host: the address at which the workers reach this process. None: loopback if all workers seem to be on this machine.
        Otherwise the address from which it reaches other machines.
    name: for messages.
    authenticate_payload: whether gloo's buckets carry a code that only the channel's key can make. It costs both sides
        1 s for 1.2 GB on each core that hashes, with up to four cores. False: somebody who can reach the ports of a
        worker might change weights. Messages are authenticated in either case. nccl's buckets stay on GPUs and carry
        only a checksum. shared_memory and cuda_ipc use no port.

    After a failure on either side, make another channel.
    """

    def __init__(
        self,
        num_receivers: int = 1,
        *,
        bucket_mb: float = 64,
        timeout_s: float = 60.0,
        transport: TransportName = "auto",
        host: str | None = None,
        name: str = "weights",
        authenticate_payload: bool = True,
    ) -> None:
        if num_receivers < 1 or bucket_mb <= 0 or timeout_s <= 0:
            raise ConfigError(
                "a Channel needs num_receivers >= 1, bucket_mb > 0 and timeout_s > 0; "
                f"got {num_receivers}, {bucket_mb} and {timeout_s}."
            )
        if transport not in ("auto", "local", *TRANSPORTS):
            raise ConfigError(f"transport={transport!r} is not one of auto, local, {', '.join(TRANSPORTS)}.")
        nbytes = max(1, round(bucket_mb * 2**20 / BLOCK)) * BLOCK
        identity = secrets.token_hex(8)
        # under torchrun the run's key is there already, and what processes tell each other is not encrypted
        secret = None if getattr(state.active, "run_key", None) else secrets.token_bytes(32)
        self._terms = Terms(
            name, identity, secret, num_receivers, nbytes, float(timeout_s), transport, authenticate_payload
        )
        self._host = host
        self._home = this_process()
        self._driver: tuple[str, int] | None = None  # where the two sides meet, once they can
        self._handover = _HANDOVERS.setdefault(identity, Handover())
        self._closed = False

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Receipt:
        """The receipt of the round, after every receiver has read all tensors. One process calls this, once per round.

        ``named_tensors`` is consumed as buckets become free. Every name may occur once. Two names may share a tensor.
        In one process the tensors are handed over, not copied.

        Raises:
            ChannelError: a receiver failed or died, the channel was closed, or an item is no tensor that can be sent.
            DeadlineError: a receiver did not come, or did not read on, for ``timeout_s``.
            Exception: an exception of ``named_tensors``, unchanged. The receivers get a ChannelError with its text.
        """
        if not self._is_local():
            return send(self._link("sender"), named_tensors)
        handover = self._handover
        handover.tensors = None  # what is left of the last round goes before this one is collected
        handover.tensors, handover.num_left = list(checked(named_tensors)), self._terms.num_receivers
        return _local_receipt(handover.tensors)

    def receive(self, *, copy: bool = True, device: torch.device | str | None = None) -> Reception:
        """Iterates over (name, tensor) of one round. Every receiver calls this once per round and reads to the end.

        copy: with False, a tensor may be a part of the bucket. It is valid until the next one is read, and must not be
            written to. In one process the tensors are always the sender's own.
        device: the device of the tensors. None: the current GPU for cuda_ipc and nccl (taken only if this process has
            used a GPU), else the CPU. In one process they stay on their device.

        Raises, while iterating:
            ChannelError: the sender failed or died, the channel was closed, or other bytes came than were sent.
            DeadlineError: the sender did not come, or did not send on, for ``timeout_s``.
        """
        import torch

        place = None if device is None else torch.device(device)
        if place is not None and place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        if self._is_local():
            return Reception(self._receive_here(place))
        return Reception(receive(self._link("receiver"), copy=copy, device=place))

    @property
    def identity(self) -> str:
        """The identity of the channel: the same for all of its copies, and different for every other channel."""
        return self._terms.id

    def is_offered(self) -> bool:
        """Whether the sender has begun a round that this process has not received. Then ``receive`` need not wait.

        For receivers with other work. Outside of the sender's process it is True only from the second round on: both
        sides first have to meet.

        Raises:
            ChannelError: the sender failed or died, or the channel was closed.
        """
        if self._is_local():
            return self._handover.tensors is not None
        link = _LINKS.get((self._terms.id, "receiver"))
        if link is None or link.transport is None:
            return False
        link = self._link("receiver")  # which says so if it broke off
        link.lines.pump(0.0)
        return any(line.inbox for line in link.lines.peers)

    def close(self) -> None:
        """Frees this process's part of the channel. On the driver it ends the channel for all processes."""
        self._closed = True
        self._handover.close()
        for key in [key for key in _LINKS if key[0] == self._terms.id]:
            _LINKS.pop(key).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Channel({self._terms.name!r}, num_receivers={self._terms.num_receivers})"

    def __getstate__(self) -> dict[str, Any]:
        """To leave this process is what makes the driver open the place where the two sides meet.

        A closed channel may go, with a call that is made once more say: whoever then uses it is told.
        """
        if self._terms.transport != "local" and not self._closed:
            self._reachable()
        names = ("_terms", "_host", "_home", "_driver", "_closed")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        self.__dict__.update(sent)
        self._handover = _HANDOVERS.setdefault(self._terms.id, Handover())

    def _reachable(self) -> tuple[str, int]:
        """The address of the meeting point, which is opened if need be."""
        if self._driver is None:
            self._driver = self._handover.open(self._host or _own_address(), self._terms)
        return self._driver

    def _is_local(self) -> bool:
        self._check_open()
        wanted = self._terms.transport
        return wanted == "local" or (wanted == "auto" and self._home == this_process())

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelError(f"channel {self._terms.name!r} was closed here. Make another channel.")

    def _link(self, side: str) -> Link:
        """This process's link, made in the first round. Those of channels that the driver has closed are freed."""
        for key in [key for key, link in _LINKS.items() if link.is_stale()]:
            _LINKS.pop(key).close()
        key = (self._terms.id, side)
        if key not in _LINKS:
            _LINKS[key] = Link(self._terms, self._reachable(), side)
        link = _LINKS[key]
        if link.broken is not None:
            raise ChannelError(f"channel {self._terms.name!r} failed earlier: {link.broken} Make another channel.")
        return link

    def _receive_here(self, device: torch.device | None) -> Generator[tuple[str, torch.Tensor], None, Receipt]:
        tensors = self._handover.tensors
        if tensors is None:
            raise ChannelError(
                f"channel {self._terms.name!r}, receiver: nothing was sent. In one process call send() first. "
                f"It can be received num_receivers={self._terms.num_receivers} times."
            )
        self._handover.num_left -= 1
        if not self._handover.num_left:
            self._handover.tensors = None
        for name, tensor in tensors:
            yield name, tensor if device is None else tensor.to(device)
        return _local_receipt(tensors)


class Reception(Iterator[tuple[str, "torch.Tensor"]]):
    """The tensors of one round as they arrive, then the receipt."""

    def __init__(self, stream: Generator[tuple[str, torch.Tensor], None, Receipt]) -> None:
        self._stream = stream
        self._receipt: Receipt | None = None

    def __next__(self) -> tuple[str, torch.Tensor]:
        try:
            return next(self._stream)
        except StopIteration as stop:
            self._receipt = self._receipt or stop.value
            raise StopIteration from None

    @property
    def receipt(self) -> Receipt:
        """What was received; equal to what ``send`` returned. Raises ChannelError before everything was read."""
        if self._receipt is None:
            raise ChannelError("the receipt exists only after all tensors have been read.")
        return self._receipt

    def close(self) -> None:
        """Stops reading. The channel breaks off if anything was left."""
        self._stream.close()


def _local_receipt(tensors: list[tuple[str, torch.Tensor]]) -> Receipt:
    return Receipt(len(tensors), sum(tensor.nbytes for _, tensor in tensors), None, "local", 0.0)


def _own_address() -> str:
    """Loopback unless something tells of other machines: the workers' nodes under Ray, else MASTER_ADDR."""
    groups: Mapping[str, Any] = getattr(state.active, "groups", {})
    known = [slot.address for group in groups.values() for slot in getattr(group, "slots", ())] or [
        os.environ.get("MASTER_ADDR", "127.0.0.1")
    ]
    others = [address for address in known if not address.startswith("127.") and address not in ("localhost", "::1")]
    if others:
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(others[0], 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing: it only asks for the route
                return str(probe.getsockname()[0])
    return "127.0.0.1"
