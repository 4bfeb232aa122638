"""Rules about what a method does: to its arguments, with collectives and ranks, and when its module is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rayhelper.check.flow import EVERYWHERE, ON_DRIVER, Flow
from rayhelper.check.reading.module import Finding, Function, ModuleSource, access_of, is_helper_call, own_nodes
from rayhelper.check.reading.source import Method
from rayhelper.check.state import environment_touches
from rayhelper.device_groups import DRIVER

COLLECTIVES = (
    "all_reduce all_gather all_gather_object all_gather_into_tensor all_to_all all_to_all_single barrier broadcast "
    "broadcast_object_list gather gather_object monitored_barrier reduce reduce_scatter reduce_scatter_tensor scatter "
    "scatter_object_list"
).split()
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
LIST_CALLS = ("append", "appendleft", "extend", "extendleft", "insert", "sort", "reverse")
CONTAINER_CALLS = ("remove", "clear", "add", "discard", "update", "setdefault", "pop", "popleft", "popitem")
CONTAINER_TYPES = ("list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict")
ARRAY_TYPES = ("ndarray", "NDArray", "Tensor")
IN_PLACE = (  # of tensors
    "abs_ add_ addcdiv_ addcmul_ bernoulli_ ceil_ clamp_ clamp_max_ clamp_min_ clip_ copy_ cumsum_ div_ exp_ fill_ "
    "floor_ index_add_ index_copy_ index_fill_ lerp_ log_ masked_fill_ masked_scatter_ mul_ neg_ nan_to_num_ normal_ "
    "pow_ random_ reciprocal_ relu_ remainder_ round_ rsqrt_ scatter_ scatter_add_ sigmoid_ sqrt_ sub_ tanh_ tril_ "
    "triu_ uniform_ zero_"
).split()
LOOPS = (ast.For, ast.AsyncFor, ast.While)


def mutated_arguments(flow: Flow) -> Iterator[Finding]:
    """Rule argument-mutated: a change of an argument that nothing on the worker sees, or that is refused there."""
    for method in flow.sites:
        if method.settings is None or method.settings.role == DRIVER or not flow.serves_driver(method):
            continue
        for argument in method.parameters:
            if argument in (method.node.args.vararg, method.node.args.kwarg):
                continue  # the worker's own tuple and dict
            for node, is_refused in _mutations(method, argument):
                consequence = (
                    "other workers read the same memory, and writing to a received array or tensor raises an error. "
                    "Copy it first."
                    if is_refused
                    else "the worker has a copy, so the change is lost with the call. With Ray off it is kept. Return "
                    "the new value instead."
                )
                yield method.finding(
                    node,
                    "argument-mutated",
                    f"{flow.title(method)} changes its argument {argument.arg!r}: {consequence}",
                )


def collectives(flow: Flow) -> Iterator[Finding]:
    """Rules collective-on-first and collective-on-driver."""
    for method, site in flow.reached():
        for function in flow.functions(method):
            for node, name in _collectives(method, function):
                if site.first and not flow.is_single(site.role):
                    yield method.finding(
                        node,
                        "collective-on-first",
                        f"{name} is called only by worker 0, on {flow.describe(method, site)}, and waits for the "
                        "others until it times out. Decorate the method with execute='all'.",
                    )
                elif site in (ON_DRIVER, EVERYWHERE) and not name.endswith("init_process_group"):
                    yield method.finding(
                        node,
                        "collective-on-driver",
                        f"{name} is called on {flow.describe(method, site)}, but the driver is in no process group: "
                        "the call fails or hangs. Call it in a decorated method.",
                    )


def ranks_on_driver(flow: Flow) -> Iterator[Finding]:
    """Rule rank-on-driver: a worker's environment read where there is none."""
    for method in flow.sites:
        for function in flow.functions(method) if ON_DRIVER in flow.sites[method] else []:
            for name, node, is_write in environment_touches(method, function):
                if name in RANK_NAMES and not is_write:
                    yield method.finding(
                        node,
                        "rank-on-driver",
                        f"{name} is read on {flow.describe(method, ON_DRIVER)}, where it is not set, because only "
                        "workers have ranks. Ask RayHelper.current() in a decorated method, and return the value "
                        "that you need.",
                    )


def initialized_on_import(module: ModuleSource) -> list[Finding]:
    """Rule initialize-on-import: what starts workers whenever the module is imported, also by the workers."""
    starts = {
        name for name, function in module.functions.items() if any(_starts(module, n) for n in ast.walk(function))
    }
    found, waiting = [], list[ast.AST](module.tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if _starts(module, node) or (isinstance(node, ast.Call) and module.dotted(node.func) in starts):
            found.append(
                Finding(
                    module.path,
                    getattr(node, "lineno", 1),
                    "initialize-on-import",
                    "RayHelper is initialized whenever this module is imported. A worker imports it to find the "
                    "class, and the call raises an error there. Put the call under `if __name__ == '__main__':`.",
                )
            )
    return found


def _starts(module: ModuleSource, node: ast.AST) -> bool:
    return is_helper_call(module, node, "initialize") or is_helper_call(module, node, "session")


def _collectives(method: Method, function: Function) -> Iterator[tuple[ast.Call, str]]:
    """The collectives over all workers in a function that does not ask whether there is a process group."""
    calls = [node for node in own_nodes(function, closures=True) if isinstance(node, ast.Call)]
    names = [method.module.dotted(node.func) for node in calls]
    if any(name.endswith((".is_initialized", ".is_available")) for name in names):
        return
    for node, name in zip(calls, names, strict=True):
        package, _, last = name.rpartition(".")
        joins = is_helper_call(method.module, node, "init_process_group") or name == f"{package}.init_process_group"
        is_collective = (package == "torch.distributed" and last in COLLECTIVES) or (joins and package)
        if is_collective and not any(word.arg == "group" for word in node.keywords):
            yield node, name


def _mutations(method: Method, argument: ast.arg) -> Iterator[tuple[ast.AST, bool]]:
    """The statements that change an argument to no use on the worker, and whether an array refuses them."""
    kind = _type_name(argument.annotation)
    changes: list[tuple[ast.AST, bool]] = []
    uses: list[ast.Name] = []
    for node in own_nodes(method.node, closures=True):
        if isinstance(node, ast.arg) and node.arg == argument.arg:
            return  # a nested function has one of the same name
        if not isinstance(node, ast.Name) or node.id != argument.arg:
            continue
        statement = method.module.parents[node]
        if isinstance(statement, ast.AugAssign) and statement.target is node:
            if not (kind in (*CONTAINER_TYPES, *ARRAY_TYPES) or isinstance(statement.value, (ast.List, ast.ListComp))):
                return  # rebound
            changes.append((statement, kind in ARRAY_TYPES))
        elif not isinstance(node.ctx, ast.Load):
            return  # rebound: no longer the argument
        elif _changes(method, node, kind):
            access = access_of(node, node.id, method.module)
            is_item = isinstance(statement, ast.Subscript) and len(access.path) == 2
            changes.append((node, access.called in IN_PLACE or (kind in ARRAY_TYPES and is_item)))
        else:
            uses.append(node)
    for node, is_refused in changes:
        if is_refused or not _is_used_after(method, node, uses):
            yield node, is_refused


def _changes(method: Method, node: ast.Name, kind: str) -> bool:
    access = access_of(node, node.id, method.module)
    if access.call is None:
        return access.is_write
    is_statement = isinstance(method.module.parents[access.call], ast.Expr)
    if len(access.path) > 1 or not access.called:
        return False
    if access.called in LIST_CALLS:
        return is_statement
    if access.called in CONTAINER_CALLS:
        return kind in CONTAINER_TYPES
    return access.called in IN_PLACE


def _is_used_after(method: Method, node: ast.AST, uses: list[ast.Name]) -> bool:
    """Whether the worker itself goes on to look at what it has changed."""
    around = list(method.module.up(node))
    around = around[: around.index(method.node)]
    statement = next((outer for outer in (node, *around) if isinstance(outer, ast.stmt)), node)
    loops = [outer for outer in around if isinstance(outer, LOOPS)]
    end = getattr(loops[-1] if loops else statement, "end_lineno", 0)
    for use in uses:
        outer = list(method.module.up(use))
        if statement in outer:
            continue
        in_body = any(loop in outer and not _in_header(loop, use, outer) for loop in loops)
        if use.lineno > end or in_body:
            return True
    return False


def _in_header(loop: ast.AST, use: ast.Name, outer: list[ast.AST]) -> bool:
    header = loop.iter if isinstance(loop, (ast.For, ast.AsyncFor)) else getattr(loop, "test", None)
    return header is use or header in outer


def _type_name(annotation: ast.expr | None) -> str:
    """``list`` of ``list[int]``, ``ndarray`` of ``np.ndarray``; '' where nothing is said."""
    if isinstance(annotation, ast.Subscript):
        annotation = annotation.value
    return ast.unparse(annotation).rpartition(".")[2] if annotation is not None else ""
