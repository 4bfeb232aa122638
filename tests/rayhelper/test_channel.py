"""Streams of tensors between processes: what arrives, how much is held, and what happens when somebody dies."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayhelper import ChannelError, ConfigError, DeadlineError, RayHelper
from rayhelper.channel import Channel, Receipt
from tests.backends.ranks import forkserver as processes
from tests.conftest import without_runtime

KIB = 1 / 1024  # in megabytes
TRANSPORTS = ["shared_memory", "gloo"]
Named = list[tuple[str, torch.Tensor]]


class Peer:
    """A process that runs one function; ``value`` is what the function returned or raised."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.pipe, theirs = processes.Pipe(duplex=False)
        self.process = processes.Process(target=_run, args=(theirs, function, args), daemon=True)
        self.process.start()
        theirs.close()

    def value(self) -> Any:
        assert self.pipe.poll(300), "the process did not finish"
        value = self.pipe.recv()
        self.process.join(60)
        assert not self.process.is_alive(), "the process did not end"
        return value


def _run(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        value = function(*args)
    except Exception as error:
        traceback.print_exc()
        error.raised_at = time.monotonic()  # type: ignore[attr-defined]  # one clock for all processes
        value = error
    pipe.send(value)


@contextlib.contextmanager
def peers(*functions_and_args: tuple[Any, ...]) -> Iterator[list[Peer]]:
    started = [Peer(function, *args) for function, *args in functions_and_args]
    try:
        yield started
    finally:
        for peer in started:
            peer.process.kill()
            peer.process.join()
            peer.pipe.close()


def values(*functions_and_args: tuple[Any, ...]) -> list[Any]:
    with peers(*functions_and_args) as started:
        return [peer.value() for peer in started]


def every_kind() -> Named:
    """Every type and shape that a state dict may hold."""
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(6, 10, generator=generator)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    named = [(str(dtype), (floats * 3).to(dtype)) for dtype in dtypes]
    named += [("complex", torch.complex(floats, -floats)), ("conjugate", torch.complex(floats, floats).conj())]
    named += [("scalar", torch.tensor(3.5)), ("empty", torch.empty(0, 3)), ("odd bytes", torch.arange(7).byte())]
    named += [("transposed", floats.t()), ("strided", floats[:, ::2]), ("expanded", torch.tensor([1.0]).expand(5))]
    named += [
        ("large", torch.randn(5000, generator=generator)),
        ("large transposed", torch.arange(4200.0).view(60, 70).t()),
    ]
    named += [("parameter", torch.nn.Parameter(floats)), ("tied", floats), ("tied too", floats)]
    return named


def send(channel: Channel, rounds: list[Named]) -> list[Any]:
    return [channel.send(iter(named)) for named in rounds]


def four_rounds() -> list[Named]:
    return [every_kind(), [], [("w", torch.arange(10.0))], every_kind()[::-1]]


def send_four(channel: Channel) -> list[Any]:
    return send(channel, four_rounds())


def receive(channel: Channel, num_rounds: int, copy: bool = True) -> list[Any]:
    results = []
    for _ in range(num_rounds):
        received = channel.receive(copy=copy)
        named = [(name, tensor if copy else tensor.clone()) for name, tensor in received]
        results.append((received.receipt, [(name, tensor.dtype, _raw(tensor)) for name, tensor in named]))
    assert not dist.is_initialized()
    return results


def _raw(tensor: torch.Tensor) -> tuple[list[int], bytes]:
    """Shape and bytes, which compare exactly and travel without shared files."""
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return list(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def expected(named: Named) -> list[Any]:
    return [(name, tensor.dtype, _raw(tensor)) for name, tensor in named]


# What arrives


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_type_and_shape_arrives_at_two_receivers_in_every_round(transport: Any, copy: bool) -> None:
    rounds = four_rounds()
    with Channel(2, bucket_mb=8 * KIB, timeout_s=60, transport=transport) as channel:
        sent, *got = values((send_four, channel), (receive, channel, 4, copy), (receive, channel, 4, copy))
    for results in got:
        assert [receipt for receipt, _ in results] == sent
        for (_, found), named in zip(results, rounds, strict=True):
            assert [name for name, *_ in found] == [name for name, _ in named]
            assert [one[0] for one, other in zip(found, expected(named), strict=True) if one != other] == []
    assert [receipt.num_tensors for receipt in sent] == [len(named) for named in rounds]
    assert [receipt.num_bytes for receipt in sent] == [sum(t.nbytes for _, t in named) for named in rounds]
    assert {receipt.transport for receipt in sent} == {transport}


def test_processes_of_one_machine_share_memory_unless_told_otherwise() -> None:
    with Channel(timeout_s=60) as channel:
        (sent,), _ = values((send, channel, [[("w", torch.ones(3))]]), (receive, channel, 1))
    assert sent.transport == "shared_memory"


def lookahead_sender(channel: Channel, num: int, taken: Any, third_taken: Any) -> Any:
    def named_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for k in range(num):
            taken.value = k + 1
            if k == 2:
                third_taken.set()
            yield f"w{k}", torch.full((1024,), k, dtype=torch.float32)  # as large as a bucket

    return channel.send(named_tensors())


def lookahead_receiver(channel: Channel, taken: Any, third_taken: Any) -> list[int]:
    ahead = []
    for k, _ in enumerate(channel.receive()):
        if k == 0:
            assert third_taken.wait(60), "nothing was prepared while the first bucket was read"
        ahead.append(taken.value - k)
    return ahead


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_sender_fills_the_next_bucket_meanwhile_and_runs_no_further_ahead(transport: Any) -> None:
    taken, third_taken = processes.Value("i", 0), processes.Event()
    with Channel(bucket_mb=4 * KIB, timeout_s=60, transport=transport) as channel:
        _, ahead = values(
            (lookahead_sender, channel, 30, taken, third_taken), (lookahead_receiver, channel, taken, third_taken)
        )
    assert len(ahead) == 30, ahead
    assert max(ahead) <= 4  # one being read, one sent, one filled, and one item in hand that did not fit


# In one process


def test_in_one_process_every_receiver_gets_the_very_tensors() -> None:
    weights = {"a": torch.ones(3), "b": torch.zeros(2, 2).t()}
    with Channel(2) as channel:
        sent = channel.send(weights.items())
        for copy in (True, False):
            received = channel.receive(copy=copy)
            assert all(tensor.data_ptr() == weights[name].data_ptr() for name, tensor in received)
            assert received.receipt == sent
        assert (sent.num_tensors, sent.num_bytes, sent.transport) == (2, 28, "local")
        with pytest.raises(ChannelError, match=r"nothing was sent.*num_receivers=2 times"):
            next(channel.receive())


def test_a_channel_that_was_pickled_and_came_back_is_still_one_process_and_the_same() -> None:
    with Channel() as channel:
        before = pickle.dumps(channel)
        sender, receiver = pickle.loads(before), pickle.loads(before)
        sender.send([("w", torch.ones(3))])
        assert pickle.dumps(sender) == before  # a call that uses a channel does not change its argument
        assert [name for name, _ in receiver.receive()] == ["w"]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ([("w", torch.ones(1)), ("w", torch.ones(1))], "two tensors are named 'w'"),
        ([("w", [1.0])], "'w' is a list"),
        ([("w", torch.ones(1, device="meta"))], "'w' holds no plain data"),
        ([("w", torch.eye(2).to_sparse())], "'w' holds no plain data"),
    ],
)
def test_what_cannot_be_sent_is_named(named: Any, words: str) -> None:
    with Channel() as channel, pytest.raises(ChannelError, match=words):
        channel.send(named)


def test_mistakes_in_the_description_are_found_at_once() -> None:
    with pytest.raises(ConfigError, match="num_receivers >= 1"):
        Channel(0)
    with pytest.raises(ConfigError, match="carrier_pigeon"):
        Channel(transport="carrier_pigeon")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"host='192\.0\.2\.99' is not an address of this machine"):
        pickle.dumps(Channel(host="192.0.2.99"))


# When something goes wrong


def endless_sender(channel: Channel, die_at: int, died: Any) -> Any:
    def named_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for k in range(10**6):
            if k == die_at:
                died.value = time.monotonic()
                os.kill(os.getpid(), signal.SIGKILL)
            yield f"w{k}", torch.full((1024,), k, dtype=torch.float32)

    return channel.send(named_tensors())


def endless_receiver(channel: Channel, die_at: int, died: Any) -> int:
    for k, _ in enumerate(channel.receive()):
        if k == die_at:
            died.value = time.monotonic()
            os.kill(os.getpid(), signal.SIGKILL)
    return k


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_when_the_sender_is_killed_every_receiver_knows_within_two_seconds(transport: Any) -> None:
    died = processes.Value("d", 0.0)
    with Channel(2, bucket_mb=4 * KIB, timeout_s=60, transport=transport, name="sync") as channel:
        receivers = [(endless_receiver, channel, -1, died)] * 2
        with peers((endless_sender, channel, 20, died), *receivers) as (_, *started):
            errors = [peer.value() for peer in started]
    for error in errors:
        assert isinstance(error, ChannelError)
        assert "channel 'sync'" in str(error)
        assert "the sender has disconnected" in str(error)
        assert error.raised_at - died.value < 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_when_a_receiver_is_killed_the_sender_and_the_others_know_within_two_seconds(transport: Any) -> None:
    died = processes.Value("d", 0.0)
    with Channel(2, bucket_mb=4 * KIB, timeout_s=60, transport=transport) as channel:
        sides = [(endless_sender, channel, -1), (endless_receiver, channel, -1), (endless_receiver, channel, 20)]
        with peers(*((*side, died) for side in sides)) as (sender, survivor, _):
            errors = [sender.value(), survivor.value()]
    for error in errors:
        assert isinstance(error, ChannelError)
        assert "has disconnected: its process ended" in str(error)
        assert error.raised_at - died.value < 2  # type: ignore[attr-defined]
    assert "after tensor 'w" in str(errors[0])
    assert str(errors[1]).count("the sender failed") == 1


def failing_sender(channel: Channel) -> Any:
    def named_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "good", torch.ones(5000)
        raise ArithmeticError("no gradient for layer 7")

    return channel.send(named_tensors())


def test_an_exception_of_the_senders_iterator_reaches_both_sides() -> None:
    with Channel(bucket_mb=4 * KIB, timeout_s=60) as channel:
        sender, receiver = values((failing_sender, channel), (receive, channel, 1))
    assert isinstance(sender, ArithmeticError)
    assert isinstance(receiver, ChannelError)
    assert "the sender failed: ArithmeticError: no gradient for layer 7" in str(receiver)


def half_reader(channel: Channel) -> str:
    for name, _ in channel.receive():
        if name == "w3":
            break
    with pytest.raises(ChannelError, match="failed earlier"):
        channel.receive()
    return name


def test_a_receiver_that_stops_reading_is_told_to_the_sender() -> None:
    named = [(f"w{k}", torch.ones(1024)) for k in range(10)]
    with Channel(bucket_mb=4 * KIB, timeout_s=60) as channel:
        sender, name = values((send, channel, [named]), (half_reader, channel))
    assert name == "w3"
    assert isinstance(sender, ChannelError)
    assert "after tensor 'w2': the receiving code stopped before the end" in str(sender)


def reader_that_waits(channel: Channel, go: Any) -> Any:
    received = channel.receive()
    next(received)
    assert go.wait(60)
    return list(received)


def test_a_receiver_that_reads_no_further_is_named_with_the_last_tensor() -> None:
    named = [(f"w{k}", torch.ones(1024)) for k in range(10)]
    go = processes.Event()
    channel = Channel(bucket_mb=4 * KIB, timeout_s=10, name="sync")  # in which both sides have started
    with channel, peers((send, channel, [named]), (reader_that_waits, channel, go)) as (sender, receiver):
        error = sender.value()
        go.set()
        told = receiver.value()
    assert isinstance(error, DeadlineError)
    for words in ("channel 'sync' (shared_memory), sender", "after tensor 'w2'", "waited 10 s", "receiver 1 (process"):
        assert words in str(error)
    assert isinstance(told, ChannelError)
    assert "the sender failed" in str(told)


def test_a_side_that_nobody_meets_gives_up() -> None:
    with Channel(2, timeout_s=0.3) as lonely, Channel(timeout_s=0.3) as unsent:
        sender, receiver = values((send, lonely, [[]]), (receive, unsent, 1))
    assert isinstance(sender, DeadlineError)
    assert "0 of 2 came" in str(sender)
    assert isinstance(receiver, DeadlineError)
    assert "waited 0.3 s for the sender to call send()" in str(receiver)


def test_closing_on_the_driver_ends_every_wait() -> None:
    channel = Channel(timeout_s=60)
    port = pickle.loads(pickle.dumps(channel))._driver[1]
    with peers((receive, channel, 1)) as (receiver,):
        with socket.create_connection(("127.0.0.1", port)):  # it listens
            channel.close()
        error = receiver.value()
    assert isinstance(error, ChannelError)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ChannelError, match="was closed here"):
        channel.send([])


def send_and_stay(channel: Channel, leave: Any) -> Any:
    receipts = send(channel, [[("w", torch.ones(3))]])
    assert leave.wait(60)
    return receipts


def test_a_receiver_too_many_is_turned_away() -> None:
    leave = processes.Event()
    with Channel(1, timeout_s=60) as channel, peers((send_and_stay, channel, leave)) as (sender,):
        (((receipt, _),),) = values((receive, channel, 1))
        (late,) = values((receive, channel, 1))
        leave.set()
        assert sender.value() == [receipt]
    assert isinstance(late, ChannelError)
    assert "is num_receivers correct?" in str(late)


def corrupting_sender(channel: Channel) -> Any:
    from rayhelper.channel import rounds

    true_checksum = rounds.checksum
    rounds.checksum = lambda data: true_checksum(data) ^ 1
    return send(channel, [[("w", torch.ones(3)), ("v", torch.ones(3))]])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_that_changed_on_the_way_are_an_error_on_both_sides(transport: Any) -> None:
    with Channel(timeout_s=60, transport=transport) as channel:
        errors = values((corrupting_sender, channel), (receive, channel, 1))
    assert all(isinstance(error, ChannelError) for error in errors)
    assert "the bucket with 'w' to 'v' has checksum" in str(errors[0])
    assert "its bytes changed in transit" in str(errors[1])


def looking(channel: Channel, pipe: Any) -> list[bool]:
    """What a receiver sees before, between and after rounds; the pipe says when the sender has begun one."""
    seen = [channel.is_offered()]
    list(channel.receive())
    seen.append(channel.is_offered())
    pipe.send("next")
    assert pipe.poll(30)
    deadline = time.monotonic() + 60
    while not channel.is_offered() and time.monotonic() < deadline:
        time.sleep(0.001)
    seen += [channel.is_offered(), [name for name, _ in channel.receive()] == ["w"], channel.is_offered()]
    return seen


def sending_when_told(channel: Channel, pipe: Any) -> None:
    channel.send([("w", torch.ones(9))])
    assert pipe.recv() == "next"
    pipe.send("begun")
    channel.send([("w", torch.ones(9))])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_sees_when_a_round_is_offered(transport: Any) -> None:
    ends = processes.Pipe()
    with Channel(timeout_s=60, transport=transport) as channel:
        seen, _ = values((looking, channel, ends[0]), (sending_when_told, channel, ends[1]))
    assert seen == [False, False, True, True, False]


def test_in_one_process_a_round_is_offered_until_it_was_received() -> None:
    with Channel(2) as channel:
        seen = [channel.is_offered()]
        channel.send([("w", torch.ones(2))])
        for _ in range(2):
            seen.append(channel.is_offered())
            list(channel.receive())
        assert [*seen, channel.is_offered()] == [False, True, True, False]


# Between the workers of two device groups


@RayHelper.worker(group=["train", "rollout"])
class Syncing:
    @RayHelper.function(group="train", execute="first")
    def send_weights(self, channel: Channel, value: float) -> Receipt:
        return channel.send((f"w{k}", torch.full((1000,), value + k)) for k in range(5))

    @RayHelper.function(group="rollout")
    def load_weights(self, channel: Channel) -> Any:
        received = channel.receive()
        return {name: tensor.mean().item() for name, tensor in received}, received.receipt


def synced(channel: Channel) -> list[Any]:
    trainer = Syncing()
    rounds = []
    for value in (0.0, 10.0):
        sent = trainer.send_weights.defer(channel, value)
        got = trainer.load_weights(channel)
        rounds.append((sent.result(), got if isinstance(got, list) else [got]))
    return rounds


def check_synced(rounds: list[Any], num_receivers: int, transport: str) -> None:
    for value, (sent, got) in zip((0.0, 10.0), rounds, strict=True):
        assert sent.transport == transport
        assert got == [({f"w{k}": value + k for k in range(5)}, sent)] * num_receivers


def test_the_same_calls_sync_weights_with_ray_off_and_in_simulated_workers() -> None:
    with without_runtime(), Channel() as channel:
        check_synced(synced(channel), 1, "local")
    groups = {"a": {"device": "CPU", "ranks": 1, "workers": ["train"]}}
    groups |= {"b": {"device": "CPU", "ranks": 2, "workers": ["rollout"]}}
    with without_runtime(), RayHelper.session(groups, runtime="inprocess"), Channel(2) as channel:
        check_synced(synced(channel), 2, "local")


@pytest.mark.usefixtures("ray_cluster")
def test_the_same_calls_sync_weights_between_ray_workers() -> None:
    groups = {"a": {"device": "CPU", "ranks": 1, "workers": ["train"]}}
    groups |= {"b": {"device": "CPU", "ranks": 2, "workers": ["rollout"]}}
    with without_runtime(), RayHelper.session(groups), Channel(2, bucket_mb=4 * KIB) as channel:
        check_synced(synced(channel), 2, "shared_memory")


# Nothing left behind


def leftovers(function: Callable[..., Any], channel: Channel, *args: Any) -> Any:
    function(channel, *args)
    before = _held()
    function(channel, *args)
    during = _held()
    channel.close()
    return before, during, _held()


def _held() -> tuple[set[str], int]:
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    mapped = Path("/proc/self/maps").read_text().count("rayhelper_channel")
    return {link for link in links if link.startswith("socket") or "rayhelper" in link}, mapped


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rounds_reuse_the_connections_and_closing_leaves_none(transport: Any) -> None:
    threads = len(os.listdir("/proc/self/task"))
    with Channel(timeout_s=60, transport=transport) as channel:
        sides = values((leftovers, send, channel, [[("w", torch.ones(3))]]), (leftovers, receive, channel, 1))
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > threads:  # one that has been told to end takes a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for before, during, after in sides:
        assert before == during
        assert len(before[0]) >= 3
        assert after[1] == 0
        assert len(after[0]) < len(before[0]) - 2, after
    assert not [name for name in os.listdir("/dev/shm") if "rayhelper" in name]
