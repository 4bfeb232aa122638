"""The timeline of a run: the same spans in every way to run it, and nothing when it is not asked for."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayhelper import ConfigError, RayHelper
from rayhelper.__main__ import main
from rayhelper.timeline import summarise
from rayhelper.timeline.steps import mark_step
from rayhelper.timeline.trace import STEP, Span, read
from tests.conftest import without_runtime

pytestmark = pytest.mark.xdist_group("ray")

GROUPS = {
    "trainers": {"device": "CPU", "ranks": 2, "workers": ["train"]},
    "judges": {"device": "CPU", "ranks": 1, "workers": ["judge"]},
}


@RayHelper.worker(group=["train", "judge"])
class Traced:
    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def double(self, items: Any) -> Any:
        return items * 2

    @RayHelper.function(group="judge", collect=sum)
    def judged(self, items: Any) -> float:
        return float(items.sum())


def recorded(path: Path, **options: Any) -> tuple[list[Span], dict[str, Any]]:
    with without_runtime(), RayHelper.session(GROUPS, trace=path, **options):
        traced = Traced()
        for _ in range(3):
            traced.double(np.ones(100_000))
        if options.get("runtime") != "off":
            assert traced.judged(traced.double.defer(np.ones(4))) == 8.0
    return read(path)


@pytest.fixture(scope="module")
def on_ray(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Span], dict[str, Any]]:
    return recorded(tmp_path_factory.mktemp("ray") / "trace.json.gz", runtime="ray")


@pytest.mark.parametrize("runtime", ["inprocess", "ray"])
def test_every_call_leaves_the_same_spans_in_every_runtime(
    on_ray: tuple[list[Span], dict[str, Any]], tmp_path: Path, runtime: str
) -> None:
    spans, metadata = on_ray if runtime == "ray" else recorded(tmp_path / "trace.json", runtime=runtime)
    assert metadata["runtime"] == runtime
    assert metadata["dropped"] == 0
    runs = Counter((span.role, span.rank, span.name) for span in spans if span.phase == "run")
    assert runs == {
        ("train", 0, "Traced.double"): 4,
        ("train", 1, "Traced.double"): 4,
        ("judge", 0, "Traced.judged"): 1,
    }
    driver = Counter(span.phase for span in spans if span.role == "driver")
    assert driver["dispatch"] == 5
    assert driver["collect"] >= 4
    calls = {span.call for span in spans if span.phase == "dispatch"}
    assert len(calls) == 5
    assert {span.call for span in spans if span.phase == "run"} == calls
    for span in spans:
        sent = next(one for one in spans if one.phase == "dispatch" and one.call == span.call) if span.call else span
        assert span.start_ns >= sent.start_ns


def test_a_ray_trace_tells_waiting_and_bytes(on_ray: tuple[list[Span], dict[str, Any]]) -> None:
    spans, _ = on_ray
    phases = Counter(span.phase for span in spans)
    assert phases["queue"] == phases["run"] == 9
    assert phases["serialise"] == 5
    large = [span for span in spans if span.phase == "serialise" and span.num_bytes]
    assert len(large) == 3
    assert all(span.num_bytes > 800_000 for span in large)
    returned = sorted(span.num_bytes for span in spans if span.phase == "run")
    assert len(returned[3:]) == 6
    assert all(num_bytes > 400_000 for num_bytes in returned[3:])
    assert all(num_bytes < 4_000 for num_bytes in returned[:3])


def test_off_records_what_ran_deferred_calls_too_and_the_steps(tmp_path: Path) -> None:
    with without_runtime(), RayHelper.session(GROUPS, trace=tmp_path / "trace.json", runtime="off"):
        traced, begun_ns = Traced(), time.time_ns()
        assert traced.judged(traced.double.defer(np.ones(4))) == 8.0
        mark_step(1, begun_ns)
    spans, _ = read(tmp_path / "trace.json")
    calls = [("train", "Traced.double"), ("judge", "Traced.judged")]
    expected = {(role, "run", name): 1 for role, name in calls} | {("driver", "wait", name): 1 for _, name in calls}
    assert Counter((span.role, span.phase, span.name) for span in spans) == {**expected, ("driver", STEP, "step 1"): 1}
    usage, _ = summarise(spans).roles[0]
    assert sum(usage.phases.values()) == usage.busy_ns + usage.idle_ns
    assert usage.phases["wait"] > 0
    mark_step(2, begun_ns)  # with Ray off: nothing


def test_a_trace_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.json"):
        RayHelper.initialize(GROUPS, trace=tmp_path / "trace.txt")
    with pytest.raises(ConfigError, match="folder"):
        RayHelper.initialize(GROUPS, trace=tmp_path / "absent" / "trace.json")


@pytest.mark.parametrize("runtime", ["off", "inprocess"])
def test_a_trace_that_cannot_be_written_at_the_end_leaves_the_process_usable(tmp_path: Path, runtime: str) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    groups = {"g": {"device": "CPU", "ranks": 1, "workers": ["w"]}}
    with without_runtime():
        RayHelper.initialize(groups, runtime=runtime, trace=folder / "x.json")  # type: ignore[arg-type]
        folder.rmdir()
        with pytest.raises(FileNotFoundError):
            RayHelper.teardown()
        with RayHelper.session(groups, runtime=runtime):  # type: ignore[arg-type]
            pass


def test_the_timeline_command_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "trace.json", runtime="inprocess")
    assert main(["timeline", str(tmp_path / "trace.json"), "--html", str(tmp_path / "trace.html")]) == 0
    assert "train (2 ranks)" in capsys.readouterr().out
    assert "Traced.double" in (tmp_path / "trace.html").read_text()
