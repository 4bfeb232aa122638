"""Value heads: critics that are read where a token is predicted, reward models that are read at the last token."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2ForSequenceClassification

from tests.backends.batches import largest_difference, samples_of
from tests.backends.ranks import run_ranks
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.hf_model import build_model
from trainers.batch import Ragged, Samples, Sequences
from trainers.metrics import Metrics

SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_training_steps": 4, "adam_epsilon": 1e-4, "head": "value"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    path = tmp_path_factory.mktemp("classifier")
    Qwen2ForSequenceClassification(config).save_pretrained(path)
    return str(path)


def values_of_whole_model(folder: str, sequences: Sequences, shift: int) -> np.ndarray:
    """The score of each target, or of the token before it, every row alone through transformers' classifier."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for ids, mask in zip(sequences.input_ids, sequences.target_mask, strict=True):
        for t in np.flatnonzero(mask):
            with torch.no_grad():  # the classifier reads the last token of what it is given
                found.append(float(model(torch.tensor(ids[: t + 1 - shift])[None]).logits))
    return np.array(found)


@pytest.mark.parametrize(("values_at", "shift"), [("predicting", 1), ("target", 0)])
def test_values_are_those_of_transformers_classifier(folder: str, values_at: Any, shift: int) -> None:
    samples = samples_of([4, 9, 6])
    expected = values_of_whole_model(folder, samples, shift)
    assert expected.std() > 1e-3, "an offset by one must be noticed"
    for settings in ({}, {"padding_free": True}, {"token_budget": 10}):
        backend = FsdpBackend(folder, **SETTINGS, values_at=values_at, **settings)
        found = backend.token_values(samples, micro_batch_size=2)
        np.testing.assert_allclose(found.values, expected, atol=1e-5)


def test_the_first_token_may_be_valued_but_not_predicted(folder: str) -> None:
    first = Sequences(Ragged.of([[5, 6]], np.int64), Ragged.of([[True, False]], bool))
    assert (
        len(FsdpBackend(folder, head="value", values_at="target").token_values(first, micro_batch_size=1).values) == 1
    )
    with pytest.raises(ValueError, match="cannot be a target"):
        FsdpBackend(folder, head="value").token_values(first, micro_batch_size=1)


def test_a_head_that_is_drawn_is_no_news_and_other_weights_are(
    folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """transformers prints a table of the weights that a language model's files lack, and of its head beside."""
    FsdpBackend(save_tiny(tmp_path / "language"), head="value")
    assert "LOAD REPORT" not in "".join(capfd.readouterr())
    assert not caplog.messages
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    weights = load_file(part / "model.safetensors")
    del weights["model.norm.weight"], weights["score.weight"]
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    FsdpBackend(str(part), head="value")
    assert caplog.messages == [f"{part}: its files lack model.norm.weight, which are drawn at random"]


def squared_loss(values_BT: torch.Tensor, mask_BT: torch.Tensor, micro: Samples, metrics: Metrics) -> torch.Tensor:
    """Values should be the advantage of their row; divided by 40."""
    assert micro.advantages is not None
    metrics.mean("value", float(values_BT.detach()[mask_BT].sum()), int(mask_BT.sum()))
    return ((values_BT - torch.tensor(micro.advantages)[:, None])[mask_BT] ** 2).sum() / 40


def one_step(rank: int, folder: str, num_ranks: int, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    backend = FsdpBackend(folder, **SETTINGS | settings)
    mine = samples_of()[rank * 8 // num_ranks : (rank + 1) * 8 // num_ranks]
    backend.step(mine, squared_loss, micro_batch_size=3)
    return dict(backend.named_weights())


def test_a_step_of_a_value_head_is_that_of_plain_autograd_over_any_ranks(folder: str, tmp_path: Path) -> None:
    samples = samples_of()
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    loss = torch.zeros(())
    assert samples.advantages is not None
    for ids, mask, wanted in zip(samples.input_ids, samples.target_mask, samples.advantages, strict=True):
        hidden = model.base_model(torch.tensor(ids)[None]).last_hidden_state[0]
        values = model.score(hidden)[:, 0]
        loss = loss + sum((values[t - 1] - float(wanted)) ** 2 for t in np.flatnonzero(mask)) / 40
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0).step()
    expected = {name: weight.detach() for name, weight in model.named_parameters()}
    assert largest_difference(one_step(0, folder, 1, {}), expected) < 1e-6
    for settings in ({}, {"sharding": "full_shard"}):
        for weights in run_ranks(2, one_step, folder, 2, settings, folder=tmp_path):
            assert largest_difference(weights, expected) < 1e-6


def test_a_language_model_gets_a_new_head_that_the_seed_decides(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    one, same, other = (
        dict(FsdpBackend(folder, head="value", seed=seed).named_weights())["score.weight"] for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_value_head_is_trained_beside_an_adapter_and_merged_and_resumed(folder: str, tmp_path: Path) -> None:
    settings = SETTINGS | {"lora": {"r": 2, "target_modules": "all-linear"}}
    backend = FsdpBackend(folder, **settings)
    before = dict(backend.named_weights())["score.weight"].clone()
    for _ in range(2):
        backend.step(samples_of(), squared_loss, micro_batch_size=8)
    assert not torch.equal(dict(backend.named_weights())["score.weight"], before)
    backend.export(tmp_path / "final")
    backend.save(tmp_path / "checkpoint")
    resumed = FsdpBackend(folder, **settings)
    resumed.load(tmp_path / "checkpoint")
    expected = backend.token_values(samples_of(), micro_batch_size=4).values
    np.testing.assert_array_equal(resumed.token_values(samples_of(), micro_batch_size=4).values, expected)
    merged = FsdpBackend(tmp_path / "final", head="value").token_values(samples_of(), micro_batch_size=4).values
    np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_an_embedding_model_is_built_without_a_report_of_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # so that caplog has its lines
    folder = save_tiny(tmp_path, tie_word_embeddings=False)
    build_model(folder, head="embedding", dtype=torch.float32, device=torch.device("cpu"))
    assert "LOAD REPORT" not in caplog.text
