"""Reward functions: which there are, how a configuration names them, and how a batch is scored.

A reward function is TRL's: ``reward(prompts, completions, completion_ids, **columns) -> list[float | None]``, one value
a completion, None where it has nothing to say. ``columns`` are the other columns of the dataset. A function, partial or
callable object is given what its signature accepts; ``async def`` ones run concurrently. Completions are strings, or
``[{"role": "assistant", "content": ...}]`` where prompts are conversations.

Reward *models* are roles with weights of their own and not here.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import itertools
import math
import numbers
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from rayhelper.named_class import object_named
from rayhelper.text import DID_YOU_MEAN, nearest
from rayhelper.watch.time_limit import awaited_within, within
from trainers.batch import Ragged
from trainers.plugins import REWARDS, register_reward
from trainers.rewards import ms_swift
from trainers.rewards.texts import completion_text

RewardFunction = Callable[..., Any]
RewardSpec = str | Mapping[str, Any] | RewardFunction
LONGEST_NUMBER = 1000  # characters; Python refuses to read integers of more than 4300 digits, which models do write
CALLS_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward", "ms_swift_accuracy", "ms_swift_cosine")
_BLOCKED_S = 1.0  # so much later than it is cancelled, an async function is given up
GIVEN = ("prompts", "completions", "completion_ids")
RESERVED_COLUMNS = ("prompt", "completion", "completion_ids", "prompts", "completions")


# Scoring


def score(
    functions: Sequence[RewardFunction | tuple[RewardFunction, str]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Ragged | Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    *,
    context: Mapping[str, Any] | None = None,
    runner: asyncio.Runner | None = None,
    limit_s: float | None = None,
) -> np.ndarray:
    """(B, K) float32 rewards of B completions by K functions, NaN where a function returned None.

    Async functions run together in one event loop beside the others, which run one after another in this thread. A
    ``runner`` keeps that loop alive between calls, which clients that hold connections need. ``context`` holds what is
    given to every function as it is, like TRL's ``trainer_state``. ``limit_s``: seconds that each function has.

    Raises ValueError or TypeError naming the function (and the row) for a wrong number of rewards or one that is no
    number, LateError naming one that is late; what a function raises itself rises with a note naming it, and sys.exit()
    in one as a RuntimeError.
    """
    pairs = [pair if isinstance(pair, tuple) else (pair, reward_name(pair)) for pair in functions]
    offered = {name: column for name, column in columns.items() if name not in RESERVED_COLUMNS}
    ids = [np.asarray(completion_ids[i]).tolist() for i in range(len(completion_ids))]
    given = {"prompts": list(prompts), "completions": list(completions), "completion_ids": ids}
    for name, column in (given | offered).items():
        if len(column) != len(prompts):
            raise ValueError(f"{name} has {len(column)} entries for {len(prompts)} prompts")
    arguments = [_accepted(function, name, dict(context or {}) | given | offered) for function, name in pairs]
    rewards_BK = np.full((len(prompts), len(pairs)), np.nan, np.float32)
    together = [k for k, (function, _) in enumerate(pairs) if is_async(function)]
    whats = [f"reward function {name!r}, given {len(prompts)} completions," for _, name in pairs]
    awaited = [_awaited(*pairs[k], arguments[k], limit_s, whats[k]) for k in together]
    with ThreadPoolExecutor(1) as pool:
        # one that blocks instead of awaiting cannot be cancelled: it is left behind
        longest_s = None if limit_s is None else limit_s + _BLOCKED_S
        running = pool.submit(within, longest_s, " ".join(whats[k] for k in together), _run_together, awaited, runner)
        for k, (function, name) in enumerate(pairs):
            if k not in together:
                with _naming(name):
                    values = within(limit_s, whats[k], function, **arguments[k])
                rewards_BK[:, k] = _checked(values, name, len(prompts))
        for k, values in zip(together, running.result(), strict=True):
            rewards_BK[:, k] = _checked(values, pairs[k][1], len(prompts))
    return rewards_BK


def reward_name(function: RewardFunction) -> str:
    """The name under which a function's rewards are logged: of what a partial wraps, or of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(function: RewardFunction) -> bool:
    """True for ``async def`` functions, partials of them, and objects whose ``__call__`` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_columns(
    functions: Sequence[tuple[RewardFunction, str]], columns: Iterable[str], dataset: str = "the dataset"
) -> None:
    """Raises ValueError naming a function, and a parameter of it that none of the ``columns`` of ``dataset`` fills."""
    offered = [*GIVEN, *(name for name in columns if name not in RESERVED_COLUMNS)]
    for function, name in functions:
        _check_parameters(function, name, offered, dataset)
        for asks, needed, told in ONE_OF:
            if function is asks and not set(needed) & set(offered):
                raise ValueError(told)


def _accepted(function: RewardFunction, name: str, offered: dict[str, Any]) -> dict[str, Any]:
    """The part of ``offered`` that the signature takes. Raises ValueError for a parameter that nothing fills."""
    parameters = _check_parameters(function, name, offered)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    # A bound argument of a partial is a keyword parameter with a default: it stays as bound.
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return {key: value for key, value in offered.items() if (takes_all or key in named) and key not in bound}


def _check_parameters(
    function: RewardFunction, name: str, offered: Iterable[str], dataset: str = "the dataset"
) -> list[inspect.Parameter]:
    """All parameters. Raises ValueError for one that nothing offered fills."""
    parameters, offered = list(inspect.signature(function).parameters.values()), list(offered)
    for parameter in parameters:
        if (
            parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            or parameter.default is not parameter.empty
        ):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(
                f"reward function {name!r} takes {parameter.name!r} by position only, but columns are passed by name"
            )
        if parameter.name not in offered:
            raise ValueError(
                f"reward function {name!r} needs {parameter.name!r}, but {dataset} has no such column (there are: "
                f"{', '.join(offered)}). Rename one with `columns`, or give the parameter a default."
            )
    return parameters


async def _awaited(
    function: RewardFunction, name: str, arguments: dict[str, Any], limit_s: float | None, what: str
) -> Any:
    with _naming(name):
        return await awaited_within(limit_s, what, function(**arguments))


def _run_together(coroutines: list[Coroutine[Any, Any, Any]], runner: asyncio.Runner | None) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*coroutines)

    if not coroutines:
        return []
    if runner is not None:
        return runner.run(gather())
    return asyncio.run(gather())


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by reward function {name!r}")
        raise
    except SystemExit as error:  # would end the run without a word
        raise RuntimeError(f"{error!r} raised by reward function {name!r}") from error


def _checked(values: Any, name: str, length: int) -> list[float]:
    if inspect.iscoroutine(values):
        values.close()
        raise TypeError(f"reward function {name!r} returned a coroutine: declare it (or its __call__) `async def`")
    if isinstance(values, (str, Mapping)) or not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
        raise TypeError(f"reward function {name!r} must return a list of numbers or None, got {type(values).__name__}")
    if len(values) != length:
        raise ValueError(
            f"reward function {name!r} returned {len(values)} rewards for {length} completions: it must return one "
            "per completion, and None for no reward"
        )
    return [_number(value, name, row) for row, value in enumerate(values)]


def _number(value: Any, name: str, row: int) -> float:
    value = value.tolist() if hasattr(value, "tolist") else value  # scalars of NumPy and torch
    if value is None:
        return math.nan
    if not isinstance(value, numbers.Real):
        raise TypeError(f"reward function {name!r} returned {value!r} for row {row}: rewards are numbers or None")
    if not math.isfinite(value):
        raise ValueError(
            f"reward function {name!r} returned {value!r} for row {row}: rewards must be finite. Return None for a "
            "completion without a reward."
        )
    return float(value)


# Built-in functions

TRUTHS = ("answer", "solution")
NO_TRUTHS = "exact_answer compares with column 'answer' or 'solution'; rename one to it with `columns`"
_MARKERS = re.compile(
    r"\\boxed\s*\{(?P<boxed>(?:[^{}]|\{[^{}]*\})*)\}"
    r"|<answer>(?P<tagged>(?:(?!<answer>).)*?)</answer>"
    r"|####[ \t]*(?P<hashed>[-+\u2212$ \t]*[.\d][^\n]*)",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?:(?<![A-Za-z\d_)])(?P<sign>[-+\u2212]))?[$\u20ac\u00a3]?(?<![A-Za-z\d_])"
    r"(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?P<decimals>\.\d+)?(?:/(?P<divisor>[1-9]\d*))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{([1-9]\d*)\}")


@register_reward("exact_answer")
def exact_answer(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None, **_: Any
) -> list[float | None]:
    """1.0 where the completion's number equals that of the row's ``answer`` (or ``solution``), else 0.0.

    The completion's number is the one after its last ``####``, in its last ``\\boxed{}`` or ``<answer>``; without such
    a marker it is the last number of the text. The row's is marked likewise, or its whole text is one number; a row
    without a number gives None. Compared exactly, as fractions: 72 = 72.0 = $72.
    """
    truths = answer if answer is not None else solution
    if truths is None:
        raise ValueError(NO_TRUTHS)
    wanted = [_reference_number(truth) for truth in truths]
    return [
        None if number is None else float(_answer_number(completion_text(completion)) == number)
        for completion, number in zip(completions, wanted, strict=True)
    ]


ONE_OF: tuple[tuple[RewardFunction, Sequence[str], str], ...] = (  # functions that need one of several columns
    (exact_answer, TRUTHS, NO_TRUTHS),
    (ms_swift.ms_swift_math, ("messages", "solution"), ms_swift.NO_ANSWERS),
)


def _answer_number(text: str) -> Fraction | None:
    """The number a text answers with, or None."""
    text = _FRACTION.sub(r"\1/\2", text.replace("{,}", ",").replace("\\!", "").replace("\\,", "").replace("\\$", "$"))
    marked = list(_MARKERS.finditer(text))
    if not marked:
        return _last(_NUMBER.finditer(text))
    if marked[-1]["hashed"] is not None:
        return _value(_NUMBER.search(marked[-1]["hashed"]))
    return _last(_NUMBER.finditer(marked[-1]["boxed"] or marked[-1]["tagged"] or ""))


def _reference_number(truth: Any) -> Fraction | None:
    """The number of a row's answer, or None where that is not one number."""
    if isinstance(truth, numbers.Real) and not isinstance(truth, bool):
        return Fraction(str(truth)) if math.isfinite(truth) else None
    if not isinstance(truth, str):
        return None
    if _MARKERS.search(truth):
        return _answer_number(truth)
    return _value(_NUMBER.fullmatch(truth.strip().rstrip(".%").rstrip()))


def _last(matches: Iterator[re.Match[str]]) -> Fraction | None:
    return _value(next(reversed(list(matches)), None))


def _value(match: re.Match[str] | None) -> Fraction | None:
    if match is None or len(match.group()) > LONGEST_NUMBER:
        return None
    number = Fraction((match["whole"].replace(",", "") or "0") + (match["decimals"] or ""))
    return number / int(match["divisor"] or 1) * (-1 if match["sign"] in ("-", "\u2212") else 1)


_TAGS = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


@register_reward("format")
def format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """1.0 where the whole completion is ``<think>...</think><answer>...</answer>``, each tag once; else 0.0."""
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    texts = [completion_text(completion) for completion in completions]
    return [float(all(text.count(tag) == 1 for tag in tags) and _TAGS.fullmatch(text) is not None) for text in texts]


@register_reward("no_reward")
def no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """0.0 always: of a run whose completions a teacher alone judges, token by token."""
    return [0.0] * len(completions)


@register_reward("soft_overlong")
class SoftOverlong:
    """0 up to soft_max_length - soft_cache_length tokens, then falling to -1 at soft_max_length (DAPO, eq. 13).

    TRL's ``soft_overlong_punishment`` under ms-swift's names; the end token counts.
    """

    __name__ = "soft_overlong"

    def __init__(self, soft_max_length: int, soft_cache_length: int) -> None:
        from trl.rewards import get_soft_overlong_punishment  # type: ignore[attr-defined]

        if not 0 < soft_cache_length <= soft_max_length:
            raise ValueError(
                f"soft_cache_length={soft_cache_length} must lie in (0, soft_max_length={soft_max_length}]: over this "
                "number of tokens the reward falls"
            )
        self.function = get_soft_overlong_punishment(soft_max_length, soft_cache_length)

    def __call__(self, completion_ids: Sequence[Any], **_: Any) -> list[float]:
        rewards: list[float] = self.function(completion_ids)
        return rewards


class MessagesReward:
    """A function of ``trl.rewards``, which reads completions as messages, for completions in either form."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        self.__name__ = reward_name(function)
        self.__signature__ = inspect.signature(function)

    def __call__(self, completions: Sequence[Any] = (), **columns: Any) -> Any:
        messages = [[{"role": "assistant", "content": completion_text(c)}] for c in completions]
        return self.function(completions=messages, **columns)


# Names in a configuration


def resolve_rewards(
    specs: Sequence[RewardSpec] | RewardSpec, weights: Sequence[float] | None = None
) -> tuple[list[tuple[RewardFunction, str]], np.ndarray]:
    """The functions that ``specs`` name, each with its metric name, and their weights (K,) float32, 1 by default.

    A spec is a registered or TRL name, ``module:function`` or ``module.function``, a callable, or a mapping
    ``{name: ..., argument: value}`` whose arguments are bound (or given to a class or a TRL factory).
    """
    listed = [specs] if isinstance(specs, (str, Mapping)) or callable(specs) else list(specs)
    pairs: list[tuple[RewardFunction, str]] = []
    for spec in listed:
        function, name = _resolve(spec)
        taken = [known for _, known in pairs]
        pairs.append((function, numbered([*taken, name])[-1]))
    values = [1.0] * len(pairs) if weights is None else [float(weight) for weight in weights]
    if len(values) != len(pairs):
        names = ", ".join(name for _, name in pairs)
        raise ValueError(f"reward_weights has {len(values)} values for {len(pairs)} reward functions ({names})")
    return pairs, np.array(values, np.float32)


def known_rewards() -> list[str]:
    """The names that need no module: registered ones (two are here) and TRL's."""
    return sorted({*REWARDS, *_trl_names()})


def numbered(names: Iterable[str]) -> list[str]:
    """The names, each unlike those before it: name, name_2, name_3, ... The same reward twice is logged twice."""
    found: list[str] = []
    for name in names:
        further = (f"{name}_{number}" for number in itertools.count(2))
        found.append(next(each for each in itertools.chain([name], further) if each not in found))
    return found


def _resolve(spec: RewardSpec) -> tuple[RewardFunction, str]:
    if isinstance(spec, Mapping):
        arguments = dict(spec)
        if not isinstance(name := arguments.pop("name", None), str):
            raise ValueError(f"a reward given as a mapping needs its `name`, got {dict(spec)}")
    elif isinstance(spec, str):
        name, arguments = spec, {}
    elif callable(spec):
        return _bound(spec, {}, reward_name(spec)), reward_name(spec)
    else:
        raise TypeError(f"a reward is a name, a mapping with a `name`, or a callable, got {spec!r}")
    if name in REWARDS:
        _check_installed(name)
        return _bound(REWARDS[name], arguments, name), name
    if (trl_name := _trl_names().get(name)) is not None:
        _check_installed(trl_name)
        function = _from_trl(trl_name, arguments)
    elif ":" in name or "." in name:
        function = _bound(_imported(name), arguments, name)
    else:
        known = known_rewards()
        raise ValueError(
            f"unknown reward {name!r}.{nearest(name, known, DID_YOU_MEAN)} Known: {', '.join(known)}. Register your "
            f"own with @register_reward({name!r}) in a file of external_plugins, or name it as module:function."
        )
    return function, reward_name(function)


def _check_installed(name: str) -> None:
    """Raises ValueError if a reward calls a package that is not here: it would end the run at the first score."""
    if name in CALLS_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
        raise ValueError(f"reward {name!r} needs math-verify, which is not installed: pip install math-verify")


def _bound(target: Any, arguments: dict[str, Any], name: str) -> RewardFunction:
    """``target`` with ``arguments``: bound to a function, given to the constructor of a class."""
    if not inspect.isclass(target):
        if arguments:
            _check_arguments(target, arguments, name, partial=True)
        return functools.partial(target, **arguments) if arguments else target
    _check_arguments(target, arguments, name)
    instance = target(**arguments)
    if not callable(instance):
        raise TypeError(f"reward {name!r} is a class whose objects cannot be called: give it a __call__")
    return instance


def _check_arguments(target: Any, arguments: dict[str, Any], name: str, partial: bool = False) -> None:
    signature = inspect.signature(target)
    try:
        signature.bind_partial(**arguments) if partial else signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"reward {name!r} cannot be built with {arguments or 'no arguments'}: {error}. It takes {signature}; write "
            f"{{name: {name}, argument: value}}"
        ) from None


@functools.cache
def _trl_names() -> dict[str, str]:
    """TRL's public reward functions, by every name a user may say: with or without ``get_`` and ``_reward``."""
    import trl.rewards

    public = [name for name in dir(trl.rewards) if name.endswith("_reward") or name.startswith("get_")]
    names: dict[str, str] = {}
    for name in public:
        short = name.removeprefix("get_")
        names |= dict.fromkeys((short.removesuffix("_reward"), short, name), name)
    return names


def _from_trl(name: str, arguments: dict[str, Any]) -> RewardFunction:
    import trl.rewards

    function = getattr(trl.rewards, name)
    if not name.startswith("get_"):
        return MessagesReward(_bound(function, arguments, name))
    _check_arguments(function, arguments, name)
    return MessagesReward(function(**arguments))


def _imported(path: str) -> Any:
    """The object at ``module:name`` or ``module.name``. Raises ValueError if there is none."""
    try:
        return object_named(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"reward {path!r} cannot be imported: {type(error).__name__}: {error}. Write module:function. The "
            f"module must be installed, on PYTHONPATH or in {Path.cwd()}. Or register the function in a file of "
            "external_plugins."
        ) from error
