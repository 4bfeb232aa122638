"""What is asked of Ray and torch under private names, and what is done by versions that lack them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from rayhelper.channel import patches as channel_patches
from rayhelper.runtimes.ray import patches
from rayhelper.worker.patches import PRECISIONS, abort_process_group, backend_of, default_device, precisions, take_over

TIMEOUT = timedelta(seconds=20)


def tasks_here() -> tuple[str, str]:
    """In a worker: the id of the task by the short way, and by the public one."""
    short = patches.current_task().hex()
    patches.global_worker = SimpleNamespace()  # type: ignore[assignment]
    try:
        return short, patches.current_task().hex()
    finally:
        from ray._private.worker import global_worker

        patches.global_worker = global_worker


@pytest.mark.usefixtures("ray_cluster")
def test_a_task_has_one_id_by_the_short_way_and_by_the_public_one() -> None:
    reference = ray.remote(tasks_here).options(num_cpus=0).remote()
    assert ray.get(reference) == (reference.task_id().hex(),) * 2


@pytest.mark.usefixtures("ray_cluster")
def test_free_resources_are_those_of_each_node_or_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    node = ray.get_runtime_context().get_node_id()
    assert patches.free_resources()[node]["CPU"] <= 2
    monkeypatch.delattr(ray._private.state, "available_resources_per_node")
    assert patches.free_resources() == {node: ray.nodes()[0]["Resources"]}


def test_an_actor_without_the_private_name_is_none_of_ours() -> None:
    known = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "0a"))
    assert (patches.id_of_actor(known), patches.id_of_actor(SimpleNamespace())) == ("0a", "")


@pytest.mark.parametrize("version", ["with the private name", "without it"])
def test_the_default_device_is_what_torch_says(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if version == "without it":
        monkeypatch.delattr(torch._C, "_len_torch_function_stack")
    assert default_device(torch) == "cpu"
    try:
        torch.set_default_device("meta")
        assert default_device(torch) == "meta"
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("missing", ["nothing", "the private name", "the interface"])
def test_precisions_are_what_the_backends_say(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tuple(backend_of(torch, name).fp32_precision for name in PRECISIONS)
    if missing == "the private name":
        assert precisions(SimpleNamespace(backends=torch.backends, _C=SimpleNamespace())) == expected
    elif missing == "the interface":
        assert precisions(SimpleNamespace(backends=SimpleNamespace())) == ()
    else:
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
        try:
            assert precisions(torch) != expected
            assert precisions(torch)[list(PRECISIONS).index("mkldnn.conv")] == "bf16"
        finally:
            torch.backends.mkldnn.conv.fp32_precision = "none"
        assert precisions(torch) == expected


def test_a_future_that_is_taken_over_can_be_awaited_again_and_one_without_a_mark_stays_as_it_is() -> None:
    async def twice() -> int:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, future.set_result, 7)
        assert next(future.__await__()) is future
        take_over(future)
        return int(await future)

    assert asyncio.run(twice()) == 7
    unmarked = SimpleNamespace()
    take_over(unmarked)
    assert vars(unmarked) == {}


@pytest.mark.parametrize("version", ["this one", "without options", "with others"])
def test_a_group_by_gloo_works_with_and_without_its_private_options(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listened: list[str] = []
    create = dist.ProcessGroupGloo.create_device
    monkeypatch.setattr(
        dist.ProcessGroupGloo, "create_device", lambda hostname: listened.append(hostname) or create(hostname=hostname)
    )
    if version == "without options":
        monkeypatch.delattr(dist.ProcessGroupGloo, "_Options")
    if version == "with others":
        monkeypatch.setattr(dist.ProcessGroupGloo, "_Options", SimpleNamespace)
    group = channel_patches.gloo_group(dist.HashStore(), 0, 1, TIMEOUT, "127.0.0.1")
    tensor = torch.tensor([3.0])
    group.broadcast([tensor], dist.BroadcastOptions()).wait()
    assert tensor.tolist() == [3.0]
    assert listened == (["127.0.0.1"] if version == "this one" else [])


@pytest.mark.parametrize("fields", [("_timeout",), ()])
def test_a_group_by_nccl_waits_as_long_as_it_is_told_where_it_can_be_told(
    fields: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        def __init__(self, *given: Any) -> None:
            self.given = given

        @staticmethod
        def Options() -> Any:  # noqa: N802
            return SimpleNamespace(**dict.fromkeys(fields))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    store, rank, size, options = channel_patches.nccl_group("store", 1, 2, TIMEOUT).given
    assert (store, rank, size, vars(options)) == ("store", 1, 2, dict.fromkeys(fields, TIMEOUT))


def test_the_default_group_is_aborted_or_else_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append("destroyed"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: ended.append("aborted"))
    abort_process_group()
    monkeypatch.delattr(dist.distributed_c10d, "_abort_process_group")
    abort_process_group()
    assert ended == ["aborted", "destroyed"]
