"""Weights by name, export, and a run that stops and goes on as if it had not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.backends.batches import largest_difference, mean_loss, samples_of, weights_of
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.backends.fsdp.backend import FsdpBackend

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "num_training_steps": 6,
    "warmup_steps": 1,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of experts: in memory transformers stacks what the checkpoint keeps one by one."""
    folder = tmp_path_factory.mktemp("experts")
    config = Qwen3MoeConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


def train(backend: FsdpBackend, num_steps: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + num_steps):
        samples = samples_of([6, 9, 4], seed=step)
        loss = partial(mean_loss, int(samples.target_mask.values.sum()))
        losses.append(backend.step(samples, loss, micro_batch_size=2).values()["loss"])
    return losses


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_names_are_those_of_an_exported_checkpoint(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    backend = FsdpBackend(request.getfixturevalue(kind))
    backend.export(tmp_path)
    exported = load_file(tmp_path / "model.safetensors")
    named = dict(backend.named_weights())
    assert named.keys() == exported.keys()
    assert all(torch.equal(named[name], exported[name]) for name in exported)
    assert ("lm_head.weight" in named) == (kind != "tied")


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_another_model_takes_the_weights_by_name_in_place(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    trained, other = FsdpBackend(folder, **SETTINGS), FsdpBackend(folder)
    train(trained, 2)
    places = {name: weight.data_ptr() for name, weight in other.module.named_parameters()}
    assert largest_difference(weights_of(trained.module), weights_of(other.module)) > 1e-3
    other.load_weights(trained.named_weights())
    assert largest_difference(weights_of(trained.module), weights_of(other.module)) == 0.0
    assert places == {name: weight.data_ptr() for name, weight in other.module.named_parameters()}
    samples = samples_of()
    assert other.token_logps(samples, micro_batch_size=4) == trained.token_logps(samples, micro_batch_size=4)


def test_a_wrong_name_a_wrong_shape_and_a_missing_weight_are_refused(untied: str) -> None:
    backend = FsdpBackend(untied)
    named = dict(backend.named_weights())
    with pytest.raises(ValueError, match=r"'model\.norm\.wait'"):
        backend.load_weights((named | {"model.norm.wait": torch.zeros(64)}).items())
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' \(63,\).*\(64,\)"):
        backend.load_weights((named | {"model.norm.weight": torch.zeros(63)}).items())
    with pytest.raises(ValueError, match=r"1 .*weights.*not given.*lm_head\.weight"):
        backend.load_weights((name, weight) for name, weight in named.items() if name != "lm_head.weight")


def test_an_export_is_an_ordinary_folder_with_its_tokenizer(tied: str, tmp_path: Path) -> None:
    backend = FsdpBackend(tied, **SETTINGS)
    train(backend, 1)
    backend.export(tmp_path, tiny_tokenizer())
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert largest_difference(weights_of(model), weights_of(backend.module)) == 0.0
    assert model.dtype == torch.float32
    assert (tmp_path / "tokenizer.json").is_file()
    assert not (tmp_path / "optimizer.pt").exists()


@pytest.mark.parametrize("kind", ["tied", "experts"])
@pytest.mark.parametrize("disable_dropout", [True, False])
def test_a_loaded_run_goes_on_bit_for_bit(
    kind: str, disable_dropout: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With dropout, the random state must come back too."""
    folder = request.getfixturevalue(kind)
    settings = SETTINGS | {"disable_dropout": disable_dropout, "model_init_kwargs": {"attention_dropout": 0.3}}
    first = FsdpBackend(folder, **settings)
    train(first, 2)
    first.save(tmp_path)
    expected_losses = train(first, 2, start=2)

    second = FsdpBackend(folder, **settings)
    torch.rand(7)
    second.load(tmp_path)
    assert train(second, 2, start=2) == expected_losses
    assert largest_difference(weights_of(first.module), weights_of(second.module)) == 0.0
    assert first.optimizer is not None
    assert second.optimizer is not None
    ours, theirs = first.optimizer.state_dict(), second.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, state in ours["state"].items():
        assert all(torch.equal(value, theirs["state"][index][name]) for name, value in state.items())
    assert first.scheduler.state_dict() == second.scheduler.state_dict()


def test_what_was_saved_is_what_the_next_steps_depend_on(tied: str, tmp_path: Path) -> None:
    """Without the load the next losses differ, so the test above tells something."""
    first = FsdpBackend(tied, **SETTINGS)
    train(first, 2)
    first.save(tmp_path)
    expected_losses = train(first, 2, start=2)
    weights_alone = FsdpBackend(tmp_path, **SETTINGS)
    assert train(weights_alone, 2, start=2) != expected_losses


def test_a_checkpoint_in_several_files_loads(tied: str, tmp_path: Path) -> None:
    trained, other = FsdpBackend(tied, **SETTINGS), FsdpBackend(tied)
    train(trained, 1)
    trained.module.save_pretrained(tmp_path, max_shard_size="100KB")
    torch.save({"python": None}, tmp_path / "other.pth")
    assert len(list(tmp_path.glob("model*.safetensors"))) > 1
    other.load(tmp_path)
    assert largest_difference(weights_of(trained.module), weights_of(other.module)) == 0.0


def test_a_model_that_only_scores_loads_a_checkpoint_of_training(tied: str, tmp_path: Path) -> None:
    trained, reference = FsdpBackend(tied, **SETTINGS), FsdpBackend(tied)
    train(trained, 1)
    trained.save(tmp_path)
    reference.load(tmp_path)
    samples = samples_of()
    assert reference.token_logps(samples, micro_batch_size=4) == trained.token_logps(samples, micro_batch_size=4)
