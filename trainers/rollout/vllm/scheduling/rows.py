"""Running requests that only decode, a row each. Their counts and new tokens are arrays between two looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class DecodedTokens(NamedTuple):
    """Of one step: requests, and the token and its log-probability of each."""

    request_ids: list[str]
    tokens: np.ndarray  # (N,) int64
    logps: np.ndarray  # (N,) float32


class Rows:
    """The requests' state, newer than what they say themselves until ``write``.

    ``room``: tokens that a request's pages have room for. ``num_cached``: pages of it that other requests can find;
    None: no request finds any. ``stops``: the tokens that end a request. ``is_ahead``: steps are planned before the
    tokens of the last one are known.
    """

    def __init__(
        self,
        requests: list[Any],
        *,
        page: int,
        room: list[int],
        num_cached: list[int] | None,
        stops: list[frozenset[int]],
        max_model_len: int,
        is_ahead: bool,
    ) -> None:
        self.page, self.is_ahead, self.max_model_len = page, is_ahead, max_model_len
        self.requests, self.stops = requests, stops
        self.ids: list[str] = [request.request_id for request in requests]
        self.all_stops = frozenset().union(*set(stops))
        self.computed = np.array([request.num_computed_tokens for request in requests])
        self.known = np.array([request.num_tokens for request in requests])
        self.written = self.known.copy()  # tokens that the requests know themselves
        self.prompts = np.array([request.num_prompt_tokens for request in requests])
        self.limits = self.prompts + np.array([request.max_tokens for request in requests])
        self.ends = np.minimum(self.limits, max_model_len)  # a request of so many tokens has ended
        self.room = np.array(room)
        never = np.iinfo(np.int64).max
        self.full = np.array(
            [never] * len(requests) if num_cached is None else [page * (1 + count) for count in num_cached]
        )  # with so many tokens the next page can be found by others
        self.fresh = np.zeros((len(requests), 2 * page + 2), np.int64)
        self.all = np.arange(len(requests))
        self._places: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def places(self) -> dict[str, int]:
        """The row of each request."""
        if self._places is None:
            self._places = {name: row for row, name in enumerate(self.ids)}
        return self._places

    def open(self) -> np.ndarray:
        """(N,) bool: the requests of which vLLM would compute a token now.

        Others wait for a token that ends them, or have no further place in the model's length.
        """
        in_flight = self.computed - self.known + 1
        waits = (in_flight > 0) & (self.known + 1 >= self.limits) if self.is_ahead else in_flight > 0
        is_open: np.ndarray = ~waits & (self.computed + 1 < self.max_model_len)
        return is_open

    def add(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """A new token of each of these rows, which ends none of them."""
        count = self.known[rows]
        self.fresh[rows, count - self.written[rows]] = tokens
        self.known[rows] = count + 1

    def ending(self, rows: np.ndarray, drawn: list[int]) -> np.ndarray:
        """(N,) bool: of these rows those that end with their new token."""
        ends: np.ndarray = self.known[rows] + 1 >= self.ends[rows]
        if not self.all_stops.isdisjoint(drawn):
            ends |= [token in self.stops[row] for row, token in zip(rows.tolist(), drawn, strict=True)]
        return ends

    def write(self, row: int) -> Any:
        """The request of the row, as vLLM would have left it."""
        request = self.requests[row]
        known, written = int(self.known[row]), int(self.written[row])
        if known > written:
            request.append_output_token_ids(self.fresh[row, : known - written].tolist())
            self.written[row] = known
        computed = int(self.computed[row])
        request.num_computed_tokens = computed
        request.num_in_flight_tokens = computed - known + 1
        if self.is_ahead:
            request.num_output_placeholders = computed - known + 1
        return request

    def write_all(self) -> None:
        for row in range(len(self)):
            self.write(row)

    def keep(self, rows: np.ndarray) -> None:
        """Leaves out the rows that are not among these (N,) bool."""
        for name in ("computed", "known", "written", "prompts", "limits", "ends", "room", "full", "fresh"):
            setattr(self, name, getattr(self, name)[rows])
        kept = np.flatnonzero(rows).tolist()
        self.requests = [self.requests[row] for row in kept]
        self.stops = [self.stops[row] for row in kept]
        self.ids = [self.ids[row] for row in kept]
        self.all, self._places = np.arange(len(kept)), None

    def at_edge(self, is_open: np.ndarray) -> tuple[np.ndarray, int]:
        """The open rows that need a page or have filled one, in order, and how many need one."""
        needs = is_open & (self.computed >= self.room)
        return np.flatnonzero(needs | (is_open & (self.known >= self.full))), int(needs.sum())

    def pass_edge(self, row: int, allocate: Callable[[Any], Any]) -> Any:
        """What ``allocate`` gives of the row's request."""
        given = allocate(self.write(row))
        self.room[row] = max(self.room[row], -(-(int(self.computed[row]) + 1) // self.page) * self.page)
        self.cached(row, int(self.known[row]))
        return given

    def cached(self, row: int, num_tokens: int) -> None:
        """The row's whole pages of so many tokens can be found by others."""
        if num_tokens >= self.full[row]:
            self.full[row] = (num_tokens // self.page + 1) * self.page
