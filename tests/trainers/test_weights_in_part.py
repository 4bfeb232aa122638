"""Of a model under an adapter only what that changes travels, once an engine has the rest; all of it is proven."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from rayhelper import Channel, RayHelper, Receipt
from tests.backends.batches import mean_loss, samples_of
from tests.backends.ranks import run_ranks
from tests.conftest import without_runtime
from tests.e2e.runs import grpo_config, lines
from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.rollout.prompts import prompts_of
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.grpo import trainer as grpo
from trainers.parts import policy
from trainers.parts.fingerprints import fingerprints
from trainers.parts.weights import StaleWeightsError, copy, receive, send
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "offload_model": False,
    "offload_optimizer": False,
    "vllm_enable_lora": False,
}
CONFIG: Any = SimpleNamespace(**SETTINGS, weight_checksum=True)
UNCHECKED: Any = SimpleNamespace(**SETTINGS, weight_checksum=False)
TARGETS = ["q_proj", "down_proj"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "modules_to_save": ["lm_head"]}
CHANGED = {
    *(f"model.layers.{k}.{part}.weight" for k in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")),
    "lm_head.weight",
}
NAME = "model.layers.1.mlp.down_proj.weight"  # is adapted
BASE = "model.layers.0.self_attn.o_proj.weight"  # is not


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), head_dim=32)  # the smallest that vLLM's attention takes


def adapted(folder: str, **settings: Any) -> FsdpBackend:
    return FsdpBackend(folder, **{"learning_rate": 1e-2, "num_training_steps": 100, "lora": LORA} | settings)


def learn(backend: FsdpBackend, seed: int = 0) -> None:
    backend.step(samples_of(seed=seed), partial(mean_loss, 50), micro_batch_size=8)


class Noted(HfEngine):
    """Notes the weights that it was given, by round, and changes those of ``tamper`` first."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, tiny_tokenizer())
        self.rounds: list[set[str]] = []
        self.tamper: dict[str, float] = {}

    def load_weights(
        self, named_weights: Iterable[tuple[str, torch.Tensor]], *, part: bool = False, version: int | None = None
    ) -> None:
        given = {name: weight * self.tamper.get(name, 1.0) for name, weight in named_weights}
        self.rounds.append(set(given))
        super().load_weights(given.items(), part=part, version=version)


@pytest.fixture
def engine(folder: str) -> Noted:
    return Noted(folder)


@pytest.fixture
def channel() -> Iterator[Channel]:
    with Channel() as channel:
        yield channel


def sync(backend: FsdpBackend, channel: Channel, engine: HfEngine, config: Any = CONFIG) -> Receipt:
    receipt = send(config, backend, channel, 1)
    receive(engine, channel)
    assert receipt is not None
    return receipt


# --- what training can change


def test_what_an_adapter_changes_is_given_merged_and_the_live_weights_stay_bit_for_bit(folder: str) -> None:
    backend = adapted(folder)
    learn(backend)
    before = {name: weight.clone() for name, weight in backend.module.state_dict().items()}
    found, whole = dict(backend.named_weights(trained_only=True)), dict(backend.named_weights())
    assert set(found) == CHANGED
    untrained = dict(FsdpBackend(folder).named_weights())
    assert {name for name, weight in whole.items() if not torch.equal(weight, untrained[name])} == CHANGED
    assert all(torch.equal(weight, whole[name]) for name, weight in found.items())
    after = backend.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_without_an_adapter_training_can_change_all(folder: str) -> None:
    backend = FsdpBackend(folder, learning_rate=1e-3, num_training_steps=1)
    assert not backend.trains_part
    assert set(dict(backend.named_weights(trained_only=True))) == set(dict(backend.named_weights()))


def rank_syncs(rank: int, folder: str) -> tuple[bool, list[Receipt], bool]:
    """Two rounds of a model in shards, from every rank to an engine of its own; all ranks gather together."""
    backend = adapted(folder, sharding="full_shard")
    is_sharded = all(isinstance(weight, DTensor) for weight in backend.module.parameters())
    engine, receipts = HfEngine(folder, tiny_tokenizer()), []
    with Channel(transport="local") as channel:
        for seed in range(2):
            samples = samples_of(seed=seed)[rank * 4 : rank * 4 + 4]
            backend.step(samples, partial(mean_loss, 50), micro_batch_size=4)
            receipts.append(sync(backend, channel, engine))
    return is_sharded, receipts, engine.fingerprints() == fingerprints(backend.named_weights())


def test_weights_in_shards_are_sent_in_part_too(folder: str, tmp_path: Path) -> None:
    for is_sharded, (first, second), is_same in run_ranks(2, rank_syncs, folder, folder=tmp_path):
        assert is_sharded
        assert is_same
        assert second.num_bytes < first.num_bytes / 2


# --- rounds


def test_the_second_round_brings_what_training_can_change_and_the_engine_has_all(
    folder: str, engine: Noted, channel: Channel
) -> None:
    backend = adapted(folder)
    receipts = []
    for seed in range(3):
        learn(backend, seed)
        receipts.append(sync(backend, channel, engine))
        assert engine.fingerprints() == fingerprints(backend.named_weights())
    assert engine.rounds == [set(dict(backend.named_weights())), CHANGED, CHANGED]
    sizes = [receipt.num_bytes for receipt in receipts]
    assert sizes[1] == sizes[2] < sizes[0] / 2


def test_without_fingerprints_too(folder: str, engine: Noted, channel: Channel) -> None:
    backend = adapted(folder)
    for seed in range(2):
        learn(backend, seed)
        sync(backend, channel, engine, UNCHECKED)
    assert engine.rounds == [set(dict(backend.named_weights())), CHANGED]
    assert engine.fingerprints() == fingerprints(backend.named_weights())


def test_a_stale_weight_is_seen_be_it_adapted_or_not(folder: str, engine: Noted, channel: Channel) -> None:
    backend = adapted(folder)
    sync(backend, channel, engine)
    learn(backend)
    engine.tamper = {NAME: 1.001}
    with pytest.raises(StaleWeightsError, match=r"1 of .* among them \['model.layers.1'\]"):
        sync(backend, channel, engine)
    engine.tamper = {}
    sync(backend, channel, engine)
    with torch.no_grad():
        engine.module.get_parameter(BASE).mul_(1.001)
    with pytest.raises(StaleWeightsError, match=r"1 of .* among them \['model.layers.0'\]"):
        sync(backend, channel, engine)
    assert engine.rounds[1:] == [CHANGED] * 3


def test_an_engine_that_is_new_gets_all(folder: str, engine: Noted, tmp_path: Path) -> None:
    """So does one beside the policy that dropped its weights, and everyone after other weights came from outside."""
    backend, new = adapted(folder), Noted(folder)
    with Channel() as channel, Channel() as another:
        sync(backend, channel, engine)
        sync(backend, another, new)
        backend.save(tmp_path)
        backend.load(tmp_path)
        sync(backend, another, new)
    copy(CONFIG, backend, engine, 1)
    copy(CONFIG, backend, engine, 1)
    engine.has_weights = False
    copy(CONFIG, backend, engine, 1)
    whole = set(dict(backend.named_weights()))
    assert new.rounds == [whole, whole]
    assert engine.rounds == [whole, whole, CHANGED, whole]
    assert engine.fingerprints() == fingerprints(backend.named_weights())


def test_a_part_is_refused_where_nobody_said_that_it_is_one(folder: str, engine: Noted) -> None:
    with pytest.raises(ValueError, match="were not given"):
        engine.load_weights(adapted(folder).named_weights(trained_only=True))


def test_experts_that_lie_stacked_stay_as_they_are(tmp_path: Path) -> None:
    """What adapters change of such a model is converted without the rest of it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    with torch.random.fork_rng(devices=[]):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=260, eos_token_id=2, **sizes))
    model.save_pretrained(tmp_path)
    backend = adapted(str(tmp_path), lora={"r": 4, "target_modules": ["q_proj"]})
    engine = Noted(str(tmp_path))
    for seed in range(2):
        learn(backend, seed)
        copy(CONFIG, backend, engine, 1)
    assert engine.rounds[1] == {"model.layers.0.self_attn.q_proj.weight"}
    assert engine.fingerprints() == fingerprints(backend.named_weights())


@pytest.mark.xdist_group("vllm")
def test_vllm_after_two_rounds_is_a_fresh_engine_with_the_exported_model(folder: str, tmp_path: Path) -> None:
    from trainers.rollout.vllm.engine import VllmEngine

    settings = {"max_model_len": 64, "max_num_seqs": 8}
    backend, sampling = adapted(folder), Sampling(max_completion_length=8, temperature=0.0)
    prompts, found = prompts_of([5, 3, 7]), []
    for path in (folder, str(tmp_path)):
        engine = VllmEngine(path, tiny_tokenizer(), engine_kwargs=settings)
        if path == folder:
            for seed in range(2):
                learn(backend, seed)
                copy(CONFIG, backend, engine, 1)
            backend.export(tmp_path, tiny_tokenizer())
        completions = engine.generate(prompts, sampling, seed=0)
        found.append((dataclasses.replace(completions, policy_versions=None), engine.fingerprints()))
        engine.close()
    assert found[0] == found[1]


def test_a_run_with_an_adapter_and_an_engine_apart_sends_it_whole_once(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts: list[Receipt] = []

    def noted(*args: Any) -> None:
        receipt = send(*args)
        assert receipt is not None
        receipts.append(receipt)

    monkeypatch.setattr(policy, "send", noted)
    roles = [["train", "reference", "teacher", "reward"], ["rollout"]]
    groups = {f"g{k}": {"device": "CPU", "ranks": 1, "workers": workers} for k, workers in enumerate(roles)}
    keys: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 2, "lora_target_modules": TARGETS, "eval_dataset": None}
    config = grpo_config(folder, tmp_path, max_steps=8, **keys)
    with without_runtime(), RayHelper.session(groups, runtime="inprocess"):
        grpo.GRPOTrainer(config).train()
    assert len([line for line in lines(tmp_path) if "loss" in line]) == 8
    sizes = [receipt.num_bytes for receipt in receipts]
    assert len(sizes) > 2
    assert max(sizes[1:]) < sizes[0] / 2
