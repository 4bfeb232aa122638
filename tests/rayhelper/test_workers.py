"""What a worker process is given: ranks, environment, devices, a process group, shards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rayhelper import PlacementError, RayHelper, RayHelperError, ShardError, WorkerDiedError, WorkerError, folder
from tests.conftest import without_runtime

NAMES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES "
    "OMP_NUM_THREADS MY_SETTING DRIVER_SECRET HF_HUB_OFFLINE"
).split()


@RayHelper.worker(group=["train", "rollout", "judge"])
class Probe:
    def __init__(self, layout: str = "none") -> None:
        self.layout = layout
        self.report_train()

    @RayHelper.function(group="train")
    def report_train(self) -> None:
        rank = RayHelper.current().rank
        if self.layout == "pairs":  # ranks 0,1 are one replica, 2,3 the other
            RayHelper.shard(rank // 2, 2, leader=rank % 2 == 1)
        if self.layout == "no leader":
            RayHelper.shard(rank // 2, 2, leader=False)
        if self.layout == "silent" and rank != 3:
            RayHelper.shard(rank // 2, 2, leader=rank % 2 == 0)

    @RayHelper.function(group="train")
    def train_env(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in NAMES}

    @RayHelper.function(group="train", collect="flatten")
    def folders(self) -> list[str]:
        return [os.getcwd()]

    @RayHelper.function(group="rollout")
    def rollout_env(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in NAMES}

    @RayHelper.function(group="judge")
    def judge_env(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in NAMES}

    @RayHelper.function(group="train", collect="flatten")
    def who(self) -> list[Any]:
        return [RayHelper.current()]

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def echo(self, items: list[int]) -> list[int]:
        return items

    @RayHelper.function(group="train", dispatch="slice")
    def slices(self, items: list[int]) -> list[int]:
        return items

    @RayHelper.function(group="rollout", dispatch="slice")
    def rollout_slices(self, items: list[int]) -> list[int]:
        return items

    @RayHelper.function(group="train")
    def reduced(self) -> float:
        import torch  # here, as most of the workers that are started do without

        RayHelper.init_process_group(timeout_s=60)
        value = torch.tensor([float(RayHelper.current().rank)])
        torch.distributed.all_reduce(value)
        torch.distributed.destroy_process_group()
        return value.item()

    @RayHelper.function(group="train")
    def reduced_by_env(self) -> float:
        """As a user's own code does it, who knows nothing of RayHelper."""
        import torch

        torch.distributed.init_process_group("gloo", init_method="env://")
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        torch.distributed.destroy_process_group()
        return value.item()

    @RayHelper.function(group="train")
    def die(self, rank: int) -> None:
        if RayHelper.current().rank == rank:
            os._exit(3)

    @RayHelper.function(group="judge")
    def initializes(self) -> None:
        RayHelper.initialize(GROUPS)

    @RayHelper.function(group="judge")
    def unsendable(self) -> Any:
        return threading.Lock()


GROUPS = {
    "nproc_per_node": 8,
    "actors": {"device": "gpu", "ranks": "list(range(0, 4))", "workers": ["train"]},
    "samplers": {"device": "GPU", "ranks": [4, 5], "workers": ["rollout"]},
    "judges": {"device": "CPU", "ranks": 1, "workers": ["judge"], "env": {"MY_SETTING": 5}},
}


@pytest.fixture(scope="module")
def probe(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("drivers"))
        patch.setenv("DRIVER_SECRET", "not for workers")
        patch.setenv("HF_HUB_OFFLINE", "1")
        with RayHelper.session(GROUPS):
            yield Probe()


def test_every_rank_has_what_torchrun_would_set(probe: Probe) -> None:
    envs = probe.train_env()
    assert [env["RANK"] for env in envs] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "2", "3"]
    assert {env["WORLD_SIZE"] for env in envs} == {env["LOCAL_WORLD_SIZE"] for env in envs} == {"4"}
    assert {env["NODE_RANK"] for env in envs} == {"0"}
    assert {env["MASTER_ADDR"] for env in envs} == {"127.0.0.1"}
    assert len({env["MASTER_PORT"] for env in envs}) == 1
    assert envs[0]["MASTER_PORT"] != probe.rollout_env()[0]["MASTER_PORT"]


def test_gpu_workers_see_the_devices_of_their_group_and_cpu_workers_none(probe: Probe) -> None:
    train = {env["CUDA_VISIBLE_DEVICES"] for env in probe.train_env()}
    rollout = {env["CUDA_VISIBLE_DEVICES"] for env in probe.rollout_env()}
    assert len(train) == len(rollout) == 1
    train_devices, rollout_devices = (set(one.pop().split(",")) for one in (train, rollout))
    assert (len(train_devices), len(rollout_devices)) == (4, 2)
    assert not train_devices & rollout_devices
    assert probe.judge_env()[0]["CUDA_VISIBLE_DEVICES"] == ""


def test_only_the_declared_variables_of_the_driver_reach_a_worker(probe: Probe) -> None:
    env = probe.judge_env()[0]
    assert env["DRIVER_SECRET"] is None
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["MY_SETTING"] == "5"


def test_a_worker_works_in_the_folder_of_its_driver(probe: Probe) -> None:
    assert probe.folders() == [os.getcwd()] * 4
    assert Path.cwd().name.startswith("drivers")


def test_a_folder_of_the_driver_that_a_node_lacks_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder, "_of_driver", None)
    folder.begin_in(str(tmp_path / "missing"))
    assert Path.cwd() == tmp_path
    (told,) = caplog.messages
    assert f"the driver's folder {tmp_path}/missing cannot be entered on this node" in told
    assert told.endswith(f"relative paths start at {tmp_path}")


def test_current_tells_a_worker_who_it_is(probe: Probe) -> None:
    third = probe.who()[2]
    assert (third.roles, third.group, third.rank, third.world_size, third.local_rank, third.node_rank) == (
        ("train",),
        "actors",
        2,
        4,
        2,
        0,
    )


def test_current_off_describes_one_worker() -> None:
    info = RayHelper.current()
    assert (info.rank, info.world_size, info.shard.count, info.shard.leader) == (0, 1, 1, True)


def test_the_held_port_serves_our_process_group_and_a_users_own(probe: Probe) -> None:
    assert probe.reduced() == [6.0] * 4
    assert probe.reduced_by_env() == [4.0] * 4


def test_workers_of_one_shard_get_one_slice_and_its_leader_answers(probe: Probe) -> None:
    pairs = Probe("pairs")
    assert pairs.slices([1, 2, 3]) == [[1, 2], [3]]
    assert pairs.echo([1, 2, 3]) == [1, 2, 3]
    assert [info.shard.index for info in pairs.who()] == [0, 1]
    assert pairs.rollout_slices([1, 2, 3]) == [[1, 2], [3]]
    assert probe.slices([1, 2, 3]) == [[1], [2], [3], []]


@pytest.mark.parametrize(("layout", "words"), [("no leader", "leader"), ("silent", r"ranks \[3\] did not")])
def test_shards_that_do_not_fit_together_are_refused(probe: Probe, layout: str, words: str) -> None:
    wrong = Probe(layout)
    with pytest.raises(ShardError, match=words):
        wrong.slices([1, 2])


def test_a_shard_index_out_of_range_is_refused() -> None:
    with pytest.raises(ShardError, match=r"0\.\.count-1"):
        RayHelper.shard(2, 2)


def test_a_value_that_cannot_be_sent_names_the_method(ray_cluster: None, probe: Probe) -> None:
    with pytest.raises(WorkerError, match="unsendable"):
        probe.unsendable.defer().result(timeout_s=60)


def test_a_dead_worker_is_named(ray_cluster: None) -> None:
    groups = {
        "actors": {"device": "CPU", "ranks": 2, "workers": ["train"]},
        "rest": {"device": "CPU", "ranks": 1, "workers": ["rollout", "judge"]},
    }
    with (
        without_runtime(),
        RayHelper.session(groups),
        pytest.raises(WorkerDiedError, match=r"rank 1 of group 'actors'.*Probe\.die"),
    ):
        Probe().die(1)


def test_too_many_gpus_end_in_a_table_of_what_is_free(ray_cluster: None) -> None:
    with without_runtime():
        with pytest.raises(PlacementError) as caught:
            RayHelper.initialize({"big": {"device": "GPU", "ranks": 64, "workers": ["train"]}})
        assert "64" in str(caught.value)
        assert "big" in str(caught.value)
        assert RayHelper.current().group == "off"


@RayHelper.worker(group=["train", "rollout"])
class Beside:
    @RayHelper.function(group="train")
    def trainer(self) -> Any:
        return facts()

    @RayHelper.function(group="rollout")
    def engine(self) -> Any:
        return facts()

    @RayHelper.function(group="rollout")
    def die(self) -> None:
        marker = os.environ["MARKER"]
        if RayHelper.current().rank == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(3)


def facts() -> tuple[Any, ...]:
    """The GPUs that this process sees and the one that Ray gave it, who is beside it, and the process."""
    own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return os.environ["CUDA_VISIBLE_DEVICES"], own, RayHelper.current().neighbours, os.getpid()


def test_groups_that_share_devices_have_processes_of_their_own_on_the_same_gpus(
    ray_cluster: None, tmp_path: Path
) -> None:
    """Also when one of them died and another took its place."""
    engines = {"shares_devices_with": "policy", "workers": ["rollout"], "restarts": 1}
    groups = {
        "engines": engines | {"env": {"MARKER": str(tmp_path / "died")}},
        "policy": {"device": "GPU", "ranks": 2, "workers": ["train"]},
    }
    with without_runtime(), RayHelper.session(groups):
        beside = Beside()
        trainers = beside.trainer()
        for _ in range(2):
            engines_now = beside.engine()
            assert [one[:2] for one in engines_now] == [one[:2] for one in trainers]
            beside.die()
        assert beside.trainer() == trainers
    (seen, first, roles, _), (also_seen, second, _, _) = trainers
    assert seen == also_seen == ",".join(first + second)
    assert len(set(first + second)) == 2
    assert roles == ("rollout",)
    assert engines_now[0][2] == ("train",)
    assert len({one[3] for one in trainers + engines_now}) == 4


def test_initialize_on_a_worker_says_where_the_call_belongs(probe: Probe) -> None:
    with pytest.raises(RayHelperError, match=r"rank 0 of group 'judges'.*__main__"):
        probe.initializes()
