"""Tiny models of the real architectures, without vLLM: each cell of ``cells.py`` that is fast, as recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tiny.architectures import ARCHITECTURES, save, tiny
from rayhelper import ConfigError
from tests.models import table
from tests.models.cells import FAST, fast_cells
from trainers.backends.fsdp import documents
from trainers.backends.fsdp.backend import FsdpBackend


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The name of an architecture, and a folder with a model of it."""
    return request.param, save(request.param, tmp_path_factory.mktemp(request.param))


def test_the_fast_cells_of_a_model_are_as_recorded(model: tuple[str, str], tmp_path: Path) -> None:
    name, folder = model
    recorded = table.read()[name]
    found = fast_cells(name, folder, tmp_path)
    assert found == {cell: recorded[cell] for cell in FAST}
    failed = {cell: told for cell, told in found.items() if told != "ok" and not told.startswith("refused: ")}
    assert not failed


def test_the_page_of_the_documentation_is_what_was_recorded() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(table.read())


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "llama4_text"])
def test_rows_without_padding_are_refused_as_the_model_is_built_where_documents_leak(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    with pytest.raises(ConfigError, match=r"does not separate the documents of one row.*Set packing: false"):
        FsdpBackend(folder, padding_free=True)


def test_kernels_that_are_told_where_documents_begin_keep_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of GPUs; here each is a loop over documents under their arguments. Rows become one."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    own_conv, own_rule = modeling.causal_conv1d_fn, modeling.torch_chunk_gated_delta_rule

    def conv(hidden_BCT: torch.Tensor, *args: Any, seq_idx: Any = None, **settings: Any) -> torch.Tensor:
        if seq_idx is None:
            return own_conv(hidden_BCT, *args, **settings)
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([own_conv(part, *args, **settings) for part in hidden_BCT.split(lengths, -1)], -1)

    def rule(*states: torch.Tensor, cu_seqlens: Any = None, g: Any, beta: Any, **settings: Any) -> Any:
        if cu_seqlens is None:
            return own_rule(*states, g=g, beta=beta, **settings)
        assert len(states[0]) == 1
        parts = zip(*(one.split(cu_seqlens.diff().tolist(), 1) for one in (*states, g, beta)), strict=True)
        mixed = [own_rule(*part[:-2], g=part[-2], beta=part[-1], **settings)[0] for part in parts]
        return torch.cat(mixed, 1), None

    monkeypatch.setattr(modeling, "causal_conv1d_fn", conv)
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", rule)
    own = tiny("qwen3_next")
    assert documents.way_of(own) == "lengths"


def test_a_model_whose_scores_are_capped_is_not_run_by_sdpa(tmp_path: Path) -> None:
    folder = save("gemma2", tmp_path)
    assert FsdpBackend(folder).module.config._attn_implementation == "eager"
    with pytest.raises(
        ConfigError, match=r"attn_implementation: sdpa ignores the soft cap of Gemma2ForCausalLM.*Use eager"
    ):
        FsdpBackend(folder, model_init_kwargs={"attn_implementation": "sdpa"})
