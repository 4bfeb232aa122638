"""One round over a connected link: the sender fills buckets, the receivers hand out what is in them.

sender                                                  each receiver
fill bucket 0, say what is in it, publish it       ->   compare its checksum, hand out its tensors, "free"
meanwhile fill bucket 1, publish it, ...           ->   ...
wait until bucket 0 is free everywhere, refill it
"end" with the receipt's checksum                  ->   compare with what came, "done"
"""

from __future__ import annotations

import hmac
import json
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

from rayhelper.channel.buckets import Piece, Reader, checked, fill
from rayhelper.channel.checksums import checksum
from rayhelper.channel.lines import Message
from rayhelper.channel.links import Link, meet_receivers, meet_sender, open_transport
from rayhelper.channel.transports import NUM_BUCKETS, finish_copies
from rayhelper.errors import ChannelError

if TYPE_CHECKING:
    import torch

_LOOK_S = 0.0002  # how often a receiver looks, between two tensors, whether the next bucket is on its way


@dataclass(frozen=True)
class Receipt:
    """The amount and checksum of a round, as one side saw it. It is equal on both sides.

    ``num_bytes`` counts only the tensors. ``checksum`` covers names, types, shapes and bytes. It is None if sender and
    receiver are one process and nothing was copied.
    """

    num_tensors: int
    num_bytes: int
    checksum: int | None
    transport: str
    seconds: float = field(compare=False)


class Tally:
    """A receipt in the making."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.started = time.perf_counter()
        self.num_tensors = 0
        self.num_bytes = 0
        import xxhash

        self._hash = xxhash.xxh3_64()

    def add(self, message: Message, pieces: Iterable[Piece]) -> None:
        """Notes a bucket: what was said about it, the checksum of its bytes among it, and its pieces."""
        self._hash.update(json.dumps(message).encode())
        for piece in pieces:
            self.num_tensors += piece.is_last
            self.num_bytes += piece.nbytes

    def receipt(self) -> Receipt:
        seconds = time.perf_counter() - self.started
        return Receipt(self.num_tensors, self.num_bytes, self._hash.intdigest(), self.transport, seconds)


def send(link: Link, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Receipt:
    """The receipt of one round, once every receiver has read everything.

    Raises:
        ChannelError, DeadlineError: a receiver failed, died or is late; an item cannot be sent.
        Exception: what ``named_tensors`` raised; the receivers are told.
    """
    try:
        items = checked(named_tensors)
        if link.transport is None:
            ends = meet_receivers(link)
            first = list(islice(items, 1))
            open_transport(link, ends, _device_of(first))
            items = chain(first, items)
        return _send_buckets(link, items)
    except BaseException as error:
        link.fail(error)
        raise


def _send_buckets(link: Link, items: Iterable[tuple[str, torch.Tensor]]) -> Receipt:
    lines, transport, device = link.lines, link.transport, link.device
    assert transport is not None, "a transport was agreed on"
    assert device is not None, "the first tensor has been examined"
    tally, num_sent = Tally(link.transport_name), 0

    def empty_bucket() -> torch.Tensor:
        num_free = num_sent + 1 - NUM_BUCKETS
        if num_free > 0:
            lines.wait(lambda line: len(line.inbox) >= num_free, f"to read bucket {num_free}")
            transport.reclaim(num_sent % NUM_BUCKETS)
        return transport.buckets[num_sent % NUM_BUCKETS]

    for bucket in fill(items, empty_bucket, device):
        index, used = num_sent % NUM_BUCKETS, bucket.used
        finish_copies(device)
        message = {"op": "bucket", "index": index, "used": used, "checksum": checksum(bucket.data[:used])}
        message["code"] = link.payload_code(bucket.data[:used])
        message["pieces"] = bucket.pieces
        lines.send(message)
        transport.publish(index, used)  # second: the first broadcast of nccl waits until the receivers join in
        tally.add(message, bucket.pieces)
        num_sent += 1
        link.last_tensor = bucket.pieces[-1].name if bucket.pieces else None
    lines.send({"op": "end", "checksum": tally.receipt().checksum})
    lines.wait(lambda line: len(line.inbox) > num_sent, "to read the last bucket")
    for index in range(min(num_sent, NUM_BUCKETS)):
        transport.reclaim(index)
    for line in lines.peers:
        line.inbox.clear()
    link.last_tensor = None
    return tally.receipt()


class Announced:
    """What the sender has said in this round; buckets are asked for as soon as they are known to be on their way."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._messages: deque[Message] = deque()
        self._looked = time.monotonic()

    def look(self) -> None:
        """Takes in what has arrived, now and then. Raises ChannelError."""
        is_short = len(self._messages) < NUM_BUCKETS - 1
        if is_short and time.monotonic() - self._looked > _LOOK_S:
            self.link.lines.pump(0.0)
            self._take_in()
            self._looked = time.monotonic()

    def next(self) -> Message:
        """The next message; a bucket that it tells of has arrived. Raises ChannelError, DeadlineError."""
        if not self._messages:
            self.link.lines.wait(lambda line: len(line.inbox) > 0, "to fill the next bucket")
        self._take_in()
        message = self._messages.popleft()
        if message["op"] == "bucket":
            assert self.link.transport is not None, "a transport was agreed on"
            self.link.transport.arrived(message["index"], self.link.lines.pump)
        return message

    def _take_in(self) -> None:
        (sender,) = self.link.lines.peers
        while sender.inbox:
            message = sender.inbox.popleft()
            if message["op"] == "bucket":
                assert self.link.transport is not None, "a transport was agreed on"
                self.link.transport.expect(message["index"], message["used"])
            self._messages.append(message)


def receive(
    link: Link, *, copy: bool, device: torch.device | None
) -> Generator[tuple[str, torch.Tensor], None, Receipt]:
    """The tensors of one round; the generator's value is the receipt.

    Raises:
        ChannelError, DeadlineError: the sender failed, died or is late; what came is not what was sent.
    """
    try:
        if link.transport is None:
            meet_sender(link, device)
        assert link.device is not None, "it was settled when the sender was met"
        tally, announced, reader = Tally(link.transport_name), Announced(link), Reader(device or link.device, copy)
        while (message := announced.next())["op"] == "bucket":
            yield from _hand_out(link, message, tally, announced, reader)
            link.lines.send({"op": "free"})
        receipt = tally.receipt()
        if receipt.checksum != message["checksum"]:
            raise ChannelError(f"{link.where()}: received other buckets than the sender sent.")
        link.lines.send({"op": "done"})
        link.last_tensor = None
        return receipt
    except GeneratorExit:
        link.fail(ChannelError(f"{link.where()}: the receiving code stopped before the end."))
        raise
    except BaseException as error:
        link.fail(error)
        raise


def _hand_out(
    link: Link, message: Message, tally: Tally, announced: Announced, reader: Reader
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one bucket. Returns when the last has been let go."""
    assert link.transport is not None, "a transport was agreed on"
    data = link.transport.buckets[message["index"]][: message["used"]]
    pieces = [Piece(*fields) for fields in message["pieces"]]
    found = checksum(data)
    if found != message["checksum"]:
        names = f"{pieces[0].name!r} to {pieces[-1].name!r}" if pieces else "no tensors"
        raise ChannelError(
            f"{link.where()}: the bucket with {names} has checksum {found:#x}, and {message['checksum']:#x} was sent: "
            "its bytes changed in transit. Try another transport=... to find the cause."
        )
    if not hmac.compare_digest(str(message.get("code")), str(link.payload_code(data))):
        raise ChannelError(f"{link.where()}: a bucket has other bytes than the sender sent. Somebody changed them.")
    tally.add(message, pieces)
    for piece in pieces:
        tensor = reader.read(piece, data)
        if tensor is not None:
            yield piece.name, tensor
            link.last_tensor = piece.name
            announced.look()
        del tensor
    finish_copies(data.device, reader.device)


def _device_of(items: Iterable[tuple[str, torch.Tensor]]) -> torch.device:
    """The GPU of the first tensor, or the CPU."""
    import torch

    return next((tensor.device for _, tensor in items if tensor.is_cuda), torch.device("cpu"))
