"""The contract of decorated calls under torchrun, and what only torchrun has: several processes that run one driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rayhelper import ConfigError, RayHelper, RoleError
from rayhelper.runtimes.torchrun.placement import SpmdPlacement
from rayhelper.worker.side_door import Door, ask, told_stacks
from tests import warm
from tests.backends.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, logging, os, sys
import numpy as np
import torch
from rayhelper import RayHelper, RoleError

@RayHelper.worker(group=["train", "judge"])
class Trainer:
    def __init__(self, fail=False):
        self.where = RayHelper.current()
        self.report()
        if fail and self.where.rank == 1:
            raise ValueError("rank 1 cannot be constructed")

    @RayHelper.function(group="train")
    def report(self):
        rank = RayHelper.current().rank
        RayHelper.shard(rank // 2, 2, leader=rank % 2 == 1)
        RayHelper.init_process_group("gloo", timeout_s=60)

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def double(self, items):
        return [item * 2 for item in items]

    @RayHelper.function(group="train", dispatch="slice")
    def lengths(self, items):
        return len(items)

    @RayHelper.function(group="train")
    def reduced(self):
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return value.item()

    @RayHelper.function(group="train")
    def fails_while_others_wait(self):
        if RayHelper.current().rank == 2:
            raise KeyError("rank 2 cannot")
        torch.distributed.all_reduce(torch.ones(1))

    @RayHelper.function(group="train", execute="first")
    def large(self, count):
        return np.arange(count)

    @RayHelper.function(group="judge")
    def judges(self):
        return RayHelper.current().rank, RayHelper.current().world_size

    @RayHelper.function(group="driver")
    def who(self):
        return RayHelper.current()

@RayHelper.worker(group="train")
class Prepared:
    # its constructor asks process 0, unless it fails before

    def __init__(self, failing=(), swallow=False, ask=True):
        if RayHelper.current().rank in failing:
            raise ValueError("too early")
        try:
            self.drawn = self.draw() if ask or RayHelper.current().rank else None
        except Exception:
            if not swallow:
                raise

    @RayHelper.function(group="driver", execute="first")
    def draw(self):
        return os.getpid(), np.arange(3)

    @RayHelper.function(group="driver", execute="first")
    def fail(self):
        raise KeyError(f"process {RayHelper.current().rank} cannot")

    @RayHelper.function(group="driver", execute="first")
    def ask_others(self):
        return self.draw()[0] == os.getpid(), self.rank()

    @RayHelper.function(group="train")
    def rank(self):
        return RayHelper.current().rank

@RayHelper.function(group="driver", execute="first")
def doubled(number):
    return 2 * number

def told(error):
    return [type(error).__name__, str(error), "".join(getattr(error, "__notes__", []))]

def error_of(call, *args, **kwargs):
    try:
        return ["nothing", str(call(*args, **kwargs))]
    except Exception as error:
        return told(error)

def by_process_0():
    # what calls come to that process 0 makes for all
    prepared = Prepared()
    pid, numbers = prepared.draw()
    numbers += 1  # every process has its own
    return {
        "drawn": [prepared.drawn[0], pid, prepared.draw.defer().result()[0]],
        "numbers": numbers.tolist(),
        "failed": error_of(prepared.fail),
        "function": doubled(int(os.environ["RANK"]) + 1),
        "asked others": error_of(prepared.ask_others),
        "constructed": error_of(Prepared, failing=[1]),
        "swallowed": error_of(Prepared, failing=[1], swallow=True),
        "not asked": error_of(Prepared, ask=False),
        "in step": prepared.rank(),
    }

with RayHelper.session(json.loads(sys.argv[1]), runtime="torchrun", trace=sys.argv[3]):
    logging.warning("said by rank 0 alone")
    trainer = Trainer()
    facts = {
        "double": trainer.double([1, 2, 3]),
        "lengths": trainer.lengths([1, 2, 3]),
        "reduced": trainer.reduced(),
        "large": int(trainer.large(300_000).sum()),
        "judges": trainer.judges(),
        "driver": [trainer.who().group, trainer.who().rank, trainer.who().world_size],
        "by process 0": by_process_0(),
    }
    try:
        trainer.fails_while_others_wait()
    except KeyError as error:
        facts["failure"] = told(error)
    facts["after"] = trainer.reduced()
    try:
        Trainer(fail=True)
    except ValueError as error:
        facts["constructor"] = told(error)
    try:
        if int(os.environ["RANK"]) == 0:
            trainer.lengths([1])
        else:
            trainer.double([1])
    except RoleError as error:
        facts["differ"] = told(error)
    try:
        trainer.double([1] * int(os.environ["RANK"]))
    except RoleError as error:
        facts["other data"] = told(error)
    facts["after all"] = trainer.double([1, 2])
with open(f"{sys.argv[2]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(facts, file)
"""

TROUBLED = """
import json, os, sys, threading
from pathlib import Path
import torch
from rayhelper import RayHelper

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
facts = {}

@RayHelper.worker(group="train")
class Troubled:
    def __init__(self):
        self.join()

    @RayHelper.function(group="train")
    def join(self):
        RayHelper.init_process_group("gloo", timeout_s=60)

    @RayHelper.function(group="train")
    def others_wait_for_rank_0(self):
        if rank == 0:
            until_the_others_gave_up()
        torch.distributed.all_reduce(torch.ones(1))

    @RayHelper.function(group="train")
    def rank(self):
        return rank

    @RayHelper.function(group="train")
    def rank_1_dies(self):
        if rank == 1:
            os._exit(0)

def until_the_others_gave_up():
    for _ in range(600):
        if all((folder / f"gave up {other}").exists() for other in (1, 2)):
            return
        threading.Event().wait(0.05)

def told(name, call):
    try:
        facts[name] = ["nothing", call()]
    except Exception as error:
        facts[name] = [type(error).__name__, str(error)]

def session(**settings):
    group = {"device": "CPU", "ranks": 3, "workers": ["train"], **settings}
    return RayHelper.session({"actors": group}, runtime="torchrun")

with session(timeout_s=3):
    troubled = Troubled()
    told("late", troubled.others_wait_for_rank_0)
    (folder / f"gave up {rank}").touch()
    told("after", troubled.rank)
with session():
    troubled = Troubled()
    if rank == 2:
        told("alone", troubled.rank)
with session():
    troubled = Troubled()
    told("together", troubled.rank)
    told("died", troubled.rank_1_dies)
    (folder / f"{rank}.json").write_text(json.dumps(facts))
"""


def torchrun(processes: int, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The finished command, run by ``processes`` processes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    env["PYTHON_EXEC"] = warm.python()  # what torchrun starts
    start = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with tempfile.TemporaryDirectory() as logs:
        line = [*start, "--log-dir", logs, *command]
        return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


def test_the_contract_of_decorated_calls_holds_under_torchrun() -> None:
    """Of calls to all processes, and to groups on processes of their own."""
    files = ["tests/rayhelper/test_calls.py", "tests/rayhelper/calls_apart.py"]
    done = torchrun(3, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", *files, cwd=ROOT)
    # It is 0 where it is for every process; pytest's is not for one that found no tests. Lines may run together
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d* passed", done.stdout)
    assert not re.search(r"\d+ (failed|skipped)", done.stdout)


def test_every_process_sees_what_the_driver_would_see(tmp_path: Path) -> None:
    groups = {
        "actors": {"device": "CPU", "ranks": 4, "workers": ["train"]},
        "judges": {"device": "GPU", "ranks": [1, 3], "workers": ["judge"]},
    }
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    trace = tmp_path / "trace.json"
    done = torchrun(4, str(program), json.dumps(groups), str(tmp_path), str(trace), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("said by rank 0 alone") == 1
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank, seen in enumerate(facts):
        assert seen["double"] == [2, 4, 6]
        assert seen["lengths"] == [2, 1]  # two shards of two processes, one leader each
        assert seen["reduced"] == seen["after"] == [4.0, 4.0]
        assert seen["large"] == sum(range(300_000))
        assert seen["judges"] == [[0, 2], [1, 2]]
        assert seen["driver"] == ["driver", rank, 4]
        assert seen["failure"][:2] == ["KeyError", "'rank 2 cannot'"]
        assert "rank 2 of group 'actors'" in seen["failure"][2]
        assert seen["constructor"][:2] == ["ValueError", "rank 1 cannot be constructed"]
        assert "rank 0 Trainer.lengths" in seen["differ"][1]
        assert "rank 1 Trainer.double" in seen["differ"][1]
        assert "rank 0 divides 0 items (1 argument), rank 1 divides 1 items" in seen["other data"][1]
        assert seen["after all"] == [2, 4]
    assert_made_by_process_0([seen["by process 0"] for seen in facts])
    from rayhelper.timeline.trace import read

    spans, _ = read(trace)
    assert {(span.role, span.rank) for span in spans if span.name == "Trainer.double" and span.phase == "run"} == {
        ("train", rank) for rank in range(4)
    }
    assert {span.rank for span in spans if span.role == "driver"} == {0, 1, 2, 3}
    assert max(span.num_bytes for span in spans if span.phase == "wait") > 2_000_000  # the large value of one process


def assert_made_by_process_0(facts: list[dict[str, Any]]) -> None:
    assert len({pid for seen in facts for pid in seen["drawn"]}) == 1
    for rank, seen in enumerate(facts):
        assert seen["numbers"] == [1, 2, 3]
        assert seen["function"] == 2
        assert seen["failed"][:2] == ["KeyError", "'process 0 cannot'"]
        assert seen["asked others"][0] == "RoleError"
        assert "Prepared.rank (role 'train') cannot be made by Prepared.ask_others" in seen["asked others"][1]
        for name in ("constructed", "swallowed"):  # whether it failed before the call or waited in it
            assert seen[name][:2] == ["ValueError", "too early"], rank
        assert seen["not asked"][0] == "RoleError"
        assert "rank 0 Prepared.__init__, rank 1 Prepared.draw" in seen["not asked"][1]
        assert seen["in step"] == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def troubles(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """What ranks 0 and 2 of three saw go wrong, in three sessions of one run; rank 1 died in the last."""
    folder = tmp_path_factory.mktemp("troubles")
    (folder / "troubled.py").write_text(TROUBLED)
    done = torchrun(3, str(folder / "troubled.py"), str(folder), cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 2)]


def test_a_late_call_shows_the_stacks_of_all_ranks_also_inside_a_collective(
    troubles: list[dict[str, list[str]]],
) -> None:
    for seen in troubles:
        kind, message = seen["late"]
        assert kind == "DeadlineError"
        assert "others_wait_for_rank_0" in message
        assert "did not finish on every process within 3 s; " in message
        assert "still running on ranks 0" in message
        of_rank_0 = message.split("--- ranks 0\n")[1].split("--- ranks")[0]
        assert "until_the_others_gave_up" in of_rank_0
        assert "all_reduce" in message.replace(of_rank_0, "")
        assert "rayhelper-" not in message  # no thread of the library's own


@RayHelper.worker(group="train")
class Meeting:
    def __init__(self) -> None:
        self.join()

    @RayHelper.function(group="train")
    def join(self) -> None:
        RayHelper.init_process_group("gloo", timeout_s=300)

    @RayHelper.function(group="train")
    def meet(self, given_up: Path) -> None:
        """Rank 1 waits for rank 0 in a collective, and rank 0 until rank 1 waits no more."""
        if RayHelper.current().rank == 1:
            torch.distributed.all_reduce(torch.ones(1))
        while not given_up.exists():
            time.sleep(0.05)


def in_a_collective(rank: int, port: int, given_up: Path) -> tuple[str, str]:
    """What the call that rank 0 gives up comes to. The deadline of rank 1 itself is far away."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({name: str(value) for name, value in place.items()})
    group = {"device": "CPU", "ranks": 2, "workers": ["train"], "timeout_s": 300 if rank else 4}  # also for ``join``
    attempt = SpmdPlacement.attempt

    def attempted(*given: Any) -> Any:
        try:
            return attempt(*given)
        finally:
            if rank == 1 and "meet" in given[2]:
                given_up.touch()

    with patch.object(SpmdPlacement, "attempt", attempted), RayHelper.session({"actors": group}, runtime="torchrun"):
        try:
            Meeting().meet(given_up)
        except Exception as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def test_a_collective_that_another_rank_gave_up_is_a_late_call_before_ones_own_deadline(tmp_path: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    came_to = run_ranks(2, in_a_collective, store.port, tmp_path / "given up", folder=tmp_path, joined=False)
    for kind, message in came_to:
        assert kind == "DeadlineError", message
        assert "Meeting.meet" in message
        assert "still running on ranks" in message
        assert "all_reduce" in message.split("--- ranks 1\n")[1]
    assert "rank 0 gave it up" in came_to[1][1]


def test_after_a_call_that_was_given_up_later_calls_say_so_until_the_next_session(
    troubles: list[dict[str, list[str]]],
) -> None:
    for seen in troubles:
        assert seen["after"][0] == "DeadlineError"
        assert "an earlier call was abandoned" in seen["after"][1]
        assert seen["together"] == ["nothing", [0, 1, 2]]


def test_a_call_that_one_rank_makes_while_the_others_leave_says_that_they_left(
    troubles: list[dict[str, list[str]]],
) -> None:
    kind, message = troubles[1]["alone"]
    assert kind == "WorkerDiedError"
    assert re.search(r"rank(s 0-1| 0| 1) left the run through RayHelper.teardown\(\)", message)
    assert "no longer answers" not in message


def test_a_process_that_died_is_named(troubles: list[dict[str, list[str]]]) -> None:
    for seen in troubles:
        kind, message = seen["died"]
        assert kind == "WorkerDiedError"
        assert "rank 1 no longer answers" in message
        assert len(message) < 600
        assert "GLHF" not in message


def test_stacks_are_told_once_for_ranks_that_are_at_the_same_place() -> None:
    told = told_stacks({0: "in a\n", 1: "in b\n", 2: "in a\n"}, range(4))
    assert told.split("--- ranks ")[1:] == [
        "0, 2\nin a\n\n",
        "1\nin b\n\n",
        "3\nno answer: native code holds its interpreter, or the process is gone\n",
    ]


def test_a_door_answers_who_knows_the_key_and_nobody_once_it_is_closed() -> None:
    door = Door("127.0.0.1", b"key", {"double": lambda value: 2 * value})
    doors = {7: door.address}
    assert ask(doors, b"key", "double", 21, timeout_s=10) == {7: 42}
    assert ask(doors, b"key", "unknown", None, timeout_s=10) == {}
    assert ask(doors, b"another key", "double", 21, timeout_s=10) == {}
    assert "test_a_door_answers" in ask(doors, b"key", "stacks", None, timeout_s=10)[7]
    door.close()
    assert ask(doors, b"key", "double", 21, timeout_s=10) == {}


@RayHelper.function(group="driver", execute="first")
def worked_out(number: int) -> tuple[int, str]:
    return 2 * number, RayHelper.current().group


@RayHelper.worker(group="train")
class Asking:
    def __init__(self) -> None:
        self.asked = worked_out(3)

    @RayHelper.function(group="train", execute="first")
    def seen(self) -> Any:
        return self.asked

    @RayHelper.function(group="train")
    def ask(self) -> Any:
        return worked_out(3)


def test_elsewhere_a_driver_runs_its_functions_itself() -> None:
    """And a worker does not: while an object is constructed they are skipped there, later on they are refused."""
    assert (Asking().asked, Asking().seen()) == ((6, "off"), (6, "off"))
    with RayHelper.session({"g": {"device": "CPU", "ranks": 2, "workers": ["train"]}}, runtime="inprocess"):
        asking = Asking()
        assert (asking.asked, asking.seen()) == ((6, "driver"), None)
        with pytest.raises(
            RoleError, match=r"worked_out \(role 'driver'\) runs on the driver only, .* rank 0 of group 'g'"
        ):
            asking.ask()


def test_without_torchrun_the_error_says_how_to_start() -> None:
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node"):
        RayHelper.initialize({"g": {"device": "CPU", "ranks": 1, "workers": ["w"]}}, runtime="torchrun")


def test_a_group_larger_than_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"rank 3.*2 processes"):
        RayHelper.initialize({"g": {"device": "CPU", "ranks": 4, "workers": ["w"]}}, runtime="torchrun")


def test_two_processes_of_one_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    groups = {"train": {"gpus": 2}, "rollout": {"shares_devices_with": "train"}}
    with pytest.raises(ConfigError, match=r"group 'rollout' shares devices with 'train'; torchrun starts one process"):
        RayHelper.initialize(groups, runtime="torchrun")
