"""How fast do weights travel between processes of one machine without GPUs?

    python -m benchmarks.channel [--megabytes 256] [--rounds 5] [--receivers 1] [--json FILE]

One process sends a dict of tensors of mixed sizes, the others receive it; every row moves the same tensors in the same
run. A round counts from the sender's first tensor until every receiver has all of them in memory of its own (with
copy=False: has seen them). Peers: a copy within one process (as fast as one core can copy once; a channel copies
twice), and torch.distributed.broadcast over gloo, a tensor at a time, as one writes it by hand. Medians of the rounds
after the first, which is shown by itself: new memory is touched in it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.origin import origin
from rayhelper.channel import Channel

processes = multiprocessing.get_context("spawn")


def weights(megabytes: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Tensors as of a transformer: an eighth in one embedding, the rest matrices of 8, 4 and 1 MB and small vectors."""
    left, named = megabytes * 2**20, {}
    for k, size in enumerate([left // 8] + [8 << 20, 4 << 20, 4 << 20, 1 << 20, 4096, 4096] * megabytes):
        size = min(size, left)
        if size:
            named[f"layers.{k}.weight"] = torch.randn(size // 4, device=device)
        left -= size
    return named


def channel_sender(channel: Channel, megabytes: int, rounds: int, pipe: Any) -> None:
    named = weights(megabytes)
    for _ in range(rounds):
        start = time.perf_counter()
        receipt = channel.send(named.items())
        pipe.send((time.perf_counter() - start, receipt.seconds))


def channel_receiver(channel: Channel, copy: bool, rounds: int) -> None:
    for _ in range(rounds):
        for _ in channel.receive(copy=copy):
            pass


def gloo_rank(rank: int, size: int, meeting: str, megabytes: int, rounds: int, pipe: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    named = weights(megabytes)
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        for tensor in named.values():
            dist.broadcast(tensor if rank == 0 else torch.empty_like(tensor), src=0)
        dist.barrier()
        if rank == 0:
            pipe.send((time.perf_counter() - start,) * 2)
    dist.destroy_process_group()


def run(rounds: int, pipe: Any, *functions_and_args: tuple[Any, ...]) -> list[tuple[float, float]]:
    """(seconds of the call, seconds of the round) of every round."""
    started = [processes.Process(target=function, args=args) for function, *args in functions_and_args]
    for process in started:
        process.start()
    try:
        assert pipe.poll(120), "the processes did not start"
        return [pipe.recv() for _ in range(rounds)]
    finally:
        for process in started:
            process.join(30)
            process.kill()


def by_channel(
    transport: Any, copy: bool, args: argparse.Namespace, *, authenticate_payload: bool = True
) -> list[tuple[float, float]]:
    ours, theirs = processes.Pipe(duplex=False)
    with Channel(
        args.receivers, transport=transport, bucket_mb=args.bucket_mb, authenticate_payload=authenticate_payload
    ) as channel:
        receivers = [(channel_receiver, channel, copy, args.rounds)] * args.receivers
        return run(args.rounds, ours, (channel_sender, channel, args.megabytes, args.rounds, theirs), *receivers)


def by_hand(args: argparse.Namespace) -> list[tuple[float, float]]:
    ours, theirs = processes.Pipe(duplex=False)
    size = 1 + args.receivers
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/meeting"
        ranks = [(gloo_rank, rank, size, meeting, args.megabytes, args.rounds, theirs) for rank in range(size)]
        return run(args.rounds, ours, *ranks)


def memcpy(args: argparse.Namespace) -> list[tuple[float, float]]:
    named = weights(args.megabytes)
    room = {name: torch.empty_like(tensor) for name, tensor in named.items()}
    seconds = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        for name, tensor in named.items():
            room[name].copy_(tensor)
        seconds.append(time.perf_counter() - start)
    return [(one, one) for one in seconds]


def milliseconds_to_connect(transport: Any, rounds: int = 5) -> tuple[float, float]:
    """(first, later) milliseconds of a round that moves one small tensor."""
    ours, theirs = processes.Pipe(duplex=False)
    with Channel(1, transport=transport) as channel:
        sender = (channel_sender_of_little, channel, rounds, theirs)
        seconds = [one for one, _ in run(rounds, ours, sender, (channel_receiver, channel, True, rounds))]
    return 1e3 * seconds[0], 1e3 * statistics.median(seconds[1:])


def channel_sender_of_little(channel: Channel, rounds: int, pipe: Any) -> None:
    for _ in range(rounds):
        receipt = channel.send([("w", torch.ones(256))])
        pipe.send((receipt.seconds, receipt.seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--bucket_mb", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Callable[[], list[tuple[float, float]]]] = {
        "copy in one process": lambda: memcpy(args),
        "channel, shared_memory, copy=False": lambda: by_channel("shared_memory", False, args),
        "channel, shared_memory": lambda: by_channel("shared_memory", True, args),
        "channel, gloo": lambda: by_channel("gloo", True, args),
        "channel, gloo, payload not authenticated": lambda: by_channel("gloo", True, args, authenticate_payload=False),
        "torch.distributed, gloo, a tensor at a time": lambda: by_hand(args),
    }
    result: dict[str, Any] = {**origin(), "megabytes": args.megabytes, "rows": {}}
    for name, measure in rows.items():
        seconds = [one for _, one in measure()]
        first, later = (args.megabytes / 1024 / one for one in (seconds[0], statistics.median(seconds[1:])))
        result["rows"][name] = {"first_GiB_s": first, "GiB_s": later}
        print(f"{name:45} {later:6.2f} GiB/s   (first round {first:5.2f})", flush=True)
    for transport in ("shared_memory", "gloo"):
        first, later = milliseconds_to_connect(transport)
        result["rows"][f"one small tensor, {transport}"] = {"first_ms": first, "ms": later}
        print(
            f"a round of one small tensor, {transport:16} {later:6.2f} ms      (first round {first:5.2f})", flush=True
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
