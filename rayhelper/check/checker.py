"""Findings about a decorated class, read from its source: ``rayhelper check module:Class``.

    module:Class  ->  Lineage  ->  Objects  ->  Flow  ->  rules  ->  file:line: rule: message

What is found works with Ray off and is an error, a loss or another number on device groups. A rule that cannot be sure
says nothing. A class that cannot be defined at all is checked as far as its own file goes. What is not seen of an
object that has other names, or is handed on, stands in ``reading/accesses.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayhelper.check import bodies, calls, decorators, parts, state
from rayhelper.check.flow import Flow
from rayhelper.check.reading.module import Finding, ModuleSource
from rayhelper.check.reading.names import Sources
from rayhelper.check.reading.objects import Objects
from rayhelper.check.reading.source import Lineage, lineage_of_class, lineage_of_source
from rayhelper.device_groups import DeviceGroups
from rayhelper.device_groups.keys import PLACING_KEYS, TOP_KEYS
from rayhelper.errors import ConfigError, DecorationError, RayHelperError
from rayhelper.named_class import is_file, module_of_file, search_current_folder
from rayhelper.planning.refusals import refusals
from rayhelper.planning.role_kinds import default_hosts
from rayhelper.text import parse_file

__all__ = ["Finding", "check", "findings"]

RULES: tuple[Callable[[Flow], Iterator[Finding]], ...] = (
    decorators.roles,
    decorators.settings,
    decorators.flattened_scalars,
    decorators.overrides,
    decorators.order,
    calls.calls_across_roles,
    calls.calls_while_constructing,
    calls.values_in_construction,
    calls.values_of_none,
    calls.arguments,
    calls.returned_values,
    state.attribute_findings,
    state.variable_findings,
    state.environment_findings,
    bodies.mutated_arguments,
    bodies.collectives,
    bodies.ranks_on_driver,
    parts.roles_of_parts,
    parts.parts_built_alike,
    parts.objects_given,
)


def check(target: str, device_groups: str | None = None, config: str | None = None) -> int:
    """Prints the findings about ``module:Class``: 0 if there is none, 1 if there are, 2 without a decorated class.

    Args:
        target: The class, as ``package.module:Class`` or ``path/to/file.py:Class``.
        device_groups: JSON or YAML of the device groups, to know which roles share processes.
        config: A YAML file that holds them instead.
    """
    try:
        groups = _groups(device_groups, config)
        if config is not None:
            values = parse_file(config)
            refused, unsure = refusals(target, config, values)
            if refused:
                raise ConfigError("\n  - ".join(["the trainer refuses the file", *refused, *unsure]))
        found = _findings_of_target(target, groups)
    except (RayHelperError, LookupError, OSError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    here = Path.cwd()
    for finding in found:
        path = Path(finding.file)
        print(replace(finding, file=str(path.relative_to(here))) if path.is_relative_to(here) else finding)
    print(f"{target}: {len(found)} finding{'' if len(found) == 1 else 's'}")
    return 1 if found else 0


def findings(cls: type, groups: DeviceGroups | None = None) -> list[Finding]:
    """The findings about an imported class, its own bases and its parts, sorted by file and line.

    Without ``groups`` roles are taken to be in processes of their own.

    Raises:
        RayHelperError: the source of the class cannot be read.
    """
    sources = Sources()
    return _apply(_flow(lineage_of_class(cls, sources.modules), sources, groups))


def _flow(lineage: Lineage, sources: Sources, groups: DeviceGroups | None) -> Flow:
    cls = lineage.classes[0].cls
    if groups is not None and cls is not None:
        groups = groups.with_default_hosts(default_hosts(cls))
    return Flow(Objects(lineage, sources), groups)


def _apply(flow: Flow) -> list[Finding]:
    names = sorted((instance.name for instance in flow.objects.instances), key=len, reverse=True)
    found = {
        (entry.file, entry.line, entry.rule, _subject(entry, names)): entry for rule in RULES for entry in rule(flow)
    }
    classes = [source for instance in flow.objects.instances for source in instance.lineage.classes]
    for module in {source.module.path: source.module for source in classes}.values():
        found.update(
            {(entry.file, entry.line, entry.rule, ""): entry for entry in bodies.initialized_on_import(module)}
        )
    return sorted(found.values())


def _subject(finding: Finding, names: list[str]) -> str:
    """What tells two findings of one rule on one line apart: not the way by which the method was reached, or of which
    of the objects of one class it is."""
    subject = finding.message.partition(" is ")[0]
    for name in names:
        subject = subject.replace(f"{name}.", "")
    return subject


def _findings_of_target(target: str, groups: DeviceGroups | None) -> list[Finding]:
    name, _, qualname = target.rpartition(":")
    if not name or not qualname:
        raise LookupError(f"{target!r} names no class. Write module:Class, or path/to/file.py:Class.")
    if is_file(name):
        name = module_of_file(Path(name).expanduser())
    else:
        search_current_folder()
    module, sources = _module(name), Sources()
    if bodies.initialized_on_import(module):  # importing it would start workers
        return _apply(_checkable(_flow(lineage_of_source(module, qualname), sources, groups), target))
    try:
        found: Any = importlib.import_module(name)
        for step in qualname.split("."):
            found = getattr(found, step)
    except DecorationError as error:
        return _undefined(module, qualname, error, groups)
    except AttributeError as error:
        raise LookupError(f"module {name} has no class {qualname}: {error}") from error
    except (Exception, SystemExit) as error:
        raise LookupError(f"module {name} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(found, type):
        raise LookupError(f"{target} is a {type(found).__name__}, not a class")
    return _apply(_checkable(_flow(lineage_of_class(found, sources.modules), sources, groups), target))


def _checkable(flow: Flow, target: str) -> Flow:
    """The flow. Raises LookupError if no role runs anything of the class or its parts: there is nothing to check."""
    lineage = flow.root.lineage
    names = ", ".join(source.name for source in lineage.classes)
    nodes = [source.node for source in lineage.classes] + [method.node for method in lineage.methods]
    hidden = lineage.has_unread_bases or any(node.decorator_list for node in nodes)
    is_loaded = lineage.classes[0].cls is not None
    if any(method.settings is not None for method in flow.methods) or (hidden and not is_loaded):
        return flow
    if not lineage.is_decorated:
        raise LookupError(
            f"{target} has no @RayHelper.worker and no method with @RayHelper.function (read: {names}): all of it runs "
            "on the driver. Decorate it, or check another class."
        )
    if lineage.has_unread_bases:
        return flow
    raise LookupError(
        f"{target} has no method with @RayHelper.function (read: {names}). So all of it runs on the driver, and its "
        "workers are idle. Decorate the methods that belong to a role, or check another class."
    )


def _module(name: str) -> ModuleSource:
    """The source of a module, which is not executed; packages around it are."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise LookupError(f"module {name} cannot be found: {error}") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise LookupError(f"module {name} cannot be found, or has no Python source")
    return ModuleSource.read(spec.origin)


def _undefined(
    module: ModuleSource, qualname: str, error: DecorationError, groups: DeviceGroups | None
) -> list[Finding]:
    """The findings about a class whose module cannot be imported, one of them at the line of the error."""
    frames = traceback.extract_tb(error.__traceback__)
    library = Path(__file__).parents[1]
    own = [frame for frame in frames if library not in Path(frame.filename).parents and frame.lineno]
    outside = [frame for frame in own if not frame.filename.startswith("<frozen")]
    last = outside[-1] if outside else None
    file, line = (last.filename, last.lineno or 1) if last else (module.path, 1)
    try:
        found = _apply(_flow(lineage_of_source(module, qualname), Sources(), groups))
    except LookupError:  # the class is defined elsewhere
        found = []
    known = {"first-divides", "unknown-setting", "role-not-declared", "own-of-several-roles"}
    if any(finding.file == file and finding.rule in known for finding in found):
        return found
    return sorted([*found, Finding(file, line, "cannot-decorate", f"the class cannot be defined: {error}")])


def _groups(device_groups: str | None, config: str | None) -> DeviceGroups | None:
    if device_groups is not None and config is not None:
        raise ConfigError("--device_groups and --config both set where roles run. Give one of them.")
    if device_groups is not None:
        return DeviceGroups.parse(device_groups)
    if config is None:
        return None
    values = parse_file(config)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{config} must hold a mapping, got {type(values).__name__}")
    if "device_groups" in values:
        return DeviceGroups.parse(values)
    sections = {
        name: value
        for name, value in values.items()
        if name in TOP_KEYS or (isinstance(value, Mapping) and any(key in value for key in PLACING_KEYS))
    }
    return DeviceGroups.parse(sections) if sections else None
