"""Under torchrun: what users do who do not know that every process runs the driver's code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rayhelper.test_torchrun import torchrun

SCRIPT = """
import asyncio, itertools, json, os, random, sys, threading
import numpy as np
import torch
from datasets import Dataset
from rayhelper import RayHelper

rank = int(os.environ["RANK"])
facts = {}

class Holder:
    def __init__(self, held):
        self.held = held

async def later(given, until):
    while until not in over:
        await asyncio.sleep(0.01)
    return given

over = set()  # what this process's driver no longer holds up
names = itertools.count()

@RayHelper.worker(group="train")
class Net:
    def __init__(self):
        self.drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]

    @RayHelper.function(group="train")
    def built_with(self):
        return self.drawn

    @RayHelper.function(group="train")
    def held(self, graph):
        value = torch.ones(2, requires_grad=True) * 2
        return {"object": Holder(value), "deep": Deep(value)}[graph]

    @RayHelper.function(group="train")
    def total(self, given):
        return float(given.held.sum()) if isinstance(given, Holder) else float(given())

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def texts(self, rows):
        return list(rows["text"])

    @RayHelper.function(group="train")
    def one(self):
        return 1

    @RayHelper.function(group="train")
    def join(self):
        RayHelper.init_process_group("gloo", timeout_s=60)

    @RayHelper.function(group="train")
    def given(self, value):
        return value

    @RayHelper.function(group="train", execute="first")
    async def by_first(self, given, until):
        return await later(given, until)

    @RayHelper.function(group="train")
    async def by_all(self, given, until):
        return await later(given, until)

@RayHelper.worker(group="train")
class Given:
    def __init__(self, value):
        self.value = value

    @RayHelper.function(group="train")
    def one(self):
        return 1

class Deep:
    # of which no check knows that it holds a graph, and which pickles it
    __slots__ = ["held"]

    def __init__(self, held):
        self.held = held

def told(name, call):
    try:
        facts[name] = ["nothing", call()]
    except Exception as error:
        facts[name] = [type(error).__name__, str(error)]

with RayHelper.session({"g": {"device": "CPU", "ranks": 2, "workers": ["train"]}}, runtime="torchrun"):
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    begun = [random.random(), float(torch.rand(()))]
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    net = Net()
    facts["built with"] = net.built_with()
    facts["begun and now"] = [begun, [random.random(), float(torch.rand(()))]]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    facts["seeded alike"] = Net().built_with()
    facts["here with 5"] = float(torch.rand(()))
    torch.set_default_device("meta")
    told("meta", net.one)
    torch.set_default_device("cpu")
    told("object", lambda: net.held("object"))
    told("deep", lambda: net.held("deep"))
    told("in step", net.one)
    graph = torch.ones(2, requires_grad=True) * 2
    told("argument", lambda: net.total(Holder(graph)))
    told("closure", lambda: net.total((lambda kept: lambda: kept.sum())(graph)))
    told("dataset", lambda: net.texts(Dataset.from_dict({"text": ["a", "b", "c"]})))
    thread = threading.Thread(target=told, args=("thread", net.one))
    thread.start()
    thread.join()
    told("after", net.one)

    async def beside(call):
        until = next(names)
        task = asyncio.create_task(call(7, until))
        await asyncio.sleep(0.2)  # of a busy machine
        try:
            first = net.one()
        finally:
            over.add(until)
        return [first, await task, net.one()]

    async def cancelled(call):
        until = next(names)
        try:
            await asyncio.wait_for(call(7, until), 0.2)
        except TimeoutError:
            first = net.one()
            over.add(until)
            return [first, await call(8, until)]

    told("beside one", lambda: asyncio.run(beside(net.by_first)))
    told("beside all", lambda: asyncio.run(beside(net.by_all)))
    told("cancelled", lambda: asyncio.run(cancelled(net.by_first)))
    told("cancelled all", lambda: asyncio.run(cancelled(net.by_all)))
    told("number", lambda: net.given(random.Random(rank).random()))
    told("texts", lambda: net.given(["b", "a"][:: 1 - 2 * rank]))
    told("constructor", lambda: Given(np.arange(3) + rank).one())
    told("loader", lambda: [net.given([k, k]) for k in range(12)] and net.given([rank, 5]))
    told("at last", net.one)
    net.join()
    told("beside in group", lambda: asyncio.run(beside(net.by_all)))
    told("after the group", net.one)
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(facts, file)
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What each of two processes saw."""
    folder: Path = tmp_path_factory.mktemp("users")
    (folder / "users.py").write_text(SCRIPT)
    done = torchrun(2, "users.py", str(folder), cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_replicas_begin_alike_where_processes_have_no_seed_or_each_its_own(facts: list[dict[str, object]]) -> None:
    (one, other), (again, _) = (seen["built with"] for seen in facts)  # type: ignore[misc]
    assert one == other == again
    begun, now = facts[1]["begun and now"]  # type: ignore[misc]
    assert begun == now, "a process keeps the generators that it was given, except in the constructor"
    begun, now = facts[0]["begun and now"]  # type: ignore[misc]
    assert begun == [one[0], one[2]]
    assert now != begun


def test_processes_with_the_same_seeds_are_left_alone(facts: list[dict[str, object]]) -> None:
    assert facts[0]["seeded alike"] == facts[1]["seeded alike"]
    assert facts[0]["here with 5"] == facts[1]["here with 5"]


def test_a_default_device_of_the_user_does_not_reach_the_exchange(facts: list[dict[str, object]]) -> None:
    assert [seen["meta"] for seen in facts] == [["nothing", [1, 1]]] * 2


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        (
            "object",
            "WorkerError",
            ["the value.held of Net.held (role 'train') on rank", "grad_fn (MulBackward0)", "detach()"],
        ),
        (
            "deep",
            "WorkerError",
            ["the value of Net.held (role 'train') on rank", "cannot be sent", "grad_fn (MulBackward0)"],
        ),
        ("argument", "DispatchError", ["Net.total (role 'train') on group 'g'", "argument 'given'.held", "grad_fn"]),
        (
            "closure",
            "DispatchError",
            ["Net.total (role 'train') on group 'g'", "argument 'given' (its variable 'kept')", "grad_fn"],
        ),
        ("thread", "RoleError", ["Net.one", "second thread", "call.defer()"]),
    ],
)
def test_what_cannot_be_is_refused_on_all_processes_alike(
    facts: list[dict[str, object]], case: str, kind: str, words: list[str]
) -> None:
    for seen in facts:
        told, text = seen[case]  # type: ignore[misc]
        assert told == kind
        assert [word for word in words if word not in text] == []


def test_the_processes_stay_in_step(facts: list[dict[str, object]]) -> None:
    for seen in facts:
        assert seen["in step"] == seen["after"] == ["nothing", [1, 1]]


def test_a_dataset_is_cut(facts: list[dict[str, object]]) -> None:
    assert [seen["dataset"] for seen in facts] == [["nothing", ["a", "b", "c"]]] * 2


def test_ordinary_calls_are_made_beside_coroutines_that_are_in_flight(facts: list[dict[str, object]]) -> None:
    for seen in facts:
        assert seen["beside one"] == ["nothing", [[1, 1], 7, [1, 1]]]
        assert seen["beside all"] == ["nothing", [[1, 1], [7, 7], [1, 1]]]


def test_beside_coroutines_of_a_process_group_they_are_refused(facts: list[dict[str, object]]) -> None:
    for seen in facts:
        told, text = seen["beside in group"]  # type: ignore[misc]
        assert told == "RoleError"
        assert "Await the other call first" in str(text)
        assert seen["after the group"] == ["nothing", [1, 1]]


def test_a_coroutine_that_is_cancelled_leaves_the_processes_in_step(facts: list[dict[str, object]]) -> None:
    for seen in facts:
        assert seen["cancelled"] == ["nothing", [[1, 1], 8]]
        assert seen["cancelled all"] == ["nothing", [[1, 1], [8, 8]]]
        assert seen["at last"] == ["nothing", [1, 1]]


@pytest.mark.parametrize("case", ["number", "texts", "constructor", "loader"])
def test_arguments_that_differ_between_processes_are_refused(facts: list[dict[str, object]], case: str) -> None:
    for seen in facts:
        told, text = seen[case]  # type: ignore[misc]
        assert told == "RoleError"
        assert "rank 1 passes" in str(text)
