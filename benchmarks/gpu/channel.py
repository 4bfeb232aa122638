"""Do weights arrive on GPUs as they were sent, how fast, and how soon is a death noticed?

    python -m benchmarks.gpu.channel [--gib 0.25 1 2] [--rounds 6] [--cases TEXT] [--json FILE]

Each row sends tensors of mixed sizes from a process on GPU 0 to a process on the same GPU or on GPU 1, and checks them
there. GiB/s is the median of the rounds after the first, from the sender's first tensor until the receiver has a copy
of each in memory of its own and both have compared checksums; the first round and connecting are shown too. Peers, in
the same run: torch.distributed.broadcast over nccl of one flat tensor of the same size, between the same GPUs; and a
copy within one GPU. The last table tells how long after a SIGKILL the other side raises.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.channel import weights
from rayhelper.channel import Channel
from rayhelper.channel.buckets import BLOCK
from rayhelper.channel.checksums import word_checksum

processes = multiprocessing.get_context("spawn")
GIB = 2**30


def kinds(device: str) -> dict[str, torch.Tensor]:
    """A tensor of every type and of awkward shapes."""
    floats = torch.linspace(-300, 300, 600).view(20, 30)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    named = {str(dtype): floats.to(dtype) for dtype in dtypes}
    named |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "odd": torch.arange(7).byte()}
    named = {name: tensor.to(device) for name, tensor in named.items()}
    return named | {"transposed": floats.to(device).t(), "on the CPU": torch.arange(5.0), "bias": torch.ones(1)}


def random_weights(gib: float, device: str) -> dict[str, torch.Tensor]:
    """The same numbers in every process on GPUs of one kind."""
    torch.cuda.manual_seed(0)
    return weights(int(gib * 1024), device)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    left, right = (one.cpu().contiguous().reshape(-1).view(torch.uint8) for one in (ours, theirs))
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(left, right)


def checksum_ms(gib: float) -> float:
    """Milliseconds of a checksum on a GPU, for a bucket of that size; it is what the same bytes have on the CPU."""
    for num_blocks in (1, 3, 1024, 4099):
        data = torch.randint(256, (num_blocks * BLOCK,), dtype=torch.uint8)
        assert word_checksum(data.to(_use(0))) == word_checksum(data), num_blocks
    bucket = torch.ones(int(gib * GIB) // BLOCK * BLOCK, dtype=torch.uint8, device=_use(0))
    word_checksum(bucket)
    start = time.perf_counter()
    for _ in range(10):
        word_checksum(bucket)
    return (time.perf_counter() - start) * 100


def sender(channel: Channel, gpu: int, gib: float, rounds: int) -> Any:
    device = _use(gpu)
    start = time.perf_counter()
    receipts = [channel.send(kinds(device).items())]
    connected_s = time.perf_counter() - start
    named = random_weights(gib, device)
    torch.cuda.synchronize()
    receipts += [channel.send(named.items()) for _ in range(rounds)]
    return receipts, connected_s


def receiver(channel: Channel, gpu: int, gib: float, rounds: int, on: str | None) -> Any:
    device = _use(gpu)
    received, wanted = channel.receive(device=on), kinds(device)
    wrong = [name for name, tensor in received if not same(tensor, wanted[name])]
    receipts, named = [received.receipt], random_weights(gib, device)
    for k in range(rounds):
        received, held = channel.receive(device=on), {}
        for name, tensor in received:
            held[name] = tensor
        receipts.append(received.receipt)
        if k == 0:
            wrong += [name for name, tensor in held.items() if not torch.equal(tensor.to(device), named[name])]
    assert len(held) == len(named)
    return receipts, wrong, str(next(iter(held.values())).device)


def broadcaster(rank: int, meeting: str, gib: float, rounds: int) -> Any:
    device = _use(rank)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=2)
    flat = torch.ones(int(gib * GIB), dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        dist.broadcast(flat, src=0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return seconds


def copier(gib: float, rounds: int) -> Any:
    flat = torch.ones(int(gib * GIB), dtype=torch.uint8, device=_use(0))
    room, seconds = torch.empty_like(flat), []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        room.copy_(flat)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def dying_sender(channel: Channel, gpu: int, died: Any) -> Any:
    device = _use(gpu)

    def named_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for k in range(10**6):
            if k == 50:
                died.value = time.monotonic()
                os.kill(os.getpid(), signal.SIGKILL)
            yield f"w{k}", torch.full((1 << 20,), float(k), device=device)

    return channel.send(named_tensors())


def bereaved_receiver(channel: Channel, gpu: int) -> Any:
    _use(gpu)
    try:
        for _ in channel.receive():
            pass
    except Exception as error:
        return time.monotonic(), f"{type(error).__name__}: {error}"
    return None


def _use(gpu: int) -> str:
    torch.cuda.set_device(gpu)
    torch.zeros(1, device="cuda")
    return f"cuda:{gpu}"


def _run(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def together(*functions_and_args: tuple[Any, ...], timeout_s: float = 180) -> list[Any]:
    """What each returned, in a process of its own; None for one that died. Raises with the traceback of a failure."""
    pipes, started = [], []
    for function, *args in functions_and_args:
        ours, theirs = processes.Pipe(duplex=False)
        started.append(processes.Process(target=_run, args=(theirs, function, args)))
        started[-1].start()
        theirs.close()
        pipes.append(ours)
    values, problems = [], []
    try:
        for pipe in pipes:
            try:
                succeeded, value = pipe.recv() if pipe.poll(timeout_s) else (False, "did not finish")
            except EOFError:
                succeeded, value = True, None
            (values if succeeded else problems).append(value)
            timeout_s = 20 if problems else timeout_s
        if problems:
            raise RuntimeError("\n".join(problems))
        return values
    finally:
        for process in started:
            process.join(20)
            process.kill()


def measured(
    transport: Any, gib: float, rounds: int, to_gpu: int, on: str | None, bucket_mb: float = 64
) -> dict[str, Any]:
    """One row for a channel."""
    with Channel(transport=transport, timeout_s=60, bucket_mb=bucket_mb) as channel:
        (sent, connected_s), (got, wrong, device) = together(
            (sender, channel, 0, gib, rounds), (receiver, channel, to_gpu, gib, rounds, on)
        )
    assert sent == got, (sent, got)
    assert not wrong, f"{transport}: other values came for {wrong}"
    seconds = [receipt.seconds for receipt in sent[1:]]
    moved_gib = sent[1].num_bytes / GIB
    return _row(seconds, moved_gib) | {"used": sent[0].transport, "arrived_on": device, "connected_s": connected_s}


def _row(seconds: list[float], gib: float) -> dict[str, Any]:
    return {"GiB_s": gib / statistics.median(seconds[1:]), "first_GiB_s": gib / seconds[0]}


def peer(gib: float, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [(broadcaster, rank, f"{folder}/meeting", gib, rounds) for rank in range(2)]
        return _row(together(*ranks)[0], gib)


def killed(transport: Any, to_gpu: int) -> dict[str, Any]:
    died = processes.Value("d", 0.0)
    with Channel(transport=transport, bucket_mb=16, timeout_s=60) as channel:
        _, (noticed, text) = together((dying_sender, channel, 0, died), (bereaved_receiver, channel, to_gpu))
    return {"noticed_after_s": noticed - died.value, "error": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[0.25, 1, 2])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cases", help="only those whose name holds this text, and nobody is killed")
    parser.add_argument(
        "--json", type=Path, default=Path(os.environ["OUT"], "channel.json") if "OUT" in os.environ else None
    )
    args = parser.parse_args()
    two = torch.cuda.device_count() > 1
    cases: dict[str, Callable[[float], dict[str, Any]]] = {
        "copy within GPU 0": lambda gib: _row(together((copier, gib, args.rounds))[0], gib),
        "channel auto, same GPU": lambda gib: measured("auto", gib, args.rounds, 0, None),
        "channel shared_memory (pinned), same GPU": lambda gib: measured("shared_memory", gib, args.rounds, 0, "cuda"),
        "channel shared_memory (pinned), to the CPU": lambda gib: measured("auto", gib, args.rounds, 0, "cpu"),
        "channel gloo (pinned), same GPU": lambda gib: measured("gloo", gib, args.rounds, 0, "cuda"),
    }
    if two:
        cases |= {
            "channel cuda_ipc, GPU 0 to 1": lambda gib: measured("cuda_ipc", gib, args.rounds, 1, None),
            "channel nccl, GPU 0 to 1": lambda gib: measured("nccl", gib, args.rounds, 1, None),
            "channel nccl, GPU 0 to 1, buckets of 256 MB": lambda gib: measured("nccl", gib, args.rounds, 1, None, 256),
            "torch.distributed nccl, one flat tensor, 0 to 1": lambda gib: peer(gib, args.rounds),
        }
    if args.cases is not None:
        cases = {name: measure for name, measure in cases.items() if args.cases in name}
    deaths = {"cuda_ipc": 0, "shared_memory": 0} | ({"nccl": 1} if two else {})
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "rows": [],
        "deaths": {},
    }
    print(f"{result['gpu']}, torch {result['torch']}\n{'':50}{'GiB':>6}{'GiB/s':>9}{'first':>9}{'connect s':>11}  used")
    (result["checksum_ms"],) = together((checksum_ms, 0.25))
    print(f"checksum of 0.25 GiB: {result['checksum_ms']:.3f} ms")
    for name, measure in cases.items():
        for gib in args.gib:
            try:
                row = measure(gib)
            except Exception as error:  # a row that fails is shown, and the others are measured
                row = {"error": str(error)}
            result["rows"].append({"name": name, "gib": gib} | row)
            print(f"{name:50}{gib:6.2f}" + _shown(row), flush=True)
    for transport, to_gpu in deaths.items() if args.cases is None else ():
        try:
            result["deaths"][transport] = killed(transport, to_gpu)
        except Exception as error:
            result["deaths"][transport] = {"error": str(error)}
        print(f"sender killed, {transport}: {result['deaths'][transport]}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


def _shown(row: dict[str, Any]) -> str:
    if "error" in row:
        return "  FAILED: " + row["error"].strip()
    connect = f"{row['connected_s']:11.3f}" if "connected_s" in row else f"{'':11}"
    return f"{row['GiB_s']:9.2f}{row['first_GiB_s']:9.2f}{connect}  {row.get('used', '')} {row.get('arrived_on', '')}"


if __name__ == "__main__":
    main()
