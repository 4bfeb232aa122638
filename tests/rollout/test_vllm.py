"""What the vllm engine generates and scores, against the hf engine and the backend; weights that change; its mistakes.

One engine serves the module: each takes seconds to start.
"""

from __future__ import annotations

import dataclasses
import signal
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from rayhelper import ConfigError
from tests.golden.tiny import tiny_tokenizer
from tests.rollout.prompts import as_sequences, plain_greedy, prompts_of, save_decided
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Prompts, Ragged
from trainers.parts.completion_metrics import rollout_metrics
from trainers.parts.fingerprints import fingerprints
from trainers.rollout.base import Completion, Sampling
from trainers.rollout.hf.engine import HfEngine
from trainers.rollout.vllm.core import Core
from trainers.rollout.vllm.engine import VllmEngine
from trainers.rollout.vllm.settings import checked_engine_kwargs

pytestmark = pytest.mark.xdist_group("vllm")

GREEDY = Sampling(max_completion_length=12, temperature=0.0)
WIDTH = {"head_dim": 32}  # the smallest that vLLM's attention takes
BLOCK = 32  # tokens that the cache keeps together
SETTINGS = {"max_model_len": 512, "max_num_seqs": 8, "block_size": BLOCK}  # fewer places than prompts: some wait


def save(folder: Path, **settings: Any) -> str:
    return save_decided(folder, **WIDTH, **settings)


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("decided"))


@pytest.fixture(scope="module")
def open_minded(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("open_minded"), scale=4.0)


@pytest.fixture(scope="module")
def shared(decided: str) -> Iterator[VllmEngine]:
    engine = VllmEngine(decided, tiny_tokenizer(), engine_kwargs=SETTINGS)
    yield engine
    engine.close()


def with_weights(engine: VllmEngine, model: str) -> VllmEngine:
    engine.load_weights(FsdpBackend(model).named_weights())
    return engine


@pytest.fixture
def greedy_engine(shared: VllmEngine, decided: str) -> VllmEngine:
    return with_weights(shared, decided)


@pytest.fixture
def sampling_engine(shared: VllmEngine, open_minded: str) -> VllmEngine:
    return with_weights(shared, open_minded)


# --- completions


def test_greedy_completions_are_those_of_the_hf_engine(greedy_engine: VllmEngine, decided: str) -> None:
    expected = HfEngine(decided, tiny_tokenizer()).generate(prompts_of(), GREEDY, seed=0)
    found = greedy_engine.generate(prompts_of(), GREEDY, seed=0)
    assert found.prompt_ids == expected.prompt_ids
    assert found.completion_ids == expected.completion_ids
    assert found.truncated.tolist() == expected.truncated.tolist()
    np.testing.assert_allclose(found.rollout_logps.values, expected.rollout_logps.values, atol=1e-4)


def test_a_completion_ends_with_a_stop_token_that_it_has(greedy_engine: VllmEngine, decided: str) -> None:
    free = greedy_engine.generate(prompts_of(), GREEDY, seed=0)
    longest = max(free.completion_ids, key=len)
    stop = int(longest[3])
    sampling = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
    found = greedy_engine.generate(prompts_of(), sampling, seed=0)
    expected = HfEngine(decided, tiny_tokenizer()).generate(prompts_of(), sampling, seed=0)
    assert found.completion_ids == expected.completion_ids
    assert found.truncated.tolist() == expected.truncated.tolist()
    assert any(len(row) and row[-1] == stop for row in found.completion_ids)


def test_no_prompts_give_no_rollouts_and_an_empty_one_is_refused(shared: VllmEngine) -> None:
    assert len(shared.generate(prompts_of([]), GREEDY, seed=0)) == 0
    with pytest.raises(ValueError, match="prompt 1 of 2 has no tokens"):
        shared.generate(Prompts(Ragged.of([[5], []], np.int64)), GREEDY, seed=0)


def test_a_prompt_that_leaves_no_room_for_its_completion_is_told(greedy_engine: VllmEngine) -> None:
    assert SETTINGS["max_model_len"] == 512
    sampling = dataclasses.replace(GREEDY, max_completion_length=2)
    fits = greedy_engine.generate(prompts_of([3, 510]), sampling, seed=0)
    assert fits.completion_ids.lengths.max() == 2
    told = r"^the longest prompt has 511 tokens\. With a completion of 2 .*, 512\. Set max_prompt_length"
    with pytest.raises(ConfigError, match=told):
        greedy_engine.generate(prompts_of([3, 511, 4]), sampling, seed=0)
    assert not greedy_engine.num_running
    assert greedy_engine.generate(prompts_of([3, 510]), sampling, seed=0) == fits


TRUNCATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.4, "top_k": 5},
    {"top_p": 0.7},
    {"temperature": 1.4, "min_p": 0.2},
    {"repetition_penalty": 1.8},
    {"temperature": 0.7, "generation_kwargs": {"logit_bias": {9: 2.0}, "presence_penalty": 1.0}},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("settings", TRUNCATIONS, ids=str)
def test_logps_are_those_the_backend_finds_for_the_same_tokens(
    sampling_engine: VllmEngine, open_minded: str, settings: dict[str, Any]
) -> None:
    sampling = Sampling(max_completion_length=10, **settings)
    rollouts = sampling_engine.generate(prompts_of(), sampling, seed=3)
    found = FsdpBackend(open_minded).token_logps(
        as_sequences(rollouts), micro_batch_size=3, temperature=sampling.temperature
    )
    np.testing.assert_allclose(rollouts.rollout_logps.values, found.values, atol=1e-4)
    assert found.values.std() > 0.5


def test_the_seed_decides_what_is_drawn(sampling_engine: VllmEngine) -> None:
    sampling = Sampling(max_completion_length=8)
    same = Prompts(Ragged.of([[5, 6, 7]] * 6, np.int64))
    first = sampling_engine.generate(same, sampling, seed=1)
    assert sampling_engine.generate(same, sampling, seed=1) == first
    assert sampling_engine.generate(same, sampling, seed=2).completion_ids != first.completion_ids
    assert len({tuple(row) for row in first.completion_ids}) > 1  # not each prompt alike


def test_the_length_of_the_model_ends_a_completion_where_sampling_clips(sampling_engine: VllmEngine) -> None:
    length = sampling_engine.max_model_len
    clipped = dataclasses.replace(GREEDY, clips=True, generation_kwargs={"min_tokens": 3})
    rollouts = sampling_engine.generate(Prompts(Ragged.of([[5] * (length - 3), [5, 6]], np.int64)), clipped, seed=1)
    assert (len(rollouts.completion_ids[0]), bool(rollouts.truncated[0])) == (3, True)
    free = dataclasses.replace(clipped, clips=False)
    alone = sampling_engine.generate(Prompts(Ragged.of([[5, 6]], np.int64)), free, seed=1)
    assert rollouts.completion_ids[1].tolist() == alone.completion_ids[0].tolist()
    with pytest.raises(ConfigError, match="there is no room for a completion"):
        sampling_engine.submit(Prompts(Ragged.of([[5] * length], np.int64)), clipped, seed=1)


def test_truncation_leaves_only_the_likeliest(sampling_engine: VllmEngine) -> None:
    rollouts = sampling_engine.generate(prompts_of(), Sampling(max_completion_length=10, top_k=1), seed=5)
    greedy = sampling_engine.generate(prompts_of(), dataclasses.replace(GREEDY, max_completion_length=10), seed=0)
    assert rollouts.completion_ids == greedy.completion_ids


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize(
    "added",
    [{"presence_penalty": 0.9}, {"frequency_penalty": 0.5}, {"logit_bias": {str(token): 0.9 for token in range(125)}}],
    ids=lambda added: next(iter(added)),
)
def test_what_is_added_to_logits_is_divided_by_the_temperature_with_them(
    sampling_engine: VllmEngine, added: dict[str, Any], temperature: float
) -> None:
    """So that the likeliest tokens are the same at every temperature."""
    greedy = dataclasses.replace(GREEDY, repetition_penalty=1.1, generation_kwargs=added)
    expected = sampling_engine.generate(prompts_of(), greedy, seed=0)
    likeliest = dataclasses.replace(greedy, temperature=temperature, top_k=1)
    assert sampling_engine.generate(prompts_of(), likeliest, seed=0).completion_ids == expected.completion_ids
    plain = sampling_engine.generate(prompts_of(), dataclasses.replace(greedy, generation_kwargs={}), seed=0)
    assert plain.completion_ids != expected.completion_ids


def test_the_share_of_the_kv_cache_in_use_is_told(sampling_engine: VllmEngine) -> None:
    few = sampling_engine.generate(prompts_of([300]), GREEDY, seed=0).kv_cache_usage
    many = sampling_engine.generate(prompts_of([300] * 6), GREEDY, seed=0).kv_cache_usage
    assert few is not None
    assert many is not None
    assert 0 < few[0] < many[0] <= 1
    assert many.tolist() == [many[0]] * 6
    values = rollout_metrics(sampling_engine.generate(prompts_of([300]), GREEDY, seed=0)).values()
    assert values["rollout/kv_cache_usage"] == few[0]


def test_completions_are_given_out_while_others_are_written(greedy_engine: VllmEngine) -> None:
    given: list[tuple[Completion, int]] = []

    def finished(completion: Completion) -> None:
        given.append((completion, greedy_engine.num_running))

    greedy_engine.generate(prompts_of()[:1], GREEDY, seed=0)  # places are counted from 0 all the same
    rollouts = greedy_engine.generate(prompts_of(), GREEDY, seed=0, finished=finished)
    first, last = given[0], given[-1]
    assert first[1] > last[1] == 0
    assert len(first[0].ids) < len(last[0].ids)
    assert sorted(completion.number for completion, _ in given) == list(range(len(rollouts)))
    for completion, _ in given:
        assert completion.ids.tolist() == rollouts.completion_ids[completion.number].tolist()


class StoppedError(BaseException):
    pass


def test_a_signal_stops_a_generation_behind_a_whole_step(greedy_engine: VllmEngine) -> None:
    expected = greedy_engine.generate(prompts_of(), GREEDY, seed=0)
    executor = greedy_engine.engine.model_executor
    execute = executor.execute_model

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        output = execute(*args, **kwargs)
        signal.raise_signal(signal.SIGUSR1)  # half of the step is done
        return output

    def stop(*_: Any) -> None:
        raise StoppedError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with patch.object(executor, "execute_model", interrupted), pytest.raises(StoppedError):
            greedy_engine.generate(prompts_of(), GREEDY, seed=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert greedy_engine.num_running == 0
    assert greedy_engine.generate(prompts_of(), GREEDY, seed=0) == expected


# --- one step at a time


def drain(engine: VllmEngine) -> list[Completion]:
    """What has finished, in that order."""
    done: list[Completion] = []
    while engine.num_running:
        done += engine.advance()
    return done


def test_prompts_enter_while_others_run_and_leave_when_they_have_finished(greedy_engine: VllmEngine) -> None:
    alone = greedy_engine.generate(prompts_of(), GREEDY, seed=0)
    longest = int(np.argmax(alone.completion_ids.lengths))
    early = greedy_engine.submit(prompts_of()[longest : longest + 1], GREEDY, seed=0)
    done = [*greedy_engine.advance(), *greedy_engine.advance()]
    assert not done
    late = greedy_engine.submit(prompts_of()[:3], dataclasses.replace(GREEDY, max_completion_length=2), seed=0)
    assert greedy_engine.num_running == 4
    done = drain(greedy_engine)
    assert [completion.number for completion in done] == [*late, *early]
    assert done[-1].ids.tolist() == alone.completion_ids[longest].tolist()
    for completion, row in zip(done[:-1], alone.completion_ids, strict=False):
        assert completion.ids.tolist() == row[:2].tolist()


def test_running_completions_go_on_with_new_weights_and_tokens_carry_their_version(
    greedy_engine: VllmEngine, decided: str, tmp_path: Path
) -> None:
    other = save(tmp_path, seed=1)
    prompt = prompts_of()[:1].prompt_ids[0]
    models = [FsdpBackend(folder).module for folder in (decided, other)]
    version = greedy_engine.version
    greedy_engine.submit(prompts_of()[:1], dataclasses.replace(GREEDY, max_completion_length=6), seed=0)
    while len(next(iter(greedy_engine._running.values())).ids) < 3:
        greedy_engine.advance()
    with_weights(greedy_engine, other)
    completion = drain(greedy_engine)[0]
    before, after = completion.ids[:3].tolist(), completion.ids[3:].tolist()
    assert completion.versions.tolist() == [version] * 3 + [version + 1] * len(after)
    assert before == plain_greedy(models[0], prompt, 3, [])
    cache = models[0](torch.tensor([[*prompt, *before[:2]]]), use_cache=True).past_key_values
    expected = before[2:]  # new weights, on keys and values of the old ones
    while len(expected) < 1 + len(after):
        logits_V = models[1](torch.tensor([expected[-1:]]), past_key_values=cache).logits[0, -1]
        expected.append(int(logits_V.argmax()))
    assert after == expected[1:]
    assert after


def test_tokens_carry_the_version_that_drew_them_when_steps_are_planned_ahead(
    sampling_engine: VllmEngine, open_minded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs. One completion after another: their steps, counted, say which weights drew each token."""
    core = sampling_engine.engine.engine_core.engine_core
    monkeypatch.setattr(core, "batch_queue_size", 2)
    monkeypatch.setattr(core, "batch_queue", deque(maxlen=2))
    monkeypatch.setattr(core, "step_fn", core.step_with_batch_queue)
    monkeypatch.setattr(sampling_engine, "stop_token_ids", set())
    weights = dict(FsdpBackend(open_minded).named_weights())
    drawn: list[int] = []  # versions
    steps = count(1)
    execute = sampling_engine.engine.model_executor.execute_model

    def executed(planned: Any, **settings: Any) -> Any:
        drawn.extend([sampling_engine.version] * len(planned.num_scheduled_tokens))
        return execute(planned, **settings)

    def load() -> None:
        if not next(steps) % 9:
            sampling_engine.load_weights(weights.items())

    monkeypatch.setattr(sampling_engine.engine.model_executor, "execute_model", executed)
    for between in (load, None):
        for _ in range(3):
            drawn.clear()
            prompt = Prompts(Ragged.of([[5, 6]], np.int64))
            rollouts = sampling_engine.generate(prompt, Sampling(60), seed=1, between=between)
            assert rollouts.policy_versions is not None
            assert rollouts.policy_versions[0].tolist() == drawn[:60]
            assert (len(set(drawn)) > 5) == (between is load)


# --- scores


def test_scores_are_those_of_the_backend(sampling_engine: VllmEngine, open_minded: str) -> None:
    sequences = as_sequences(sampling_engine.generate(prompts_of(), Sampling(max_completion_length=10), seed=3))
    backend = FsdpBackend(open_minded)
    settings: dict[str, Any] = {"temperature": 0.8}
    logps = backend.token_logps(sequences, micro_batch_size=4, **settings)
    ids, top = backend.top_logps(sequences, 5, micro_batch_size=4, **settings)
    np.testing.assert_allclose(sampling_engine.token_logps(sequences, **settings).values, logps.values, atol=1e-4)
    found_ids, found_top = sampling_engine.top_logps(sequences, 5, **settings)
    assert found_ids.offsets.tolist() == ids.offsets.tolist()
    assert np.array_equal(found_ids.values, ids.values)
    np.testing.assert_allclose(found_top.values, top.values, atol=1e-4)
    nothing = sampling_engine.top_logps(sequences[:0], 5)
    assert nothing[0].values.shape == (0, 5)
    with pytest.raises(ConfigError, match="max_logprobs is 20"):
        sampling_engine.top_logps(sequences, 21)


# --- weights


def test_loaded_weights_are_used_and_nothing_cached_of_the_old_ones(
    sampling_engine: VllmEngine, tmp_path: Path
) -> None:
    long = prompts_of([320, 300])  # longer than a block of the cache
    old = sampling_engine.generate(long, GREEDY, seed=0)
    other = save(tmp_path, seed=1, scale=4.0)
    with_weights(sampling_engine, other)
    found = sampling_engine.generate(long, GREEDY, seed=0)
    expected = HfEngine(other, tiny_tokenizer()).generate(long, GREEDY, seed=0)
    assert found.completion_ids == expected.completion_ids
    assert found.completion_ids != old.completion_ids
    np.testing.assert_allclose(found.rollout_logps.values, expected.rollout_logps.values, atol=1e-4)


def test_weights_loaded_while_completions_run_share_nothing_cached_with_the_old_ones(
    sampling_engine: VllmEngine, tmp_path: Path
) -> None:
    begins_alike = np.random.default_rng(0).integers(4, 250, 2 * BLOCK).tolist()
    prompts = Prompts(Ragged.of([[*begins_alike, 5 + row] for row in range(SETTINGS["max_num_seqs"] + 2)], np.int64))
    other = save(tmp_path, seed=1, scale=4.0)
    old = sampling_engine.version

    def load() -> None:
        if sampling_engine.version == old:
            with_weights(sampling_engine, other)

    mixed = sampling_engine.generate(prompts, GREEDY, seed=0, between=load)
    versions = [set(row.tolist()) for row in mixed.policy_versions]
    assert {old, old + 1} in versions
    assert versions[-2:] == [{old + 1}] * 2  # the others had taken all places
    expected = HfEngine(other, tiny_tokenizer()).generate(prompts, GREEDY, seed=0)
    for row in (-2, -1):
        assert mixed.completion_ids[row].tolist() == expected.completion_ids[row].tolist()
        np.testing.assert_allclose(mixed.rollout_logps[row], expected.rollout_logps[row], atol=1e-4)
    later = sampling_engine.generate(prompts, GREEDY, seed=0)
    assert later.completion_ids == expected.completion_ids
    np.testing.assert_allclose(later.rollout_logps.values, expected.rollout_logps.values, atol=1e-4)


def test_prompts_of_the_same_weights_share_what_is_cached(sampling_engine: VllmEngine) -> None:
    prompts = prompts_of([2 * BLOCK + 1])
    pool = sampling_engine.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    with patch.object(pool, "touch", wraps=pool.touch) as found:  # blocks that were there
        sampling_engine.generate(prompts, GREEDY, seed=0)
        assert not any(call.args[0] for call in found.call_args_list)
        sampling_engine.generate(prompts, GREEDY, seed=0)
        assert any(call.args[0] for call in found.call_args_list)


def test_fingerprints_tell_whether_the_engine_has_the_trainers_weights(greedy_engine: VllmEngine, decided: str) -> None:
    weights = dict(FsdpBackend(decided).named_weights())
    assert greedy_engine.fingerprints() == fingerprints(weights.items())
    name = "model.layers.1.self_attn.k_proj.weight"
    wrong: dict[str, torch.Tensor] = {
        "stale": weights[name] * 1.0001,
        "rounded": weights[name].bfloat16().float(),
        "columns in another order": weights[name].flip(1),
    }
    for reason, weight in wrong.items():
        greedy_engine.load_weights([(name, weight)])
        found, expected = greedy_engine.fingerprints(), fingerprints(weights.items())
        assert {layer for layer in expected if found[layer] != expected[layer]} == {"model.layers.1"}, reason
    with_weights(greedy_engine, decided)
    assert greedy_engine.fingerprints() == fingerprints(weights.items())


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_an_exported_folder_is_loaded_by_vllm(tuner: str, decided: str, tmp_path: Path) -> None:
    lora = {"r": 4, "lora_alpha": 64, "target_modules": "all-linear", "init_lora_weights": False}
    backend = FsdpBackend(decided, learning_rate=1e-3, num_training_steps=1, lora=lora if tuner == "lora" else None)
    backend.export(tmp_path, tiny_tokenizer())
    engine = VllmEngine(str(tmp_path), tiny_tokenizer(), engine_kwargs=SETTINGS)
    try:
        found = engine.generate(prompts_of(), GREEDY, seed=0)
        assert engine.fingerprints() == fingerprints(backend.named_weights())
    finally:
        engine.close()
    expected = HfEngine(backend.module, tiny_tokenizer()).generate(prompts_of(), GREEDY, seed=0)
    assert found.completion_ids == expected.completion_ids
    np.testing.assert_allclose(found.rollout_logps.values, expected.rollout_logps.values, atol=1e-4)


# --- memory, on an engine core that only takes notes: there is none that sleeps on a CPU


class Notes:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def note(*values: Any, **named: Any) -> None:
            self.calls.append(" ".join([name, *map(str, named.values())]))

        return note


def asleep(level: int) -> tuple[VllmEngine, Notes]:
    engine, notes = VllmEngine.__new__(VllmEngine), Notes()
    vars(notes)["engine_core"] = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=()))
    core = Core(notes, on_cpu=True)
    notes.calls.clear()
    engine.__dict__ |= {
        "engine": notes,
        "core": core,
        "sleep_level": level,
        "processes": None,
        "lora_rank": 0,
        "version": 0,
        "_running": {},
        "_launched": [],
        "_is_asleep": False,
        "_has_weights": True,
    }
    engine.sleep()
    return engine, notes


def test_level_2_never_generates_before_its_weights_are_loaded() -> None:
    engine, notes = asleep(2)
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        engine.submit(prompts_of(), GREEDY, seed=0)
    engine.wake("weights")
    engine.wake("kv_cache")
    with pytest.raises(RuntimeError, match="call load_weights first"):
        engine.submit(prompts_of(), GREEDY, seed=0)
    engine.load_weights([])
    engine._check_awake()
    assert notes.calls == [
        "reset_prefix_cache",
        "sleep 2",
        "wake_up ['weights']",
        "wake_up ['kv_cache']",
        "apply_model",
        "reset_prefix_cache",
    ]


def test_level_1_keeps_its_weights() -> None:
    engine, _ = asleep(1)
    engine.wake("weights")
    engine.wake("kv_cache")
    engine._check_awake()


# --- mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_kwargs": {"max_num_seq": 3}}, "no field 'max_num_seq'.*max_num_seqs"),
        ({"engine_kwargs": {"dtype": "auto"}}, "may not hold 'dtype'"),
        ({"engine_kwargs": {"max_num_seqs": "abc"}}, "vllm_engine_kwargs: max_num_seqs must be a whole number.*'abc'"),
        ({"engine_kwargs": {"enforce_eager": 3}}, "vllm_engine_kwargs: enforce_eager must be true or false, got 3"),
        ({"engine_kwargs": {"kv_cache_dtype": "fp9"}}, "vllm_engine_kwargs: kv_cache_dtype must be one of auto.*'fp9'"),
        (
            {"engine_kwargs": {"pipeline_parallel_size": 2}},
            "pipeline_parallel_size is 2, but an engine has only the wor",
        ),
        ({"engine_kwargs": {"data_parallel_size": 2}}, "data_parallel_size is 2.*Remove it"),
        (
            {"engine_kwargs": {"quantization": "nosuch"}},
            "vllm_engine_kwargs: quantization must be one of .*fp8.*nosuch",
        ),
        ({"sleep_level": 1}, "sleep_level=1: vLLM frees only memory of GPUs"),
        ({"dtype": "bfloat16"}, "only weights in float32"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_loaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmEngine("nowhere", tiny_tokenizer(), **settings)


def test_values_of_engine_fields_are_those_that_vllm_takes() -> None:
    given: dict[str, Any] = {"max_num_seqs": 8, "gpu_memory_utilization": 1, "quantization": "fp8", "block_size": None}
    given |= {"pipeline_parallel_size": 1, "load_format": "dummy", "attention_config": {"backend": "TRITON_ATTN"}}
    assert checked_engine_kwargs(given) == given
    assert checked_engine_kwargs({"max_num_seqs": "8"}) == {"max_num_seqs": 8}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"presence_penality": 1.0}, "no field 'presence_penality'.*presence_penalty"),
        ({"temperature": 1.0}, "write the key temperature in addition to generation_kwargs"),
        ({"stop_token_ids": [5]}, "write the key stop_token_ids in addition to generation_kwargs"),
        ({"stop": ["x"]}, "write its id as the key stop_token_ids"),
        ({"max_tokens": 3}, "max_completion_length"),
        ({"bad_words": ["x"]}, "no tokenizer here .* with logit_bias"),
        ({"structured_outputs": {"choice": ["y"]}}, "no tokenizer here"),
        ({"thinking_token_budget": 3}, "no tokenizer here"),
        ({"skip_special_tokens": False}, "no text is made"),
        ({"logprob_token_ids": [5]}, "log-probabilities of the sampled tokens"),
        ({"min_tokens": 13}, "min_tokens must be less than or equal to max_tokens=12"),
        ({"presence_penalty": 2.1}, r"presence_penalty is 2\.1.* At temperature 1 the limit is 2"),
    ],
)
def test_wrong_generation_kwargs_are_named(greedy_engine: VllmEngine, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        greedy_engine.generate(prompts_of(), dataclasses.replace(GREEDY, generation_kwargs=given), seed=0)
