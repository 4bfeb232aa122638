"""The dry run: what it prints, what it finds wrong, and that it agrees with what really places workers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhelper.device_groups import DeviceGroups
from rayhelper.device_groups.slots import NodeResources, assign
from rayhelper.errors import PlacementError
from rayhelper.planning.adapter import adapter_parameters
from rayhelper.planning.dry_run import Plan, make_plan
from rayhelper.planning.memory import GIB
from rayhelper.planning.model_shape import ModelShape
from rayhelper.planning.plan_page import page as plan_page
from rayhelper.planning.plan_report import as_dict, as_lines, plan
from rayhelper.ranks import runs

SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}
ROLE_FORM = """
learning_rate: 1e-6
env: {NCCL_DEBUG: INFO}
nproc_per_node: 4
colocate_groups: [[train, rollout]]
train:   {gpus: 6, tensor_model_parallel_size: 2}
rollout: {gpus: 6, vllm_tensor_parallel_size: 1}
judge:   {cpus: 3}
"""


def planned(tmp_path: Path, config: Any, **arguments: Any) -> Plan:
    """The plan of a file that holds the mapping or text."""
    file = tmp_path / "x.yaml"
    file.write_text(config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False))
    given = {"nodes": None, "gpus_per_node": None, "model": None, "gpu_memory_gib": 80.0, **arguments}
    return make_plan(str(file), **given)


def mistakes(tmp_path: Path, config: Any, **arguments: Any) -> list[str]:
    return [str(mistake) for mistake in planned(tmp_path, config, **arguments).findings.mistakes]


def test_the_picture_has_a_box_per_device_and_draws_nodes_that_are_alike_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {
        "nproc_per_node": 4,
        "policy": {"device": "GPU", "ranks": "list(range(0, 8))", "workers": ["train"]},
        "samplers": {"device": "GPU", "ranks": "list(range(8, 11))", "workers": ["rollout"]},
        "judges": {"device": "CPU", "ranks": 2, "workers": ["<reward>"]},
    }
    made = planned(tmp_path, {"device_groups": groups, "model": SHAPE}, nodes=5)
    shown = plan_page(made)
    assert re.findall("<h2>(Node .*)</h2>", shown) == ["Node 0-1, 2 alike", "Node 2"]
    boxes = re.findall(r"<li[^>]*>(\d) ?(?:<b>(\w+)</b>)?<br>(\w+)", shown)
    of_policy = [(str(place), "policy", "train") for place in range(4)]
    of_samplers = [(str(place), "samplers", "rollout") for place in range(3)]
    assert boxes == [*of_policy, *of_samplers, ("3", "", "idle")]
    peak = next(one.peak_bytes for one in made.groups if one.group.name == "policy")
    assert peak is not None
    assert shown.count(f"{peak / GIB:.1f} of 80 GiB") == 4
    assert "<p>Idle nodes: 2</p>" in shown
    assert "&lt;reward&gt;" in shown
    assert "<reward>" not in shown
    assert plan(str(tmp_path / "x.yaml"), nodes=5, html=str(tmp_path / "plan.html")) == 0
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == shown
    assert capsys.readouterr().out.endswith(f"the picture is in {tmp_path / 'plan.html'}\n")
    assert plan(str(tmp_path / "x.yaml"), html=str(tmp_path / "no" / "plan.html")) == 2
    assert "No such file" in capsys.readouterr().err


def test_what_a_person_reads(tmp_path: Path) -> None:
    text = "\n".join(as_lines(planned(tmp_path, ROLE_FORM, nodes=2))).replace(str(tmp_path), "folder")
    assert text == (
        "folder/x.yaml: 2 device groups\n"
        "\n"
        "train+rollout: GPU, hosts train, rollout (colocated)\n"
        "  workers  6, 1 GPU each\n"
        "  ranks    0-5\n"
        "  nodes    4 workers on node 0; 2 workers on node 1\n"
        "  bundles  4 x {GPU: 1, CPU: 0.001} on node 0; 2 x {GPU: 1, CPU: 0.001} on node 1\n"
        "  train: trains, TP 2 PP 1 CP 1 EP 1 DP 3 (= 6 workers / TP x PP x CP)\n"
        "    memory unknown: pass --model\n"
        "  rollout: generates by vLLM, 6 engines of TP 1\n"
        "    memory unknown: pass --model\n"
        "\n"
        "judge: CPU, hosts judge\n"
        "  workers  3\n"
        "  bundles  3 x {CPU: 0.001} where CPUs are free\n"
        "  judge: TP 1 PP 1 CP 1 EP 1 DP 3 (= 3 workers / TP x PP x CP)\n"
        "\n"
        "total: 2 nodes x 4 = 8 GPUs, 6 used, 2 idle"
    )


def test_json_says_the_same_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text(ROLE_FORM)
    assert plan(str(tmp_path / "x.yaml"), model=json.dumps(SHAPE), gpu_memory_gib=640, json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == as_dict(planned(tmp_path, ROLE_FORM, model=json.dumps(SHAPE), gpu_memory_gib=640))
    colocated, judge = said["groups"]
    assert (colocated["ranks"], colocated["colocated"], judge["ranks"]) == (["0-5"], True, None)
    assert [(share["nodes"], share["workers_on_each"]) for share in colocated["nodes"]] == [(["0"], 4), (["1"], 2)]
    assert colocated["bundle"] == {"CPU": 0.001, "GPU": 1}
    assert colocated["roles"][0]["parallel_sizes"]["data"] == 3
    assert {term["name"] for term in colocated["roles"][1]["memory"]} == {"weights", "KV cache"}
    assert said["total"] == {
        "nodes": 2,
        "gpus_per_node": 4,
        "gpus": 8,
        "asked": 6,
        "used": 6,
        "idle": 2,
        "gpu_memory_bytes": 640 * GIB,
    }


def test_the_three_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(ROLE_FORM)
    assert plan(str(file)) == 0
    assert plan(str(file), nodes=1) == 1
    assert "1 mistake:" in capsys.readouterr().out
    for arguments, reason in (
        ({"config": str(tmp_path / "none.yaml")}, "cannot be read: No such file"),
        ({"config": str(tmp_path)}, "cannot be read: Is a directory"),
        ({"config": str(file), "nodes": 0}, "--nodes must be a positive whole number"),
        ({"config": str(file), "model": "no/such/folder"}, "there is no folder or file 'no/such/folder'"),
        ({"config": str(file), "model": "{hidden_size: 4}"}, "--model has no num_hidden_layers"),
        ({"config": str(file), "gpu_memory_gib": 0}, "--gpu_memory_gib must be positive"),
    ):
        assert plan(**arguments) == 2
        assert reason in capsys.readouterr().err
    for text, reason in (("train: {gpus: 1", "not valid YAML"), ("[1, 2]", "must hold a mapping")):
        file.write_text(text)
        assert plan(str(file)) == 2
        assert reason in capsys.readouterr().err
    file.write_bytes(b"\xff\xfe\x00\xd8")
    assert plan(str(file)) == 2
    assert "it is not text" in capsys.readouterr().err


def test_every_mistake_is_told_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    config = """
device_groups:
  nproc_per_node: 4
  sampler: {device: GPU, ranks: [0, 1], workers: [sampler], colour: red, timeout_s: -1, env: [A]}
  scorers: {device: GPU, ranks: [2, 3], workers: [prm, orm]}
  trainer: {device: gpux, rank: 3, workers: []}
  other:   {device: GPU, ranks: [3, 5, 6, 7], workers: [prm], gpus_per_worker: 2}
train: {gpus: 3}
nnodes: 2
"""
    found = planned(tmp_path, config)
    expected = [
        "'train' is beside device_groups",
        "'nnodes' is beside device_groups",
        "group 'sampler' has the unknown key 'colour'",
        "timeout_s of group 'sampler'",
        "env of group 'sampler'",
        "group 'trainer' has the unknown key 'rank'",
        "group 'trainer' has the unknown device 'gpux'",
        "workers of group 'trainer' is empty",
        "group 'trainer' has no ranks",
        "role 'prm' is in two groups, 'scorers' and 'other'",
        "rank 3 is in two groups, 'scorers' and 'other'",
        "worker 0 of group 'other' spans two nodes",
    ]
    said = [str(mistake) for mistake in found.findings.mistakes]
    assert len(said) == len(expected)
    assert all(begin in message for begin, message in zip(expected, said, strict=True))
    assert [group.group.name for group in found.groups] == ["scorers"]
    assert "not shown above" in list(as_lines(found))[-1]


def test_every_mistake_of_sections_is_told(tmp_path: Path) -> None:
    config = {
        "colocate_groups": [["train", "rollout"], ["reward", "judge"]],
        "train": {"gpus": 6, "tensor_model_parallel_size": 4, "vllm_tensor_parallel_size": 5},
        "rollout": {"gpus": 4, "cpus": 4},
        "reward": {"gpus": 4, "timeout_s": 1, "env": {"A": 1}},
        "judge": {"gpus": 2, "timeout_s": 2, "env": {"A": 2}},
        "teacher": {"gpu": 4},
    }
    said = mistakes(tmp_path, config)
    expected = [
        "tensor_model_parallel_size 4 of section 'train'",
        "vllm_tensor_parallel_size 5 of section 'train'",
        "section 'rollout' has both gpus and cpus",
        "section 'teacher' has no size (is 'gpu' a slip?)",
        "'reward' and 'judge' have different sizes: 4 GPU and 2 GPU",
        "'reward' and 'judge' have different timeout_s",
        "'reward' and 'judge' have different values of env 'A'",
    ]
    assert len(said) == len(expected)
    assert all(begin in message for begin, message in zip(expected, said, strict=True))


def test_a_group_with_a_mistake_is_still_compared_with_the_others(tmp_path: Path) -> None:
    config = """
nproc_per_node: 4
nnodes: 1
one:   {device: GPU, ranks: [0, 1], workers: [train, judge], colour: red}
two:   {device: GPU, ranks: [1, 2, 4], workers: [judge], timeout_s: -1}
three: {device: gpux, ranks: [1, 2], workers: [train]}
four:  {device: CPU, ranks: [0, 1], workers: [score]}
five:  {device: GPU, ranks: 1, workers: [judge, chat]}
"""
    said = mistakes(tmp_path, config)
    expected = [
        "group 'one' has the unknown key 'colour'",
        "timeout_s of group 'two'",
        "group 'three' has the unknown device 'gpux'",
        "ranks of group 'four' must be a number of workers",
        "role 'judge' is in two groups, 'one' and 'two'",
        "role 'train' is in two groups, 'one' and 'three'",
        "role 'judge' is in two groups, 'two' and 'five'",
        "rank 1 is in two groups, 'one' and 'two'",
        "rank 4 of group 'two' is beyond the nodes",
    ]
    assert len(said) == len(expected)
    assert all(begin in message for begin, message in zip(expected, said, strict=True))


def test_sizes_in_words_that_plans_do_not_read_are_warned_of(tmp_path: Path) -> None:
    strategy = {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}}
    for config in (
        {"train": {"gpus": 4, "strategy_args": strategy}},
        {"strategy_args": strategy, "train": {"gpus": 4}},
    ):
        (warning,) = planned(tmp_path, config).findings.warnings
        assert "strategy_args of" in warning
        assert "Write backend: megatron and the sizes as keys" in warning


@pytest.mark.parametrize(
    "config",
    [
        {"colocate_groups": [["train", "rollouts"]], "nproc_per_node": 4, "nnodes": 1, "train": 4, "rollout": 4},
        {"nproc_per_node": "4", "nnodes": 2, "train": 4, "rollout": 4},
    ],
    ids=["colocated with nobody", "nodes of unknown size"],
)
def test_one_mistake_does_not_bring_forth_others(tmp_path: Path, config: dict[str, Any]) -> None:
    config = {key: {"gpus": value} if key in ("train", "rollout") else value for key, value in config.items()}
    assert len(mistakes(tmp_path, config)) == 1


@pytest.mark.parametrize(
    ("config", "arguments", "shape", "assumed"),
    [
        ({"train": {"gpus": 9}}, {}, (2, 8), ["8 GPUs per node", "2 nodes, the fewest that hold the groups"]),
        ({"train": {"gpus": 9}}, {"gpus_per_node": 3}, (3, 3), ["3 nodes, the fewest that hold the groups"]),
        ({"nproc_per_node": 4, "nnodes": 5, "train": {"gpus": 9}}, {}, (5, 4), []),
        ({"nproc_per_node": 4, "nnodes": 5, "train": {"gpus": 9}}, {"nodes": 7, "gpus_per_node": 8}, (7, 8), []),
        ({"judge": {"cpus": 9}}, {"gpus_per_node": 1}, (1, 1), ["1 node, the fewest that hold the groups"]),
    ],
)
def test_the_size_of_the_cluster_is_given_or_read_or_assumed_aloud(
    config: dict[str, Any], arguments: dict[str, Any], shape: tuple[int, int], assumed: list[str], tmp_path: Path
) -> None:
    found = planned(tmp_path, config, **arguments)
    assert (found.num_nodes, found.gpus_per_node) == shape
    assert list(found.findings.assumed) == assumed
    assert list(found.findings.mistakes) == []


def test_a_cluster_that_is_too_small_is_told_in_numbers(tmp_path: Path) -> None:
    config = {"nproc_per_node": 4, "train": {"gpus": 12}}
    (said,) = mistakes(tmp_path, config, nodes=2)
    assert "are on 3 nodes (12 accelerators), and the cluster has 2 nodes x 4 = 8" in said
    assert "Add 1 node, or request 4 accelerators fewer." in said
    (said,) = mistakes(tmp_path, config, nodes=3, gpus_per_node=2)
    assert "node 0 of the configuration is asked for 4 accelerators, and a node has 2 (and 2 more" in said
    (said,) = mistakes(tmp_path, {"nnodes": 1, "train": {"gpus": 12}})
    assert "Set nproc_per_node to 8 and nnodes to 2 or more" in said
    (said,) = mistakes(tmp_path, {"train": {"gpus": 12, "gpus_per_worker": 3}})
    assert "worker 2 of group 'train' needs 3 GPU of one node" in said


def test_a_plan_of_cpus_alone_counts_no_gpus(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("work: {device: CPU, ranks: 2, workers: [train]}\n")
    lines = list(as_lines(make_plan(str(file), None, None, None, 80.0)))
    assert "total: only CPUs, no GPU" in lines
    assert not any("idle" in line for line in lines)


def test_what_does_not_fit_is_neither_used_nor_idle(tmp_path: Path) -> None:
    def total(config: dict[str, Any], **cluster: int) -> str:
        found = planned(tmp_path, config, **cluster)
        assert as_dict(found)["total"]["used"] is as_dict(found)["total"]["idle"] is None
        assert as_dict(found)["total"]["asked"] == found.num_asked
        return next(line for line in as_lines(found) if line.startswith("total: "))

    sixteen = {"nodes": 2, "gpus_per_node": 8}
    assert total({"train": {"gpus": 32}}, **sixteen) == "total: 2 nodes x 8 = 16 GPUs: 32 asked for, 16 there"
    wide = {"nproc_per_node": 12, "train": {"gpus": 12}}
    assert total(wide, **sixteen) == "total: 2 nodes x 8 = 16 GPUs: 12 requested, which do not fit the nodes"
    far = {"nproc_per_node": 8, "far": {"device": "GPU", "ranks": [0, 8, 16], "workers": "train"}}
    assert total(far, **sixteen) == "total: 2 nodes x 8 = 16 GPUs: 3 requested, which do not fit the nodes"


def test_a_whole_file_of_a_trainer_is_read_in_both_forms(tmp_path: Path) -> None:
    groups = {"nproc_per_node": 2, "pool": {"device": "GPU", "ranks": 2, "workers": ["train"]}}
    beside = {"model": "Somebody/Model", "columns": {"question": "prompt"}, "lr_scheduler_kwargs": {"min_lr": 0}}
    for config in ({**beside, "device_groups": groups}, groups, {**beside, "nproc_per_node": 2, "train": {"gpus": 2}}):
        found = planned(tmp_path, config)
        assert list(found.findings.mistakes) == []
        assert found.groups[0].group.roles == ("train",)
    assert found.groups[0].roles[0].unknown == "'Somebody/Model' is not a folder here; pass --model"


def test_a_file_without_device_groups_can_run_and_is_told_what_is_missing(tmp_path: Path) -> None:
    found = planned(tmp_path, {"model": "tiny", "device_groups": None})
    assert list(found.findings.mistakes) == []
    assert "runs all its roles in one worker" in found.findings.warnings[0]


@pytest.mark.parametrize(
    ("keys", "engine"), [({"use_vllm": True}, "vllm"), ({}, "vllm"), ({"use_vllm": False}, "hf")], ids=str
)
def test_keys_of_vllm_do_not_outweigh_that_it_is_not_used(keys: dict[str, Any], engine: str, tmp_path: Path) -> None:
    section = {"gpus": 2, "vllm_max_model_len": 64}
    config = {"model": SHAPE, "train": {"gpus": 2}, "rollout": section, "teacher": section, **keys}
    roles = {role.role: role for group in planned(tmp_path, config).groups for role in group.roles}
    assert roles["rollout"].engine == engine
    assert (roles["teacher"].does, roles["teacher"].engine) == ("score", None)


def test_a_run_that_trains_an_adapter_needs_room_for_its_states_alone(tmp_path: Path) -> None:
    lora = {"model": SHAPE, "tuner_type": "lora", "lora_rank": 4, "lora_target_modules": ["q_proj"], "beta": 0.1}
    lora |= {"reward_funcs": ["any"], "train": {"gpus": 1}}
    memory = planned(tmp_path, lora).groups[0].roles[0].memory
    assert memory is not None
    found = {term.name: term.num_bytes for term in memory.terms}
    shape = ModelShape.of(SHAPE)
    assert shape is not None
    size = adapter_parameters(shape, 4, ["q_proj"])
    assert (found["weights"], found["adapter"], found["optimizer"]) == (2 * shape.num_parameters, 4 * size, 8 * size)
    assert "reference" not in found  # the policy without its adapter
    tuned = {"tuner_type": "vera", "tuner_kwargs": {"r": 16}}
    vera = planned(tmp_path, {**lora, **tuned}).groups[0].roles[0].memory
    assert vera is not None
    outputs = shape.num_attention_heads * shape.head_dim
    numbers = shape.num_hidden_layers * (16 + outputs)  # two vectors beside each q_proj
    assert next(term.num_bytes for term in vera.terms if term.name == "adapter") == 4 * numbers
    quantized = planned(tmp_path, lora | {"load_in_4bit": True, "train": {"gpus": 2}}).groups[0].roles[0].memory
    assert quantized is not None
    terms = {term.name: term.num_bytes for term in quantized.terms}
    apart = shape.ends  # embedding, head and norm are not quantized
    assert terms["weights"] == (shape.num_parameters - apart) // 2 + 2 * apart
    assert terms["optimizer"] == 8 * size, "each worker has all of it"
    named = planned(tmp_path, lora | {"ref_model": SHAPE}).groups[0].roles[0].memory
    assert named is not None
    assert "reference" in {term.name for term in named.terms}


def test_activations_that_compiled_layers_do_not_keep_are_not_counted(tmp_path: Path) -> None:
    def activations(**keys: Any) -> int:
        memory = planned(tmp_path, {"model": SHAPE, "train": {"gpus": 8}, **keys}).groups[0].roles[0].memory
        assert memory is not None
        return next(term.num_bytes for term in memory.terms if term.name == "activations")

    eager = activations(activation_memory_budget=0.5)
    assert activations(torch_compile=True) == eager
    assert 0.5 * eager < activations(torch_compile=True, activation_memory_budget=0.5) < 0.6 * eager


def test_what_a_head_keeps_is_counted_of_models_of_language(tmp_path: Path) -> None:
    def logits(role: str = "train", **keys: Any) -> int:
        memory = planned(tmp_path, {"model": SHAPE, role: {"gpus": 1}, **keys}).groups[0].roles[0].memory
        assert memory is not None
        return next(term.num_bytes for term in memory.terms if term.name == "logits")

    least = logits(logits_memory_gib=0)
    assert logits() == logits(logits_memory_gib=2.4) > least + 2 * GIB  # 8 sequences of 1,024 tokens do not fill 3 GiB
    assert logits(per_device_train_batch_size=100) == least + 3 * GIB
    assert logits(logits_memory_gib=0.5) == least + GIB // 2
    assert logits(gradient_checkpointing=True) == logits("critic") == least


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"torch_compile": True, "activation_memory_budget": -1}, "activation_memory_budget of role 'train' must lie"),
        ({"torch_compile": True, "activation_memory_budget": True}, "must lie in [0, 1], got True"),
        ({"logits_memory_gib": -1}, "logits_memory_gib of role 'train' must be at least 0, got -1"),
        ({"logits_memory_gib": "much"}, "got 'much'"),
    ],
)
def test_shares_of_memory_without_a_meaning_are_told(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    (said,) = mistakes(tmp_path, {"model": SHAPE, "train": {"gpus": 8}, **keys})
    assert told in said


def test_roles_that_make_room_for_each_other_need_less(tmp_path: Path) -> None:
    config = {
        "model": SHAPE,
        "vllm_gpu_memory_utilization": 0.5,
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": True,
        "colocate_groups": [["train", "rollout"]],
        "train": {"gpus": 8},
        "rollout": {"gpus": 8},
    }
    awake = planned(tmp_path, config).groups[0]
    asleep = planned(tmp_path, {**config, "sleep_level": 1, "offload_optimizer": True}).groups[0]
    assert awake.awake_bytes == awake.peak_bytes == asleep.awake_bytes
    train, rollout = (role.memory for role in asleep.roles)
    assert train is not None
    assert rollout is not None
    states = {term.name: term.num_bytes for term in train.terms}
    runtime = 3 * GIB // 2
    assert asleep.awake_bytes == runtime + train.at_work + 40 * GIB
    assert asleep.peak_bytes == runtime + max(train.at_work, 40 * GIB + states["weights"])
    shown = "\n".join(as_lines(planned(tmp_path, {**config, "sleep_level": 1})))
    assert "while idle roles sleep or are offloaded" in shown
    assert "memory is an estimate" in shown


BESIDE: dict[str, Any] = {
    "model": SHAPE,
    "vllm_gpu_memory_utilization": 0.5,
    "per_device_train_batch_size": 1,
    "gradient_checkpointing": True,
    "nproc_per_node": 4,
    "rollout": {"shares_devices_with": "train", "use_vllm": True},
    "train": {"gpus": 8},
}


def test_groups_that_share_devices_ask_for_them_once(tmp_path: Path) -> None:
    found = planned(tmp_path, BESIDE, nodes=2)
    text = "\n".join(as_lines(found))
    for line in (
        "rollout: GPU, hosts rollout, shares devices with train\n  workers  8, 1 GPU each\n  ranks    0-7\n",
        "  bundles  the devices of train, {GPU: 0.5, CPU: 0.001} of each\n",
        "  memory   counted with group train\n",
        "  bundles  4 x {GPU: 1, CPU: 0.002} on each of 2 nodes\n",
        "total: 2 nodes x 4 = 8 GPUs, 8 used, 0 idle\n",
    ):
        assert line in text
    rollout, train = as_dict(found)["groups"]
    assert (rollout["shares_devices_with"], rollout["bundle"], train["bundle"]) == (
        *("train", None),
        {"CPU": 0.002, "GPU": 1},
    )
    assert rollout["takes"] == train["takes"] == {"CPU": 0.001, "GPU": 0.5}
    assert rollout["memory"] == train["memory"]


def test_the_memory_of_a_gpu_is_that_of_all_groups_on_it(tmp_path: Path) -> None:
    """Two processes set aside twice what one does; else it is that of roles in one process."""
    one = {**BESIDE, "rollout": {"gpus": 8, "use_vllm": True}, "colocate_groups": [["train", "rollout"]]}
    runtime = 3 * GIB // 2
    for keys in ({}, {"sleep_level": 1, "offload_optimizer": True}):
        together = planned(tmp_path, one | keys).groups[0]
        assert together.peak_bytes is not None
        assert [group.peak_bytes for group in planned(tmp_path, BESIDE | keys).groups] == [
            together.peak_bytes + runtime
        ] * 2
    asleep = "\n".join(as_lines(planned(tmp_path, BESIDE | {"sleep_level": 1})))
    assert "GiB per GPU with rollout while idle roles sleep or are offloaded" in asleep
    (said,) = mistakes(tmp_path, BESIDE | {"vllm_gpu_memory_utilization": 0.7}, gpu_memory_gib=50)  # 35 + 15.3
    assert "group 'train', with 'rollout' on its devices, needs about" in said
    assert "or offload idle roles" in said


def test_what_is_counted_must_fit_and_what_is_estimated_is_warned_of(tmp_path: Path) -> None:
    config = {"model": SHAPE, "train": {"gpus": 2}}  # 8.19 billion parameters x 16 bytes / 2 = 61 GiB
    found = planned(tmp_path, {**config, "per_device_train_batch_size": 1}, gpu_memory_gib=80)
    assert (list(found.findings.mistakes), found.findings.warnings) == ([], [])
    found = planned(tmp_path, {**config, "per_device_train_batch_size": 64}, gpu_memory_gib=80)
    assert list(found.findings.mistakes) == []
    assert "of which 61.0 are counted and not estimated" in found.findings.warnings[0]
    (said,) = mistakes(tmp_path, {**config, "per_device_train_batch_size": 1}, gpu_memory_gib=60)
    assert "group 'train' needs about" in said
    assert "Give it more workers" in said


def test_a_role_with_a_model_of_its_own_is_planned_with_it(tmp_path: Path) -> None:
    small = {**SHAPE, "num_hidden_layers": 2}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(small))
    teacher = {"gpus": 1, "model": str(tmp_path / "small")}
    found = planned(tmp_path, {"teacher": teacher, "judge": {"gpus": 1}, "ref": {"gpus": 1}}, model=json.dumps(SHAPE))
    own, unknown, shared = (group.roles[0] for group in found.groups)
    assert own.shape is not None
    assert shared.shape is not None
    assert (own.shape.num_hidden_layers, shared.shape.num_hidden_layers) == (2, 36)
    assert (unknown.does, unknown.unknown) == ("unknown", "the configuration does not name its model")


def test_roles_are_planned_with_the_models_that_keys_of_the_run_give_them(tmp_path: Path) -> None:
    def model(layers: int) -> dict[str, Any]:
        return {**SHAPE, "num_hidden_layers": layers}

    groups: dict[str, Any] = {role: {"gpus": 1} for role in ("train", "critic", "reference", "reward")}
    named = {"ref_model": model(2), "reward_model": model(3)}
    for keys, layers in (
        ({}, (36, 36, 36, None)),
        (named, (36, 3, 2, 3)),  # the critic starts from the reward model
        (named | {"value_model": model(4)}, (36, 4, 2, 3)),
        ({"critic_model": model(5), "reference_model": model(6)}, (36, 5, 6, None)),
    ):
        found = planned(tmp_path, {"model": SHAPE, **keys, **groups})
        shapes = [group.roles[0].shape for group in found.groups]
        assert tuple(shape and shape.num_hidden_layers for shape in shapes) == layers


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_reward_model_lies_whole_on_every_worker_of_any_backend(backend: str, tmp_path: Path) -> None:
    config = {"backend": backend, "model": SHAPE, "reward_model": {**SHAPE, "num_hidden_layers": 2}}
    config |= {"pipeline_model_parallel_size": 4, "value_model": SHAPE} if backend == "megatron" else {}
    config |= {"train": {"gpus": 4}, "reference": {"gpus": 4}, "reward": {"gpus": 3}}
    found = planned(tmp_path, config)
    assert not found.findings.mistakes
    train, reference, reward = (group.roles[0] for group in found.groups)
    pipeline = 4 if backend == "megatron" else 1
    assert (train.sizes.pipeline, reference.sizes.pipeline, reward.sizes.pipeline) == (pipeline, pipeline, 1)
    assert (reward.sizes.data, reward.does) == (3, "score")
    assert reward.memory is not None
    assert reward.shape is not None
    (weights,) = (term for term in reward.memory.terms if term.name == "weights")
    assert weights.num_bytes == 2 * reward.shape.num_parameters


def test_work_is_read_from_the_keys_and_the_rest_is_assumed_aloud(tmp_path: Path) -> None:
    config = {"model": {**SHAPE, "model_type": "new"}, "train": {"gpus": 8}, "rollout": {"gpus": 8}}
    assert {
        "per_device_train_batch_size 8",
        "sequences of 1024 tokens",
        "the architecture of model is not known and counted as a Llama's",
    } <= set(planned(tmp_path, config).findings.assumed)
    config |= {"model": SHAPE, "max_completion_length": 88, "max_prompt_length": 12, "micro_batch_size": 2}
    config |= {"steps_per_generation": 3, "beta": 0.1, "reward_funcs": ["x"]}
    found = planned(tmp_path, config)
    assert "sequences of 1024 tokens" not in found.findings.assumed
    train, rollout = (group.roles[0].memory for group in found.groups)
    assert train is not None
    assert rollout is not None
    assert "reference" in {term.name for term in train.terms}
    assert rollout.terms[-1].num_bytes == 2 * 3 * 100 * (2 * 2 * 36 * 8 * 128)  # a cache of 6 sequences of 100 tokens


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ((), ()),
        ((3,), ("3",)),
        ((0, 1, 2, 3, 8, 9), ("0-3", "8-9")),
        ((0, 2, 4, 6, 9), ("0-6 step 2", "9")),
        ((0, 5, 6, 7), ("0", "5-7")),
        ((1, 4), ("1", "4")),
    ],
)
def test_runs_of_numbers(numbers: tuple[int, ...], shown: tuple[str, ...]) -> None:
    assert runs(numbers) == shown


@given(st.sets(st.integers(0, 60)))
def test_runs_hold_every_number_once(numbers: set[int]) -> None:
    rising = sorted(numbers)
    held: list[int] = []
    for text in runs(rising):
        ends, _, step = text.partition(" step ")
        first, _, last = ends.partition("-")
        held += range(int(first), int(last or first) + 1, int(step or 1))
    assert held == rising


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """GPU groups of explicit ranks on some nodes of a size that may be too small for them."""
    nproc_per_node = draw(st.integers(1, 4))
    free = draw(st.permutations(range(nproc_per_node * 4)))
    config: dict[str, Any] = {"nproc_per_node": nproc_per_node} if draw(st.booleans()) else {}
    for index, size in enumerate(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))):
        ranks, free = free[:size], free[size:]
        if ranks:
            config[f"g{index}"] = {"device": "GPU", "ranks": list(ranks), "workers": f"r{index}"}
    return config, draw(st.integers(1, 6)), draw(st.integers(1, 5))


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_a_plan_fits_where_workers_can_be_placed(
    tmp_path_factory: pytest.TempPathFactory, cluster: tuple[dict[str, Any], int, int]
) -> None:
    config, num_nodes, gpus_per_node = cluster
    found = planned(tmp_path_factory.getbasetemp(), config, nodes=num_nodes, gpus_per_node=gpus_per_node)
    nodes = [NodeResources(str(k), f"10.0.0.{k}", 8, gpus_per_node, 0) for k in range(num_nodes)]
    try:
        slots = assign(DeviceGroups.parse(config), nodes)
    except PlacementError:
        assert found.findings.mistakes
        return
    assert not found.findings.mistakes
    for group in found.groups:
        by_node: dict[str, int] = {}
        for slot in slots[group.group.name]:
            by_node[slot.node_id] = slot.local_world_size
        shown = [share.num_workers for share in group.shares for _ in range(share.num_nodes)]
        assert sorted(shown) == sorted(by_node.values())


def large(num_gpus: int, *, even: bool) -> dict[str, Any]:
    """Two groups that halve every node; or, if not even, one that takes ranks of no pattern."""
    chosen = [rank for rank in range(num_gpus) if (rank % 8 < 4 if even else rank * rank % 7 < 3)]
    rest = sorted(set(range(num_gpus)) - set(chosen))
    return {
        "nproc_per_node": 8,
        "a": {"device": "GPU", "ranks": chosen, "workers": ["train"]},
        "b": {"device": "GPU", "ranks": rest, "workers": ["rollout"]},
    }


@pytest.mark.parametrize("even", [True, False])
def test_the_text_of_many_gpus_stays_short(even: bool, tmp_path: Path) -> None:
    lines = list(as_lines(planned(tmp_path, json.dumps(large(20_000, even=even)))))
    assert len(lines) < 25
    assert max(map(len, lines)) < 500
    if even:
        assert "  ranks    0-3, 8-11, 16-19, 24-27, 32-35, 40-43, ... (2,494 more)" in lines
        assert "  nodes    4 workers on each of 2,500 nodes: 0-2499" in lines


def num_operations(work: Any) -> int:
    """How many bytecode instructions of Python the call runs."""
    counted = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return counted


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Any]:
    def count(config: dict[str, Any], nodes: int) -> int:
        (tmp_path / "x.json").write_text(json.dumps(config))
        return num_operations(lambda: list(as_lines(make_plan(str(tmp_path / "x.json"), nodes, 8, None, 80.0))))

    return count


@pytest.mark.parametrize("nodes", [1, 10_000], ids=["too few nodes", "enough nodes"])
@pytest.mark.parametrize("even", [True, False])
def test_eight_times_the_gpus_are_eight_times_the_work(even: bool, nodes: int, counting: Any) -> None:
    small, big = (counting(large(num_gpus, even=even), nodes) for num_gpus in (256, 2048))
    assert big < 9 * small


def test_placing_on_nodes_that_do_not_fit_is_no_square_of_them() -> None:
    def work(num_nodes: int) -> int:
        groups = DeviceGroups.parse({"nproc_per_node": 8, "train": {"gpus": 8 * num_nodes}})
        nodes = [NodeResources(str(k), str(k), 8, 4, 0) for k in range(num_nodes)]
        nodes += [NodeResources(f"large{k}", f"large{k}", 8, 8, 0) for k in range(num_nodes - 1)]

        def refused() -> None:
            with pytest.raises(PlacementError):
                assign(groups, nodes)

        return num_operations(refused)

    assert work(512) < 9 * work(64)


def test_the_dry_run_loads_neither_ray_nor_torch(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(ROLE_FORM)
    program = (
        "import sys; from rayhelper.planning.plan_report import plan; code = plan(sys.argv[1]); "
        "print({'ray', 'torch', 'transformers', 'jsonargparse', 'rich'} & set(sys.modules)); sys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x.yaml")], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("set()\n")
