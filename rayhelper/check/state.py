"""State that is changed in one kind of process and read in another: attributes, module variables, the environment.

Each is a list of touches (where, read or write, in which site), and the question is always the same: does a site read
what only another site has written? What a constructor or the module sets exists everywhere, and stays as it was.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from rayhelper.check.flow import EVERYWHERE, Flow, Site
from rayhelper.check.module import Access, Finding, Function, access_of, assigned, own_nodes
from rayhelper.check.source import Method
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
    values = _values(flow)
    containers = {name for name, known in values.items() if any(_is_container(value) for value in known)}
    optional = {name for name, known in values.items() if any(_is_none(value) for value in known)}
    baseline: set[tuple[str, ...]] = {(name,) for source in flow.lineage.classes for name in source.attributes}
    touches: list[Touch] = []
    for method in flow.lineage.methods:
        tests = none_tests(method)
        for access in method.accesses:
            if flow.lineage.find(access.path[0]) is None:
                path, is_write = _written(access, access.path[0] in containers)
                asked = f"hasattr {path[0]}" in tests or asks_who_it_is(method, access.node)
                may_miss = path[0] in optional or access.has_default
                asked = asked or (may_miss and is_tested(method, access, tests))
                touches += _everywhere(flow, method, path, access.node, is_write, asked and not is_write)
    baseline |= {touch.path for touch in touches if touch.is_write and touch.site == EVERYWHERE}
    yield from _compare(flow, _known(flow, touches), baseline, "self.")


def variable_findings(flow: Flow) -> Iterator[Finding]:
    """Rule global-state: module variables changed in one process and read in another."""
    touches: list[Touch] = []
    for method in flow.lineage.methods:
        for function in flow.functions(method):
            for access in _variables(method, function):
                value = method.module.variables[access.path[0]]
                path, is_write = _written(access, _is_container(value))
                touches += _everywhere(flow, method, path, access.node, is_write)
    baseline: set[tuple[str, ...]] = {(name,) for source in flow.lineage.classes for name in source.module.variables}
    yield from _compare(flow, touches, baseline, "the module's variable ", "global-state")


def environment_findings(flow: Flow) -> Iterator[Finding]:
    """Rule environment-state: variables of the environment set in one process and read in another."""
    touches: list[Touch] = []
    for method in flow.lineage.methods:
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


def asks_who_it_is(method: Method, node: ast.AST) -> bool:
    """Whether code stands under a condition on ``RayHelper.current()`` or on a rank."""
    conditions = (outer.test for outer in method.module.up(node) if isinstance(outer, (ast.If, ast.IfExp)))
    return any(_names_worker(condition) for condition in conditions)


def is_tested(method: Method, access: Access, tests: set[str]) -> bool:
    """Whether the method asks if an attribute is None, under its own name or that of the variable it is put into."""
    parent = method.module.parents[access.node]
    names = {name for name, value in assigned(parent) if value is access.node}
    return f"{method.self_name}.{access.path[0]}" in tests or bool(names & tests)


def none_tests(method: Method) -> set[str]:
    """What a method compares with None or takes as a condition, and ``hasattr x`` for the attributes it asks about.

    Not in ``assert``, which says that the value is there.
    """
    found: set[str] = set()
    for node in (node for function in method.functions for node in own_nodes(function, closures=True)):
        if any(isinstance(outer, ast.Assert) for outer in method.module.up(node)):
            continue
        for expression in _conditions(node):
            found.update(f"hasattr {name}" for name in _defaulted(method, expression))
            if isinstance(expression, ast.NamedExpr):
                found.add(expression.target.id)
                expression = expression.value
            found.add(ast.unparse(expression))
            if isinstance(expression, ast.Attribute) and method.is_self(expression.value):
                found.add(f"{method.self_name}.{expression.attr}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            found.update(f"hasattr {name.value!s}" for name in node.args[1:] if isinstance(name, ast.Constant))
    return found


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Compare) and any(_is_none(side) for side in (node.left, *node.comparators)):
        return [node.left, *node.comparators]
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []


def _names_worker(node: ast.AST) -> bool:
    text = ast.unparse(node)
    return "current()" in text or "rank" in text.lower()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _defaulted(method: Method, condition: ast.expr) -> list[str]:
    """The attributes that a condition asks for by ``getattr`` with a default."""
    inside = set(ast.walk(condition))
    return [access.path[0] for access in method.accesses if access.has_default and access.by in inside]


def _known(flow: Flow, touches: list[Touch]) -> list[Touch]:
    """The touches without the reads of what their own process may have set under a name that is not in the source.

    An attribute that the process also sets plainly is taken to be set there alone.
    """
    unknown = {(flow.host(site.role), path) for method, site in flow.reached() for path in method.touched.unknown}
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


def _values(flow: Flow) -> dict[str, list[ast.expr]]:
    """What is assigned to each attribute by the class itself and its constructors."""
    found: dict[str, list[ast.expr]] = {}
    for source in flow.lineage.classes:
        for name, value in source.attributes.items():
            found.setdefault(name, []).append(value)
    for method in flow.lineage.methods:
        for access in method.accesses if EVERYWHERE in flow.sites[method] else []:
            parent = method.module.parents[access.node]
            if not access.is_write or len(access.path) > 1:
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
        if near and any(map(_names_worker, read.method.functions)):
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
    name = prefix + "".join(read.path).replace("[*]", "[...]")
    return read.method.finding(
        read.node,
        rule or known,
        f"{name} is read on {flow.describe(read.method, read.site)}, and set on {where} in line "
        f"{getattr(write.node, 'lineno', 0)}. Under Ray these are different processes"
        f"{flow.unless_together() if both else ''}: the read finds {gives}. {remedy}",
    )
