"""Qwen3-Next and Qwen3.5 in the megatron backend: the layers of the gated delta rule, and models of them in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rayhelper import ConfigError
from tests import megatron_on_cpu
from tests.backends import test_megatron_adapters as adapters
from tests.backends.batches import packed, samples_of
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import (
    CP,
    EP,
    FULL,
    GROUPED,
    MOE_ACT,
    OVERLAP,
    PLAIN,
    PP,
    SELECTIVE,
    SP,
    TP,
    TRAINING,
    VPP,
    WHOLE,
    Layout,
    compare,
    learned_values,
    of_layouts,
    save,
    told,
    values_of,
    wanted,
)
from tests.backends.test_megatron_checkpoint import Part, losses, started, tensors
from trainers.backends.fsdp.backend import FsdpBackend

megatron_on_cpu.take_back()

OFFLOAD: Layout = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
SHAPE: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,  # what the state of a document's first tokens answers is short, and is divided by its length
    "tie_word_embeddings": False,
    "pad_token_id": 48,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": SHAPE | {"intermediate_size": 52, "tie_word_embeddings": True},
    "qwen3_5_moe_text": SHAPE | EXPERTS | {"num_hidden_layers": 2, "layer_types": SHAPE["layer_types"][:2]},
    "qwen3_next": SHAPE
    | EXPERTS
    | {"num_hidden_layers": 3, "layer_types": SHAPE["layer_types"][:3], "mlp_only_layers": [2]}
    | {"intermediate_size": 52, "linear_conv_kernel_dim": 3},
}
CASES: dict[tuple[str, int], list[Layout]] = {  # what a layout does to all layers alike is shown in test_megatron
    ("qwen3_5_text", 1): [FULL | PLAIN, OFFLOAD],
    ("qwen3_5_text", 2): [
        {TP: 2} | WHOLE | SELECTIVE | PLAIN,
        {PP: 2, VPP: 2} | PLAIN,
        OVERLAP | OFFLOAD,
    ],
    ("qwen3_5_text", 4): [{TP: 2, CP: 2} | SP | FULL | PLAIN, {CP: 4} | PLAIN],
    ("qwen3_next", 1): [GROUPED | MOE_ACT | PLAIN],
    ("qwen3_next", 2): [{EP: 2} | PLAIN, {TP: 2} | SP | PLAIN],
    ("qwen3_5_moe_text", 2): [{EP: 2} | GROUPED, {TP: 2} | SP | GROUPED | PLAIN],
}


def saved(family: str, folder: Path, **fields: Any) -> Path:
    """A tiny model in which the state matters: its queries, keys and values are not short."""
    path = save(family, folder, **FAMILIES[family] | fields)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("conv1d.weight"):
                weight.normal_()
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for family in FAMILIES:
        path = saved(family, folder)
        found[family] = path, wanted(path)
    return found


@pytest.mark.parametrize(("family", "num_ranks"), CASES, ids=[f"{family}-{ranks}" for family, ranks in CASES])
def test_a_model_in_parts_is_the_model(
    family: str, num_ranks: int, oracles: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, right = oracles[family]
    layouts = CASES[family, num_ranks]
    ranks = run_ranks(num_ranks, of_layouts, folder, layouts, folder=tmp_path)
    for k, layout in enumerate(layouts):
        compare([rank[k] for rank in ranks], right, told(layout))


# Packed rows


ROWS = [[0, 1, 2], [3], [4, 5], [6, 7]]


def packed_and_apart(rank: int, folder: Path, layouts: list[Layout]) -> list[list[np.ndarray]]:
    """Log-probabilities of documents by themselves, together in micro-batches, and in rows of several."""
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    found = []
    for layout in layouts:
        backend = MegatronBackend(folder, settings=MegatronSettings(**layout))
        documents, rows = samples_of(), packed(samples_of(), ROWS)
        found.append(
            [
                backend.token_logps(given, micro_batch_size=size).values
                for given, size in ((documents, 1), (documents, 8), (rows, 1), (rows, 4))
            ]
        )
        megatron_on_cpu.end_groups()
    return found


def test_documents_of_a_row_know_nothing_of_each_other(tmp_path: Path) -> None:
    folder = saved("qwen3_5_text", tmp_path)
    layouts: list[Layout] = [{TP: 2} | SP, {CP: 2}, {PP: 2}]
    for rank in run_ranks(2, packed_and_apart, folder, layouts, folder=tmp_path):
        for layout, (apart, *others) in zip(layouts, rank, strict=True):
            for found in others:
                np.testing.assert_allclose(found, apart, atol=1e-5, err_msg=told(layout))


# Adapters


SOME: adapters.Lora = {"r": 3, "lora_alpha": 6, "target_modules": ["in_proj_qkv", "in_proj_a", "q_proj", "out_proj"]}
NEXT: adapters.Lora = {"r": 3, "target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "o_proj"]}
ADAPTED: list[tuple[str, adapters.Lora, list[Layout]]] = [
    ("qwen3_5_text", adapters.ALL, [{PP: 2} | FULL, {CP: 2} | PLAIN]),
    ("qwen3_5_text", SOME, [{TP: 2} | SP | OVERLAP]),
    ("qwen3_next", NEXT, [{TP: 2} | SP]),
]


@pytest.mark.parametrize(("family", "lora", "layouts"), ADAPTED, ids=["all", "some", "next"])
def test_an_adapter_of_a_model_in_parts_is_pefts(
    family: str, lora: adapters.Lora, layouts: list[Layout], tmp_path: Path
) -> None:
    folder = saved(family, tmp_path)
    backend, start = adapters.begin(folder, lora)
    right = adapters.found_by(backend, samples_of())
    backend.save(tmp_path / "right")
    ranks = run_ranks(2, adapters.of_layouts, folder, start, lora, layouts, tmp_path, folder=tmp_path)
    for k, layout in enumerate(layouts):
        adapters.compare([rank[k] for rank in ranks], right, told(layout))
        adapters.compare_folders(folder, tmp_path / str(k), tmp_path / "right", right["weights"])


# Checkpoints


CHAINS: dict[str, list[Layout]] = {
    "qwen3_5_text": [{TP: 2} | SP, {PP: 2, VPP: 2}, {CP: 2} | PLAIN],
    "qwen3_next": [{TP: 2} | SP, {EP: 2} | GROUPED],
}


@pytest.mark.parametrize("family", CHAINS)
def test_a_run_goes_on_in_any_layout(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    layouts = CHAINS[family]
    parts = [Part(layouts[0], before=1, save="0", after=2)]
    parts += [Part(layout, load=str(k), save=str(k + 1), after=0) for k, layout in enumerate(layouts)]
    parts += [Part(layouts[0], load=str(len(layouts)), after=2)]
    parts += [Part(layout, load="0", after=2) for layout in layouts[1:]]
    ranks = started(2, model, tmp_path, parts)
    right = losses(ranks, 0)[1:]
    back = len(layouts) + 1
    np.testing.assert_array_equal(losses(ranks, back), right)
    for k, layout in enumerate(layouts[1:], start=back + 1):
        np.testing.assert_allclose(losses(ranks, k), right, atol=1e-6, err_msg=told(layout))
    first, last = (run_ranks(1, tensors, tmp_path / str(k), folder=tmp_path)[0] for k in (0, len(layouts)))
    assert first.keys() == last.keys()
    for name, value in first.items():
        rows = min(len(value), len(last[name]))  # words behind the last are padding
        assert torch.equal(value[:rows], last[name][:rows]), name


# Values


def test_values_are_those_of_a_classifier(tmp_path: Path) -> None:
    folder = saved("qwen3_5_text", tmp_path)
    oracle = FsdpBackend(folder, head="value", **TRAINING)
    head = dict(oracle.named_weights())["score.weight"].clone()
    values, right, weights = learned_values(oracle)
    layouts: list[Layout] = [{TP: 2} | SP, {PP: 2}]
    for rank in run_ranks(2, values_of, folder, head, layouts, folder=tmp_path):
        for layout, ((_, _, is_leader), found, learned, own) in zip(layouts, rank, strict=True):
            np.testing.assert_allclose(found, values, atol=1e-5, err_msg=told(layout))
            if is_leader:
                np.testing.assert_allclose(learned, right, rtol=1e-5, err_msg=told(layout))
            for name, weight in weights.items():
                np.testing.assert_allclose(own[name], weight, atol=1e-5, err_msg=f"{told(layout)}: {name}")


def refused(rank: int, folder: Path) -> str:
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    with pytest.raises(ConfigError) as error:
        MegatronBackend(folder, head="value", settings=MegatronSettings(), **TRAINING)
    return str(error.value)


def test_a_model_without_a_classifier_has_no_values(tmp_path: Path) -> None:
    folder = save("qwen3_5_moe_text", tmp_path, **FAMILIES["qwen3_5_moe_text"])
    (told_why,) = run_ranks(1, refused, folder, folder=tmp_path)
    assert "transformers has no sequence classifier of qwen3_5_moe_text" in told_why
