"""One timeline of every call of a run: what a span is, where spans are kept while it runs, and the file they end in.

    tracer.record(...)         a span, kept; under a microsecond
    tracer.drain()             the spans so far, and how many did not fit
    shifted(spans, offset_ns)  the same spans on another machine's clock
    write(path, spans)         a Chrome trace, which ui.perfetto.dev and chrome://tracing open
    read(path)                 the same spans, exact to the nanosecond

What a person reads of a file is ``timeline.py``; which moments of a call become spans is ``recording.py``. Pure.

The file is in the Trace Event Format of Chromium's trace viewer: a process is a role; a thread is a
rank. Events of one thread must nest, so those that overlap otherwise (``async`` methods, threads of the driver) go on
in a second thread, ``rank 0 (2)``. A call waits in the queue while earlier ones run, so ``queue`` spans are async
events, on a track of their own for each rank of a role. Arrows lead from the driver's ``dispatch`` of a call to the
``run`` of each worker.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from rayhelper.device_groups import DRIVER
from rayhelper.errors import ConfigError

STEP = "step"  # of the driver's loop: a mark around all that happened in it
PHASES = ("dispatch", "serialise", "queue", "run", "collect", "wait", "construct", STEP)
NO_CALL = 0  # the call of a span that belongs to none

_FORMAT = "rayhelper timeline 1"
_FIRST_TID = 10_001  # above every pid: viewers take the thread whose tid equals its pid for the main thread
_LINES = 4096  # events written at once

_Row = tuple[str, int, str, str, int, int, int, int]


class Span(NamedTuple):
    """Something that one process did from one moment to another."""

    role: str  # 'driver' for what the driver did
    rank: int  # of the worker in its group; of the process under torchrun
    phase: str  # one of PHASES
    name: str  # 'GRPOTrainer.update'
    start_ns: int  # time.time_ns() of the machine on which it was recorded
    end_ns: int
    call: int  # joins the spans of one call; NO_CALL if there is none
    num_bytes: int = 0


class Tracer:
    """The spans of this process, kept in memory until they are drained.

    At most ``limit`` spans are kept, about 250 bytes each; those that come later are counted in ``dropped`` and lost.
    Any thread may record.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self.limit = limit
        self.dropped = 0
        self._rows: list[_Row] = []
        self._lock = threading.Lock()  # of what is rare; appending to a list needs none

    def record(
        self, role: str, rank: int, phase: str, name: str, start_ns: int, end_ns: int, call: int, num_bytes: int = 0
    ) -> None:
        """The span is kept, or counted as dropped."""
        if len(self._rows) < self.limit:
            self._rows.append((role, rank, phase, name, start_ns, end_ns, call, num_bytes))
        else:
            with self._lock:
                self.dropped += 1

    @property
    def spans(self) -> list[Span]:
        """What is kept, in the order in which it was recorded."""
        return [Span._make(row) for row in self._rows[:]]

    def drain(self) -> tuple[list[Span], int]:
        """The spans kept since the last time and how many were dropped; both start anew."""
        with self._lock:
            rows = self._rows[:]
            del self._rows[: len(rows)]  # what another thread appended meanwhile stays for the next time
            dropped, self.dropped = self.dropped, 0
        return [Span._make(row) for row in rows], dropped


def shifted(spans: Iterable[Span], offset_ns: int) -> list[Span]:
    """The spans on a clock that is ``offset_ns`` ahead of the one that they were recorded with."""
    return [span._replace(start_ns=span.start_ns + offset_ns, end_ns=span.end_ns + offset_ns) for span in spans]


def write(path: str | Path, spans: Iterable[Span], *, metadata: Mapping[str, Any]) -> None:
    """The spans are in the file, which appears complete or not at all.

    A span that ends before it starts, because a clock was set back meanwhile, is written as an empty one.

    Args:
        path: ends in .json or .json.gz; the folder exists.
        metadata: comes back from ``read``; values that JSON does not know are written as text. ``timeline.py`` knows
            ``dropped`` (how many spans were lost) and ``num_ranks`` (how many ranks each role has, for idle ones).

    Raises:
        ConfigError: for another ending.
    """
    path = Path(path)
    check_path(path)
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _created(unfinished, compressed=path.suffix == ".gz") as file:
            for lines in _batches(_document(ordered, metadata)):
                file.write("".join(lines))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_path(path: Path) -> None:
    """Raises ConfigError if a trace cannot have this name."""
    if not path.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"a trace is a .json or .json.gz file, but trace={str(path)!r} was asked for. Rename it.")


def read(path: str | Path) -> tuple[list[Span], dict[str, Any]]:
    """The spans of a file, in order of their start, and its metadata.

    Raises:
        ConfigError: if it is not a file that ``write`` has written.
    """
    document = _parsed(Path(path))
    other = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(other, dict) or other.get("format") != _FORMAT:
        raise ConfigError(f"{path} is JSON, but not a trace that rayhelper wrote. Give the file named by trace=.")
    try:
        metadata = json.loads(json.dumps(other["metadata"], default=float))
        return _spans(document["traceEvents"], int(other["origin_ns"])), dict(metadata)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"the trace {path} is damaged: {error!r}. Record it again.") from None


def _stack_for(stacks: list[list[int]], start_ns: int, end_ns: int) -> int:
    """The first of the stacks of open spans (their ends) in which this one nests or follows; it is pushed there.

    Spans come in order of (start, -end). A new stack is begun where none fits.
    """
    for index, stack in enumerate(stacks):
        while stack and stack[-1] <= start_ns:
            stack.pop()
        if not stack or end_ns <= stack[-1]:
            stack.append(end_ns)
            return index
    stacks.append([end_ns])
    return len(stacks) - 1


def _created(path: Path, *, compressed: bool) -> contextlib.AbstractContextManager[io.TextIOBase]:
    if compressed:
        return io.TextIOWrapper(gzip.GzipFile(path, "wb", compresslevel=4), encoding="ascii")
    return path.open("w", encoding="ascii")


def _batches(lines: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) >= _LINES:
            yield batch
            batch = []
    yield batch


def _document(ordered: Sequence[Span], metadata: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the file. Keys that viewers do not know would end the file for them, hence ``otherData``."""
    origin_ns = ordered[0].start_ns if ordered else 0
    other = {"format": _FORMAT, "origin_ns": origin_ns, "metadata": dict(metadata)}
    yield '{"displayTimeUnit":"ms",\n"otherData":' + json.dumps(other, default=str, allow_nan=False)
    yield ',\n"traceEvents":['
    pids = _processes(ordered)
    tids, threads = _threads(ordered, pids)
    separator = "\n"  # commas stand before events, so that the last needs no care
    for event in _names(pids, threads):
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    for line in _events(ordered, origin_ns, pids, tids):
        yield ",\n" + line
    yield "\n]}\n"


def _processes(ordered: Sequence[Span]) -> dict[str, int]:
    """The pid of every role: the driver, then in the order in which they began."""
    roles = dict.fromkeys(span.role for span in ordered)
    names = [role for role in roles if role == DRIVER] + [role for role in roles if role != DRIVER]
    return {role: pid for pid, role in enumerate(names, start=1)}


def _threads(ordered: Sequence[Span], pids: Mapping[str, int]) -> tuple[list[int], dict[tuple[str, int, int], int]]:
    """The tid of every span; and of every (role, rank, which of the rank's threads), rising: Perfetto sorts by it."""
    open_ends: dict[tuple[str, int], list[list[int]]] = {}
    lanes = []
    for role, rank, phase, _, start_ns, end_ns, _, _ in ordered:
        thread = 0
        if phase != "queue":
            thread = _stack_for(open_ends.setdefault((role, rank), []), start_ns, max(start_ns, end_ns))
        lanes.append((role, rank, thread))
    rising = sorted(set(lanes), key=lambda lane: (pids[lane[0]], *lane[1:]))
    threads = {lane: tid for tid, lane in enumerate(rising, start=_FIRST_TID)}
    return [threads[lane] for lane in lanes], threads


def _names(pids: Mapping[str, int], threads: Mapping[tuple[str, int, int], int]) -> Iterator[dict[str, Any]]:
    """The metadata events that name and order the processes and threads."""
    for role, pid in pids.items():
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": role}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for (role, rank, thread), tid in threads.items():
        name = f"rank {rank}" if thread == 0 else f"rank {rank} ({thread + 1})"
        yield {"ph": "M", "pid": pids[role], "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pids[role], "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _events(ordered: Sequence[Span], origin_ns: int, pids: Mapping[str, int], tids: Sequence[int]) -> Iterator[str]:
    """One line a span, followed by the ends of its arrows.

    ``ts`` comes before any text, because some viewers read it before they understand escapes; an arrow's end follows
    its slice, because a viewer ties it to the slice begun last on the thread. A queue's id is local to its process:
    tracks of one name are one track, and under a plain id they belong to no process.
    """
    quoted = functools.cache(json.dumps)
    leaving, arriving = _arrows(ordered)
    for i, (role, rank, phase, name, start_ns, end_ns, call, num_bytes) in enumerate(ordered):
        begin, duration = _microseconds(start_ns - origin_ns), _microseconds(max(0, end_ns - start_ns))
        where = f'"pid":{pids[role]},"tid":{tids[i]}'
        args = f'"args":{{"call":{call},"bytes":{num_bytes},"phase":{quoted(phase)},"rank":{rank}'
        if phase == "queue":
            end = _microseconds(max(start_ns, end_ns) - origin_ns)
            track = f'{where},"cat":"queue","id2":{{"local":"0x{i:x}"}},"name":"rank {rank} queue"'
            yield f'{{"ph":"b","ts":{begin},{track},{args},"method":{quoted(name)}}}}}'
            yield f'{{"ph":"e","ts":{end},{track}}}'
            continue
        yield f'{{"ph":"X","ts":{begin},"dur":{duration},{where},"cat":{quoted(phase)},"name":{quoted(name)},{args}}}}}'
        for arrow in leaving.get(i, ()):
            yield f'{{"ph":"s","ts":{begin},{where},"cat":"call","id":"0x{arrow:x}","name":"call"}}'
        if i in arriving:
            yield f'{{"ph":"f","bp":"e","ts":{begin},{where},"cat":"call","id":"0x{i:x}","name":"call"}}'


def _arrows(ordered: Sequence[Span]) -> tuple[dict[int, list[int]], set[int]]:
    """By index of a dispatch, the runs that it led to; and all these runs. No arrow points backwards in time.

    Under torchrun every process dispatches: then a rank's run follows from its own process.
    """
    dispatches: dict[int, dict[int, int]] = {}
    leaving: dict[int, list[int]] = {}
    arriving = set()
    for i, span in enumerate(ordered):
        if span.call == NO_CALL:
            continue
        if span.phase == "dispatch":
            dispatches.setdefault(span.call, {}).setdefault(span.rank, i)
        elif span.phase == "run" and span.call in dispatches:
            by_rank = dispatches[span.call]
            leaving.setdefault(by_rank.get(span.rank, next(iter(by_rank.values()))), []).append(i)
            arriving.add(i)
    return leaving, arriving


def _microseconds(ns: int) -> str:
    """The unit of the format, with every nanosecond as a decimal."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _parsed(path: Path) -> Any:
    """The JSON of the file, compressed or not, whatever it is called."""
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
        return json.loads(text, parse_float=Decimal)  # a float would lose the nanoseconds of a long run
    except (ValueError, RecursionError, EOFError, OSError, zlib.error) as error:
        raise ConfigError(f"{path} is not a trace: {error}. Give the .json or .json.gz file named by trace=.") from None


def _spans(events: Sequence[Mapping[str, Any]], origin_ns: int) -> list[Span]:
    names = (event for event in events if event["ph"] == "M" and event["name"] == "process_name")
    roles = {event["pid"]: event["args"]["name"] for event in names}
    ends = {event["id2"]["local"]: event["ts"] for event in events if event["ph"] == "e"}
    found = []
    for event in events:
        if event["ph"] not in ("X", "b"):
            continue
        args, begin = event["args"], event["ts"]
        queued = event["ph"] == "b"
        end = ends[event["id2"]["local"]] if queued else begin + event["dur"]
        found.append(
            Span(
                roles[event["pid"]],
                args["rank"],
                args["phase"],
                args["method"] if queued else event["name"],
                origin_ns + int(begin * 1000),
                origin_ns + int(end * 1000),
                args["call"],
                args["bytes"],
            )
        )
    return found
