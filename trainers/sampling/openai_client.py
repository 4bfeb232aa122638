"""Completions from an OpenAI-compatible server: many requests at once, repeated where that may help.

    client = OpenAIClient("http://localhost:8000/v1", api_key=None, max_concurrent_requests=16)
    replies = client.complete([{"model": "m", "messages": [...], "seed": 1}, ...])     # in order, one a request

What a server answers is a ``Reply``; a request that cannot be answered is a ``Reply`` with an ``error`` and ends
nothing. What every other request would run into too (a wrong key, a wrong model, no server) is raised.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rayhelper import ConfigError

LONGEST_PAUSE_S = 60.0
SHOWN_CHARACTERS = 300  # of what a server said went wrong
HOPELESS = {
    401: "set api_key or OPENAI_API_KEY",
    403: "set api_key or OPENAI_API_KEY",
    404: "correct base_url or model",
}


@dataclass(frozen=True)
class Reply:
    """What became of one request."""

    text: str = ""
    reasoning: str | None = None
    num_tokens: int = 0
    error: str | None = None  # why there is no text


class OpenAIClient:
    """Asks one server. ``first_pause_s`` is the pause before the first repetition; each next one is twice as long."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        max_concurrent_requests: int = 16,
        max_retries: int = 5,
        request_timeout_s: float = 600.0,
        first_pause_s: float = 1.0,
    ) -> None:
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.api_key = api_key or ""
        self.max_concurrent_requests = max_concurrent_requests
        self.max_retries = max_retries
        self.request_timeout_s = request_timeout_s
        self.first_pause_s = first_pause_s

    def complete(self, requests: Sequence[dict[str, Any]]) -> list[Reply]:
        """One reply a request, in order.

        Raises:
            ConfigError: the server refuses the key, or does not know the model or the address.
            ConnectionError: there is no server, also after the last repetition.
        """
        return _run(lambda: self._complete(requests))

    async def _complete(self, requests: Sequence[dict[str, Any]]) -> list[Reply]:
        httpx = http_library()
        slots = asyncio.Semaphore(self.max_concurrent_requests)
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=self.max_concurrent_requests)
        async with httpx.AsyncClient(headers=headers, timeout=self.request_timeout_s, limits=limits) as http:

            async def ask(request: dict[str, Any]) -> Reply:
                async with slots:
                    return await self._ask(http, request)

            async with asyncio.TaskGroup() as group:  # one that raises cancels the others
                tasks = [group.create_task(ask(request)) for request in requests]
        return [task.result() for task in tasks]

    async def _ask(self, http: Any, request: dict[str, Any]) -> Reply:
        httpx = http_library()
        unreachable: Exception | None = None
        problem = ""
        pause_s = self.first_pause_s
        for attempt in range(self.max_retries + 1):
            wait_s = None
            try:
                response = await http.post(self.url, json=request)
            except httpx.TimeoutException as error:
                unreachable = error if isinstance(error, httpx.ConnectTimeout) else None
                problem = f"no answer within {self.request_timeout_s:g} s"
            except httpx.TransportError as error:
                unreachable = error
                problem = f"{type(error).__name__}: {error}"
            else:
                unreachable = None
                if response.status_code == 200:
                    return self._read(response)
                problem = f"status {response.status_code}: {self._hidden(response.text)[:SHOWN_CHARACTERS]}"
                if response.status_code in HOPELESS:
                    raise ConfigError(f"{self.url}: {problem}; {HOPELESS[response.status_code]}")
                if response.status_code not in (408, 409, 429) and response.status_code < 500:
                    return Reply(error=problem)
                wait_s = _seconds(response.headers.get("retry-after"))
            if attempt < self.max_retries:
                await asyncio.sleep(min(LONGEST_PAUSE_S, wait_s or pause_s * random.uniform(0.75, 1.25)))
                pause_s *= 2
        if unreachable is not None:
            raise ConnectionError(
                f"{self.url} cannot be reached, {self.max_retries + 1} times: {self._hidden(problem)}. Is it up? "
                "The rows so far are kept; resume: true continues."
            ) from None
        return Reply(error=f"{problem} ({self.max_retries + 1} times)")

    def _read(self, response: Any) -> Reply:
        try:
            body = response.json()
            choice = body["choices"][0]
            message = choice["message"]
        except (ValueError, LookupError, TypeError):
            return Reply(error=f"an answer in an unexpected form: {self._hidden(response.text)[:SHOWN_CHARACTERS]}")
        num_tokens = int((body.get("usage") or {}).get("completion_tokens") or 0)
        text = message.get("content") or ""
        if not text.strip():
            return Reply(num_tokens=num_tokens, error=f"empty completion (finish_reason {choice.get('finish_reason')})")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        return Reply(text, reasoning, num_tokens)

    def _hidden(self, text: str) -> str:
        """Servers repeat keys in their complaints."""
        return text.replace(self.api_key, "***") if self.api_key else text


def http_library() -> Any:
    """httpx, under whichever name it came with transformers: the two are one library."""
    for name in ("httpx2", "httpx"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ConfigError("sampler_engine client needs httpx: pip install httpx")


def _seconds(retry_after: str | None) -> float | None:
    """What a server asks to wait; it may be a date, which is not looked at."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _run(work: Callable[[], Coroutine[Any, Any, list[Reply]]]) -> list[Reply]:
    """The value of a coroutine, also where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _raised(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_raised, work).result()


def _raised(work: Callable[[], Coroutine[Any, Any, list[Reply]]]) -> list[Reply]:
    """A TaskGroup's errors come in a group; the first says what is wrong."""
    try:
        return asyncio.run(work())
    except* (ConfigError, ConnectionError) as group:
        first = group.exceptions[0]
    raise first
