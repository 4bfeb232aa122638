"""Tiny models of the real architectures, without vLLM: each cell of ``cells.py`` that is fast, as recorded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper import ConfigError
from tests.backends.batches import largest_difference, mean_loss, packed, plain_scores, samples_of, weights_of
from tests.models.architectures import ARCHITECTURES, save, tiny
from trainers.backends.fsdp import documents
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Sequences

SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_training_steps": 4, "adam_epsilon": 1e-4, "max_grad_norm": 0.0}
LEAKS = {  # rows of several documents are refused on a CPU
    *("llama4_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "falcon_h1", "nemotron_h", "minimax"),
}
ROWS = [[0, 1, 2], [3], [4, 5], [6, 7]]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The name of an architecture, and a folder with a model of it."""
    return request.param, save(request.param, tmp_path_factory.mktemp(request.param))


def one_step(backend: FsdpBackend, batch: Sequences) -> tuple[float, dict[str, torch.Tensor]]:
    metrics = backend.step(batch, partial(mean_loss, int(batch.target_mask.values.sum())), micro_batch_size=4)
    return metrics.values()["loss"], weights_of(backend.module)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_models_own_logits(model: tuple[str, str], temperature: float) -> None:
    """Of the eager model that transformers builds, document by document."""
    name, folder = model
    expected = plain_scores(eager(name), samples_of(), temperature)[0].detach().numpy()
    found = FsdpBackend(folder).token_logps(samples_of(), micro_batch_size=3, temperature=temperature).values
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert expected.std() > 0.1


def eager(name: str) -> Any:
    own = tiny(name)
    own.set_attn_implementation("eager")
    return own


def test_a_packed_step_is_the_padded_one_or_refused(model: tuple[str, str]) -> None:
    name, folder = model
    alone, rows = samples_of(), packed(samples_of(), ROWS)
    in_rows = FsdpBackend(folder, **SETTINGS)
    if name in LEAKS:
        refused = "does not keep the documents of one row apart.*Set packing: false and padding_free: false"
        with pytest.raises(ConfigError, match=refused):
            one_step(in_rows, rows)
        with pytest.raises(ConfigError, match=refused):
            FsdpBackend(folder, padding_free=True)
        return
    loss, weights = one_step(FsdpBackend(folder, **SETTINGS), alone)
    packed_loss, packed_weights = one_step(in_rows, rows)
    assert packed_loss == pytest.approx(loss, abs=2e-5)
    assert largest_difference(packed_weights, weights) < 2e-5


def test_an_adapter_trains(model: tuple[str, str]) -> None:
    _, folder = model
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    backend = FsdpBackend(folder, lora=lora, **SETTINGS | {"learning_rate": 1e-2})
    losses = [one_step(backend, samples_of())[0] for _ in range(2)]
    assert losses[1] < losses[0]


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
    with pytest.raises(ConfigError, match=r"attn_implementation: sdpa drops the cap of Gemma2ForCausalLM.*Take eager"):
        FsdpBackend(folder, model_init_kwargs={"attn_implementation": "sdpa"})
