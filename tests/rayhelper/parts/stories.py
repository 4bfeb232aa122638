"""A story builds a whole, makes calls and returns a plain value: the same story in every runtime and layout.

    @story
    def counted_twice() -> Any:
        trainer = Trainer()
        trainer.policy.step()
        return trainer.policy.step()

    def test_a_part_keeps_its_state(run: Run) -> None:
        assert run(counted_twice) == 2

A test that is not for every runtime and layout says so: ``@only(runs("ray", layouts=("pair",)))``.

Stories and their tests stand in the same files, ``test_*.py`` of this folder. Under torchrun all stories of all files
are played in two launches, for starting takes most of the time: see ``launch.py``.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rayhelper import RayHelper
from tests.rayhelper.parts.layouts import LAYOUTS_OF, OFF, Layout

Open = Callable[..., AbstractContextManager[None]]  # opens a session with options of its own
Story = Callable[..., Any]
STORIES: dict[str, Story] = {}


def story(told: Story) -> Story:
    """Registers a story that is told inside a session, in every layout."""
    return _registered(told, opens=False, layouts=LAYOUTS_OF["torchrun"])


def story_not_under_torchrun(told: Story) -> Story:
    """Registers a story that takes too long where no call can be given up."""
    return _registered(told, opens=False, layouts=())


def story_that_opens(*layouts: str) -> Callable[[Story], Story]:
    """Registers a story that gets a function ``session(trace=..., timeout_s=...)``; torchrun: told in these layouts."""
    return functools.partial(_registered, opens=True, layouts=layouts)


def _registered(told: Story, *, opens: bool, layouts: tuple[str, ...]) -> Story:
    told.opens, told.layouts = opens, layouts  # type: ignore[attr-defined]
    STORIES[name_of(told)] = told
    return told


def name_of(told: Story) -> str:
    return f"{told.__module__}:{told.__qualname__}"


def all_stories() -> dict[str, Story]:
    """The stories of every file of this folder, in one order everywhere."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
    return dict(sorted(STORIES.items()))


class Run:
    """One runtime and one layout, in which stories are told."""

    def __init__(self, runtime: str, layout: Layout, tell: Callable[[Story], list[Any]]) -> None:
        self.runtime = runtime
        self.layout = layout
        self.tell = tell  # the values of a story: the driver's, or those of all processes of torchrun

    def __call__(self, told: Story) -> Any:
        """The story's value. Processes of torchrun must agree; what an error says is a list, one text a process."""
        return merged([plain(value) for value in self.tell(told)])

    @property
    def is_off(self) -> bool:
        return self.runtime == "off"

    def shares_state(self, *roles: str) -> bool:
        """Whether a method of the last role sees what methods of the others left on an object."""
        if self.runtime == "torchrun":
            return self.layout.in_one_process(*roles)
        return self.layout.together(*roles)

    def of_shards(self, values: list[Any]) -> Any:
        """What ``collect='none'`` gives: the values of the shards, or with Ray off the one value itself."""
        return values[0] if self.is_off else values


def runs(*runtimes: str, layouts: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """The (runtime, layout) pairs of these runtimes, or of all; ``layouts``: of these alone."""
    pairs = [(name, layout) for name in runtimes or LAYOUTS_OF for layout in LAYOUTS_OF[name] or (OFF.name,)]
    return [(name, layout) for name, layout in pairs if not layouts or layout in (*layouts, OFF.name)]


def only(pairs: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """A test that is for these runtimes and layouts alone."""
    return pytest.mark.parametrize("run", pairs, ids="-".join, indirect=True)


def session_of(runtime: str, layout: Layout, /, timeout_s: float | None = None, **options: Any) -> Any:
    """A session in one of the runtimes."""
    groups = layout.device_groups(runtime, **({"timeout_s": timeout_s} if timeout_s is not None else {}))
    if runtime == "strict":
        return RayHelper.session(groups, runtime="inprocess", strict=True, **options)
    return RayHelper.session(groups, runtime=runtime, **options)  # type: ignore[arg-type]


def opener(runtime: str, layout: Layout) -> Open:
    """What a story of ``story_that_opens`` is given."""
    return functools.partial(session_of, runtime, layout)


def plain(value: Any) -> Any:
    """As it comes out of JSON: tuples become lists, and an object the name of its class."""
    return json.loads(json.dumps(value, default=lambda other: type(other).__name__))


def merged(values: list[Any]) -> Any:
    """The one value of several processes; the texts of an error stand beside each other."""
    first = values[0]
    if isinstance(first, dict) and "text" in first:
        assert all(isinstance(value, dict) for value in values), values
        texts = [value.get("text", "") for value in values]
        return {**merged([{k: v for k, v in value.items() if k != "text"} for value in values]), "text": texts}
    if isinstance(first, dict):
        assert all(isinstance(value, dict) and value.keys() == first.keys() for value in values), values
        return {key: merged([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        assert all(isinstance(value, list) and len(value) == len(first) for value in values), values
        return [merged(list(items)) for items in zip(*values, strict=True)]
    assert all(value == first for value in values), values
    return first


def raised(call: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a call raised, as a plain value; or what it returned, which is no error."""
    try:
        value = call(*args, **kwargs)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        return {"raised": type(error).__name__, "text": f"{error}\n{notes}"}
    return {"returned": value}


def says(told: Any, kind: str, *words: str) -> bool:
    """Whether it is an error of this type whose text, on every process, has all of the words, in any case."""
    assert told.get("raised") == kind, told
    for text in told["text"]:
        for word in words:
            assert word.lower() in text.lower(), f"{word!r} is not in: {text}"
    return True


def agreed(values: list[Any]) -> Any:
    """A collect: the value on which all workers agree. With Ray off it is not applied, and the value is the same."""
    first, *others = values
    assert all(other == first for other in others), values
    return first
