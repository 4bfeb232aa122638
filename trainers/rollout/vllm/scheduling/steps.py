"""Steps that only decode: planned from arrays, and what they drew taken in as arrays.

    schedule ──► plan ──► a SchedulerOutput as vLLM would have made it, or None: vLLM makes it
    update_from_output ──► take ──► tokens that end nothing; what is left of the step is vLLM's

All else that happens to requests is vLLM's own. ``settle`` comes first: the requests are then as vLLM left them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainers.rollout.vllm.scheduling.rows import DecodedTokens, Rows
from trainers.rollout.vllm.scheduling.single import Pages, is_stale, takes_apart, update, with_tokens

# Attributes of a scheduler that is none of ours where they are true
_UNUSUAL = (
    *("connector", "ec_connector", "aux_output_connector", "log_stats", "defer_block_free", "use_pp"),
    *("enable_return_routed_experts", "return_sampling_mask", "is_encoder_decoder", "is_mm_encoder_only"),
    *("num_spec_tokens", "num_lookahead_tokens", "num_prefill_lookahead", "enable_kv_cache_events"),
    *("finished_req_ids_dict", "perf_metrics"),
)


class Steps:
    """The steps of one scheduler. ``is_ahead``: it plans a step before the tokens of the last one are known."""

    def __init__(self, scheduler: Any, *, is_ahead: bool) -> None:
        self.scheduler, self.is_ahead = scheduler, is_ahead
        self.is_usual = not any(getattr(scheduler, name, None) for name in _UNUSUAL)
        self.decoded: list[DecodedTokens] = []
        self.has_arrays = False
        self.rows: Rows | None = None
        self._flights: list[tuple[Any, list[str], Any]] = []  # a plan of ours, the names of its rows, which of them
        self._last: list[str] | None = None  # the requests of the last step, where it was ours
        cache = scheduler.kv_cache_manager
        managers = cache.coordinator.single_type_managers
        if not self.is_usual or [type(manager).__name__ for manager in managers] != ["FullAttentionManager"]:
            return
        if managers[0].block_size == managers[0].block_pool.hash_block_size:  # otherwise parts of pages are cached too
            scheduler.kv_cache_manager = Pages(cache)
            self.has_arrays = not scheduler.needs_kv_cache_zeroing

    def settle(self) -> None:
        """Each request is as vLLM would have left it."""
        if self.rows is not None:
            self.rows.write_all()
            self.rows = None
            self._flights.clear()
        self._last = None

    # Planning

    def plan(self) -> Any:
        """The next step, where it only decodes; None: vLLM plans it."""
        if not self.has_arrays:
            return None
        planned = self._plan()
        if planned is None:
            self.settle()
        return planned

    def _plan(self) -> Any:
        scheduler = self.scheduler
        running = scheduler.running
        if not running or self._may_do_more():
            return None
        rows = self.rows
        if rows is None or len(rows) != len(running) or rows.requests[-1] is not running[-1]:
            self.settle()
            rows = self.rows = self._rows()
            if rows is None:
                return None
        is_open = rows.open()
        chosen = None if is_open.all() else np.flatnonzero(is_open)
        ids = rows.ids if chosen is None else [rows.ids[row] for row in chosen.tolist()]
        edges, num_pages = rows.at_edge(is_open)
        pool = scheduler.kv_cache_manager.coordinator.block_pool
        last = scheduler.prev_step_scheduled_req_ids
        if (
            not ids
            or len(ids) > min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)
            or num_pages > pool.get_num_free_blocks()
            or (not scheduler.use_v2_model_runner and self._last is not ids and not last.issuperset(ids))
        ):
            return None
        scheduler.current_step += 1
        scheduler.kv_cache_manager.new_step_starts()
        new_pages = self._new_pages(rows, edges, chosen, len(ids))
        if not scheduler.use_v2_model_runner and self._last is not ids:
            last.clear()
            last.update(ids)
        self._last = ids
        of = rows.all if chosen is None else chosen
        planned = self._output(ids, new_pages, rows.computed[of], rows.prompts[of])
        rows.computed[of] += 1
        self._flights.append((planned, rows.ids, chosen))
        return planned

    def _may_do_more(self) -> bool:
        """Whether requests may enter, or the scheduler pauses."""
        from vllm.v1.core.sched.interface import PauseState

        scheduler = self.scheduler
        num_running, num_waiting = scheduler.get_request_counts()
        most = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        has_slots = num_running + scheduler.num_waiting_for_streaming_input < most
        return bool((num_waiting and has_slots) or scheduler.pause_state != PauseState.UNPAUSED)

    def _rows(self) -> Rows | None:
        """All that run, a row each; None: they do not only decode."""
        from vllm.v1.request import RequestStatus

        scheduler = self.scheduler
        pages = scheduler.kv_cache_manager.pages
        running = scheduler.running
        if not all(self._decodes(request, RequestStatus.RUNNING) for request in reversed(running)):
            return None
        known: dict[tuple[Any, ...], frozenset[int]] = {}
        stops = []
        for request in running:
            params = request.sampling_params
            tokens = (params.eos_token_id, *(params.stop_token_ids or ()))
            stops.append(known.setdefault(tokens, frozenset(tokens) - {None}))
        names = [request.request_id for request in running]
        return Rows(
            list(running),
            page=pages.block_size,
            room=[len(pages.req_to_blocks[name]) * pages.block_size for name in names],
            num_cached=[pages.num_cached_block.get(name, 0) for name in names]
            if scheduler.kv_cache_manager.enables_caching
            else None,
            stops=stops,
            max_model_len=scheduler.max_model_len,
            is_ahead=self.is_ahead,
        )

    def _decodes(self, request: Any, running: Any) -> bool:
        """Whether nothing is left to be done for a request but to draw one token per step."""
        in_flight, params = request.num_in_flight_tokens, request.sampling_params
        return (
            request.status is running
            and request.prefill_stats is None  # its first token is known
            and not request.is_prefill_chunk
            and request.num_tokens + in_flight - request.num_computed_tokens == 1
            and request.num_output_placeholders == (in_flight if self.is_ahead else 0)
            and not request.spec_token_ids
            and not is_stale(request)
            and params is not None
            and params.num_logprobs is not None
            and params.repetition_detection is None
            and not request.use_structured_output
            and not request.resumable
            and not (request.has_encoder_inputs and self._holds_pictures(request))
        )

    def _holds_pictures(self, request: Any) -> bool:
        return bool(self.scheduler.encoder_cache_manager.get_cached_input_ids(request))

    def _new_pages(self, rows: Rows, edges: np.ndarray, chosen: np.ndarray | None, count: int) -> list[Any]:
        """What each request of the step has been given of pages; None: nothing."""
        given: list[Any] = [None] * count
        cache = self.scheduler.kv_cache_manager.cache
        places = edges if chosen is None else np.searchsorted(chosen, edges)
        for row, place in zip(edges.tolist(), places.tolist(), strict=True):
            blocks = rows.pass_edge(row, lambda request: cache.allocate_slots(request, 1, num_lookahead_tokens=0))
            assert blocks is not None, "there were free pages enough"
            given[place] = blocks.get_block_ids(allow_none=True)
        return given

    def _output(self, ids: list[str], new_pages: list[Any], computed: np.ndarray, prompts: np.ndarray) -> Any:
        """vLLM's SchedulerOutput of a token of each of these requests."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        scheduler = self.scheduler
        encoder, cache = scheduler.encoder_cache_manager, scheduler.kv_cache_manager
        own: dict[str, Any] = {}
        if "ec_manager_metadata" in vars(SchedulerOutput):  # 0.32
            own["ec_manager_metadata"] = encoder.get_manager_metadata()
        else:  # 0.26
            first = scheduler.running[0].request_id
            own["num_common_prefix_blocks"] = cache.get_num_common_prefix_blocks(first)
        planned = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_pages,
                num_computed_tokens=computed.tolist(),
                num_output_tokens=(computed + 1 - prompts).tolist(),
            ),
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=scheduler.finished_req_ids,
            preempted_req_ids=scheduler.reset_preempted_req_ids,
            free_encoder_mm_hashes=encoder.get_freed_mm_hashes(),
            **own,
        )
        scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = set(), set()
        return planned

    # What was drawn

    def take(self, planned: Any, found: Any) -> Any:
        """The plan of what vLLM takes in; the tokens of others are in ``decoded``."""
        if not self.is_usual:
            return planned
        if (rest := self._take(planned, found)) is not None:
            return rest
        self.settle()
        decoded, rest = update(self.scheduler, planned, found, is_ahead=self.is_ahead)
        if decoded is not None:
            self.decoded.append(decoded)
        return rest

    def _take(self, planned: Any, found: Any) -> Any:
        """As ``take``, of arrays; None: one request at a time."""
        rows = self.rows
        names = planned.num_scheduled_tokens
        if (
            rows is None
            or planned.total_num_scheduled_tokens != len(names)
            or found.prompt_logprobs_dict
            or not takes_apart(planned, found)
        ):
            return None
        ids, of = self._rows_of(rows, planned)
        places = found.req_id_to_index
        where = [places[name] for name in ids]
        sampled = [found.sampled_token_ids[place] for place in where]
        if any(len(one) != 1 for one in sampled):
            return None
        drawn = [one[0] for one in sampled]
        tokens = np.array(drawn, np.int64)
        logps = found.logprobs.logprobs[where, 0]
        ends = rows.ending(of, drawn)
        rest: dict[str, int] = {}
        if len(ids) < len(names):
            known = rows.places()
            rest = {name: count for name, count in names.items() if name not in known}
        ended = of[ends]
        if len(ended):
            last = {rows.ids[row] for row in ended.tolist()}
            rest = {name: count for name, count in names.items() if name in last or name in rest}
            goes = ~ends
            of, tokens, logps = of[goes], tokens[goes], logps[goes]
            ids = [name for name in ids if name not in last]
        rows.add(of, tokens)
        self._cache(rows, of)
        if len(ended):
            for row in ended.tolist():
                rows.write(row)
            is_kept = np.ones(len(rows), bool)
            is_kept[ended] = False
            rows.keep(is_kept)
        if ids:
            self.decoded.append(DecodedTokens(ids, tokens, logps))
        return with_tokens(planned, rest)

    def _rows_of(self, rows: Rows, planned: Any) -> tuple[list[str], np.ndarray]:
        """The requests of the plan that have rows, and their rows."""
        for place, (flight, ids, chosen) in enumerate(self._flights):
            if flight is planned:
                del self._flights[place]
                if ids is rows.ids:
                    return (ids, rows.all) if chosen is None else ([ids[row] for row in chosen.tolist()], chosen)
                break
        known = rows.places()
        names = [name for name in planned.num_scheduled_tokens if name in known]
        return names, np.array([known[name] for name in names], np.int64)

    def _cache(self, rows: Rows, of: np.ndarray) -> None:
        """Pages that became whole while no step was planned; a step that is planned looks after its own."""
        if not self.is_ahead:
            return
        for row in of[rows.known[of] > rows.full[of]].tolist():
            known = int(rows.known[row])
            self.scheduler.kv_cache_manager.cache_blocks(rows.write(row), known - 1)
            rows.cached(row, known - 1)


def take_decoded(scheduler: Any) -> list[DecodedTokens]:
    """The tokens since the last call that ended nothing, of a scheduler of ours; of others none."""
    steps = getattr(scheduler, "steps", None)
    if not isinstance(steps, Steps):
        return []
    decoded, steps.decoded = steps.decoded, []
    return decoded
