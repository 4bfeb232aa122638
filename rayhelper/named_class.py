"""The class that ``package.module:Class`` or ``path/to/file.py:Class`` names; modules and objects that users name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rayhelper.errors import ConfigError, DecorationError
from rayhelper.text import DID_YOU_MEAN, nearest


def class_named(target: str) -> type:
    """The class, its module imported; modules are also looked for in the current folder.

    A file is imported as the module that it is: of its package, or under its own name from its folder.

    Raises:
        ConfigError: there is no such module, file or class, or one in it is decorated in a way without meaning. What
            the module itself raises otherwise is raised as it is.
    """
    where, _, qualname = target.rpartition(":")
    if not where or not qualname:
        raise ConfigError(f"{target!r} names no class. Write module:Class, or path/to/file.py:Class.")
    try:
        module = _of_file(Path(where).expanduser()) if is_file(where) else _of_name(where, qualname)
    except DecorationError as error:
        raise ConfigError(f"{target}: {error}") from error
    try:
        found = functools.reduce(getattr, qualname.split("."), module)
    except AttributeError:
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        near = nearest(qualname, classes, DID_YOU_MEAN) or f" It is read from {module.__file__}."
        raise ConfigError(f"{target}: {where} has no class {qualname}.{near}") from None
    if not isinstance(found, type):
        raise ConfigError(f"{target} is a {type(found).__name__}, not a class. Name a class.")
    return found


def search_current_folder() -> None:
    """Put the current folder on ``sys.path``, as ``python -m`` does; a console command does not."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))


def module_named(name: str) -> ModuleType:
    """The module of that name. The current folder is searched too, after everything else.

    Raises ImportError as ``import`` does.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
    search_current_folder()
    return importlib.import_module(name)


def object_named(path: str) -> Any:
    """The object at ``module:name`` or ``module.name``. Raises ImportError, AttributeError or ValueError."""
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    return functools.reduce(getattr, attribute.split("."), module_named(module))


def _of_name(name: str, qualname: str) -> ModuleType:
    search_current_folder()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # of a module that it imports
        raise ConfigError(
            f"there is no module {name!r}: {error.name} is neither installed nor in {Path.cwd()}. Start where it is, "
            f"set PYTHONPATH, or name its file: path/to/{name.rpartition('.')[2]}.py:{qualname}."
        ) from None
    except (ValueError, TypeError):  # a relative name, or an empty part of one
        raise ConfigError(
            f"{name!r} is not the name of a module. Write module:Class, or path/to/file.py:Class."
        ) from None


def is_file(where: str) -> bool:
    """Whether what stands before the colon of a target is a file, not a module."""
    return where.endswith(".py") or "/" in where


def module_of_file(path: Path) -> str:
    """The name under which a file can be imported: its packages' too; the folder is put on ``sys.path``.

    Raises:
        ConfigError: there is no such file.
    """
    if not path.is_file():
        beside = sorted(other.name for other in path.parent.glob("*.py"))
        near = nearest(path.name, beside, DID_YOU_MEAN) or f" It was looked for from {Path.cwd()}."
        raise ConfigError(f"there is no file {str(path)!r}.{near}")
    file = path.resolve()
    name, folder = file.stem, file.parent
    while (folder / "__init__.py").is_file():
        name, folder = f"{folder.name}.{name}", folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return name


def _of_file(path: Path) -> ModuleType:
    name = module_of_file(path)
    module, file = importlib.import_module(name), path.resolve()
    if Path(module.__file__ or "").resolve() != file:
        raise ConfigError(
            f"{path} cannot be imported as {name}, which is {module.__file__ or 'a part of Python'}. Rename the file."
        )
    return module
