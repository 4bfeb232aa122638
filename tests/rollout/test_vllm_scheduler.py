"""Random histories of requests: each step is planned and taken in as vLLM's own scheduler does it."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.rollout.prompts import save_decided
from tests.rollout.schedulers import VOCABULARY, answered, hasher, request_of, scheduler_of

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
            if step < STEPS - 40:
                self.happen()
            else:
                self.pause(False)
            self.schedule()
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
                shared = int(random.choice([0, 16, 32, 40]))
                prompt = self.prefix[:shared] + random.integers(0, VOCABULARY, random.integers(1, 50)).tolist()
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
        from trainers.rollout.vllm.scheduling.scheduler import take_decoded

        planned, is_sampled = self.flights.pop(0)
        found = answered(planned[0], is_sampled, self.random)
        given = []
        for scheduler, plan in zip(self.both, planned, strict=True):
            outputs = scheduler.update_from_output(plan, copy.deepcopy(found))
            rows = {
                output.request_id: (
                    output.new_token_ids,
                    output.new_logprobs.logprobs[:, 0].tolist() if output.new_logprobs else None,
                    output.finish_reason,
                    output.stop_reason,
                )
                for one in outputs.values()
                for output in one.outputs
            }
            for ids, tokens, logps in take_decoded(scheduler):
                for name, token, logp in zip(ids, tokens.tolist(), logps.tolist(), strict=True):
                    assert name not in rows
                    rows[name] = ([token], [logp], None, None)
            given.append(rows)
        assert given[0] == given[1]
        self.seen.update(str(reason) for *_, reason, _ in given[0].values() if reason is not None)

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
    for seed in range(12):
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
