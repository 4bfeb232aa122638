"""Rules about objects that others build and are given: parts, which every process must have alike, and arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rayhelper.check.absences import deciding
from rayhelper.check.flow import ON_DRIVER, Flow
from rayhelper.check.givings import Given, names_given
from rayhelper.check.reading.held import Instance, held_in, is_sure
from rayhelper.check.reading.module import Finding, ModuleSource, is_helper_call
from rayhelper.check.reading.source import Method
from rayhelper.device_groups import DRIVER

RANKS = ("torch.distributed.get_rank", "torch.distributed.get_node_local_rank", "os.getpid", "socket.gethostname")
RANK_NAMES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")


def roles_of_parts(flow: Flow) -> Iterator[Finding]:
    """Rule part-role-not-named: a class builds a part whose role its own decorator does not name."""
    for part in flow.parts:
        whole = part.builder
        assert whole is not None, "a part has a whole"
        named, name = whole.lineage.roles, whole.lineage.name
        missing = [role for role in part.lineage.roles or () if named is not None and role not in named]
        if missing and named is not None:
            yield _finding(
                part,
                "part-role-not-named",
                f"{part.name} is a {part.lineage.name}, of role {', '.join(map(repr, missing))}, which {name} does not "
                f"name (named: {', '.join(named)}): DecorationError when a {name} is constructed. Write "
                f"@RayHelper.worker(group={[*named, *missing]!r}) on {name}.",
            )


def parts_built_alike(flow: Flow) -> Iterator[Finding]:
    """Rule part-not-everywhere: a part that some of the processes which construct the class do not build."""
    for part in flow.parts:
        assert part.frame is not None, "a part is built by code"
        assert part.call is not None
        role = flow.roles_while_constructing.get(part.frame.method)
        if role is not None:
            who = "the driver" if role == DRIVER else f"the workers of role {role!r}"
            why = (
                f"is built in {flow.title(part.frame.method)}, which runs only on {who} while the class is constructed"
            )
        elif _differs(flow, part):
            why = "is built under a condition that is not the same in every process"
        else:
            continue
        yield _finding(
            part,
            "part-not-everywhere",
            f"{part.name} (a {part.lineage.name}) {why}: RoleError. An __init__ runs on the driver and on every "
            "worker, and must build the same parts everywhere. Build it in __init__ itself, without a condition.",
        )


def objects_given(flow: Flow) -> Iterator[Finding]:
    """Rule object-not-hosted: an object is handed to a device group that does not have it."""
    for method in flow.methods if flow.groups is not None else []:
        for call in flow.calls[method] if ON_DRIVER in flow.sites[method] else []:
            group = flow.group(call.settings.role)
            if call.settings.role != DRIVER and group is not None:
                where = f"{flow.title(call.target)}, which runs on group {group.name!r}"
                for argument in call.arguments:
                    yield from _elsewhere(flow, method, argument, {group.name}, where)
    for instance in flow.objects.instances:
        hosts = flow.hosts(instance)
        if instance.frame is None or instance.call is None or instance in flow.parts or hosts is None:
            continue
        if ON_DRIVER in flow.sites[instance.frame.method]:
            where = f"{instance.lineage.name}, which is constructed on groups {', '.join(sorted(hosts))} as well"
            for argument in [*instance.call.args, *(word.value for word in instance.call.keywords)]:
                yield from _elsewhere(flow, instance.frame.method, argument, hosts, where)


def _elsewhere(flow: Flow, method: Method, argument: ast.expr, groups: set[str], where: str) -> Iterator[Finding]:
    value = flow.objects.value(method, argument)
    for given in held_in(value) if is_sure(value) else []:
        hosts = flow.hosts(given)
        if hosts is not None and not groups <= hosts:
            yield method.finding(
                argument,
                "object-not-hosted",
                f"{given.name} is an argument of {where}, but it lives on the driver and on groups "
                f"{', '.join(sorted(hosts))}: RoleError. Pass its result, or let one device group host both.",
            )


def _finding(part: Instance, rule: str, message: str) -> Finding:
    assert part.frame is not None, "a part is built by code"
    assert part.call is not None
    return Finding(part.frame.names.module.path, part.call.lineno, rule, message)


def _differs(flow: Flow, part: Instance) -> bool:
    """Whether a part is built on some processes only: where a condition or a loop asks who the process is."""
    assert part.frame is not None, "a part is built by code"
    frame = part.frame
    ways = [(frame.names.module, part.call), *((frame.method.module, call) for call in frame.calls)]
    if any(_is_conditional(module, call) for module, call in ways if call is not None):
        return True
    reached = [
        (method.module, reach.access.node)
        for method in flow.constructing
        for reach in flow.reaches[method]
        if reach.instance.lineage.find(reach.access.path[0]) is frame.method
    ]
    return bool(reached) and all(_is_conditional(module, node) for module, node in reached)


def _is_conditional(module: ModuleSource, node: ast.AST) -> bool:
    functions = (outer for outer in module.up(node) if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)))
    names = names_given(next(functions))
    return any(_asks_who(module, names, test) for test in deciding(module, node))


def _asks_who(module: ModuleSource, names: dict[str, list[Given]], test: ast.expr) -> bool:
    """Whether an expression depends on which process runs it, through names that hold it too."""
    seen: set[str] = set()
    waiting: list[ast.AST] = [test]
    for node in waiting:
        if _is_rank(module, node):
            return True
        if isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            waiting += [given.expression for given in names.get(node.id, []) if given.expression is not None]
        waiting += ast.iter_child_nodes(node)
    return False


def _is_rank(module: ModuleSource, node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = module.dotted(node.func)
        asked = [value.value for value in node.args[:1] if isinstance(value, ast.Constant)]
        is_rank = name in RANKS or (name in ("os.environ.get", "os.getenv") and asked and asked[0] in RANK_NAMES)
        return bool(is_rank) or is_helper_call(module, node, "current")
    if isinstance(node, ast.Subscript) and module.dotted(node.value) == "os.environ":
        return isinstance(node.slice, ast.Constant) and node.slice.value in RANK_NAMES
    return False
