"""What somebody who reaches the ports of a channel, and does not know its key, can do to it: nothing."""

from __future__ import annotations

import base64
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rayhelper import ChannelError
from rayhelper.authenticated.client import Client
from rayhelper.authenticated.meeting import find, put
from rayhelper.channel import Channel
from rayhelper.channel import links as links_module
from rayhelper.channel.links import Link, meet_sender
from rayhelper.channel.transports import Endpoint, accept
from tests.backends.ranks import forkserver as processes
from tests.rayhelper.strangers import LOOPBACK, Payload, listening, silent, told, tries
from tests.rayhelper.test_channel import Peer, peers, receive, send, values

NAMED = [("w", torch.arange(5000.0)), ("v", torch.ones(7))]
CPU = torch.device("cpu")


def meeting_of(channel: Channel) -> tuple[tuple[str, int], Client]:
    """The address of the meeting point, which opens with it, and somebody there who knows the key."""
    sent = pickle.loads(pickle.dumps(channel))
    return sent._driver, Client(sent._driver, sent._terms.key(), sent._terms.purpose, 10.0)


def sender_of(client: Client) -> tuple[str, int]:
    end = time.monotonic() + 60
    while (found := find(client, "sender", 10.0)) is None and time.monotonic() < end:
        time.sleep(0.01)
    return str(found[0]), int(found[1])


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_strangers_at_the_ports_of_a_channel_change_nothing(transport: Any, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with Channel(timeout_s=60, transport=transport) as channel:
        driver, client = meeting_of(channel)
        key, token = channel._terms.key(), channel._terms.secret
        with peers((send, channel, [NAMED])) as (sender,):
            at = sender_of(client)
            heard = b""
            with silent(driver, 3), silent(at, 3):
                for sent in tries(made).values():
                    heard += told(driver, sent, wait_s=0.2) + told(at, sent, wait_s=0.2)
                receiver = Peer(receive, channel, 1)
                assert [name for name, *_ in receiver.value()[0][1]] == ["w", "v"]
            (receipt,) = sender.value()
        client.close()
    assert receipt.transport == transport
    assert not made.exists()
    assert token is not None
    assert key not in heard
    assert token not in heard


def test_a_stranger_finds_no_store_to_which_it_could_write() -> None:
    """Which was the way to put itself in the sender's place."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    with Channel(timeout_s=60) as channel:
        (host, port), client = meeting_of(channel)
        client.close()
        with pytest.raises(Exception):  # noqa: B017, PT011  (torch's own types)
            TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2)).set("sender", "x")


class FalseSender:
    """Listens where the receivers were sent, without the key, and keeps what they say."""

    def __init__(self, reply: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.heard = b""
        self.thread = threading.Thread(target=self._serve, args=(reply,))
        self.thread.start()

    def _serve(self, reply: bytes) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.sendall(reply)
            while data := connection.recv(1 << 16):
                self.heard += data


def test_who_stands_in_the_senders_place_without_the_key_gets_no_secret_and_is_not_believed(tmp_path: Path) -> None:
    opening = pickle.dumps(Payload(tmp_path / "made"))
    false = FalseSender(bytes(64) + opening)
    with Channel(timeout_s=30) as channel:
        _, client = meeting_of(channel)
        put(client, "sender", false.listener.getsockname(), 10.0)
        (error,) = values((receive, channel, 1))
        client.close()
        assert channel._terms.secret is not None
        secrets = (channel._terms.secret, channel._terms.key())
    false.thread.join(10)
    false.listener.close()
    assert isinstance(error, ChannelError)
    assert "does not have the key" in str(error)
    assert not any(secret in false.heard or secret.hex().encode() in false.heard for secret in secrets)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("opening", "words"),
    [
        ({"transport": "cuda_ipc", "setup": {"handle": "x"}}, "sender's tensors are not on a GPU"),
        ({"transport": "nccl", "setup": {}}, "not on a GPU"),
        ({"transport": "carrier_pigeon", "setup": {}}, "carrier_pigeon"),
        ({"transport": "shared_memory", "setup": {"path": "/etc/passwd"}}, "is not the memory of a sender"),
        ({"transport": "gloo", "setup": {}, "wanted": "shared_memory"}, "this channel's is 'shared_memory'"),
    ],
)
def test_a_receiver_refuses_a_transport_that_does_not_fit_it(
    opening: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even from somebody who knows the key."""
    end = vars(Endpoint.here(CPU))
    monkeypatch.setattr(links_module.Lines, "receive", lambda self, what: {"endpoint": end, **opening})
    monkeypatch.setattr(links_module.Lines, "send", lambda self, message: None)
    monkeypatch.setattr(links_module, "_dial", lambda link: None)
    with Channel(transport=opening.get("wanted", "auto"), timeout_s=10) as channel:
        pickle.dumps(channel)
        assert channel._driver is not None
        link = Link(channel._terms, channel._driver, "receiver")
        with pytest.raises(ChannelError, match=words):
            meet_sender(link, CPU)
        link.lines.peers.clear()
        link.close()


def test_no_handle_of_gpu_memory_is_unpickled(tmp_path: Path) -> None:
    payload = base64.b64encode(pickle.dumps(Payload(tmp_path / "made"))).decode()
    with pytest.raises(KeyError):
        accept("cuda_ipc", CPU, 4096, {"gpu": "none", "handle": payload})
    with pytest.raises(ValueError):  # noqa: PT011  (there is no such GPU)
        accept("cuda_ipc", CPU, 4096, {"gpu": "none", "handles": [payload] * 3, "numbers": [1, 2, 3], "event_sync": 0})
    assert not (tmp_path / "made").exists()


def changing_receiver(channel: Channel) -> Any:
    """One whose bytes are changed on the way, by somebody who knows how the checksum is made."""
    from rayhelper.channel import rounds
    from rayhelper.channel.transports import Broadcast

    arrived = Broadcast.arrived

    def changed(self: Broadcast, index: int, meanwhile: Any) -> None:
        arrived(self, index, meanwhile)
        self.buckets[index][100] ^= 1

    Broadcast.arrived = changed  # type: ignore[method-assign]
    real = rounds._hand_out

    def fitting(link: Any, message: Any, *others: Any) -> Any:
        data = link.transport.buckets[message["index"]][: message["used"]]
        return real(link, {**message, "checksum": rounds.checksum(data)}, *others)

    rounds._hand_out = fitting
    return list(channel.receive())


@pytest.mark.parametrize("authenticated", [True, False])
def test_bytes_that_somebody_changed_are_noticed_unless_that_was_switched_off(authenticated: bool) -> None:
    with Channel(timeout_s=30, transport="gloo", authenticate_payload=authenticated) as channel:
        _, found = values((send, channel, [NAMED]), (changing_receiver, channel))
    assert isinstance(found, ChannelError)
    assert ("other bytes than the sender sent. Somebody changed them" in str(found)) is authenticated
    assert (
        "received other buckets than the sender sent" in str(found)
    ) is not authenticated  # the receipt, which anyone can make


def ports(channel: Channel, function: Any, *args: Any) -> Any:
    function(channel, *args)
    return listening()


def test_a_channel_listens_at_the_address_of_the_cluster_alone() -> None:
    with Channel(timeout_s=60, transport="gloo") as channel:
        own = values((ports, channel, send, [NAMED]), (ports, channel, receive, 1))
        assert set(listening().values()) <= {LOOPBACK}
    for found in own:
        assert set(found.values()) <= {LOOPBACK}, found


def held_back(channel: Channel, go: Any) -> Any:
    assert go.wait(60)
    return receive(channel, 1)


def test_a_second_sender_without_the_key_is_told_apart_from_the_true_one() -> None:
    """It dials the driver as a sender would, and so do receivers; neither is let in."""
    go = processes.Event()
    sides = (send, [NAMED]), (held_back, go)
    with (
        Channel(timeout_s=60, transport="shared_memory") as channel,
        peers(*((side, channel, given) for side, given in sides)) as (one, other),
    ):
        driver, client = meeting_of(channel)
        true = sender_of(client)
        forged = pickle.loads(pickle.dumps(channel))
        forged._terms = type(forged._terms)(**{**vars(forged._terms), "secret": b"guessed"})
        with pytest.raises(ChannelError, match="it has ended, or has another key"):
            forged.send(NAMED)
        with pytest.raises(ConnectionError):
            Client(true, b"guessed", channel._terms.purpose, 5.0)
        assert sender_of(client) == true
        client.close()
        go.set()
        assert one.value() == [receipt for receipt, _ in other.value()]
        assert driver[0] == "127.0.0.1"
