"""Qwen3-Next and Qwen3.5 in the megatron backend: the layers of the gated delta rule, and models of them in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import megatron_on_cpu
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import (
    CP,
    EP,
    ETP,
    FIRST,
    FULL,
    GROUPED,
    MOE_ACT,
    OVERLAP,
    PLAIN,
    PP,
    SELECTIVE,
    SP,
    TP,
    VPP,
    WHOLE,
    Layout,
    compare,
    of_layouts,
    save,
    told,
    wanted,
)

megatron_on_cpu.take_back()

STEPS = 4
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
    "qwen3_5_moe_text": SHAPE | EXPERTS,
    "qwen3_next": SHAPE | EXPERTS | {"intermediate_size": 52, "mlp_only_layers": [2], "linear_conv_kernel_dim": 3},
}
CASES: dict[tuple[str, int], list[Layout]] = {
    ("qwen3_5_text", 1): [PLAIN, FULL | PLAIN, SELECTIVE | PLAIN],
    ("qwen3_5_text", 2): [
        {},
        {TP: 2} | SP | PLAIN,
        {TP: 2} | WHOLE | SELECTIVE | PLAIN,
        {PP: 2} | PLAIN,
        {PP: 2, FIRST: 3} | PLAIN,
        {PP: 2, VPP: 2} | PLAIN,
        {CP: 2} | PLAIN,
        OVERLAP,
    ],
    ("qwen3_5_text", 4): [
        {TP: 2, PP: 2} | SP | PLAIN,
        {TP: 2, CP: 2} | SP | FULL | PLAIN,
        {CP: 4} | PLAIN,
        {TP: 2} | SP | OVERLAP,
        {PP: 2, VPP: 2} | OVERLAP,
    ],
    ("qwen3_next", 1): [PLAIN, GROUPED | MOE_ACT | PLAIN],
    ("qwen3_next", 2): [{EP: 2} | PLAIN, {TP: 2} | SP | PLAIN, {PP: 2, VPP: 2} | PLAIN, {CP: 2} | PLAIN, {}],
    ("qwen3_5_moe_text", 2): [{EP: 2} | PLAIN, {EP: 2} | GROUPED, {TP: 2} | SP | GROUPED | PLAIN],
    ("qwen3_5_moe_text", 4): [{TP: 2, EP: 2, ETP: 1} | SP | PLAIN, {PP: 2, EP: 2} | PLAIN, {EP: 2}],
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
        found[family] = path, wanted(path, STEPS)
    return found


@pytest.mark.parametrize(("family", "num_ranks"), CASES, ids=[f"{family}-{ranks}" for family, ranks in CASES])
def test_a_model_in_parts_is_the_model(
    family: str, num_ranks: int, oracles: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, right = oracles[family]
    layouts = CASES[family, num_ranks]
    ranks = run_ranks(num_ranks, of_layouts, folder, layouts, STEPS, folder=tmp_path)
    for k, layout in enumerate(layouts):
        compare([rank[k] for rank in ranks], right, told(layout))
