"""What the source of a class says: its methods, their roles, and what each of them touches and calls.

    class  ->  Lineage (the class and its bases)  ->  ClassSource  ->  Method  ->  Access

Facts only, with the node of the syntax tree that each comes from. Which objects a class builds is ``objects.py``,
where a method runs ``flow.py``. What is wrong with it are the rules: ``decorators.py``, ``calls.py`` and others.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from rayhelper.check.reading.accesses import Touched, is_name, touched
from rayhelper.check.reading.module import (
    Access,
    Finding,
    Function,
    ModuleSource,
    assigned,
    is_helper_call,
    own_nodes,
    statements,
)
from rayhelper.device_groups import OWN
from rayhelper.errors import RayHelperError, RoleError
from rayhelper.roles.methods import find_method

UNKNOWN = "?"  # a setting that is neither a literal nor known from the imported class
DIVIDED = ("slice", "balanced", "callable")  # what Settings.dispatch is where each worker gets a part
NOT_HOOKS = ("builtins", "typing", "typing_extensions", "abc")  # bases of these modules call no method of a trainer


@dataclass(frozen=True)
class Settings:
    """What ``RayHelper.function`` was told. ``dispatch``: all, slice, balanced or callable; ``collect``: none, flatten
    or callable; what is written otherwise stays as it is."""

    role: str
    dispatch: str = "all"
    execute: str = "all"
    collect: str = "none"
    is_own: bool = False  # the role is that of the class that inherits the method


@dataclass(eq=False)
class Method:
    """A method together with its decorator's settings."""

    name: str
    node: Function
    owner: ClassSource
    kind: str  # method, static, class or property
    settings: Settings | None
    decorator: ast.expr | None  # RayHelper.function(...), where it is written as that
    touched: Touched = field(default_factory=Touched)

    @property
    def module(self) -> ModuleSource:
        return self.owner.module

    @property
    def parameters(self) -> list[ast.arg]:
        """The parameters of a call: all but self and cls, ``*args`` and ``**kwargs`` included."""
        args = self.node.args
        named = [*args.posonlyargs, *args.args][0 if self.kind == "static" else 1 :]
        return [*named, *args.kwonlyargs, *(arg for arg in (args.vararg, args.kwarg) if arg is not None)]

    @property
    def self_name(self) -> str | None:
        names = [*self.node.args.posonlyargs, *self.node.args.args]
        return names[0].arg if names and self.kind != "static" else None

    @property
    def accesses(self) -> list[Access]:
        return self.touched.accesses

    @property
    def super_calls(self) -> list[tuple[str, ast.Call]]:
        return self.touched.super_calls

    @property
    def functions(self) -> tuple[Function, ...]:
        """The method, and the functions of its module that it hands its object to."""
        return tuple(self.touched.names)

    def function_of(self, node: ast.AST) -> Function:
        """That of ``functions`` which holds a node."""
        around = set(self.module.up(node))
        return next((function for function in self.functions if function in around), self.node)

    def is_self(self, node: ast.AST) -> bool:
        """Whether a node is the method's object, under whichever name."""
        return is_name(node, self.touched.names[self.function_of(node)])

    @property
    def is_generator(self) -> bool:
        return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own_nodes(self.node))

    @property
    def returns(self) -> list[ast.expr]:
        """The values of its return statements."""
        found = [node.value for node in own_nodes(self.node) if isinstance(node, ast.Return) and node.value is not None]
        return [value for value in found if not (isinstance(value, ast.Constant) and value.value is None)]

    def finding(self, node: ast.AST, rule: str, message: str) -> Finding:
        return Finding(self.module.path, getattr(node, "lineno", self.node.lineno), rule, message)

    def line_of_decorator(self) -> ast.AST:
        return self.decorator or self.node

    def __str__(self) -> str:
        return f"{self.owner.name}.{self.name}"


@dataclass(eq=False)
class ClassSource:
    """One class of a lineage."""

    name: str
    node: ast.ClassDef
    module: ModuleSource
    cls: type | None  # None if the module cannot be imported
    methods: dict[str, Method] = field(default_factory=dict)
    attributes: dict[str, ast.expr] = field(default_factory=dict)  # of class level

    @classmethod
    def read(cls, node: ast.ClassDef, module: ModuleSource, loaded: type | None) -> ClassSource:
        source = cls(node.name, node, module, loaded)
        for statement in statements(node.body):
            source.attributes.update(assigned(statement))
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                source.attributes.setdefault(statement.target.id, ast.Constant(...))  # a field of a dataclass
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                method = source._method(statement)
                source.methods[method.name] = method
        return source

    def _method(self, node: Function) -> Method:
        names = [
            self.module.dotted(entry.func if isinstance(entry, ast.Call) else entry) for entry in node.decorator_list
        ]
        suffixes = [name.rpartition(".")[2] for name in names]
        kinds = {
            "staticmethod": "static",
            "classmethod": "class",
            "property": "property",
            "cached_property": "property",
        }
        kind = next((kinds[suffix] for suffix in suffixes if suffix in kinds), "method")
        name = f"{node.name}.setter" if "setter" in suffixes else node.name
        decorator = next(
            (entry for entry in node.decorator_list if is_helper_call(self.module, entry, "function")), None
        )
        method = Method(name, node, self, kind, self._settings(name, decorator), decorator)
        method.touched = touched(node, method.self_name, self.module)
        return method

    def _settings(self, name: str, decorator: ast.expr | None) -> Settings | None:
        if self.cls is not None:
            entry = vars(self.cls).get(name)
            with contextlib.suppress(RoleError):
                found = find_method(entry)
                return Settings(found.role, _name(found.dispatch), found.execute, _name(found.collect))
        if not isinstance(decorator, ast.Call):
            return None
        names = ("group", "dispatch", "execute", "collect")
        given: dict[str, ast.expr] = dict(zip(names, decorator.args, strict=False))
        given.update({keyword.arg: keyword.value for keyword in decorator.keywords if keyword.arg in names})
        values = {key: self._literal(value, key) for key, value in given.items()}
        return Settings(
            values.get("group", UNKNOWN),
            values.get("dispatch", "all"),
            values.get("execute", "all"),
            values.get("collect", "none"),
        )

    def _literal(self, node: ast.expr, key: str) -> str:
        if isinstance(node, ast.Name):
            node = self.module.variables.get(node.id, node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Call) and is_helper_call(self.module, node, "balanced"):
            return "balanced"
        return "callable" if key in ("dispatch", "collect") else UNKNOWN

    @property
    def worker_decorator(self) -> ast.Call | None:
        found = (entry for entry in self.node.decorator_list if is_helper_call(self.module, entry, "worker"))
        return cast(ast.Call | None, next(found, None))

    def finding(self, rule: str, message: str) -> Finding:
        """One about the class, at its @RayHelper.worker if it has one."""
        return Finding(self.module.path, (self.worker_decorator or self.node).lineno, rule, message)

    @property
    def declared(self) -> tuple[str, ...] | None:
        """The roles of ``@RayHelper.worker``; None without it, or if they cannot be read."""
        call = self.worker_decorator
        if call is None:
            return None
        value: ast.expr | None = call.args[0] if call.args else None
        value = next((keyword.value for keyword in call.keywords if keyword.arg == "group"), value)
        entries = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
        roles = tuple(self._literal(entry, "role") for entry in entries if entry is not None)
        return None if UNKNOWN in roles else roles


@dataclass(eq=False)
class Lineage:
    """The checked class, then those of its bases that belong to it, in the order in which Python looks them up."""

    classes: list[ClassSource]
    hooks: frozenset[str]  # names in other bases, whose code may call them
    has_unread_bases: bool

    def __post_init__(self) -> None:
        """Methods of role ``own`` belong to the one role of the class."""
        roles = self.roles or ()
        for method in self.methods:
            if method.settings is not None and method.settings.role == OWN:
                role = roles[0] if len(roles) == 1 else UNKNOWN
                method.settings = replace(method.settings, role=role, is_own=True)

    def find(self, name: str, after: ClassSource | None = None) -> Method | None:
        """The method that ``self.name`` is, or ``super().name`` in the class ``after``."""
        start = 0 if after is None else self.classes.index(after) + 1
        return next((source.methods[name] for source in self.classes[start:] if name in source.methods), None)

    @property
    def name(self) -> str:
        return self.classes[0].name

    @property
    def is_decorated(self) -> bool:
        """Whether the class has roles, as far as its sources say."""
        return self.roles is not None or any(source.worker_decorator for source in self.classes)

    @property
    def methods(self) -> list[Method]:
        return [method for source in self.classes for method in source.methods.values()]

    @property
    def roles(self) -> tuple[str, ...] | None:
        """Every declared role; None if they are not known."""
        cls = self.classes[0].cls
        if cls is not None:
            return getattr(cls, "__rayhelper_roles__", None)
        found = [source.declared for source in self.classes if source.worker_decorator is not None]
        if not found or None in found or self.has_unread_bases:
            return None
        return tuple(dict.fromkeys(role for roles in found for role in roles or ()))


def lineage_of_class(cls: type, modules: dict[str, ModuleSource] | None = None) -> Lineage:
    """The sources of an imported class; ``modules``: files that were read before, by path.

    Raises RayHelperError if they cannot be read.
    """
    modules = {} if modules is None else modules
    classes: list[ClassSource] = []
    hooks: set[str] = set()
    unread = False
    for base in cls.__mro__:
        if base is object:
            continue
        if base is not cls and not _belongs(base, cls):
            foreign = base.__module__ not in NOT_HOOKS
            unread = unread or foreign
            hooks.update(dir(base) if foreign else ())
            continue
        try:
            path = inspect.getsourcefile(base) or "?"
            module = modules.get(path) or modules.setdefault(path, ModuleSource.read(path))
            classes.append(ClassSource.read(_definition(module, base.__qualname__), module, base))
        except (OSError, TypeError, SyntaxError, LookupError) as error:
            raise RayHelperError(
                f"the source of {base.__module__}.{base.__qualname__} cannot be read ({error}), and the check "
                "reads the source. Define the class in a file."
            ) from error
    return Lineage(classes, frozenset(hooks), unread)


def lineage_of_source(module: ModuleSource, qualname: str) -> Lineage:
    """The sources of a class that cannot be imported: its bases in the same file. Raises LookupError without it."""
    nodes, unread, waiting = [_definition(module, qualname)], False, [qualname]
    while waiting:
        for base in _definition(module, waiting.pop(0)).bases:
            try:
                node = _definition(module, ast.unparse(base))
            except LookupError:
                unread = True
                continue
            if node not in nodes:
                nodes.append(node)
                waiting.append(ast.unparse(base))
    return Lineage([ClassSource.read(node, module, None) for node in nodes], frozenset(), unread)


def _belongs(base: type, cls: type) -> bool:
    decorated = "__rayhelper_roles__" in vars(base)
    return decorated or base.__module__.partition(".")[0] == cls.__module__.partition(".")[0]


def _definition(module: ModuleSource, qualname: str) -> ast.ClassDef:
    """The class of that qualified name, the last if there are several. Raises LookupError without one."""
    scope: ast.AST = module.tree
    for name in qualname.split("."):
        if name == "<locals>":
            continue
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inside = [node for node in _scope(scope) if isinstance(node, kinds) and node.name == name]
        if not inside:
            raise LookupError(f"{module.path} does not define {qualname}")
        scope = inside[-1]
    if not isinstance(scope, ast.ClassDef):
        raise LookupError(f"{qualname} in {module.path} is a function, not a class")
    return scope


def _scope(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _scope(child)


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "balanced" if type(value).__name__ == "Balanced" else "callable"
