"""Completions in slots beside transformers' ``generate`` and the trainer's pass: architectures, little room, flight."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.tiny.architectures import save
from rayhelper import ConfigError
from tests.golden.tiny import tiny_tokenizer
from tests.rollout.prompts import as_sequences, completions, prompts_of, save_decided
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Prompts, Ragged
from trainers.parts.engine import numbered
from trainers.rollout.base import Completion, ContinuousEngine, Sampling
from trainers.rollout.hf.engine import HfEngine

IN_SLOTS = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3", "glm4"),
    *("deepseek_v3", "gpt_oss", "olmo3", "smollm3", "granite", "cohere", "ministral", "ernie4_5", "seed_oss"),
    "hunyuan_v1_dense",
)
BY_GENERATE = {
    **dict.fromkeys(("qwen3_next", "lfm2", "falcon_h1", "nemotron_h"), "its cache has layers of"),
    "llama4_text": "invalid for input",  # it takes all rows of a batch to be equally long
}
LENGTHS = (3, 11, 1, 27, 5, 8)
GREEDY = Sampling(max_completion_length=12, temperature=0.0)


@pytest.fixture(scope="module")
def open_minded(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_decided(tmp_path_factory.mktemp("open_minded"), scale=4.0)


def by_generate(engine: HfEngine, prompts: Prompts, sampling: Sampling) -> list[list[int]]:
    """Each prompt alone by transformers' own ``generate``."""
    rows = []
    for prompt in prompts.prompt_ids:
        ids_1T = torch.from_numpy(np.array(prompt))[None]
        found = engine.module.generate(
            input_ids=ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            max_new_tokens=sampling.max_completion_length,
            do_sample=False,
            eos_token_id=sorted(engine.stop_token_ids),
        )
        rows.append(found[0, len(prompt) :].tolist())
    return rows


def is_in_slots(engine: HfEngine) -> bool:
    return engine._decoder is not None


@pytest.mark.parametrize("name", IN_SLOTS)
def test_an_architecture_completes_in_slots_what_generate_completes(name: str, tmp_path: Path) -> None:
    """Two slots for six prompts; greedy tokens, and log-probabilities of sampled ones beside the trainer's."""
    folder = save(name, tmp_path)
    backend = FsdpBackend(folder)
    engine = HfEngine(backend.module, tiny_tokenizer(), batch_size=2)
    engine.check_decoding()
    prompts = prompts_of(LENGTHS)
    assert completions(engine.generate(prompts, GREEDY, seed=0)) == by_generate(engine, prompts, GREEDY)
    assert is_in_slots(engine)
    sampled = engine.generate(prompts, Sampling(max_completion_length=16), seed=1)
    found = backend.token_logps(as_sequences(sampled), micro_batch_size=1)
    np.testing.assert_allclose(sampled.rollout_logps.values, found.values, atol=3e-6)
    assert is_in_slots(engine)


@pytest.mark.parametrize("name", BY_GENERATE)
def test_an_architecture_with_other_caches_goes_on_by_generate_and_says_so_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = HfEngine(save(name, tmp_path), tiny_tokenizer())
    prompts = prompts_of((4, 4))
    with caplog.at_level(logging.WARNING):
        rollouts = engine.generate(prompts, GREEDY, seed=0)
        assert engine.generate(prompts, GREEDY, seed=0) == rollouts
    assert completions(rollouts) == by_generate(engine, prompts, GREEDY)
    assert not is_in_slots(engine)
    said = [record.message for record in caplog.records if "transformers' own loop" in record.message]
    assert len(said) == 1
    assert BY_GENERATE[name] in said[0]


@pytest.mark.parametrize(
    "settings", [{}, {"top_p": 0.8, "top_k": 9, "min_p": 0.02, "repetition_penalty": 1.3}], ids=str
)
def test_sampled_completions_are_the_same_in_slots_and_by_generate(open_minded: str, settings: dict[str, Any]) -> None:
    sampling = Sampling(max_completion_length=10, temperature=0.9, **settings)
    inside, outside = HfEngine(open_minded, tiny_tokenizer(), batch_size=4), HfEngine(open_minded, tiny_tokenizer())
    outside._is_probed = True  # without slots
    expected = outside.generate(prompts_of(), sampling, seed=3)
    found = inside.generate(prompts_of(), sampling, seed=3)
    assert (is_in_slots(inside), is_in_slots(outside)) == (True, False)
    assert completions(found) == completions(expected)
    np.testing.assert_allclose(found.rollout_logps.values, expected.rollout_logps.values, atol=1e-5)


def test_a_full_cache_makes_prompts_wait_and_loses_none(open_minded: str) -> None:
    sampling = Sampling(max_completion_length=9)
    roomy, narrow = HfEngine(open_minded, tiny_tokenizer()), HfEngine(open_minded, tiny_tokenizer(), memory_share=0.0)
    narrow.generate(prompts_of((2,)), sampling, seed=2)
    widths: list[int] = []
    narrow.module.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    expected = roomy.generate(prompts_of(), sampling, seed=2)
    assert completions(narrow.generate(prompts_of(), sampling, seed=2)) == completions(expected)
    assert set(widths) == {1}, "there was room for one sequence"


def test_equal_prompts_are_read_once(open_minded: str) -> None:
    engine = HfEngine(open_minded, tiny_tokenizer())
    engine.check_decoding()
    shapes: list[tuple[int, ...]] = []
    engine.module.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    same = Prompts(Ragged.of([[9, 8, 7, 6]] * 6, np.int64))
    rollouts = engine.generate(same, Sampling(max_completion_length=8), seed=0)
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 3)]
    assert len({tuple(row) for row in completions(rollouts)}) == 6


def test_completions_under_a_lora_adapter_are_the_trainers(open_minded: str) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    backend = FsdpBackend(open_minded, learning_rate=1e-3, num_training_steps=1, lora=lora)
    with torch.no_grad():
        for name, weight in backend.module.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    engine = HfEngine(backend.module, tiny_tokenizer(), batch_size=3)
    sampled = engine.generate(prompts_of(), Sampling(max_completion_length=10), seed=1)
    assert is_in_slots(engine)
    found = backend.token_logps(as_sequences(sampled), micro_batch_size=6)
    np.testing.assert_allclose(sampled.rollout_logps.values, found.values, atol=1e-5)
    plain = HfEngine(open_minded, tiny_tokenizer()).generate(prompts_of(), Sampling(max_completion_length=10), seed=1)
    assert completions(plain) != completions(sampled)


# --- prompts that come and go, and weights that change meanwhile


def all_of(engine: HfEngine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.num_running:
        done |= {completion.number: completion for completion in engine.advance()}
    return done


@pytest.mark.parametrize("in_slots", [True, False])
def test_prompts_enter_while_others_run_and_draw_as_if_alone(open_minded: str, in_slots: bool) -> None:
    engine = HfEngine(open_minded, tiny_tokenizer(), batch_size=4)
    engine._is_probed = not in_slots
    assert isinstance(engine, ContinuousEngine)
    long, short = Sampling(max_completion_length=10), Sampling(max_completion_length=4)
    expected = [engine.generate(prompts_of(), long, seed=1), engine.generate(prompts_of((40, 2)), short, seed=7)]
    first = engine.submit(numbered(prompts_of()), long, seed=1)
    done = {completion.number: completion for completion in engine.advance()}
    second = engine.submit(
        numbered(prompts_of((40, 2))), short, seed=7
    )  # of longer rows than there are, and another limit
    assert 0.0 <= engine.kv_cache_usage() <= 1.0
    done |= all_of(engine)
    for numbers, rollouts in zip((first, second), expected, strict=True):
        assert [done[number].ids.tolist() for number in numbers] == completions(rollouts)
        assert [done[number].truncated for number in numbers] == rollouts.truncated.tolist()
    assert engine.num_running == 0
    engine.submit(prompts_of(), long, seed=1)
    engine.advance()
    engine.abort()
    assert engine.num_running == 0
    assert completions(engine.generate(prompts_of(), long, seed=1)) == completions(expected[0])


def test_weights_that_come_in_flight_draw_the_tokens_behind_them(open_minded: str) -> None:
    engine = HfEngine(open_minded, tiny_tokenizer(), batch_size=4)
    sampling = dataclasses.replace(GREEDY, stop_token_ids=())
    engine.stop_token_ids = {259}
    before = engine.generate(prompts_of(), sampling, seed=0)
    other = [(name, weight * 1.5) for name, weight in FsdpBackend(open_minded).named_weights()]
    calls: list[int] = []

    def between() -> None:
        calls.append(engine.num_running)
        if len(calls) == 2:
            engine.load_weights(other, version=5)

    rollouts = engine.generate(prompts_of(), sampling, seed=0, between=between, interval=2)
    assert rollouts.policy_versions is not None
    assert len(calls) > 4
    versions = [row.tolist() for row in rollouts.policy_versions]
    assert {tuple(sorted(set(row))) for row in versions} == {(0, 5), (5,)}  # those that waited began with the new ones
    backends = {0: FsdpBackend(open_minded), 5: FsdpBackend(open_minded)}
    with torch.no_grad():
        for weight in backends[5].module.parameters():
            weight.mul_(1.5)
    logps = {at: backend.token_logps(as_sequences(rollouts), micro_batch_size=6) for at, backend in backends.items()}
    for row, drawn in enumerate(versions):
        split = drawn.index(5)
        np.testing.assert_allclose(rollouts.rollout_logps[row][:split], logps[0][row][:split], atol=1e-5)
        assert completions(before)[row][:split] == completions(rollouts)[row][:split]
        if not split:  # logits of weights that are half as large again differ by more in their last bits
            np.testing.assert_allclose(rollouts.rollout_logps[row], logps[5][row], atol=3e-5)
        assert rollouts.policy_versions.lengths[row] == len(rollouts.completion_ids[row])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_biases_of_single_tokens_are_those_of_transformers(open_minded: str, temperature: float) -> None:
    """In slots what transformers' own processors leave of each step, and by its loop too."""
    kwargs = {"logit_bias": {"40": 4.0, 41: -3.0}, "suppress_tokens": [42, 43], "min_new_tokens": 4}
    sampling = Sampling(12, temperature=temperature, repetition_penalty=1.3, generation_kwargs=kwargs)
    engine = HfEngine(open_minded, tiny_tokenizer(), batch_size=2)
    in_slots = engine.generate(prompts_of(LENGTHS), sampling, seed=3)
    assert is_in_slots(engine)
    assert not engine._has_told
    engine._decoder = None
    by_loop = engine.generate(prompts_of(LENGTHS), sampling, seed=3)
    assert completions(in_slots) == completions(by_loop)
    free = dataclasses.replace(sampling, generation_kwargs={})
    assert completions(in_slots) != completions(engine.generate(prompts_of(LENGTHS), free, seed=3))
    wrong = dataclasses.replace(sampling, generation_kwargs={"logit_bias": {99999: 1.0}})
    with pytest.raises(ConfigError, match="generation_kwargs names token 99999"):
        engine.generate(prompts_of(LENGTHS), wrong, seed=3)


def test_a_completion_depends_on_no_padding_where_generate_reads_it(open_minded: str) -> None:
    """Pads of the short prompt would be the pair of equal tokens that may not come again."""
    kwargs = {"no_repeat_ngram_size": 2, "sequence_bias": [[[7], 30.0]]}
    engine = HfEngine(open_minded, tiny_tokenizer())
    prompts = Prompts(Ragged.of([[7], [9, 8, 6, 5], [7]], np.int64), numbers=np.arange(3))
    drawn = engine.generate(prompts, Sampling(6, generation_kwargs=kwargs), seed=3)
    assert [row[0] for row in completions(drawn)] == [7, 7, 7]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "deepseek_v3"])
def test_the_next_turn_of_an_episode_is_read_behind_what_its_row_has(name: str, tmp_path: Path) -> None:
    """Three episodes of three turns: what is drawn is what a new engine draws; with new weights all is read again."""
    folder = save(name, tmp_path)
    engine = HfEngine(folder, tiny_tokenizer(), batch_size=4)
    read: list[int] = []
    engine.module.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    contexts = {episode: [5 + episode, *range(20, 30 + 2 * episode)] for episode in range(3)}

    def play(turn: int, *, new: HfEngine) -> None:
        sampling = Sampling(4 + turn, stop_token_ids=tuple(range(100, 110)))
        numbers = {}
        for episode, context in contexts.items():
            (number,) = engine.submit(Prompts(Ragged.of([context], np.int64)), sampling, seed=10 * turn + episode)
            numbers[number] = episode
        while engine.num_running:
            for found in engine.advance():
                episode = numbers[found.number]
                (number,) = new.submit(
                    Prompts(Ragged.of([found.prompt_ids], np.int64)), sampling, seed=10 * turn + episode
                )
                while new.num_running:
                    (*_, expected) = new.advance() or [None]
                new.abort()
                assert found.ids.tolist() == expected.ids.tolist()
                np.testing.assert_allclose(found.logps, expected.logps, atol=2e-5)
                contexts[episode] = [*found.prompt_ids, *found.ids, *range(40, 43 + episode)]

    other = HfEngine(folder, tiny_tokenizer())
    play(0, new=other)
    assert max(read) > 10
    read.clear()
    play(1, new=other)
    play(2, new=other)
    assert max(read) <= 6, "what the episode wrote, and the last token"
    changed = [(name, weight * 1.05) for name, weight in engine.module.state_dict().items()]
    engine.load_weights(changed)
    read.clear()
    newer = HfEngine(folder, tiny_tokenizer())
    newer.load_weights(changed)
    play(3, new=newer)
    assert max(read) > 20
