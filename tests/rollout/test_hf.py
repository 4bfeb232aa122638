"""What the hf engine generates: greedy completions against a plain loop, stops, limits, sampling, seeds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from tests.golden.tiny import tiny_model, tiny_tokenizer
from tests.rollout.prompts import (
    EOS,
    LENGTHS,
    as_sequences,
    completions,
    plain_greedy,
    probabilities,
    prompts_of,
    save_decided,
)
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Prompts, Ragged
from trainers.rollout.base import Completion, Sampling
from trainers.rollout.hf.draws import Draws, uniform
from trainers.rollout.hf.engine import HfEngine

GREEDY = Sampling(max_completion_length=12, temperature=0.0)


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with peaked distributions, for greedy completions that rounding does not change."""
    return save_decided(tmp_path_factory.mktemp("decided"))


@pytest.fixture(scope="module")
def open_minded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with wider distributions, for sampling."""
    return save_decided(tmp_path_factory.mktemp("open_minded"), scale=4.0)


@pytest.fixture(scope="module")
def greedy_engine(decided: str) -> HfEngine:
    return HfEngine(decided, tiny_tokenizer())


@pytest.fixture(scope="module")
def sampling_engine(open_minded: str) -> HfEngine:
    return HfEngine(open_minded, tiny_tokenizer())


def greedy_loop(engine: HfEngine, limit: int, stops: list[int], penalty: float = 1.0) -> list[list[int]]:
    return [plain_greedy(engine.module, prompt, limit, stops, penalty) for prompt in prompts_of().prompt_ids]


def test_completions_are_given_out_as_soon_as_they_have_finished(decided: str) -> None:
    given: list[Completion] = []
    engine, widths, calls = HfEngine(decided, tiny_tokenizer(), batch_size=3), [], []
    engine.check_decoding()

    def note(_: Any, args: Any, kwargs: Any) -> None:
        calls.append(len(given))
        widths.append(len(kwargs["input_ids"]))

    engine.module.register_forward_pre_hook(note, with_kwargs=True)
    rollouts = engine.generate(prompts_of(), GREEDY, seed=0, finished=given.append)
    assert len(set(calls)) > 2  # so many were there as the model ran on
    assert max(widths) == 3
    given.sort(key=lambda completion: completion.number)
    assert [completion.number for completion in given] == list(range(len(rollouts)))
    assert [completion.ids.tolist() for completion in given] == [row.tolist() for row in rollouts.completion_ids]
    assert [completion.truncated for completion in given] == rollouts.truncated.tolist()
    assert Ragged.of([completion.logps for completion in given], np.float32) == rollouts.rollout_logps


# --- greedy


def test_greedy_completions_of_a_padded_batch_are_those_of_each_prompt_alone(greedy_engine: HfEngine) -> None:
    rollouts = greedy_engine.generate(prompts_of(), GREEDY, seed=0)
    expected = greedy_loop(greedy_engine, 12, [EOS])
    assert completions(rollouts) == expected
    assert rollouts.prompt_ids == prompts_of().prompt_ids
    assert len({tuple(row) for row in expected}) == len(LENGTHS), "equal completions would hide a wrong order"
    for i in range(len(LENGTHS)):
        alone = greedy_engine.generate(prompts_of()[i : i + 1], GREEDY, seed=0)
        assert completions(alone) == [expected[i]]
        np.testing.assert_allclose(alone.rollout_logps.values, rollouts.rollout_logps[i], atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 4, 6, 100])
def test_chunks_of_the_batch_give_the_same_greedy_completions(decided: str, batch_size: int) -> None:
    engine = HfEngine(decided, tiny_tokenizer(), batch_size=batch_size)
    engine.check_decoding()
    rows: list[int] = []
    engine.module.model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    assert completions(engine.generate(prompts_of(), GREEDY, seed=0)) == greedy_loop_of(decided)
    assert max(rows) == min(batch_size, len(LENGTHS))


def greedy_loop_of(folder: str) -> list[list[int]]:
    return greedy_loop(HfEngine(folder, tiny_tokenizer()), 12, [EOS])


@pytest.mark.parametrize("pad_token", ["<|pad|>", "<|im_end|>", None])
def test_padding_is_no_token_that_a_repetition_penalty_sees(greedy_engine: HfEngine, pad_token: str | None) -> None:
    """Where eos pads, a penalised eos would keep short prompts from ending."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad_token
    engine = HfEngine(greedy_engine.module, tokenizer)
    sampling = Sampling(max_completion_length=12, temperature=0.0, repetition_penalty=3.0)
    rollouts = engine.generate(prompts_of(), sampling, seed=0)
    assert completions(rollouts) == greedy_loop(greedy_engine, 12, [EOS], penalty=3.0)
    assert completions(rollouts) != greedy_loop(greedy_engine, 12, [EOS])


# --- where completions end


def test_a_completion_ends_with_its_first_stop_token_or_at_the_limit(greedy_engine: HfEngine) -> None:
    rollouts = greedy_engine.generate(prompts_of(), GREEDY, seed=0)
    for completion, truncated in zip(completions(rollouts), rollouts.truncated, strict=True):
        assert EOS not in completion[:-1]
        assert bool(truncated) == (completion[-1] != EOS)
        assert len(completion) == 12 or not truncated
    assert rollouts.rollout_logps.lengths.tolist() == rollouts.completion_ids.lengths.tolist()
    assert set(rollouts.truncated.tolist()) == {True, False}
    assert len(set(rollouts.completion_ids.lengths.tolist())) > 2


def test_every_stop_token_stops_whoever_named_it(decided: str, tmp_path: Path) -> None:
    """The tokenizer's eos, those of generation_config.json, and those of the call."""
    free = HfEngine(decided, tiny_tokenizer())
    longest = max(greedy_loop(free, 12, [EOS]), key=len)
    by_config, by_call = longest[3], longest[6]
    assert len({EOS, by_config, by_call}) == 3
    folder = Path(save_decided(tmp_path))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [260 - 1, by_config]}))
    engine = HfEngine(folder, tiny_tokenizer())
    for ids, stops in (((), [EOS, by_config, 259]), ((by_call, by_config), [EOS, by_config, 259, by_call])):
        sampling = Sampling(max_completion_length=12, temperature=0.0, stop_token_ids=ids)
        rollouts = engine.generate(prompts_of(), sampling, seed=0)
        assert completions(rollouts) == greedy_loop(free, 12, stops)
        assert rollouts.truncated.tolist() == [row[-1] not in stops for row in completions(rollouts)]
    only_call = free.generate(prompts_of(), Sampling(12, temperature=0.0, stop_token_ids=(by_call,)), seed=0)
    assert completions(only_call) == greedy_loop(free, 12, [EOS, by_call])


@pytest.mark.parametrize("pad_token", ["<|im_end|>", None])
def test_a_tokenizer_that_pads_with_eos_ends_completions_as_any_other(decided: str, pad_token: str | None) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad_token
    engine = HfEngine(decided, tokenizer)
    rollouts = engine.generate(prompts_of(), GREEDY, seed=0)
    assert engine.pad_token_id == EOS
    assert completions(rollouts) == greedy_loop(engine, 12, [EOS])
    assert set(rollouts.truncated.tolist()) == {True, False}


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_length_limit_is_exact(greedy_engine: HfEngine, limit: int) -> None:
    rollouts = greedy_engine.generate(prompts_of(), Sampling(limit, temperature=0.0), seed=0)
    assert completions(rollouts) == greedy_loop(greedy_engine, limit, [EOS])
    assert max(rollouts.completion_ids.lengths) == limit


def test_a_stop_token_in_the_prompt_stops_nothing(greedy_engine: HfEngine) -> None:
    prompts = Prompts(Ragged.of([[EOS, 7, EOS], [9, 8, 7, EOS, 5]], np.int64))
    rollouts = greedy_engine.generate(prompts, GREEDY, seed=0)
    expected = [plain_greedy(greedy_engine.module, prompt, 12, [EOS]) for prompt in prompts.prompt_ids]
    assert completions(rollouts) == expected
    assert max(len(row) for row in expected) > 1


def test_an_empty_batch_gives_no_rollouts(greedy_engine: HfEngine) -> None:
    rollouts = greedy_engine.generate(prompts_of()[:0], GREEDY, seed=0)
    assert len(rollouts) == 0
    full = greedy_engine.generate(prompts_of(), GREEDY, seed=0)
    assert type(full).concat([rollouts, full]) == full
    for name, column in full.columns().items():
        assert getattr(rollouts, name).dtype == column.dtype


def test_an_empty_prompt_is_refused_by_its_index(greedy_engine: HfEngine) -> None:
    with pytest.raises(ValueError, match=r"prompt 1 of 3"):
        greedy_engine.generate(Prompts(Ragged.of([[4], [], [5]], np.int64)), GREEDY, seed=0)


# --- sampling

TRUNCATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_k": 4},
    {"top_p": 0.7},
    {"temperature": 1.4, "min_p": 0.2},
    {"repetition_penalty": 1.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3},
    {"generation_kwargs": {"no_repeat_ngram_size": 2}},
]


@pytest.mark.parametrize("settings", TRUNCATIONS, ids=str)
def test_logps_are_those_the_backend_finds_for_the_same_tokens(
    sampling_engine: HfEngine, open_minded: str, settings: dict[str, Any]
) -> None:
    """Before any truncation of the distribution, which the trainer knows nothing of."""
    sampling = Sampling(max_completion_length=10, **settings)
    rollouts = sampling_engine.generate(prompts_of(), sampling, seed=3)
    found = FsdpBackend(open_minded).token_logps(
        as_sequences(rollouts), micro_batch_size=3, temperature=sampling.temperature
    )
    assert rollouts.rollout_logps.dtype == np.float32
    assert found.lengths.tolist() == rollouts.completion_ids.lengths.tolist()
    np.testing.assert_allclose(rollouts.rollout_logps.values, found.values, atol=1e-5)
    assert found.values.std() > 0.5


@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("top_p", 0.6), ("min_p", 0.3), (None, None)])
def test_truncation_leaves_the_tokens_its_definition_leaves(
    sampling_engine: HfEngine, name: str | None, value: float | None
) -> None:
    temperature = 1.3
    settings: dict[str, Any] = {} if name is None else {name: value}
    sampling = Sampling(max_completion_length=10, temperature=temperature, **settings)
    rollouts = sampling_engine.generate(prompts_of([5] * 16), sampling, seed=1)
    ranks, masses_before, shares_of_best = [], [], []
    for prompt, completion in zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True):
        for p_V, token in zip(
            probabilities(sampling_engine.module, prompt, completion, temperature), completion, strict=True
        ):
            better_V = p_V > p_V[token]
            ranks.append(int(better_V.sum()))
            masses_before.append(float(p_V[better_V].sum()))
            shares_of_best.append(float(p_V[token] / p_V.max()))
    kept = {"top_k": max(ranks) < 3, "top_p": max(masses_before) < 0.6, "min_p": min(shares_of_best) >= 0.3}
    assert kept[name] if name else not any(kept.values())
    assert max(ranks) > 0


def test_tokens_are_drawn_as_often_as_the_model_says(sampling_engine: HfEngine) -> None:
    prompt = prompts_of([6]).prompt_ids[0]
    many = Prompts(Ragged.of([prompt] * 4000, np.int64))
    rollouts = sampling_engine.generate(many, Sampling(1, temperature=1.5), seed=0)
    p_V = probabilities(sampling_engine.module, prompt, np.array([5]), 1.5)[0].double().numpy()
    frequencies_V = np.bincount(rollouts.completion_ids.values, minlength=260) / 4000
    assert np.abs(frequencies_V - p_V).max() < 5 * np.sqrt((p_V * (1 - p_V)).max() / 4000)
    assert 0.1 < p_V.max() < 0.9


def test_the_same_seed_gives_the_same_completions_whatever_was_drawn_before(sampling_engine: HfEngine) -> None:
    sampling = Sampling(max_completion_length=8)
    first = sampling_engine.generate(prompts_of(), sampling, seed=5)
    torch.rand(3)
    before = torch.get_rng_state()
    again = sampling_engine.generate(prompts_of(), sampling, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    other = sampling_engine.generate(prompts_of(), sampling, seed=6)
    assert first == again
    assert completions(first) != completions(other)


def test_equal_prompts_of_one_batch_draw_each_for_themselves(open_minded: str) -> None:
    """In one chunk or in several."""
    same = Prompts(Ragged.of([[9, 8, 7]] * 6, np.int64))
    for batch_size in (6, 2):
        engine = HfEngine(open_minded, tiny_tokenizer(), batch_size=batch_size)
        rollouts = engine.generate(same, Sampling(max_completion_length=8), seed=0)
        assert len({tuple(row) for row in completions(rollouts)}) == 6


def test_a_completion_depends_on_its_number_not_on_the_rows_beside_it(open_minded: str) -> None:
    engine = HfEngine(open_minded, tiny_tokenizer())
    prompts = dataclasses.replace(prompts_of(), numbers=np.arange(len(prompts_of())))
    sampling = Sampling(max_completion_length=8, top_k=30, temperature=1.2)
    together = engine.generate(prompts, sampling, seed=5)
    halves = [engine.generate(prompts[half], sampling, seed=5) for half in (slice(1), slice(1, None))]
    assert [*completions(halves[0]), *completions(halves[1])] == completions(together)
    engine.batch_size = 2
    assert completions(engine.generate(prompts, sampling, seed=5)) == completions(together)
    longer = Sampling(max_completion_length=12, top_k=30, temperature=1.2)
    cut = [row[:8] for row in completions(engine.generate(prompts, longer, seed=5))]
    assert cut == completions(together)


@pytest.mark.parametrize(
    "kwargs", [{}, {"typical_p": 0.5}, {"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.02}, {"top_h": 0.4}], ids=str
)
def test_draws_are_of_the_distribution_that_transformers_samples_from(kwargs: dict[str, Any]) -> None:
    """Its own processors for ``do_sample``, over the same logits: what they leave is what is drawn, as often."""
    sampling = Sampling(1, temperature=0.7, top_k=6, top_p=0.9, min_p=0.05, generation_kwargs=kwargs)
    scores_V = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 2
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=6, top_p=0.9, min_p=0.05, **kwargs)
    config._eos_token_tensor = None
    theirs = HfEngine(tiny_model(), tiny_tokenizer()).module._get_logits_processor(config, 3, device="cpu")
    ids_1T = torch.zeros(1, 3, dtype=torch.long)
    p_V = theirs(ids_1T, scores_V[None].clone()).softmax(-1)[0].numpy()
    draws = Draws(sampling, np.stack([uniform(0, number, 1) for number in range(4000)])).processors(
        3, torch.device("cpu")
    )
    left = draws(ids_1T.expand(4000, 3), scores_V.expand(4000, 12).clone())
    assert (left.isfinite().sum(1) == 1).all()
    frequencies_V = np.bincount(left.argmax(1).numpy(), minlength=12) / 4000
    assert (frequencies_V[p_V == 0] == 0).all()
    assert np.abs(frequencies_V - p_V).max() < 5 * np.sqrt(0.25 / 4000)


# --- settings


def test_defaults_in_the_folder_of_the_model_do_not_leak_in(open_minded: str, tmp_path: Path) -> None:
    folder = Path(save_decided(tmp_path, scale=4.0))
    leaks = {"temperature": 0.1, "top_k": 5, "max_length": 3, "repetition_penalty": 5.0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps({**leaks, "suppress_tokens": [*range(100)]}))
    sampling = Sampling(max_completion_length=8)
    plain = HfEngine(open_minded, tiny_tokenizer()).generate(prompts_of(), sampling, seed=0)
    assert HfEngine(folder, tiny_tokenizer()).generate(prompts_of(), sampling, seed=0) == plain


def test_further_generation_kwargs_are_used(greedy_engine: HfEngine) -> None:
    plain = greedy_engine.generate(prompts_of(), GREEDY, seed=0)
    assert min(plain.completion_ids.lengths) < 10
    sampling = Sampling(12, temperature=0.0, generation_kwargs={"min_new_tokens": 10})
    assert min(greedy_engine.generate(prompts_of(), sampling, seed=0).completion_ids.lengths) >= 10


def test_an_unknown_generation_kwarg_is_named_with_the_nearest(greedy_engine: HfEngine) -> None:
    sampling = Sampling(4, generation_kwargs={"no_repeat_ngram": 2})
    with pytest.raises(ValueError, match=r"'no_repeat_ngram' \(did you mean no_repeat_ngram_size\?\)$"):
        greedy_engine.generate(prompts_of(), sampling, seed=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("top_k", 3),
        ("stop_token_ids", [3]),
        ("max_new_tokens", 9),
        ("max_length", 9),
        ("do_sample", False),
        ("num_return_sequences", 2),
        ("num_beams", 2),
        ("pad_token_id", 1),
        ("eos_token_id", 7),
        ("return_dict_in_generate", True),
        ("prompt_lookup_num_tokens", 3),
        ("guidance_scale", 1.5),
        ("prefill_chunk_size", 2),
    ],
)
def test_a_generation_kwarg_that_has_its_own_key_or_breaks_the_logps_is_refused(
    greedy_engine: HfEngine, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=rf"generation_kwargs may not hold '{name}'"):
        greedy_engine.generate(prompts_of(), Sampling(4, generation_kwargs={name: value}), seed=0)


# --- a model that is shared with a trainer


def test_a_shared_model_is_left_as_it_was_found(decided: str) -> None:
    backend = FsdpBackend(decided, learning_rate=1e-3, num_training_steps=1)
    backend.module.model.layers[0].eval()  # a part that its owner froze
    defaults = GenerationConfig(top_k=7)
    backend.module.generation_config = defaults
    modes = [part.training for part in backend.module.modules()]
    engine = HfEngine(backend.module, tiny_tokenizer())
    engine.generate(prompts_of(), GREEDY, seed=0)
    assert [part.training for part in backend.module.modules()] == modes
    assert backend.module.generation_config is defaults
    assert not backend.module._forward_hooks
    assert all(weight.requires_grad and weight.grad is None for weight in backend.module.parameters())

    attention = backend.module.config._attn_implementation
    handle = backend.module.model.norm.register_forward_hook(lambda *_: 1 / 0)
    for further in ({}, {"no_repeat_ngram_size": 2}):  # in slots, and by transformers' generate
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompts_of(), dataclasses.replace(GREEDY, generation_kwargs=further), seed=0)
        assert [part.training for part in backend.module.modules()] == modes
        assert backend.module.generation_config is defaults
        assert backend.module.config._attn_implementation == attention != "slots"
        assert not backend.module._forward_hooks
        assert engine.num_running == 0
    handle.remove()


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_shared_model_in_training_generates_as_any_other(
    open_minded: str, sampling_engine: HfEngine, gradient_checkpointing: bool
) -> None:
    backend = FsdpBackend(
        open_minded,
        learning_rate=1e-3,
        num_training_steps=1,
        gradient_checkpointing=gradient_checkpointing,
        disable_dropout=False,
        model_init_kwargs={"attention_dropout": 0.5},
    )
    widths: list[int] = []
    backend.module.model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    sampling = Sampling(max_completion_length=8)
    shared = HfEngine(backend.module, tiny_tokenizer()).generate(prompts_of(), sampling, seed=4)
    apart = sampling_engine.generate(prompts_of(), sampling, seed=4)
    assert shared == dataclasses.replace(apart, policy_versions=None)  # a shared model has no version of its own
    wide = [width for width in widths if width > 2]  # at the start it tries to read on two tokens
    assert len(wide) == 1, "the cache must be in use"


def test_a_shared_float32_model_generates_under_bfloat16_autocast(open_minded: str) -> None:
    backend = FsdpBackend(open_minded, dtype="bfloat16", learning_rate=1e-3, num_training_steps=1)
    dtypes: set[torch.dtype] = set()
    backend.module.model.layers[0].mlp.up_proj.register_forward_hook(lambda _m, _i, output: dtypes.add(output.dtype))
    engine = HfEngine(backend.module, tiny_tokenizer(), dtype="bfloat16")
    rollouts = engine.generate(prompts_of(), Sampling(max_completion_length=10), seed=0)
    assert dtypes == {torch.bfloat16}
    assert {weight.dtype for weight in backend.module.parameters()} == {torch.float32}
    assert rollouts.rollout_logps.dtype == np.float32
    found = backend.token_logps(as_sequences(rollouts), micro_batch_size=6)
    assert np.abs(found.values - rollouts.rollout_logps.values).mean() < 0.1


def test_a_model_of_its_own_may_be_bfloat16(open_minded: str) -> None:
    engine = HfEngine(open_minded, tiny_tokenizer(), dtype="bfloat16")
    assert {weight.dtype for weight in engine.module.parameters()} == {torch.bfloat16}
    rollouts = engine.generate(prompts_of(), Sampling(max_completion_length=10), seed=0)
    assert rollouts.rollout_logps.dtype == np.float32
    exact = FsdpBackend(open_minded).token_logps(as_sequences(rollouts), micro_batch_size=6)
    assert np.abs(exact.values - rollouts.rollout_logps.values).mean() < 0.2


def test_weights_are_taken_in_place(decided: str, tmp_path: Path) -> None:
    other = HfEngine(save_decided(tmp_path, seed=1), tiny_tokenizer())
    engine = HfEngine(decided, tiny_tokenizer())
    before = completions(engine.generate(prompts_of(), GREEDY, seed=0))
    places = [weight.data_ptr() for weight in engine.module.parameters()]
    engine.load_weights(FsdpBackend(tmp_path).named_weights())
    after = completions(engine.generate(prompts_of(), GREEDY, seed=0))
    assert after == completions(other.generate(prompts_of(), GREEDY, seed=0)) != before
    assert places == [weight.data_ptr() for weight in engine.module.parameters()]
    with pytest.raises(ValueError, match="not given"):
        engine.load_weights([("model.norm.weight", torch.ones(64))])


def test_an_engine_of_a_model_of_texts_refuses_a_part_of_its_weights(decided: str) -> None:
    engine = HfEngine(decided, tiny_tokenizer(), gets_part=True)  # as beside backend: megatron
    named = dict(engine.module.state_dict())
    named.popitem()
    with pytest.raises(ValueError, match=r"weights of the model were not given"):
        engine.load_weights(named.items())
