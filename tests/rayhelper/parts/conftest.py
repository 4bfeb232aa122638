"""``run``: every runtime and layout, in which a test has a story told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhelper import RayHelper
from rayhelper.roles.runtime import state
from tests.conftest import RaySession, may_stay, without_runtime
from tests.rayhelper.parts.launch import outcomes
from tests.rayhelper.parts.layouts import LAUNCHES, LAYOUTS, OFF, Layout
from tests.rayhelper.parts.stories import Run, Story, name_of, opener, runs, session_of
from tests.rayhelper.test_torchrun import ROOT, torchrun

MOST_LAUNCHES = 4  # of one kind
OWN_PROCESS = {"torchrun": "parts under torchrun", "ray": "parts on ray"}  # xdist: one launch, one cluster


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if (run := params.get("run")) and run[0] in OWN_PROCESS and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(OWN_PROCESS[run[0]]))


@pytest.fixture(scope="module", params=runs(), ids="-".join)
def run(request: pytest.FixtureRequest) -> Run:
    """One runtime and layout after the other."""
    runtime, name = request.param
    layout = LAYOUTS.get(name, OFF)
    if runtime == "torchrun":
        launches: Launches = request.getfixturevalue("launches")
        return Run(runtime, layout, lambda told: launches.values(told, layout))
    if runtime == "off":
        return Run(runtime, layout, lambda told: [told(opener("off", layout)) if opens(told) else told()])
    if runtime == "ray":
        within: Callable[[], Any]
        if layout.on_shared_devices:
            shared = request.getfixturevalue("shared_devices")
            within = shared
        else:
            ray_session: RaySession = request.getfixturevalue("ray_session")

            def within() -> Any:
                return ray_session(layout.device_groups("ray"))
    else:

        def within() -> Any:
            return session_of(runtime, layout)

    def told_here(told: Story) -> list[Any]:
        with without_runtime():
            if opens(told):
                return [told(opener(runtime, layout))]
            with within():
                return [told()]

    return Run(runtime, layout, told_here)


def opens(told: Story) -> bool:
    return bool(told.opens)  # type: ignore[attr-defined]


@pytest.fixture(scope="package")
def shared_devices(ray_cluster: None) -> Iterator[Callable[[], Any]]:
    """Opens the session of the groups that share a device, which is given back after the tests of this folder."""
    with without_runtime():
        with may_stay():
            RayHelper.initialize(LAYOUTS["shared"].device_groups("ray"))
        started = state.active

    @contextlib.contextmanager
    def session() -> Iterator[None]:
        with without_runtime():
            state.active = started
            yield

    yield session
    with without_runtime():
        state.active = started
        RayHelper.teardown()


class Launches:
    """What the stories came to under torchrun, each launch made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: dict[int, list[dict[tuple[str, str], dict[str, Any]]]] = {}  # by processes: one table a rank
        self.last_words = ""

    def values(self, told: Story, layout: Layout) -> list[Any]:
        """What every process says of a story. Fails the test if the story failed."""
        processes = next(number for number, layouts in LAUNCHES.items() if layout.name in layouts)
        if processes not in self.told:
            self.told[processes] = self.launch(processes)
        found = [table.get((layout.name, name_of(told)), {}) for table in self.told[processes]]
        for rank, one in enumerate(found):
            if "value" not in one:
                why = one.get("failed", "not begun")
                pytest.fail(f"process {rank} of {processes} under torchrun: {why}\n{self.last_words}", pytrace=False)
        return [one["value"] for one in found]

    def launch(self, processes: int) -> list[dict[tuple[str, str], dict[str, Any]]]:
        """One table of outcomes a process. A story that ends the launch is one of few, so it is made again."""
        folder = self.folder / str(processes)
        folder.mkdir()
        for attempt in range(MOST_LAUNCHES):
            command = ["-m", "tests.rayhelper.parts.launch", str(folder), str(attempt), *LAUNCHES[processes]]
            done = torchrun(processes, *command, cwd=ROOT)
            if done.returncode == 0:
                break
            self.last_words = done.stderr[-4000:]
        return [outcomes(folder, f"{rank}-*.jsonl") for rank in range(processes)]


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("launches"))
