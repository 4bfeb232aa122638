"""What the processes that run the driver's code tell one another: several under torchrun, otherwise one.

told_by_each(...)      what each of them brings to the same place in the code
hears_of_the_end()     inside, a process hears that another one was asked to end
pass_end_on()          tells it to the others, from any thread
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from rayhelper.roles.runtime import state

T = TypeVar("T")


def told_by_each(place: str, value: T) -> list[T]:
    """The values of all processes, in order of rank, on each of them. All must come here, and ``place`` names it.

    Raises as a call of a role does under torchrun: another process came elsewhere, or ended.
    """
    tell = getattr(state.process, "told_by_each", None)
    return [value] if tell is None else list(tell(place, value))


def hears_of_the_end(note: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Inside, ``note`` is called in a thread when another process passes on that the run shall end."""
    exchange = getattr(state.process, "exchange", None)
    return contextlib.nullcontext() if exchange is None else exchange.hearing_of_the_end(note)


def pass_end_on() -> bool:
    """Tells process 0 that the run shall end; process 0 tells all others. Whether process 0 knows it now.

    A process can be asked while native code keeps its main thread. Processes of several nodes that share no key cannot.
    """
    exchange = getattr(state.process, "exchange", None)
    return exchange is None or bool(exchange.pass_end_on())
