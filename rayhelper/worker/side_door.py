"""The side door of a process: what can be asked of it while a call keeps its main thread busy.

A thread listens on a port of the node; whoever knows the key may ask what the process is doing. Every door tells the
Python stacks of all threads ("stacks") and whether the process shares a process group ("joined"); what else it answers
is up to who opens it. Every question is answered at once, unless native code holds the interpreter. Questions and
answers are JSON, and each carries a code: ``rayhelper/authenticated``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rayhelper.authenticated.client import Client
from rayhelper.authenticated.server import Address as Address
from rayhelper.authenticated.server import Server
from rayhelper.ranks import runs
from rayhelper.watch import places
from rayhelper.watch.places import summaries
from rayhelper.worker.process_group import in_process_group

PURPOSE = "door"
# How the names of threads begin that are this library's, or helpers of Ray and of progress bars
_NOT_OURS_TO_TELL = (
    "rayhelper-",
    "PythonGCThread",
    "ray_listen_error_messages",
    "ray_print_logs",
    "ray_import_thread",
    "tqdm_monitor",
)
_NUM_FRAMES = 24  # of a stack are told
_LIBRARY = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MACHINERY = (f"{os.sep}ray{os.sep}", _LIBRARY)  # what a stack begins with on a worker
_TAIL_BYTES = 65536
_MARKS = (":actor_name:", ":task_name:", ":job_id:")  # lines for Ray itself
_SILENT = "no answer: native code holds its interpreter, or the process is gone\n"


class Door:
    """The side of the process that is asked.

    Args:
        node: The address of this node at which the others reach it.
        key: What a visitor must know.
        answers: What to call, by question, with the argument that comes with it: values that JSON has.
    """

    def __init__(self, node: str, key: bytes, answers: Mapping[str, Callable[[Any], Any]]) -> None:
        self.answers = {"stacks": lambda _: stacks(), "joined": lambda _: in_process_group(), **answers}
        self.server = Server(node, key, PURPOSE, lambda asked: self.answers[asked[0]](asked[1]), "rayhelper-door")

    @property
    def address(self) -> Address:
        """Where to knock."""
        return self.server.address

    def close(self) -> None:
        """Nobody is answered any more. A process that ends need not close its door."""
        self.server.close()


def stacks() -> str:
    """The Python stacks of this process's threads, the main thread's first; those of this library's own left out."""
    found = places.stacks()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    texts = []
    for thread in threads:
        stack = summaries(found.get(thread.ident or 0, ())[::-1])
        if stack and not thread.name.startswith(_NOT_OURS_TO_TELL):
            own = itertools.dropwhile(lambda one: any(part in one.filename for part in _MACHINERY), stack)
            shown = "".join(traceback.format_list((list(own) or stack)[-_NUM_FRAMES:]))
            texts.append(f"thread {thread.name}, most recent call last:\n{shown}")
    return "".join(texts)


def printed() -> tuple[int, list[str]]:
    """This process, and the last lines of its output and its errors, if these are files, as Ray's workers have them."""
    last: list[str] = []
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    for number in (1, 2):
        with contextlib.suppress(OSError), open(os.readlink(f"/proc/self/fd/{number}"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            last += [line for line in lines if line.strip() and not line.startswith(_MARKS)][-1:]
    return os.getpid(), last


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
        asked = arguments.get(rank) if isinstance(arguments, dict) else arguments
        with contextlib.suppress(OSError, ValueError):  # the process is gone, and its port may be another's
            client = Client(address, key, PURPOSE, timeout_s)
            with contextlib.closing(client):
                answers[rank] = client.ask([question, asked], timeout_s)

    name = "rayhelper-knock"
    knocking = [threading.Thread(target=knock, args=item, name=name, daemon=True) for item in doors.items()]
    for thread in knocking:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in knocking:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)
