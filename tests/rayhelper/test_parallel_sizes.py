"""Parallel sizes that do not go together, or not with the model or the nodes: what a plan says of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayhelper.planning.plan_report import as_lines
from tests.rayhelper.test_plan_report import SHAPE, mistakes, planned

MOE = {**SHAPE, "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}

# what is written beside a train section of 8 GPUs, what the message must name, and its remedy
SIZE_MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "shared sizes that leave a rest": (
        {"tensor_model_parallel_size": 3},
        "tensor_model_parallel_size 3 of role 'train' does not divide its 8 workers",
        "Write a multiple of 3",
    ),
    "shared TP as text": ({"tensor_model_parallel_size": "2"}, "tensor_model_parallel_size of role", "Write 1 or more"),
    "EP as text": ({"expert_model_parallel_size": "2"}, "expert_model_parallel_size of role 'train'", "Write 1 or"),
    "EP beyond the data-parallel workers": (
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8},
        "= 16 of role 'train' does not divide the 8 workers of a pipeline stage. (They are TP 2 x CP 1 x DP 4.)",
        "expert_model_parallel_size among 1, 2, 4.",
    ),
    "ETP that no worker has": (
        {"expert_tensor_parallel_size": 3},
        "expert_tensor_parallel_size 3 = 3 of role 'train'",
        "Choose expert_tensor_parallel_size 1",
    ),
    "EP without experts": ({"model": SHAPE, "expert_model_parallel_size": 2}, "but the model has none", "Remove it"),
    "EP that tears experts": (
        {"model": {**MOE, "num_experts": 6}, "expert_model_parallel_size": 4},
        "does not divide the model's num_experts 6",
        "among 1, 2, 3, 6",
    ),
    "ETP that tears an expert": (
        {
            "model": {**MOE, "moe_intermediate_size": 769},
            "expert_tensor_parallel_size": 2,
            "expert_model_parallel_size": 2,
        },
        "does not divide the model's moe_intermediate_size 769",
        "among 1, 769",
    ),
    "ETP apart from TP without EP": (
        {"model": MOE, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        "expert_tensor_parallel_size 1 of role 'train' differs from tensor_model_parallel_size 2",
        "Remove expert_tensor_parallel_size",
    ),
    "ETP without TP and EP": (
        {"model": MOE, "expert_tensor_parallel_size": 2},
        "expert_tensor_parallel_size 2 of role 'train' differs from tensor_model_parallel_size 1",
        "or make expert_model_parallel_size larger",
    ),
    "experts under TP without sequence parallelism": (
        {"model": MOE, "tensor_model_parallel_size": 2, "sequence_parallel": False},
        "sequence_parallel of role 'train' is false",
        "Write sequence_parallel: true",
    ),
    "VPP without PP": (
        {"virtual_pipeline_model_parallel_size": 2},
        "pipeline_model_parallel_size is 1",
        "make pipeline_model_parallel_size larger",
    ),
    "layers that leave a rest": (
        {"model": SHAPE, "pipeline_model_parallel_size": 8},
        "pipeline_model_parallel_size 8 of role 'train' does not divide the model's num_hidden_layers 36",
        "among 1, 2, 3, 4, 6, 9, 12, 18, 36",
    ),
    "pieces of layers that leave a rest": (
        {"model": SHAPE, "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2},
        "pipeline_model_parallel_size 4 x virtual_pipeline_model_parallel_size 2",
        "Choose a product among",
    ),
    "layers of a stage without PP": (
        {"decoder_first_pipeline_num_layers": 2},
        "decoder_first_pipeline_num_layers 2 of role 'train' sets the layers of a pipeline stage",
        "make pipeline_model_parallel_size larger",
    ),
    "layers of a stage that leave the others a rest": (
        {"model": SHAPE, "pipeline_model_parallel_size": 4, "decoder_last_pipeline_num_layers": 5},
        "decoder_last_pipeline_num_layers 5 of role 'train' leave 31 of the model's num_hidden_layers 36 to the other",
        "Leave a multiple of 3.",
    ),
    "layers of a stage that leave the others none": (
        {"model": SHAPE, "pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 36},
        "leave 0 of the model's num_hidden_layers 36 to the other 1 of pipeline_model_parallel_size 2 stages",
        "Leave a multiple of 1.",
    ),
    "layers of all stages that are not the model's": (
        {
            "model": SHAPE,
            "pipeline_model_parallel_size": 2,
            "decoder_first_pipeline_num_layers": 17,
            "decoder_last_pipeline_num_layers": 18,
        },
        "but 35 layers differ from the model's num_hidden_layers 36",
        "Write only one of them",
    ),
    "layers of a stage that do not make its pieces": (
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "decoder_first_pipeline_num_layers": 17,
        },
        "cannot be cut into virtual_pipeline_model_parallel_size 2 equal pieces",
        "Write a multiple of 2.",
    ),
    "layers of the others that do not make their pieces": (
        {
            "model": SHAPE,
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 2,
            "decoder_first_pipeline_num_layers": 6,
            "decoder_last_pipeline_num_layers": 4,
        },
        "leave 26 of the model's num_hidden_layers 36 to the other 2 of pipeline_model_parallel_size 4 stages. "
        "These stages have equally many layers in virtual_pipeline_model_parallel_size 2 pieces each",
        "Leave a multiple of 4.",
    ),
    "heads that leave a rest": (
        {"model": {**SHAPE, "num_attention_heads": 36}, "tensor_model_parallel_size": 8},
        "the model's num_attention_heads 36",
        "among 1, 2, 3, 4",
    ),
    "key-value heads that leave a rest": (
        {"model": {**SHAPE, "num_key_value_heads": 4}, "tensor_model_parallel_size": 8},
        "the model's num_key_value_heads 4",
        "among 1, 2, 4",
    ),
    "shared rows of heads that leave a rest": (
        {"model": {**SHAPE, "num_attention_heads": 36}, "sequence_parallel_size": 8},
        "sequence_parallel_size 8 of role 'train' does not divide the model's num_attention_heads 36",
        "among 1, 2, 3, 4, 6, 9",
    ),
    "shared rows of workers that leave a rest": (
        {"sequence_parallel_size": 3},
        "sequence_parallel_size 3 of role 'train' does not divide its 8 workers",
        "Write a multiple of 3",
    ),
    "shared rows as text": ({"sequence_parallel_size": "2"}, "sequence_parallel_size of role 'train'", "Write 1 or"),
    "a shape without layers": ({"model": {"hidden_size": 8}}, "model has no num_hidden_layers", "Give a folder"),
}


@pytest.mark.parametrize("mistake", SIZE_MISTAKES)
def test_parallel_sizes_that_do_not_fit_are_named_with_their_remedy(mistake: str, tmp_path: Path) -> None:
    shared, named, remedy = SIZE_MISTAKES[mistake]
    (said,) = mistakes(tmp_path, {**shared, "train": {"gpus": 8}}, gpu_memory_gib=1000)
    assert named in said
    assert remedy in said


@pytest.mark.parametrize(
    ("shared", "named"),
    [
        (
            {"vllm_tensor_parallel_size": 3, "model": None},
            "vllm_tensor_parallel_size 3 of role 'rollout' does not divide its 8 GPU",
        ),
        ({"vllm_tensor_parallel_size": 8, "model": {**SHAPE, "num_attention_heads": 36}}, "num_attention_heads 36"),
        ({"vllm_tensor_parallel_size": 4, "model": {**SHAPE, "num_key_value_heads": 6}}, "num_key_value_heads 6"),
        ({"vllm_gpu_memory_utilization": 1.5}, "must be a share in (0, 1], got 1.5"),
        (
            {"vllm_gpu_memory_utilization": 0.1},
            "weights by themselves take 15.3 GiB. Raise vllm_gpu_memory_utilization",
        ),
    ],
)
def test_an_engine_that_cannot_be_is_told(shared: dict[str, Any], named: str, tmp_path: Path) -> None:
    (said,) = mistakes(tmp_path, {"model": SHAPE, **shared, "rollout": {"gpus": 8}})
    assert named in said


def test_an_engine_may_repeat_key_value_heads(tmp_path: Path) -> None:
    shared = {"model": {**SHAPE, "num_key_value_heads": 2}, "vllm_tensor_parallel_size": 8}
    assert mistakes(tmp_path, {**shared, "rollout": {"gpus": 8}}) == []


def test_legal_combinations_are_accepted(tmp_path: Path) -> None:
    train = {"gpus": 32, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    train |= {"virtual_pipeline_model_parallel_size": 9, "expert_model_parallel_size": 8, "context_parallel_size": 2}
    found = planned(tmp_path, {"model": MOE, "train": {**train, "expert_tensor_parallel_size": 1}})
    assert (list(found.findings.mistakes), found.findings.warnings) == ([], [])
    (role,) = found.groups[0].roles
    assert (role.sizes.data, role.sizes.expert, role.sizes.expert_tensor) == (4, 8, 1)


def test_a_stage_may_have_other_layers_than_the_rest(tmp_path: Path) -> None:
    train = {"gpus": 4, "pipeline_model_parallel_size": 4, "decoder_last_pipeline_num_layers": 6}
    found = planned(tmp_path, {"model": SHAPE, "train": train}, gpu_memory_gib=1000)
    assert list(found.findings.mistakes) == []
    assert "PP 4 CP 1 EP 1 (layers 10 + 10 + 10 + 6) DP 1" in "\n".join(as_lines(found))


def test_workers_that_share_rows_are_one_slice_of_training_and_of_scoring(tmp_path: Path) -> None:
    config = {"model": SHAPE, "sequence_parallel_size": 4, "train": {"gpus": 8}, "reference": {"gpus": 4}}
    found = planned(tmp_path, {**config, "prm": {"gpus": 3}, "rollout": {"gpus": 1}}, gpu_memory_gib=1000)
    assert list(found.findings.mistakes) == []
    train, reference, judge, rollout = (group.roles[0].sizes for group in found.groups)
    assert [(sizes.shared_rows, sizes.data) for sizes in (train, reference, judge, rollout)] == [
        *((4, 2), (4, 1), (1, 3), (1, 1))
    ]
    assert "trains, TP 1 PP 1 CP 1 EP 1 Ulysses 4 DP 2 (= 8 workers / TP x PP x CP x Ulysses)" in "\n".join(
        as_lines(found)
    )
    alone = planned(tmp_path, {**config, "sequence_parallel_size": 1, "prm": {"gpus": 3}}, gpu_memory_gib=1000)
    shared, whole = (
        {one.name: one.num_bytes for one in plan.groups[0].roles[0].memory.terms} for plan in (found, alone)
    )
    assert shared["weights"] == whole["weights"], "all workers have a part of the weights"
    assert shared["activations"] == pytest.approx(whole["activations"] / 4, rel=1e-6)


def test_an_engine_completes_what_slices_of_shared_rows_learn_from(tmp_path: Path) -> None:
    config = {"model": SHAPE, "train": {"gpus": 8}, "rollout": {"gpus": 8}, "rollout_engine": "hf"}
    caches = []
    for size in (1, 4):
        found = planned(tmp_path, {**config, "sequence_parallel_size": size}, gpu_memory_gib=1000)
        (role,) = found.groups[1].roles
        assert role.memory is not None
        caches += [term.num_bytes for term in role.memory.terms if term.name == "KV cache"]
    assert caches[0] == 4 * caches[1] > 0


def test_shared_rows_on_two_nodes_are_warned_of(tmp_path: Path) -> None:
    config = {"nproc_per_node": 4, "train": {"gpus": 24, "sequence_parallel_size": 3}}
    (warning,) = planned(tmp_path, config).findings.warnings
    assert "4 of 8 sequence-parallel groups of role 'train' are on several nodes" in warning
    assert mistakes(tmp_path, {"train": {"gpus": 4, "sequence_parallel_size": 3}}) == [
        "sequence_parallel_size 3 of section 'train' does not divide its gpus: 4. Write a multiple of 3, or make the "
        "parallel sizes smaller."
    ]


def test_sizes_beside_the_groups_are_meant_for_roles_that_train(tmp_path: Path) -> None:
    config = {"tensor_model_parallel_size": 4, "train": {"gpus": 4}, "prm": {"gpus": 3}, "rollout": {"gpus": 1}}
    found = planned(tmp_path, config)
    assert list(found.findings.mistakes) == []
    assert [group.roles[0].sizes.tensor for group in found.groups] == [4, 1, 1]


def test_tensor_parallel_groups_on_two_nodes_are_warned_of(tmp_path: Path) -> None:
    config = {"nproc_per_node": 4, "train": {"gpus": 24, "tensor_model_parallel_size": 3}}
    found = planned(tmp_path, config)
    assert list(found.findings.mistakes) == []
    (warning,) = found.findings.warnings
    assert "4 of 8 tensor-parallel groups of role 'train' are on several nodes (3 GPU each, 4 per node)" in warning
    assert "Make tensor_model_parallel_size a divisor of 4" in warning
    config = {"nproc_per_node": 4, "rollout": {"gpus": 16, "vllm_tensor_parallel_size": 8}}
    assert "2 of 2 tensor-parallel groups of role 'rollout'" in planned(tmp_path, config).findings.warnings[0]
