"""ROLL's strategies: ``strategy_args: {strategy_name: megatron_train, strategy_config: {...}}``, by role or for all.

A name says which backend there is, and whether the role is trained or only scores, which its trainer knows anyway; the
configuration's keys are the role's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayhelper.planning.role_kinds import kind_of
from rayhelper.text import nearest
from trainers.configuration.reading.given_keys import GivenKeys
from trainers.configuration.roles import LEARNS

NAME, ARGUMENTS, CONFIG = "strategy_name", "strategy_args", "strategy_config"
OF_ROLL = ("actor_train", "actor_infer", "critic", "rewards")
BACKENDS = {
    "megatron_train": "megatron",
    "megatron_infer": "megatron",
    "fsdp2_train": "fsdp",
    "fsdp2_infer": "fsdp",
    "hf_infer": "fsdp",
}


def open_strategies(given: GivenKeys) -> None:
    """Puts what a strategy holds in its place, at the top level and in sections. Mistakes are noted in ``given``."""
    if "backend" not in given.known:
        return
    if ARGUMENTS in given.values or NAME in given.values:
        where = given.where[ARGUMENTS if ARGUMENTS in given.values else NAME]
        taken = {name: given.values.pop(name) for name in (ARGUMENTS, NAME) if name in given.values}
        for name, value in _opened("", taken, where, given).items():
            if given.values.get(name, value) != value and given.where[name] == where:
                given.mistakes.append(
                    f"{where}: {name} is {given.values[name]}, and {value} by the strategy; remove one of them"
                )
            given.values.setdefault(name, value)
            given.where.setdefault(name, where)
    for role, section in given.values.items():
        is_read = role not in given.known and role not in OF_ROLL  # whose sections are refused by name
        if is_read and isinstance(section, Mapping) and {ARGUMENTS, NAME} & section.keys():
            given.values[role] = _opened(role, section, given.where[role], given)


def _opened(role: str, section: Mapping[str, Any], where: str, given: GivenKeys) -> dict[str, Any]:
    """The section without its strategy, and with the keys that it holds."""
    opened = {key: value for key, value in section.items() if key != ARGUMENTS}
    told = f"{where}, section {role}" if role else where
    arguments = section.get(ARGUMENTS, {})
    config = arguments.get(CONFIG) or {} if isinstance(arguments, Mapping) else None
    if not isinstance(arguments, Mapping) or not isinstance(config, Mapping):
        given.mistakes.append(f"{told}: {ARGUMENTS} must be a mapping with {NAME} and {CONFIG}, got {arguments!r}")
        return opened
    unknown = [key for key in arguments if key not in (NAME, CONFIG)]
    if unknown:
        given.mistakes.append(f"{told}: {ARGUMENTS} holds {', '.join(unknown)}, but only {NAME} and {CONFIG} are read")
    inner = {**config, **({NAME: arguments[NAME]} if NAME in arguments else {})}
    for key, value in inner.items():
        if key in opened and opened[key] != value:
            given.mistakes.append(f"{told}: {key} is {opened[key]}, and {value} in {ARGUMENTS}; remove one of them")
        opened[key] = value
    does = kind_of(role, given.roles).does
    if does == "generates" or NAME not in opened:  # its strategy is an engine
        return opened
    name = opened.pop(NAME)
    if name not in BACKENDS:
        listed = ", ".join(BACKENDS)
        given.mistakes.append(f"{told}: {NAME} must be one of {listed}, got {name!r}{nearest(str(name), BACKENDS)}")
        return opened
    trains = name.endswith("_train")
    is_trained = not role or does in LEARNS  # what holds for all roles holds for those
    if trains is not is_trained:
        needed = next(
            one for one in BACKENDS if BACKENDS[one] == BACKENDS[name] and one.endswith("_train") is is_trained
        )
        done = "is trained" if is_trained else "only scores"
        who = f"role {role}" if role else "the model"
        given.mistakes.append(f"{told}: {NAME} is {name}, but {who} {done}. Write {needed}")
    if opened.setdefault("backend", BACKENDS[name]) != BACKENDS[name]:
        given.mistakes.append(f"{told}: {NAME} is {name}, but backend is {opened['backend']}; remove one of them")
    return opened
