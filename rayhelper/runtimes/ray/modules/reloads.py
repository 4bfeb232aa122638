"""Refuses calls of an object whose modules were reloaded since it was constructed."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rayhelper.errors import RoleError
from rayhelper.runtimes.ray.modules.sources import file_of, source_of


class Reloads:
    """Which modules an object's class reached when it was constructed, and whether they were reloaded since."""

    def __init__(self, names: Iterable[str]) -> None:
        self.specs = {name: (sys.modules[name].__spec__, source_of(name)) for name in names}

    def check(self, title: str) -> None:
        """Raises RoleError if a module was reloaded since, from another source. ``title``: of the call."""
        for name, (spec, source) in self.specs.items():
            module = sys.modules.get(name)
            if module is None or module.__spec__ is spec:
                continue
            if source_of(name) != source:
                raise RoleError(
                    f"{title}: module {name!r} ({file_of(name)}) was edited and reloaded on the driver after the "
                    "object was constructed. The workers still run the old code. Construct the object again."
                )
            self.specs[name] = (module.__spec__, source)  # the same source again
