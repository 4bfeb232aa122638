"""What plugins written for ms-swift import from it, where it is not installed: ``from swift.rewards import ORM, orms``.

    with stand_in() as found:
        import the_plugin             # class Short(ORM): ...; orms["short"] = Short
    register(found)                   # reward_funcs: [short] names it from now on

Given to the import of plugins alone: afterwards no module ``swift`` is left. Rewards (``ORM``, ``AsyncORM``, ``PRM``),
datasets (``RowPreprocessor``, ``register_dataset``), schedulers and their games (``multi_turns``, ``envs``; see
``rollout/schedulers.py``) are taken. A name that is not here is a class that raises when
it is used, and not when it is imported. Their interfaces are those of ms-swift's ``swift/rewards`` and
``swift/dataset``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from trainers.plugins import DATASETS, REWARDS

MODULES = (
    *("swift", "swift.rewards", "swift.rewards.orm", "swift.rewards.prm", "swift.rewards.rm_plugin", "swift.plugin"),
    *("swift.rollout", "swift.rollout.gym_env", "swift.rollout.multi_turn", "swift.infer_engine"),
    *("swift.infer_engine.protocol", "swift.template", "swift.utils", "swift.dataset", "swift.llm"),
)


class ORM:
    """A reward of completions: ``__call__(completions, **columns)``, completions being texts. ``args``: their keys."""

    def __init__(self, args: Any = None, **_: Any) -> None:
        self.args = args

    def __call__(self, **columns: Any) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


class AsyncORM(ORM):
    """The same with ``async def __call__``."""


class PRM(ORM):
    """A reward of requests: ``__call__(infer_requests, **columns)``, each with the messages of a completed prompt."""


class RowPreprocessor:
    """Changes a row of a dataset: ``preprocess(row)`` gives the new one, several, or None for none."""

    def __init__(self, *, columns: Mapping[str, str] | None = None, **_: Any) -> None:
        self.columns = dict(columns or {})

    def preprocess(self, row: dict[str, Any]) -> Any:
        return row

    def __call__(self, rows: Any, **_: Any) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for row in rows:
            new = self.preprocess({self.columns.get(name, name): value for name, value in row.items()})
            made += [] if new is None else [dict(new)] if isinstance(new, Mapping) else list(new)
        return made


class ResponsePreprocessor(RowPreprocessor):
    """The same of rows with query, response, history and system, which become messages."""

    def preprocess(self, row: dict[str, Any]) -> Any:
        from trainers.data.formats import row_of_messages

        return row_of_messages(row)


@dataclass(frozen=True)
class DatasetMeta:
    """What ms-swift is told of a dataset; the fields that are read here, and any others."""

    ms_dataset_id: str | None = None
    hf_dataset_id: str | None = None
    dataset_path: str | None = None
    dataset_name: str | None = None
    subsets: Sequence[Any] = ("default",)
    split: Sequence[str] = ("train",)
    preprocess_func: Any = field(default_factory=RowPreprocessor)
    load_function: Any = None
    tags: Sequence[str] = ()
    help: str | None = None
    huge_dataset: bool = False
    ms_revision: str | None = None
    hf_revision: str | None = None


class Found(SimpleNamespace):
    """What a plugin put into ms-swift's registries."""

    orms: dict[str, Any]
    prms: dict[str, Any]
    datasets: list[DatasetMeta]
    multi_turns: dict[str, Any]
    envs: dict[str, Any]


@contextlib.contextmanager
def stand_in() -> Iterator[Found]:
    """Inside, ``import swift`` finds the stand-in, unless ms-swift is installed or ``swift`` was imported before.

    In a folder with its sources alone ``swift`` is found, and cannot be imported without ``modelscope``.
    """
    from trainers.rollout import schedulers

    found = Found(orms={}, prms={}, datasets=[], multi_turns=dict(schedulers.BUILT_IN), envs={})
    if "swift" in sys.modules or all(map(importlib.util.find_spec, ("swift", "modelscope"))):
        yield found
        return
    known = {
        **{kind.__name__: kind for kind in (ORM, AsyncORM, PRM, RowPreprocessor, ResponsePreprocessor, DatasetMeta)},
        **{"orms": found.orms, "prms": found.prms, "rm_plugins": {}},
        **{kind.__name__: kind for kind in schedulers.NAMES},
        **{"multi_turns": found.multi_turns, "envs": found.envs},
        "register_dataset": lambda meta, **_: found.datasets.append(meta),
        "get_logger": lambda *_: logging.getLogger("plugin"),
    }
    modules = {name: _module(name, known) for name in MODULES}
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    shown.modules = modules
    with shown.importable():
        yield found


class Shown:
    """The modules of the stand-in, and how many callers need them to be importable now."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}
        self.num_callers = 0

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        """Inside, a function of a plugin that was loaded with the stand-in may import from ``swift`` again."""
        if not self.modules or (not self.num_callers and "swift" in sys.modules):
            yield
            return
        self.num_callers += 1
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            self.num_callers -= 1
            for name in [] if self.num_callers else [*sys.modules]:
                if name.partition(".")[0] == "swift":
                    del sys.modules[name]


shown = Shown()


def register(found: Found) -> None:
    """Puts what a plugin registered with ms-swift under our names, for ``reward_funcs``, ``orm_model``, ``dataset``.

    Raises ValueError for a name that another file registered.
    """
    from trainers.rollout.schedulers import register_schedulers

    for names, is_of_requests in ((found.orms, False), (found.prms, True)):
        for name, kind in names.items():
            REWARDS.register(name)(_reward(name, kind, is_of_requests))
    register_schedulers(found.multi_turns, found.envs)
    for meta in found.datasets:
        known = (meta.ms_dataset_id, meta.hf_dataset_id, meta.dataset_name, meta.dataset_path)
        for called in {one for one in known if one is not None}:
            DATASETS.register(called)(_dataset(meta))


def _module(name: str, known: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name, "A stand-in for ms-swift, which is not installed.")
    module.__path__ = []

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return type(attribute, (_Missing,), {"__module__": name})

    vars(module).update(known)
    module.__getattr__ = missing  # type: ignore[method-assign]
    return module


class _Missing:
    """Any other name of ms-swift: may be imported, inherited from and annotated with, and not be made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        kind = next(kind for kind in type(self).__mro__ if kind.__module__.partition(".")[0] == "swift")
        raise NotImplementedError(
            f"{kind.__module__}.{kind.__name__} is ms-swift's, which is not installed. Install ms-swift, or write the "
            "plugin without it (@register_reward of trainers.plugins)."
        )


def _reward(name: str, kind: Any, is_of_requests: bool) -> Any:
    """A reward function of ours that calls an object of ms-swift's class, made when it is first called."""
    from trainers.rewards.functions import is_async
    from trainers.rewards.texts import last_turn_text

    made: list[Any] = []

    def arguments(prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        if not made:
            made.append(kind() if isinstance(kind, type) else kind)
        texts = [last_turn_text(completion) for completion in completions]
        answers = [
            [{"role": "assistant", "content": one}] if isinstance(one, str) else list(one) for one in completions
        ]
        messages = [
            [*([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt), *answer]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        if is_of_requests:
            return {"infer_requests": [{"messages": turns} for turns in messages], **columns}
        return {"completions": texts, **columns, "messages": messages}

    if is_async(kind.__call__ if isinstance(kind, type) else kind):

        async def awaited(prompts: Any, completions: Any, **columns: Any) -> Any:
            given = arguments(prompts, completions, columns)
            return await made[0](**given)

        awaited.__name__ = awaited.__qualname__ = name
        return awaited

    def reward(prompts: Any, completions: Any, **columns: Any) -> Any:
        given = arguments(prompts, completions, columns)
        return made[0](**given)

    reward.__name__ = reward.__qualname__ = name
    return reward


def _dataset(meta: DatasetMeta) -> Any:
    """Rows of the hub or of a file, each changed as the plugin says."""

    def rows(split: str = "train") -> Any:
        import datasets

        if meta.load_function is not None:
            return meta.load_function(meta)
        if meta.dataset_path is not None:
            from trainers.data.sources import read_files

            return meta.preprocess_func(read_files([Path(meta.dataset_path).expanduser()]))
        return meta.preprocess_func(datasets.load_dataset(meta.hf_dataset_id or meta.ms_dataset_id, split=split))

    rows.__qualname__ = f"dataset {meta.ms_dataset_id or meta.hf_dataset_id or meta.dataset_path}"
    return rows
