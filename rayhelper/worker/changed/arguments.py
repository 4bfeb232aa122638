"""Which arguments a method has changed in place: with Ray off its caller sees that, and on Ray it does not.

The first calls of each method on a worker are looked at, and some of the later ones. Each argument is told once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rayhelper.values.calls import parameter_names
from rayhelper.values.dispatch import label_of
from rayhelper.worker.changed.marks import PLAIN, Mark, differ, is_looked_at, mark

_MOST = 8192  # entries of an argument that are looked at


class Given:
    """The arguments of calls on one worker."""

    def __init__(self) -> None:
        self.num_calls: Counter[Any] = Counter()  # by method
        self.told: set[tuple[Any, int | str]] = set()  # by method, the places of arguments

    def marks(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Mark] | None:
        """Of the arguments of a call that is about to be made; None: it is not looked at."""
        if not args and not kwargs:
            return None
        self.num_calls[method] += 1
        if not is_looked_at(self.num_calls[method]):
            return None
        places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return {
            place: mark(value, _MOST)
            for place, value in places
            if type(value) not in PLAIN and (method, place) not in self.told
        }

    def changed(
        self, before: dict[int | str, Mark] | None, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[str]:
        """Those that the call has changed, as messages name them."""
        found = []
        for place, was in (before or {}).items():
            value = args[place] if isinstance(place, int) else kwargs[place]
            if differ(was, mark(value, _MOST)):
                self.told.add((method, place))
                found.append("its " + label_of(place, parameter_names(method)))
        return found
