"""The megatron backend on TransformerEngine's layers, in whose place a stand-in computes, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests import megatron_on_cpu, transformer_engine_on_cpu
from tests.backends.batches import samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import (
    CP,
    EP,
    ETP,
    FULL,
    MICRO,
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
    one,
    save,
    told,
    wanted,
)
from tests.backends.test_megatron_checkpoint import BEFORE, Part, losses, of_parts, started
from tests.transformer_engine_on_cpu import FP8GlobalStateManager

megatron_on_cpu.take_back()


def fp8(recipe: str, **further: Any) -> Layout:
    return {"transformer": {"fp8": "hybrid", "fp8_recipe": recipe, **further}}


GROUPED, LOCAL_LAYERS = {"moe_grouped_gemm": True}, {"transformer": {"transformer_impl": "local"}}
FUSED = {"transformer": {"moe_permute_fusion": True, "moe_router_fusion": True}}
CASES: dict[str, list[Layout]] = {  # on two ranks, which start once for all
    "llama": [{PP: 2, VPP: 2} | PLAIN],
    "qwen2": [{TP: 2} | SP | PLAIN],
    "qwen3": [{TP: 2} | WHOLE | PLAIN, {TP: 2} | SP | SELECTIVE, {CP: 2} | FULL | OVERLAP],
    "qwen3_moe": [
        {EP: 2} | PLAIN | GROUPED,
        {EP: 2} | PLAIN | FUSED,
        {TP: 2, EP: 2, ETP: 1} | SP | PLAIN | GROUPED,
    ],
    "qwen2_moe": [{TP: 2} | SP | PLAIN],
}
WIDE = {"intermediate_size": 64, "moe_intermediate_size": 32}  # which fp8 can multiply on two workers
FP8: dict[str, list[Layout]] = {
    "qwen3": [
        {TP: 2} | SP | SELECTIVE | PLAIN | fp8("mxfp8"),
        {CP: 2} | FULL | fp8("blockwise"),
        {PP: 2, VPP: 2} | fp8("tensorwise", first_last_layers_bf16=True),
    ],
    "qwen3_moe": [{TP: 2, EP: 2, ETP: 1} | SP | GROUPED | fp8("mxfp8"), {EP: 2} | fp8("tensorwise")],
}


def with_engine(rank: int, function: Any, *args: Any) -> Any:
    """What the function returns on a rank that has the stand-in."""
    transformer_engine_on_cpu.install()
    return function(rank, *args)


def of_families(rank: int, models: dict[Path, list[Layout]]) -> list[tuple[dict[str, Any], int]]:
    """What a rank finds out about each model in each layout, and how many products fp8 would have computed."""
    megatron_on_cpu.install()
    found = []
    for folder, layout in ((folder, layout) for folder, layouts in models.items() for layout in layouts):
        before = FP8GlobalStateManager.num_products
        found.append((one(folder, layout), FP8GlobalStateManager.num_products - before))
        megatron_on_cpu.end_groups()
    return found


def compared(cases: dict[str, list[Layout]], tmp_path: Path, **fields: Any) -> Iterator[tuple[str, int]]:
    """Each case, once it is equal to the model in one process, and the number of its products in fp8."""
    models = {save(family, tmp_path, **fields): layouts for family, layouts in cases.items()}
    ranks = run_ranks(2, with_engine, of_families, models, folder=tmp_path)
    found = zip(*ranks, strict=True)
    for folder, layouts in models.items():
        right = wanted(folder)
        for layout in layouts:
            numbers, counts = zip(*next(found), strict=True)
            case = f"{folder.name} {told(layout)}"
            compare(list(numbers), right, case)
            yield case, min(counts)


def test_a_model_of_its_layers_is_the_model(tmp_path: Path) -> None:
    for case, num_products in compared(CASES, tmp_path):
        assert num_products == 0, case


def test_with_fp8_rows_are_padded_and_weights_are_those_of_the_last_step(tmp_path: Path) -> None:
    for case, num_products in compared(FP8, tmp_path, **WIDE):
        assert num_products > 0, case


def test_checkpoints_and_exports_do_not_tell_layers_apart(tmp_path: Path) -> None:
    model = save("qwen3_moe", tmp_path)
    cut: Layout = {TP: 2, EP: 2, ETP: 1} | SP | GROUPED
    with_it = [
        Part(cut, save="start", before=0, after=0),
        Part(cut, save="engine", before=BEFORE),
        Part(cut, load="engine"),
        Part({PP: 2}, load="engine"),
        Part({EP: 2} | LOCAL_LAYERS, load="engine"),
    ]
    ranks = run_ranks(2, with_engine, of_parts, model, tmp_path, with_it, folder=tmp_path)
    exported, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "start", model))
    assert exported.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(exported[name], tensor), name
    whole = losses(ranks, 1)[BEFORE:]
    np.testing.assert_array_equal(losses(ranks, 2), whole)
    without = [Part({TP: 2} | SP, load="engine"), Part({PP: 2} | PLAIN, save="local", before=BEFORE)]
    plain = started(2, model, tmp_path, without)
    back = run_ranks(2, with_engine, of_parts, model, tmp_path, [Part(cut, load="local")], folder=tmp_path)
    for numbers in (losses(ranks, 3), losses(ranks, 4), losses(plain, 0), losses(plain, 1)[BEFORE:], losses(back, 0)):
        np.testing.assert_allclose(numbers, whole, atol=1e-6)


def layers_of(rank: int, folder: Path, cases: list[tuple[Any, Any]]) -> list[tuple[str, str | None]]:
    """What models are made of, with an adapter or without, and why TransformerEngine's layers cannot be had."""
    from megatron.core import utils

    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.layers import why_no_engine
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    found = []
    for lora, version in cases:
        if version is not None:
            utils._te_version = utils.PkgVersion(version)
        backend: Any = MegatronBackend(folder, settings=MegatronSettings(), **TRAINING, lora=lora)
        loss = partial(weighted_loss, float(samples_of().target_mask.values.sum()))
        assert backend.step(samples_of(), loss, micro_batch_size=MICRO).values()["grad_norm"] > 0
        found.append((type(backend.stages[0].decoder.layers[0].mlp.linear_fc1).__name__, why_no_engine()))
        megatron_on_cpu.end_groups()
    return found


def test_its_layers_are_used_where_they_can_be(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    own, engines = "ColumnParallelLinear", "TELayerNormColumnParallelLinear"
    missing = "TransformerEngine is not installed"
    old = "TransformerEngine 2.6.0 is installed, which is older than 2.7.0"
    (without,) = run_ranks(1, layers_of, folder, [(None, None)], folder=tmp_path)
    assert without == [(own, missing)]
    cases = [(None, None), ({"r": 4}, None), (None, "2.6.0")]
    (found,) = run_ranks(1, with_engine, layers_of, folder, cases, folder=tmp_path)
    assert found == [(engines, None), (own, None), (own, old)]
