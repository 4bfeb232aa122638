"""What users add by name, without touching this library: rewards, datasets, models, environments, tools.

A plugin is a Python file, or a module, named under ``external_plugins``; importing it runs its decorators, and from
then on the configuration may say the names:

    @register_reward("short")
    def short(completions, **columns):
        return [1.0 if len(completion) < 80 else 0.0 for completion in completions]

    @register_dataset("sums")
    def sums(split):                # rows, or anything else that load_rows reads; `split` may be left out
        return [{"prompt": "1+1=", "answer": "2"}]

    @register_model("tiny")
    def tiny(output_dir, seed):     # writes model and tokenizer to a folder and returns it
        ...

    @register_environment("game")   # what answers the model's turns: see rollout/environments.py
    class Game: ...

    @register_tool("add")           # a function that the model may call: see tools.py
    def add(a: int, b: int): ...

    @register_tool_call_parser("mine")  # what reads the calls that a model wrote: see tool_calls.py
    def mine(text): ...

Every process of a run imports the plugins, so a plugin should do nothing but define and register.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rayhelper.text import DID_YOU_MEAN, nearest

ObjectT = TypeVar("ObjectT")


@dataclass(frozen=True)
class _Entry:
    value: Any
    origin: tuple[str, str]  # file and qualified name: importing a file again defines the same origins again


class Registry(Mapping[str, Any]):
    """The objects of one kind, by the name they were registered under."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.entries: dict[str, _Entry] = {}

    def register(self, name: str) -> Callable[[ObjectT], ObjectT]:
        """A decorator that stores what it decorates under ``name`` and returns it unchanged.

        Raises ValueError if another file, or another object of the same file, has the name already.
        """
        if not isinstance(name, str):
            raise TypeError(
                f"register_{self.kind} takes a name, got {name!r}. Write @register_{self.kind}('name') over it."
            )

        def store(value: ObjectT) -> ObjectT:
            entry = _Entry(value, _origin(value))
            known = self.entries.get(name)
            if known is not None and known.origin != entry.origin:
                raise ValueError(
                    f"{self.kind} {name!r} is registered twice: by {known.origin[1]} of {known.origin[0]} and by "
                    f"{entry.origin[1]} of {entry.origin[0]}. Give one of them another name."
                )
            self.entries[name] = entry
            return value

        return store

    def __getitem__(self, name: str) -> Any:
        return self.entries[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _origin(value: Any) -> tuple[str, str]:
    """The file and the qualified name of a function, class, partial or callable object."""
    while isinstance(value, functools.partial):
        value = value.func
    definition = value if hasattr(value, "__qualname__") else type(value)
    module = sys.modules.get(definition.__module__)
    return str(getattr(module, "__file__", None) or definition.__module__), definition.__qualname__


REWARDS = Registry("reward")
DATASETS = Registry("dataset")
MODELS = Registry("model")
ENVIRONMENTS = Registry("environment")
TOOLS = Registry("tool")
TOOL_CALL_PARSERS = Registry("tool_call_parser")

register_reward = REWARDS.register
register_dataset = DATASETS.register
register_model = MODELS.register
register_environment = ENVIRONMENTS.register
register_tool = TOOLS.register
register_tool_call_parser = TOOL_CALL_PARSERS.register


@contextlib.contextmanager
def exits_are_errors(what: str) -> Iterator[None]:
    """Inside, code that a user wrote cannot end the process as if the run had ended well: exiting is a RuntimeError."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"{what} called sys.exit({error.code!r}). Let it raise an error, or return.") from error


def load_plugins(external_plugins: Iterable[str | Path]) -> list[ModuleType]:
    """The modules behind files (``path/to/plugin.py``) and module names (``package.plugin``), each imported once.

    Raises FileNotFoundError for a missing file, and ImportError, naming the plugin and the reason, if its code fails.
    """
    if isinstance(external_plugins, (str, Path)):
        external_plugins = [external_plugins]
    return [_load(plugin) for plugin in external_plugins]


def _load(plugin: str | Path) -> ModuleType:
    is_file = isinstance(plugin, Path) or plugin.endswith(".py") or "/" in plugin
    try:
        return _load_file(Path(plugin).expanduser().resolve()) if is_file else importlib.import_module(str(plugin))
    except FileNotFoundError:
        raise
    except Exception as error:
        advice = "" if is_file else " A plugin that is a file is named by its path, ending in .py."
        raise ImportError(
            f"plugin {str(plugin)!r} cannot be imported: {type(error).__name__}: {error}.{advice}"
        ) from error


def _load_file(file: Path) -> ModuleType:
    """The module of ``file``. Its name holds a checksum of the path, so that no plugin can hide another module."""
    if not file.is_file():
        beside = sorted(path.name for path in file.parent.glob("*.py"))
        raise FileNotFoundError(
            f"plugin file {file} does not exist.{nearest(file.name, beside, DID_YOU_MEAN)} "
            f"Python files in {file.parent}: {', '.join(beside) or 'none'}."
        )
    name = f"plugin_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name while it is being defined
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def resolve_model(model: str, *, output_dir: str | Path, seed: int) -> str:
    """The folder or hub name of ``model``: a registered model is built under ``output_dir``, any other name is kept."""
    if model not in MODELS:
        return model
    with exits_are_errors(f"model {model!r}"):
        folder = Path(MODELS[model](Path(output_dir), seed))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"model {model!r} returned {folder}, which has no config.json. A registered model saves model and "
            f"tokenizer (save_pretrained) and returns their folder."
        )
    return str(folder)
