"""Whole programs, as a user starts them: classes of ``__main__``, Ctrl-C, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import random
import sys
from dataclasses import dataclass
import helper_module
import torch
from rayhelper import RayHelper

GROUPS = '{"work": {"device": "CPU", "ranks": 2, "workers": ["sampler", "scorer"]}}'

@dataclass
class Sample:
    value: int

class OddError(Exception):
    def __init__(self, value, why):
        super().__init__(value, why)
        self.value = value

def halves(n, i, data):
    size = -(-len(data) // n)
    return data[i * size:(i + 1) * size]

def joined(parts):
    return [item for part in parts for item in part]

@RayHelper.worker(group=["sampler", "scorer"])
class Pipeline:
    @RayHelper.function(group="sampler", dispatch=halves, collect=joined)
    def sample(self, items):
        return [Sample(helper_module.square(item)) for item in items]

    @RayHelper.function(group="scorer", dispatch="slice", collect="flatten")
    def score(self, samples):
        assert all(isinstance(sample, Sample) for sample in samples)
        torch.backends.cudnn.benchmark = False  # a module of a class of its own, which cloudpickle does not pickle
        return [sample.value + 1 for sample in samples]

    @RayHelper.function(group="scorer", dispatch="slice", collect="flatten")
    def refuse_odd(self, items):
        for item in items:
            if item % 2:
                raise OddError(item, "odd")
        return items

    @RayHelper.function(group="sampler", execute="first")
    def drawn(self):
        return random.random()

    def run(self, items):
        samples = self.sample(items)
        assert all(type(sample) is Sample for sample in samples)
        return self.score(samples)

class Model:
    def __init__(self, scale):
        self.scale = scale
        self.calls = 0

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def scaled(self, items):
        self.calls += 1
        return [Sample(self.scale * item) for item in items]

@RayHelper.worker(group="sampler")
class Sampler(Model):
    pass

@RayHelper.worker(group="scorer")
class Scorer(Model):
    def __init__(self, scale, sampler):
        super().__init__(scale)
        self.sampler = sampler

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def scaled(self, items):
        return [(sample.value, self.sampler.calls) for sample in super().scaled(items)]

    @RayHelper.function(group="scorer", execute="first")
    def has(self, sampler):
        return sampler is self.sampler

@RayHelper.worker(group=["sampler", "scorer"])
class Parted:
    def __init__(self):
        self.sampler = Sampler(10)
        self.scorers = [Scorer(2, self.sampler), Scorer(3, self.sampler)]

def parts():
    parted = Parted()
    samples = parted.sampler.scaled([1, 2])
    assert all(type(sample) is Sample for sample in samples)
    print([sample.value for sample in samples])
    print([scorer.scaled([1, 2]) for scorer in parted.scorers], parted.scorers[1].has(parted.sampler))

def main():
    pipeline = Pipeline()
    print(round(pipeline.drawn(), 6))
    print(pipeline.run([1, 2, 3, 4, 5]))
    parts()
    try:
        pipeline.refuse_odd([2, 4, 5])
    except OddError as error:
        print("odd:", error.value)

if __name__ == "__main__":
    random.seed(5)
    if sys.argv[1] == "ray":
        sys.executable = sys.argv[2]  # what starts Ray's processes and workers
    RayHelper.initialize(GROUPS, runtime=sys.argv[1])
    main()
"""

PRINTING = """
import sys
from rayhelper import RayHelper

@RayHelper.worker(group="work")
class Prints:
    @RayHelper.function(group="work", execute="first")
    def lines(self, count):
        for number in range(count):
            print(f"line {number}.")

sys.executable = sys.argv[1]
with RayHelper.session({"work": {"device": "CPU", "ranks": 1, "workers": ["work"]}}):
    Prints().lines(3000)
"""

WAITING = """
import threading
from rayhelper import RayHelper

@RayHelper.worker(group="work")
class Sleeper:
    @RayHelper.function(group="work")
    def wait(self):
        threading.Event().wait(300)

RayHelper.initialize({"work": {"device": "CPU", "ranks": 2, "workers": ["work"]}})
sleeper = Sleeper()
print("waiting", flush=True)
sleeper.wait()
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(folder: Path, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, [process.cmdline() for process in alive]


def test_a_program_prints_the_same_off_in_process_and_with_ray(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper_module.py").write_text("def square(x):\n    return x * x\n")
    off = run(tmp_path, "program.py", "off")
    assert off == "0.622902\n[2, 5, 10, 17, 26]\n[10, 20]\n[[(2, 1), (4, 1)], [(3, 1), (6, 1)]] True\nodd: 5\n"
    assert run(tmp_path, "program.py", "inprocess") == off
    assert run(tmp_path, "program.py", "ray", warm.python()) == off


def test_the_last_lines_of_a_worker_are_shown_before_a_short_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    (tmp_path / "program.py").write_text(PRINTING)
    told = run(tmp_path, "program.py", warm.python())
    assert [number for number in range(3000) if f"line {number}." not in told] == []


def test_ctrl_c_ends_the_driver_and_every_worker(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    driver = subprocess.Popen(
        [sys.executable, "waiting.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "waiting\n"
        children = psutil.Process(driver.pid).children(recursive=True)
        assert len(children) >= 4
        os.killpg(driver.pid, signal.SIGINT)
        _, errors = driver.communicate(timeout=60)
        assert "KeyboardInterrupt" in errors
        assert driver.returncode != 0
        assert_gone(children)
    finally:
        driver.kill()


LONELY = """
import os
from rayhelper import RayHelper

def triple(x):
    return 3 * x

@RayHelper.worker(group="work")
class Lonely:
    @RayHelper.function(group="work", execute="first")
    def triple(self, x):
        return triple(x)

    @RayHelper.function(group="work", execute="first")
    def secret(self):
        return os.environ.get("MY_TOKEN")
"""

ALONE = """
import importlib.util, json, os, psutil, ray, sys
from rayhelper import RayHelper

# loaded from a file that is on nobody's path, as on a cluster whose other nodes lack it
spec = importlib.util.spec_from_file_location("lonely", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["lonely"] = module
spec.loader.exec_module(module)
os.environ["MY_TOKEN"] = "secret"
with RayHelper.session({"work": {"device": "CPU", "ranks": 1, "workers": ["work"]}}):
    lonely = module.Lonely()
    facts = {"triple": lonely.triple(5), "secret": lonely.secret()}
    ports = [c for p in psutil.Process().children(recursive=True) for c in p.net_connections("inet")]
    facts["addresses"] = list({c.laddr.ip.removeprefix("::ffff:") for c in ports if c.status == "LISTEN"})
facts |= {"is on": ray.is_initialized(), "processes": [child.pid for child in psutil.Process().children()]}
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program sees that has a cluster of its own, and after it."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "lonely.py").write_text(LONELY)
    (folder / "program.py").write_text(ALONE)
    found: dict[str, Any] = json.loads(run(folder, "program.py", str(folder / "elsewhere" / "lonely.py")))
    return found


def test_a_module_that_the_workers_lack_travels_by_value(facts: dict[str, Any]) -> None:
    assert facts["triple"] == 15


def test_a_cluster_of_our_own_listens_on_loopback_and_hides_the_drivers_secrets(facts: dict[str, Any]) -> None:
    assert facts["secret"] is None
    assert facts["addresses"] == ["127.0.0.1"]


def test_a_cluster_of_our_own_ends_with_the_session(facts: dict[str, Any]) -> None:
    assert not facts["is on"]
    assert facts["processes"] == []
