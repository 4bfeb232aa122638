"""An adapter inside vLLM, apart from the model: it travels alone, and completes and scores as the trainer's does.

One engine serves the module; its model is what it was on disk from the first test to the last.
"""

from __future__ import annotations

import contextlib
import copy as copies
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from benchmarks.tiny import architectures
from rayhelper import Channel, ConfigError
from tests.backends.batches import mean_loss, samples_of
from tests.backends.ranks import run_ranks
from tests.conftest import without_runtime
from tests.e2e.runs import grpo_config, lines
from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.rollout.prompts import as_sequences, plain_greedy, prompts_of, save_decided
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.tuners.adapters import layer_names
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.reading.command_line import load_config
from trainers.grpo import trainer as grpo
from trainers.parts import weights as weight_sync
from trainers.parts.checks import check_completions
from trainers.parts.engine import build_vllm
from trainers.parts.fingerprints import fingerprints
from trainers.parts.weights import StaleWeightsError, copy, receive, send
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine
from trainers.rollout.vllm.engine import VllmEngine

in_vllm_process = pytest.mark.xdist_group("vllm")

TARGETS = ["q_proj", "down_proj"]  # the first is one of three that vLLM keeps in one layer
LORA = {"r": 3, "lora_alpha": 12, "target_modules": TARGETS, "use_rslora": True}
KEYS: dict[str, Any] = {
    "tuner_type": "lora",
    "lora_rank": 3,
    "lora_alpha": 12,
    "lora_target_modules": TARGETS,
    "lora_kwargs": {"use_rslora": True},
    "rollout_engine": "vllm",
    "vllm_enable_lora": True,
    "max_completion_length": 12,
    "vllm_max_model_len": 64,
    "vllm_max_num_seqs": 8,
    "vllm_engine_kwargs": {"block_size": 32},
}
GREEDY = Sampling(max_completion_length=12, temperature=0.0)


def config_of(model: str, **keys: Any) -> CompletionConfig:
    return CompletionConfig(model=model, dataset=[{"prompt": "a"}], dtype="float32", output_dir="x", **KEYS | keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_decided(tmp_path_factory.mktemp("model"), scale=4.0, head_dim=32)


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[VllmEngine]:
    engine: Any = build_vllm(config_of(folder), folder, tiny_tokenizer(), shares_devices=True)
    on_disk = model_of(engine)
    yield engine
    now = model_of(engine)
    engine.close()
    assert all(torch.equal(weight, now[name]) for name, weight in on_disk.items())


@pytest.fixture
def backend(folder: str) -> FsdpBackend:
    """With a policy that has learned twice."""
    backend = FsdpBackend(folder, learning_rate=1e-2, num_training_steps=100, lora=LORA)
    for seed in range(2):
        learn(backend, seed)
    return backend


def learn(backend: FsdpBackend, seed: int) -> None:
    backend.step(samples_of(seed=seed), partial(mean_loss, 50), micro_batch_size=8)


def model_of(engine: VllmEngine) -> dict[str, torch.Tensor]:
    (weights,) = engine.engine.apply_model(lambda model: {n: w.clone() for n, w in model.named_parameters()})
    return dict(weights)


# --- what travels


def test_the_matrices_multiply_to_what_the_adapter_adds_to_the_model(folder: str) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "alpha_pattern": {"q_proj": 20}}
    backend = FsdpBackend(folder, learning_rate=1e-2, num_training_steps=100, lora=lora)
    learn(backend, 0)
    assert multiplied(folder, dict(backend.adapter_weights()), backend) == 4


def multiplied(folder: str, found: dict[str, torch.Tensor], backend: FsdpBackend) -> int:
    """How many weights of the model on disk become, with the matrices, what the backend has when they are merged."""
    before = dict(FsdpBackend(folder, device="cpu").named_weights())
    changed = dict(backend.named_weights(trained_only=True))
    assert len(found) == 2 * len(changed)
    for name, weight in changed.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = found[f"{layer}.lora_A.weight"], found[f"{layer}.lora_B.weight"]
        assert b.abs().max() > 0
        torch.testing.assert_close(before[name] + b @ a, weight, atol=1e-6, rtol=1e-5)
    return len(changed)


def rank_multiplies(rank: int, folder: str) -> tuple[bool, int]:
    """Whether weights lie in shards, and how many the whole matrices lead to from those on disk."""
    backend = FsdpBackend(folder, learning_rate=1e-2, num_training_steps=100, lora=LORA, sharding="full_shard")
    backend.step(samples_of()[rank * 4 : rank * 4 + 4], partial(mean_loss, 50), micro_batch_size=4)
    found = dict(backend.adapter_weights())
    return isinstance(next(backend.module.parameters()), DTensor), multiplied(folder, found, backend)


def test_of_weights_in_shards_the_matrices_are_whole(folder: str, tmp_path: Path) -> None:
    assert run_ranks(2, rank_multiplies, folder, folder=tmp_path) == [(True, 4)] * 2


@pytest.mark.parametrize("targets", [["all-linear"], ["self_attn.q_proj", "up_proj"]])
def test_the_engine_makes_room_in_the_layers_that_peft_adapts(targets: list[str], folder: str) -> None:
    lora = {"r": 2, "target_modules": targets[0] if len(targets) == 1 else targets}
    backend = FsdpBackend(folder, learning_rate=1e-2, num_training_steps=1, lora=lora)
    adapted = {name.rpartition(".lora_A")[0].rpartition(".")[2] for name, _ in backend.adapter_weights()} - {""}
    assert layer_names(folder, targets) == adapted


# --- the engine


@in_vllm_process
def test_after_updates_log_probabilities_are_the_trainers(
    folder: str, engine: VllmEngine, backend: FsdpBackend
) -> None:
    config, settings = config_of(folder), {"temperature": 0.8}
    for seed in range(2):
        learn(backend, seed)
        copy(config, backend, engine, seed)
        assert engine.fingerprints() == fingerprints(backend.adapter_weights())
        rollouts = engine.generate(prompts_of(), Sampling(max_completion_length=10, **settings), seed=3)
        sequences = as_sequences(rollouts)
        logps = backend.token_logps(sequences, micro_batch_size=4, **settings).values
        base = backend.token_logps(sequences, micro_batch_size=4, adapter=False, **settings).values
        assert np.abs(logps - base).max() > 0.1
        np.testing.assert_allclose(rollouts.rollout_logps.values, logps, atol=1e-4)
        np.testing.assert_allclose(engine.token_logps(sequences, **settings).values, logps, atol=1e-4)
        ids, top = backend.top_logps(sequences, 3, micro_batch_size=4, **settings)
        found_ids, found_top = engine.top_logps(sequences, 3, **settings)
        assert np.array_equal(found_ids.values, ids.values)
        np.testing.assert_allclose(found_top.values, top.values, atol=1e-4)


@in_vllm_process
def test_it_writes_what_the_merged_model_writes(folder: str, engine: VllmEngine, backend: FsdpBackend) -> None:
    merged = HfEngine(folder, tiny_tokenizer())
    before = merged.generate(prompts_of(), GREEDY, seed=0)
    merged.load_weights(backend.named_weights())
    copy(config_of(folder), backend, engine, 0)
    found, expected = (each.generate(prompts_of(), GREEDY, seed=0) for each in (engine, merged))
    assert found.completion_ids == expected.completion_ids
    assert found.completion_ids != before.completion_ids


@in_vllm_process
def test_the_adapter_alone_is_sent_from_the_first_round_on(
    folder: str, engine: VllmEngine, backend: FsdpBackend
) -> None:
    size = sum(weight.nbytes for _, weight in backend.adapter_weights())
    with Channel(transport="local") as channel:
        for version in (5, 6):
            learn(backend, version)
            receipt = send(config_of(folder), backend, channel, version)
            receive(engine, channel)
            assert engine.version == version
            assert engine.fingerprints() == fingerprints(backend.adapter_weights())
            assert receipt is not None
            assert size <= receipt.num_bytes < size + 1024  # with version and fingerprints


@in_vllm_process
def test_an_adapter_that_is_another_in_the_engine_is_seen(
    folder: str, engine: VllmEngine, backend: FsdpBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_proof = weight_sync._with_proof
    monkeypatch.setattr(
        weight_sync,
        "_with_proof",
        lambda weights, prints: (
            (name, weight * 1.001 if "layers.1.mlp" in name else weight) for name, weight in with_proof(weights, prints)
        ),
    )
    with pytest.raises(StaleWeightsError, match=r"1 of 2 .* among them \['base_model.model.model.layers.1'\]"):
        copy(config_of(folder), backend, engine, 0)


@in_vllm_process
def test_running_completions_go_on_with_the_new_adapter(folder: str, engine: VllmEngine, backend: FsdpBackend) -> None:
    prompt, old = prompts_of()[:1].prompt_ids[0], copies.deepcopy(backend.module)
    copy(config_of(folder), backend, engine, 1)
    engine.submit(prompts_of()[:1], GREEDY, seed=0)
    while len(next(iter(engine._running.values())).ids) < 3:
        engine.advance()
    for seed in range(4):
        learn(backend, seed)
    copy(config_of(folder), backend, engine, 2)
    (completion,) = [completion for _ in range(12) for completion in engine.advance()]
    before, after = completion.ids[:3].tolist(), completion.ids[3:].tolist()
    assert completion.versions.tolist() == [1] * 3 + [2] * len(after)
    assert before == plain_greedy(old, prompt, 3, [])
    with torch.no_grad():
        cache = old(torch.tensor([[*prompt, *before[:2]]]), use_cache=True).past_key_values
        expected = before[2:]  # the new adapter, on keys and values of the old one
        while len(expected) < 1 + len(after):
            logits_V = backend.module(torch.tensor([expected[-1:]]), past_key_values=cache).logits[0, -1]
            expected.append(int(logits_V.argmax()))
    assert after == expected[1:]
    assert after != plain_greedy(old, prompt, 12, [])[3 : 3 + len(after)]


@in_vllm_process
def test_completions_share_nothing_cached_under_the_adapter_before(
    folder: str, engine: VllmEngine, backend: FsdpBackend
) -> None:
    prompts = prompts_of([40])  # longer than a block of the cache
    copy(config_of(folder), backend, engine, 1)
    engine.submit(prompts, GREEDY, seed=0)
    engine.advance()
    for seed in range(4):
        learn(backend, seed)
    copy(config_of(folder), backend, engine, 2)
    while engine.num_running:
        engine.advance()
    found = engine.generate(prompts, GREEDY, seed=0)
    expected = HfEngine(backend.module, tiny_tokenizer()).generate(prompts, GREEDY, seed=0)
    assert found.completion_ids == expected.completion_ids
    np.testing.assert_allclose(found.rollout_logps.values, expected.rollout_logps.values, atol=1e-4)


# --- runs


@in_vllm_process
def test_a_run_learns_what_it_learns_with_merged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path / "model", head_dim=32)
    found = []
    keys = KEYS | {"lora_target_modules": ["all-linear"], "lora_kwargs": {}, "eval_dataset": None, "max_steps": 3}
    keys |= {"generation_batch_size": None, "num_iterations": 1, "num_train_epochs": 1, "warmup_steps": 0}
    for apart in (True, False):
        output = tmp_path / str(apart)
        with without_runtime():
            trainer = grpo.GRPOTrainer(grpo_config(model, output, **keys | {"vllm_enable_lora": apart}))
            trainer.train()
            engine: Any = trainer.generator.engine
            engine.close()
        assert engine.lora_rank == (3 if apart else 0)
        found.append([line for line in lines(output) if "loss" in line])
    assert len(found[0]) == 3
    for ours, theirs in zip(*found, strict=True):
        for name in ("reward", "loss", "grad_norm", "entropy", "kl", "completions/mean_length"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name


# --- mistakes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tuner_type": "full", "lora_kwargs": {}}, "needs an adapter, but tuner_type is full"),
        ({"rollout_engine": "hf"}, "needs rollout_engine: vllm"),
        ({"sleep_level": 2}, "only the adapter is sent. Set sleep_level: 1"),
        ({"vllm_engine_kwargs": {"load_format": "dummy"}}, "draws weights"),
        ({"lora_rank": 600}, "rank 512 at most, but lora_rank is 600"),
        ({"lora_target_modules": ["q_proj", "lm_head"]}, "holds lm_head.*vllm_enable_lora: false"),
        ({"lora_kwargs": {"modules_to_save": ["lm_head"]}}, "modules_to_save.*vLLM cannot run an adapter with"),
        ({"lora_kwargs": {"use_dora": True}}, "use_dora"),
        ({"lora_kwargs": {"bias": "lora_only"}}, "bias: 'lora_only'"),
        ({"lora_kwargs": {"init_lora_weights": "pissa"}}, "init_lora_weights: 'pissa'"),
        ({"lora_kwargs": {"rank_pattern": {"q_proj": 5}}}, "rank_pattern"),
    ],
)
def test_what_vllm_cannot_do_is_named_before_anything_starts(keys: dict[str, Any], message: str) -> None:
    if keys.get("tuner_type") == "full":
        defaults = {"lora_rank": 8, "lora_alpha": 32, "lora_target_modules": ["all-linear"]}
        keys = defaults | keys
    if keys.get("rollout_engine") == "hf":
        keys |= {"vllm_max_model_len": None, "vllm_max_num_seqs": None}
    with pytest.raises(ConfigError, match=message):
        config_of("nowhere", **keys)


@pytest.mark.parametrize(
    ("name", "targets", "told"),
    [
        ("glm4", ["all-linear"], r"layers gate_up_proj of glm4[.] .*lora_target_modules: \[down_proj, k_proj, o_proj"),
        ("lfm2", ["all-linear"], "layers in_proj of lfm2"),
        ("gemma4_text", ["all-linear"], "layers per_layer_model_projection of gemma4_text"),
        ("falcon_h1", ["q_proj", "in_proj"], r"layers in_proj of falcon_h1[.] .*lora_target_modules: \[q_proj\]"),
        ("nemotron_h", ["all-linear"], "layers in_proj, out_proj of nemotron_h"),
        *(
            (name, ["q_proj"], f"on a CPU with the experts of {name}")
            for name in ("qwen2_moe", "gpt_oss", "llama4_text")
        ),
        ("nemotron_h", ["q_proj"], None),
        ("glm4", ["q_proj", "down_proj"], None),
    ],
)
def test_an_adapter_that_vllm_would_not_run_whole_is_refused(
    name: str, targets: list[str], told: str | None, tmp_path: Path
) -> None:
    model = architectures.save(name, tmp_path / name)
    config = config_of(str(model), vllm_enable_lora=True, lora_target_modules=targets)
    with contextlib.nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        check_completions(config, None)


def test_ms_swifts_keys_are_read(tmp_path: Path) -> None:
    text = "use_vllm: true\ntrain_type: lora\nvllm_enable_lora: true\nvllm_max_lora_rank: 16\nsleep_level: 1\n"
    (tmp_path / "x.yaml").write_text(f"model: m\ndataset: d\n{text}")
    config = load_config(CompletionConfig, ["--config", str(tmp_path / "x.yaml")])
    assert (config.rollout_engine, config.tuner_type, config.vllm_enable_lora) == ("vllm", "lora", True)


def test_what_changes_only_how_an_adapter_is_trained_is_taken() -> None:
    config_of("nowhere", lora_kwargs={"use_dora": False, "bias": "none", "init_lora_weights": "gaussian"})
