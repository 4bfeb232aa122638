"""What decoding costs less where prompts are among the requests of a step: one request at a time, as vLLM goes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from trainers.rollout.vllm.scheduling.rows import DecodedTokens


def takes_apart(planned: Any, found: Any) -> bool:
    """Whether tokens of the step may go past vLLM's outputs: they come with log-probabilities, one per request."""
    logps = found.logprobs
    return (
        logps is not None
        and logps.cu_num_generated_tokens is None
        and bool(found.sampled_token_ids)
        and not found.num_nans_in_logits
        and not planned.scheduled_spec_decode_tokens
    )


def update(scheduler: Any, planned: Any, found: Any, *, is_ahead: bool) -> tuple[DecodedTokens | None, Any]:
    """The tokens that end nothing, and the plan of the others, which vLLM takes in.

    vLLM (0.26, 0.32) makes an output of each token, with a dozen fields that say nothing in a step that decodes
    (vllm/v1/core/sched/scheduler.py, ``update_from_output``). What else happens to such a request happens here too.
    """
    from vllm.v1.request import RequestStatus

    if not takes_apart(planned, found):
        return None, planned
    logps, sampled = found.logprobs, found.sampled_token_ids
    max_model_len = scheduler.max_model_len
    requests, places, to_cache = scheduler.requests, found.req_id_to_index, scheduler.kv_cache_manager.cache_blocks
    rest, request_ids, tokens, rows = {}, [], [], []
    for request_id, num_tokens in planned.num_scheduled_tokens.items():
        request = requests.get(request_id)
        if (
            request is not None
            and num_tokens == 1
            and request.status is RequestStatus.RUNNING
            and request.prefill_stats is None  # not its first
            and not is_stale(request)
            and len(drawn := sampled[row := places[request_id]]) == 1
            and not may_end(request, drawn[0], max_model_len)
        ):
            request.num_in_flight_tokens -= 1
            request.append_output_token_ids(drawn[0])
            if is_ahead:
                request.num_output_placeholders -= 1
                to_cache(request, request.num_computed_tokens - request.num_output_placeholders)
            request_ids.append(request_id)
            tokens.append(drawn[0])
            rows.append(row)
        else:
            rest[request_id] = num_tokens
    if not request_ids:
        return None, planned
    return DecodedTokens(request_ids, np.array(tokens), logps.logprobs[rows, 0]), with_tokens(planned, rest)


def with_tokens(planned: Any, num_scheduled_tokens: dict[str, int]) -> Any:
    """The plan, of these requests only."""
    planned = copy.copy(planned)
    planned.num_scheduled_tokens = num_scheduled_tokens
    return planned


def is_stale(request: Any) -> bool:
    """Whether tokens are in flight that were drawn before the request lost its pages."""
    return bool(
        getattr(request, "num_stale_output_tokens", 0)  # 0.32
        or getattr(request, "async_tokens_to_discard", 0)  # 0.26
    )


def may_end(request: Any, token: int, max_model_len: int) -> bool:
    params = request.sampling_params
    return (
        token == params.eos_token_id
        or token in (params.stop_token_ids or ())
        or request.num_output_tokens + 1 >= request.max_tokens
        or request.num_tokens + 1 >= max_model_len
        or params.repetition_detection is not None
    )


_DECODES = {"num_lookahead_tokens": 0}  # what else a scheduler says as it asks for a decoding step


class Pages:
    """vLLM's KVCacheManager, asked for no more where a request's last page has room for its next token.

    vLLM (0.26, 0.32) goes through allocation and caching of each request in each step, to find that there is nothing to
    do (vllm/v1/core/kv_cache_manager.py, ``allocate_slots`` and ``cache_blocks``).
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.pages = cache.coordinator.single_type_managers[0]
        self.page, self.enables_caching = self.pages.block_size, cache.enable_caching
        self._held, self._num_cached = self.pages.req_to_blocks, self.pages.num_cached_block

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def allocate_slots(self, request: Any, num_new_tokens: int, *unnamed: Any, **settings: Any) -> Any:
        if num_new_tokens == 1 and not unnamed and settings == _DECODES:
            num_tokens = request.num_computed_tokens + 1
            if num_tokens <= len(self._held.get(request.request_id, ())) * self.page and (
                not self.enables_caching
                or min(num_tokens, request.num_tokens) // self.page <= self._num_cached.get(request.request_id, 0)
            ):
                return self.cache.empty_kv_cache_blocks
        return self.cache.allocate_slots(request, num_new_tokens, *unnamed, **settings)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        if self.enables_caching and num_computed_tokens // self.page > self._num_cached.get(request.request_id, 0):
            self.cache.cache_blocks(request, num_computed_tokens)
