"""Where each method of a class runs: on the driver, on the workers of a role, or wherever the class is constructed.

Undecorated methods belong to whoever calls them. One that no method of the class mentions is called from outside, on
the driver. What bases outside the class may call is not known, and such a method has no site at all: the rules say
nothing about it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from rayhelper.check.accesses import is_name
from rayhelper.check.module import Access, Function, access_of, assigned, bindings, own_nodes
from rayhelper.check.source import UNKNOWN, Lineage, Method, Settings
from rayhelper.device_groups import DRIVER, DeviceGroup, DeviceGroups

CONSTRUCTORS = ("__init__", "__post_init__")
HARMLESS = ("super", "getattr", "setattr", "hasattr", "isinstance", "type", "id", "vars")  # may be given self


@dataclass(frozen=True)
class Site:
    """A kind of process: ``role`` is 'driver', a role, or '__init__' for every process that constructs the class."""

    role: str
    first: bool = False  # worker 0 of the role alone

    @property
    def is_worker(self) -> bool:
        return self.role not in (DRIVER, "__init__")


ON_DRIVER = Site(DRIVER)
EVERYWHERE = Site("__init__")


@dataclass(frozen=True)
class RoleCall:
    """A call of a decorated method; ``how``: call, defer or stream. ``node`` is an attribute for a property."""

    caller: Method
    node: ast.expr
    target: Method
    settings: Settings
    how: str

    @property
    def arguments(self) -> list[ast.expr]:
        return (
            [*self.node.args, *(word.value for word in self.node.keywords)] if isinstance(self.node, ast.Call) else []
        )


class Flow:
    """The sites of every method, and its calls of decorated ones."""

    def __init__(self, lineage: Lineage, groups: DeviceGroups | None) -> None:
        self.lineage = lineage
        self.groups = groups
        self.sites: dict[Method, dict[Site, Method | None]] = {}  # with the method that leads there
        self.calls: dict[Method, list[RoleCall]] = {}
        self.edges: dict[Method, list[Method]] = {}
        for method in lineage.methods:
            self.calls[method] = []
            self.edges[method] = list(dict.fromkeys(self._mentioned(method)))
            self.sites[method] = {}
        self._spread()

    def reached(self) -> Iterator[tuple[Method, Site]]:
        """Every method with each site where it runs."""
        for method, sites in self.sites.items():
            for site in sites:
                yield method, site

    def group(self, role: str) -> DeviceGroup | None:
        """The group that hosts the role, if it is known."""
        return next((group for group in self.groups.groups if role in group.roles), None) if self.groups else None

    def host(self, role: str) -> str:
        """Equal for roles that are known to share processes."""
        group = self.group(role)
        return f"group {group.name}" if group else role

    def together(self, one: str, other: str) -> bool:
        """Whether two roles are known to share processes."""
        return self.host(one) == self.host(other)

    def is_single(self, role: str) -> bool:
        """Whether the role is known to have one worker."""
        group = self.group(role)
        return group is not None and group.num_workers == 1

    def describe(self, method: Method, site: Site) -> str:
        """``role 'train' (helper, reached from update)``."""
        names, seen, step = [], {method}, self.sites[method].get(site)
        while step is not None and step not in seen:
            seen.add(step)
            names.append(step.name)
            step = self.sites[step].get(site)
        who = {DRIVER: "the driver", "__init__": "every process"}.get(site.role, f"the workers of role {site.role!r}")
        return f"{who} ({method.name}{', reached from ' + names[-1] if names else ''})"

    def serves_driver(self, method: Method) -> bool:
        """Whether the driver calls a decorated method; one that nothing here calls is called from outside."""
        callers = [caller for caller, calls in self.calls.items() for call in calls if call.target is method]
        return not callers or any(ON_DRIVER in self.sites[caller] for caller in callers)

    def unless_together(self) -> str:
        """What messages add where colocation would change things."""
        return "" if self.groups else ", unless one device group hosts both"

    def functions(self, method: Method) -> list[Function]:
        """The method and the functions of its module that it calls, directly or through each other."""
        found: list[Function] = [method.node]
        for function in found:
            for node in own_nodes(function, closures=True):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    called = method.module.functions.get(node.func.id)
                    if called is not None and called not in found:
                        found.append(called)
        return found

    def _mentioned(self, method: Method) -> Iterator[Method]:
        """The methods that a method calls or hands on; calls of decorated ones are noted."""
        for access in method.accesses:
            found = self.lineage.find(access.path[0])
            setter = self.lineage.find(f"{access.path[0]}.setter")
            if access.is_write and len(access.path) == 1:
                found = setter
            if found is None or access.is_question:
                continue
            self._note(method, found, access)
            for later in _through_variable(method, access) if found.kind != "property" else ():
                self._note(method, found, later)
            yield found
        for name, node in method.super_calls:
            found = self.lineage.find(name, after=method.owner)
            if found is not None:
                if found.settings:
                    self.calls[method].append(RoleCall(method, node, found, found.settings, "call"))
                yield found

    def _note(self, method: Method, target: Method, access: Access) -> None:
        settings = target.settings
        if settings is None or settings.role == UNKNOWN:
            return
        if access.call is not None and len(access.path) == 1 and access.called in ("", "defer", "stream"):
            self.calls[method].append(RoleCall(method, access.call, target, settings, access.called or "call"))
        elif target.kind == "property":
            self.calls[method].append(RoleCall(method, access.node, target, settings, "call"))

    def _spread(self) -> None:
        outermost = [self.lineage.find(name) for name in dict.fromkeys(method.name for method in self.lineage.methods)]
        plain: list[Method] = []
        for method in outermost:
            assert method is not None, "a name of the lineage"
            if method.settings is None and method.name not in CONSTRUCTORS:
                plain.append(method)
            elif method.settings is None:
                self._reach(method, EVERYWHERE, None)
            elif method.settings.role != UNKNOWN:
                self._reach(method, _own_site(method.settings), None)
        mentioned = {target for method, targets in self.edges.items() for target in targets if target is not method}
        known = {*mentioned, *(method for method in plain if self._may_run_anywhere(method))}
        for method in plain:
            if method not in known:
                self._reach(method, ON_DRIVER, None)

    def _may_run_anywhere(self, method: Method) -> bool:
        """Whether code that is not seen here, on a worker too, may call an undecorated method."""
        hidden = method.name.startswith("__") or method.name in self.lineage.hooks
        return hidden or (not self.calls[method] and any(map(self._hands_on_self, self.sites)))

    def _hands_on_self(self, method: Method) -> bool:
        """Whether a method that runs on workers gives the object itself to code that may do anything with it."""
        if not any(site.is_worker or site == EVERYWHERE for site in self.sites[method]):
            return False
        for function, names in method.touched.names.items():
            shadow = method.self_name if function is method.node else None
            for node in own_nodes(function, closures=True, shadow=shadow):
                is_given = is_name(node, names) and isinstance(getattr(node, "ctx", None), ast.Load)
                if is_given and not _is_seen(method, node):
                    return True
        return False

    def _reach(self, method: Method, site: Site, via: Method | None) -> None:
        if site in self.sites[method]:
            return
        self.sites[method][site] = via
        for target in self.edges[method]:
            settings = target.settings
            if settings is None:
                self._reach(target, site, method)
            elif settings.role == UNKNOWN:
                continue
            elif site == EVERYWHERE and settings.role != DRIVER:  # while constructing, 'first' runs on all workers
                self._reach(target, Site(settings.role), method)
            elif site.is_worker and self.together(site.role, settings.role):
                self._reach(target, Site(settings.role, site.first), method)
            elif site == ON_DRIVER or (site == EVERYWHERE and settings.role == DRIVER):
                self._reach(target, _own_site(settings), method)

    def while_constructing(self) -> list[Method]:
        """What runs during construction only on the driver: calls to workers are skipped there."""
        everywhere: list[Method] = []
        inside: list[Method] = []
        waiting = [method for method in map(self.lineage.find, CONSTRUCTORS) if method is not None]
        for method in waiting:
            everywhere.append(method)
            for target in self.edges[method]:
                if target.settings is None and target not in waiting:
                    waiting.append(target)
                elif target.settings is not None and target.settings.role == DRIVER and target not in inside:
                    inside.append(target)
        for method in inside:
            for target in self.edges[method]:
                on_driver = target.settings is None or target.settings.role == DRIVER
                if on_driver and target not in inside and target not in everywhere:
                    inside.append(target)
        return inside


def _is_seen(method: Method, node: ast.AST) -> bool:
    """Whether it is known what is done with the object: an attribute, an alias, a helper that is read too."""
    parent = method.module.parents[node]
    if isinstance(parent, ast.Call):
        called = ast.unparse(parent.func)
        return called in HARMLESS or method.module.functions.get(called) in method.functions
    names = {name for name, _ in assigned(parent)}
    is_alias = bool(names) and names <= method.touched.names[method.function_of(node)]
    return isinstance(parent, ast.Attribute) or is_alias


def _through_variable(method: Method, access: Access) -> Iterator[Access]:
    """``f()`` and ``f.defer()``, where ``f`` holds a method of the object and nothing else."""
    if access.call is not None or access.is_write or len(access.path) > 1:
        return
    function = method.function_of(access.node)
    for name, value in assigned(method.module.parents[access.node]):
        if value is access.node and len(bindings(function)[name]) == 1:
            for node in own_nodes(function, closures=True):
                if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                    yield access_of(node, access.path[0], method.module)


def _own_site(settings: Settings) -> Site:
    return Site(settings.role, settings.execute == "first" and settings.role != DRIVER)
