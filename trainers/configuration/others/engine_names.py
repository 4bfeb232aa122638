"""What other systems call the keys of the rollout engine, in ours: ``use_vllm`` and ``vllm_*``, and sections of verl.

A ``vllm_*`` key that is none of ours is a field of vLLM's EngineArgs and goes into ``vllm_engine_kwargs`` under vLLM's
own name. Whether vLLM has such a field is asked when the run is checked (``rollout/vllm``): nothing here needs vLLM.
What a section ``teacher`` says of vLLM is for an engine of the teacher's own, ``teacher_engine``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rayhelper import ConfigError
from rayhelper.device_groups import DeviceGroups
from rayhelper.text import nearest
from trainers.configuration.others.other_names import ALIASES, HINTS, REFUSED, is_neutral, why_refused
from trainers.configuration.reading.given_keys import GivenKeys, plain
from trainers.configuration.reading.typed_values import bracketed
from trainers.rollout.choice import AUTO, choose_engine

PREFIX = "vllm_"
TEACHER = "teacher_"  # before the keys of a section teacher that say something of vLLM
SERVER = "vllm_server_"  # of an engine outside the run: refused, and no field of EngineArgs
SERVED = ("vllm_mode", *(f"{SERVER}{name}" for name in ("host", "port", "base_url", "timeout", "group_port")))
OF_ROLLOUT = ("use_vllm", "free_cache_engine", "sleep_level")  # and all of PREFIX: what role rollout alone reads

HF = ("hf_infer", "transformers")  # other names of rollout_engine: hf
KEYS_ALONE = ("tensor_parallel_size", "enable_lora")  # fields of EngineArgs that a key of ours sets, behind PREFIX


def belongs_to_engine(name: str, known: Collection[str]) -> bool:
    """Whether role rollout alone reads a key of this run, as it is its engine's, be it ours or another's."""
    return "rollout_engine" in known and (name.startswith(PREFIX) or name in OF_ROLLOUT)


def no_field(name: str, key: str, owner: str, fields: Collection[str]) -> str:
    """What to tell of a field in the mapping ``key`` that its owner lacks, which has ``fields`` that may be given.

    One in ``vllm_engine_kwargs`` may have been written as a key.
    """
    if key != "vllm_engine_kwargs":
        return f"{key}: {owner} has no field {name!r}{nearest(name, fields)}"
    near = nearest(name, [*fields, *KEYS_ALONE], f" (did you mean {PREFIX}{{}}?)")
    return f"unknown key {PREFIX}{name}: {owner} has no field {name!r} for {key}{near}"


def decide_engine(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Puts an engine in place of ``rollout_engine: auto``; before other keys are looked at, which depend on it."""
    if "rollout_engine" not in given.known or given.get("rollout_engine") != AUTO or given.foreign("use_vllm"):
        return  # two keys that say it are a mistake, which is told below
    choice = choose_engine({**defaults, **{name: given.get(name) for name in given.values}})
    given.values["rollout_engine"] = choice.engine
    given.chosen["rollout_engine"] = choice.reason
    if choice.engine == "vllm" and given.values.pop("rollout_batch_size", None) is not None:
        given.notes["rollout_batch_size"] = "rollout_engine: auto chose vllm, which has vllm_max_num_seqs"


def translate_engine(given: GivenKeys) -> None:
    """Puts our keys in place of others' in ``given``, if the run has an engine at all."""
    _teacher_keys(given, is_off=given.foreign("use_vllm") and given.get("use_vllm") is False)
    if "rollout_engine" not in given.known:
        return
    uses_vllm = given.take("use_vllm") if given.foreign("use_vllm") else None
    if isinstance(uses_vllm, bool):
        given.put("rollout_engine", "vllm" if uses_vllm else "hf", "use_vllm")
    elif uses_vllm is not None:
        given.refuse("use_vllm", f"use_vllm must be true or false, got {uses_vllm!r}")
    if given.get("rollout_engine") in HF:
        given.values["rollout_engine"] = "hf"
    _server_mode(given)
    _sleep(given)
    _generations_ahead(given)
    is_hf = given.get("rollout_engine") == "hf"
    off = "use_vllm is false" if uses_vllm is False else "rollout_engine: auto took hf"
    _vllm_keys(given, off=off if is_hf and (uses_vllm is False or "rollout_engine" in given.chosen) else None)


def _server_mode(given: GivenKeys) -> None:
    """``vllm_mode: server`` is an engine on devices of its own: the workers of role rollout, where they have some."""
    if given.get("vllm_mode") != "server":
        return
    try:
        groups = DeviceGroups.parse(bracketed(given.values.get("device_groups")))
        is_apart = not groups.share_devices("train", "rollout")
    except (ConfigError, TypeError, AttributeError):  # there are none, or mistakes that are told elsewhere
        return
    if is_apart:
        for name in [name for name in given.values if name in SERVED]:
            del given.values[name]
            given.notes[name] = "role rollout has its own device group"


def _sleep(given: GivenKeys) -> None:
    """TRL's engine drops its weights while it sleeps, verl's keeps them in the memory of the host."""
    for name, level in (("vllm_enable_sleep_mode", 2), ("free_cache_engine", 1)):
        if given.foreign(name):
            value = given.take(name)
            if isinstance(value, bool):
                given.put("sleep_level", level if value else 0, name)
            elif value is not None:
                given.refuse(name, f"{name} must be true or false, got {value!r}")


def _generations_ahead(given: GivenKeys) -> None:
    """ms-swift's asynchronous generation is one generation ahead of the one that is learned from."""
    if not given.foreign("async_generate") or "max_staleness" not in given.known:
        return
    if given.take("async_generate") is True:
        given.put("max_staleness", 1, "async_generate")


def _vllm_keys(given: GivenKeys, *, off: str | None) -> None:
    """``off``: why they do not matter, if so. Without a value, vLLM's default holds."""
    for name in [name for name in given.values if name.startswith(PREFIX) and name not in ALIASES]:
        value = given.get(name)
        if is_neutral(name, value):
            continue
        if value is None:
            del given.values[name]
        elif off is not None:
            del given.values[name]
            given.notes[name] = off
        elif name in given.known or name in HINTS or name in REFUSED or name.startswith(SERVER):
            continue  # told or checked elsewhere
        elif given.get("rollout_engine", "hf") == "hf":
            del given.values[name]
            given.refuse(name, f"{name} needs rollout_engine: vllm, which is use_vllm: true")
        else:
            given.put_inner("vllm_engine_kwargs", name.removeprefix(PREFIX), given.take(name), name)


def _teacher_keys(given: GivenKeys, *, is_off: bool) -> None:
    """``is_off``: ``use_vllm: false`` beside the sections, which is of no vLLM at all."""
    said = [name for name in given.values if name.startswith((f"{TEACHER}{PREFIX}", f"{TEACHER}use_vllm"))]
    if not said:
        return
    values = {name.removeprefix(TEACHER): (name, given.take(name)) for name in said}
    reason = None
    if "teacher_engine" not in given.known:
        reason = "this trainer's teacher does not use vLLM"
    elif is_off or values.get("use_vllm", ("", None))[1] is False:
        reason = "use_vllm is false"
    elif given.get("teacher_engine") == "hf":
        reason = "teacher_engine is hf"
    if reason is not None:
        given.notes |= {f"teacher.{name}": reason for name in values}
        return
    given.put("teacher_engine", "vllm", said[0])
    for name, (written, value) in values.items():
        name = ALIASES.get(name, name)
        if name == "use_vllm" or value is None or is_neutral(name, value):
            continue
        if name in HINTS:
            given.notes[f"teacher.{name}"] = HINTS[name]
        elif name in REFUSED or name.startswith(SERVER):
            given.refuse(written, f"section 'teacher': {name} is not supported: {why_refused(name)}")
        elif name == "vllm_engine_kwargs":
            for field, inner in value.items() if isinstance(value, Mapping) else ():
                given.put_inner("teacher_engine_kwargs", str(field), plain(inner), written)
            if not isinstance(value, Mapping):
                given.refuse(written, f"section 'teacher': {name} must be a mapping, got {value!r}")
        else:
            given.put_inner("teacher_engine_kwargs", name.removeprefix(PREFIX), value, written)
