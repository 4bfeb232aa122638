"""State that is changed in one kind of process and read in another: attributes, module variables, the environment.

Each is a list of touches (where, read or write, in which site), and the question is always the same: does a site read
what only another site has written? What a constructor or the module sets exists everywhere, and stays as it was.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayhelper.check.absences import asks_who_it_is, is_handed_on, is_none, is_tested, names_worker, none_tests
from rayhelper.check.flow import EVERYWHERE, Flow, Site
from rayhelper.check.reaches import Reach
from rayhelper.check.reading.held import Instance
from rayhelper.check.reading.module import Access, Finding, Function, ModuleSource, access_of, own_nodes
from rayhelper.check.reading.source import Method
from rayhelper.device_groups import DRIVER

CONTAINERS = ("list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict")
MUTATORS = (
    "append appendleft extend extendleft insert remove pop popleft popitem clear sort reverse add discard update "
    "setdefault"
).split()


@dataclass(frozen=True)
class Touch:
    """One read or write of something that has a name in every process."""

    path: tuple[str, ...]
    site: Site | None  # None: nobody knows where
    method: Method
    node: ast.AST
    is_write: bool
    is_guarded: bool = False  # a read by code that knows that the value may be missing


def attribute_findings(flow: Flow) -> Iterator[Finding]:
    """Rules state-across-roles, state-from-worker, state-from-driver and state-on-first-worker."""
    touches: dict[Instance, list[Touch]] = {instance: [] for instance in flow.objects.instances}
    values = {instance: _values(flow, instance) for instance in touches}
    for method in flow.methods:
        tests = none_tests(flow, method)
        for reach in flow.reaches[method]:
            if reach.instance.lineage.find(reach.access.path[0]) is None:
                known = values[reach.instance].get(reach.access.path[0], [])
                touches[reach.instance] += _attribute_touches(flow, method, reach, known, tests)
    for instance, found in touches.items():
        baseline: set[tuple[str, ...]] = {(name,) for source in instance.lineage.classes for name in source.attributes}
        baseline |= {touch.path for touch in found if touch.is_write and touch.site == EVERYWHERE}
        yield from _compare(flow, _known(flow, instance, found), baseline, flow.prefix(instance))


def _attribute_touches(flow: Flow, method: Method, reach: Reach, known: list[ast.expr], tests: set[str]) -> list[Touch]:
    """``known``: the values that the attribute is given by constructors. ``tests``: see ``none_tests``."""
    access = reach.access
    path, is_write = _written(access, any(map(_is_container, known)))
    if not reach.is_sure:
        return [Touch(path, None, method, access.node, is_write=True)] if is_write else []
    asked = f"hasattr {path[0]}" in tests or asks_who_it_is(method, access.node)
    may_miss = access.has_default or any(map(is_none, known))
    is_guarded = asked or (may_miss and (is_tested(flow, method, reach, tests) or is_handed_on(flow, method, reach)))
    return _everywhere(flow, method, path, access.node, is_write, is_guarded and not is_write)


def variable_findings(flow: Flow) -> Iterator[Finding]:
    """Rule global-state: module variables changed in one process and read in another."""
    touches: dict[ModuleSource, list[Touch]] = {}
    for method in flow.methods:
        for function in flow.functions(method):
            for access in _variables(method, function):
                value = method.module.variables[access.path[0]]
                path, is_write = _written(access, _is_container(value))
                found = touches.setdefault(method.module, [])
                found += _everywhere(flow, method, path, access.node, is_write)
    for module, found in touches.items():
        yield from _compare(
            flow, found, {(name,) for name in module.variables}, "the module's variable ", "global-state"
        )


def environment_findings(flow: Flow) -> Iterator[Finding]:
    """Rule environment-state: variables of the environment set in one process and read in another."""
    touches: list[Touch] = []
    for method in flow.methods:
        for function in flow.functions(method):
            for name, node, is_write in environment_touches(method, function):
                touches += _everywhere(flow, method, (name,), node, is_write)
    baseline = {touch.path for touch in touches if touch.is_write and touch.site == EVERYWHERE}
    yield from _compare(flow, touches, baseline, "the environment's ", "environment-state")


def environment_touches(method: Method, function: Function) -> Iterator[tuple[str, ast.AST, bool]]:
    """(name, node, whether it is written) of every variable of the environment that a function names."""
    module = method.module
    for node in own_nodes(function, closures=True):
        if isinstance(node, ast.Subscript) and module.dotted(node.value) == "os.environ":
            name, is_write = node.slice, not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Call) and node.args:
            called = module.dotted(node.func)
            if called not in ("os.environ.get", "os.getenv", "os.environ.setdefault", "os.putenv", "os.environ.pop"):
                continue
            name, is_write = node.args[0], called not in ("os.environ.get", "os.getenv")
        else:
            continue
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value, node, is_write


def affects(written: tuple[str, ...], read: tuple[str, ...]) -> bool:
    """Whether a write of one path changes what a read of the other gives."""
    for one, other in zip(written, read, strict=False):
        if one != other and not (one[0] == other[0] == "[" and "[*]" in (one, other)):
            return False
    return all(part[0] == "[" for part in written[len(read) :])


def _known(flow: Flow, instance: Instance, touches: list[Touch]) -> list[Touch]:
    """The touches without the reads of what their own process may have set under a name that is not in the source.

    An attribute that the process also sets plainly is taken to be set there alone.
    """
    unknown = {
        (flow.host(site.role), path)
        for method, site in flow.reached()
        for owner, path in flow.writes_by_name[method]
        if owner is instance
    }
    known = []
    for touch in touches:
        host = flow.host(touch.site.role) if touch.site else ""
        may_be_set = any(where == host and touch.path[: len(path)] == path for where, path in unknown)
        if touch.is_write or not may_be_set or _sets_plainly(flow, touches, host, touch.path):
            known.append(touch)
    return known


def _sets_plainly(flow: Flow, touches: list[Touch], host: str, path: tuple[str, ...]) -> bool:
    writes = [touch for touch in touches if touch.is_write and touch.site and flow.host(touch.site.role) == host]
    return any(affects(write.path, path) for write in writes)


def _has_default(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 2


def _is_container(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] in CONTAINERS
    return isinstance(node, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def _values(flow: Flow, instance: Instance) -> dict[str, list[ast.expr]]:
    """What is assigned to each attribute by the class itself and by constructors."""
    found: dict[str, list[ast.expr]] = {}
    for source in instance.lineage.classes:
        for name, value in source.attributes.items():
            found.setdefault(name, []).append(value)
    for method in flow.methods:
        for reach in flow.reaches[method] if EVERYWHERE in flow.sites[method] else []:
            access = reach.access
            parent = method.module.parents[access.node]
            if reach.instance is not instance or not access.is_write or len(access.path) > 1:
                continue
            if access.by is not None:
                found.setdefault(access.path[0], []).extend(access.by.args[2:])
            elif isinstance(parent, (ast.Assign, ast.AnnAssign)):
                found.setdefault(access.path[0], []).extend([parent.value] if parent.value else [])
    return found


def _written(access: Access, is_container: bool) -> tuple[tuple[str, ...], bool]:
    """The path, and whether it is written: by an assignment, or by a method that changes a container."""
    if is_container and len(access.path) == 1 and access.called in MUTATORS:
        return (*access.path, "[*]"), True
    return access.path, access.is_write


def _everywhere(
    flow: Flow, method: Method, path: tuple[str, ...], node: ast.AST, is_write: bool, is_guarded: bool = False
) -> list[Touch]:
    return [Touch(path, site, method, node, is_write, is_guarded) for site in flow.sites[method] or [None]]


def _variables(method: Method, function: Function) -> Iterator[Access]:
    """The module's variables in a function."""
    nodes = list(own_nodes(function, closures=True))
    shared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in method.module.variables and node.id not in bound - shared:
            yield access_of(node, node.id, method.module)


def _compare(
    flow: Flow, touches: list[Touch], baseline: set[tuple[str, ...]], prefix: str, rule: str | None = None
) -> Iterator[Finding]:
    told = set()
    for read in touches:
        if read.is_write or read.is_guarded or read.site is None:
            continue
        writes = [touch for touch in touches if touch.is_write and affects(touch.path, read.path)]
        exists = any(affects(path, read.path) for path in baseline)
        if any(write.site is None for write in writes) or (read.site == EVERYWHERE and exists):
            continue
        writes = [write for write in writes if write.site != EVERYWHERE]
        write = _missing(flow, writes, read.site)
        near = write is not None and write.site is not None and flow.together(write.site.role, read.site.role)
        if near and any(map(names_worker, read.method.functions)):
            continue  # it may well know that worker 0 alone has the value
        key = (read.method, read.path[0])
        if write is not None and key not in told:
            told.add(key)
            yield _finding(flow, read, write, exists, prefix, rule)


def _missing(flow: Flow, writes: list[Touch], site: Site) -> Touch | None:
    """A write that the site does not see, if it sees none."""
    near = [write for write in writes if write.site and flow.together(write.site.role, site.role)]
    for write in near:
        assert write.site is not None, "told apart by the caller"
        if site.first or not write.site.first or flow.is_single(site.role):
            return None
    return next(iter(near or writes), None)


def _finding(flow: Flow, read: Touch, write: Touch, exists: bool, prefix: str, rule: str | None) -> Finding:
    assert read.site is not None, "compared above"
    assert write.site is not None, "compared above"
    near = flow.together(read.site.role, write.site.role)
    remedy = "Pass it as an argument of a decorated call, or set it in undecorated code of __init__."
    if near:
        known, remedy = "state-on-first-worker", "Let every worker set it: execute='all'."
    elif write.site.role == DRIVER:
        known = "state-from-driver"
    elif read.site.is_worker:
        known = "state-across-roles"
    else:
        known, remedy = "state-from-worker", "Return it from a decorated method."
    both = read.site.is_worker and write.site.is_worker and not near
    where = "worker 0 alone" if near else flow.describe(write.method, write.site)
    gives = "the value from before" if exists else "its default" if _has_default(read.node) else "nothing"
    other = Path(write.method.module.path).name
    file = "" if write.method.module.path == read.method.module.path else f" of {other}"
    name = prefix + "".join(read.path).replace("[*]", "[...]")
    return read.method.finding(
        read.node,
        rule or known,
        f"{name} is read on {flow.describe(read.method, read.site)}, and set on {where} in line "
        f"{getattr(write.node, 'lineno', 0)}{file}. Under Ray these are different processes"
        f"{flow.unless_together() if both else ''}: the read finds {gives}. {remedy}",
    )
