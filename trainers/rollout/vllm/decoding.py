"""What stands in the place of vLLM's own functions in steps that decode; ``patches.py`` puts it there."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple


class DecodedTokens(NamedTuple):
    """Of one step: requests, and the token and its log-probability of each."""

    request_ids: list[str]
    tokens: list[int]
    logps: list[float]


def update(scheduler: Any, decoded: list[DecodedTokens], update: Any, planned: Any, found: Any) -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.request import RequestStatus

    logps, sampled = found.logprobs, found.sampled_token_ids
    if (
        logps is None
        or logps.cu_num_generated_tokens is not None
        or not sampled
        or found.num_nans_in_logits
        or planned.scheduled_spec_decode_tokens
    ):
        return update(planned, found)
    is_async, max_model_len = isinstance(scheduler, AsyncScheduler), scheduler.max_model_len
    requests, places, to_cache = scheduler.requests, found.req_id_to_index, scheduler.kv_cache_manager.cache_blocks
    rest, request_ids, tokens, rows = {}, [], [], []
    for request_id, num_tokens in planned.num_scheduled_tokens.items():
        request = requests.get(request_id)
        if (
            request is not None
            and num_tokens == 1
            and request.status is RequestStatus.RUNNING
            and request.prefill_stats is None  # not its first
            and not getattr(request, "num_stale_output_tokens", 0)  # 0.32
            and not getattr(request, "async_tokens_to_discard", 0)  # 0.26
            and len(drawn := sampled[row := places[request_id]]) == 1
            and not _may_end(request, drawn[0], max_model_len)
        ):
            request.num_in_flight_tokens -= 1
            request.append_output_token_ids(drawn[0])
            if is_async:
                request.num_output_placeholders -= 1
                to_cache(request, request.num_computed_tokens - request.num_output_placeholders)
            request_ids.append(request_id)
            tokens.append(drawn[0])
            rows.append(row)
        else:
            rest[request_id] = num_tokens
    if request_ids:
        decoded.append(DecodedTokens(request_ids, tokens, logps.logprobs[rows, 0].tolist()))
        planned = copy.copy(planned)
        planned.num_scheduled_tokens = rest
    return update(planned, found)


def _may_end(request: Any, token: int, max_model_len: int) -> bool:
    params = request.sampling_params
    return (
        token == params.eos_token_id
        or token in params.stop_token_ids
        or len(request._output_token_ids) + 1 >= request.max_tokens
        or len(request._all_token_ids) + 1 >= max_model_len
    )


def allocate(
    cache: Any, pages: Any, allocate: Any, request: Any, num_new_tokens: int, *unnamed: Any, **settings: Any
) -> Any:
    num_tokens = request.num_computed_tokens + num_new_tokens
    if (
        num_new_tokens == 1
        and not unnamed
        and settings == {"num_lookahead_tokens": 0}
        and num_tokens <= len(pages.req_to_blocks.get(request.request_id, ())) * pages.block_size
        and request.request_id not in pages._partial_hit_reqs
        and _is_cached(cache, pages, request, min(num_tokens, request.num_tokens))
    ):
        return cache.empty_kv_cache_blocks
    return allocate(request, num_new_tokens, *unnamed, **settings)


def cache(cache: Any, pages: Any, to_cache: Any, request: Any, num_computed_tokens: int) -> None:
    if not _is_cached(cache, pages, request, num_computed_tokens):
        to_cache(request, num_computed_tokens)


def _is_cached(cache: Any, pages: Any, request: Any, num_tokens: int) -> bool:
    """Whether all whole pages of so many tokens can be found by other requests, or none ever can."""
    num_cached = pages.num_cached_block.get(request.request_id, 0)
    return not cache.enable_caching or num_tokens // pages.block_size <= num_cached


class DecodingKernel:
    """The kernel, started as it says for steps that decode alone; what else is asked of it is the kernel's."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._start, grid)

    def _start(self, grid: tuple[int, ...], *unnamed: Any, **arguments: Any) -> Any:
        settings = {"num_warps": 2, "num_stages": 2} if _suits(grid, arguments) else {}
        return self.kernel[grid](*unnamed, **settings | arguments)


def _suits(grid: tuple[int, ...], arguments: dict[str, Any]) -> bool:
    """A query a sequence, each read whole by one block, heads of 128 numbers of 16 bits: what was measured."""
    return (
        arguments.keys() >= {"query_ptr", "seq_lens_ptr", "HEAD_SIZE", "TILE_SIZE", "key_cache_ptr"}
        and len(grid) == 2
        and len(arguments["query_ptr"]) <= len(arguments["seq_lens_ptr"])
        and arguments["HEAD_SIZE"] == 128
        and arguments["TILE_SIZE"] == 32
        and arguments["key_cache_ptr"].element_size() == 2
    )
