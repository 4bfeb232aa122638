"""``run.json``: how a run was started, by what and where, and how it ended. ``trainers/report`` shows it.

    {"trainer": "grpo", "num_steps": 220, "changed": {"learning_rate": 0.001, ...},
     "starts": [{"at": "2026-01-31T12:00:00+00:00", "first_step": 0, "command": "rayhelper grpo --config x.yaml",
                 "versions": {"torch": "2.13.0", ...}, "gpus": [...], "commits": {...}, ...}],
     "end": {"at": ..., "step": 220, "how": "finished"}}

A resumed run adds a start. Secrets are written nowhere. Process 0 writes the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import rayhelper
from rayhelper import ConfigError
from rayhelper.text import parse_text
from trainers.configuration.reading.secrets import MASK, is_secret, masked, secret_in, secrets_in
from trainers.configuration.reading.text import default_of

ORIGIN_FILE = "run.json"
PACKAGES = ("torch", "transformers", "ray", "vllm", "megatron-core", "trl", "peft", "datasets", "numpy")
WAIT_S = 5.0  # for a program that is asked for a fact
ROWS = 20  # values of a list that are written down
LONGEST = 500  # characters of a text


def begin(folder: Path, config: Any, *, trainer: str, first_step: int, num_steps: int) -> None:
    """Writes that a run starts in ``folder``, or goes on from ``first_step``."""
    before = read(folder) if first_step else {}
    starts = before.get("starts")
    _write(
        folder,
        {
            "trainer": trainer,
            "num_steps": num_steps,
            "changed": _plain(masked(changed(config))),
            "starts": [*(starts if isinstance(starts, list) else []), _start(config, first_step)],
            "end": None,
        },
    )


def end(folder: Path, step: int, how: str) -> None:
    """Writes that the run has ended after ``step``: ``finished``, or why it did not reach its last step."""
    _write(folder, read(folder) | {"end": {"at": _now(), "step": step, "how": how}})


def read(folder: Path) -> dict[str, Any]:
    """What the file holds; nothing where it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / ORIGIN_FILE).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def changed(config: Any) -> dict[str, Any]:
    """The keys whose values are not the defaults of the configuration's class."""
    fields = [field for field in dataclasses.fields(config) if field.init]
    return {field.name: value for field in fields if _differs(value := getattr(config, field.name), default_of(field))}


def _differs(value: Any, default: Any) -> bool:
    """Whether they are not equal; tables and arrays, which compare number by number, are no defaults."""
    try:
        return bool(value != default)
    except Exception:
        return True


def without_secrets(arguments: Sequence[str], config: Any) -> list[str]:
    """A command line in which what ``env`` says of secrets, and the values of options named so, are ``***``."""
    values = sorted(map(str, _secrets(config)), key=len, reverse=True)
    shown: list[str] = []
    hides_next = False
    for argument in arguments:
        for value in values:
            argument = argument.replace(value, MASK)
        name, equals, value = argument.partition("=")
        if hides_next and not argument.startswith("--"):
            argument = MASK
        hides_next = argument.startswith("--") and is_secret(name.rpartition(".")[2]) and not equals
        if argument.startswith("--") and equals and is_secret(name.rpartition(".")[2]):
            argument = f"{name}={MASK}"
        shown.append(argument)
    return shown


def _secrets(config: Any) -> Iterable[Any]:
    """The secrets in ``env``, in the ``env`` of device groups, and among the arguments that other keys hold."""
    if dataclasses.is_dataclass(config):
        yield from secrets_in({one.name: getattr(config, one.name) for one in dataclasses.fields(config)})
    groups = getattr(config, "device_groups", None)
    with contextlib.suppress(ConfigError):
        groups = parse_text(groups, "device_groups") if isinstance(groups, str) else groups
    of_groups = groups.values() if isinstance(groups, Mapping) else ()
    envs = [getattr(config, "env", None), *(group.get("env") for group in of_groups if isinstance(group, Mapping))]
    for env in envs:
        if isinstance(env, Mapping):
            yield from filter(None, (secret_in(str(name), value) for name, value in env.items()))


def _start(config: Any, first_step: int) -> dict[str, Any]:
    program = Path(sys.argv[0])
    is_module = program.name == "__main__.py" and program.parent.name
    words = ["python", "-m", ".".join(_module_path(program.parent))] if is_module else [program.name]
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    return {
        "at": _now(),
        "first_step": first_step,
        "command": shlex.join([*words, *without_secrets(sys.argv[1:], config)]),
        "torchrun_processes": launched,
        "folder": str(Path.cwd()),
        "host": platform.node(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": {"python": platform.python_version(), "rayhelper": rayhelper.__version__, **_versions()},
        "gpus": _gpus(),
        "commits": _commits(),
    }


def _module_path(folder: Path) -> list[str]:
    """The names of the packages around a ``__main__.py``."""
    names = [folder.name]
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
        names.insert(0, folder.name)
    return names


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _gpus() -> list[str]:
    """The GPUs of this node, by a program of their own: this process may be one that must not use them."""
    return _told(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]).splitlines()


def _commits() -> dict[str, str]:
    """The commits of the current folder and of this package, where git knows them; ``-dirty``: files were changed."""
    found: dict[str, str] = {}
    of_repository: dict[Path, str] = {}  # git reads the state of every file: once, where both folders lie in one
    for what, folder in (("the folder of the run", Path.cwd()), ("rayhelper", Path(rayhelper.__file__).parents[1])):
        root = next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)
        if root is None:
            continue
        if root not in of_repository:
            ask = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
            of_repository[root] = _told(ask).strip()
        if commit := of_repository[root]:
            found[what] = commit
    return found


def _told(command: list[str]) -> str:
    """What a program prints; nothing if it is not there, fails, or takes long."""
    if shutil.which(command[0]) is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
        return done.stdout
    return ""


def _plain(value: Any) -> Any:
    """The value as JSON knows it; long lists and texts cut, other objects described."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) > ROWS:
            return [*map(_plain, value[:ROWS]), f"... {len(value)} in all"]
        return list(map(_plain, value))
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write(folder: Path, values: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{ORIGIN_FILE}.tmp"
    unfinished.write_text(json.dumps(values, indent=1), encoding="utf-8")
    unfinished.replace(folder / ORIGIN_FILE)
