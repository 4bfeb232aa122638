"""One row of numbers for each sequence: pooled hidden states of decoders and encoders, classifiers of encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    Qwen3Config,
    Qwen3Model,
)

from rayhelper import ConfigError
from tests import megatron_on_cpu
from tests.backends.batches import largest_difference
from tests.backends.ranks import run_ranks
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Ragged
from trainers.data.texts.groups import Groups
from trainers.metrics import Metrics

SIZES: dict[str, Any] = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 64}
SETTINGS: dict[str, Any] = {"head": "embedding", "values_at": "target", "learning_rate": 1e-3, "num_training_steps": 4}
TOKENS = [[7, 8, 9, 10, 11], [12, 5, 6, 7, 8, 200, 201, 202, 203], [5, 250, 6], [100]]
MODERN: dict[str, Any] = SIZES | {"global_attn_every_n_layers": 2, "local_attention": 6, "pad_token_id": 0}
MODERN |= {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.manual_seed(0)
    built = {
        "decoder": Qwen3Model(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16, attention_dropout=0.2)),
        "encoder": BertModel(BertConfig(**SIZES)),
        "classifier": ModernBertForSequenceClassification(ModernBertConfig(**MODERN, num_labels=1)),
    }
    folder = tmp_path_factory.mktemp("models")
    for name, model in built.items():
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in built}


def groups() -> Groups:
    """Two rows of two sequences."""
    lengths = [len(ids) for ids in TOKENS]
    ids = np.concatenate([np.array(ids) for ids in TOKENS])
    return Groups(Ragged.split(ids, [14, 4]), Ragged.split(np.array(lengths), [2, 2]))


def alone(model: str, pooling: str) -> np.ndarray:
    """Each sequence through transformers' model, by itself and without padding."""
    network = AutoModel.from_pretrained(model).eval()
    with torch.no_grad():
        states = [network(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in TOKENS]
    picked = {"last": lambda one: one[-1], "cls": lambda one: one[0], "mean": lambda one: one.mean(0)}[pooling]
    return torch.stack([picked(one) for one in states]).numpy()


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_padding_changes_no_embedding(models: dict[str, str], name: str, pooling: Any) -> None:
    wanted = alone(models[name], pooling)
    for settings in ({}, {"padding_free": True})[: 2 if name == "decoder" else 1]:
        backend = FsdpBackend(models[name], pooling=pooling, **SETTINGS, **settings)
        found = backend.token_values(groups(), micro_batch_size=2)
        np.testing.assert_allclose(found.values, wanted, atol=1e-5)
        assert found.lengths.tolist() == [2, 2]
        one_by_one = backend.token_values(groups().as_sequences(), micro_batch_size=1)
        np.testing.assert_allclose(one_by_one.values, wanted, atol=1e-5)


def test_an_encoder_keeps_no_documents_apart(models: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="Set packing: false and padding_free: false"):
        FsdpBackend(models["encoder"], padding_free=True, **SETTINGS)


def test_a_classifier_of_an_encoder_sees_no_padding(models: dict[str, str]) -> None:
    network = ModernBertForSequenceClassification.from_pretrained(models["classifier"]).eval()
    with torch.no_grad():
        wanted = [float(network(input_ids=torch.tensor([ids])).logits) for ids in TOKENS]
    backend = FsdpBackend(models["classifier"], **SETTINGS | {"head": "value"})
    np.testing.assert_allclose(backend.token_values(groups(), micro_batch_size=2).values, wanted, atol=1e-5)


def test_a_step_draws_the_dropout_of_the_pass_before_it(models: dict[str, str]) -> None:
    backend = FsdpBackend(models["decoder"], disable_dropout=False, gradient_checkpointing=True, **SETTINGS)
    seen: list[torch.Tensor] = []

    def loss(values_BTH: torch.Tensor, mask_BT: torch.Tensor, micro: Groups, metrics: Metrics) -> torch.Tensor:
        seen.append(values_BTH.detach()[:, 0])
        return values_BTH.sum() * 0.0

    without = backend.token_values(groups(), micro_batch_size=1).values
    before = backend.token_values(groups(), micro_batch_size=1, as_in_step=True).values
    backend.step(groups(), loss, micro_batch_size=1)
    np.testing.assert_array_equal(torch.cat(seen).numpy(), before)
    after = backend.token_values(groups(), micro_batch_size=1, as_in_step=True).values
    assert np.abs(before - without).max() > 1e-3 < np.abs(after - before).max()  # else nothing was drawn


def one_step(rank: int, model: str, num_ranks: int, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    backend = FsdpBackend(model, pooling="mean", **SETTINGS, **settings)
    mine = groups()[rank * 2 // num_ranks : (rank + 1) * 2 // num_ranks]

    def loss(values_BTH: torch.Tensor, mask_BT: torch.Tensor, micro: Groups, metrics: Metrics) -> torch.Tensor:
        return (values_BTH[:, 0] ** 2)[:, :8].sum() / 40

    backend.step(mine, loss, micro_batch_size=1)
    return dict(backend.named_weights())


def test_a_step_of_an_encoder_is_the_same_over_two_ranks(models: dict[str, str], tmp_path: Path) -> None:
    expected = one_step(0, models["encoder"], 1, {})
    for settings in ({}, {"sharding": "full_shard"}):
        for weights in run_ranks(2, one_step, models["encoder"], 2, settings, folder=tmp_path):
            assert largest_difference(weights, expected) < 1e-6


def embedded(backend: Any, mine: Groups) -> dict[str, Any]:
    """The embeddings of rows, and how the model learns from them."""

    def loss(values_BTH: torch.Tensor, mask_BT: torch.Tensor, micro: Groups, metrics: Metrics) -> torch.Tensor:
        return (values_BTH[:, 0] ** 2)[:, :8].sum() / 40

    before = backend.token_values(mine, micro_batch_size=1, as_in_step=True)
    assert before.lengths.tolist() == mine.lengths.lengths.tolist()
    norms = [backend.step(mine, loss, micro_batch_size=1).values()["grad_norm"] for _ in range(2)]
    return {"values": before.values, "norms": norms}


def on_megatron(rank: int, model: str, layouts: list[dict[str, Any]], exported: Path) -> list[dict[str, Any]]:
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    found = []
    for number, layout in enumerate(layouts):
        backend = MegatronBackend(model, settings=MegatronSettings(**layout), **SETTINGS)
        index, count, _ = backend.shard
        mine = groups()[index * 2 // count : (index + 1) * 2 // count]
        found.append(embedded(backend, mine) | {"rows": mine.lengths.lengths.tolist()})
        backend.save(exported / str(number))
        megatron_on_cpu.end_groups()
    return found


def test_embeddings_of_a_model_in_parts_are_those_of_one_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Qwen3Model(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16))
    whole.save_pretrained(tmp_path / "model")  # names without model., as Qwen3-Embedding has them
    backend = FsdpBackend(str(tmp_path / "model"), **SETTINGS)
    right = embedded(backend, groups())
    learned = {name.removeprefix("model."): weight for name, weight in backend.named_weights()}
    layouts = [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}, {}]
    ranks = run_ranks(2, on_megatron, str(tmp_path / "model"), layouts, tmp_path, folder=tmp_path)
    for number, layout in enumerate(layouts):
        found = [rank[number] for rank in ranks]
        values = np.concatenate([one["values"] for one in found]) if not layout else found[0]["values"]
        np.testing.assert_allclose(values, right["values"], atol=1e-5, err_msg=str(layout))
        for one in found:
            np.testing.assert_allclose(one["norms"], right["norms"], rtol=1e-5, err_msg=str(layout))
        exported = AutoModel.from_pretrained(tmp_path / str(number))
        assert type(exported) is Qwen3Model
        assert largest_difference(dict(exported.state_dict()), learned) < 1e-5
