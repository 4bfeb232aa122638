"""``prove`` names call, rank, argument, tensor and cause of a difference of each kind, in classes of users."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rayhelper.prove import Difference, prove, prove_class
from rayhelper.prove.causes import of_error
from rayhelper.prove.on_worker import Note, OnWorker
from rayhelper.prove.runs import APART, TORCHRUN, TWO_APART, proof_of, proof_of_class
from rayhelper.prove.watching import Seen
from tests import warm
from tests.conftest import without_runtime
from tests.rayhelper import prove_planted as planted

pytestmark = pytest.mark.usefixtures("own_modules")

ROOT = Path(__file__).resolve().parents[2]
STRICT = ("off", "one worker, strict")
TWO = ("one worker, strict", "two workers")
RAY = ("two workers", "two workers on Ray")
ROLES_APART = ("one worker, strict", APART)


class Expected(NamedTuple):
    """What is told of the first difference."""

    runs: tuple[str, str]
    call: int
    rank: int | None
    argument: str
    tensor: str
    kind: str
    words: str  # of the cause or of what differs
    is_error: bool = True


PLANTED: dict[type, Expected] = {
    planted.NoiseWithoutSeed: Expected(STRICT, 2, 0, "", "value", "seed", "default_rng"),
    planted.LossFromAnotherRole: Expected(STRICT, 2, 0, "", "", "cut gradient", "grad_fn"),
    planted.ShuffledByMain: Expected(STRICT, 2, 0, "rows", "rows", "order of rows", "without a seed"),
    planted.ColumnsInAnotherOrder: Expected(TWO, 2, None, "", "value", "order of rows", "order along dimension 1"),
    planted.BonusOfRank: Expected(
        TWO, 2, 1, "", "value[3]['bonus']", "rank", "RayHelper.current() at prove_planted.py"
    ),
    planted.DecaysWithTime: Expected(
        STRICT, 2, 0, "", "DecaysWithTime.temperature", "time", "time.perf_counter() at prove_planted.py"
    ),
    planted.GrowsGlobal: Expected(STRICT, 2, 0, "", "value[0]", "module global", "prove_planted.TOKENS"),
    planted.FillsArgument: Expected(STRICT, 2, 0, "scores", "", "argument changed in place", "argument 'scores'"),
    planted.MergedInDouble: Expected(TWO, 2, None, "", "value['total']", "dtype", "has dtype float32 and float64"),
    planted.MeanOfShard: Expected(TWO, 2, None, "", "value", "shape", "has shape (1, 4) and (2, 4)"),
    planted.KeyOfLargeBatch: Expected(TWO, 2, None, "", "value['spread']", "missing key", "is there in run 1 only"),
    planted.SumsInHalf: Expected(TWO, 2, None, "", "value", "order of sums", "rounding, not a mistake", is_error=False),
    planted.RunningMean: Expected(TWO, 2, 0, "", "value[0]", "state kept between calls", "RunningMean.total"),
    planted.CountsInClass: Expected(STRICT, 2, 0, "", "value", "class attribute", "CountsInClass.num_calls"),
    planted.DefaultArgument: Expected(
        STRICT, 2, 0, "", "value", "state kept between calls", "DefaultArgument.kept (a default argument)"
    ),
    planted.NamesByUuid: Expected(STRICT, 2, 0, "", "value['id']", "uuid", "uuid4() at prove_planted.py"),
    planted.DropoutPerWorker: Expected(TWO, 2, 1, "", "value", "random numbers per worker", "generator of torch"),
    planted.ShuffleAndDropout: Expected(
        STRICT, 3, 0, "rows", "rows", "one generator for driver and role", "generator of torch"
    ),
    planted.RateSetByMain: Expected(STRICT, 3, None, "", "", "attribute set on the driver", "self.rate"),
    planted.GlobalSetByMain: Expected(STRICT, 3, None, "", "", "global set on the driver", "'RATE'"),
    planted.AppendsToFile: Expected(STRICT, 2, 0, "", "value", "file", "open() at prove_planted.py"),
    planted.KeepsWhatMainChanges: Expected(
        STRICT,
        3,
        0,
        "",
        "value",
        "changed in place on the driver",
        "which is argument 'rows' of KeepsWhatMainChanges.keep",
    ),
    planted.GivesWhatItChanges: Expected(
        STRICT,
        4,
        0,
        "metrics",
        "metrics['num_steps']",
        "value changed in place",
        "the value of GivesWhatItChanges.begin",
    ),
    planted.ReplayGrownByMain: Expected(STRICT, 2, None, "", "", "attribute set on the driver", "self.replay"),
    planted.SeedOfTime: Expected(STRICT, 2, 0, "", "value", "time", "time.time_ns() at prove_planted.py"),
    planted.WeightOfAnotherRole: Expected(
        ROLES_APART,
        4,
        0,
        "",
        "value",
        "state of another role",
        "WeightOfAnotherRole.weight is not the same on the worker",
    ),
    planted.WeightForOneGenerator: Expected(
        ("two workers", TWO_APART),
        4,
        1,
        "",
        "value",
        "state of another role",
        "WeightForOneGenerator.weight is not the same on the worker",
    ),
    planted.NoiseOfTwoRoles: Expected(
        ROLES_APART, 3, 0, "", "value", "one generator for several roles", "the generator of torch"
    ),
    planted.OffsetOfTime: Expected(STRICT, 1, 0, "", "OffsetOfTime.offset", "time", "that __init__ reads"),
}
SAME_CAUSE = {planted.KeepsWhatMainChanges, planted.SeedOfTime, planted.OffsetOfTime}  # with two workers too
ON_RAY: dict[type, Expected] = {
    planted.JudgeSetsDtype: Expected(RAY, 3, 0, "rows", "rows", "ambient state", "default dtype is torch.float64"),
    planted.ReadsEnvironment: Expected(RAY, 2, 0, "", "value", "environment variable", "os.environ['MY_SCALE']"),
    planted.VocabularyOfSet: Expected(RAY, 2, 0, "", "value", "order of a set", "PYTHONHASHSEED"),
    planted.NamedByProcess: Expected(RAY, 2, 0, "", "value[0]", "process", "getpid() at prove_planted.py"),
}


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    with without_runtime():
        yield
    torch.set_default_dtype(torch.float32)


def as_expected(found: Difference, expected: Expected) -> None:
    told = (found.runs, found.call, found.rank, found.argument, found.tensor, found.kind)
    assert told == expected[:6], str(found)
    assert found.is_error is expected.is_error
    assert expected.words in str(found), str(found)


@pytest.mark.parametrize("cls", PLANTED, ids=lambda cls: cls.__name__)
def test_a_planted_difference_is_named(cls: type, tmp_path: Path) -> None:
    settings = {"folder": str(tmp_path)} if cls is planted.AppendsToFile else {}
    found = prove_class(cls, settings, ray=False)
    assert found
    as_expected(found[0], PLANTED[cls])
    if cls in SAME_CAUSE:
        assert {one.kind for one in found} == {PLANTED[cls].kind}, list(map(str, found))


def test_the_rank_is_named_whose_rows_differ_though_another_has_such_a_row() -> None:
    """The first row of rank 1 that differs is dropped out as a whole, and so is a row of rank 0."""
    torch.manual_seed(55)
    first, *_ = prove_class(planted.DropoutPerWorker, {}, ray=False)
    as_expected(first, PLANTED[planted.DropoutPerWorker])


def test_a_class_is_proved_as_its_device_groups_place_its_roles() -> None:
    """Without device groups each role has a worker of its own."""
    found, made, _ = proof_of_class(planted.AsksWhetherItIsApart, {}, ray=False)
    assert (found, made) == ([], ("off", "one worker, strict", "two workers", APART, TWO_APART))
    together = {"device_groups": {"all": {"device": "CPU", "ranks": 2, "workers": ["train", "critic"]}}}
    found, made, _ = proof_of_class(planted.WeightOfAnotherRole, together, ray=False)
    assert (found, made) == ([], ("off", "one worker, strict", "two workers"))


def is_named_on_ray(cls: type) -> None:
    found = [one for one in prove_class(cls, {}, torchrun=False) if one.runs == RAY]
    assert found
    as_expected(found[0], ON_RAY[cls])


@pytest.mark.parametrize(
    "cls", [cls for cls in ON_RAY if cls is not planted.VocabularyOfSet], ids=lambda cls: cls.__name__
)
def test_a_difference_between_processes_is_named(ray_cluster: None, cls: type) -> None:
    is_named_on_ray(cls)


ALONE = """
import sys

from tests.rayhelper import prove_planted, test_prove_planted

sys.executable = sys.argv[1]
test_prove_planted.is_named_on_ray(prove_planted.VocabularyOfSet)
"""


def test_an_order_of_the_hash_seed_is_named() -> None:
    """In a Python of its own: the processes of the tests and of their cluster are forks, with one hash seed."""
    command = [sys.executable, "-c", ALONE, warm.python()]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SOURCE = """
from rayhelper import RayHelper


@RayHelper.worker(group="train")
class Edited:
    @RayHelper.function(group="train", execute="first")
    def step(self, x: int) -> int:
        return x + 1
"""


def test_source_that_was_edited_between_two_calls_is_named(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "prove_edited.py"

    def program() -> None:
        file.write_text(SOURCE)
        sys.modules.pop("prove_edited", None)
        importlib.invalidate_caches()
        module: Any = importlib.import_module("prove_edited")
        edited = module.Edited()
        edited.step(1)
        file.write_text(SOURCE.replace("x + 1", "x + 20"))
        importlib.reload(module)
        edited.step(2)

    try:
        found = [one for one in prove(program, ["train"], torchrun=False) if one.runs == RAY]
    finally:
        sys.modules.pop("prove_edited", None)
    assert [(one.call, one.kind) for one in found] == [(3, "source edited")]
    assert "prove_edited.py" in str(found[0])


def test_the_fifth_run_is_under_torchrun(warm_torchrun: None) -> None:
    found, runs, left_out = proof_of_class(planted.NamedByProcess, {}, ray=False, torchrun=True)
    assert runs == ("off", "one worker, strict", "two workers", TORCHRUN)
    assert left_out == {}
    expected = Expected(("two workers", TORCHRUN), 2, 0, "", "value[0]", "process", "getpid() at prove_planted.py")
    (under_torchrun,) = [one for one in found if one.runs[1] == TORCHRUN]
    as_expected(under_torchrun, expected)


def test_a_program_that_torchrun_cannot_be_given_is_told() -> None:
    lock = threading.Lock()

    def program() -> None:
        with lock:
            planted.RunningMean()

    found, runs, left_out = proof_of(program, ["train"], ray=False, torchrun=True)
    assert found == []
    assert TORCHRUN not in runs
    assert "the program cannot be pickled" in left_out[TORCHRUN]


def test_a_list_that_a_role_changes_under_torchrun_is_named_and_no_shuffle() -> None:
    told = (
        "RoleError: S.step: rank 1 passes other contents than rank 0: every process must call with the same arguments"
    )
    changed = Seen("S.step", "step", workers=[OnWorker({}, [Note("step", {}, ("scores",))]), OnWorker({})])
    assert of_error(told, [changed]).kind == "argument changed in place"
    assert (
        of_error(told, [Seen("S.step", "step", workers=[OnWorker({})])]).kind
        == "arguments that differ between processes"
    )
