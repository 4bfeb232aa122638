"""The side door of a process: what can be asked of it while a call keeps its main thread busy.

A thread listens on a port of the node; whoever knows the key may ask what the process is doing. Every door tells the
Python stacks of all threads ("stacks") and whether the process shares a process group ("joined"); what else it answers
is up to who opens it. Every question is answered at once, unless native code holds the interpreter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any

from rayhelper.ranks import runs
from rayhelper.worker.process_group import in_process_group

Address = tuple[str, int]

_NOT_OURS_TO_TELL = ("rayhelper-", "PythonGCThread")  # how the names of this library's threads, and of Ray's, begin
_NUM_FRAMES = 24  # of a stack are told
_LIBRARY = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MACHINERY = (f"{os.sep}ray{os.sep}", _LIBRARY)  # what a stack begins with on a worker
_SILENT = "no answer: native code holds its interpreter, or the process is gone\n"


class Door:
    """The side of the process that is asked.

    Args:
        node: The address of this node at which the others reach it.
        key: What a visitor must know.
        answers: What to call, by question, with the argument that comes with it.
    """

    def __init__(self, node: str, key: bytes, answers: Mapping[str, Callable[[Any], Any]]) -> None:
        self.answers = {"stacks": lambda _: stacks(), "joined": lambda _: in_process_group(), **answers}
        self.listener = Listener((node, 0), backlog=16, authkey=key)
        self.closed = False
        self.thread = threading.Thread(target=self._serve, name="rayhelper-door", daemon=True)
        self.thread.start()

    @property
    def address(self) -> Address:
        """Where to knock."""
        host, port = self.listener.address
        return str(host), int(port)

    def _serve(self) -> None:
        while not self.closed:
            try:
                with self.listener.accept() as visitor:
                    question, argument = visitor.recv()
                    visitor.send(self.answers[question](argument))
            except Exception:  # a visitor that does not know the key, or left: the next one is welcome
                continue
        self.listener.close()

    def close(self) -> None:
        """Nobody is answered any more. A process that ends need not close its door."""
        self.closed = True
        with contextlib.suppress(OSError):
            socket.create_connection(self.address, timeout=1.0).close()  # whoever waits for a visitor gets one
        self.thread.join(2.0)


def stacks() -> str:
    """The Python stacks of this process's threads, the main thread's first; those of this library's own left out."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    texts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None and not thread.name.startswith(_NOT_OURS_TO_TELL):
            stack = traceback.extract_stack(frame)
            own = itertools.dropwhile(lambda one: any(part in one.filename for part in _MACHINERY), stack)
            shown = "".join(traceback.format_list((list(own) or stack)[-_NUM_FRAMES:]))
            texts.append(f"thread {thread.name}, most recent call last:\n{shown}")
    return "".join(texts)


def told_stacks(answers: Mapping[int, str], ranks: Iterable[int]) -> str:
    """Where each of the ranks is, for a message: ranks with equal stacks together, those without an answer as such."""
    by_stack: dict[str, list[int]] = {}
    for rank in ranks:
        by_stack.setdefault(answers.get(rank, _SILENT), []).append(rank)
    return "\n".join(f"--- ranks {', '.join(runs(ranks))}\n{stack}" for stack, ranks in by_stack.items())


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
        except (OSError, EOFError, AuthenticationError):
            pass  # the process is gone, and its port may be another's

    name = "rayhelper-knock"
    knocking = [threading.Thread(target=knock, args=item, name=name, daemon=True) for item in doors.items()]
    for thread in knocking:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in knocking:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)
