"""Several Ray nodes on one machine: where ranks lie, how they meet, what is said when nodes are missing or die."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import AuthenticationError

from rayhelper import PlacementError, RayHelper
from rayhelper.runtimes.ray import placement
from tests import warm

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import contextlib, json, logging, os, sys, threading, time
import numpy as np
import ray
from ray.cluster_utils import Cluster
from rayhelper import PlacementError, RayHelper, WorkerDiedError


@RayHelper.worker(group=["train", "rollout", "judge"])
class Probe:
    @RayHelper.function(group="train")
    def where(self):
        info = RayHelper.current()
        node = ray.get_runtime_context().get_node_id()
        return [info.rank, info.node_rank, info.local_rank, info.local_world_size, node, os.environ["MASTER_ADDR"]]

    @RayHelper.function(group="train")
    def reduced(self):
        import torch  # here, as most of the workers that are started do without

        RayHelper.init_process_group("gloo", timeout_s=60)
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return value.item()

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def doubled(self, values):
        return values * 2

    @RayHelper.function(group="train")
    def total(self, tensor):
        return float(tensor.sum())

    @RayHelper.function(group="train")
    def sleep(self):
        time.sleep(60)

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def tripled(self, values, sleep_once):
        if RayHelper.current().rank == 1:
            with contextlib.suppress(FileNotFoundError):
                os.remove(sleep_once)
                time.sleep(600)
        return [3 * value for value in values]

    @RayHelper.function(group="rollout")
    def rollout_node(self):
        return ray.get_runtime_context().get_node_id()

    @RayHelper.function(group="rollout", collect=sum)
    def summed(self, values):
        return float(values.sum())

    @RayHelper.function(group="judge")
    def judge_node(self):
        return ray.get_runtime_context().get_node_id()


def measured(cluster):
    import torch

    facts = {}
    nodes = [cluster.add_node(num_cpus=1, num_gpus=gpus, wait=False) for gpus in (2, 4)]
    cluster.wait_for_nodes()
    groups = {
        "nproc_per_node": 2,
        "trainers": {"device": "GPU", "ranks": [0, 1, 2, 3], "workers": ["train"]},
        "samplers": {"device": "GPU", "ranks": [4, 5], "workers": ["rollout"]},
        "judges": {"device": "CPU", "ranks": 4, "workers": ["judge"]},
    }
    os.environ["RAYHELPER_WAIT_S"] = "0.5"
    try:
        RayHelper.initialize(groups, ray_address=cluster.address)
    except PlacementError as error:
        facts["missing"] = [str(error), "".join(error.__notes__)]
    os.environ["RAYHELPER_WAIT_S"] = "60"
    joining = threading.Timer(1.0, lambda: nodes.append(cluster.add_node(num_cpus=1, num_gpus=2)))
    joining.start()
    with RayHelper.session(groups, ray_address=cluster.address):
        joining.join()
        facts["joined"] = nodes[-1].node_id
        probe = Probe()
        facts["where"] = probe.where()
        facts["addresses"] = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        facts["rollout"] = probe.rollout_node()
        facts["judges"] = probe.judge_node()
        facts["reduced"] = probe.reduced()
        facts["flattened"] = float(probe.doubled(np.ones(400_000)).sum())
        facts["broadcast"] = probe.total(torch.ones(1_000_000))
        facts["handed over"] = probe.summed(probe.doubled.defer(np.ones(400_000)))
        call = probe.sleep.defer()
        cluster.remove_node(by_id(nodes).pop(facts["where"][3][4]), allow_graceful=False)
        try:
            call.result(timeout_s=60)
        except WorkerDiedError as error:
            facts["lost"] = str(error)
    ray.init(address=cluster.address, logging_level=40)
    facts["all free"] = ray.util.placement_group([{"GPU": 2}, {"GPU": 2}]).wait(30)
    ray.shutdown()
    nodes = [node for node in nodes if node.node_id != facts["where"][3][4]]
    return facts | moved(cluster, by_id(nodes))


def moved(cluster, nodes):
    # of a group with restarts, when its node dies while another is free, and while none is
    facts = {"warnings": []}
    log = logging.getLogger("rayhelper.runtimes.ray.recovery")
    log.addFilter(lambda record: not facts["warnings"].append(record.getMessage()))
    pair = {"device": "GPU", "ranks": [0, 1], "workers": ["train", "rollout", "judge"], "restarts": 9}
    os.environ["RAYHELPER_WAIT_S"] = "1"
    with RayHelper.session({"nproc_per_node": 2, "pair": pair}, ray_address=cluster.address):
        probe = Probe()
        facts["before"] = probe.where()
        open("sleep once", "w").close()
        call = probe.tripled.defer([1, 2, 3], os.path.abspath("sleep once"))
        next(call.as_parts())
        cluster.remove_node(nodes.pop(facts["before"][1][4]), allow_graceful=False)
        facts["tripled"] = call.result()
        facts["after"] = probe.where()
        facts["reduced after"] = probe.reduced()
        call = probe.sleep.defer()
        cluster.remove_node(*nodes.values(), allow_graceful=False)
        facts["homeless"] = []
        for again in (call.result, probe.where):
            try:
                again()
            except PlacementError as error:
                facts["homeless"].append(str(error))
    return facts


def by_id(nodes):
    return {node.node_id: node for node in nodes}


sys.executable = sys.argv[1]  # what starts Ray's processes and workers
cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": {"health_check_period_ms": 500}},
    shutdown_at_exit=False,
)
try:
    facts = measured(cluster)
finally:
    cluster.shutdown()
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    python = warm.python()
    done = subprocess.run(
        [python, "program.py", python], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "ray://localhost:{}"])
def test_an_address_that_nobody_answers_is_told_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # whatever an earlier test has joined
    with socket.socket() as bound:  # nobody else is given the port, and nobody listens there
        bound.bind(("127.0.0.1", 0))
        address = address.format(bound.getsockname()[1])
        with pytest.raises(
            PlacementError, match=f"no Ray cluster answers at ray_address '{address}'.*ray start --head"
        ):
            RayHelper.initialize({"all": {"device": "CPU", "ranks": 1, "workers": ["train"]}}, ray_address=address)


def test_missing_nodes_end_in_a_table_after_a_bounded_wait(facts: dict[str, Any]) -> None:
    table, waited = facts["missing"]
    assert "No node is left with 2 GPU free" in table
    for row in ("trainers", "samplers", "free:", "asked:"):
        assert row in table
    assert "waited 0.5 s" in waited


def test_a_node_that_joins_while_we_wait_is_used(facts: dict[str, Any]) -> None:
    assert facts["joined"] in {*facts["rollout"], *(one[4] for one in facts["where"])}


def test_the_cluster_outlives_its_sessions_and_all_that_they_had_is_free(facts: dict[str, Any]) -> None:
    assert facts["all free"]


def test_the_ranks_of_a_group_lie_node_by_node(facts: dict[str, Any]) -> None:
    assert [one[:4] for one in facts["where"]] == [[0, 0, 0, 2], [1, 0, 1, 2], [2, 1, 0, 2], [3, 1, 1, 2]]
    first, second = ({one[4] for one in facts["where"][start : start + 2]} for start in (0, 2))
    assert len(first) == len(second) == 1
    assert first != second


def test_groups_have_nodes_of_their_own_and_cpu_workers_are_spread(facts: dict[str, Any]) -> None:
    assert len(set(facts["rollout"])) == 1
    assert not set(facts["rollout"]) & {one[4] for one in facts["where"]}
    assert len(set(facts["judges"])) == 4


def test_ranks_of_different_nodes_meet_at_rank_zeros_address(facts: dict[str, Any]) -> None:
    assert {one[5] for one in facts["where"]} == {facts["addresses"][facts["where"][0][4]]}
    assert facts["reduced"] == [4.0] * 4


def test_values_travel_between_nodes(facts: dict[str, Any]) -> None:
    assert facts["flattened"] == 800_000
    assert facts["broadcast"] == [1_000_000.0] * 4
    assert facts["handed over"] == 1_600_000


def test_a_node_that_dies_is_told_by_rank(facts: dict[str, Any]) -> None:
    assert "of group 'trainers'" in facts["lost"]
    assert "rank 2" in facts["lost"] or "rank 3" in facts["lost"]


def test_a_group_with_restarts_moves_to_a_free_node_when_its_own_dies(facts: dict[str, Any]) -> None:
    before, after = facts["before"], facts["after"]
    assert [one[:4] for one in before] == [one[:4] for one in after] == [[0, 0, 0, 2], [1, 0, 1, 2]]
    assert {one[4] for one in before}.isdisjoint(one[4] for one in after)
    assert facts["tripled"] == [3, 6, 9]
    assert facts["reduced after"] == [2.0, 2.0]
    assert "its node is lost: all 2 workers of the group are placed and constructed again" in "".join(facts["warnings"])


def test_a_group_for_which_no_node_is_left_is_a_placement_error(facts: dict[str, Any]) -> None:
    first, second = facts["homeless"]
    assert first == second
    assert "of group 'pair' (roles train, rollout, judge; node" in first
    assert "could not be placed again: the cluster cannot hold the device groups. No node is left with 2 GPU" in first
    assert "waited 5 s" in first


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "it accepts connections and sends nothing for 0.2 s"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the program at this address does not use Ray's protocol"),
        (b"", "the program at this address does not use Ray's protocol"),
    ],
)
def test_a_port_that_accepts_and_does_not_answer_as_ray_does(
    answer: bytes | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_PROBE_S", 0.2 if answer is None else 5.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                if answer is None:
                    while connection.recv(1024):  # until the visitor has left
                        pass
                connection.sendall(answer or b"")

        serving = threading.Thread(target=serve)
        serving.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(PlacementError, match=f"^no Ray cluster answers at ray_address '{address}' .{told}.. S"):
            placement.probe(address)
        serving.join()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionError("Failed to connect to Ray cluster at a:1"), "Failed to connect to Ray cluster at a:1"),
        (AuthenticationError("no token was found. Ensure that ..."), "no token was found"),
    ],
)
def test_what_answers_the_probe_and_cannot_be_joined_is_told_in_one_line(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise error

    monkeypatch.setattr(placement, "probe", lambda address: None)
    monkeypatch.setattr(placement, "_listens_on_loopback_alone", lambda address: False)
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(PlacementError, match=rf"^cannot join a Ray cluster at ray_address 'a:1' .{told}.\. If"):
        placement.connect("a:1")


def test_a_cluster_answers_the_probe(ray_cluster: None) -> None:
    placement.probe(ray.get_runtime_context().gcs_address)


def test_a_cluster_with_a_token_is_not_joined_without_the_token(ray_cluster: None) -> None:
    """Ray 2.59 and later give one to the cluster of this process, and read it for an address only if told to."""
    address = ray.get_runtime_context().gcs_address
    env = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    env["RAY_NUM_REDIS_GET_RETRIES"] = "1"
    code = f"from rayhelper.runtimes.ray import placement; placement.connect({address!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env, check=False)
    told = done.stderr.splitlines()[-1]
    assert told.startswith(f"rayhelper.errors.PlacementError: cannot join a Ray cluster at ray_address '{address}'")
    assert "set RAY_AUTH_MODE=token and give its token in RAY_AUTH_TOKEN or ~/.ray/auth_token" in told
    assert "(RAY_AUTH_MODE is not set)" in told


def test_a_cluster_that_listens_on_loopback_alone_is_joined(ray_cluster: None) -> None:
    address = ray.get_runtime_context().gcs_address
    code = (
        "from rayhelper.runtimes.ray import placement\n"
        f"assert placement.connect({address!r})\n"
        "print(placement.cluster_nodes()[0].address)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.splitlines()[-1:] == ["127.0.0.1"], done.stderr
