"""Whole programs, as a user starts them: classes of ``__main__``, Ctrl-C, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from dataclasses import dataclass
import helper_module
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
        return [sample.value + 1 for sample in samples]

    @RayHelper.function(group="scorer", dispatch="slice", collect="flatten")
    def refuse_odd(self, items):
        for item in items:
            if item % 2:
                raise OddError(item, "odd")
        return items

    def run(self, items):
        samples = self.sample(items)
        assert all(type(sample) is Sample for sample in samples)
        return self.score(samples)

def main():
    pipeline = Pipeline()
    print(pipeline.run([1, 2, 3, 4, 5]))
    try:
        pipeline.refuse_odd([2, 4, 5])
    except OddError as error:
        print("odd:", error.value)

if __name__ == "__main__":
    if sys.argv[1] == "ray":
        RayHelper.initialize(GROUPS)
    main()
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
        [sys.executable, *argv], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive, [process.cmdline() for process in alive]


def test_a_program_prints_the_same_off_and_with_ray(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper_module.py").write_text("def square(x):\n    return x * x\n")
    off = run(tmp_path, "program.py", "off")
    assert off == "[2, 5, 10, 17, 26]\nodd: 5\n"
    assert run(tmp_path, "program.py", "ray") == off


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
        start = time.monotonic()
        os.killpg(driver.pid, signal.SIGINT)
        _, errors = driver.communicate(timeout=30)
        assert "KeyboardInterrupt" in errors
        assert driver.returncode != 0
        assert time.monotonic() - start < 30
        assert_gone(children)
    finally:
        driver.kill()


def test_a_module_that_the_workers_lack_travels_by_value(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lonely.py").write_text(
        "from rayhelper import RayHelper\n"
        "def triple(x):\n    return 3 * x\n"
        "@RayHelper.worker(group='work')\n"
        "class Lonely:\n"
        "    @RayHelper.function(group='work', execute='first')\n"
        "    def triple(self, x):\n        return triple(x)\n"
    )
    (tmp_path / "program.py").write_text(
        "import importlib.util, sys\n"
        "from rayhelper import RayHelper\n"
        # loaded from a file that is on nobody's path, as on a cluster whose other nodes lack it
        "spec = importlib.util.spec_from_file_location('lonely', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['lonely'] = module\n"
        "spec.loader.exec_module(module)\n"
        "with RayHelper.session({'work': {'device': 'CPU', 'ranks': 1, 'workers': ['work']}}):\n"
        "    print(module.Lonely().triple(5))\n"
    )
    assert run(tmp_path, "program.py", str(elsewhere / "lonely.py")) == "15\n"


def test_a_cluster_of_our_own_listens_on_loopback_and_hides_the_drivers_secrets(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, psutil, ray\n"
        "from rayhelper import RayHelper\n"
        "@RayHelper.worker(group='work')\n"
        "class Probe:\n"
        "    @RayHelper.function(group='work', execute='first')\n"
        "    def secret(self):\n        return os.environ.get('MY_TOKEN')\n"
        "os.environ['MY_TOKEN'] = 'secret'\n"
        "with RayHelper.session({'work': {'device': 'CPU', 'ranks': 1, 'workers': ['work']}}):\n"
        "    print(Probe().secret())\n"
        "    ports = [c for p in psutil.Process().children(recursive=True) for c in p.net_connections('inet')]\n"
        "    print({c.laddr.ip.removeprefix('::ffff:') for c in ports if c.status == 'LISTEN'})\n"
        "print(ray.is_initialized(), psutil.Process().children())\n"
    )
    assert run(tmp_path, "program.py") == "None\n{'127.0.0.1'}\nFalse []\n"


def test_an_existing_cluster_of_two_nodes_is_joined_and_outlives_us(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, ray\n"
        "from ray.cluster_utils import Cluster\n"
        "from rayhelper import RayHelper\n"
        "@RayHelper.worker(group=['train', 'judge'])\n"
        "class Probe:\n"
        "    @RayHelper.function(group='train')\n"
        "    def where(self):\n"
        "        info = RayHelper.current()\n"
        "        return info.rank, info.node_rank, info.local_rank, ray.get_runtime_context().get_node_id()\n"
        "    @RayHelper.function(group='judge', execute='first')\n"
        "    def secret(self):\n        return os.environ.get('RANK')\n"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 1})\n"
        "for _ in range(2):\n"
        "    cluster.add_node(num_cpus=1, num_gpus=2)\n"
        "groups = {'nproc_per_node': 2, 'trainers': {'device': 'GPU', 'ranks': [0, 1, 2, 3], 'workers': ['train']},\n"
        "          'judges': {'device': 'CPU', 'ranks': 2, 'workers': ['judge']}}\n"
        "with RayHelper.session(groups, ray_address=cluster.address):\n"
        "    probe = Probe()\n"
        "    found = probe.where()\n"
        "    print([one[:3] for one in found], len({one[3] for one in found}), probe.secret())\n"
        "    assert found[0][3] == found[1][3]\n"
        "ray.init(address=cluster.address, logging_level=40)\n"
        "print(ray.available_resources()['GPU'])\n"
        "ray.shutdown()\n"
        "cluster.shutdown()\n"
    )
    expected = "[(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)] 2 0\n4.0\n"
    assert run(tmp_path, "program.py") == expected
