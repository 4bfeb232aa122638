"""Connections between those who know one key: what they exchange, and what strangers can do to them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rayhelper.authenticated import server as server_module
from rayhelper.authenticated.client import Client, dial
from rayhelper.authenticated.meeting import MeetingPoint, find, put, store_over
from rayhelper.authenticated.sealing import NONCE_BYTES, AuthenticationError, Handshake, Session
from rayhelper.authenticated.server import MAX_STRANGERS, Server
from rayhelper.channel.patches import gloo_group
from rayhelper.worker.side_door import Door, ask
from tests.rayhelper.strangers import LOOPBACK, listening, silent, told, tries

KEY = b"a key of the tests"


def met(listener_key: bytes = KEY, dialler_key: bytes = KEY, purposes: tuple[str, str] = ("p", "p")) -> list[Session]:
    """Both sides of a connection, the listening one first, after the handshake."""
    sides = Handshake(listener_key, purposes[0], listens=True), Handshake(dialler_key, purposes[1], listens=False)
    waiting = [sides[0].start(), sides[1].start()]
    for turn in (1, 0, 1):
        waiting[turn], _ = sides[turn].feed(waiting[1 - turn])
    assert sides[0].session is not None
    assert sides[1].session is not None
    return [sides[0].session, sides[1].session]


def test_messages_arrive_in_order_however_the_bytes_are_cut() -> None:
    listener, dialler = met()
    sent = [b"", b"one", bytes(100_000)]
    stream = b"".join(map(dialler.seal, sent))
    found = [payload for k in range(0, len(stream), 997) for payload in listener.feed(stream[k : k + 997])]
    assert found == sent
    assert dialler.feed(listener.seal(b"back")) == [b"back"]


def test_a_message_that_was_changed_repeated_left_out_or_turned_round_is_noticed() -> None:
    spoilt = {
        "changed": lambda one, two: one[:-1] + bytes([one[-1] ^ 1]),
        "its length": lambda one, two: one[:3] + bytes([one[3] - 1]) + one[4:],
        "its code": lambda one, two: one[:4] + bytes([one[4] ^ 1]) + one[5:],
        "repeated": lambda one, two: one + one,
        "left out": lambda one, two: two,
        "moved": lambda one, two: two + one,
        "too long": lambda one, two: b"\xff" * 64,
    }
    for what, change in spoilt.items():
        listener, dialler = met()
        stream = change(dialler.seal(b"one"), dialler.seal(b"two"))
        with pytest.raises(AuthenticationError):
            pytest.fail(f"{what}: {listener.feed(stream)}")
    listener, dialler = met()
    with pytest.raises(AuthenticationError):
        dialler.feed(dialler.seal(b"its own"))


def test_who_has_another_key_or_purpose_is_not_known() -> None:
    for spoilt in ({"listener_key": b"another"}, {"dialler_key": b"another"}, {"purposes": ("p", "q")}):
        with pytest.raises(AuthenticationError, match="does not have the key"):
            met(**spoilt)  # type: ignore[arg-type]


def test_what_was_recorded_of_one_connection_is_worth_nothing_in_another() -> None:
    listener, dialler = Handshake(KEY, "p", listens=True), Handshake(KEY, "p", listens=False)
    dialler.feed(listener.start())
    proof, _ = Handshake(KEY, "p", listens=False).feed(listener.start())
    again = Handshake(KEY, "p", listens=True)
    again.start()
    with pytest.raises(AuthenticationError):
        again.feed(proof)
    mirror = Handshake(KEY, "p", listens=False)  # somebody who listens and sends all back
    echo, _ = mirror.feed(os.urandom(NONCE_BYTES))
    with pytest.raises(AuthenticationError):
        mirror.feed(echo)


@pytest.fixture
def server() -> Iterator[Server]:
    asked: list[object] = []
    server = Server("127.0.0.1", KEY, "p", lambda question: asked.append(question) or question, "rayhelper-test")
    server.asked = asked  # type: ignore[attr-defined]
    yield server
    server.close()
    assert not server.thread.is_alive()


def test_strangers_are_heard_by_nobody_and_learn_nothing(server: Server, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for what, sent in tries(made).items():
        half = "half" in what
        heard = told(server.address, sent, wait_s=0.3 if half else 5.0)
        assert len(heard) <= NONCE_BYTES, what  # the nonce, and no proof
    with pytest.raises(ConnectionError, match="it has ended, or has another key"):
        Client(server.address, b"another", "p", 5.0)
    with pytest.raises(ConnectionError, match="it has ended, or has another key"):
        Client(server.address, KEY, "another purpose", 5.0)
    assert server.asked == []  # type: ignore[attr-defined]
    assert not made.exists()
    client = Client(server.address, KEY, "p", 5.0)
    assert client.ask({"a": [1, "two", None]}, 5.0) == {"a": [1, "two", None]}
    client.close()


def test_a_recorded_conversation_is_not_answered_again(server: Server) -> None:
    """By somebody who sits between both sides and hears everything."""
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            dialler, _ = between.accept()
            with dialler, socket.create_connection(server.address) as towards:
                pairs = [threading.Thread(target=copy, args=pair) for pair in ((dialler, towards), (towards, dialler))]
                for one in pairs:
                    one.start()
                for one in pairs:
                    one.join()

        def copy(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(1 << 16):
                if target.getpeername() == server.address:
                    recorded.append(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=relay)
        thread.start()
        client = Client(between.getsockname(), KEY, "p", 5.0)
        assert client.ask("once", 5.0) == "once"
        client.close()
        thread.join()
    assert len(told(server.address, b"".join(recorded))) == NONCE_BYTES
    assert server.asked == ["once"]  # type: ignore[attr-defined]


def test_silent_visitors_hold_nobody_up_and_are_shown_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_S", 1.0)
    with silent(server.address, MAX_STRANGERS + 10) as visitors:
        client = Client(server.address, KEY, "p", 5.0)
        assert client.ask("heard", 5.0) == "heard"
        for visitor in visitors:
            visitor.settimeout(10.0)
            heard = b""
            while data := visitor.recv(100):
                heard += data
            assert len(heard) <= NONCE_BYTES
        assert client.ask("still", 5.0) == "still"  # who has proved that it knows the key may be silent
        client.close()


def test_a_server_that_does_not_know_the_key_is_asked_nothing() -> None:
    stranger = Server("127.0.0.1", b"another", "p", lambda question: question, "rayhelper-test")
    with pytest.raises(ConnectionError):
        dial(stranger.address, KEY, "p", 5.0)
    stranger.close()
    with socket.create_server(("127.0.0.1", 0)) as liar:
        heard: list[bytes] = []

        def lie() -> None:
            connection, _ = liar.accept()
            with connection:
                connection.sendall(bytes(NONCE_BYTES))
                heard.append(connection.recv(1000))
                connection.sendall(bytes(NONCE_BYTES))
                heard.append(connection.recv(1000))

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(AuthenticationError, match="does not have the key"):
            Client(liar.getsockname(), KEY, "p", 5.0)
        thread.join()
    assert heard[1] == b""
    assert KEY not in heard[0]


# Doors


def test_a_silent_visitor_does_not_mute_a_door_and_a_pickle_does_not_open_it(tmp_path: Path) -> None:
    door = Door("127.0.0.1", KEY, {"double": lambda value: 2 * value})
    with silent(door.address, 3):
        for sent in tries(tmp_path / "made").values():
            told(door.address, sent, wait_s=0.2)
        started = time.monotonic()
        assert ask({7: door.address}, KEY, "double", 21, timeout_s=10) == {7: 42}
        assert time.monotonic() - started < 8  # no waiting for those who say nothing
    assert listening()[door.address[1]] == LOOPBACK
    door.close()
    assert not (tmp_path / "made").exists()


# Meeting points


def test_a_process_group_meets_at_a_meeting_point() -> None:
    point = MeetingPoint("127.0.0.1", KEY, "p")
    received: dict[int, float] = {}

    def member(rank: int) -> None:
        client = Client(point.address, KEY, "p", 10.0)
        store = store_over(client, 30.0)
        group = gloo_group(dist.PrefixStore("g", store), rank, 3, timedelta(seconds=30), "127.0.0.1")
        tensor = torch.tensor([float(rank + 1)])
        group.broadcast([tensor], dist.BroadcastOptions()).wait()
        received[rank] = tensor.item()
        del group
        client.close()

    members = [threading.Thread(target=member, args=(rank,)) for rank in range(3)]
    for one in members:
        one.start()
    for one in members:
        one.join()
    point.close()
    assert received == {0: 1.0, 1: 1.0, 2: 1.0}


def test_a_meeting_point_is_a_store_as_torch_describes_them() -> None:
    point = MeetingPoint("127.0.0.1", KEY, "p")
    client = Client(point.address, KEY, "p", 10.0)
    store = store_over(client, 10.0)
    assert (store.add("n", 2), store.add("n", 3), store.get("n")) == (2, 5, b"5")
    store.set("a", b"\x00\xff")
    assert (store.get("a"), store.check(["a"]), store.check(["a", "b"])) == (b"\x00\xff", True, False)
    assert (store.compare_set("c", "", "1"), store.compare_set("c", "0", "2")) == (b"1", b"1")
    assert (store.delete_key("c"), store.delete_key("c")) == (True, False)
    with pytest.raises(TimeoutError, match="nobody has set 'b'"):
        store.wait(["b"], timedelta(seconds=0.05))
    put(client, "plain", ["x", 1], 5.0)
    assert (find(client, "plain", 5.0), find(client, "none", 5.0)) == (["x", 1], None)
    client.close()
    point.close()
