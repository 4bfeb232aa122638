"""Log-probabilities, entropies and top-1 hits against a plain loop over the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM, Gemma2Config, Gemma2ForCausalLM

from rayhelper.planning.memory import LOGITS_ROOM
from tests.backends.batches import packed, plain_scores, samples_of
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.scores import head, linear_scores
from trainers.backends.scores.head import Head
from trainers.backends.scores.inputs import model_inputs
from trainers.batch import Ragged, Sequences

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(folder: str) -> FsdpBackend:
    return FsdpBackend(folder)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_logps_are_those_of_each_document_alone_in_the_whole_model(
    backend: FsdpBackend, micro_batch_size: int, temperature: float
) -> None:
    samples = samples_of()
    logps = backend.token_logps(samples, micro_batch_size=micro_batch_size, temperature=temperature)
    with torch.no_grad():
        expected = plain_scores(backend.module, samples, temperature)[0].numpy()
    assert logps.dtype == np.float32
    assert list(logps.lengths) == [mask.sum() for mask in samples.target_mask]
    np.testing.assert_allclose(logps.values, expected, atol=1e-5)
    assert expected.std() > 0.5, "the model must not be near uniform, or an offset by one would pass"


def test_entropies_and_top1_hits_are_those_of_the_whole_model(backend: FsdpBackend) -> None:
    samples = samples_of()
    with torch.no_grad():
        for row in range(len(samples)):  # half of the targets become the most probable token
            ids, mask = samples.input_ids[row], samples.target_mask[row]
            for t in np.flatnonzero(mask)[::2]:
                ids[t] = int(backend.module(torch.tensor(ids)[None]).logits[0, t - 1].argmax())
        _, entropies_N, is_top1_N = plain_scores(backend.module, samples, 0.7)
        scores = backend.scorer(model_inputs(samples, CPU), 0.7)
    torch.testing.assert_close(scores[1], entropies_N, atol=1e-5, rtol=0)
    assert torch.equal(scores[2], is_top1_N)
    assert 0.2 < is_top1_N.mean() < 0.8


def test_a_head_in_several_chunks_gives_the_same_values_and_gradients(
    backend: FsdpBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Head(backend.module)
    generator = torch.Generator().manual_seed(0)
    ids_N = torch.randint(0, 260, (11,), generator=generator)

    def answer() -> list[torch.Tensor]:
        hidden_NH = torch.randn(11, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        weight = part.linear.weight.requires_grad_()
        scores = part.scores(hidden_NH, ids_N, 0.8, entropy_gradient=True)
        loss = (scores.logps_N * torch.arange(11)).sum() + (scores.entropy_N * torch.arange(11)).sum()
        gradients = torch.autograd.grad(loss, [hidden_NH, weight])
        weight.requires_grad_(False)
        return [*scores[:3], *gradients]

    whole = answer()
    monkeypatch.setattr(head, "CHUNK_BYTES", 2 * 4 * 260)  # of this head twice as many: four tokens
    rows: list[int] = []
    logits = linear_scores._logits
    monkeypatch.setattr(
        linear_scores, "_logits", lambda hidden, *rest: rows.append(len(hidden)) or logits(hidden, *rest)
    )
    for value, expected in zip(answer(), whole, strict=True):
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)
    assert rows[:3] == [4, 4, 3]
    assert len(rows) == 6, "each chunk is computed again in the backward pass"


def test_what_a_head_keeps_for_the_backward_pass_is_not_computed_again(
    backend: FsdpBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    ids_N = torch.randint(0, 260, (11,), generator=generator)
    monkeypatch.setattr(head, "CHUNK_BYTES", 2 * 4 * 260)  # four tokens
    rows: list[int] = []
    logits = linear_scores._logits
    monkeypatch.setattr(
        linear_scores, "_logits", lambda hidden, *rest: rows.append(len(hidden)) or logits(hidden, *rest)
    )

    def answer(room: int, *, entropy_gradient: bool = False) -> list[torch.Tensor]:
        rows.clear()
        hidden_NH = torch.randn(11, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        part = Head(backend.module, room=room)
        weight = part.linear.weight.requires_grad_()
        scores = part.scores(hidden_NH, ids_N, 0.8, entropy_gradient=entropy_gradient)
        gradients = torch.autograd.grad((scores.logps_N * torch.arange(11)).sum(), [hidden_NH, weight])
        weight.requires_grad_(False)
        return [*scores[:3], *gradients]

    expected = answer(0)
    assert rows == [4, 4, 3, 4, 4, 3]
    token = 4 * 260  # bytes
    for room, again in ((token - 1, [4, 4, 3]), (token, [4, 4, 2]), (6 * token, [4, 1]), (100 * token, [])):
        for value, right in zip(answer(room), expected, strict=True):
            torch.testing.assert_close(value, right, atol=1e-5, rtol=1e-5)
        assert rows == [4, 4, 3, *again]
    answer(100 * token, entropy_gradient=True)
    assert rows == [4, 4, 3, 4, 4, 3], "an entropy's gradient takes more than is kept"
    filled: list[Any] = []
    monkeypatch.setattr(linear_scores, "_fill_gradient", lambda *given: filled.append(given))
    with torch.no_grad():
        Head(backend.module, room=100 * token).scores(torch.ones(11, 64), ids_N, 0.8)
    assert not filled, "nobody goes backward"


def test_a_backend_keeps_for_its_head_where_it_keeps_activations_or_what_it_is_told(folder: str) -> None:
    def room(**settings: Any) -> int:
        scorer: Any = FsdpBackend(folder, learning_rate=1e-3, **settings).scorer
        return int(scorer.head.room)

    assert room() == head.ROOM
    assert room(logits_memory_gib=0.5) == 2**29
    assert room(logits_memory_gib=0.0) == room(gradient_checkpointing=True) == 0
    assert room(gradient_checkpointing=True, logits_memory_gib=1.0) == 2**30


def test_the_plan_knows_what_a_head_keeps() -> None:
    assert head.ROOM == LOGITS_ROOM


def test_the_entropy_has_a_gradient_only_if_asked_for(backend: FsdpBackend) -> None:
    part = Head(backend.module)
    hidden_NH = torch.ones(2, 64, requires_grad=True)
    ids_N = torch.tensor([5, 6])
    assert part.scores(hidden_NH, ids_N, 1.0).entropy_N.requires_grad is False
    assert part.scores(hidden_NH, ids_N, 1.0, entropy_gradient=True).entropy_N.requires_grad is True


def test_a_soft_capped_head_gives_the_models_own_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=3.0,
        initializer_range=0.3,
        sliding_window=4,
        query_pre_attn_scalar=16,
        eos_token_id=2,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    backend = FsdpBackend(tmp_path)
    samples = samples_of([6, 9])
    logps = backend.token_logps(samples, micro_batch_size=2)
    with torch.no_grad():
        expected = plain_scores(backend.module, samples)[0].numpy()
        inputs = torch.tensor(samples.input_ids[1])[None]
        own = backend.module(inputs).logits[0]
        ours = backend.scorer.head.logits(backend.module.base_model(inputs).last_hidden_state[0])
    torch.testing.assert_close(ours, own, atol=1e-5, rtol=0)
    np.testing.assert_allclose(logps.values, expected, atol=1e-5)
    assert 2.5 < float(own.abs().max()) <= 3.0, "the cap must bite"


PACKED_ROWS = [[0, 1, 2], [3], [4, 5], [6, 7]]  # of LENGTHS: totals 20, 9, 21, 14


def test_packed_documents_score_as_if_alone(backend: FsdpBackend) -> None:
    samples = samples_of()
    alone = backend.token_logps(samples, micro_batch_size=1)
    together = packed(samples, PACKED_ROWS)
    assert len(set(together.input_ids.lengths)) == 4
    for micro_batch_size in (1, 2, 4):
        logps = backend.token_logps(together, micro_batch_size=micro_batch_size)
        np.testing.assert_allclose(logps.values, alone.values, atol=1e-5)
        assert list(logps.lengths) == [sum(len(alone[i]) for i in row) for row in PACKED_ROWS]


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_first_token_of_a_document_cannot_be_a_target(backend: FsdpBackend, is_packed: bool) -> None:
    samples = samples_of([3, 4])
    samples.target_mask[1][0] = True
    wrong: Sequences = packed(samples, [[0, 1]]) if is_packed else samples
    with pytest.raises(ValueError, match="first token of a document"):
        backend.token_logps(wrong, micro_batch_size=2)


def test_documents_that_do_not_add_up_to_their_row_are_refused(backend: FsdpBackend) -> None:
    wrong = packed(samples_of([3, 4]), [[0, 1]])
    wrong.segment_lengths = Ragged.of([[3, 3]], np.int64)
    with pytest.raises(ValueError, match=r"add up to 6; the row has 7 tokens"):
        backend.token_logps(wrong, micro_batch_size=2)


def test_no_sequences_and_rows_without_targets_give_no_logps(backend: FsdpBackend) -> None:
    samples = samples_of([4, 6])
    assert len(backend.token_logps(samples[:0], micro_batch_size=2)) == 0
    samples.target_mask[0][:] = False
    logps = backend.token_logps(samples, micro_batch_size=2)
    assert list(logps.lengths) == [0, samples.target_mask[1].sum()]
    assert logps[1:] == backend.token_logps(samples, micro_batch_size=1)[1:]


def test_the_order_of_a_batch_and_its_padding_do_not_change_a_score(backend: FsdpBackend) -> None:
    samples = samples_of()
    forward = backend.token_logps(samples, micro_batch_size=8)
    backward = backend.token_logps(samples[::-1], micro_batch_size=3)
    np.testing.assert_allclose(
        Ragged.concat([backward[i : i + 1] for i in range(7, -1, -1)]).values, forward.values, atol=1e-5
    )


def test_scoring_has_no_dropout_even_where_training_has(folder: str) -> None:
    samples = samples_of()
    trained = FsdpBackend(
        folder,
        learning_rate=1e-3,
        num_training_steps=1,
        disable_dropout=False,
        model_init_kwargs={"attention_dropout": 0.5},
    )
    logps = trained.token_logps(samples, micro_batch_size=8)
    assert logps == FsdpBackend(folder).token_logps(samples, micro_batch_size=8)
    assert trained.module.training


def _falcon(folder: Path) -> Path:
    config = FalconConfig(
        vocab_size=260,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.5,
        hidden_dropout=0.5,
        alibi=False,
        eos_token_id=2,
    )
    FalconForCausalLM(config).save_pretrained(folder)
    return folder


def test_dropout_is_disabled_whether_a_model_keeps_it_as_a_module_or_a_number(folder: str, tmp_path: Path) -> None:
    qwen = {"attention_dropout": 0.5}
    for path, settings in ((folder, qwen), (_falcon(tmp_path), {})):
        backend = FsdpBackend(path, learning_rate=1e-3, num_training_steps=1, model_init_kwargs=settings)
        inputs = model_inputs(samples_of(), CPU)
        first, second = (backend.scorer(inputs, 1.0)[0] for _ in range(2))
        assert torch.equal(first, second)
        noisy = FsdpBackend(
            path, learning_rate=1e-3, num_training_steps=1, disable_dropout=False, model_init_kwargs=settings
        )
        first, second = (noisy.scorer(inputs, 1.0)[0] for _ in range(2))
        assert not torch.equal(first, second)


def test_a_model_without_an_output_embedding_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="causal language models"):
        Head(AutoModelForCausalLM.from_pretrained(folder).base_model)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_head_has_the_gradients_of_autograd(
    backend: FsdpBackend, monkeypatch: pytest.MonkeyPatch, entropy_gradient: bool, dtype: torch.dtype
) -> None:
    """Against the same head by autograd, also under autocast, where both round products to bfloat16."""
    part = Head(backend.module)
    part.scale = 1.7
    hidden_NH = torch.randn(11, 64, generator=torch.Generator().manual_seed(1)) * 3
    ids_N = torch.randint(0, 260, (11,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 4 * 260)

    def answer() -> list[torch.Tensor]:
        features = hidden_NH.clone().requires_grad_()
        weight = part.linear.weight.requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            scores = part.scores(features, ids_N, 0.8, entropy_gradient=entropy_gradient)
        loss = (scores.logps_N * torch.arange(11)).sum()
        if entropy_gradient:
            loss = loss + (scores.entropy_N * torch.arange(11).flip(0)).sum()
        gradients = torch.autograd.grad(loss, [features, weight])
        weight.requires_grad_(False)
        return [*scores[:3], *gradients]

    by_hand = answer()
    monkeypatch.setattr(Head, "is_linear", lambda self: False)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for value, expected in zip(by_hand, answer(), strict=True):
        assert value.dtype == expected.dtype
        scale = max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(value, expected, atol=tolerance * scale, rtol=0)
