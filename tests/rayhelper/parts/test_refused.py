"""What no runtime with workers lets through: gradients that would be cut, batches that nobody can cut, forked calls."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper import RayHelper
from rayhelper.roles.futures import Future
from rayhelper.runtimes.torchrun.placement import OwedCall
from tests.rayhelper.parts.stories import Run, only, raised, runs, says, story

WITH_WORKERS = ("inprocess", "strict", "torchrun", "ray")


@dataclass
class Batch:
    """Tensors of equal length, and nothing that says so."""

    tokens: Any
    name: str = "batch"


@RayHelper.worker(group=["train", "judge", "rollout"])
class Model:
    def __init__(self, start: Any = None) -> None:
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))

    @RayHelper.function(group="train")
    def loss(self) -> Any:
        return {"losses": [(self.weight * 3).sum()]}

    @RayHelper.function(group="train")
    def detached(self) -> Any:
        return self.loss_here().detach()

    def loss_here(self) -> torch.Tensor:
        return (self.weight * 3).sum()

    @RayHelper.function(group="train")
    def backward(self, number: int, scored: Any = None) -> bool:
        return bool(number) and scored is not None

    @RayHelper.function(group="judge")
    def judged(self) -> bool:
        return True

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def learn(self, rows: list[int], batch: Any) -> list[int]:
        return [row + len(batch.tokens) for row in rows]

    @RayHelper.function(group="driver", execute="first")
    def on_driver(self) -> bool:
        return True


def scored() -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(1)) * 2


@story
def cut_arguments() -> Any:
    model = Model()
    return (
        raised(lambda: model.backward(1, scored())),
        raised(lambda: model.backward(1, scored={"of": [scored()]})),
        raised(lambda: model.learn([1, 2, 3], RayHelper.whole([scored()]))),
        raised(lambda: model.backward(1, scored().detach())),
        raised(lambda: model.backward(1, torch.nn.Parameter(torch.ones(1)))),
        raised(lambda: len(model.learn(torch.ones(3, requires_grad=True), RayHelper.whole(Batch([1]))))),
        raised(lambda: Model(start={"of": scored()}).judged()),
    )


@only(runs(*WITH_WORKERS))
def test_an_argument_whose_gradient_would_be_cut_is_refused_by_name(run: Run) -> None:
    positional, nested, uncut, detached, leaf, cut_leaf, of_constructor = run(cut_arguments)
    assert says(positional, "DispatchError", "Model.backward", "argument 'scored'", "grad_fn", "detach()")
    assert says(nested, "DispatchError", "Model.backward", "argument 'scored'['of'][0]")
    assert says(uncut, "DispatchError", "Model.learn", "argument 'batch'[0]")
    assert "returned" in detached
    assert "returned" in leaf
    assert says(of_constructor, "DispatchError", "Model(...): argument 'start'['of']", "grad_fn", "detach()")
    assert says(cut_leaf, "WorkerError", "the value[0] of Model.learn")  # it was sent, and came to a sum with a graph


@only(runs("off"))
def test_with_ray_off_a_gradient_goes_through_a_call(run: Run) -> None:
    positional, *_ = run(cut_arguments)
    assert "returned" in positional


@story
def cut_values() -> Any:
    model = Model()
    return raised(model.loss), [float(value) for value in every(model.detached())], raised(model.loss.defer().result)


def every(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@only(runs(*WITH_WORKERS))
def test_a_value_whose_gradient_would_be_cut_is_refused_by_name(run: Run) -> None:
    refused, detached, deferred = run(cut_values)
    assert says(refused, "WorkerError", "the value['losses'][0] of Model.loss", "on rank", "grad_fn", "detach()")
    assert says(deferred, "WorkerError", "the value['losses'][0] of Model.loss")
    assert detached == [6.0] * run.layout.size("train")


@story
def uncut_batches() -> Any:
    model = Model()
    batch = Batch(np.arange(3))
    return (
        raised(lambda: model.learn([1, 2, 3], batch)),
        raised(lambda: model.learn([1, 2, 3], RayHelper.whole(batch))),
    )


@only(runs(*WITH_WORKERS))
def test_a_batch_that_nothing_says_how_to_cut_is_refused_beside_one_that_is(run: Run) -> None:
    refused, whole = run(uncut_batches)
    assert says(refused, "DispatchError", "'batch'", "'tokens'", "__getitem__", "RayHelper.whole(value)")
    assert whole == {"returned": [4, 5, 6]}


@story
def from_a_forked_child() -> Any:
    model = Model()
    before = every(model.backward(1, 1))
    told = in_child(lambda: raised(lambda: model.backward(1, 1)))
    constructed = in_child(lambda: raised(Model))
    return told, constructed, before == every(model.backward(1, 1))


def in_child(work: Any) -> Any:
    """What the work comes to in a process that is forked from this one."""
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe()
    child = forking.Process(target=lambda: theirs.send(work()))
    child.start()
    try:
        assert ours.poll(60), "the forked child says nothing"
        return ours.recv()
    finally:
        child.join(10)
        child.kill()


@only(runs(*WITH_WORKERS))
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_call_from_a_forked_child_is_an_error_at_once(run: Run) -> None:
    called, constructed, goes_on = run(from_a_forked_child)
    assert says(called, "RoleError", "Model.backward", "forked")
    assert says(constructed, "RoleError", "Model(...)", "forked")
    assert goes_on


@story
def future_in_a_forked_child() -> Any:
    model = Model()
    future, other = model.backward.defer(1, 1), model.judged.defer()
    asked = {
        "result": lambda: every(future.result()),
        "done": future.done,
        "cancel": future.cancel,
        "exception": future.exception,
        "parts": lambda: list(future.as_parts()),
        "completed": lambda: [every(one.result()) for one in RayHelper.as_completed([future])],
    }
    told = {name: in_child(lambda work=work: raised(work)) for name, work in asked.items()}
    of_other = in_child(lambda: raised(lambda: every(other.result())))
    here = every(future.result()), every(other.result())
    return told, of_other, here, every(model.backward(1, 1))


@only(runs("inprocess", "strict", "ray"))
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_future_that_a_forked_child_asks_is_an_error_at_once_or_has_its_value(run: Run) -> None:
    told, of_other, (value, judged), goes_on = run(future_in_a_forked_child)
    assert set(value) == set(judged) == set(goes_on) == {True}
    if run.runtime == "ray":
        for name, answer in told.items():
            assert says(answer, "RoleError", "the Future of Model.backward", "forked", ".result() there"), name
        assert says(of_other, "RoleError", "the Future of Model.judged", "forked")
    else:
        assert told["result"] == {"returned": value}
        assert told["done"] == {"returned": True}
        assert told["cancel"] == {"returned": False}


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_so_is_one_of_torchrun_that_this_process_owes_the_others() -> None:
    def meets() -> list[Any]:
        raise AssertionError("the child met the others in place of its parent")

    future: Future[Any] = Future(OwedCall("Model.judged", meets, sum))
    told = in_child(lambda: raised(future.result))
    assert told["raised"] == "RoleError"
    assert "the Future of Model.judged was used in a forked process" in told["text"]


@story
def other_rows() -> Any:
    """Processes of torchrun read the rows in an order of their own, or other ones; elsewhere one process reads."""
    model, process = Model(), int(os.environ.get("RANK", "0"))
    batch = RayHelper.whole(Batch(np.arange(1)))
    turned = [1, 2, 3, 4][:: -1 if process == 1 else 1]
    return (
        raised(lambda: model.learn(turned, batch)),
        raised(lambda: model.learn([process, 2, 3, 4], batch)),
        raised(lambda: model.learn(torch.arange(4.0) * (1 + process), batch)),
        raised(lambda: len(model.learn(torch.arange(4.0) * (1 + 1e-6 * process), batch))),
        raised(lambda: model.backward(1, {"time": float(process)})),
        model.learn([1, 2, 3, 4], batch),
    )


@only(runs("torchrun", layouts=("pair", "two", "three")))
def test_rows_that_differ_between_processes_are_an_error(run: Run) -> None:
    turned, other, real, rounded, timed, equal = run(other_rows)
    assert says(turned, "RoleError", "Model.learn", "rank 1", "the same items in another order", "torch.manual_seed")
    assert says(other, "RoleError", "Model.learn", "rank 1", "other contents")
    assert says(real, "RoleError", "Model.learn", "other contents")
    assert rounded == {"returned": 4}
    assert says(timed, "RoleError", "Model.backward", "other contents", "execute='first'")
    assert equal == [2, 3, 4, 5]
