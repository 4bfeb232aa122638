"""The side door of a worker process: what can be asked of it while a call keeps its main thread busy.

A thread of the worker listens on a port of its node; whoever knows the group's key may ask for the Python stacks of all
threads, have calls stopped, or have the process leave its process group. Every question is answered at once, unless
native code holds the interpreter.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING, Any

from rayhelper.process_group import in_process_group

if TYPE_CHECKING:
    from rayhelper.host import Host

Address = tuple[str, int]

_OWN_THREADS = ("rayhelper-door", "PythonGCThread")  # this library's and Ray's


class Door:
    """The worker's side: opened once, for the life of the process."""

    def __init__(self, host: Host, node: str, key: bytes) -> None:
        self.host = host
        self.listener = Listener((node, 0), backlog=16, authkey=key)
        threading.Thread(target=self._serve, name="rayhelper-door", daemon=True).start()

    @property
    def address(self) -> Address:
        """Where to knock."""
        host, port = self.listener.address
        return str(host), int(port)

    def _serve(self) -> None:
        while True:
            try:
                with self.listener.accept() as visitor:
                    visitor.send(self._answer(*visitor.recv()))
            except Exception:  # a visitor that does not know the key, or left: the next one is welcome
                continue

    def _answer(self, question: str, argument: Any) -> Any:
        if question == "stacks":
            return stacks()
        if question == "stop":
            return self.host.stop_tasks(argument)
        if question == "leave":
            return self.host.leave()
        if question == "joined":
            return in_process_group()
        return None


def stacks() -> str:
    """The Python stacks of this process's threads, the main thread's first; those of this library's own left out."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    texts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread.name not in _OWN_THREADS:
            stack = "".join(traceback.format_stack(frame)[-12:])
            texts.append(f"thread {thread.name}, most recent call last:\n{stack}")
    return "".join(texts)


def ask(doors: Mapping[int, Address], key: bytes, question: str, arguments: Any, timeout_s: float) -> dict[int, Any]:
    """The answers by rank, of those that answered within ``timeout_s``.

    Args:
        arguments: What goes with the question: by rank if it is a dict, else the same for all.
    """
    answers: dict[int, Any] = {}

    def knock(rank: int, address: Address) -> None:
        try:
            with Client(address, authkey=key) as door:
                door.send((question, arguments.get(rank) if isinstance(arguments, dict) else arguments))
                answers[rank] = door.recv()
        except (OSError, EOFError):
            pass  # the process is gone

    knocking = [threading.Thread(target=knock, args=item, daemon=True) for item in doors.items()]
    for thread in knocking:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in knocking:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)
