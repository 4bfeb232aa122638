"""Rules about calls of decorated methods: where they are made, what they are given, what is done with their value."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rayhelper.check.absences import asks_it, asks_who_it_is, is_tested, none_tests
from rayhelper.check.flow import EVERYWHERE, ON_DRIVER, Flow, RoleCall, Site
from rayhelper.check.reaches import Reach
from rayhelper.check.reading.module import Finding, bindings, is_helper_call, own_nodes
from rayhelper.check.reading.source import Method
from rayhelper.check.state import affects
from rayhelper.device_groups import DRIVER

BOUND_TO_PROCESS = {  # what cannot be pickled, by the call that makes it
    "threading": "Lock RLock Thread Timer Event Condition Semaphore BoundedSemaphore Barrier",
    "queue": "Queue LifoQueue PriorityQueue SimpleQueue",
    "concurrent.futures": "ThreadPoolExecutor ProcessPoolExecutor",
    "socket": "socket create_connection",
    "sqlite3": "connect",
}
UNPORTABLE = {f"{module}.{name}" for module, names in BOUND_TO_PROCESS.items() for name in names.split()}
ITERATORS = ("map", "zip", "filter", "enumerate", "iter", "reversed")
SCALAR_CALLS = ("len", "int", "float", "str", "bool")


def calls_across_roles(flow: Flow) -> Iterator[Finding]:
    """Rules call-across-roles and call-to-driver: a worker's code calls what its process does not host."""
    for method, site in flow.reached():
        for call in flow.calls[method] if site.is_worker else []:
            role, instance = call.settings.role, flow.instance(call.target)
            is_asked = asks_who_it_is(method, call.node) or asks_it(flow, method, call.node, instance)
            if flow.together(site.role, role) or is_asked:
                continue
            where, name = flow.describe(method, site), flow.title(call.target)
            if role == DRIVER:
                yield method.finding(
                    call.node,
                    "call-to-driver",
                    f"{name} belongs to the driver and is called on {where}: RoleError on Ray. Call it on the driver, "
                    "and pass its value to the workers as an argument.",
                )
            else:
                yield method.finding(
                    call.node,
                    "call-across-roles",
                    f"{name} belongs to role {role!r} and is called on {where}: RoleError under Ray"
                    f"{flow.unless_together()}. Call it on the driver, one role after the other.",
                )


def calls_while_constructing(flow: Flow) -> Iterator[Finding]:
    """Rule skipped-in-construction: a driver's method that a constructor calls, calls workers in turn."""
    for method in flow.while_constructing():
        for call in flow.calls[method]:
            if call.settings.role != DRIVER:
                yield method.finding(
                    call.node,
                    "skipped-in-construction",
                    f"{flow.title(call.target)} belongs to role {call.settings.role!r} and is called during "
                    f"construction, in {flow.title(method)}. This method runs only on the driver, which skips the "
                    "call, so it runs nowhere. Call it in __init__ itself, or after construction.",
                )


def values_in_construction(flow: Flow) -> Iterator[Finding]:
    """Rule init-value-used: the value of a call that is skipped in some of the processes that construct the class."""
    for method in flow.sites:
        for call in flow.calls[method] if EVERYWHERE in flow.sites[method] else []:
            if not _gives_value(call.target):
                continue
            fate, where = _fate(call)
            tests = none_tests(flow, method)
            used = ""
            if fate == "expression" or (fate == "name" and isinstance(where, ast.Name) and where.id not in tests):
                used = "used here"
            elif fate == "attribute":
                used = _read_elsewhere(flow, call, _attribute(where))
            if used:
                absent = "on the workers" if call.settings.role == DRIVER else "on the driver and on other workers"
                yield method.finding(
                    call.node,
                    "init-value-used",
                    f"the value of {flow.title(call.target)} (role {call.settings.role!r}) is {used}. But during "
                    f"construction the call is skipped {absent}, and returns None there. Keep the value in an "
                    "attribute of its own role, or make the call after construction.",
                )


def values_of_none(flow: Flow) -> Iterator[Finding]:
    """Rule none-value-used: the value of a collect='none' call, which is a list on groups and a single value off."""
    for method in flow.sites:
        for call in flow.calls[method] if ON_DRIVER in flow.sites[method] else []:
            settings = call.settings
            if settings.role == DRIVER or settings.execute == "first" or settings.collect != "none":
                continue
            fate, where = _fate(call)
            around = ast.unparse(method.function_of(call.node))
            if fate == "name" and f"isinstance({ast.unparse(where)}," in around:
                continue  # knows both shapes
            if _gives_value(call.target) and fate not in ("discarded", "unknown"):
                yield method.finding(
                    call.node,
                    "none-value-used",
                    f"{flow.title(call.target)} is collected by 'none'. On Ray its value is a list with one entry per "
                    "worker. With Ray off it is the method's own value. Use execute='first', collect='flatten' or a "
                    "callable that returns the type of the method.",
                )


def arguments(flow: Flow) -> Iterator[Finding]:
    """Rules argument-cannot-travel, argument-cannot-be-sliced and nothing-to-slice (of a call)."""
    for method in flow.sites:
        for call in flow.calls[method] if ON_DRIVER in flow.sites[method] else []:
            settings = call.settings
            if settings.role == DRIVER or not isinstance(call.node, ast.Call):
                continue
            divided = settings.dispatch in ("slice", "balanced")
            for argument in call.arguments:
                why = unportable(flow, method, argument)
                if why:
                    yield method.finding(
                        argument,
                        "argument-cannot-travel",
                        f"{why} is an argument of {flow.title(call.target)}, which runs on role {settings.role!r}: it "
                        "belongs to this process and cannot be sent. Pass plain data (a list for a generator), or make "
                        "it where it is used.",
                    )
                elif divided and _unsliceable(method, argument):
                    yield method.finding(
                        argument,
                        "argument-cannot-be-sliced",
                        f"{_unsliceable(method, argument)} is an argument of {flow.title(call.target)}, whose dispatch "
                        "cuts its arguments: DispatchError under Ray. Pass a list, or RayHelper.whole(value).",
                    )
            if divided and all(_is_scalar(argument) for argument in call.arguments):
                yield method.finding(
                    call.node,
                    "nothing-to-slice",
                    f"{flow.title(call.target)} cuts its arguments over the workers, and this call has nothing to cut: "
                    "DispatchError under Ray. Pass the items, or decorate it with dispatch='all'.",
                )


def returned_values(flow: Flow) -> Iterator[Finding]:
    """Rule return-cannot-travel: a worker's method returns what cannot leave its process."""
    for method in flow.sites:
        if method.settings is None or method.settings.role == DRIVER or method.is_generator:
            continue
        if not flow.serves_driver(method):
            continue
        for value in method.returns:
            why = unportable(flow, method, value)
            if why:
                yield method.finding(
                    value,
                    "return-cannot-travel",
                    f"{why} is returned from {flow.title(method)}, which runs on role {method.settings.role!r}: it "
                    "cannot be sent to the driver. Return plain data (a list for a generator), or keep it on the "
                    "worker.",
                )


def unportable(flow: Flow, method: Method, node: ast.expr) -> str:
    """What a value is that cannot be pickled; '' for all that can, or that nobody knows."""
    module = method.module
    if isinstance(node, ast.GeneratorExp):
        return "a generator"
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return next(filter(None, (unportable(flow, method, entry) for entry in node.elts)), "")
    if isinstance(node, ast.Call):
        return _unportable_call(flow, method, node)
    if isinstance(node, ast.Lambda):
        names = (inner for inner in ast.walk(node.body) if isinstance(inner, ast.Name))
        held = next((name for name in names if flow.instances_at(method, name)), None)
        return f"a lambda that holds {held.id}" if held is not None else ""
    if isinstance(node, ast.Attribute):
        found = [instance.lineage.find(node.attr) for instance in flow.instances_at(method, node.value)]
        is_bound = any(entry is not None and entry.kind == "method" for entry in found)
        return f"{ast.unparse(node)}, and with it {ast.unparse(node.value)} itself," if is_bound else ""
    if not isinstance(node, ast.Name) or flow.instances_at(method, node):
        return ""
    value = _only_value(method, node)
    parent = module.parents.get(value) if value is not None else None
    inside_itself = parent is not None and parent in [node, *module.up(node)]
    return unportable(flow, method, value) if value is not None and not inside_itself else ""


def _unportable_call(flow: Flow, method: Method, node: ast.Call) -> str:
    module, name = method.module, method.module.dotted(node.func)
    if name in UNPORTABLE:
        return f"a {name}"
    if name == "open":
        modes = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "mode")]
        mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else "r"
        return f"a file opened as {mode!r}" if set(str(mode)) - set("rt") else ""  # what is read as text does travel
    if is_helper_call(module, node, "whole") or name == "functools.partial":
        return next(filter(None, (unportable(flow, method, entry) for entry in node.args)), "")
    called = module.functions.get(name)
    if called is not None:
        is_generator = any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in own_nodes(called))
        return "a generator" if is_generator and isinstance(called, ast.FunctionDef) else ""
    methods = flow.methods_called(method, node)
    is_generator = any(found.is_generator and isinstance(found.node, ast.FunctionDef) for found in methods)
    return "a generator" if is_generator else ""


def _only_value(method: Method, node: ast.Name) -> ast.expr | None:
    """What a local variable holds that is given a value once."""
    values = bindings(method.function_of(node)).get(node.id, [])
    return values[0] if len(values) == 1 else None


def _unsliceable(method: Method, node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        value = _only_value(method, node)
        return _unsliceable(method, value) if value is not None and not isinstance(value, ast.Name) else ""
    if isinstance(node, (ast.Set, ast.SetComp)):
        return "a set, which has no order,"
    name = method.module.dotted(node.func) if isinstance(node, ast.Call) else ""
    if name in method.module.functions:
        return ""
    if name in ("set", "frozenset"):
        return "a set, which has no order,"
    return "an iterator, which has no length," if name in ITERATORS else ""


def _is_scalar(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in SCALAR_CALLS
    return isinstance(node, (ast.Constant, ast.JoinedStr))


def _gives_value(target: Method) -> bool:
    return bool(target.returns) or target.is_generator


def _fate(call: RoleCall) -> tuple[str, ast.AST]:
    """What becomes of a call's value: discarded, name, attribute, returned, expression, or unknown; and where."""
    module, node = call.caller.module, call.node
    if call.how == "stream":
        return "unknown", node
    if call.how == "defer":
        fetch = module.parents[node]
        if not (isinstance(fetch, ast.Attribute) and fetch.attr == "result"):
            return "unknown", node
        node = module.parents.get(fetch, fetch)  # type: ignore[assignment]
    if isinstance(call.target.node, ast.AsyncFunctionDef) and not isinstance(module.parents[node], ast.Await):
        return "unknown", node  # a coroutine or asynchronous generator, and whoever awaits it
    for parent in module.up(node):
        if isinstance(parent, ast.Expr):
            return "discarded", parent
        if isinstance(parent, ast.Lambda):
            return "unknown", parent
        if isinstance(parent, ast.Return):
            return "returned", parent
        if isinstance(parent, (ast.Assign, ast.AnnAssign)):
            return _assigned_fate(call, parent)
        if any(access.by is parent and access.is_write and len(access.path) == 1 for access in call.caller.accesses):
            return "attribute", parent
        if isinstance(parent, ast.Compare) and any(
            isinstance(side, ast.Constant) and side.value is None for side in parent.comparators
        ):
            return "unknown", parent
        passes_on = isinstance(parent, (ast.Await, ast.BoolOp)) or (
            isinstance(parent, ast.IfExp) and parent.test is not node
        )
        is_loop = isinstance(parent, ast.ListComp) and isinstance(module.parents[parent], ast.Expr)
        if not passes_on and not is_loop:
            return "expression", parent
        node = parent  # type: ignore[assignment]
    return "unknown", node


def _attribute(node: ast.AST) -> str:
    """The attribute of the object that an assignment's target, or a call of ``setattr``, gives a value."""
    if isinstance(node, ast.Attribute):
        return node.attr
    assert isinstance(node, ast.Call), "what _fate calls an attribute"
    return str(ast.literal_eval(node.args[1]))


def _assigned_fate(call: RoleCall, statement: ast.Assign | ast.AnnAssign) -> tuple[str, ast.AST]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    target = targets[0]
    if len(targets) == 1 and isinstance(target, ast.Attribute):
        return ("attribute" if call.caller.is_self(target.value) else "expression"), target
    if not all(isinstance(entry, ast.Name) for entry in targets):
        return "expression", target
    names = {entry.id for entry in targets if isinstance(entry, ast.Name)}
    loaded = {
        node.id
        for node in own_nodes(call.caller.function_of(statement), closures=True)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return ("name" if names & loaded else "discarded"), target


def _read_elsewhere(flow: Flow, call: RoleCall, name: str) -> str:
    """Where an attribute that holds the call's value is read by processes that skipped the call; '' if nowhere."""
    owner = flow.instance(call.caller)
    reads: list[tuple[Method, Reach, Site]] = []
    set_again = set()
    for method, site in flow.reached():
        tests = none_tests(flow, method)
        for reach in flow.reaches[method]:
            access = reach.access
            if reach.instance is not owner:
                continue
            if access.is_write and affects(access.path, (name,)) and site != EVERYWHERE:
                set_again.add(flow.host(site.role))
            elif access.is_write or access.is_question or access.path[0] != name or not reach.is_sure:
                continue
            elif not is_tested(flow, method, reach, tests):
                reads.append((method, reach, site))
    for method, reach, site in reads:
        if not flow.together(site.role, call.settings.role) and flow.host(site.role) not in set_again:
            where = f"{flow.describe(method, site)}, line {reach.access.node.lineno}"
            return f"put into {flow.prefix(owner)}{name} and read on {where}"
    return ""
