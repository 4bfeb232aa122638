"""Steps that start vLLM's Triton attention otherwise; what is skipped changes nothing; where all stays vLLM's."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper import ConfigError
from tests.golden.tiny import tiny_tokenizer
from tests.rollout.prompts import prompts_of, save_decided
from trainers.parts.fingerprints import fingerprints
from trainers.rollout.base import Sampling
from trainers.rollout.vllm import decoding, patches
from trainers.rollout.vllm.engine import VllmEngine
from trainers.rollout.vllm.model import as_in_files, check_experts, model_fingerprints, scale_logits
from trainers.rollout.vllm.start import variables

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
    monkeypatch.setattr(patches, "_is_hopper", lambda: True)
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
    patches.small_blocks_decode()
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
    patches.small_blocks_decode()
    assert started(attention, **changed) == {}


def test_a_version_that_says_less_of_a_step_starts_it_as_it_does(attention: Any) -> None:
    patches.small_blocks_decode()
    attention.kernel_unified_attention[(10, 2)](1, 2, HEAD_SIZE=128)
    assert attention.kernel_unified_attention.kernel.started == [((10, 2), {"HEAD_SIZE": 128})]


def test_it_is_changed_once_and_stays_the_kernel_for_all_else(attention: Any) -> None:
    kernel = attention.kernel_unified_attention
    for _ in range(2):
        patches.small_blocks_decode()
    assert attention.kernel_unified_attention.kernel is kernel
    assert attention.kernel_unified_attention.cache == "its own"


def test_where_it_was_not_measured_nothing_changes(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = attention.kernel_unified_attention
    monkeypatch.setattr(patches, "_is_hopper", lambda: False)
    patches.small_blocks_decode()
    assert attention.kernel_unified_attention is kernel
    monkeypatch.setattr(patches, "_is_hopper", lambda: True)
    monkeypatch.setattr(attention, "kernel_unified_attention", None)
    patches.small_blocks_decode()
    assert attention.kernel_unified_attention is None


def test_an_engine_without_patches_gets_the_kernel_back(attention: Any) -> None:
    kernel = attention.kernel_unified_attention
    patches.small_blocks_decode(False)
    assert attention.kernel_unified_attention is kernel
    patches.small_blocks_decode()
    assert attention.kernel_unified_attention is not kernel
    patches.small_blocks_decode(False)
    assert attention.kernel_unified_attention is kernel


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


def small_engine_in(folder: Path, *, patches: bool = True, **settings: Any) -> VllmEngine:
    """Has pages for half of what it may run."""
    return VllmEngine(
        save_decided(folder, scale=4.0, head_dim=32),
        tiny_tokenizer(),
        patches=patches,
        engine_kwargs={"max_model_len": 200, "max_num_seqs": 8, "block_size": 32, "num_gpu_blocks_override": 16}
        | settings,
    )


@pytest.fixture(
    params=[{}, {"scheduler_cls": ASYNC}, {"enable_prefix_caching": False}], ids=["plain", "async", "uncached"]
)
def small_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VllmEngine]:
    engine = small_engine_in(tmp_path, **request.param)
    yield engine
    engine.close()


def test_what_allocation_skips_would_have_changed_nothing(
    small_engine: VllmEngine, request: pytest.FixtureRequest
) -> None:
    """Asked again, vLLM finds the same, also when requests are given up for want of pages and begun anew."""
    length, engine = 120, small_engine
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
    expected = engine.generate(prompts, sampling, seed=1)
    cache.allocate_slots = checked(decoding.allocate, allocate, "allocate")
    cache.cache_blocks = checked(decoding.cache, to_cache, "cache")
    watched = engine.generate(prompts, sampling, seed=1)
    cache.allocate_slots, cache.cache_blocks = allocate, to_cache
    plain = engine.generate(prompts, sampling, seed=1)
    assert expected.completion_ids == watched.completion_ids == plain.completion_ids
    np.testing.assert_array_equal(expected.rollout_logps.values, plain.rollout_logps.values)
    assert preempted
    assert counts["allocate skipped"] > counts["allocate asked"] > 0
    if "scheduler_cls" in request.node.callspec.params["small_engine"]:
        assert counts["cache skipped"] > 0


@pytest.mark.parametrize(("num_tokens", "enabled", "asked"), [(63, True, 0), (64, True, 1), (64, False, 0)])
def test_a_page_that_is_full_is_cached(num_tokens: int, enabled: bool, asked: int) -> None:
    calls: list[Any] = []
    pages = SimpleNamespace(block_size=32, num_cached_block={"one": 1})
    request = SimpleNamespace(request_id="one")
    decoding.cache(
        SimpleNamespace(enable_caching=enabled), pages, lambda *given: calls.append(given), request, num_tokens
    )
    assert calls == [(request, num_tokens)] * asked


@pytest.mark.parametrize(
    ("kinds", "version"),
    [
        (["SlidingWindowManager"], "0.32.0"),
        (["FullAttentionManager"] * 2, "0.32.0"),
        (["FullAttentionManager"], "0.33.0"),
        (["FullAttentionManager"], "0.32.0"),
    ],
)
def test_caches_of_other_kinds_and_versions_stay_as_they_are(
    kinds: list[str], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    pages = SimpleNamespace(block_size=16, block_pool=SimpleNamespace(hash_block_size=16))
    managers = [type(kind, (SimpleNamespace,), {})(**vars(pages)) for kind in kinds]
    cache = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=managers), allocate_slots=0, cache_blocks=0
    )
    patches.quick_allocation(SimpleNamespace(kv_cache_manager=cache))
    is_known = (kinds, version) == (["FullAttentionManager"], "0.32.0")
    assert (cache.allocate_slots != 0) == (cache.cache_blocks != 0) == is_known


# --- what happens to requests after a step


def test_requests_are_after_each_step_what_vllm_would_have_made_of_them(small_engine: VllmEngine) -> None:
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
        engine.core.cache_salt, engine.version = 0, 0
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
        while scheduler.has_requests() or engine.core.batches():
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


def updated(**changed: Any) -> tuple[list[Any], Any]:
    """What goes to the list, and what vLLM is told was planned, of a step in which one request drew a token."""
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import RequestStatus

    logps = LogprobsLists(np.zeros((2, 1), np.int64), np.array([[-1], [-2]], np.float32), np.zeros(2, np.int64))
    request = {
        "status": RequestStatus.RUNNING,
        "prefill_stats": None,
        "num_in_flight_tokens": 1,
        "append_output_token_ids": lambda token: None,
        "_output_token_ids": [5],
        "_all_token_ids": [4, 5],
        "max_tokens": 3,
        "sampling_params": SimpleNamespace(eos_token_id=2, stop_token_ids=[3]),
    }
    found = {
        "logprobs": logps,
        "sampled_token_ids": [[6], [7]],
        "num_nans_in_logits": None,
        "req_id_to_index": {"other": 0, "one": 1},
    }
    planned = {"num_scheduled_tokens": {"one": 1}, "scheduled_spec_decode_tokens": {}}
    scheduler = {"max_model_len": 4, "requests": None, "kv_cache_manager": SimpleNamespace(cache_blocks=None)}
    for name, value in changed.items():
        next((fields for fields in (found, planned, scheduler) if name in fields), request)[name] = value
    scheduler["requests"] = scheduler["requests"] or {"one": SimpleNamespace(**request)}
    decoded: list[Any] = []
    step = SimpleNamespace(**planned)
    told = decoding.update(SimpleNamespace(**scheduler), decoded, lambda *given: given, step, SimpleNamespace(**found))
    assert step.num_scheduled_tokens == planned["num_scheduled_tokens"]
    return decoded, told[0]


def test_a_token_that_ends_nothing_goes_to_the_list() -> None:
    decoded, planned = updated()
    assert decoded == [(["one"], [7], [-2.0])]
    assert planned.num_scheduled_tokens == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"logprobs": None},
        {"logprobs": SimpleNamespace(logprobs=np.zeros((3, 1)), cu_num_generated_tokens=[0, 1, 3])},
        {"sampled_token_ids": []},
        {"num_nans_in_logits": {"one": 1}},
        {"scheduled_spec_decode_tokens": {"other": [5]}},
        {"num_scheduled_tokens": {"one": 2}},  # a part of a prompt
        {"num_scheduled_tokens": {"gone": 1}},
        {"sampled_token_ids": [[6], []]},
        {"sampled_token_ids": [[6], [7, 8]]},
        {"status": "PREEMPTED"},
        {"status": "FINISHED_ABORTED"},
        {"prefill_stats": "of its prompt"},
        {"num_stale_output_tokens": 1},
        {"async_tokens_to_discard": 1},
        {"sampled_token_ids": [[6], [2]]},  # the token that ends texts
        {"sampled_token_ids": [[6], [3]]},  # a stop token
        {"max_tokens": 2},
        {"max_model_len": 3},
    ],
    ids=str,
)
def test_all_that_is_unusual_is_vllms(changed: dict[str, Any]) -> None:
    from vllm.v1.request import RequestStatus

    changed = {name: RequestStatus[value] if name == "status" else value for name, value in changed.items()}
    decoded, planned = updated(**changed)
    assert decoded == []
    assert planned.num_scheduled_tokens == changed.get("num_scheduled_tokens", {"one": 1})


@pytest.mark.parametrize(
    ("version", "names", "is_quick"),
    [
        ("0.26.0", (), True),
        ("0.32.1", (), True),
        ("0.33.0", (), False),
        *[("0.26.0", (name,), False) for name in ("connector", "log_stats", "enable_return_routed_experts")],
        *[("0.32.0", (name,), False) for name in ("aux_output_connector", "return_sampling_mask")],
    ],
)
def test_unusual_schedulers_stay_as_they_are(
    version: str, names: tuple[str, ...], is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    monkeypatch.setattr(vllm, "__version__", version)
    for kind, known in ((AsyncScheduler, True), (type("Theirs", (AsyncScheduler,), {}), False)):
        scheduler = object.__new__(kind)
        vars(scheduler).update(dict.fromkeys(names, True))
        assert patches.quick_update(scheduler) == []
        assert ("update_from_output" in vars(scheduler)) == (is_quick and known)


def ahead(engine: VllmEngine, *, is_quick: bool) -> tuple[list[Any], Counter[str]]:
    """All that is known of requests after each step of a scheduler that plans one before it sees the last one's tokens.

    Prompts enter late and are given up, stop tokens, limits and the model's length end completions, pages are too few,
    and twice all that run lose theirs.
    """
    from vllm import SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    core = engine.engine.engine_core.engine_core
    like = core.scheduler
    scheduler = AsyncScheduler(like.vllm_config, like.kv_cache_config, like.structured_output_manager, like.block_size)
    decoded = []
    if is_quick:
        patches.quick_allocation(scheduler)
        decoded = patches.quick_update(scheduler)
    flights, history, seen, resets = [], [], Counter[str](), (45, 130)
    for step in range(600):
        for place in range(4) if step < 300 and not step % 30 else ():
            params = SamplingParams(max_tokens=(1, 40, 90, 400)[place], stop_token_ids=[3] * (place == 2), logprobs=0)
            prompt = list(range(4, 24 + 10 * place))
            name = f"{step} {place}"
            scheduler.add_request(Request(name, prompt, params, None, 0, 0.0, block_hasher=core.request_block_hasher))
        planned = scheduler.schedule()
        if step in resets:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if step % 25 == 10:
            first = [request.request_id for request in scheduler.running[:1]]
            scheduler.finish_requests(first, RequestStatus.FINISHED_ABORTED)
        seen["given up"] += len(planned.num_scheduled_tokens.keys() - scheduler.requests.keys())
        ids = sorted(planned.num_scheduled_tokens)
        drawn = [[(7 * step + len(name)) % 101] for name in ids]
        logps = LogprobsLists(*(np.full((len(ids), 1), step) + np.arange(len(ids))[:, None] for _ in range(3)))
        places = {name: row for row, name in enumerate(ids)}
        flights.append((planned, ModelRunnerOutput(ids, places, drawn, logps if ids else None)))
        if len(flights) < 2:
            continue
        outputs = scheduler.update_from_output(*flights.pop(0))
        given = [(name, [token], [logp], None) for one in decoded for name, token, logp in zip(*one, strict=True)]
        seen["quick"] += len(given)
        decoded.clear()
        for output in outputs[0].outputs if outputs else ():
            logps = output.new_logprobs.logprobs[:, 0].tolist()
            given.append((output.request_id, output.new_token_ids, logps, output.finish_reason))
        for *_, reason in given:
            seen[str(reason)] += 1
        requests = scheduler.requests
        fields = [
            {name: copy.copy(value) for name, value in vars(request).items() if isinstance(value, (int, list))}
            for request in requests.values()
        ]
        if step not in resets:
            seen["preempted"] += sum(request.status is RequestStatus.PREEMPTED for request in requests.values())
        seen["tokens"] += len(given)
        blocks = [
            (block.block_id, block.ref_cnt, block.block_hash) for block in scheduler.kv_cache_manager.block_pool.blocks
        ]
        history.append(
            (list(requests), fields, [request.request_id for request in scheduler.running], blocks, sorted(given))
        )
    assert not scheduler.requests
    return history, seen


@pytest.fixture(scope="module")
def plain_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    engine = small_engine_in(tmp_path_factory.mktemp("plain"), patches=False)
    yield engine
    engine.close()


def test_with_a_step_in_flight_requests_are_what_vllm_would_have_made_of_them(plain_engine: VllmEngine) -> None:
    expected, theirs = ahead(plain_engine, is_quick=False)
    got, ours = ahead(plain_engine, is_quick=True)
    for step, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one == other, step
    assert not theirs["quick"]
    assert ours["quick"] > 0.8 * ours["tokens"]
    assert all(ours[name] for name in ("stop", "length", "given up", "preempted")), ours


# --- without the patches


def test_an_engine_without_patches_steps_as_vllm_does(plain_engine: VllmEngine) -> None:
    scheduler = plain_engine.core.scheduler
    cache = scheduler.kv_cache_manager
    assert scheduler.update_from_output.__func__ is type(scheduler).update_from_output
    assert cache.allocate_slots.__func__ is type(cache).allocate_slots
    assert cache.cache_blocks.__func__ is type(cache).cache_blocks
    completed = plain_engine.generate(prompts_of([5, 9]), Sampling(max_completion_length=12), seed=1)
    assert completed.completion_ids.lengths.min() > 0


@pytest.fixture
def parts(attention: Any) -> Any:
    """A scheduler and its cache, which all patches are for."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    scheduler = object.__new__(AsyncScheduler)
    pages = type("FullAttentionManager", (), {})()
    pages.block_size, pages.block_pool = 16, SimpleNamespace(hash_block_size=16)
    coordinator = SimpleNamespace(single_type_managers=[pages])
    scheduler.kv_cache_manager = SimpleNamespace(coordinator=coordinator, allocate_slots=0, cache_blocks=0)
    return scheduler


def patched(scheduler: Any, attention: Any) -> set[str]:
    """What is not vLLM's own after all patches were asked for, twice."""
    for _ in range(2):
        patches.small_blocks_decode()
        patches.quick_allocation(scheduler)
        patches.quick_update(scheduler)
    found = {
        "small_blocks_decode": isinstance(attention.kernel_unified_attention, decoding.DecodingKernel),
        "quick_allocation": scheduler.kv_cache_manager.allocate_slots != 0,
        "quick_update": "update_from_output" in vars(scheduler),
    }
    return {name for name, is_patched in found.items() if is_patched}


def other_function() -> None:
    """The function of vLLM has another source."""


@pytest.mark.parametrize(
    ("patch", "place"), [(patch, place) for patch, places in patches.SOURCES.items() for place in places]
)
def test_a_function_that_was_not_compared_stays_vllms_and_one_line_says_so(
    patch: str,
    place: str,
    parts: Any,
    attention: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, _, name = place.partition(":")
    monkeypatch.setattr(f"{module}.{name}", other_function)
    patches._tell.cache_clear()
    assert patched(parts, attention) == patches.SOURCES.keys() - {patch}
    (line,) = [record.getMessage() for record in caplog.records if record.name == patches.__name__]
    assert line.startswith("vLLM 0.32.0: ")
    assert f": {patch} stays off, as it was not compared with its {name}." in line


def test_all_functions_of_this_version_were_compared(
    parts: Any, attention: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert patched(parts, attention) == patches.SOURCES.keys()
    assert not [record for record in caplog.records if record.name == patches.__name__]


@pytest.mark.parametrize(("version", "is_known"), [("0.26.0", True), ("0.33.0", False), ("0.3.2", False)])
def test_a_version_that_was_compared_without_its_source_goes_by_its_number(
    version: str,
    is_known: bool,
    parts: Any,
    attention: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    if is_known:
        monkeypatch.setattr("vllm.v1.core.sched.scheduler.Scheduler.update_from_output", other_function)
    patches._tell.cache_clear()
    assert patched(parts, attention) == (patches.SOURCES.keys() if is_known else set())
    lines = [record.getMessage() for record in caplog.records if record.name == patches.__name__]
    assert len(lines) == (0 if is_known else 3)
    assert all(f"vLLM {version}: " in line and "compared with this version" in line for line in lines)


# --- what an engine cannot do without


def test_a_class_of_transformers_that_vllm_ran_is_transformers_own_again() -> None:
    """A policy of that class in the same process was broken by vLLM's changes to it."""
    from vllm.compilation.decorators import DynamicArgDims
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.models.transformers.base import Base

    class Part(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids + 1

    policy, bases, own = Part(), Part.__bases__, dict(vars(Part))
    ones = torch.ones(2)
    with variables({}), set_current_vllm_config(VllmConfig()), patches.own_classes():
        dims = DynamicArgDims(input_ids=0)
        Base._decorate_cls_for_torch_compile(None, Part, dims, enable_if=lambda _: False, is_encoder=False)
        built = Part()
        with pytest.raises(AttributeError, match="do_not_compile"):
            policy(ones)
    assert torch.equal(policy(ones), built(ones))
    assert (Part.__bases__, dict(vars(Part))) == (bases, own)
    assert isinstance(built, Part)
    assert built.do_not_compile
    assert not hasattr(Part(), "do_not_compile")


def test_weights_that_vllm_keeps_in_float32_have_the_fingerprint_of_the_bfloat16_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Biases of routers (GLM-4.5, DeepSeek-V3), decays of states (Qwen3-Next)."""
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    model = torch.nn.Module()
    sent = {"weight": torch.randn(4, 8).bfloat16(), "e_score_correction_bias": torch.randn(6).bfloat16()}
    for name, weight in sent.items():
        kept = weight.float() if name.endswith("bias") else weight
        model.register_parameter(name, torch.nn.Parameter(kept, requires_grad=False))
    assert model_fingerprints(torch.bfloat16, model) == fingerprints(sent.items())
    model.e_score_correction_bias.mul_(1.5)
    assert model_fingerprints(torch.bfloat16, model) != fingerprints(sent.items())


@pytest.mark.parametrize(("backend", "is_plain"), [("TRITON", True), ("CPU", True), ("FLASHINFER_CUTLASS", False)])
def test_experts_in_a_layout_of_their_own_are_refused(backend: str, is_plain: bool) -> None:
    """New weights would be read in that layout, and their fingerprints would be right."""
    model, experts = torch.nn.Module(), torch.nn.Module()
    experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
    model.experts = experts
    if is_plain:
        check_experts(model)
        return
    with pytest.raises(ConfigError, match=r"layout of FLASHINFER_CUTLASS.*moe_backend: triton"):
        check_experts(model)


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_stacks_of_experts_come_as_the_models_own_files_have_them(is_exchanged: bool) -> None:
    model: Any = torch.nn.Linear(1, 1)
    model.is_fused_checkpoint_transposed = is_exchanged
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    sent = {name: torch.randn(2, 3, 4), name.replace("experts", "gate"): torch.randn(2, 3, 4)}
    found = dict(as_in_files(sent.items(), model))
    assert found.keys() == sent.keys()
    for key, weight in sent.items():
        assert torch.equal(found[key], weight.transpose(1, 2) if is_exchanged and key == name else weight)


def test_a_temperature_multiplies_the_scale_that_a_model_has_itself() -> None:
    model = SimpleNamespace(logits_processor=SimpleNamespace(scale=0.25))  # Granite
    for temperature in (0.7, 2.0, 1.0):
        scale_logits(1 / temperature, model)
        assert model.logits_processor.scale == 0.25 * (1 / temperature)


def test_requests_that_have_computed_nothing_are_salted_again() -> None:
    hashed: list[str] = []

    def request(name: str, num_computed_tokens: int) -> Any:
        return SimpleNamespace(
            num_computed_tokens=num_computed_tokens,
            cache_salt="1",
            block_hashes=["old"],
            update_block_hashes=lambda: hashed.append(name),
        )

    requests = {"waits": request("waits", 0), "runs": request("runs", 5)}
    patches.salt_again(SimpleNamespace(requests=requests), "2")
    assert {name: (one.cache_salt, one.block_hashes) for name, one in requests.items()} == {
        "waits": ("2", []),
        "runs": ("1", ["old"]),
    }
    assert hashed == ["waits"]


def test_what_older_weights_made_of_pictures_is_not_found_by_requests_that_wait() -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    def request(num_computed_tokens: int) -> SimpleNamespace:
        seen = MultiModalFeatureSpec(None, "image", "1:abc-0", PlaceholderRange(2, 4))
        fields = {"cache_salt": "1", "block_hashes": [], "update_block_hashes": lambda: None, "mm_features": [seen]}
        return SimpleNamespace(num_computed_tokens=num_computed_tokens, **fields)

    requests = {"waits": request(0), "runs": request(5)}
    patches.salt_again(SimpleNamespace(requests=requests), "2")
    assert {name: one.mm_features[0].identifier for name, one in requests.items()} == {
        "waits": "2:abc-0",
        "runs": "1:abc-0",
    }


def test_convolutions_of_delta_layers_take_new_weights_on_a_cpu() -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    def packed(weight: torch.Tensor) -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return layer

    old, new = (torch.randn(64, 1, 4, dtype=torch.bfloat16) for _ in range(2))
    layer, expected = packed(old), packed(new)
    with patches.plain_convolutions(layer):
        assert torch.equal(layer.weight, old)
        layer.weight.copy_(new)
    assert torch.equal(layer.weight, expected.weight)
    with patches.plain_convolutions(layer):
        assert torch.equal(layer.weight, new)


def test_decays_of_delta_layers_are_told_by_the_workers_that_have_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    whole = {f"layers.0.{name}": torch.randn(16) for name in ("A_log", "dt_bias", "norm")}
    group = SimpleNamespace(device_group=None)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **named: None)
    found = Counter[str]()
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = torch.nn.Module()
        for name, value in whole.items():
            part = value if name.endswith("norm") else value[8 * rank : 8 * rank + 8]
            layer.register_parameter(name.rpartition(".")[2], torch.nn.Parameter(part))
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([layer])
        found.update(model_fingerprints(torch.float32, model))
    wrapped = {name: (value + 2**63) % 2**64 - 2**63 for name, value in found.items()}
    assert wrapped == fingerprints(whole.items())


def test_small_products_are_not_packed_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: True)  # as with AMX
    patches.plain_products()
    assert utils.check_cpu_sgl_kernel(16, 32, torch.bfloat16) is False


@pytest.mark.parametrize("missing", patches.SALTED)
def test_requests_that_cannot_be_salted_are_told_and_need_it_only_with_a_cache(missing: str) -> None:
    request = SimpleNamespace(**{name: 0 for name in patches.SALTED if name != missing})
    scheduler = SimpleNamespace(requests={"one": request}, kv_cache_manager=SimpleNamespace(enable_caching=True))
    with pytest.raises(RuntimeError, match=f"no {missing} of requests.*vllm_enable_prefix_caching: false"):
        patches.salt_again(scheduler, "2")
    scheduler.kv_cache_manager.enable_caching = False
    patches.salt_again(scheduler, "2")


def test_an_engine_ends_with_its_process_where_it_would_end_itself() -> None:
    finalizer = SimpleNamespace(atexit=True)
    patches.end_with_process(SimpleNamespace(engine_core=SimpleNamespace(_finalizer=finalizer)))
    assert finalizer.atexit is False
    patches.end_with_process(SimpleNamespace(engine_core=SimpleNamespace()))


def test_the_group_of_vllms_processes_is_left_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    ended: list[str] = []
    monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(destroy=lambda: ended.append("world")))
    patches.leave_group()
    patches.leave_group()
    assert (ended, parallel_state._WORLD) == (["world"], None)
    monkeypatch.delattr(parallel_state, "_WORLD")
    patches.leave_group()
    assert not hasattr(parallel_state, "_WORLD")


def test_queries_of_several_heads_are_rotated_on_a_cpu_whatever_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek's latent attention gives them: a part of each head, in a table of heads."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)  # as it was afterwards
    for _ in range(2):
        patches.flat_rotations()
    torch.manual_seed(0)
    table, positions = torch.randn(16, 64), torch.tensor([3, 7, 9])
    heads, key = torch.randn(3, 2, 96), torch.randn(3, 1, 64)
    fields = {"head_size": 64, "is_neox_style": False, "_match_cos_sin_cache_dtype": lambda query: table}
    for query in (heads[..., 32:], heads[..., 32:].reshape(3, 128)):
        expected = RotaryEmbedding.forward_static(positions, query.reshape(3, 2, 64), key, 64, 64, table, False)
        found = RotaryEmbedding.forward_cpu(SimpleNamespace(**fields), positions, query.clone(), key.clone())
        assert (found[0].shape, found[1].shape) == (query.shape, key.shape)
        torch.testing.assert_close(found[0].reshape(3, 2, 64), expected[0])
        torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("is_named", [True, False])
def test_experts_on_a_cpu_are_packed_as_the_call_asks(is_named: bool) -> None:
    def run(output: Any, states: Any, w13: Any, w2: Any, top_k: int, isa: str) -> Any:
        return output, states, w13, w2, top_k, isa

    kernel = patches._PackingKernel(run, lambda weight, isa: (weight, isa))
    given: tuple[Any, ...] = ("output", "states", "w13", "w2", 2)
    found = kernel(*given, isa="amx") if is_named else kernel(*given, "amx")
    assert found == ("output", "states", ("w13", "amx"), ("w2", "amx"), 2, "amx")
