"""A module whose tests leave something behind fails, and says what."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

import tests.leaks
from tests.leaks import Snapshot, left_behind

pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all
CONFTEST = """
import tests.leaks
from tests.conftest import _nothing_left_behind, _off_afterwards, pytest_configure, pytest_unconfigure
tests.leaks.GRACE_S = 0.1
"""
LEAVING = {  # a module's test, and how the failure names what it leaves
    "process": (
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)",
        r"process \d+ \(.*input\(\)\)",
    ),
    "port": ("server = socket.create_server(('127.0.0.1', 0))", r"listening port 127\.0\.0\.1:\d+"),
    "thread": ("threading.Thread(target=threading.main_thread().join, name='stays').start()", "thread 'stays'"),
    "added": ("os.environ['LEFT'] = 'over'", "environment variable LEFT=over"),
    "changed": ("os.environ['CHANGES'] = 'after'", "environment variable CHANGES=after"),
    "removed": ("del os.environ['GOES']", "environment variable GOES was removed"),
    "file": ("folder = tempfile.mkdtemp(prefix='stays')", r"file .*/stays\w+"),
    "memory": ("memory = SharedMemory(create=True, size=8)", r"shared memory /dev/shm/psm_\w+"),
    "processes": (
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "process group of torch.distributed",
    ),
    "runtime": (
        "RayHelper.initialize({'g': {'device': 'CPU', 'ranks': 1, 'workers': ['w']}}, runtime='inprocess')",
        "left RayHelper initialized",
    ),
}
CLEAN = {
    "nothing": "pass",
    "ended": "subprocess.run([sys.executable, '-c', ''])",
    "restored": "monkeypatch.setenv('LEFT', 'for a moment')",
    "files_of_its_own": "(tmp_path / 'file').write_text('x')",
    "a_pool": "with ProcessPoolExecutor(1, multiprocessing.get_context('forkserver')) as pool: pool.submit(abs, 1)",
}
MODULE = """
import multiprocessing, os, socket, subprocess, sys, tempfile, threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.shared_memory import SharedMemory
import torch.distributed as dist
from rayhelper import RayHelper

def test_it(monkeypatch, tmp_path):
    global child, server, folder, memory
    {line}
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pytest says of each of the modules above, run one after the other in one process."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "conftest.py").write_text(CONFTEST)
    for name, line in CLEAN.items() | {(name, line) for name, (line, _) in LEAVING.items()}:
        (folder / f"test_{name}.py").write_text(MODULE.format(line=line))
    root = str(Path(__file__).resolve().parents[1])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--junit-xml=said.xml", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, "PYTEST_ADDOPTS": "", "CHANGES": "before", "GOES": "away"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert f"{len(CLEAN) + len(LEAVING)} passed" in run.stdout, run.stdout + run.stderr
    found = dict.fromkeys((*CLEAN, *LEAVING), "")
    for case in xml.etree.ElementTree.parse(folder / "said.xml").iter("testcase"):
        found[case.attrib["classname"].removeprefix("test_")] += "".join(
            e.attrib["message"] for e in case.iter("error")
        )
    return found


@pytest.mark.parametrize("kind", LEAVING)
def test_a_module_that_leaves_something_fails_and_names_it(said: dict[str, str], kind: str) -> None:
    assert re.search(LEAVING[kind][1], said[kind]), said[kind]


@pytest.mark.parametrize("kind", CLEAN)
def test_a_module_that_leaves_nothing_passes(said: dict[str, str], kind: str) -> None:
    assert said[kind] == ""


def test_actors_and_placement_groups_are_named_until_they_are_gone(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(tests.leaks, "GRACE_S", 0.1)

    class Stays:
        def answer(self) -> int:
            return 42

    before = Snapshot.take()
    actor = ray.remote(num_cpus=0)(Stays).remote()
    bundle = ray.util.placement_group([{"CPU": 0.001}])
    ray.get([actor.answer.remote(), bundle.ready()])
    left = left_behind(before)
    assert len(left) == 2, left
    assert re.fullmatch(r"actor .*Stays.* \(\w+\)", left[0])
    assert re.fullmatch(r"placement group \w+ \(CREATED\)", left[1])
    monkeypatch.undo()
    ray.kill(actor)
    ray.util.remove_placement_group(bundle)
    assert left_behind(before) == []
