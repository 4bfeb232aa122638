"""A client of a server that answers, fails, fails for a while, or is not there."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rayhelper import ConfigError
from tests.e2e.completion_server import Answer, fails, question, says, serving
from trainers.sampling.openai_client import OpenAIClient, Reply


def asking(*questions: str) -> list[dict[str, Any]]:
    return [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in questions]


def client(url: str, **settings: Any) -> OpenAIClient:
    return OpenAIClient(url, **({"first_pause_s": 0.01, "max_retries": 3} | settings))


def test_replies_come_in_the_order_of_their_requests() -> None:
    questions = [f"question {k}" for k in range(20)]
    with serving(lambda request: says(question(request).upper(), reasoning="so")) as (url, server):
        replies = client(url, api_key="secret").complete(asking(*questions))
    assert replies == [Reply(text.upper(), "so", len(text)) for text in questions]
    assert server.keys == {"Bearer secret"}


def test_a_request_is_repeated_until_the_server_recovers() -> None:
    troubles = {"a": [fails(500), fails(429)], "b": [fails(503)], "c": []}

    def answer(request: dict[str, Any]) -> Answer:
        left = troubles[question(request)]
        return left.pop() if left else says("well")

    with serving(answer) as (url, server):
        assert [reply.text for reply in client(url).complete(asking("a", "b", "c"))] == ["well"] * 3
    assert sorted(question(request) for request in server.requests) == ["a", "a", "a", "b", "b", "c"]


def test_what_cannot_be_answered_is_an_error_of_that_request_alone() -> None:
    answers = {
        "good": says("yes"),
        "down": fails(500, "out of memory"),
        "bad": fails(400, "too long, secret"),
        "empty": says("", finish_reason="length"),
        "null": says(None, reasoning="I wonder"),
        "odd": (200, {"detail": "hello"}),
    }
    with serving(lambda request: answers[question(request)]) as (url, server):
        replies = client(url, max_retries=2, api_key="secret").complete(asking(*answers))
    good, down, bad, empty, null, odd = replies
    assert good == Reply("yes", None, 3)
    assert [reply.text for reply in replies[1:]] == [""] * 5
    assert down.error is not None
    assert "status 500" in down.error
    assert "out of memory" in down.error
    assert "(3 times)" in down.error
    assert bad.error is not None
    assert "too long, ***" in bad.error
    assert empty.error == "empty completion (finish_reason length)"
    assert null.error == "empty completion (finish_reason stop)"
    assert odd.error is not None
    assert "an unexpected form" in odd.error
    assert sum(question(request) == "bad" for request in server.requests) == 1


def test_an_answer_that_takes_too_long_is_asked_for_again() -> None:
    first = threading.Event()
    go_on = threading.Event()

    def answer(request: dict[str, Any]) -> Answer:
        if not first.is_set():
            first.set()
            go_on.wait(60)
        else:
            go_on.set()
        return says("here")

    with serving(answer) as (url, server):
        assert client(url, request_timeout_s=0.3).complete(asking("a")) == [Reply("here", None, 4)]
        assert len(server.requests) >= 2


def test_no_more_requests_are_open_than_allowed_and_so_many_are() -> None:
    together = threading.Barrier(3)  # each answer waits for two others

    def answer(request: dict[str, Any]) -> Answer:
        together.wait(60)
        return says("yes")

    with serving(answer) as (url, server):
        replies = client(url, max_concurrent_requests=3).complete(asking(*"abcdefghi"))
    assert [reply.error for reply in replies] == [None] * 9
    assert server.most_open == 3


@pytest.mark.parametrize(("status", "advice"), [(401, "set api_key"), (403, "set api_key"), (404, "base_url or model")])
def test_what_no_request_can_get_past_ends_the_run(status: int, advice: str) -> None:
    with (
        serving(lambda _: fails(status, "no such model")) as (url, _),
        pytest.raises(ConfigError, match=advice) as error,
    ):
        client(url).complete(asking("a", "b"))
    assert "no such model" in str(error.value)


def test_a_server_that_is_not_there_ends_the_run() -> None:
    with serving(lambda _: says("yes")) as (url, _):
        pass
    with pytest.raises(ConnectionError, match="cannot be reached, 3 times"):
        client(url, max_retries=2).complete(asking("a"))


def test_it_works_where_an_event_loop_runs_already() -> None:
    async def in_a_notebook(url: str) -> list[Reply]:
        return client(url).complete(asking("a"))

    with serving(lambda _: says("yes")) as (url, _):
        assert asyncio.run(in_a_notebook(url)) == [Reply("yes", None, 3)]
