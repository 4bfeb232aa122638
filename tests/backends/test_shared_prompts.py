"""Completions of one prompt in one row: the numbers and weights of single rows, in fewer tokens; and memory that is
free again is taken again."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.tiny.architectures import save
from trainers.backends.device import keep_freed_memory
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.scores import shared_prompts
from trainers.backends.scores.shared_prompts import shared_inputs
from trainers.batch import Ragged, Samples

PROMPTS, EACH = 6, 5
CPU = torch.device("cpu")


def batch(seed: int = 0) -> Samples:
    """Completions of a few prompts, not beside each other; some of one token, some with tokens that are no targets."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(3, 60, length) for length in random.integers(1, 9, PROMPTS)]
    rows, masks = [], []
    for place in random.permutation(PROMPTS * EACH):
        length = int(random.integers(1, 6))
        mask = random.random(length) < 0.7
        mask[0] = True
        rows.append(np.concatenate([prompts[place % PROMPTS], random.integers(3, 60, length)]))
        masks.append(np.concatenate([np.zeros(len(prompts[place % PROMPTS]), bool), mask]))
    return Samples(Ragged.of(rows, np.int64), Ragged.of(masks, bool))


def loss(logps_BT: Any, entropy_BT: Any, mask_BT: Any, micro: Any, metrics: Any) -> Any:
    return -(logps_BT * mask_BT * torch.arange(1, mask_BT.shape[1] + 1)).sum() / 100


@pytest.mark.parametrize("keys", [{}, {"lora": {"r": 4, "target_modules": "all-linear"}}], ids=["all", "lora"])
def test_scores_and_weights_are_those_of_single_rows(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prompts, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(shared_prompts, "MOST", 2.0)
    model, found = save("qwen3", tmp_path / "model"), {}
    for shares in (True, False):
        backend = FsdpBackend(model, learning_rate=1e-2, num_training_steps=2, device=CPU, **keys)
        assert backend.shares_prompts
        backend.shares_prompts = shares
        logps, entropies = backend.token_scores(batch(), micro_batch_size=64)
        told = [backend.step(batch(seed), loss, micro_batch_size=64).values() for seed in (0, 1)]
        weights = {name: weight.clone() for name, weight in backend.named_weights()}
        found[shares] = logps, entropies, told, weights
    ours, theirs = found[True], found[False]
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        assert (one.offsets == other.offsets).all()
        np.testing.assert_allclose(one.values, other.values, atol=2e-6, rtol=1e-6)
    for one, other in zip(ours[2], theirs[2], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    for name, weight in theirs[3].items():
        torch.testing.assert_close(ours[3][name], weight, atol=2e-4, rtol=0)  # of two steps of Adam at 1e-2


def test_a_prompt_stands_once_and_last_tokens_of_completions_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[7, 8, 1, 2], [7, 8, 3], [9, 4, 5], [7, 8, 1, 6]]
    masks = [[False, False, True, True], [False, False, True], [False, True, True], [False, False, True, True]]
    samples = Samples(Ragged.of(rows, np.int64), Ragged.of(masks, bool))
    assert shared_inputs(samples, CPU) is None  # a few tokens, which cost nothing
    monkeypatch.setattr(shared_prompts, "FEWEST_TOKENS", 1)
    found = shared_inputs(samples, CPU)
    assert found is not None
    assert found.sees_BTT is not None
    assert found.input_ids_BT.tolist() == [[7, 8, 1, 1], [9, 4, 0, 0]]
    assert found.position_ids_BT is not None
    assert found.position_ids_BT.tolist() == [[0, 1, 2, 2], [0, 1, 0, 0]]
    assert found.target_ids_N.tolist() == [1, 2, 3, 4, 5, 1, 6]
    assert found.places_N.tolist() == [1, 2, 1, 4, 5, 1, 3]
    assert found.sees_BTT[0].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, False, True],
    ]
    for key, value in {"WIDEST": 3, "MOST": 0.4, "FEWEST_TOKENS": 17}.items():
        with monkeypatch.context() as patched:
            patched.setattr(shared_prompts, key, value)
            assert shared_inputs(samples, CPU) is None


@pytest.mark.parametrize(
    ("name", "keys", "shares"),
    [
        ("llama", {}, True),
        ("gemma3_text", {}, False),  # with sliding windows
        ("qwen3", {"model_init_kwargs": {"attn_implementation": "eager"}}, False),
        ("qwen3", {"lora": {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1}}, False),
        ("qwen3", {"neftune_noise_alpha": 5.0}, False),
    ],
)
def test_only_where_rows_cannot_differ(name: str, keys: dict[str, Any], shares: bool, tmp_path: Path) -> None:
    model = save(name, tmp_path / "model")
    keys = {"disable_dropout": False} | keys
    assert FsdpBackend(model, learning_rate=1e-2, num_training_steps=2, device=CPU, **keys).shares_prompts is shares


def test_memory_that_is_free_again_needs_no_new_pages() -> None:
    """96 MB in four pieces: as activations of a step, which are all free before the next."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pieces = [library.malloc(24 << 20) for _ in range(4)]
        for piece in pieces:
            ctypes.memset(piece, 1, 24 << 20)
        for piece in pieces:
            library.free(piece)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert keep_freed_memory()
    faults()
    assert faults() < 1000  # of 24,576 pages
