"""What values of keys may be at all, whatever the backend and the trainer: types, finite numbers, names, templates.

Called first of all checks, of configurations made in Python too, so that all others compare what can be compared. The
ranges that have a meaning of their own stand beside the keys. Imports no torch.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import re
import string
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path, PurePath
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rayhelper import ConfigError
from rayhelper.text import DID_YOU_MEAN, is_unicode, nearest

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
MOST = 1e12  # no number of a configuration is larger: steps, tokens, bytes in MiB
MAX_SEED = 2**32 - 1  # of NumPy
MAY_BE_INFINITE = ("prm_threshold",)  # where everything passes, or nothing does
AT_MOST = {  # numbers beyond them are accepted by every formula, and mean nothing
    **dict.fromkeys(("temperature", "eval_temperature", "repetition_penalty"), 100.0),
    **dict.fromkeys(("learning_rate", "value_learning_rate"), 100.0),
    **dict.fromkeys(("seed", "dataset_seed"), MAX_SEED),
    "adam_epsilon": 1.0,
    "weight_decay": 100.0,
    "neftune_noise_alpha": 1000.0,
    "lora_rank": 10_000,
    "lora_alpha": 1e6,
    **dict.fromkeys(("epsilon", "epsilon_high"), 1000.0),  # a ratio above is a token that the policy did not draw
    **dict.fromkeys(  # weights of terms of a loss, or of a reward
        (
            *(
                "beta",
                "kl_coef",
                "kl_loss_coef",
                "vf_coef",
                "entropy_coef",
                "entropy_coef_min",
                "entropy_coef_max",
                "kl_cov_coef",
                "policy_drift_coef",
            ),
            *("teacher_kl_coef", "rpo_alpha", "cpo_alpha", "sft_alpha", "simpo_gamma", "desirable_weight"),
            *("undesirable_weight", "center_rewards_coefficient", "router_aux_loss_coef", "discopop_tau"),
        ),
        10_000.0,
    ),
}
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes of a file's name and of a path on Linux
LOWEST_TEMPERATURE = 1e-4  # logits are divided by it
TYPES_SAID_BETTER = ("stop_token_ids",)  # keys whose own check says more than their type
SECONDS = ("timeout_s", "request_timeout_s", "reward_timeout_s", "save_before_s", "stop_grace_s")
NUMBERS_SAID_BETTER = ("peak_tflops", *SECONDS)  # or than that it is finite
VARIABLE = re.compile(r"[^=\0\s]+")


def check_values(config: Any) -> None:
    """Raises ConfigError naming the first key whose value has another type than the key, or is no sensible number."""
    hints = types_of(type(config))
    for one in fields(config):
        value = getattr(config, one.name)
        if one.name not in TYPES_SAID_BETTER and not _fits(value, hints[one.name]):
            raise ConfigError(f"{one.name} must be {expected(hints[one.name])}, got {_shown(value)}")
        if one.name not in NUMBERS_SAID_BETTER:
            _check_numbers(one.name, value)
        if one.name in ("temperature", "eval_temperature") and value is not None and 0 < value < LOWEST_TEMPERATURE:
            raise ConfigError(
                f"{one.name} must be at least {LOWEST_TEMPERATURE}, got {value}: logits are divided by it. Raise it"
                f"{', or write 0 for the likeliest tokens' if one.name == 'eval_temperature' else ''}."
            )
    _check_texts(config)
    _check_env(config.env)
    _check_columns(config.columns)


def types_of(config_type: type[Any]) -> Mapping[str, Any]:
    """The types of a configuration's keys: read once, as that takes as long as all checks together."""
    return _types_of(config_type)  # type: ignore[arg-type]  # a class can be hashed


@functools.lru_cache(maxsize=64)
def _types_of(config_type: Hashable) -> Mapping[str, Any]:
    return MappingProxyType(get_type_hints(config_type))


def expected(hint: Any) -> str:
    """A type in words."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(expected(member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (list, tuple):
        return f"a list (each item {expected(get_args(hint)[0])})"
    if get_origin(hint) is dict:
        return f"a mapping (each value {expected(get_args(hint)[1])})"
    return words.get(hint, "anything" if hint is Any else str(hint))


def check_template(text: str, name: str = "chat_template") -> None:
    """Raises ConfigError for a Jinja template with a mistake in its syntax, and the line of it."""
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.meta import find_undeclared_variables

    class Generation(Extension):
        """``{% generation %}`` ... ``{% endgeneration %}``, which transformers adds."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols", Generation], autoescape=False).parse(text)
    except (TemplateSyntaxError, RecursionError) as error:
        line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(f"{name} is not a Jinja template{line}: {error or type(error).__name__}") from None
    if "messages" not in find_undeclared_variables(parsed):
        raise ConfigError(f"{name} does not read messages, so that all conversations would be the same text")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type of a key; whole numbers are numbers, paths are text, tuples are lists.

    What a key with a choice may be, ``check_choices`` says, with the nearest of its values.
    """
    origin, members = _parts_of(hint)
    if hint is Any or origin is Literal:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in members)
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(_fits(item, members[0]) for item in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(
            (members[0] is Any or isinstance(key, str)) and _fits(item, members[1]) for key, item in value.items()
        )
    if hint is str:
        return isinstance(value, (str, PurePath))
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    return hint is NoneType and value is None if not isinstance(hint, type) else isinstance(value, hint)


@functools.lru_cache(maxsize=256)
def _parts_of(hint: Hashable) -> tuple[Any, tuple[Any, ...]]:
    """Its origin and its arguments: of all that is checked, reading these takes longest."""
    return get_origin(hint), get_args(hint)


def _check_numbers(name: str, value: Any) -> None:
    """Raises ConfigError unless numbers are finite and not absurdly large; what else they must be, the key's own check
    says."""
    is_list = isinstance(value, (list, tuple))
    found: list[Any] = [one for one in (value if is_list else [value]) if isinstance(one, numbers.Real)]
    for number in found:
        is_sensible = abs(number) <= MOST  # false of NaN; a whole number may be too large for math.isfinite
        if name in AT_MOST:
            if number > AT_MOST[name]:
                raise ConfigError(f"{name} must be at most {AT_MOST[name]:.10g}, got {_shown(value)}")
        elif not is_sensible and not (name in MAY_BE_INFINITE and abs(number) == math.inf):
            what = "hold finite numbers" if is_list else "be a finite number"
            raise ConfigError(f"{name} must {what} of at most {MOST:g}, got {_shown(value)}")


def _check_texts(config: Any) -> None:
    for one in fields(config):
        value = getattr(config, one.name)
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{one.name} holds a character of code 0, which no text may hold. Remove it.")
        if isinstance(value, str) and not is_unicode(value):
            raise ConfigError(f"{one.name} holds half a surrogate pair, which is not Unicode. Remove it.")
    if re.match(r"[a-z][a-z0-9+.-]*://", str(config.output_dir), re.IGNORECASE):
        raise ConfigError(f"output_dir is the address {config.output_dir!r}. Name a folder of this machine.")
    if not str(config.output_dir).strip():
        raise ConfigError("output_dir is empty. Name a folder.")
    for key in ("tokenizer", "ref_model", "teacher_model", "sft_model", "value_model", "prompt_template"):
        if isinstance(text := getattr(config, key, None), str) and not text.strip():
            raise ConfigError(f"{key} is empty. Name something, or write null.")
    for key in ("output_dir", "model", "tokenizer", "ref_model", "teacher_model", "dataset", "eval_dataset"):
        if isinstance(text := getattr(config, key, None), str) and text != text.strip():
            raise ConfigError(f"{key} is {text!r}, which begins or ends with a space or a new line. Remove that.")
    for key in ("output_dir", *(one.name for one in fields(config) if "model" in one.name or one.name == "tokenizer")):
        value = getattr(config, key)
        for text in [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]:
            if len(text) > LONGEST_PATH or any(len(os.fsencode(part)) > LONGEST_NAME for part in text.split("/")):
                raise ConfigError(f"{key} is longer than a name of a file may be: {_shown(value)}. Shorten it.")
    _check_prompt_template(config.prompt_template)
    read_tokens(getattr(config, "new_special_tokens", []))
    name = config.run_name
    if name is not None and (
        not name.strip() or not name.isprintable() or ".." in PurePath(name).parts or name.startswith("/")
    ):
        raise ConfigError(f"run_name must be a name, without .. and control characters; got {name!r}")
    template = config.chat_template
    if template is not None:
        if not str(template).strip():
            raise ConfigError(
                "chat_template is empty. Write a template, a file's name, or null for the tokenizer's own."
            )
        if "{" in str(template):
            check_template(str(template))
        elif is_there(template, Path.is_file):
            check_template(read_template(template), f"chat_template: {template}")


def _check_prompt_template(template: str | None) -> None:
    if template is None:
        return
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    except ValueError as error:
        raise ConfigError(
            f"prompt_template {_shown(template)}: {error}. A brace that is text is written twice."
        ) from None
    if not names:
        raise ConfigError(
            f"prompt_template {_shown(template)} names no column, so that all rows would have the same prompt. Name "
            "one in braces: 'Question: {question}'"
        )


def is_there(name: str | Path, look: Callable[[Path], bool] = Path.exists) -> bool:
    """Whether a text names something on the disk, ``look`` what; one that no path can be names nothing."""
    try:
        return look(Path(name).expanduser())
    except (OSError, ValueError, RuntimeError):  # too long; a character of code 0; no such user
        return False


def read_tokens(entries: Sequence[str]) -> list[str]:
    """What ``new_special_tokens`` says, each token once: the words of .txt files, and other entries as they are.

    Raises:
        ConfigError: a file that is not there or holds no text, or an empty token.
    """
    tokens: list[str] = []
    for entry in entries:
        if not entry.endswith(".txt"):
            tokens.append(entry)
            continue
        try:
            tokens += Path(entry).expanduser().read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"new_special_tokens: {entry!r} cannot be read: {error}") from None
    if any(not token.strip() for token in tokens) or (entries and not tokens):
        raise ConfigError("new_special_tokens holds an empty token. Write the tokens, or a .txt file that has some.")
    return list(dict.fromkeys(tokens))


def read_template(file: str | Path) -> str:
    """The template in a file. Raises ConfigError if it holds no text."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {str(file)!r} cannot be read: {error}") from None


def _check_columns(columns: Mapping[str, str]) -> None:
    """Raises ConfigError if two columns would get one name."""
    for name in columns.values():
        if len(both := [old for old, new in columns.items() if new == name]) > 1:
            raise ConfigError(
                f"columns: {' and '.join(map(repr, both))} would both become {name!r}. Rename one of them to another "
                "name."
            )


def _check_env(env: Mapping[str, Any]) -> None:
    for name, value in env.items():
        if not VARIABLE.fullmatch(name):
            raise ConfigError(f"env: {name!r} is not a name of an environment variable (no '=', no space)")
        if "\0" in str(value):
            raise ConfigError(f"env: {name} holds a character of code 0, which no environment variable may hold")
        if not is_unicode(f"{name}{value}"):
            raise ConfigError(f"env: {name!r} holds half a surrogate pair, which is not Unicode. Remove it.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_folder(name: str, folder: str | None) -> None:
    """Raises ConfigError for a path at which nothing lies."""
    if folder is not None and str(folder).startswith(("/", "./", "../")) and not is_there(folder):
        raise ConfigError(f"{name}: there is no folder {folder!r} (looked from {Path.cwd()}). Give a folder or a name.")


def check_file(name: str, source: Any, suffixes: tuple[str, ...]) -> None:
    """Raises ConfigError for the name of a file (one that ends so) which is not there, with the nearest that is."""
    if isinstance(source, str):
        source = re.sub(r"#:?\d+$", "", source)  # so many of its rows
    if not isinstance(source, str) or not source.endswith(suffixes) or any(mark in source for mark in "*?["):
        return
    path = Path(os.path.expanduser(source))
    if is_there(source, Path.is_dir):
        raise ConfigError(f"{name}: {source!r} is a folder. Give a file.")
    if not is_there(source, Path.is_file):
        beside = [other.name for other in path.parent.iterdir()] if is_there(path.parent, Path.is_dir) else []
        close = nearest(path.name, beside, "{}")
        hint = DID_YOU_MEAN.format(str(path.parent / close)) if close else f" It was looked for from {Path.cwd()}."
        raise ConfigError(f"{name}: there is no file {source!r}.{hint}")


def check_source(name: str, source: Any, split: str, default: str) -> None:
    """Raises ConfigError for a file that is not there, and for a split of files, which have none.

    ``default``: of the key of the split. ``train`` is what ``datasets`` calls the rows of a file.
    """
    sources = source if isinstance(source, list) else [source]
    for one in sources:
        inner = list(one.values()) if isinstance(one, Mapping) and isinstance(source, Mapping) else [one]
        is_mixture = isinstance(one, Mapping) and bool({"path", "datasets"} & one.keys())
        if not is_mixture and any(isinstance(value, (bool, int, float)) for value in inner):
            raise ConfigError(
                f"{name} is {_shown(source)}. Give a file, a folder, a hub name, a list of them, or rows."
            )
        check_file(name, one, DATA_SUFFIXES)
        path = re.sub(r"#:?\d+$", "", one) if isinstance(one, str) else ""
        if path.startswith(("/", "./", "../", "~")) and not any(mark in path for mark in "*?[") and not is_there(path):
            raise ConfigError(f"{name}: there is no file or folder {path!r} (looked from {Path.cwd()}).")
    files = [re.sub(r"#:?\d+$", "", one) for one in sources if isinstance(one, str)]
    is_of_files = bool(files) and len(files) == len(sources) and all(file.endswith(DATA_SUFFIXES) for file in files)
    if is_of_files and split not in (default, "train"):
        raise ConfigError(
            f"{name}_split is {split!r}, but {files[0]} is a file, which has no splits. Remove {name}_split. To take "
            f"the first 500 rows, write {files[0]}#:500."
        )


def check_choices(config: Any) -> None:
    """Raises ConfigError for a key that has none of the values it may have: Python checks no types."""
    for name, (allowed, others) in _choices_of(type(config)).items():  # type: ignore[arg-type]  # a class can be hashed
        value = getattr(config, name)
        if type(value) not in others:
            one_of(name, value, allowed)


@functools.lru_cache(maxsize=64)
def _choices_of(config_type: Hashable) -> Mapping[str, tuple[list[Any], list[type]]]:
    """Of each key with a choice: the values that it may have, and the types of which every value may be."""
    found: dict[str, tuple[list[Any], list[type]]] = {}
    for name, hint in _types_of(config_type).items():
        kinds = [hint, *get_args(hint)]
        allowed = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        if allowed:
            found[name] = (allowed, [kind for kind in kinds if kind in (bool, int, NoneType)])
    return MappingProxyType(found)


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises ConfigError if the value is not among the allowed ones, with the nearest of them."""
    allowed = list(allowed)
    if value not in allowed:
        options = list(map(str, allowed))
        hint = nearest(value, options, DID_YOU_MEAN)
        raise ConfigError(f"{name} must be one of {', '.join(options)}; got {value!r}.{hint}")


def at_least(config: Any, least: float, *names: str) -> None:
    """Raises ConfigError if a named key is set and below ``least``, or no finite number."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


def check_seconds(config: Any, *names: str) -> None:
    """Raises ConfigError if a named key is set, and no positive, finite number."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be a positive number of seconds, got {value}")


# Schedules of the learning rate

PLAIN = ("linear", "cosine", "constant", "constant_with_warmup")
# Those of transformers that look at the step alone; some need lr_scheduler_kwargs.
SCHEDULES = (
    *PLAIN,
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)
NUM_STEPS = 10  # of the schedule that is tried
ROUNDING = 1e-6


def check_schedule(name: str, kwargs: dict[str, Any], learning_rate: float) -> None:
    """Raises ConfigError for an unknown schedule, and for arguments with which it fails or leaves the range from 0 to
    ``learning_rate``. A short one is tried."""
    one_of("lr_scheduler_type", name, SCHEDULES)
    if kwargs and name.startswith("constant"):
        raise ConfigError(f"lr_scheduler_kwargs is {kwargs}, but lr_scheduler_type {name} reads none. Remove it")
    if name in PLAIN and not kwargs:
        return  # without importing transformers, so that a typo elsewhere is answered at once
    told = f"lr_scheduler_kwargs={kwargs} do not fit lr_scheduler_type={name}"
    for key, value in kwargs.items():
        if isinstance(value, (int, float)) and not 0 <= value < math.inf:
            raise ConfigError(f"{told}: {key} must be a finite number of at least 0, got {value}")
    import torch
    from transformers import get_scheduler

    highest = learning_rate or 1.0
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=highest)
    settings: dict[str, Any] = {
        "num_warmup_steps": 1,
        "num_training_steps": NUM_STEPS,
        "scheduler_specific_kwargs": dict(kwargs),
    }
    try:
        schedule: Any = get_scheduler(name, optimizer, **settings)
        shares = [float(share(step)) for share in schedule.lr_lambdas for step in range(NUM_STEPS + 1)]
    except Exception as error:  # whatever transformers' arithmetic makes of them
        raise ConfigError(f"{told}: {' '.join(str(error).split())}") from None
    for share in shares:
        if not -ROUNDING <= share <= 1 + ROUNDING:
            raise ConfigError(
                f"{told}: the learning rate would be {share * highest:g} in some step. It must stay between 0 and "
                f"learning_rate ({learning_rate:g})."
            )
