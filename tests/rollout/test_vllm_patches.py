"""Which steps start vLLM's Triton attention otherwise; and what allocation skips would have changed nothing."""

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden.tiny import tiny_tokenizer
from tests.rollout.prompts import prompts_of, save_decided
from trainers.rollout import vllm_patches
from trainers.rollout.base import Sampling
from trainers.rollout.vllm import VllmEngine

pytestmark = pytest.mark.xdist_group("vllm")

STEP = {
    "query_ptr": torch.zeros(8, 4, 128),
    "seq_lens_ptr": torch.zeros(8),
    "key_cache_ptr": torch.zeros(1, dtype=torch.bfloat16),
    "HEAD_SIZE": 128,
    "TILE_SIZE": 32,
}


class Kernel:
    """Keeps how it was started."""

    cache = "its own"

    def __init__(self) -> None:
        self.started: list[tuple[Any, dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **arguments: self.started.append((grid, arguments))


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.attention.ops import triton_unified_attention

    monkeypatch.setattr(triton_unified_attention, "kernel_unified_attention", Kernel())
    monkeypatch.setattr(vllm_patches, "_is_hopper", lambda: True)
    return triton_unified_attention


def started(attention: Any, grid: tuple[int, ...] = (10, 2), **changed: Any) -> dict[str, Any]:
    """What the kernel was given that the caller did not give it."""
    kernel = attention.kernel_unified_attention.kernel
    given = STEP | changed
    attention.kernel_unified_attention[grid](**given)
    seen_grid, arguments = kernel.started[-1]
    assert seen_grid == grid
    assert all(arguments[name] is value for name, value in given.items())
    return {name: value for name, value in arguments.items() if name not in given}


def test_decoding_steps_start_the_kernel_in_small_blocks(attention: Any) -> None:
    vllm_patches.small_blocks_decode()
    assert started(attention) == {"num_warps": 2, "num_stages": 2}
    assert started(attention, num_warps=8) == {"num_stages": 2}  # what vLLM says itself stays


@pytest.mark.parametrize(
    "changed",
    [
        {"query_ptr": torch.zeros(9, 4, 128)},  # a prompt among them
        {"grid": (10, 2, 16)},  # several blocks share a sequence
        {"HEAD_SIZE": 64},
        {"TILE_SIZE": 16},
        {"key_cache_ptr": torch.zeros(1, dtype=torch.float8_e4m3fn)},
        {"key_cache_ptr": torch.zeros(1)},
    ],
)
def test_other_steps_start_it_as_vllm_does(attention: Any, changed: dict[str, Any]) -> None:
    vllm_patches.small_blocks_decode()
    assert started(attention, **changed) == {}


def test_a_version_that_says_less_of_a_step_starts_it_as_it_does(attention: Any) -> None:
    vllm_patches.small_blocks_decode()
    attention.kernel_unified_attention[(10, 2)](1, 2, HEAD_SIZE=128)
    assert attention.kernel_unified_attention.kernel.started == [((10, 2), {"HEAD_SIZE": 128})]


def test_it_is_changed_once_and_stays_the_kernel_for_all_else(attention: Any) -> None:
    kernel = attention.kernel_unified_attention
    for _ in range(2):
        vllm_patches.small_blocks_decode()
    assert attention.kernel_unified_attention.kernel is kernel
    assert attention.kernel_unified_attention.cache == "its own"


def test_where_it_was_not_measured_nothing_changes(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = attention.kernel_unified_attention
    monkeypatch.setattr(vllm_patches, "_is_hopper", lambda: False)
    vllm_patches.small_blocks_decode()
    assert attention.kernel_unified_attention is kernel
    monkeypatch.setattr(vllm_patches, "_is_hopper", lambda: True)
    monkeypatch.setattr(attention, "kernel_unified_attention", None)
    vllm_patches.small_blocks_decode()
    assert attention.kernel_unified_attention is None


def test_the_kernel_takes_what_the_choice_is_made_by() -> None:
    """The names are vLLM's: were they others, a decoding step would fail."""
    import inspect

    from vllm.v1.attention.ops import triton_unified_attention as attention

    source = inspect.getsource(attention.unified_attention)
    assert "kernel_unified_attention[grid](" in source
    for name in STEP:
        assert f"{name}=" in source


# --- allocation


ASYNC = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"  # which GPUs have: it caches as tokens come back


@pytest.mark.parametrize(
    "settings", [{}, {"scheduler_cls": ASYNC}, {"enable_prefix_caching": False}], ids=["plain", "async", "uncached"]
)
def test_what_allocation_skips_would_have_changed_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    """Asked again, vLLM finds the same, also when requests are given up for want of pages and begun anew."""
    length = 120
    engine = VllmEngine(
        save_decided(tmp_path, scale=4.0, head_dim=32),
        tiny_tokenizer(),
        engine_kwargs={"max_model_len": 256, "max_num_seqs": 8, "block_size": 32, "num_gpu_blocks_override": 16}
        | settings,
    )
    scheduler = engine.engine.engine_core.engine_core.scheduler
    cache = scheduler.kv_cache_manager
    _, pages, allocate = cache.allocate_slots.args
    _, _, to_cache = cache.cache_blocks.args
    counts: Counter[str] = Counter()
    preempted = set()

    def state() -> Any:
        held = {name: [block.block_id for block in blocks] for name, blocks in pages.req_to_blocks.items()}
        found = len(pages.block_pool.cached_block_hash_to_block)
        return held, dict(pages.num_cached_block), pages.block_pool.get_num_free_blocks(), found

    def checked(ours: Any, theirs: Any, name: str) -> Any:
        def call(request: Any, *given: Any, **named: Any) -> Any:
            asked = []

            def original(*given: Any, **named: Any) -> Any:
                asked.append(given)
                return theirs(*given, **named)

            if request.num_preemptions:
                preempted.add(request.request_id)
            before = state()
            found = ours(cache, pages, original, request, *given, **named)
            counts[f"{name} {'asked' if asked else 'skipped'}"] += 1
            if not asked:
                again = theirs(request, *given, **named)
                assert [not any(answer.blocks) for answer in (found, again) if answer] in ([], [True, True])
                assert state() == before
            return found

        return call

    prompts = prompts_of(range(20, 44, 2))
    sampling = Sampling(max_completion_length=length, generation_kwargs={"min_tokens": length})
    try:
        expected = engine.generate(prompts, sampling, seed=1)
        cache.allocate_slots = checked(vllm_patches._allocate, allocate, "allocate")
        cache.cache_blocks = checked(vllm_patches._cache, to_cache, "cache")
        watched = engine.generate(prompts, sampling, seed=1)
        cache.allocate_slots, cache.cache_blocks = allocate, to_cache
        plain = engine.generate(prompts, sampling, seed=1)
    finally:
        engine.close()
    assert expected.completion_ids == watched.completion_ids == plain.completion_ids
    np.testing.assert_array_equal(expected.rollout_logps.values, plain.rollout_logps.values)
    assert preempted
    assert counts["allocate skipped"] > counts["allocate asked"] > 0
    if "scheduler_cls" in settings:
        assert counts["cache skipped"] > 0


@pytest.mark.parametrize(("num_tokens", "enabled", "asked"), [(63, True, 0), (64, True, 1), (64, False, 0)])
def test_a_page_that_is_full_is_cached(num_tokens: int, enabled: bool, asked: int) -> None:
    calls: list[Any] = []
    pages = SimpleNamespace(block_size=32, num_cached_block={"one": 1})
    request = SimpleNamespace(request_id="one")
    vllm_patches._cache(
        SimpleNamespace(enable_caching=enabled), pages, lambda *given: calls.append(given), request, num_tokens
    )
    assert calls == [(request, num_tokens)] * asked


@pytest.mark.parametrize("kinds", [["SlidingWindowManager"], ["FullAttentionManager"] * 2])
def test_caches_of_other_kinds_stay_as_they_are(kinds: list[str]) -> None:
    managers = [type(kind, (), {})() for kind in kinds]
    cache = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
    vllm_patches.quick_allocation(SimpleNamespace(kv_cache_manager=cache))
    assert not hasattr(cache, "allocate_slots")
    assert not hasattr(cache, "cache_blocks")


# --- what happens to requests after a step


@pytest.fixture(
    params=[{}, {"scheduler_cls": ASYNC}, {"enable_prefix_caching": False}], ids=["plain", "async", "uncached"]
)
def small_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Has pages for half of what it may run."""
    engine = VllmEngine(
        save_decided(tmp_path, scale=4.0, head_dim=32),
        tiny_tokenizer(),
        engine_kwargs={"max_model_len": 200, "max_num_seqs": 8, "block_size": 32, "num_gpu_blocks_override": 16}
        | request.param,
    )
    yield engine
    engine.close()


def test_requests_are_after_each_step_what_vllm_would_have_made_of_them(small_engine: Any) -> None:
    """Ends by stop tokens and by length, preemptions, requests that are given up, new weights' versions between."""
    engine, scheduler = small_engine, small_engine.engine.engine_core.engine_core.scheduler
    cache = scheduler.kv_cache_manager
    _, decoded, theirs = scheduler.update_from_output.args
    ours = scheduler.update_from_output
    prompts = prompts_of(range(20, 44, 2))
    later = prompts_of([5, 9, 64])
    seen: Counter[str] = Counter()

    def told(request: Any) -> Any:
        fields = ("num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders", "num_preemptions")
        counts = [getattr(request, name) for name in fields]
        hashes = list(request.block_hashes)
        return request.status, counts, list(request._output_token_ids), list(request._all_token_ids), hashes

    def run(update: Any) -> Any:
        history = []

        def watched(*given: Any) -> Any:
            outputs = update(*given)
            held = [
                [names.setdefault(block.block_id, len(names)) for block in row] for row in pages.req_to_blocks.values()
            ]
            requests = [told(request) for request in scheduler.requests.values()]
            order = [request.num_prompt_tokens for request in scheduler.running]
            history.append((requests, order, held, list(pages.num_cached_block.values())))
            seen["decoded"] += sum(len(step.tokens) for step in decoded)
            return outputs

        names: dict[int, int] = {}  # pages, in the order in which they were taken
        pages = cache.coordinator.single_type_managers[0]
        scheduler.update_from_output = watched
        engine.engine.reset_prefix_cache()
        engine._cache_salt, engine.version = 0, 0
        finished = []
        sampling = Sampling(max_completion_length=110, stop_token_ids=(7, 9), generation_kwargs={"min_tokens": 90})
        engine.submit(prompts, sampling, seed=1)
        for step in range(10_000):
            finished += engine.advance()
            if step == 20:
                engine.submit(later, Sampling(max_completion_length=50, generation_kwargs={"min_tokens": 50}), seed=2)
            if step == 30:
                given_up = next(iter(engine._running))
                engine.engine.engine_core.abort_requests([given_up])
                del engine._running[given_up]
            if step == 40:
                engine.load_weights([], part=True)
            if not engine.num_running:
                break
        while scheduler.has_requests() or engine._batches():
            engine.advance()
        first = min(completion.number for completion in finished)
        return history, [dataclasses.replace(completion, number=completion.number - first) for completion in finished]

    run(theirs)  # pages have their places
    expected, expected_finished = run(theirs)
    assert not seen["decoded"]
    got, got_finished = run(ours)
    assert len(got) == len(expected)
    for step, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one == other, step
    for one, other in zip(got_finished, expected_finished, strict=True):
        for field in dataclasses.fields(one):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), field.name)
    assert seen["decoded"] > 0.8 * sum(len(completion.ids) for completion in got_finished)
    assert {completion.truncated for completion in got_finished} == {True, False}
    assert any(counts[-1] for requests, *_ in got for _, counts, *_ in requests), "none was preempted"
