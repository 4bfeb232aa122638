"""Where the workers of the device groups run on clusters that exist only on paper."""

import pickle
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhelper.device_groups import DeviceGroups
from rayhelper.device_groups.slots import NodeResources, Slot, assign, bundle, resources
from rayhelper.errors import PlacementError


def node(name: str, gpus: float = 0, cpus: float = 2, npus: float = 0) -> NodeResources:
    return NodeResources(name, f"10.0.0.{name}", cpus, gpus, npus, label=f"host-{name}")


def names(slots: tuple[Slot, ...]) -> list[str]:
    return [slot.node_id for slot in slots]


def gpu_groups(nproc_per_node: int | None = None, **ranks: Any) -> DeviceGroups:
    """A GPU group a keyword, with the ranks given, hosting a role of its own name."""
    top = {} if nproc_per_node is None else {"nproc_per_node": nproc_per_node}
    sections = {name: {"device": "GPU", "ranks": ranks, "workers": [name]} for name, ranks in ranks.items()}
    return DeviceGroups.parse(top | sections)


def test_groups_share_the_logical_nodes():
    slots = assign(gpu_groups(4, train=[0, 1, 4, 5], rollout=[2, 3, 6, 7]), [node("1", 4), node("2", 4)])
    assert names(slots["train"]) == names(slots["rollout"]) == ["1", "1", "2", "2"]
    assert slots["train"] == (
        Slot("train", 0, 0, 2, 0, "1", "10.0.0.1", 1),
        Slot("train", 1, 1, 2, 0, "1", "10.0.0.1", 1),
        Slot("train", 2, 0, 2, 1, "2", "10.0.0.2", 1),
        Slot("train", 3, 1, 2, 1, "2", "10.0.0.2", 1),
    )
    assert pickle.loads(pickle.dumps(slots)) == slots


def test_a_node_without_accelerators_is_passed_over():
    slots = assign(gpu_groups(2, train=4), [node("1"), node("2", 2), node("3", 1), node("4", 2)])
    assert names(slots["train"]) == ["2", "2", "4", "4"]


def test_ranks_of_the_second_node_lie_on_the_second_node():
    slots = assign(gpu_groups(4, train=range(4, 8)), [node("1"), node("2", 4), node("3", 4)])
    assert names(slots["train"]) == ["3"] * 4
    assert {slot.node_rank for slot in slots["train"]} == {0}


def test_ranks_of_the_second_node_lie_on_the_only_node_that_there_is():
    assert names(assign(gpu_groups(4, train=range(4, 8)), [node("1", 4)])["train"]) == ["1"] * 4


def test_a_large_demand_is_not_crowded_out_by_a_small_one():
    slots = assign(gpu_groups(4, small=[0], large=[4, 5, 6, 7]), [node("1", 4), node("2", 1)])
    assert names(slots["small"]) == ["2"]
    assert names(slots["large"]) == ["1"] * 4


def test_without_nproc_per_node_the_largest_node_says_how_many_fit():
    slots = assign(gpu_groups(train=6), [node("1", 2), node("2", 4), node("3", 4)])
    assert names(slots["train"]) == ["2", "2", "2", "2", "1", "1"]  # the rest, on the first node that has enough


def test_a_single_node_is_never_spread():
    groups = DeviceGroups.parse({"nnodes": 1, "train": {"device": "GPU", "ranks": 6, "workers": "train"}})
    assert names(assign(groups, [node("1", 4), node("2", 8)])["train"]) == ["2"] * 6
    with pytest.raises(PlacementError, match="No node is left with 6 GPU free"):
        assign(groups, [node("1", 4), node("2", 4)])


def test_a_worker_with_several_accelerators_has_one_rank():
    groups = DeviceGroups.parse({"nproc_per_node": 4, "rollout": {"gpus": 8, "gpus_per_worker": 2}})
    slots = assign(groups, [node("1", 4), node("2", 4)])["rollout"]
    assert [(s.rank, s.local_rank, s.local_world_size, s.node_id, s.gpus) for s in slots] == [
        (0, 0, 2, "1", 2),
        (1, 1, 2, "1", 2),
        (2, 0, 2, "2", 2),
        (3, 1, 2, "2", 2),
    ]


def test_a_worker_is_never_torn_over_nodes_of_a_size_nobody_gave():
    groups = DeviceGroups.parse({"rollout": {"gpus": 4, "gpus_per_worker": 2}})
    with pytest.raises(PlacementError, match=r"worker 1 of group 'rollout' .* Set nproc_per_node"):
        assign(groups, [node("1", 3), node("2", 3)])


def test_groups_that_share_devices_lie_at_the_same_places_and_are_counted_once():
    config = {"nproc_per_node": 2, "engines": {"shares_devices_with": "policy", "workers": "rollout"}}
    config |= {"policy": {"device": "GPU", "ranks": [0, 1, 2], "workers": "train"}}
    groups = DeviceGroups.parse(config)
    slots = assign(groups, [node("1", 2), node("2", 1)])
    places = [[(slot.rank, slot.local_rank, slot.node_id) for slot in slots[name]] for name in ("policy", "engines")]
    assert places[0] == places[1] == [(0, 0, "1"), (1, 1, "1"), (2, 0, "2")]
    with pytest.raises(PlacementError) as caught:
        assign(groups, [node("1", 2), node("2", 0)])
    assert "  engines  GPU     3        the devices of policy\n" in str(caught.value)
    assert "No node is left with 1 GPU free, which node 1 of" in str(caught.value)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 6, 7])
def test_workers_that_share_a_device_together_take_no_more_than_it(num_groups: int):
    (group,) = gpu_groups(train=1).groups
    there, taken = bundle(group, num_groups), resources(group, num_groups)
    steps = {name: round(amount * 10_000) * num_groups for name, amount in taken.items()}  # as Ray counts
    assert 9_990 < steps["GPU"] <= 10_000 * there["GPU"] == 10_000
    assert steps["CPU"] == round(there["CPU"] * 10_000)


def test_npus_and_gpus_are_counted_apart():
    groups = DeviceGroups.parse({"nproc_per_node": 2, "train": {"npus": 2}, "rollout": {"gpus": 2}})
    slots = assign(groups, [node("1", gpus=2), node("2", npus=2)])
    assert (names(slots["train"]), names(slots["rollout"])) == (["2", "2"], ["1", "1"])


def test_cpu_workers_fill_one_node_after_the_other():
    slots = assign(DeviceGroups.single(["a"], "CPU", 5), [node("1", cpus=2), node("2", cpus=4)])["default"]
    assert names(slots) == ["1", "1", "2", "2", "2"]
    assert [slot.local_rank for slot in slots] == [0, 1, 0, 1, 2]
    assert {slot.gpus for slot in slots} == {0}


@pytest.mark.parametrize("cpus", [0.5, 1, 2])
def test_a_small_machine_hosts_sixteen_cpu_workers(cpus: float):
    slots = assign(DeviceGroups.single(["a"], "CPU", 16), [node("1", cpus=cpus)])["default"]
    assert [slot.local_rank for slot in slots] == list(range(16))
    assert {slot.local_world_size for slot in slots} == {16}


def test_cpu_workers_beyond_the_cpus_are_spread_evenly():
    slots = assign(DeviceGroups.single(["a"], "CPU", 8), [node("1", cpus=2), node("2", cpus=1)])["default"]
    assert Counter(names(slots)) == {"1": 5, "2": 3}
    assert [slot.rank for slot in slots] == list(range(8))


def test_a_second_cpu_group_takes_the_cpus_that_the_first_left():
    groups = DeviceGroups.parse({"judge": {"cpus": 3}, "tool": {"cpus": 2}})
    slots = assign(groups, [node("1", cpus=2), node("2", cpus=4)])
    assert (names(slots["judge"]), names(slots["tool"])) == (["1", "1", "2"], ["2", "2"])


def test_a_cluster_that_is_too_small_is_refused_with_what_it_has():
    with pytest.raises(PlacementError) as caught:
        assign(gpu_groups(4, train=6, rollout=2), [node("1", 4), node("2", 1)])
    assert str(caught.value) == (
        "the cluster cannot hold the device groups. No node is left with 4 GPU free, which node 1 of the configuration "
        "needs.\n"
        "asked:\n"
        "  group    device  workers  accelerators per node\n"
        "  train    GPU     6        4 on node 0, 2 on node 1\n"
        "  rollout  GPU     2        2 on node 1\n"
        "free:\n"
        "  node    address   GPU  NPU  CPU\n"
        "  host-1  10.0.0.1  4    0    2\n"
        "  host-2  10.0.0.2  1    0    2\n"
        "Request fewer or change nproc_per_node, add nodes, or end other jobs."
    )


def test_the_table_of_a_large_cluster_is_cut():
    with pytest.raises(PlacementError) as caught:
        assign(gpu_groups(8, train=8 * 200), [node(str(i), 4) for i in range(100)])
    assert "8 on each of 200 nodes" in str(caught.value)
    assert "... and 68 more" in str(caught.value)


def test_a_cluster_without_nodes_is_refused():
    with pytest.raises(PlacementError, match="no live node"):
        assign(DeviceGroups.single(["a"], "CPU"), [])


def test_a_cluster_without_accelerators_is_refused():
    with pytest.raises(PlacementError, match="No node is left with 2 GPU free"):
        assign(gpu_groups(train=2), [node("1")])


@st.composite
def plans(draw: st.DrawFn) -> tuple[DeviceGroups, list[NodeResources]]:
    """Groups that use some of the accelerators of some nodes, on a cluster that may be larger than they need."""
    nproc_per_node, nnodes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    free = draw(st.permutations(range(nproc_per_node * nnodes)))
    config: dict[str, Any] = {"nproc_per_node": nproc_per_node}
    for index, size in enumerate(draw(st.lists(st.integers(1, 6), max_size=3))):
        ranks, free = free[:size], free[size:]
        if ranks:
            config[f"gpu{index}"] = {"device": "GPU", "ranks": ranks, "workers": f"gpu{index}"}
    for index, size in enumerate(draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))):
        config[f"cpu{index}"] = {"device": "CPU", "ranks": size, "workers": f"cpu{index}"}
    sizes = draw(st.permutations([nproc_per_node] * nnodes + draw(st.lists(st.integers(0, 8), max_size=3))))
    nodes = [node(str(i), gpus, cpus=draw(st.integers(0, 4))) for i, gpus in enumerate(sizes)]
    return DeviceGroups.parse(config), nodes


@settings(max_examples=60, deadline=None)
@given(plans())
def test_ranks_count_up_node_by_node_and_no_node_is_overfull(plan: tuple[DeviceGroups, list[NodeResources]]):
    groups, nodes = plan
    slots = assign(groups, nodes)
    assert list(slots) == [group.name for group in groups.groups]
    used: Counter[str] = Counter()
    logical: dict[str, set[int]] = defaultdict(set)
    for group in groups.groups:
        mine = slots[group.name]
        assert [slot.rank for slot in mine] == list(range(group.num_workers))
        by_node = defaultdict(list)
        for slot in mine:
            by_node[slot.node_id].append(slot)
        for node_rank, neighbours in enumerate(by_node.values()):
            assert [slot.local_rank for slot in neighbours] == list(range(len(neighbours)))
            assert {(slot.local_world_size, slot.node_rank) for slot in neighbours} == {(len(neighbours), node_rank)}
        for slot, rank in zip(mine, group.ranks or (), strict=group.ranks is not None):
            used[slot.node_id] += slot.gpus
            logical[slot.node_id].add(rank // (groups.nproc_per_node or 1))
    assert all(used[node.node_id] <= node.gpus for node in nodes)
    assert all(len(indices) == 1 for indices in logical.values())


def test_thousands_of_accelerators_are_placed_at_once():
    groups = gpu_groups(8, train=4096, rollout=4096)
    slots = assign(groups, [node(str(i), 8) for i in range(1024)])
    assert slots["rollout"][-1] == Slot("rollout", 4095, 7, 8, 511, "1023", "10.0.0.1023", 1)
