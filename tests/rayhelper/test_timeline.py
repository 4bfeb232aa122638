"""The numbers of a timeline against intervals that can be checked by eye, and the page that shows them."""

from __future__ import annotations

import itertools
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhelper.timeline import Method, Usage, html, summarise, timeline, trace, union
from rayhelper.timeline import summary as module
from rayhelper.timeline.trace import Span

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'$headline\u2028\ud800"


def run(rank: int, start: int, end: int, name: str = "T.update", call: int = 0, role: str = "train") -> Span:
    return Span(role, rank, "run", name, start, end, call)


def usage_of(spans: list[Span], role: str, rank: int | None = None, **keywords: Any) -> Usage:
    """What the summary says about a role or one of its ranks."""
    for total, ranks in summarise(spans, **keywords).roles:
        for usage in (total, *ranks):
            if (usage.role, usage.rank) == (role, rank):
                return usage
    raise AssertionError(f"no row for {role} {rank}")


def test_spans_that_overlap_or_nest_count_once() -> None:
    #           0    10   20   30   40   50   60   70   80   90   100
    # overlap        |=========|
    #                     |==========|
    # nested                                   |=========|
    #                                            |====|
    spans = [run(0, 10, 30), run(0, 20, 42), run(0, 60, 80), run(0, 63, 73), run(1, 0, 100)]
    usage = usage_of(spans, "train", 0)
    assert (usage.busy_ns, usage.idle_ns, usage.share) == (52, 48, 0.52)
    assert (usage.gap_ns, usage.gap_start_ns) == (20, 80)


def test_the_longest_gap_may_be_before_the_first_call_and_starts_count_from_the_trace() -> None:
    spans = [run(0, 1_050, 1_060), run(0, 1_080, 1_100), run(1, 1_000, 1_100)]
    usage = usage_of(spans, "train", 0)
    assert (usage.gap_ns, usage.gap_start_ns) == (50, 0)
    assert usage_of(spans, "train", 1).gap_ns == 0
    assert usage_of(spans, "train").gap_ns == 50


def test_a_role_is_as_busy_as_its_ranks_on_average() -> None:
    spans = [run(0, 0, 100), run(1, 0, 50), Span("train", 2, "queue", "T.update", 0, 100, 3)]
    total = usage_of(spans, "train")
    assert (total.busy_ns, total.idle_ns, total.share) == (150, 150, 0.5)
    assert usage_of(spans, "train", 2).share == 0


def test_a_rank_that_left_no_span_counts_when_the_trace_tells_of_it() -> None:
    spans = [run(0, 0, 100, role="judge")]
    assert usage_of(spans, "judge").share == 1
    assert usage_of(spans, "judge", num_ranks={"judge": 4}).share == 0.25
    idle = usage_of(spans, "reward", num_ranks={"reward": 1})
    assert (idle.busy_ns, idle.idle_ns, idle.gap_ns, idle.num_calls, idle.methods) == (0, 100, 100, 0, ())


def test_construction_is_work_and_waiting_in_the_queue_is_not() -> None:
    spans = [
        Span("train", 0, "construct", "T", 0, 30, 0),
        Span("train", 0, "queue", "T.update", 10, 40, 1),
        Span("train", 0, "queue", "T.update", 20, 50, 2),
        run(0, 40, 50, call=1),
        run(0, 50, 100, call=2),
    ]
    usage = usage_of([*spans, Span("train", 0, "construct", "T", 100, 120, 0)], "train")
    assert (usage.startup_ns, usage.busy_ns, usage.idle_ns) == (30, 80, 10)
    assert (usage.queue_ns, usage.num_calls) == (20, 2)


def test_shares_leave_start_up_out_and_what_follows_the_last_step() -> None:
    #        0    10   20   30   40   50   60   70   80   90   100
    # built  |---------|
    # runs        |---------|    |----|         |----|    |----|
    # steps                      [=========]    [======]
    steps = [Span("driver", 0, trace.STEP, f"step {n}", *when, 0) for n, when in enumerate([(40, 60), (70, 84)], 1)]
    runs = [run(0, 10, 30, "T.build", 1), run(0, 40, 50, call=2), run(0, 70, 80, call=3), run(0, 90, 100, "T.save", 4)]
    spans = [Span("train", 0, "construct", "T", 0, 20, 0), *runs, *steps]
    usage = usage_of(spans, "train")
    assert (usage.startup_ns, usage.busy_ns, usage.idle_ns, usage.num_calls) == (30, 20, 24, 2)
    assert (usage.gap_ns, usage.gap_start_ns) == (20, 50)
    assert [method.name for method in usage.methods] == ["T.update"]
    summary = summarise(spans)
    assert module.headline(summary, {}) == (
        "100 ns: start-up 40 ns, 2 steps 44 ns (22 ns per step), afterwards 16 ns, 7 spans"
    )
    drawn = json.loads(Page(html(spans, {})).scripts[0])
    assert drawn["steps"] == [["step 1", 40, 20], ["step 2", 70, 14]]
    assert len(drawn["spans"]["start"]) == 5
    without = [Span("train", 0, "construct", "T", 0, 20, 0), run(0, 10, 15), run(1, 20, 30)]
    assert summarise(without).window == (20, 30)
    assert summarise(without[:1]).window == (0, 20)


def test_a_moment_of_the_driver_is_of_one_phase_and_all_add_up() -> None:
    spans = [
        Span("driver", 0, trace.STEP, "step 1", 0, 100, 0),
        Span("driver", 0, "run", "T.log", 5, 60, 0),
        Span("driver", 0, "dispatch", "T.update", 20, 30, 1),
        Span("driver", 0, "serialise", "T.update", 24, 28, 1),
        Span("driver", 0, "wait", "T.update", 28, 50, 1),
        Span("driver", 0, "collect", "T.update", 48, 52, 1),
    ]
    usage = usage_of(spans, "driver")
    assert usage.phases == {"serialise": 4, "collect": 4, "dispatch": 6, "wait": 18, "run": 23, module.OWN: 45}
    assert (sum(usage.phases.values()), usage.busy_ns, usage.idle_ns) == (100, 82, 18)


def test_the_driver_is_idle_while_it_waits() -> None:
    spans = [
        Span("driver", 0, "dispatch", "T.update", 0, 10, 1),
        Span("driver", 0, "serialise", "T.update", 4, 14, 1),
        Span("driver", 0, "wait", "T.update", 14, 90, 1),
        Span("driver", 0, "collect", "T.update", 90, 100, 1),
    ]
    usage = usage_of(spans, "driver")
    assert usage.phases == {"dispatch": 4, "serialise": 10, "wait": 76, "collect": 10}
    assert (usage.busy_ns, usage.idle_ns, usage.num_calls) == (24, 76, 1)


def test_methods_are_listed_by_the_time_they_took_over_all_ranks() -> None:
    spans = [run(0, 0, 10, "T.save"), run(0, 10, 40), run(0, 20, 30), run(1, 0, 25, "T.save"), run(1, 25, 35)]
    assert usage_of(spans, "train", 0).methods == (Method("T.update", 30, 2), Method("T.save", 10, 1))
    assert usage_of(spans, "train").methods == (Method("T.update", 40, 3), Method("T.save", 35, 2))


def test_a_call_on_two_ranks_is_one_call_of_the_role() -> None:
    spans = [run(rank, 0, 10, call=call) for rank in range(2) for call in (1, 2, 3)]
    assert usage_of(spans, "train").num_calls == 3
    assert usage_of(spans, "train", 1).num_calls == 3


def test_bytes_go_to_the_role_that_ran_the_call() -> None:
    spans = [
        Span("driver", 0, "serialise", "T.update", 0, 1, 1, 100),
        Span("driver", 0, "serialise", "T.judge", 1, 2, 2, 7),
        run(0, 2, 3, call=1),
        Span("train", 1, "run", "T.update", 2, 3, 1, 30),
        run(0, 2, 3, "T.judge", 2, role="judge"),
        Span("driver", 0, "collect", "T.update", 3, 4, 1, 12),
    ]
    sizes = {role: (usage_of(spans, role).bytes_in, usage_of(spans, role).bytes_out) for role in ("train", "judge")}
    assert sizes == {"train": (100, 42), "judge": (7, 0)}
    assert (usage_of(spans, "driver").bytes_in, usage_of(spans, "driver").bytes_out) == (12, 107)
    assert usage_of(spans, "train", 1).bytes_out == 30


def test_the_driver_comes_first_then_roles_by_name() -> None:
    spans = [run(0, 0, 1), run(0, 0, 1, role="a"), Span("driver", 0, "wait", "f", 0, 1, 1)]
    assert [total.role for total, _ in summarise(spans).roles] == ["driver", "a", "train"]


def test_nothing_and_an_instant_have_a_summary() -> None:
    assert summarise([], {"train": 0}) == module.Summary(0, 0, 0, ())
    assert usage_of([run(0, 5, 5)], "train").share == 0
    assert usage_of([run(0, 5, 3), run(0, 5, 9)], "train").busy_ns == 4  # a clock that was set back


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))))


@settings(max_examples=200, deadline=None)
@given(intervals)
def test_a_union_covers_the_same_moments(parts: list[tuple[int, int]]) -> None:
    joined = union(parts)
    covered = {moment for start, end in parts for moment in range(start, end)}
    assert {moment for start, end in joined for moment in range(start, end)} == covered
    assert sum(end - start for start, end in joined) == len(covered)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(joined))


class Page(HTMLParser):
    """The elements of a page, the text of its cells and the content of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("meta", "link", "img"):
            return
        self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        elif tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


SPANS = [
    Span("driver", 0, "dispatch", HOSTILE, 100, 110, 1, 64),
    Span(HOSTILE, 0, "queue", HOSTILE, 110, 130, 1),
    Span(HOSTILE, 0, "run", HOSTILE, 130, 190, 1),
    Span(HOSTILE, 1, "run", "T.inner", 140, 150, 0),
    Span(HOSTILE, 1, "run", HOSTILE, 135, 200, 1),
    Span("driver", 0, HOSTILE, "T.other", 190, 200, 1),
]


def test_the_page_stands_alone_and_no_name_breaks_out_of_it() -> None:
    text = html(SPANS, {"runtime": HOSTILE, "dropped": 5})
    assert text.isascii()
    page = Page(text)
    assert page.open == []
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2
    assert not set("<>&") & set(page.scripts[0])
    assert not set(tags) & {"img", "link", "iframe", "base", "object"}
    assert not any({"src", "href", "onerror"} & set(attributes) for _, attributes in page.elements)
    assert "@import" not in text
    assert "url(" not in text
    assert "5 spans were dropped" in text
    assert any(cell.startswith(HOSTILE[:-1]) for cell in page.cells)  # a parser shows no lone surrogate
    assert "prefers-color-scheme: dark" in text


def test_the_page_holds_every_span() -> None:
    data = json.loads(Page(html(SPANS, {})).scripts[0])
    spans = data["spans"]
    starts = [lane["first"] for lane in data["lanes"]]
    found = []
    for lane, begin, end in zip(data["lanes"], starts, [*starts[1:], len(SPANS)], strict=True):
        for i in range(begin, end):
            start = spans["start"][i] + 100
            name, phase = data["names"][spans["name"][i]], data["phases"][spans["phase"][i]]
            stop = start + spans["length"][i]
            found.append(
                Span(lane["role"], lane["rank"], phase, name, start, stop, spans["call"][i], spans["bytes"][i])
            )
    assert sorted(found) == sorted(SPANS)
    assert [lane["share"] for lane in data["lanes"]] == [1.0, 0.6, 0.65]
    assert data["wall"] == 100


def test_spans_of_a_lane_that_overlap_are_drawn_in_different_rows() -> None:
    spans = [run(0, 0, 100), run(0, 10, 50), run(0, 20, 30), run(0, 60, 120), run(0, 130, 140)]
    queued = [Span("train", 0, "queue", "f", 0, 90, 1), Span("train", 0, "queue", "f", 5, 95, 2)]
    drawn = json.loads(Page(html(spans + queued, {})).scripts[0])["spans"]
    assert sorted(zip(drawn["start"], drawn["depth"], strict=True)) == [
        (0, 0),  # queued calls have a strip of their own
        (0, 0),
        (5, 0),
        (10, 1),
        (20, 2),
        (60, 1),
        (130, 0),
    ]


def test_a_page_of_nothing_is_a_page() -> None:
    data = json.loads(Page(html([], {})).scripts[0])
    assert (data["lanes"], data["spans"]["start"]) == ([], [])


def test_the_subcommand_prints_a_table_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = [run(rank, 0, 10**9, call=1) for rank in range(2)] + [Span("driver", 0, "dispatch", "f", 0, 2 * 10**9, 1)]
    trace.write(tmp_path / "t.json.gz", spans, metadata={"runtime": "ray", "dropped": 3, "num_ranks": {"train": 4}})
    assert timeline(str(tmp_path / "t.json.gz"), str(tmp_path / "t.html")) == 0
    out = capsys.readouterr().out
    assert "3 spans were dropped" in out.replace("\n", " ")
    lines = {line.strip().partition("  ")[0]: line.split() for line in out.splitlines()}
    assert lines["train (4 ranks)"][4:9] == ["1", "2", "s", "25.0%", "6"]
    assert lines["rank 3"][3:6] == ["0", "0", "0.0%"]
    assert (tmp_path / "t.html").read_text() == html(*trace.read(tmp_path / "t.json.gz"))


def test_of_many_ranks_the_least_and_the_most_busy_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write(tmp_path / "t.json", [run(rank, 0, 100 + rank, call=1) for rank in range(20)], metadata={})
    assert timeline(str(tmp_path / "t.json")) == 0
    out = capsys.readouterr().out
    shown = [int(line.split()[1]) for line in out.splitlines() if line.strip().startswith("rank ")]
    assert shown == [0, 1, 2, 3, 16, 17, 18, 19]
    assert "12 more between" in out


def test_names_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write(tmp_path / "t.json", [run(0, 0, 10, "\x1b[31mred[bold]")], metadata={"host": "\x1b]0;title\x07"})
    assert timeline(str(tmp_path / "t.json")) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[31mred[bold]" in out


def test_mistakes_are_one_line_and_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_text("not\njson")
    trace.write(tmp_path / "good.json", [run(0, 0, 1)], metadata={})
    wrong = [
        (tmp_path / "t.json", None, "not a trace"),
        (tmp_path / "none.json", None, "No such file"),
        (tmp_path / "good.json", str(tmp_path / "no folder" / "t.html"), "No such file"),
    ]
    for file, page, message in wrong:
        assert timeline(str(file), page) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert message in captured.err
        assert captured.out == ""


def test_times_and_sizes_are_said_as_people_do() -> None:
    assert [module._duration(ns) for ns in (0, 7, 999, 1_000, 1_234_567, 999_999_999, 12 * 10**9, 605 * 10**9)] == [
        "0",
        "7 ns",
        "999 ns",
        "1 us",
        "1.23 ms",
        "1 s",
        "12 s",
        "10 min 05 s",
    ]
    assert [module._size(size) for size in (0, 999, 1_500, 999_999, 2 * 10**9)] == [
        "-",
        "999 B",
        "1.5 kB",
        "1 MB",
        "2 GB",
    ]
