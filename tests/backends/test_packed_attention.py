"""``attn_implementation: varlen``: documents of one row kept apart by where they begin."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, RecurrentGemmaConfig

from rayhelper import ConfigError
from tests.backends.batches import largest_difference, mean_loss, packed, samples_of, weights_of
from tests.backends.ranks import run_ranks
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp import packed_attention
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.hf_model import build_model
from trainers.backends.fsdp.packed_attention import single_documents
from trainers.backends.scores.inputs import Inputs, model_inputs
from trainers.batch import Ragged, Sequences

SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_training_steps": 4, "adam_epsilon": 1e-4, "max_grad_norm": 0.0}
VARLEN = {"model_init_kwargs": {"attn_implementation": "varlen"}}
ROWS = [[0, 1, 2], [3], [4, 5], [6, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its second layer looks back at 4 tokens."""
    fields = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return save_tiny(tmp_path_factory.mktemp("narrow"), **fields)


def one_step(folder: str, batch: Any, **settings: Any) -> tuple[np.ndarray, dict[str, float], dict[str, torch.Tensor]]:
    """Scores before the step, its metrics, and the weights after it."""
    backend = FsdpBackend(folder, **SETTINGS | settings)
    logps = backend.token_logps(batch, micro_batch_size=2).values
    metrics = backend.step(batch, partial(mean_loss, int(batch.target_mask.values.sum())), micro_batch_size=2)
    return logps, metrics.values(), weights_of(backend.module)


@pytest.mark.parametrize("model", ["folder", "narrow"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"padding_free": True}, {"gradient_checkpointing": True}, {"lora": {"r": 4, "target_modules": "all-linear"}}],
    ids=str,
)
def test_packed_rows_give_the_scores_and_the_step_of_each_document_alone(
    model: str, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    documents, path = samples_of(), request.getfixturevalue(model)
    logps, metrics, weights = one_step(path, documents, **{"lora": settings["lora"]} if "lora" in settings else {})
    in_rows = one_step(path, packed(documents, ROWS), **VARLEN, **settings)
    np.testing.assert_allclose(in_rows[0], logps, atol=1e-5)
    assert in_rows[1] == pytest.approx(metrics, abs=1e-5)
    assert largest_difference(in_rows[2], weights) < 1e-6


def step_of_half(rank: int, folder: str) -> dict[str, torch.Tensor]:
    rows = packed(samples_of(), ROWS)
    backend = FsdpBackend(folder, **SETTINGS, **VARLEN, sharding="full_shard")
    loss = partial(mean_loss, int(rows.target_mask.values.sum()))
    backend.step(rows[rank * 3 : rank * 3 + 3], loss, micro_batch_size=2)  # three rows, and one
    return {name: weight.clone() for name, weight in backend.named_weights()}


def test_two_workers_with_weights_in_shards_make_the_same_step(folder: str, tmp_path: Path) -> None:
    _, _, weights = one_step(folder, samples_of())
    for found in run_ranks(2, step_of_half, folder, folder=tmp_path):
        assert largest_difference(found, weights) < 1e-6


def test_rows_of_one_document_are_those_of_sdpa(folder: str) -> None:
    documents = samples_of()
    logps, metrics, weights = one_step(folder, documents)
    found = one_step(folder, documents, **VARLEN)
    np.testing.assert_array_equal(found[0], logps)
    assert found[1] == metrics
    assert largest_difference(found[2], weights) == 0.0


def test_the_model_generates_as_with_sdpa_where_prompts_are_padded(folder: str) -> None:
    packed_attention.register()
    ids = torch.tensor([[0, 0, 0, 7, 8, 9], [10, 11, 12, 13, 14, 15]])
    found = [
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name).generate(
            ids, attention_mask=(ids > 0).long(), max_new_tokens=8, do_sample=False
        )
        for name in ("sdpa", "varlen")
    ]
    assert torch.equal(*found)


def test_documents_begin_where_positions_do_and_padding_is_one_more() -> None:
    ids = Ragged.of([np.arange(4, 11), np.arange(4, 9)], np.int64)
    mask = Ragged.of([np.zeros(7, bool), np.zeros(5, bool)], bool)
    rows = Sequences(ids, mask, Ragged.of([[3, 4], [1, 4]], np.int64))
    inputs = model_inputs(rows, torch.device("cpu"))
    assert inputs.document_starts is not None
    assert inputs.document_starts.tolist() == [0, 3, 7, 8, 12, 14]
    assert inputs.longest_document == 4
    inputs = model_inputs(rows, torch.device("cpu"), padding_free=True)
    assert inputs.document_starts is not None
    assert inputs.document_starts.tolist() == [0, 3, 7, 8, 12]
    assert model_inputs(Sequences(ids, mask), torch.device("cpu")).document_starts is None


@pytest.mark.parametrize("window", [None, 3])
def test_a_kernel_gets_all_tokens_in_one_row_and_where_documents_begin(window: int | None) -> None:
    """The kernel here is a loop over queries: each looks at the keys of its own document up to itself."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 8, generator=random) for heads in (4, 2, 2))
    starts = torch.tensor([0, 2, 6, 11, 12], dtype=torch.int32)
    asked: list[Any] = []

    def by_hand(query: Any, key: Any, value: Any, starts: Any, longest: int, *, scale: Any, window: Any) -> Any:
        asked.append((longest, scale, window))
        mixed = torch.zeros_like(query)
        for start, end in pairwise(starts.tolist()):
            for token in range(start, end):
                first = start if window is None else max(start, token - window + 1)
                for head in range(4):
                    scores = key[first : token + 1, head // 2] @ query[token, head] * scale
                    mixed[token, head] = scores.softmax(0) @ value[first : token + 1, head // 2]
        return mixed

    arguments = {"scaling": 0.3, "sliding_window": window, "cu_seq_lens_q": starts, "max_length_q": 5}
    module = torch.nn.Module()
    expected, _ = packed_attention.varlen_attention(module, query, key, value, None, attend=by_hand, **arguments)
    found, _ = packed_attention.varlen_attention(module, query, key, value, None, **arguments)
    assert asked == [(5, 0.3, window)]
    assert found.shape == expected.shape == (2, 6, 4, 8)  # (B, T, H, D), as transformers wants it
    torch.testing.assert_close(found, expected)


def test_what_torchs_kernel_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on GPUs alone; here its arguments are read: a window of 3 is 2 tokens behind a query."""
    from torch.nn.attention import varlen

    asked: list[Any] = []

    def attend(query: Any, key: Any, value: Any, *where: Any, **settings: Any) -> Any:
        asked.append(settings | {"where": [int(one) if isinstance(one, int) else one.tolist() for one in where]})
        return query

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    query, key, starts = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.tensor([0, 2, 5])
    for window in (None, 3):
        packed_attention.by_kernel(query, key, key, starts, 3, scale=0.5, window=window)
    assert [one["window_size"] for one in asked] == [(-1, 0), (2, 0)]
    assert asked[0]["where"] == [[0, 2, 5], [0, 2, 5], 3, 3]
    assert asked[0]["scale"] == 0.5
    assert asked[0].get("enable_gqa", not packed_attention.ASKS_FOR_GROUPS) is True


def test_dropout_is_refused() -> None:
    heads, starts = torch.randn(1, 2, 4, 8), torch.tensor([0, 4], dtype=torch.int32)
    arguments = {"dropout": 0.1, "cu_seq_lens_q": starts, "max_length_q": 4}
    with pytest.raises(ValueError, match="Module has dropout, which attn_implementation: varlen does not support"):
        packed_attention.varlen_attention(torch.nn.Module(), heads, heads, heads, None, **arguments)


SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "pad_token_id": 0}
OTHERS: dict[str, tuple[Any, str]] = {
    "caps its scores": (Gemma2Config(**SIZES, num_hidden_layers=1, num_key_value_heads=1, head_dim=8), "has softcap"),
    "asks no attention function": (
        RecurrentGemmaConfig(**SIZES, num_hidden_layers=3, lru_width=16),
        "does not separate documents with it",
    ),
    "attends in chunks": (
        LlamaConfig(**SIZES, num_hidden_layers=1, layer_types=["chunked_attention"]),
        "has chunked_attention",
    ),
}


@pytest.mark.parametrize("model", OTHERS)
def test_a_model_that_would_attend_otherwise_is_refused(model: str, tmp_path: Path) -> None:
    config, told = OTHERS[model]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"attn_implementation: varlen.*{told}.*Use sdpa"):
        FsdpBackend(tmp_path, **VARLEN)


@pytest.mark.parametrize("model", ["takes it", "was given another", *OTHERS])
def test_a_model_is_given_varlen_if_it_keeps_documents_apart_by_it(model: str, tmp_path: Path) -> None:
    own, _ = OTHERS.get(model, (LlamaConfig(**SIZES, num_hidden_layers=1), ""))
    AutoModelForCausalLM.from_config(own).save_pretrained(tmp_path)
    given = {"attn_implementation": "eager"} if model == "was given another" else {}
    built = build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), model_init_kwargs=given)
    before = built.config._attn_implementation
    assert before == ("eager" if given or model == "caps its scores" else "sdpa")
    packed_attention.prefer(built)
    assert built.config._attn_implementation == ("varlen" if model == "takes it" else before)


def test_rows_of_one_document_are_told_apart_from_others_in_each_thread() -> None:
    from transformers import masking_utils

    empty = torch.zeros(0, dtype=torch.long)
    ids = torch.tensor([[0, 1, 0, 1]])
    single, packed = (Inputs(ids, positions, empty, empty) for positions in (None, ids))
    with single_documents(single):
        assert masking_utils.find_packed_sequence_indices(ids) is None
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(masking_utils.find_packed_sequence_indices, ids).result()
        with single_documents(packed):
            here = masking_utils.find_packed_sequence_indices(ids)
    for found in (here, elsewhere, masking_utils.find_packed_sequence_indices(ids)):
        assert found is not None
        assert found.tolist() == [[0, 0, 1, 1]]
