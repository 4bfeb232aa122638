"""The trace file: exact both ways, and as the Trace Event Format wants it."""

from __future__ import annotations

import gzip
import json
import threading
import timeit
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayhelper.device_groups import DeviceGroups
from rayhelper.errors import ConfigError
from rayhelper.timeline import trace
from rayhelper.timeline.recording import Recording
from rayhelper.timeline.trace import Span, Tracer

NOW = 1_790_000_000_123_456_789  # as time.time_ns() gives it: more digits than a float holds

RUN = [
    Span("driver", 0, "dispatch", "T.update", NOW, NOW + 1_001, 1, 64),
    Span("driver", 0, "serialise", "T.update", NOW + 100, NOW + 900, 1),
    Span("train", 0, "queue", "T.update", NOW + 1_500, NOW + 3_000, 1),
    Span("train", 1, "queue", "T.update", NOW + 1_600, NOW + 3_000, 1),
    Span("train", 0, "run", "T.update", NOW + 3_000, NOW + 9_000, 1, 8),
    Span("train", 1, "run", "T.update", NOW + 3_001, NOW + 9_002, 1, 8),
    Span("train", 0, "queue", "T.save", NOW + 2_000, NOW + 9_100, 2),
    Span("train", 0, "run", "T.save", NOW + 9_100, NOW + 9_101, 2),
    Span("driver", 0, "collect", "T.update", NOW + 9_500, NOW + 9_777, 1, 16),
]


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a file, after the rules of the format have been checked on them."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(text, parse_float=Decimal)
    assert list(document) == ["displayTimeUnit", "otherData", "traceEvents"]  # all that every viewer knows
    events: list[dict[str, Any]] = document["traceEvents"]
    named = {(e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    for event in events:
        assert event["ph"] in ("X", "b", "e", "s", "f", "M")
        assert event["pid"] > 0
        assert (event["pid"], None) in named
        if event["ph"] != "M":
            assert event["ts"] >= 0
            assert (event["pid"], event["tid"]) in named
            assert event["tid"] not in {pid for pid, _ in named}  # would be a main thread
    check_nesting(events)
    check_async(events)
    check_arrows(events)
    return events


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    start = int(event["ts"] * 1000)
    return start, start + int(event["dur"] * 1000)


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On one thread, a slice ends before the next begins or encloses it wholly."""
    by_thread = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            by_thread[event["pid"], event["tid"]].append(nanoseconds(event))
    for slices in by_thread.values():
        open_ends: list[int] = []
        for start, end in sorted(slices, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def check_async(events: list[dict[str, Any]]) -> None:
    """Every begin has one end, later, of the same category, name, id and process."""
    begun, ended = (
        {(e["cat"], e["name"], e["id2"]["local"], e["pid"]): e["ts"] for e in events if e["ph"] == phase}
        for phase in "be"
    )
    assert begun.keys() == ended.keys()
    assert len(begun) == sum(e["ph"] in "be" for e in events) / 2
    assert all(begun[key] <= ended[key] for key in begun)


def check_arrows(events: list[dict[str, Any]]) -> None:
    """Every arrow has a start and an end inside the slices that precede them in the file, and leads forward."""
    ends: dict[str, list[tuple[str, Decimal]]] = defaultdict(list)
    latest: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["ph"] == "X":
            latest[event["tid"]] = event
        elif event["ph"] in "sf":
            enclosing = latest[event["tid"]]
            assert enclosing["ts"] <= event["ts"] <= enclosing["ts"] + enclosing["dur"]
            assert enclosing["cat"] == {"s": "dispatch", "f": "run"}[event["ph"]]
            assert event["ph"] == "s" or event["bp"] == "e"
            ends[event["id"]].append((event["ph"], event["ts"]))
    for pair in ends.values():
        assert sorted(phase for phase, _ in pair) == ["f", "s"]
        assert dict(pair)["s"] <= dict(pair)["f"]


def arrows(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(thread that dispatched, thread that ran) of every arrow."""
    roles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {e["tid"]: f"{roles[e['pid']]} {e['args']['name']}" for e in events if e["name"] == "thread_name"}
    starts = {e["id"]: threads[e["tid"]] for e in events if e["ph"] == "s"}
    return sorted((starts[e["id"]], threads[e["tid"]]) for e in events if e["ph"] == "f")


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_comes_back_to_the_nanosecond(tmp_path: Path, name: str) -> None:
    metadata = {"runtime": "ray", "dropped": 3, "ratio": 0.1, "groups": {"train": [0, 1]}}
    trace.write(tmp_path / name, reversed(RUN), metadata=metadata)
    spans, read_metadata = trace.read(tmp_path / name)
    assert spans == sorted(RUN, key=lambda span: (span.start_ns, -span.end_ns))
    assert read_metadata == metadata
    assert isinstance(read_metadata["ratio"], float)
    events_of(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


instants = st.integers(0, 50) | st.integers(NOW, NOW + 10**10)
any_spans = st.builds(
    lambda role, rank, phase, name, start, length, call, num_bytes: Span(
        role, rank, phase, name, start, start + length, call, num_bytes
    ),
    st.sampled_from(["driver", "train", 'a "<role>" \\ & more', "späte\u2028rolle\ud800"]),
    st.integers(0, 3),
    st.sampled_from([*trace.PHASES, "unheard of"]),
    st.sampled_from(["T.update", "</script>", "process_name", "{}{0}"]),
    instants,
    st.integers(0, 30),
    st.integers(0, 4) | st.just(2**52),
    st.integers(0, 2**60),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=st.lists(any_spans, max_size=30))
def test_any_spans_make_a_valid_trace_and_come_back(tmp_path: Path, spans: list[Span]) -> None:
    path = tmp_path / "t.json"  # written anew each time
    trace.write(path, spans, metadata={})
    assert sorted(trace.read(path)[0]) == sorted(spans)
    events_of(path)


def test_the_driver_is_the_first_process_and_each_rank_a_thread(tmp_path: Path) -> None:
    late_driver = [Span("train", 1, "run", "f", 5, 6, 1), Span("driver", 0, "wait", "f", 8, 9, 1)]
    trace.write(tmp_path / "t.json", late_driver, metadata={})
    events = events_of(tmp_path / "t.json")
    named = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(named, key=lambda role: order[named[role]]) == ["driver", "train"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == named["train"]] == [
        "rank 1"
    ]


def test_an_arrow_leads_from_the_dispatch_to_every_run_of_the_call(tmp_path: Path) -> None:
    trace.write(tmp_path / "t.json", RUN, metadata={})
    assert arrows(events_of(tmp_path / "t.json")) == [
        ("driver rank 0", "train rank 0"),
        ("driver rank 0", "train rank 1"),
    ]


def test_under_torchrun_an_arrow_stays_in_its_process(tmp_path: Path) -> None:
    spans = [Span("driver", rank, "dispatch", "f", 10 + rank, 20, 7) for rank in range(2)]
    spans += [Span("train", rank, "run", "f", 30, 40, 7) for rank in range(3)]
    trace.write(tmp_path / "t.json", spans, metadata={})
    assert arrows(events_of(tmp_path / "t.json")) == [
        ("driver rank 0", "train rank 0"),
        ("driver rank 0", "train rank 2"),
        ("driver rank 1", "train rank 1"),
    ]


def test_no_arrow_joins_spans_without_a_call_or_points_backwards(tmp_path: Path) -> None:
    spans = [
        Span("driver", 0, "dispatch", "f", 10, 20, trace.NO_CALL),
        Span("train", 0, "run", "f", 30, 40, trace.NO_CALL),
        Span("driver", 0, "dispatch", "g", 60, 70, 2),
        Span("train", 0, "run", "g", 50, 80, 2),  # a clock that is behind
    ]
    trace.write(tmp_path / "t.json", spans, metadata={})
    assert arrows(events_of(tmp_path / "t.json")) == []


def test_runs_that_overlap_continue_in_a_second_thread(tmp_path: Path) -> None:
    spans = [
        Span("train", 0, "run", "outer", 0, 100, 1),
        Span("train", 0, "run", "inner", 10, 50, 2),
        Span("train", 0, "run", "other", 40, 120, 3),
    ]
    trace.write(tmp_path / "t.json", spans, metadata={})
    events = events_of(tmp_path / "t.json")
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["name"]: threads[e["tid"]] for e in events if e["ph"] == "X"} == {
        "outer": "rank 0",
        "inner": "rank 0",
        "other": "rank 0 (2)",
    }


def test_calls_that_wait_have_a_track_of_their_own_for_each_rank(tmp_path: Path) -> None:
    trace.write(tmp_path / "t.json", RUN, metadata={})
    waiting = [e for e in events_of(tmp_path / "t.json") if e["ph"] == "b"]
    assert [(e["name"], e["args"]["method"]) for e in waiting] == [
        ("rank 0 queue", "T.update"),
        ("rank 1 queue", "T.update"),
        ("rank 0 queue", "T.save"),
    ]


def test_two_roles_do_not_share_the_track_of_their_queues(tmp_path: Path) -> None:
    spans = [Span(role, 0, "queue", "f", 10, 20, call) for call, role in enumerate(["train", "judge"], start=1)]
    trace.write(tmp_path / "t.json", spans, metadata={})
    waiting = [e for e in events_of(tmp_path / "t.json") if e["ph"] in "be"]
    assert len({e["pid"] for e in waiting}) == 2
    assert all("id" not in e for e in waiting)  # such events belong to no process, so tracks of one name become one


def test_viewers_that_sort_threads_by_number_show_ranks_in_order(tmp_path: Path) -> None:
    spans = [Span(role, rank, "run", "f", 50 - rank, 60, 1) for role in ("train", "judge") for rank in (2, 10, 0)]
    spans += [Span("train", 2, "run", "beside", 55, 70, 2), Span("driver", 0, "dispatch", "f", 55, 56, 1)]
    trace.write(tmp_path / "t.json", spans, metadata={})
    events = events_of(tmp_path / "t.json")
    roles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {e["tid"]: (roles[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    sort_index = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    for number in (int, sort_index.__getitem__):
        in_order = [threads[tid] for tid in sorted(threads, key=number)]
        assert [name for role, name in in_order if role == "judge"] == ["rank 0", "rank 2", "rank 10"]
        assert [name for role, name in in_order if role == "train"] == ["rank 0", "rank 2", "rank 2 (2)", "rank 10"]


def test_a_clock_that_was_set_back_gives_an_empty_span(tmp_path: Path) -> None:
    spans = [Span("train", 0, phase, "f", 50, 20, 1) for phase in ("run", "queue")]
    trace.write(tmp_path / "t.json", spans, metadata={})
    events_of(tmp_path / "t.json")
    assert [(span.start_ns, span.end_ns) for span in trace.read(tmp_path / "t.json")[0]] == [(50, 50), (50, 50)]


def test_a_trace_without_spans_is_a_trace(tmp_path: Path) -> None:
    trace.write(tmp_path / "t.json", [], metadata={"path": Path("x")})
    assert events_of(tmp_path / "t.json") == []
    assert trace.read(tmp_path / "t.json") == ([], {"path": "x"})


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace.write(path, RUN, metadata={})
    with pytest.raises(ValueError, match="JSON compliant"):
        trace.write(path, RUN[:1], metadata={"loss": float("nan")})
    assert len(trace.read(path)[0]) == len(RUN)
    assert list(tmp_path.iterdir()) == [path]


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.json\.gz file, but trace='.*t\.txt'"):
        trace.write(tmp_path / "t.txt", RUN, metadata={})
    assert list(tmp_path.iterdir()) == []


NO_TRACES = {
    "text": b"loss 0.3\n",
    "bytes": b"\xff\x00",
    "cut gzip": gzip.compress(b'{"traceEvents": []}')[:-9],
    "no gzip": b"\x1f\x8b and then nothing",
    "a list": b"[1, 2]",
    "another program's": b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1, "pid": 1, "tid": 1, "name": "f"}]}',
}


@pytest.mark.parametrize("data", NO_TRACES.values(), ids=NO_TRACES)
def test_a_file_that_is_no_trace_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(ConfigError, match="not a trace"):
        trace.read(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("written", "instead"), [('"dur":', '"duration":'), ('"args":', '"arg":'), ('"ph":"e"', '"ph":"n"')]
)
def test_a_damaged_trace_is_told(tmp_path: Path, written: str, instead: str) -> None:
    path = tmp_path / "t.json"
    trace.write(path, RUN, metadata={})
    path.write_text(path.read_text().replace(written, instead))
    with pytest.raises(ConfigError, match="damaged"):
        trace.read(path)


def test_shifted_moves_both_ends() -> None:
    (moved,) = trace.shifted(RUN[:1], -89)
    assert (moved.start_ns, moved.end_ns) == (NOW - 89, NOW + 912)
    assert moved._replace(start_ns=NOW, end_ns=NOW + 1_001) == RUN[0]


def test_a_full_tracer_counts_what_it_drops() -> None:
    tracer = Tracer(limit=2)
    for span in RUN:
        tracer.record(*span)
    assert tracer.spans == RUN[:2]
    assert tracer.drain() == (RUN[:2], len(RUN) - 2)
    assert tracer.drain() == ([], 0)
    tracer.record(*RUN[3])
    assert tracer.drain() == ([RUN[3]], 0)


def test_rank_0_writes_what_all_processes_recorded_and_dropped(tmp_path: Path) -> None:
    class Others:
        def gather(self, value: Any, *_: Any) -> list[tuple[Any, bool]]:
            return [(value, False), (([RUN[5]], 4), False), ("a call", False)]

    groups = DeviceGroups.parse({"crew": {"device": "CPU", "ranks": 3, "workers": ["train"]}})
    recording = Recording(str(tmp_path / "t.json"), "torchrun", groups)
    recording.tracer = Tracer(limit=1)
    recording.tracer.record(*RUN[4])
    recording.tracer.record(*RUN[4])
    others: Any = Others()
    recording.write_gathered(others)
    spans, metadata = trace.read(tmp_path / "t.json")
    assert sorted(spans, key=lambda span: span.rank) == RUN[4:6]
    assert (metadata["dropped"], metadata["missing"]) == (1 + 4, ["process 2"])


def test_threads_record_and_drain_at_once_and_nothing_is_lost() -> None:
    tracer = Tracer(limit=1500)
    drained: list[Span] = []
    dropped = 0

    def record(rank: int) -> None:
        for call in range(1000):
            tracer.record("train", rank, "run", "f", call, call + 1, call)

    threads = [threading.Thread(target=record, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        spans, lost = tracer.drain()
        drained, dropped = drained + spans, dropped + lost
    for thread in threads:
        thread.join()
    spans, lost = tracer.drain()
    assert len(drained) + len(spans) + dropped + lost == 4000
    assert len(set(drained + spans)) == len(drained) + len(spans)


def test_recording_costs_little() -> None:
    record = Tracer().record
    best_s = min(timeit.repeat(lambda: record("train", 0, "run", "T.update", NOW, NOW, 1, 0), number=10_000, repeat=7))
    assert best_s / 10_000 < 3e-6  # a third of that on an idle core: what is guarded is the order of magnitude
