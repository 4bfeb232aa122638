"""Random histories of requests: each step is planned and taken in as vLLM's own scheduler does it."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.golden.tiny import tiny_tokenizer
from tests.rollout.prompts import prompts_of, save_decided
from tests.rollout.schedulers import VOCABULARY, answered, hasher, request_of, scheduler_of
from trainers.rollout.base import Completion, Sampling
from trainers.rollout.vllm.engine import VllmEngine
from trainers.rollout.vllm.scheduling import steps
from trainers.rollout.vllm.scheduling.choice import OURS, VLLMS, decoding_scheduler
from trainers.rollout.vllm.scheduling.single import update
from trainers.rollout.vllm.scheduling.steps import take_decoded

pytestmark = pytest.mark.xdist_group("vllm")

PAGE = 16
STEPS = 160
LATER = ("next_decode_eligible_step",)  # what cannot hold a request back in a pipeline of one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_decided(tmp_path_factory.mktemp("model"), head_dim=32)


def kinds(is_ahead: bool) -> tuple[type[Any], type[Any]]:
    """vLLM's scheduler and ours."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from trainers.rollout.vllm.scheduling.scheduler import AsyncDecodingScheduler, DecodingScheduler

    return (AsyncScheduler, AsyncDecodingScheduler) if is_ahead else (Scheduler, DecodingScheduler)


class History:
    """The same events for both schedulers, and what both make of them."""

    def __init__(self, model: str, seed: int, *, is_ahead: bool, enable_prefix_caching: bool, policy: str) -> None:
        self.random = np.random.default_rng(seed)
        self.is_ahead, self.seen = is_ahead, Counter[str]()
        most = int(self.random.integers(3, 20))
        settings: dict[str, Any] = {
            "page": PAGE,
            "max_num_seqs": most,
            "num_pages": int(self.random.choice([most + 8, 4 * most, 10 * most])),
            "max_num_batched_tokens": int(self.random.choice([most + 16, 256])),
            "max_model_len": 128,
            "enable_prefix_caching": enable_prefix_caching,
            "policy": policy,
        }
        self.both = [scheduler_of(kind, model, **settings) for kind in kinds(is_ahead)]
        self.hashes = hasher(PAGE) if enable_prefix_caching else None
        self.prefix = self.random.integers(0, VOCABULARY, 40).tolist()
        self.number = 0
        self.flights: list[tuple[list[Any], dict[str, bool]]] = []

    def run(self) -> Counter[str]:
        for step in range(STEPS):
            is_early = step < STEPS - 40
            if is_early:
                self.happen()
            else:
                self.pause(False)
            self.schedule()
            if is_early and self.random.random() < 0.2:  # while the step is under way
                self.happen()
            while len(self.flights) > (1 if self.is_ahead else 0):
                self.update()
            if self.random.random() < 0.02:
                while self.flights:
                    self.update()
            if self.random.random() < 0.3:
                self.compare()
        self.give_up(list(self.both[0].requests))
        while self.both[0].has_requests() or self.flights:
            self.schedule()
            while self.flights:
                self.update()
        assert not self.both[0].requests
        self.compare()
        return self.seen

    def happen(self) -> None:
        """Requests come and are given up; all may lose their pages, or wait for a step."""
        from vllm import SamplingParams

        random = self.random
        chance = random.random()
        if chance < 0.12 or not self.both[0].requests:
            for _ in range(int(random.integers(1, 9))):
                shared, length = int(random.choice([0, 16, 32, 40])), int(random.choice([1, random.integers(2, 50)]))
                prompt = self.prefix[:shared] + random.integers(0, VOCABULARY, length).tolist()
                params = SamplingParams(
                    max_tokens=int(random.choice([1, 2, 20, 60, 400])),
                    stop_token_ids=[int(token) for token in random.integers(0, VOCABULARY, random.integers(0, 3))],
                    logprobs=0,
                )
                self.number += 1
                priority = int(random.integers(0, 3))
                for scheduler in self.both:
                    name = f"request {self.number}"
                    scheduler.add_request(request_of(name, prompt, params, self.hashes, priority=priority))
        elif chance < 0.15:
            names = list(self.both[0].requests)
            self.give_up([str(name) for name in random.choice(names, min(len(names), 2), replace=False)])
        elif chance < 0.16:
            for scheduler in self.both:
                scheduler.reset_prefix_cache(reset_running_requests=True)
        else:
            self.pause(chance > 0.99)

    def give_up(self, names: list[str]) -> None:
        from vllm.v1.request import RequestStatus

        self.seen["given up"] += len(names)
        for scheduler in self.both:
            scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def pause(self, is_paused: bool) -> None:
        from vllm.v1.core.sched.interface import PauseState

        for scheduler in self.both:
            scheduler.set_pause_state(PauseState.PAUSED_ALL if is_paused else PauseState.UNPAUSED)

    def schedule(self) -> None:
        before = {name: request.num_preemptions for name, request in self.both[0].requests.items()}
        theirs, ours = planned = [scheduler.schedule() for scheduler in self.both]
        for name, value in vars(theirs).items():
            assert getattr(ours, name) == value, name
        requests = self.both[0].requests
        self.seen["preempted"] += sum(requests[name].num_preemptions - count for name, count in before.items())
        self.seen["arrays"] += self.both[1].steps.rows is not None
        if theirs.num_scheduled_tokens:
            is_sampled = {name: not requests[name].is_prefill_chunk for name in theirs.num_scheduled_tokens}
            self.flights.append((planned, is_sampled))

    def update(self) -> None:
        planned, is_sampled = self.flights.pop(0)
        found = answered(planned[0], is_sampled, self.random)
        given = []
        for scheduler, plan in zip(self.both, planned, strict=True):
            outputs = scheduler.update_from_output(plan, copy.deepcopy(found))
            rows = {
                output.request_id: (
                    output.new_token_ids,
                    output.new_logprobs.logprobs[:, 0].tolist() if output.new_logprobs else None,
                    output.stop_reason,
                    output.prefill_stats,
                    output.finish_reason,
                )
                for one in outputs.values()
                for output in one.outputs
            }
            for ids, tokens, logps in take_decoded(scheduler):
                for name, token, logp in zip(ids, tokens.tolist(), logps.tolist(), strict=True):
                    assert name not in rows
                    rows[name] = ([token], [logp], None, None, None)
            given.append(rows)
        assert given[0] == given[1]
        self.seen.update(str(reason) for *_, reason in given[0].values() if reason is not None)

    def compare(self) -> None:
        """All that is known of requests and pages."""
        theirs, ours = (self.state(scheduler) for scheduler in self.both)
        for name, value in theirs.items():
            assert ours[name] == value, name

    def state(self, scheduler: Any) -> dict[str, Any]:
        if rows := getattr(getattr(scheduler, "steps", None), "rows", None):
            rows.write_all()
        pages = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        pool = pages.block_pool
        requests = {
            name: {
                field: value
                for field, value in vars(request).items()
                if isinstance(value, (int, list, str, bytes)) and field not in LATER
            }
            for name, request in scheduler.requests.items()
        }
        return {
            "requests": requests,
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "last": scheduler.prev_step_scheduled_req_ids,
            "step": scheduler.current_step,
            "held": {name: [block.block_id for block in blocks] for name, blocks in pages.req_to_blocks.items()},
            "cached": dict(pages.num_cached_block),
            "pages": [(block.block_id, block.ref_cnt, block.block_hash) for block in pool.blocks],
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        }


@pytest.mark.parametrize("is_ahead", [False, True], ids=["known", "ahead"])
def test_every_step_of_random_histories_is_vllms(model: str, is_ahead: bool) -> None:
    seen = Counter[str]()
    for seed in range(9):
        history = History(
            model,
            seed,
            is_ahead=is_ahead,
            enable_prefix_caching=seed % 3 > 0,
            policy="priority" if seed % 4 == 3 else "fcfs",
        )
        seen += history.run()
    for name in ("given up", "preempted", "arrays", "stop", "length"):
        assert seen[name] > 20, seen


# --- with a model


def completed(model: str, *, patches: bool, **settings: Any) -> tuple[list[Completion], Counter[str]]:
    """What an engine makes of prompts that enter late, are given up, lose their pages, and go on with new weights."""
    seen = Counter[str]()
    fields = {"max_model_len": 200, "max_num_seqs": 8, "block_size": 32, "num_gpu_blocks_override": 16, **settings}
    engine = VllmEngine(model, tiny_tokenizer(), patches=patches, engine_kwargs=fields)
    try:
        scheduler = engine.core.scheduler
        seen[type(scheduler).__name__] += 1
        finished = []
        sampling = Sampling(max_completion_length=110, stop_token_ids=(7, 9), generation_kwargs={"min_tokens": 90})
        engine.submit(prompts_of(range(20, 44, 2)), sampling, seed=1)
        step = 0
        while engine.num_running:
            finished += engine.advance()
            seen["arrays"] += getattr(scheduler, "steps", None) is not None and scheduler.steps.rows is not None
            seen["preempted"] += sum(request.num_preemptions for request in scheduler.requests.values())
            if step == 20:
                late = Sampling(max_completion_length=50, generation_kwargs={"min_tokens": 50})
                engine.submit(prompts_of([5, 9, 64]), late, seed=2)
            if step == 30:
                given_up = next(iter(engine._running))
                engine.engine.engine_core.abort_requests([given_up])
                del engine._running[given_up]
            if step == 40:
                engine.load_weights([], part=True)
            step += 1
        return finished, seen
    finally:
        engine.close()


def test_an_engine_writes_what_it_writes_with_vllms_scheduler(model: str) -> None:
    expected, theirs = completed(model, patches=False)
    assert theirs["Scheduler"]
    for settings in ({}, {"scheduler_cls": VLLMS[1]}):
        got, ours = completed(model, patches=True, **settings)
        assert ours["AsyncDecodingScheduler" if settings else "DecodingScheduler"]
        assert ours["arrays"] > 20
        assert ours["preempted"]
        for one, other in zip(got, expected, strict=True):
            for field in dataclasses.fields(one):
                np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), field.name)
        assert {completion.truncated for completion in got} == {True, False}


# --- where all stays vLLM's


class Theirs:
    """A scheduler of someone else."""


@pytest.mark.parametrize(
    ("chosen", "is_async", "ours"),
    [
        (None, False, OURS[0]),
        (None, True, OURS[1]),
        (VLLMS[0], True, OURS[0]),
        (VLLMS[1], False, OURS[1]),
        ("vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler", False, None),
        (Theirs, False, None),
    ],
)
def test_ours_takes_the_place_of_vllms_usual_schedulers_alone(chosen: Any, is_async: bool, ours: str | None) -> None:
    from vllm.config import SchedulerConfig

    settings = SimpleNamespace(scheduler_cls=chosen, async_scheduling=is_async)
    assert decoding_scheduler(settings) == ours
    if ours is not None:
        fields = {"max_model_len": 64, "is_encoder_decoder": False}
        kind = SchedulerConfig(**fields, scheduler_cls=ours).get_scheduler_cls()
        assert issubclass(kind, kinds(ours == OURS[1])[0])


@pytest.mark.parametrize("name", steps._UNUSUAL)
def test_unusual_schedulers_stay_as_they_are(name: str) -> None:
    scheduler = SimpleNamespace(**{name: True}, kv_cache_manager=cache_of("FullAttentionManager"))
    cache, found = scheduler.kv_cache_manager, steps.Steps(scheduler, is_ahead=True)
    assert (found.is_usual, found.has_arrays, scheduler.kv_cache_manager) == (False, False, cache)
    planned = object()
    assert found.take(planned, object()) is planned
    assert found.plan() is None


def cache_of(*kinds: str, page: int = 16) -> Any:
    pages = {"block_size": 16, "block_pool": SimpleNamespace(hash_block_size=page)}
    pages |= {"req_to_blocks": {}, "num_cached_block": {}}
    managers = [type(kind, (SimpleNamespace,), {})(**pages) for kind in kinds]
    return SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers), enable_caching=True)


@pytest.mark.parametrize(
    ("kinds", "page", "zeroes", "is_ours"),
    [
        (["FullAttentionManager"], 16, False, True),
        (["FullAttentionManager"], 16, True, False),
        (["FullAttentionManager"], 8, False, False),  # parts of pages can be found by others
        (["FullAttentionManager"] * 2, 16, False, False),
        (["SlidingWindowManager"], 16, False, False),
    ],
)
def test_caches_of_other_kinds_stay_as_they_are(kinds: list[str], page: int, zeroes: bool, is_ours: bool) -> None:
    scheduler = SimpleNamespace(needs_kv_cache_zeroing=zeroes, kv_cache_manager=cache_of(*kinds, page=page))
    assert steps.Steps(scheduler, is_ahead=False).has_arrays is is_ours


@pytest.mark.parametrize(
    ("changed", "of_params"),
    [
        ({"status": "PREEMPTED"}, {}),
        ({"prefill_stats": "of its prompt"}, {}),
        ({"is_prefill_chunk": True}, {}),
        ({"num_computed_tokens": 2}, {}),
        ({"num_output_placeholders": 1}, {}),
        ({"spec_token_ids": [5]}, {}),
        ({"num_stale_output_tokens": 1}, {}),
        ({"structured_output_request": "a grammar"}, {}),
        ({"resumable": True}, {}),
        ({}, {"logprobs": None}),
        ({}, {"repetition_detection": "of three"}),
    ],
    ids=str,
)
def test_requests_of_other_kinds_are_planned_by_vllm(
    model: str, changed: dict[str, Any], of_params: dict[str, Any]
) -> None:
    from vllm import SamplingParams

    scheduler = scheduler_of(kinds(False)[1], model, num_pages=64)
    scheduler.add_request(request_of("one", [5, 6, 7], SamplingParams(max_tokens=9, logprobs=0), hasher(PAGE)))
    planned = scheduler.schedule()
    scheduler.update_from_output(planned, answered(planned, {"one": True}, np.random.default_rng(0)))
    (request,) = scheduler.running
    running = request.status
    assert scheduler.steps._decodes(request, running)
    for owner, fields in ((request, changed), (request.sampling_params, of_params)):
        for name, value in fields.items():
            setattr(owner, name, value)
    assert not scheduler.steps._decodes(request, running)


def updated(**changed: Any) -> tuple[Any, Any]:
    """What goes past vLLM's outputs, and what vLLM is told was planned, of a step in which one request drew a token."""
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import RequestStatus

    logps = LogprobsLists(np.zeros((2, 1), np.int64), np.array([[-1], [-2]], np.float32), np.zeros(2, np.int64))
    request = {
        "status": RequestStatus.RUNNING,
        "prefill_stats": None,
        "num_in_flight_tokens": 1,
        "append_output_token_ids": lambda token: None,
        "num_output_tokens": 1,
        "num_tokens": 2,
        "max_tokens": 3,
        "sampling_params": SimpleNamespace(eos_token_id=2, stop_token_ids=[3], repetition_detection=None),
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
    step = SimpleNamespace(**planned)
    decoded, rest = update(SimpleNamespace(**scheduler), step, SimpleNamespace(**found), is_ahead=False)
    assert step.num_scheduled_tokens == planned["num_scheduled_tokens"]
    return decoded, rest


def test_a_token_that_ends_nothing_goes_past_vllms_outputs() -> None:
    decoded, planned = updated()
    assert [list(values) for values in decoded] == [["one"], [7], [-2.0]]
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
        {"sampling_params": SimpleNamespace(eos_token_id=2, stop_token_ids=None, repetition_detection="of three")},
        {"max_tokens": 2},
        {"max_model_len": 3},
    ],
    ids=str,
)
def test_all_that_is_unusual_is_vllms(changed: dict[str, Any]) -> None:
    from vllm.v1.request import RequestStatus

    changed = {name: RequestStatus[value] if name == "status" else value for name, value in changed.items()}
    decoded, planned = updated(**changed)
    assert decoded is None
    assert planned.num_scheduled_tokens == changed.get("num_scheduled_tokens", {"one": 1})
