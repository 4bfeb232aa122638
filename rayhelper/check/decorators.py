"""Rules about the decorators themselves: roles, settings, what they stand on and what stands above them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rayhelper.check.calls import SCALAR_CALLS
from rayhelper.check.flow import Flow
from rayhelper.check.reading.module import Finding
from rayhelper.check.reading.source import DIVIDED, UNKNOWN, Lineage, Method
from rayhelper.device_groups import DRIVER

KNOWN = {
    "dispatch": ("all", *DIVIDED),
    "execute": ("all", "first"),
    "collect": ("none", "flatten", "callable"),
}
MODES = ("no_grad", "inference_mode", "enable_grad", "set_grad_enabled", "autocast")
SCALARS = ("int", "float", "str", "bool", "bytes")
MARKERS = ("final", "runtime_checkable")  # decorators that return the class as it is


def roles(flow: Flow) -> Iterator[Finding]:
    """Rules role-not-declared, own-of-several-roles, role-not-hosted and class-without-worker."""
    for instance in flow.objects.instances:
        yield from _undeclared(instance.lineage)
    lineage = flow.root.lineage
    for role in lineage.roles or ():
        if flow.groups is not None and flow.group(role) is None:
            declaring = [entry for entry in lineage.classes if role in (entry.declared or ())]
            source = (declaring or lineage.classes)[0]
            yield source.finding(
                "role-not-hosted",
                f"role {role!r} of {source.name} is in no device group (hosted: {', '.join(flow.groups.roles)}): "
                "ConfigError when the class is constructed. Add it to some group's workers.",
            )
    settings = [(method, method.settings) for method in lineage.methods if method.settings is not None]
    decorated = [method for method, told in settings if not told.is_own and told.role != DRIVER]
    if lineage.roles is None and decorated and not lineage.has_unread_bases and not lineage.is_decorated:
        source = decorated[0].owner
        yield decorated[0].finding(
            source.node,
            "class-without-worker",
            f"{source.name} has decorated methods and no @RayHelper.worker(group=...): a call raises RoleError "
            "under Ray. Decorate the class with the roles of its methods.",
        )


def _undeclared(lineage: Lineage) -> Iterator[Finding]:
    """Rules role-not-declared and own-of-several-roles."""
    declared = lineage.roles
    if declared is None:
        return
    names = ", ".join(declared)
    for method in lineage.methods:
        settings = method.settings
        if settings is None:
            continue
        if settings.is_own and len(declared) > 1 and lineage.find(method.name) is method:
            declaring = next((source for source in lineage.classes if source.worker_decorator), lineage.classes[0])
            inherited = "" if method.owner in lineage.classes[:1] else f", which {lineage.name} inherits,"
            yield declaring.finding(
                "own-of-several-roles",
                f"{method}{inherited} belongs to role 'own', the only role of its class. {lineage.name} declares "
                f"{len(declared)} roles ({names}), so the class cannot be defined. Name the method's role, or give "
                "the class one.",
            )
        elif settings.role not in (*declared, DRIVER, UNKNOWN):
            yield method.finding(
                method.line_of_decorator(),
                "role-not-declared",
                f"{method} belongs to role {settings.role!r}, which the class does not declare (declared: {names}): "
                "the class cannot be defined. Add it to @RayHelper.worker(group=[...]).",
            )


def settings(flow: Flow) -> Iterator[Finding]:
    """Rules first-divides, unknown-setting and nothing-to-slice (of a method)."""
    for method in flow.methods:
        told = method.settings
        if told is None:
            continue
        for key, known in KNOWN.items():
            value = getattr(told, key)
            if value not in (*known, UNKNOWN):
                yield method.finding(
                    method.line_of_decorator(),
                    "unknown-setting",
                    f"{key}={value!r} of {method} is unknown: the class cannot be defined. Write "
                    f"{', '.join(map(repr, known[:2]))}, or a callable.",
                )
        if told.execute == "first" and told.dispatch in DIVIDED:
            yield method.finding(
                method.line_of_decorator(),
                "first-divides",
                f"{method} calls only worker 0, which would get only a part of the data with this dispatch. The class "
                "cannot be defined. Use dispatch='all', or execute='all'.",
            )
        elif told.dispatch in ("slice", "balanced") and _takes_scalars(method) and told.role != DRIVER:
            yield method.finding(
                method.line_of_decorator(),
                "nothing-to-slice",
                f"{method} divides its arguments over the workers, but none of them can be cut. On Ray every call "
                "raises a DispatchError. Give it the items as a parameter, or use dispatch='all'.",
            )


def flattened_scalars(flow: Flow) -> Iterator[Finding]:
    """Rule flatten-of-scalar: collect='flatten' of what cannot be joined."""
    for method in flow.methods:
        told = method.settings
        if told is None or (told.collect, told.execute) != ("flatten", "all") or told.role == DRIVER:
            continue
        if method.is_generator:
            continue  # its items are a list
        nodes: list[ast.expr] = [value for value in method.returns if _is_scalar(value)]
        annotation = method.node.returns
        if not nodes and annotation is not None and ast.unparse(annotation).strip("'\"") in SCALARS:
            nodes = [annotation]
        for node in nodes:
            yield method.finding(
                node,
                "flatten-of-scalar",
                f"{method} returns {ast.unparse(node)!r}, a single value, which collect='flatten' cannot join: "
                "CollectError under Ray. Return a list of one, or pass a callable such as collect=sum.",
            )


def overrides(flow: Flow) -> Iterator[Finding]:
    """Rule override-runs-on-driver: an undecorated method that takes the place of a decorated one."""
    for method in flow.methods:
        base = flow.instance(method).lineage.find(method.name, after=method.owner)
        if method.settings is not None or base is None or base.settings is None or base.settings.role == DRIVER:
            continue
        delegates = any(name == method.name for name, _ in method.super_calls) or flow.calls[method]
        if not delegates:
            yield method.finding(
                method.node,
                "override-runs-on-driver",
                f"{method} overrides {base}, which belongs to role {base.settings.role!r}, and is not decorated "
                "itself: it runs on the driver. Decorate it as the method that it overrides.",
            )


def order(flow: Flow) -> Iterator[Finding]:
    """Rules worker-not-topmost and mode-above-function: decorators above ours are applied in the wrong site."""
    for source in [source for instance in flow.objects.instances for source in instance.lineage.classes]:
        above = _above(source.node.decorator_list, source.worker_decorator)
        for entry in above:
            name = source.module.dotted(entry.func if isinstance(entry, ast.Call) else entry)
            if name.rpartition(".")[2] not in MARKERS:
                yield Finding(
                    source.module.path,
                    entry.lineno,
                    "worker-not-topmost",
                    f"@{ast.unparse(entry)} is above @RayHelper.worker of {source.name}, so workers do not get "
                    "its changes of the class or its __init__. Put @RayHelper.worker on top.",
                )
    for method in flow.methods:
        for entry in _above(method.node.decorator_list, method.decorator):
            name = method.module.dotted(entry.func if isinstance(entry, ast.Call) else entry)
            if name.rpartition(".")[2] in MODES:
                yield method.finding(
                    entry,
                    "mode-above-function",
                    f"@{ast.unparse(entry)} stands above @RayHelper.function of {method}. So it applies on the "
                    "driver, but not on the workers, which run the method itself. Put it below.",
                )


def _above(entries: list[ast.expr], decorator: ast.expr | None) -> list[ast.expr]:
    return entries[: entries.index(decorator)] if decorator in entries else []


def _takes_scalars(method: Method) -> bool:
    """Whether no parameter can hold items, as far as their types say."""
    return all(
        parameter.annotation is not None and ast.unparse(parameter.annotation).strip("'\"") in SCALARS
        for parameter in method.parameters
    )


def _is_scalar(node: ast.expr) -> bool:
    """Whether an expression is a number or text, or holds one where flattening needs a column."""
    if isinstance(node, ast.Constant):
        return node.value is not None
    if isinstance(node, ast.Dict):
        return any(_is_scalar(value) for value in node.values)
    if isinstance(node, ast.Tuple):
        return any(_is_scalar(value) for value in node.elts)
    if isinstance(node, ast.Call):
        called = node.func
        takes_item = isinstance(called, ast.Attribute) and called.attr == "item" and not node.args
        return takes_item or (isinstance(called, ast.Name) and called.id in SCALAR_CALLS)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
