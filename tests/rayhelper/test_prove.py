"""``rayhelper prove`` finds what differs between runtimes, and nothing where nothing does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rayhelper import RayHelper
from rayhelper.__main__ import main
from rayhelper.prove import Difference, prove_class
from rayhelper.prove.runs import TORCHRUN, proof_of_class
from tests.conftest import without_runtime
from tests.rayhelper import prove_fixture
from tests.rayhelper.prove_fixture import Trainer

pytestmark = pytest.mark.usefixtures("own_modules")

OFF_AND_STRICT = ("off", "one worker, strict")
TWO = ("one worker, strict", "two workers")

# by planted difference: the runs that differ first, and words of what is told
PLANTED = {
    "unseeded in __init__": (OFF_AND_STRICT, "Trainer.__init__", "Trainer.noise", "random numbers without a seed"),
    "mean of a shard": (TWO, "Trainer.score", "its value", "how the rows are divided"),
    "rank": (TWO, "Trainer.score", "its value (value[", "how the rows are divided"),
    "another worker's rows": (TWO, "Trainer.score", "its value", "how the rows are divided"),
    "changed in place": (OFF_AND_STRICT, "Trainer.score", "DispatchError", "changed its"),
    "time": (OFF_AND_STRICT, "Trainer.score", "its value", "state outside of the object"),
    "driver and role draw": (OFF_AND_STRICT, "Trainer.score", "its value", "random numbers that both"),
    "draws of the driver": (OFF_AND_STRICT, "Trainer.update", "Trainer.weight of rank 0", "random numbers that both"),
    "cut gradient": (OFF_AND_STRICT, "Trainer.gradient", "WorkerError", "grad_fn"),
    "attribute set from outside": (OFF_AND_STRICT, "Trainer.score", "RoleError", "self.scale"),
    "global": (OFF_AND_STRICT, "Trainer.update", "RoleError", "the global 'RATE'"),
    "clock": (OFF_AND_STRICT, "Trainer.score", "its value", "the clock"),
    "uuid": (OFF_AND_STRICT, "Trainer.score", "its value", "a uuid"),
    "file": (OFF_AND_STRICT, "Trainer.score", "its value", "a file that is written"),
    "order of the driver": (OFF_AND_STRICT, "Trainer.score", "argument 'rows'", "the driver's own code"),
}
ON_RAY = {
    "the process in __init__": ("Trainer.__init__", "Trainer.noise", "pid"),
    "attribute of the class": ("Trainer.update", "Trainer.weight", "a class's attributes"),
    "folder": ("Trainer.score", "argument 'rows'", "folder"),
    "state of the module": ("Trainer.update", "Trainer.weight", "a module's globals"),
}


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prove_fixture, "RATE", 0.5)
    monkeypatch.setattr(prove_fixture, "COUNTER", [0])
    monkeypatch.setattr(Trainer, "shared", 1.0)
    monkeypatch.chdir(Path.cwd())
    with without_runtime():
        yield
    torch.set_default_dtype(torch.float32)


def proved(planted: str, *, ray: bool = False) -> list[Difference]:
    return prove_class(Trainer, {"planted": planted}, ray=ray, torchrun=False)


def test_a_class_without_a_planted_difference_is_the_same_everywhere(ray_cluster: None, warm_torchrun: None) -> None:
    found, made, left_out = proof_of_class(Trainer, {}, ray=True, torchrun=True)
    assert (found, left_out) == ([], {})
    assert TORCHRUN in made


@pytest.mark.parametrize("planted", PLANTED)
def test_what_differs_is_named_with_its_call(planted: str) -> None:
    first, *_ = proved(planted)
    runs, *words = PLANTED[planted]
    assert first.runs == runs
    for word in words:
        assert word in str(first), str(first)


@pytest.mark.parametrize("planted", ON_RAY)
def test_what_differs_in_another_process_is_named(ray_cluster: None, planted: str) -> None:
    found = [str(difference) for difference in proved(planted, ray=True) if "on Ray" in difference.runs[1]]
    assert found
    for word in ON_RAY[planted]:
        assert word in found[0], found[0]


def test_the_command_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, config = f"{prove_fixture.__name__}:Trainer", tmp_path / "x.yaml"
    config.write_text("planted: rank\nuse_ray: true\n")
    assert main(["prove", target, "--config", str(config), "--no-ray"]) == 1
    assert "call 2, Trainer.score" in capsys.readouterr().out
    config.write_text("planted: ''\n")
    assert main(["prove", target, "--config", str(config), "--no-ray", "--steps", "1"]) == 0
    assert (
        "the same off, strict, with two workers, with roles apart and with two workers per role"
        in capsys.readouterr().out
    )
    config.write_text("no_such_key: 1\n")
    assert main(["prove", target, "--config", str(config), "--no-ray"]) == 2
    assert "no_such_key" in capsys.readouterr().err
    assert main(["prove", target, "--no-ray", "--entry", "fly"]) == 2
    assert "has no method fly()" in capsys.readouterr().err


@RayHelper.worker(group="scorer")
class NeedsWords:
    def __init__(self, bonus: int) -> None:
        self.bonus = bonus

    def run(self, prompts: list[int]) -> list[int]:
        return [prompt + self.bonus for prompt in prompts]


def test_a_class_that_needs_arguments_is_refused_with_where_to_write_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{__name__}:NeedsWords"
    assert main(["prove", target, "--no-ray"]) == 2
    told = capsys.readouterr().err
    assert "NeedsWords cannot be constructed: missing a required argument: 'bonus'" in told
    assert "--config FILE" in told
    (tmp_path / "x.yaml").write_text("bonus: 1\n")
    assert main(["prove", target, "--no-ray", "--config", str(tmp_path / "x.yaml")]) == 2
    told = capsys.readouterr().err
    assert "prove calls NeedsWords.run() without arguments, but: missing a required argument: 'prompts'" in told
    assert "--entry METHOD" in told


@RayHelper.worker(group="meets")
class Meets:
    """Two calls that wait for each other."""

    def __init__(self) -> None:
        self.here: list[int] = []

    @RayHelper.function(group="meets")
    async def meet(self, number: int) -> int:
        self.here.append(number)
        while len(self.here) % 2:
            await asyncio.sleep(0)
        return 10 * number

    async def _all(self) -> list[list[int]]:
        return await asyncio.gather(self.meet(1), self.meet(2))  # type: ignore[arg-type]

    def train(self) -> None:
        assert asyncio.run(asyncio.wait_for(self._all(), 60)) in ([10, 20], [[10], [20]], [[10] * 2, [20] * 2])


def test_calls_that_wait_for_each_other_are_in_flight_together(ray_cluster: None) -> None:
    assert prove_class(Meets, {}, torchrun=False) == []


def test_what_asynchronous_calls_leave_behind_is_compared() -> None:
    class Draws(Meets):
        @RayHelper.function(group="meets")
        async def meet(self, number: int) -> int:
            await super().meet(number)
            self.moment = time.perf_counter_ns()
            return 10 * number

    (found, *_) = prove_class(Draws, {}, ray=False)
    assert found.runs == OFF_AND_STRICT
    assert found.title.endswith("Draws.meet (role 'meets')")
    assert "Draws.moment" in found.what
