"""Breakpoints of the runs of this user on this machine, and a debugger at one: ``rayhelper debug``.

debug           -> the run's own door, found as ``rayhelper stacks`` finds it
the driver      -> the door of the rank: ``Waiting``
the rank        its pdb: ``watch/breakpoints.py``
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rayhelper.authenticated.client import Client
from rayhelper.errors import ConfigError
from rayhelper.runtimes.announced import running
from rayhelper.worker.side_door import PURPOSE, Address, ask

_ANSWER_S = 15.0  # for a driver that asks its workers
_RANK_S = 5.0  # for a rank
_BEAT_S = 1.0  # so often a rank hears of its debugger while the user types
_SHORTEST_S, _LONGEST_S = 0.01, 0.2  # between two questions whether pdb has written something

Doors = Callable[[], Mapping[str, tuple[Address, bytes]]]  # of all ranks, by name: ``crew:1``


class Waiting:
    """What a driver is asked of the ranks that wait at breakpoints."""

    def __init__(self, doors: Doors) -> None:
        self.doors = doors
        self.answers: dict[str, Callable[[Any], Any]] = {"breakpoints": lambda _: self.all(), "debug": self.debug}

    def all(self) -> dict[str, Any]:
        """By name of the rank, where it waits."""
        found: dict[str, Any] = {}
        for key in {key for _, key in self.doors().values()}:
            names = {k: name for k, (name, (_, its)) in enumerate(self.doors().items()) if its == key}
            addresses = {k: self.doors()[name][0] for k, name in names.items()}
            answers = ask(addresses, key, "breakpoints", None, _RANK_S)
            found |= {names[k]: answers[k] for k in sorted(answers) if answers[k] is not None}
        return found

    def debug(self, asked: list[Any]) -> Any:
        """What the rank of this name answers its debugger."""
        name, question = asked
        known = self.doors().get(name)
        if known is None:
            return {"refused": f"this run has no {name}."}
        answer = ask({0: known[0]}, known[1], "debug", {0: question}, _RANK_S)
        return answer.get(0, {"refused": f"{name} does not answer any more.", "is_gone": True})


def debug(choice: str | None, process: int | None) -> int:
    """Lists the ranks that wait at breakpoints, or attaches a debugger to one; the exit code.

    0: done; 1: the run does not answer; 2: there is no rank of this name, or there are several.
    """
    try:
        runs = running()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = []
    for number, run in sorted(runs.items()):
        if process in (None, number):
            host, port = run["door"]
            said = ask({0: (host, port)}, bytes.fromhex(run["key"]), "breakpoints", None, _ANSWER_S)
            found += [(number, name, told) for name, told in said.get(0, {}).items()]
    chosen = [(number, name) for number, name, _ in found if name == choice]
    if len(chosen) == 1:
        number, name = chosen[0]
        return _attached(runs[number], name)
    several = len({number for number, _, _ in found}) > 1
    for number, name, told in found:
        run_of = f" --process {number}" if several else ""
        taken = "   has a debugger" if told["has_debugger"] else ""
        print(f"{name}   for {told['for_s']:.0f} s   {told['where']}{taken}   rayhelper debug {name}{run_of}")
    if choice is not None:
        which = f"several runs have a {choice} that waits: name one, as above" if chosen else f"no {choice} waits"
        print(f"error: {which}", file=sys.stderr)
        return 2
    if not found:
        print(f"no rank of this user's runs on this machine ({len(runs)} runs) waits at a breakpoint")
    return 0


def _attached(run: Mapping[str, Any], name: str) -> int:
    host, port = run["door"]
    try:
        client = Client((host, port), bytes.fromhex(run["key"]), PURPOSE, _ANSWER_S)
        with contextlib.closing(client):
            return Debugger(client, name).run()
    except OSError as error:
        print(f"\nerror: the run does not answer any more ({error})", file=sys.stderr)
        return 1


class Debugger:
    """A terminal at the pdb of a rank. Ctrl-C and Ctrl-D leave the rank at its breakpoint."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name = client, name
        self.id = secrets.token_hex(8)
        self.stop = self.seen = self.num_lines = 0
        self.unprinted = ""  # the beginning of a line: the prompt
        self.lock = threading.Lock()

    def run(self) -> int:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() edits lines with it
        print(f"attached to {self.name}; c continues, q ends the call with BdbQuit, Ctrl-D leaves", flush=True)
        try:
            return self._talk()
        except (KeyboardInterrupt, EOFError):
            self._ask(leaves=True)
            print(f"\nleft: {self.name} waits on. Attach again: rayhelper debug {self.name}")
            return 0

    def _talk(self) -> int:
        pause_s = _SHORTEST_S
        while True:
            try:
                answer = self._ask()
            except ConnectionError:
                if not self.num_lines:
                    raise
                answer = {"refused": "", "is_gone": True}
            if "is_gone" in answer and self.num_lines:  # pdb took the last line, and has not asked for another one
                print(f"{self.unprinted}\n{self.name} has ended since", flush=True)
                return 0
            if "refused" in answer:
                print(f"error: {answer['refused']}", file=sys.stderr)
                return 1
            self._print(answer["text"])
            if answer["over"]:
                print(f"{self.unprinted}\n{self.name} goes on", flush=True)
                return 0
            if answer["asks"]:
                self._send(self._typed())
                pause_s = _SHORTEST_S
            elif not answer["text"]:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)

    def _print(self, text: str) -> None:
        complete, newline, self.unprinted = (self.unprinted + text).rpartition("\n")
        print(complete + newline, end="", flush=True)

    def _typed(self) -> str:
        """A line of the user's; meanwhile the rank hears that its debugger is still there."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_BEAT_S):
                with contextlib.suppress(OSError):  # whoever sends the line is told
                    self._ask(is_beat=True)

        beating = threading.Thread(target=beat, name="rayhelper-beat", daemon=True)
        beating.start()
        try:
            line = input(self.unprinted)
        finally:
            done.set()
            beating.join()
        self.unprinted = ""
        return line

    def _send(self, line: str) -> None:
        self._print(self._ask(line=line).get("text", ""))

    def _ask(self, *, line: str | None = None, leaves: bool = False, is_beat: bool = False) -> dict[str, Any]:
        with self.lock:
            sent = None if line is None else [self.num_lines, f"{line}\n"]
            question = {"debugger": self.id, "stop": self.stop, "seen": self.seen, "line": sent, "leaves": leaves}
            answer: dict[str, Any] = self.client.ask(["debug", [self.name, question]], _ANSWER_S)
            if "refused" not in answer and not is_beat:
                self.stop, self.seen = answer["stop"], answer["seen"]
                self.num_lines += line is not None
            return answer
