"""Where each method runs, of a class and its parts: on the driver, on the workers of a role, or wherever it is built.

Undecorated methods belong to whoever calls them. One of the class itself that no method mentions is called from
outside, on the driver. A method has no site at all, and the rules say nothing about it, if bases outside the class may
call it, if nothing here calls it and it is a part's, or if it is not known of which object it is called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from rayhelper.check.givings import givings
from rayhelper.check.reaches import reaches, writes_by_name
from rayhelper.check.reading.expressions import WAYS
from rayhelper.check.reading.held import Frame, Instance, instances
from rayhelper.check.reading.module import Access, Function, access_of, assigned, bindings, own_nodes
from rayhelper.check.reading.objects import Objects
from rayhelper.check.reading.source import UNKNOWN, Method, Settings
from rayhelper.device_groups import DRIVER, DeviceGroup, DeviceGroups

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
    """The sites of every method, of the class that is checked and of its parts, and its calls of decorated ones."""

    def __init__(self, objects: Objects, groups: DeviceGroups | None) -> None:
        self.objects = objects
        self.root = objects.root
        self.groups = groups
        self.methods = [method for instance in objects.instances for method in instance.lineage.methods]
        self.reaches = {method: list(reaches(objects, method)) for method in self.methods}
        self.writes_by_name = {method: list(writes_by_name(objects, method)) for method in self.methods}
        self.sites: dict[Method, dict[Site, Method | None]] = {}  # with the method that leads there
        self.calls: dict[Method, list[RoleCall]] = {}
        self.edges: dict[Method, list[Method]] = {}
        self._called: dict[Method, list[Method]] = {}  # of ``edges`` those that are calls, as far as it is seen
        self._doubted: set[Method] = set()  # that may be called of this object, or of another
        for method in self.methods:
            self.calls[method] = []
            self._called[method] = []
            self.edges[method] = list(dict.fromkeys(self._mentioned(method)))
            self.sites[method] = {}
        self._spread()
        self.constructing = self._find_constructing()
        self.roles_while_constructing = self._find_roles_while_constructing()
        self.parts = [instance for instance in objects.instances if self._is_part(instance)]
        objects.name(self.parts)

    def instance(self, method: Method) -> Instance:
        """The object that a method is of."""
        return self.objects.owner[method]

    def instances_at(self, method: Method, node: ast.AST) -> list[Instance]:
        """The objects that an expression of a method may be."""
        return instances(self.objects.value(method, node))

    def methods_called(self, method: Method, call: ast.Call) -> list[Method]:
        """The methods of objects that a call in a method may be of."""
        frames = self.objects.frames_of(method, call)
        return [found for frame in frames for found in self.objects.code.methods_called(frame, call)]

    def title(self, method: Method) -> str:
        """A method as a user writes it: ``step`` of the class itself, ``Trainer.policy.step`` of its part."""
        instance = self.instance(method)
        return method.name if instance is self.root else f"{instance.name}.{method.name}"

    def prefix(self, instance: Instance) -> str:
        """What stands before the attributes of an object: ``self.``, or ``Trainer.policy.`` for a part."""
        return "self." if instance is self.root else f"{instance.name}."

    def reached(self) -> Iterator[tuple[Method, Site]]:
        """Every method with each site where it runs."""
        for method, sites in self.sites.items():
            for site in sites:
                yield method, site

    def group(self, role: str) -> DeviceGroup | None:
        """The group that hosts the role, if it is known."""
        return next((group for group in self.groups.groups if role in group.roles), None) if self.groups else None

    def hosts(self, instance: Instance) -> set[str] | None:
        """The groups whose workers have an object: those of the outermost whole's roles. None: they are not known."""
        while instance in self.parts and instance.builder is not None:
            instance = instance.builder
        if instance.frame is None and instance is not self.root:
            return None
        groups = [self.group(role) for role in instance.lineage.roles or ()]
        names = {group.name for group in groups if group is not None}
        return names if names and None not in groups else None

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
            names.append(self.title(step))
            step = self.sites[step].get(site)
        who = {DRIVER: "the driver", "__init__": "every process"}.get(site.role, f"the workers of role {site.role!r}")
        return f"{who} ({self.title(method)}{', reached from ' + names[-1] if names else ''})"

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
        for reach in self.reaches[method]:
            access, lineage = reach.access, reach.instance.lineage
            found = lineage.find(access.path[0])
            if access.is_write and len(access.path) == 1:
                found = lineage.find(f"{access.path[0]}.setter")
            if found is None or access.is_question:
                continue
            if not reach.is_sure:
                self._doubted.add(found)
                continue
            for use in (access, *(_through_variable(method, access) if found.kind != "property" else ())):
                if found.kind == "property" or _is_call(use):
                    self._called[method].append(found)
                    self._note(method, found, use)
            yield found
        for name, node in method.super_calls:
            found = self.instance(method).lineage.find(name, after=method.owner)
            if found is not None:
                self._called[method].append(found)
                if found.settings:
                    self.calls[method].append(RoleCall(method, node, found, found.settings, "call"))
                yield found

    def _note(self, method: Method, target: Method, access: Access) -> None:
        if target.settings is not None and target.settings.role != UNKNOWN:
            node, how = (access.call, access.called or "call") if _is_call(access) else (access.node, "call")
            self.calls[method].append(RoleCall(method, node or access.node, target, target.settings, how))

    def _spread(self) -> None:
        plain: list[Method] = []
        for instance in self.objects.instances:
            names = dict.fromkeys(method.name for method in instance.lineage.methods)
            for method in filter(None, map(instance.lineage.find, names)):
                settings = method.settings
                if method in instance.constructors and settings is None:
                    is_drivers = instance is self.root and _is_without_roles(instance)
                    self._reach(method, ON_DRIVER if is_drivers else EVERYWHERE, None)
                elif settings is None:
                    plain.append(method)
                elif settings.role != UNKNOWN:
                    self._reach(method, _own_site(settings), None)
        known = {target for method, targets in self.edges.items() for target in targets if target is not method}
        known |= self._doubted
        is_handed_on = any(map(self._hands_on_root, self.methods))
        for method in plain:
            is_hook = method.name.startswith("__") or method.name in self.root.lineage.hooks
            is_anyones = is_hook or (is_handed_on and not self.calls[method])  # code that is not seen may call it
            if self.instance(method) is self.root and method not in known and not is_anyones:
                self._reach(method, ON_DRIVER, None)

    def _hands_on_root(self, method: Method) -> bool:
        """Whether a method that runs on workers gives the object itself to code that may do anything with it."""
        if not any(site.is_worker or site == EVERYWHERE for site in self.sites[method]):
            return False
        for frame in self.objects.frames(method):
            for node in frame.nodes:
                is_load = isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)
                is_root = is_load and self.root in instances(self.objects.code.value(frame, node))
                if is_root and not self._is_seen(method, frame, node):
                    return True
        return False

    def _is_seen(self, method: Method, frame: Frame, node: ast.AST) -> bool:
        """Whether it is known what is done with an object: an attribute, another name, given to code that is read."""
        code, parents = self.objects.code, method.module.parents
        parent = parents[node]
        if isinstance(parent, (ast.keyword, ast.Tuple)):
            parent = parents[parent]
        if isinstance(parent, ast.Call):
            called = ast.unparse(parent.func)
            functions = [other.function for other in self.objects.frames(method)]
            is_read = code.built(frame, parent) or code.methods_called(frame, parent)
            return called in HARMLESS or method.module.functions.get(called) in functions or bool(is_read)
        targets = [target for target, _ in givings(parent)]
        is_followed = bool(targets) and all(
            isinstance(target, ast.Name)
            or (isinstance(target, ast.Attribute) and bool(instances(code.value(frame, target.value))))
            for target in targets
        )
        return isinstance(parent, (ast.Attribute, ast.Compare)) or is_followed

    def _reach(self, method: Method, site: Site, via: Method | None) -> None:
        if site in self.sites[method]:
            return
        self.sites[method][site] = via
        # what a constructor hands on runs later, and nobody knows where
        for target in self._called[method] if site == EVERYWHERE else self.edges[method]:
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
        inside = [method for method, role in self.roles_while_constructing.items() if role == DRIVER]
        for method in inside:
            for target in self._called[method]:
                is_drivers = target.settings is not None and target.settings.role == DRIVER
                if is_drivers and target not in inside and target not in self.constructing:
                    inside.append(target)
        return inside

    def _find_constructing(self) -> list[Method]:
        """What every process runs that constructs one of the objects."""
        found = [
            method
            for instance in self.objects.instances
            for method in instance.constructors
            if EVERYWHERE in self.sites[method]
        ]
        for method in found:
            found += [target for target in self._called[method] if target.settings is None and target not in found]
        return found

    def _find_roles_while_constructing(self) -> dict[Method, str]:
        """What runs during construction only where a role is, on the driver or on workers, with that role."""
        found = {
            target: target.settings.role
            for method in self.constructing
            for target in self._called[method]
            if target.settings is not None and target.settings.role != UNKNOWN
        }
        waiting = list(found)
        for method in waiting:
            for target in self._called[method]:
                if target.settings is None and target not in self.constructing and target not in found:
                    found[target] = found[method]
                    waiting.append(target)
        return found

    def _is_part(self, instance: Instance) -> bool:
        """Whether an object is built while another one is: it is a part of that one."""
        if instance.frame is None or not instance.frame.instance.lineage.is_decorated:
            return False
        return instance.frame.method in (*self.constructing, *self.roles_while_constructing)


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


def _is_call(access: Access) -> bool:
    return access.call is not None and len(access.path) == 1 and access.called in ("", *WAYS)


def _is_without_roles(instance: Instance) -> bool:
    """Whether all of a class is the driver's: it has no roles, and no method that has one."""
    lineage = instance.lineage
    is_known = lineage.classes[0].cls is not None or not lineage.has_unread_bases
    return is_known and not lineage.is_decorated and not any(method.settings for method in lineage.methods)


def _own_site(settings: Settings) -> Site:
    return Site(settings.role, settings.execute == "first" and settings.role != DRIVER)
