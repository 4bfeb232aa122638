"""What users add by name, without touching this library: rewards, losses, datasets, models, environments, tools.

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

    @register_loss("reinforce")     # loss_type: reinforce; see losses/surrogates.py
    def reinforce(batch):
        return -batch.advantages_BX * batch.logps_BT

    @register_advantage("centred")  # advantage_estimator: centred; see rewards/estimators.py
    def centred(batch):
        return batch.sums_PG - batch.sums_PG.mean(axis=1, keepdims=True)

    @register_tool_call_parser("mine")  # what reads the calls that a model wrote: see tool_calls.py
    def mine(text): ...

Every process of a run imports the plugins, so a plugin should do nothing but define and register.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import logging
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rayhelper.named_class import module_named
from rayhelper.text import DID_YOU_MEAN, nearest
from trainers.losses.types import Average, PolicyLoss
from trainers.rewards.types import AdvantageEstimator
from trainers.run.going_on import builds_model, resumes_too
from trainers.run.stopping import Stopped

ObjectT = TypeVar("ObjectT")
BUILT = "plugin_models.json"  # file in output_dir: which models plugins built there, of what
logger = logging.getLogger(__name__)


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
        """A decorator that stores the decorated object under ``name`` and returns it unchanged.

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
    """The file and the qualified name of a function, class, partial or callable object, or of what it wraps."""
    while isinstance(value, functools.partial) or hasattr(value, "__wrapped__"):
        value = value.func if isinstance(value, functools.partial) else value.__wrapped__
    definition = value if hasattr(value, "__qualname__") else type(value)
    module = sys.modules.get(definition.__module__)
    return str(getattr(module, "__file__", None) or definition.__module__), definition.__qualname__


REWARDS = Registry("reward")
DATASETS = Registry("dataset")
MODELS = Registry("model")
ENVIRONMENTS = Registry("environment")
GAMES = Registry("gym_env")  # of ms-swift's registry ``envs``; see rollout/schedulers.py
TOOLS = Registry("tool")
LOSSES = Registry("loss")
ADVANTAGES = Registry("advantage")
TOOL_CALL_PARSERS = Registry("tool_call_parser")
TRACKERS = Registry("tracker")

register_reward = REWARDS.register
register_dataset = DATASETS.register
register_model = MODELS.register
register_environment = ENVIRONMENTS.register
register_tool = TOOLS.register
register_tool_call_parser = TOOL_CALL_PARSERS.register
register_tracker = TRACKERS.register


def register_loss(
    name: str, *, average: Average = "tokens", corrects_rollouts: bool = False
) -> Callable[[ObjectT], ObjectT]:
    """A decorator for a policy loss of GRPO, which ``loss_type`` then names.

    The function gets a ``PolicyBatch``. ``losses/surrogates.py`` describes it and the return value. Keyword-only
    parameters get keys of the configuration, or arguments of ``loss_type: {name: ..., argument: value}``. ``average``
    and ``corrects_rollouts``: see ``PolicyLoss``.

    Raises: ValueError if the name is taken by another function.
    """
    return _wrapped(LOSSES, name, PolicyLoss, average=average, corrects_rollouts=corrects_rollouts)


def register_advantage(
    name: str,
    *,
    needs_group: bool = True,
    needs_logps: bool = False,
    needs_greedy: bool = False,
    kl_in_reward: bool | None = False,
) -> Callable[[ObjectT], ObjectT]:
    """A decorator for an advantage estimator of GRPO, which ``advantage_estimator`` then names.

    The function gets a ``RewardBatch``. ``rewards/estimators.py`` describes it and the return value. Keyword-only
    parameters get keys of the configuration, or arguments of ``advantage_estimator: {name: ..., argument: value}``. The
    other parameters: see ``AdvantageEstimator``.

    Raises: ValueError if the name is taken by another function.
    """
    needs = {"needs_group": needs_group, "needs_logps": needs_logps, "needs_greedy": needs_greedy}
    return _wrapped(ADVANTAGES, name, AdvantageEstimator, **needs, kl_in_reward=kl_in_reward)


def _wrapped(
    registry: Registry, name: str, wrapper: Callable[..., Any], **options: Any
) -> Callable[[ObjectT], ObjectT]:
    """A decorator that registers ``wrapper(function, **options)`` and returns the function."""
    store: Callable[[Any], Any] = registry.register(name)

    def decorate(function: ObjectT) -> ObjectT:
        if not callable(function):
            raise TypeError(f"register_{registry.kind}({name!r}) decorates a function, got {function!r}")
        store(wrapper(function, **options))
        return function

    return decorate


def named(spec: Any) -> tuple[Any, dict[str, Any]]:
    """Name and arguments of ``name`` or ``{name: ..., argument: value}``."""
    arguments = dict(spec) if isinstance(spec, Mapping) else {}
    return arguments.pop("name", None) if isinstance(spec, Mapping) else spec, arguments


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The keyword-only parameters of a loss or an estimator."""
    found = inspect.signature(function).parameters
    return {name: one for name, one in found.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}


def constants(function: Callable[..., Any], config: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a loss or an estimator is called with beside its batch: ``arguments`` first, then keys of the configuration.

    A parameter whose default is a dataclass takes the keys ``<parameter>_<field>``.
    """
    given = dict(arguments)
    for name, parameter in parameters(function).items():
        if name in given:
            continue
        if hasattr(config, name):
            given[name] = getattr(config, name)
        elif dataclasses.is_dataclass(shape := parameter.default):
            keys = {one.name: getattr(config, f"{name}_{one.name}") for one in dataclasses.fields(shape)}
            given[name] = dataclasses.replace(shape, **keys)  # type: ignore[type-var]
    return given


@contextlib.contextmanager
def exits_are_errors(what: str) -> Iterator[None]:
    """Inside, code that a user wrote cannot end the process as if the run had ended well: exiting is a RuntimeError.

    A signal that stops a run inside, such as the SFT before a run, stops the whole.
    """
    try:
        yield
    except Stopped:
        raise
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
        return _load_file(Path(plugin).expanduser().resolve()) if is_file else module_named(str(plugin))
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
    from trainers.swift_stand_in import register, stand_in

    try:
        with stand_in() as found:
            spec.loader.exec_module(module)
        register(found)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def resolve_model(model: str, *, output_dir: str | Path, seed: int, reuse: bool = False) -> str:
    """The folder or hub name of ``model``: a registered model is built under ``output_dir``, any other name is kept.

    ``reuse``: one that was built there before, by the same file and seed, is taken again. If its building was ended
    early, runs within it continue from their newest checkpoints.
    """
    if model not in MODELS:
        return model
    record, known = Path(output_dir) / BUILT, _built(Path(output_dir))
    file = Path(MODELS.entries[model].origin[0])
    about = {"seed": seed, "plugin": zlib.crc32(file.read_bytes()) if file.is_file() else str(file)}
    before: Any = known.pop(model, None)
    is_same = isinstance(before, dict) and before.items() >= about.items()
    if reuse and is_same and (Path(str(before.get("folder"))) / "config.json").is_file():
        logger.info("model %r was built before and is used again: %s", model, before["folder"])
        return str(before["folder"])
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({**known, model: about}))  # without a folder: it is not whole yet
    token, resuming = builds_model.set(model), resumes_too.set(reuse and is_same)
    try:
        with exits_are_errors(f"model {model!r}"):
            folder = Path(MODELS[model](Path(output_dir), seed))
    finally:
        builds_model.reset(token)
        resumes_too.reset(resuming)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"model {model!r} returned {folder}, which has no config.json. A registered model saves model and "
            f"tokenizer (save_pretrained) and returns their folder."
        )
    record.write_text(json.dumps({**known, model: {**about, "folder": str(folder)}}))
    return str(folder)


def _built(output_dir: Path) -> dict[str, Any]:
    """The models that plugins built there, by name."""
    try:
        found = json.loads((output_dir / BUILT).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
