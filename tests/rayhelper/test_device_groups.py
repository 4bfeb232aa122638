"""The two forms of device groups, and what a user reads after each mistake."""

import json
import pickle
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhelper.device_groups import DeviceGroup, DeviceGroups
from rayhelper.errors import ConfigError

RANK_FORM = """
device_groups:
  nproc_per_node: 4
  sample_group: {device: GPU, ranks: "list(range(0, 2))", workers: [sampler]}
  rm_group:     {device: gpu, ranks: [2, 3],              workers: [prm, orm]}
  judge_group:  {device: CPU, ranks: 2,                   workers: judge}
"""
ROLE_FORM = """
colocate_groups: [[train, rollout]]
train:   {gpus: 4, tensor_model_parallel_size: 2, learning_rate: 1e-6}
teacher: {gpus: 4, model: big, timeout_s: 60}
rollout: {gpus: 4, vllm_tensor_parallel_size: 1}
reward:  {cpus: 3}
"""


def one(**section: Any) -> dict[str, Any]:
    """A configuration with the one group 'pool': two GPUs for the role 'train', changed as told; None removes a key."""
    section = {"device": "GPU", "ranks": 2, "workers": ["train"]} | section
    return {"pool": {key: value for key, value in section.items() if value is not None}}


def test_groups_of_ranks_host_roles():
    groups = DeviceGroups.parse(RANK_FORM)
    assert groups.groups == (
        DeviceGroup("sample_group", ("sampler",), "GPU", (0, 1), 2),
        DeviceGroup("rm_group", ("prm", "orm"), "GPU", (2, 3), 2),
        DeviceGroup("judge_group", ("judge",), "CPU", None, 2, gpus_per_worker=0),
    )
    assert (groups.nproc_per_node, groups.nnodes) == (4, None)
    assert groups.roles == ("sampler", "prm", "orm", "judge")
    assert groups.group_of("orm").name == "rm_group"
    assert groups.role_settings == {"sampler": {}, "prm": {}, "orm": {}, "judge": {}}


def test_sections_of_roles_become_groups_with_consecutive_ranks():
    groups = DeviceGroups.parse(ROLE_FORM)
    assert groups.groups == (
        DeviceGroup("train+rollout", ("train", "rollout"), "GPU", (0, 1, 2, 3), 4),
        DeviceGroup("teacher", ("teacher",), "GPU", (4, 5, 6, 7), 4, timeout_s=60.0),
        DeviceGroup("reward", ("reward",), "CPU", None, 3, gpus_per_worker=0),
    )
    assert groups.role_settings == {
        "train": {"tensor_model_parallel_size": 2, "learning_rate": 1e-6},
        "rollout": {"vllm_tensor_parallel_size": 1},
        "teacher": {"model": "big"},
        "reward": {},
    }


@pytest.mark.parametrize("text", [RANK_FORM, ROLE_FORM], ids=["ranks", "roles"])
def test_json_yaml_and_mappings_say_the_same(text: str):
    groups = DeviceGroups.parse(text)
    mapping = yaml.safe_load(text.replace("1e-6", "1.0e-6"))  # PyYAML reads 1e-6 as text
    inner = mapping.get("device_groups", mapping)
    assert DeviceGroups.parse(json.dumps(mapping, indent="\t")) == groups
    assert DeviceGroups.parse(mapping) == groups
    assert DeviceGroups.parse(inner) == groups
    assert DeviceGroups.parse({"model": "tiny", "device_groups": inner}) == groups
    assert DeviceGroups.parse({"device_groups": json.dumps(inner)}) == groups
    assert DeviceGroups.parse(groups) is groups


def test_a_number_in_exponent_form_is_a_number_in_json_and_in_yaml():
    for text in ("{train: {gpus: 1, lr: 1e-6}}", '{"train": {"gpus": 1, "lr": 1e-6}}'):
        assert DeviceGroups.parse(text).role_settings == {"train": {"lr": 1e-6}}


def test_groups_hash_and_travel_to_other_processes():
    groups = DeviceGroups.parse(one(env={"NCCL_DEBUG": "INFO"}))
    assert pickle.loads(pickle.dumps(groups)) == groups
    assert len({groups, DeviceGroups.parse(one(env={"NCCL_DEBUG": "INFO"}))}) == 1


def test_options_of_a_group():
    (pool,) = DeviceGroups.parse(one(ranks=4, gpus_per_worker=2, timeout_s=30, env={"A": "x", "B": 2, "C": 0.5})).groups
    assert (pool.ranks, pool.num_workers, pool.gpus_per_worker, pool.timeout_s) == ((0, 1, 2, 3), 2, 2, 30.0)
    assert dict(pool.env) == {"A": "x", "B": "2", "C": "0.5"}


def test_options_of_a_section_are_not_settings_of_its_role():
    section = {"gpus": 4, "device": "gpu", "gpus_per_worker": 2, "timeout_s": 5, "env": {"A": 1}, "model": "tiny"}
    groups = DeviceGroups.parse({"rollout": section})
    assert groups.groups == (DeviceGroup("rollout", ("rollout",), "GPU", (0, 1, 2, 3), 2, 2, 5.0, env=(("A", "1"),)),)
    assert groups.role_settings == {"rollout": {"model": "tiny"}}


def test_colocated_sections_put_their_options_together():
    groups = DeviceGroups.parse(
        {
            "colocate_groups": [["rollout", "train"]],
            "train": {"npus": 2, "env": {"A": 1, "B": 2}},
            "rollout": {"npus": 2, "env": {"B": 2, "C": 3}, "timeout_s": 9, "restarts": 3},
        }
    )
    assert groups.groups == (
        DeviceGroup(
            "rollout+train", ("rollout", "train"), "NPU", (0, 1), 2, 1, 9.0, 3, env=(("B", "2"), ("C", "3"), ("A", "1"))
        ),
    )


def test_a_group_may_have_the_devices_of_another():
    groups = DeviceGroups.parse(
        {
            "engines": {"shares_devices_with": "policy", "workers": "rollout", "timeout_s": 9},
            "judges": {"device": "GPU", "ranks": 1, "workers": "judge"},
            "policy": {"device": "GPU", "ranks": [1, 0], "workers": ["train", "critic"]},
        }
    )
    engines, judges, policy = groups.groups
    assert engines == DeviceGroup("engines", ("rollout",), "GPU", (0, 1), 2, 1, 9.0, shares_devices_with="policy")
    assert (judges.ranks, policy.ranks) == ((2,), (0, 1))
    assert [group.devices_of for group in groups.groups] == ["policy", "judges", "policy"]
    assert [groups.neighbours(group) for group in groups.groups] == [(policy,), (), (engines,)]
    assert groups.share_devices("rollout", "critic")
    assert not groups.share_devices("rollout", "judge")


@pytest.mark.parametrize("written", [{"ranks": 2}, {"ranks": "[0, 1]"}, {"device": "gpu"}, {"gpus_per_worker": 1}])
def test_what_is_said_of_shared_devices_may_be_said_again(written: dict[str, Any]):
    sharing = {"ranks": None, "device": None, "shares_devices_with": "one", **written}
    for ranks in (2, [0, 1]):
        one, other = DeviceGroups.parse(two({"ranks": ranks}, sharing)).groups
        assert one.ranks == other.ranks == (0, 1)


def test_a_role_may_have_the_devices_of_another():
    config = {
        "colocate_groups": [["train", "critic"], ["rollout", "judge"]],
        "rollout": {"shares_devices_with": "critic", "vllm_tensor_parallel_size": 2},
        "judge": {"shares_devices_with": "train", "gpus": 4},
        "teacher": {"shares_devices_with": "train"},
        "train": {"gpus": 4},
        "critic": {"gpus": 4},
    }
    groups = DeviceGroups.parse(config)
    shared = {"shares_devices_with": "train+critic"}
    assert groups.groups == (
        DeviceGroup("rollout+judge", ("rollout", "judge"), "GPU", (0, 1, 2, 3), 4, **shared),
        DeviceGroup("teacher", ("teacher",), "GPU", (0, 1, 2, 3), 4, **shared),
        DeviceGroup("train+critic", ("train", "critic"), "GPU", (0, 1, 2, 3), 4),
    )
    assert groups.role_settings["rollout"] == {"vllm_tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("written", "ranks"),
    [
        (3, (0, 1, 2)),
        ("3", (0, 1, 2)),
        ([3, 1], (1, 3)),
        ("[3, 1]", (1, 3)),
        ("range(2, 4)", (2, 3)),
        (" list(range(0, 6, 2)) ", (0, 2, 4)),
        ("list(range(3, 0, -1))", (1, 2, 3)),
    ],
)
def test_every_way_to_write_ranks(written: Any, ranks: tuple[int, ...]):
    assert DeviceGroups.parse(one(ranks=written)).groups[0].ranks == ranks
    assert DeviceGroups.parse(one(ranks=None, device_mapping=written)).groups[0].ranks == ranks


def test_counts_get_the_lowest_ranks_that_no_group_names():
    groups = DeviceGroups.parse(
        {
            "first": {"device": "GPU", "ranks": 2, "workers": "a"},
            "named": {"device": "GPU", "ranks": [0, 2], "workers": "b"},
            "last": {"device": "NPU", "ranks": 1, "workers": "c"},
        }
    )
    assert [group.ranks for group in groups.groups] == [(1, 3), (0, 2), (4,)]


def test_counts_never_tear_a_worker_over_two_nodes():
    groups = DeviceGroups.parse(
        {
            "nproc_per_node": 4,
            "wide": {"device": "GPU", "ranks": 4, "gpus_per_worker": 2, "workers": "a"},
            "named": {"device": "GPU", "ranks": [0], "workers": "b"},
            "narrow": {"device": "GPU", "ranks": 2, "workers": "c"},
        }
    )
    assert [group.ranks for group in groups.groups] == [(1, 2, 4, 5), (0,), (3, 6)]


def test_one_group_for_all_roles():
    assert DeviceGroups.single(["a", "b"], "cpu", 3).groups == (
        DeviceGroup("default", ("a", "b"), "CPU", None, 3, gpus_per_worker=0),
    )
    assert DeviceGroups.single(("a",), "GPU").groups[0].ranks == (0,)


def test_known_roles_may_be_fewer_and_may_hold_the_driver():
    assert DeviceGroups.parse(RANK_FORM, known_roles=["orm", "driver"]).roles == ("sampler", "prm", "orm", "judge")


@pytest.mark.parametrize("already_parsed", [False, True])
def test_a_role_of_a_class_that_no_group_hosts(already_parsed: bool):
    config = DeviceGroups.parse(RANK_FORM) if already_parsed else RANK_FORM
    with pytest.raises(ConfigError) as caught:
        DeviceGroups.parse(config, known_roles={"judges"})
    assert str(caught.value) == (
        "role 'judges' is not in device_groups (defined: sampler, prm, orm, judge; nearest: 'judge'). "
        "Add it to some group's workers."
    )


def two(first: dict[str, Any], second: dict[str, Any], **top: Any) -> dict[str, Any]:
    """Two groups, 'one' with role a and 'two' with role b."""
    return {
        **top,
        "one": {"device": "GPU", "workers": "a", **first},
        "two": {"device": "GPU", "workers": "b", **second},
    }


def sections(colocate: Any = None, **roles: dict[str, Any]) -> dict[str, Any]:
    return roles if colocate is None else {"colocate_groups": colocate, **roles}


def sharing(first: dict[str, Any], **second: Any) -> dict[str, Any]:
    """Two groups; the second shares the devices of the first if it is not told otherwise."""
    return two({"ranks": 2, **first}, {"device": None, "shares_devices_with": "one", **second})


TWO_ROLES: dict[str, Any] = {"train": {"gpus": 4}, "rollout": {"gpus": 4}}

# the mistake: what is written, what the message must name, and the remedy it must give
MISTAKES: dict[str, tuple[Any, str, str]] = {
    "a list": ([1, 2], "list [1, 2]", "Write {name: {device: GPU"),
    "a number": (7, "int 7", "Write {name: {device: GPU"),
    "a file name": ("groups.yaml", "'groups.yaml'", "Pass the contents of the file"),
    "bad JSON": ('{"pool": {"device": "GPU" "ranks": 2}}', "line 1 column 27", "Correct the text there"),
    "bad YAML": ("pool:\n  device: GPU\n ranks: 2\n", "line 3, column 2", "Correct the text there"),
    "bad YAML tag": ("pool: !!timestamp soon", "not valid YAML", "Correct the text there"),
    "a Python object in YAML": ("a: !!python/object/apply:os.getpid []", "os.getpid", "Correct the text there"),
    "bottomless JSON": ("[" * 100_000, "recursion depth", "Correct the text there"),
    "a key twice in JSON": ('{"a": {"gpus": 1}, "a": {"gpus": 2}}', "key 'a'", "Remove one"),
    "a key twice in YAML": (
        "a: {gpus: 1}\nb: {gpus: 1}\na: {gpus: 2}\n",
        "key 'a' is written twice",
        "Correct the text",
    ),
    "nothing": (None, "empty", "Add a group"),
    "empty text": ("", "empty", "Add a group"),
    "empty mapping": ({}, "empty", "Add a group"),
    "empty device_groups": ({"device_groups": None}, "empty", "Add a group"),
    "no group": ({"nproc_per_node": 4}, "no group", "Add one"),
    "a key beside device_groups": ({"device_groups": one(), "nnodes": 2}, "'nnodes'", "Move it inside"),
    "a section beside device_groups": ({"device_groups": one(), "train": {"gpus": 2}}, "'train'", "Move it inside"),
    "a section that is no mapping": ({"pool": 4}, "'pool'", "write it as a group"),
    "a section left empty": ("pool:", "'pool'", "write it as a group"),
    "a misspelt top key": ({**one(), "nproc_per_nod": 4}, "'nproc_per_nod'", "Did you mean 'nproc_per_node'?"),
    "misspelt colocate_groups": ({**TWO_ROLES, "colocate_group": []}, "'colocate_group'", "mean 'colocate_groups'?"),
    "a name that is no text": ({1: one()["pool"]}, "got 1", "Put it in quotes"),
    "both forms": ({**one(), "train": {"gpus": 2}}, "'gpus' of 'train'", "in every group"),
    "both forms by colocate_groups": ({**one(), "colocate_groups": []}, "'colocate_groups'", "in every group"),
    "unknown key": (one(rank=[0]), "'rank'", "Did you mean 'ranks'?"),
    "unknown key far from all": (one(flavour="x"), "'flavour' (known: device", "Remove it"),
    "unknown key that is no text": (one() | {"pool": one()["pool"] | {(1,): 2}}, "(1,)", "Remove it"),
    "a size without its s": ({"train": {"gpu": 4}}, "'gpu'", "Did you mean 'gpus'?"),
    "restarts below zero": (one(restarts=-1), "restarts", "leave it out"),
    "restarts that are no number": ({"train": {"gpus": 2, "restarts": "often"}}, "'often'", "leave it out"),
    "no call in flight": (one(max_in_flight=0), "max_in_flight", "1 or more"),
    "unknown device": (one(device="TPU"), "'TPU'", "Write one of: GPU, NPU, CPU"),
    "device that is no text": (one(device=["GPU"]), "['GPU']", "Write one of: GPU, NPU, CPU"),
    "no device": (one(device=None), "'pool' has no device", "Add one of: GPU, NPU, CPU"),
    "no workers": (one(workers=None), "'pool' has no workers", "Add the roles"),
    "empty workers": (one(workers=[]), "workers of group 'pool'", "Name the roles"),
    "workers of numbers": (one(workers=[1]), "[1]", "Write `workers: [role]`"),
    "workers as a mapping": (one(workers={"train": {}}), "{'train': {}}", "Write `workers: [role]`"),
    "workers as a number": (one(workers=2), "got 2", "Write `workers: [role]`"),
    "an empty role name": (one(workers=[""]), "['']", "Write `workers: [role]`"),
    "role twice in a group": (one(workers=["train", "train"]), "role 'train' twice", "Remove one"),
    "role in two groups": (two({"ranks": 1}, {"ranks": 1, "workers": "a"}), "role 'a'", "Remove it from the workers"),
    "reserved role": (one(workers=["train", "driver"]), "'driver'", "Remove it there"),
    "reserved role as a section": ({"driver": {"cpus": 1}}, "'driver'", "Remove it there"),
    "no ranks": (one(ranks=None), "'pool' has no ranks", "Add `ranks: 4`"),
    "ranks and device_mapping": (one(device_mapping=[0, 1]), "'pool' has both", "Remove device_mapping"),
    "zero ranks": (one(ranks=0), "got 0", "Write 1 or more"),
    "fewer than zero ranks": (one(ranks="-2"), "got -2", "Write 1 or more"),
    "too many ranks": (one(ranks=10**9), "1000000000", "Request fewer"),
    "too many indices": (one(ranks="range(0, 10**30)".replace("10**30", "1" + "0" * 30)), "more than", "or remove"),
    "negative rank": (one(ranks=[0, -1]), "holds -1", "Indices are whole numbers from 0"),
    "duplicate rank": (one(ranks=[0, 1, 0]), "holds 0 twice", "Write each index once"),
    "rank as a float": (one(ranks=[0, 1.0]), "holds 1.0", "Indices are whole numbers from 0"),
    "rank as a bool": (one(ranks=[True]), "holds True", "Indices are whole numbers from 0"),
    "ranks as a bool": (one(ranks=True), "got True", "Write 4, [0, 1]"),
    "ranks as a float": (one(ranks=2.0), "got 2.0", "Write 4, [0, 1]"),
    "ranks as a mapping": (one(ranks={"from": 0}), "{'from': 0}", "Write 4, [0, 1]"),
    "empty ranks": (one(ranks=[]), "'pool' holds no index", "Write the ranks that the group uses"),
    "an empty range": (one(ranks="range(2, 2)"), "'pool' holds no index", "Write the ranks that the group uses"),
    "code as ranks": (one(ranks="__import__('os').getpid()"), "__import__", "Write 4, [0, 1], list(range(0, 2))"),
    "a comprehension as ranks": (one(ranks="[i for i in (0, 1)]"), "for i in", "Write 4, [0, 1], list(range(0, 2))"),
    "a range of floats": (one(ranks="range(0, 2.5)"), "range(0, 2.5)", "Write 4, [0, 1], list(range(0, 2))"),
    "a range that stands still": (one(ranks="range(0, 2, 0)"), "range(0, 2, 0)", "Write 4, [0, 1]"),
    "ranks with a bracket open": (one(ranks="[0, 1"), "'[0, 1'", "Write 4, [0, 1], list(range(0, 2))"),
    "indices of CPUs": (one(device="CPU", ranks=[0, 1]), "[0, 1]", "Write `ranks: 2`"),
    "overlapping ranks": (
        two({"ranks": [0, 1]}, {"ranks": [1, 2]}),
        "rank 1 is in two groups, 'one'",
        "write `shares_devices_with: one` in 'two'",
    ),
    "devices of nobody": (
        sharing({}, shares_devices_with="ones"),
        "'ones', which does not exist (existing: one, two; nearest: 'one')",
        "Correct the name",
    ),
    "devices of no name": (sharing({}, shares_devices_with=["one"]), "['one']", "Correct the name"),
    "its own devices": (sharing({}, shares_devices_with="two"), "'two' shares devices with itself", "Name another"),
    "devices of one that shares": (
        {**sharing({}), "three": {"shares_devices_with": "two", "workers": "c"}},
        "group 'three' shares devices with 'two', which has no devices of its own: it shares the devices of 'one'",
        "Name a group that has its own devices",
    ),
    "devices of each other": (
        sharing({"shares_devices_with": "two"}),
        "it shares the devices of",
        "Name a group that has",
    ),
    "fewer of shared devices": (sharing({}, ranks=1), "asks for 1 GPU and not for 2 GPU", "Leave its size out"),
    "other shared devices": (sharing({}, ranks=[0, 2]), "ranks [0, 2] and not [0, 1]", "Leave its ranks out"),
    "shared NPUs that are GPUs": (sharing({}, device="NPU"), "asks for 2 NPU and not for 2 GPU", "Leave its size out"),
    "larger workers on shared devices": (
        sharing({}, gpus_per_worker=2),
        "asks for 2 GPU (2 a worker) and not for 2 GPU",
        "Leave its size out",
    ),
    "large workers that share": (sharing({"gpus_per_worker": 2}), "have 2 GPU each", "Leave gpus_per_worker out"),
    "shared CPUs": (sharing({"device": "CPU"}), "which has CPUs", "Write how many workers it has"),
    "a role on devices of nobody": (
        sections(train={"gpus": 2}, rollout={"shares_devices_with": "trains"}),
        "section 'rollout' has shares_devices_with 'trains'",
        "Correct the name",
    ),
    "a role on other devices": (
        sections(train={"gpus": 2}, rollout={"gpus": 4, "shares_devices_with": "train"}),
        "group 'rollout' shares devices with 'train', but asks for 4 GPU",
        "Leave its size out",
    ),
    "a role on the devices of its own process": (
        sections([["train", "rollout"]], train={"gpus": 2}, rollout={"shares_devices_with": "train"}),
        "section 'rollout' shares devices with 'train', with which it is colocated",
        "or remove one from colocate_groups",
    ),
    "one of two colocated on the devices of another": (
        sections([["a", "b"]], train={"gpus": 2}, a={"shares_devices_with": "train"}, b={"gpus": 2}),
        "colocated roles 'a' and 'b' have shares_devices_with train and None",
        "write the same in both",
    ),
    "a tensor-parallel engine on too few shared devices": (
        sections(train={"gpus": 3}, rollout={"shares_devices_with": "train", "vllm_tensor_parallel_size": 2}),
        "vllm_tensor_parallel_size 2 of section 'rollout' does not divide its gpus: 3",
        "Write a multiple of 2",
    ),
    "overlapping GPU and NPU": (two({"ranks": [0]}, {"ranks": [0], "device": "NPU"}), "rank 0", "do not overlap"),
    "no processes on a node": ({**one(), "nproc_per_node": 0}, "nproc_per_node must be", "1 or more"),
    "processes as text": ({**one(), "nproc_per_node": "4"}, "got '4'", "1 or more"),
    "half a node": ({**one(), "nproc_per_node": 4, "nnodes": 0.5}, "nnodes must be", "1 or more"),
    "nodes of unknown size": ({**one(), "nnodes": 2}, "nproc_per_node is missing", "Add the accelerators of one node"),
    "rank beyond the nodes": (
        {**one(ranks=[7, 8]), "nproc_per_node": 4, "nnodes": 2},
        "rank 8 of group 'pool'",
        "Make nnodes larger",
    ),
    "count beyond the nodes": (
        {**two({"ranks": 3}, {"ranks": 2}), "nproc_per_node": 4, "nnodes": 1},
        "group 'two' asks for 2 GPU",
        "Make nnodes larger",
    ),
    "gpus_per_worker of zero": (one(gpus_per_worker=0), "gpus_per_worker of group 'pool'", "Write 1 or more"),
    "gpus_per_worker that leaves a rest": (one(ranks=3, gpus_per_worker=2), "'pool'", "Write a multiple of 2"),
    "gpus_per_worker on CPU": (one(device="CPU", gpus_per_worker=1), "'pool' has gpus_per_worker", "Remove it"),
    "a worker larger than a node": (
        {**one(ranks=4, gpus_per_worker=4), "nproc_per_node": 2},
        "gpus_per_worker 4 of group 'pool'",
        "Make it at most 2",
    ),
    "a worker on two nodes": (
        {**one(ranks=[0, 1, 3, 4], gpus_per_worker=2), "nproc_per_node": 4},
        "worker 1 of group 'pool' spans two nodes",
        "Choose ranks on one node",
    ),
    "timeout of zero": (one(timeout_s=0), "got 0", "Write e.g. 600"),
    "timeout without end": (one(timeout_s=float("inf")), "got inf", "Write e.g. 600"),
    "timeout that is no number": ('{"t": {"gpus": 1, "timeout_s": NaN}}', "got nan", "Write e.g. 600"),
    "timeout as text": (one(timeout_s="10m"), "'10m'", "Write e.g. 600"),
    "timeout as a bool": (one(timeout_s=True), "got True", "Write e.g. 600"),
    "env as a list": (one(env=["A=1"]), "['A=1']", "Write {NAME: value}"),
    "env with a bool": (one(env={"DEBUG": True}), "'DEBUG'", "Put the value in quotes"),
    "env with a list": (one(env={"PATHS": ["a"]}), "'PATHS'", "Put the value in quotes"),
    "env with a nameless value": (one(env={1: "x"}), "the name 1", "in quotes"),
    "gpus and cpus": ({"train": {"gpus": 2, "cpus": 2}}, "both gpus and cpus", "Keep the one"),
    "a role without a size": ({**TWO_ROLES, "teacher": {"model": "x"}}, "'teacher' has no size", "Add `gpus: 4`"),
    "a role with a slip": (
        {**TWO_ROLES, "teacher": {"gpu": 4}},
        "'teacher' has no size (is 'gpu' a slip?)",
        "Add `gpus",
    ),
    "zero gpus": ({"train": {"gpus": 0}}, "gpus of section 'train'", "Write 1 or more"),
    "gpus as text": ({"train": {"gpus": "4"}}, "gpus of section 'train'", "got '4'"),
    "gpus of another device": ({"train": {"gpus": 2, "device": "NPU"}}, "'NPU'", "Remove device"),
    "a plus in a role": ({"a+b": {"gpus": 1}}, "'a+b'", "Rename it"),
    "colocated sizes differ": (
        sections([["train", "rollout"]], train={"gpus": 4}, rollout={"gpus": 2}),
        "'train' and 'rollout' have different sizes: 4 GPU and 2 GPU",
        "give them the same number",
    ),
    "colocated devices differ": (
        sections([["train", "rollout"]], train={"gpus": 2}, rollout={"cpus": 2}),
        "2 GPU and 2 CPU",
        "give them the same number",
    ),
    "colocated workers differ": (
        sections([["train", "rollout"]], train={"gpus": 2}, rollout={"gpus": 2, "gpus_per_worker": 2}),
        "gpus_per_worker 1 and 2",
        "give them the same gpus_per_worker",
    ),
    "colocated timeouts differ": (
        sections([["train", "rollout"]], train={"gpus": 2, "timeout_s": 1}, rollout={"gpus": 2, "timeout_s": 2}),
        "timeout_s, 1.0 and 2.0",
        "Set it in one section",
    ),
    "colocated env differ": (
        sections([["train", "rollout"]], train={"gpus": 2, "env": {"A": 1}}, rollout={"gpus": 2, "env": {"A": 2}}),
        "env 'A'",
        "Set it in one section",
    ),
    "colocated role without a section": (
        sections([["train", "rollouts"]], **TWO_ROLES),
        "'rollouts', which has no section (sections: train, rollout; nearest: 'rollout')",
        "Add a section",
    ),
    "colocated role that is no text": (sections([["train", []]], **TWO_ROLES), "names []", "Add a section"),
    "role in two colocate groups": (
        sections([["train", "rollout"], ["reward", "train"]], **TWO_ROLES, reward={"gpus": 4}),
        "role 'train' twice",
        "Name each role once",
    ),
    "role colocated with itself": (sections([["train", "train"]], **TWO_ROLES), "role 'train' twice", "Name each role"),
    "one role colocated": (sections([["train"]], **TWO_ROLES), "['train']", "Add another or remove it"),
    "colocate_groups as a flat list": (
        sections(["train", "rollout"], **TWO_ROLES),
        "['train'",
        "Write [[train, rollout]]",
    ),
    "colocate_groups as a mapping": (
        sections({"train": "rollout"}, **TWO_ROLES),
        "{'train'",
        "Write [[train, rollout]]",
    ),
    "TP x PP x CP that leaves a rest": (
        {"train": {"gpus": 6, "tensor_model_parallel_size": 2, "context_parallel_size": 2}},
        "tensor_model_parallel_size 2 x context_parallel_size 2 = 4 of section 'train' does not divide its gpus: 6",
        "Write a multiple of 4",
    ),
    "engine's TP that leaves a rest": (
        {"rollout": {"gpus": 3, "vllm_tensor_parallel_size": 2}},
        "vllm_tensor_parallel_size 2 of section 'rollout'",
        "Write a multiple of 2",
    ),
    "TP as text": (
        {"train": {"gpus": 2, "tensor_model_parallel_size": "2"}},
        "tensor_model_parallel_size of section 'train'",
        "Write 1 or more",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake: str):
    config, named, remedy = MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        DeviceGroups.parse(config)
    assert named in str(caught.value)
    assert remedy in str(caught.value)


def test_code_in_ranks_never_runs(tmp_path):
    trace = tmp_path / "ran"
    with pytest.raises(ConfigError):
        DeviceGroups.parse(one(ranks=f"list(range(0, open({str(trace)!r}, 'w').write('x')))"))
    assert not trace.exists()


KEYS = st.sampled_from(
    (
        *("pool", "train", "device", "ranks", "device_mapping", "workers", "gpus", "cpus", "colocate_groups", "env"),
        *("nnodes", "nproc_per_node", "timeout_s", "gpus_per_worker", "device_groups", "tensor_model_parallel_size"),
        "shares_devices_with",
    )
)
LEAVES = (
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.sampled_from(["GPU", "train", "[0]", "9" * 5000])
)
NONSENSE = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.integers(), inner, max_size=4) | st.sets(st.integers())
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS, st.dictionaries(KEYS, NONSENSE, max_size=4) | NONSENSE, max_size=4) | NONSENSE)
def test_nonsense_is_refused_by_a_config_error_and_nothing_else(config: Any):
    try:
        groups = DeviceGroups.parse(config)
    except ConfigError:
        return
    assert all(group.num_workers > 0 for group in groups.groups)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="{}[]:,&*!#-|>'\"\n\t ab01", max_size=30))
def test_any_text_is_read_or_refused_by_a_config_error(text: str):
    try:
        groups = DeviceGroups.parse(text)
    except ConfigError:
        return
    assert groups.groups
