"""Sections of roles beside the other keys (``train: {gpus: 4, lora_rank: 8}``): where a role runs, what it is told.

A configuration is flat here, and declares its roles (``configuration/roles.py``). So a section's placement goes into
``device_groups``, and its other keys become the keys of the run that they mean: ``model`` of ``teacher`` is
``teacher_model``. As in ms-swift, a section's key wins over the same key beside the sections. That is refused for a key
that several roles read, which has one value for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rayhelper.device_groups.keys import SECTION_KEYS, SHARE_KEY, SIZE_KEYS
from rayhelper.planning.role_kinds import declared_name
from trainers.configuration.megatron import MegatronConfig
from trainers.configuration.others.engine_names import PREFIX, TEACHER, belongs_to_engine
from trainers.configuration.others.other_names import ALIASES, ELSEWHERE
from trainers.configuration.reading.given_keys import COMMAND_LINE, GivenKeys, plain
from trainers.configuration.roles import Role, main_role

SHARED_PLACEMENT_KEYS = ("colocate_groups", "nproc_per_node", "nnodes")

# Keys that several roles read: one value for all of them, whichever section says it
READ_BY_SEVERAL = (
    *("model", "tokenizer", "chat_template", "chat_template_kwargs", "model_init_kwargs", "trust_remote_code", "dtype"),
    *("seed", "temperature", "max_completion_length", "max_prompt_length", "max_length", "dataset", "system"),
    *("external_plugins", "per_device_train_batch_size", "infer_batch_size"),
)
# Keys of the model's layout, which every role that trains or scores reads; the main role decides
OF_LAYOUT = {"backend": "fsdp", **asdict(MegatronConfig())}  # and what they are if nobody says
del OF_LAYOUT["infer_batch_size"]


def is_placement(name: str, value: Any) -> bool:
    """Whether a key beside ``device_groups`` says where roles run: the section of a role, or what sections share."""
    is_section = isinstance(value, Mapping) and any(key in value for key in (*SIZE_KEYS, SHARE_KEY))
    return name in SHARED_PLACEMENT_KEYS or is_section


def lift_sections(given: GivenKeys, spoken: Mapping[tuple[str, ...], str]) -> dict[str, dict[str, Any]]:
    """Moves sections and what else places roles into ``device_groups``, and their other keys to where they are read.

    ``device_groups`` of the command line replaces what the file says of devices, and nothing else of its sections.
    Returns the keys of sections that are none of the run's, by role. ``spoken`` are the keys that the command line
    said, as paths. Mistakes are noted in ``given``.
    """
    has_groups = "device_groups" in given.values
    sections = {
        name: value
        for name, value in given.values.items()
        if name not in given.known and (is_placement(name, value) or (has_groups and _is_of_role(name, value, given)))
    }
    if not sections or "device_groups" not in given.known:
        return {}
    file = given.where[next(iter(sections))]
    is_replaced = given.where.get("device_groups") == COMMAND_LINE
    twice = [name for name, value in sections.items() if is_placement(name, value)]
    if is_replaced:  # what the file says of devices, and nothing else
        twice = [name for name in twice if _is_spoken(name, spoken)]
    if has_groups and twice:
        given.mistakes.append(
            f"{given.where[twice[0]] if not is_replaced else COMMAND_LINE}: device_groups and {', '.join(twice)} "
            "both set where roles run; move everything into device_groups"
        )
    for name in sections:
        del given.values[name]
    placed: dict[str, Any] = dict.fromkeys(sections)  # ranks are given out in this order
    foreign: dict[str, dict[str, Any]] = {}
    said: dict[str, tuple[str, str, Any]] = {}  # keys of the run, by the section that said them
    for role, section in sorted(sections.items(), key=lambda item: follows(item[0], given)):
        if not isinstance(section, Mapping) or role in SHARED_PLACEMENT_KEYS:
            placed[role] = section
            continue
        placed[role] = {key: value for key, value in section.items() if key in SECTION_KEYS}
        if is_replaced:
            given.notes |= {f"{role}.{key}": "device_groups on the command line places roles" for key in placed[role]}
        for key in [key for key in section if key not in SECTION_KEYS]:
            where = COMMAND_LINE if (role, key) in spoken else given.where[role]
            if role == "teacher" and (str(key).startswith(PREFIX) or key == "use_vllm"):
                given.values[f"{TEACHER}{key}"], given.where[f"{TEACHER}{key}"] = section[key], where
                continue
            meant = meant_by(role, str(key), given)
            twin = said.get(meant or "")
            if twin is not None and twin[0] == role and where == COMMAND_LINE != given.where[meant or ""]:
                del said[meant or ""]  # the command line says in other words what the file does
            if meant is None:
                foreign.setdefault(role, {})[str(key)] = section[key]
            elif message := _disagreement(role, str(key), meant, section[key], given, said):
                given.mistakes.append(f"{where}: {message}")
            else:
                said[meant] = (role, str(key), section[key])
                _lift(meant, section[key], where, given)
    if not has_groups:
        given.values["device_groups"] = placed
        given.where["device_groups"] = file
    return foreign


def _is_of_role(name: str, value: Any, given: GivenKeys) -> bool:
    """Whether a key is the section of one of the trainer's roles, whose devices other keys may say."""
    return isinstance(value, Mapping) and declared_name(name, given.roles) in given.roles


def _is_spoken(name: str, spoken: Mapping[tuple[str, ...], str]) -> bool:
    """Whether the command line says where a role runs, by the key ``name`` or inside of the section ``name``."""
    return any(path[0] == name and (len(path) == 1 or path[1] in SECTION_KEYS) for path in spoken)


def role_of(section: str, given: GivenKeys) -> tuple[str, Role]:
    """The role of a section, by its name here, and what its trainer declares of it."""
    name = declared_name(section, given.roles)
    return name, given.roles.get(name, Role())


def follows(section: str, given: GivenKeys) -> bool:
    """Whether the main role decides the layout of the role's model, so that its section is read first."""
    name, role = role_of(section, given)
    return name != main_role(given.roles) and role.does in ("scores", "values")


def meant_by(section: str, key: str, given: GivenKeys) -> str | None:
    """The run's key that a section's key means; None for a key that is none of the run's."""
    name_of_role, role = role_of(section, given)
    own = role.own_names.get(key)
    if own is not None:
        return own if own in given.known or belongs_to_engine(own, given.known) else None
    name = our_name(key, given.known)
    is_engines = role.does == "generates" and belongs_to_engine(name, given.known)
    is_main = name_of_role == main_role(given.roles)
    return name if name in given.known or is_main or is_engines else None


def our_name(written: str, known: Any) -> str:
    """The name of a key here; ``written`` itself where it is none of ours, or no key of this run."""
    name = ALIASES.get(written) or ELSEWHERE.get(written) or written
    return written if written in known or (known and name not in known) else name


def _lift(name: str, value: Any, where: str, given: GivenKeys) -> None:
    """A section's key wins over the run's, and the command line over both."""
    if name not in given.values or given.where[name] != COMMAND_LINE or where == COMMAND_LINE:
        given.values[name] = value
        given.where[name] = where


def _disagreement(
    section: str, key: str, name: str, value: Any, given: GivenKeys, said: Mapping[str, tuple[str, str, Any]]
) -> str | None:
    """What is wrong with a section's key: another role reads it, or another place says otherwise."""
    name_of_role, role = role_of(section, given)
    is_engines = belongs_to_engine(name, given.known)
    readers = [
        reader
        for reader, other in given.roles.items()
        if (other.does == "generates" if is_engines else name in other.keys)
    ]
    is_own = key in role.own_names
    if name in OF_LAYOUT and follows(section, given) and not is_own:
        return _other_layout(section, key, name, value, given, said)
    is_shared = name in READ_BY_SEVERAL or is_own
    if readers and name_of_role not in readers and not is_own:
        return f"section {section!r} has {key}, which role {readers[0]} reads. Move it there, or to the top level."
    if not readers and not is_shared and name_of_role != main_role(given.roles):
        return f"section {section!r} has {key}, which role {section} does not read. Move it to the top level."
    if name in said and said[name][0] == section:
        return f"section {section!r} sets {name} twice, as {said[name][1]} and {key}. Remove one of them"
    if name in said and plain(said[name][2]) != plain(value):
        return (
            f"sections {said[name][0]!r} and {section!r} disagree on {key} ({said[name][2]} and {value}), which has "
            "one value for all roles. Write it once, at the top level."
        )
    beside = given.values.get(name)
    is_overriding = not is_shared or name in said or given.where.get(name) == COMMAND_LINE
    if name in given.values and not is_overriding and plain(beside) != plain(value):
        return (
            f"section {section!r} has {key}: {value}, and the top level {beside}; it has one value for all roles. "
            "Write it once, at the top level."
        )
    return None


def _other_layout(
    section: str, key: str, name: str, value: Any, given: GivenKeys, said: Mapping[str, tuple[str, str, Any]]
) -> str | None:
    """What is wrong with a key of the layout in the section of a role that does not decide it: another value."""
    decided = said[name][2] if name in said else given.values.get(name, OF_LAYOUT[name])
    if plain(decided) == plain(value):
        return None
    return (
        f"section {section!r} has {key}: {value}, and role {main_role(given.roles)} {decided}; it has one value for "
        "all roles that train or score. Write it once, at the top level."
    )
