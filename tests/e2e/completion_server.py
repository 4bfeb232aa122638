"""An OpenAI-compatible server in this process, that answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, Any]]  # status, body
LONGEST_WAIT_S = 30.0


class CompletionServer:
    """Answers ``answer(request)``, and remembers what it was asked, under which keys, and how many at once."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.open = self.most_open = 0
        self.changed = threading.Condition()

    def handle(self, request: dict[str, Any], key: str | None) -> Answer:
        with self.changed:
            self.requests.append(request)
            self.keys.add(key)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            self.changed.notify_all()
        try:
            return self.answer(request)
        finally:
            with self.changed:
                self.open -= 1
                self.changed.notify_all()

    def waits_for(self, happened: Callable[[], bool]) -> bool:
        """Whether something came to be that requests bring about."""
        with self.changed:
            return self.changed.wait_for(happened, LONGEST_WAIT_S)


def says(text: str | None, *, reasoning: str | None = None, finish_reason: str = "stop") -> Answer:
    """A completion of a server."""
    message = {"role": "assistant", "content": text, "reasoning_content": reasoning}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return 200, {"choices": [choice], "usage": {"completion_tokens": len(text or "")}}


def fails(status: int, words: str = "busy") -> Answer:
    return status, {"error": {"message": words}}


def question(request: dict[str, Any]) -> str:
    """The last message of a request."""
    return str(request["messages"][-1]["content"])


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Answer]) -> Iterator[tuple[str, CompletionServer]]:
    """The address of the API, and the server."""
    state = CompletionServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = self.path == "/v1/chat/completions"
            self.reply(*(state.handle(request, self.headers["Authorization"]) if known else fails(404, self.path)))

        def do_GET(self) -> None:
            """/asked/TEXT: whether somebody asks TEXT, answered when he does."""
            text = self.path.removeprefix("/v1/asked/")
            asked = state.waits_for(lambda: any(question(request) == text for request in list(state.requests)))
            self.reply(200, {"asked": asked})

        def reply(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 429:
                self.send_header("Retry-After", "0.01")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
