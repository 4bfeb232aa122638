"""One Ray cluster a process, and nothing left behind: ``leaks.py`` says what counts."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

from tests import warm
from tests.frozen import freeze_heap
from tests.leaks import Snapshot, left_behind, own_temporary_folder

hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("suite")

LONGEST = (
    *("ray_trainers", "megatron", "ray", "parts on ray", "parts under torchrun", "vllm"),
    "typing/test_types",  # or it would be the last of all, beside idle processes
)  # groups
MOST_SESSIONS = 5  # whose workers stay for the next tests; tests of parts have four layouts
RaySession = Callable[[dict[str, Any]], contextlib.AbstractContextManager[None]]

_temporary = contextlib.ExitStack()
_between_groups: list[Callable[[], None]] = []  # called once the tests of a group have run
_of_the_cluster: list[Snapshot] = []  # what it brought along, and may keep until the end


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's jobs in the background are born deaf to Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup's are to a hangup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # As in a batch job, no thread that wakes interrupts another: gloo's threads spin while one they interrupted holds a
    # lock, which was a tenth of what tests of many ranks cost. All processes that tests start inherit it.
    with contextlib.suppress(AttributeError, PermissionError):  # of other systems than Linux
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    _temporary.enter_context(own_temporary_folder())
    if config.getoption("tx", None) and not hasattr(
        config, "workerinput"
    ):  # processes of tests are forks of one server
        config.option.tx = [f"{one}//python={warm.share()}" for one in config.option.tx]


def pytest_unconfigure(config: pytest.Config) -> None:
    warm.close()
    _temporary.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Processes import the tests each from another one on: each rewrites the assertions of a part, for all others."""
    of_many = getattr(session.config, "workerinput", {"workercount": 1})
    count = of_many["workercount"]
    if count == 1:
        return
    root = session.config.rootpath
    names = [
        ".".join(file.relative_to(root).with_suffix("").parts)
        for argument in session.config.args
        for file in sorted((root / argument).rglob("test_*.py"))
    ]
    first = int(of_many["workerid"].removeprefix("gw")) * len(names) // count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", False)
        for name in names[first:] + names[:first]:
            folder = name.rpartition(".")[0]
            with contextlib.suppress(Exception, pytest.skip.Exception):  # which the collection reports
                if (root / folder.replace(".", "/") / "conftest.py").exists():
                    importlib.import_module(f"{folder}.conftest")
                importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What uses a cluster runs in few processes, which have one each; other files run in one process each.

    The longest begin first: no process is left with one of them at the end.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            uses_ray = "ray_cluster" in getattr(item, "fixturenames", ())
            of_ray = "ray" if "/rayhelper/" in item.nodeid else "ray_trainers"
            item.add_marker(pytest.mark.xdist_group(of_ray if uses_ray else file_of(item)))
    if config.getoption("tx", None) or hasattr(config, "workerinput"):
        items.sort(key=lambda item: (*LONGEST, group_of(item)).index(group_of(item)))


@pytest.hookimpl(trylast=True)  # after the fixtures of the item
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Workers of Ray idle no longer than tests use them: each costs 1 % of a core."""
    if nextitem is not None and group_of(nextitem) != group_of(item):
        for end in _between_groups:
            end()


def group_of(item: pytest.Item) -> str:
    """The tests that share a process with it."""
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    return str(mark.args[0])


def file_of(item: pytest.Item) -> str:
    """Such as e2e/test_sft."""
    return "/".join(item.path.with_suffix("").parts[-2:])


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A cluster of this machine with eight invented GPUs."""
    import logging

    import ray

    from rayhelper.runtimes.ray.patches import ray_on_loopback

    with may_stay(), ray_on_loopback(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm.python())  # Ray's daemons and what sets its workers up begin warm
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=8,
            include_dashboard=False,
            object_store_memory=512 * 1024 * 1024,
            # two workers that no test asks for, which cost as much as all of Ray's daemons while they idle
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
            logging_level=logging.WARNING,
            runtime_env={"py_executable": warm.python()},
        )
    yield
    ray.shutdown()
    _of_the_cluster.clear()


@pytest.fixture(scope="session")
def ray_session(ray_cluster: None) -> Iterator[RaySession]:
    """``RayHelper.session``, but for equal groups with the same workers, which stay for the next tests.

    Most of what a worker costs is its start. One that idles costs 0.6 % of a core, so those not used for long end.
    """
    from rayhelper import RayHelper
    from rayhelper.roles.runtime import state

    started: dict[str, Any] = {}  # the least recently used first
    in_use: Counter[str] = Counter()

    def end(name: str) -> None:
        with without_runtime():
            state.active = started.pop(name)
            RayHelper.teardown()

    def end_all() -> None:
        for name in list(started):
            end(name)

    @contextlib.contextmanager
    def session(groups: dict[str, Any]) -> Iterator[None]:
        name = json.dumps(groups)
        with without_runtime():
            if name not in started:
                too_many = max(0, len(started) - MOST_SESSIONS + 1)
                for idle in [one for one in started if not in_use[one]][:too_many]:
                    end(idle)
                with may_stay():
                    RayHelper.initialize(groups, runtime="ray")
                started[name] = state.active
            started[name] = state.active = started.pop(name)
            in_use[name] += 1
            try:
                with may_stay("actor"):  # in the place of one that died
                    yield
            finally:
                in_use[name] -= 1

    _between_groups.append(end_all)
    yield session
    _between_groups.remove(end_all)
    end_all()


@contextlib.contextmanager
def session_of(request: pytest.FixtureRequest, groups: dict[str, Any]) -> Iterator[None]:
    """A session of the groups, on the cluster if the parameter of a fixture is "ray", in process otherwise."""
    from rayhelper import RayHelper

    if request.param == "ray":
        ray_session: RaySession = request.getfixturevalue("ray_session")
        with ray_session(groups):
            yield
    else:
        with RayHelper.session(groups, runtime=request.param):
            yield


@contextlib.contextmanager
def may_stay(kind: str | None = None) -> Iterator[None]:
    """What is started inside belongs to the cluster; ``kind``: that of this kind alone."""
    before = Snapshot.take(kind)
    yield
    _of_the_cluster.append(Snapshot.take(kind).without(before))


@pytest.fixture
def warm_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library starts under torchrun begins warm."""
    monkeypatch.setattr(sys, "executable", warm.python())
    monkeypatch.setenv("PYTHON_EXEC", warm.python())


@pytest.fixture
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """``prove`` looks for what outlives a call in its tests' modules alone. This process has imported all tests."""
    monkeypatch.setattr("rayhelper.prove.evidence.is_of_project", lambda name, module: "prove" in name)


@pytest.fixture(scope="module")
def own_registries() -> Iterator[None]:
    """What plugins register in a module is not known to others."""
    with registries_restored():
        yield


@contextlib.contextmanager
def registries_restored() -> Iterator[None]:
    """What plugins register inside is forgotten, and so are the modules of their files."""
    import trainers.losses.surrogates
    import trainers.rewards.estimators
    import trainers.rewards.functions
    import trainers.run.services.built_in  # noqa: F401  # what they register stays
    from trainers import plugins

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for registry in vars(plugins).values():
            if isinstance(registry, plugins.Registry):
                patch.setattr(registry, "entries", dict(registry.entries))
        yield
    for name in set(sys.modules) - before:
        if name.startswith("plugin_"):
            del sys.modules[name]


@contextlib.contextmanager
def without_runtime() -> Iterator[None]:
    """Inside, this process is as before ``RayHelper.initialize``, whatever a wider fixture has started."""
    from rayhelper.roles.runtime import state

    outer, state.active = state.active, None
    try:
        yield
    finally:
        state.active = outer


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """A module whose tests leave something behind fails, naming it."""
    freeze_heap()
    before = Snapshot.take()
    yield
    left = left_behind(before, *_of_the_cluster)
    if left:
        pytest.fail("the tests of this module left behind:\n  " + "\n  ".join(left))


@pytest.fixture(scope="module", autouse=True)
def _off_afterwards(_nothing_left_behind: None) -> Iterator[None]:
    """A module whose tests leave workers running fails."""
    yield
    from rayhelper.roles.runtime import state

    left, state.active = state.active, None
    if left is not None:
        left.teardown()
        pytest.fail("a test of this module left RayHelper initialized")
