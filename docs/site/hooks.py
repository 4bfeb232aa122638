"""Tables of keys, made from the configurations themselves while the pages are built (a hook of mkdocs).

    {{ keys trainers.dpo.config:DPOConfig }}

becomes the keys of that class, a table under each of the comments that divide it: name, type, default, and the text
under the field, which is also what ``--help`` says. Keys of the shared configuration it extends are left out, unless
their default is another one here. The plots of the benchmarks are brought to the page that shows them.

    {{ api trainers.cli:run,load_config }}

becomes a heading, the signature and the docstring of each of these names; without names, of all in ``__all__``.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
import yaml
from mkdocs.structure.files import File, Files

from trainers.configuration.completion import CompletionConfig
from trainers.configuration.megatron import MegatronConfig
from trainers.configuration.shared import RunConfig, TrainConfig

ROOT = Path(__file__).resolve().parents[2]
MARKER = re.compile(r"^\{\{ (keys|api) (\S+) \}\}$", re.MULTILINE)
SHARED = (CompletionConfig, TrainConfig, MegatronConfig, RunConfig)  # each after those that extend it
OWN, CHANGED = "Keys", "Shared keys that have another default here"  # where no comment says more
WORDS = {bool: "true, false", int: "whole number", float: "number", str: "text", NoneType: "null", Any: "anything"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its markers replaced. Called by mkdocs."""
    made = {"keys": key_tables, "api": api_entries}
    for up in ("", "../"):  # to where on_files puts them
        markdown = markdown.replace(f"]({up}../benchmarks/plots/", f"]({up}plots/")
    return MARKER.sub(lambda marker: made[marker[1]](marker[2]), markdown)


def on_files(files: Files, config: Any) -> Files:
    """The files of the site, with the pages and plots that benchmarks/RESULTS.md links to. Called by mkdocs."""
    folder = ROOT / "benchmarks"
    for file in sorted([folder / "LOG.md", *folder.glob("plots/*.svg"), *folder.glob("results/*.md")]):
        files.append(File.generated(config, str(file.relative_to(folder)), abs_src_path=str(file)))
    return files


def api_entries(path: str) -> str:
    """The public names of ``module`` or ``module:name,name`` with what their docstrings say, in Markdown."""
    module_name, _, names = path.partition(":")
    module = importlib.import_module(module_name)
    lines: list[str] = []
    for name in names.split(",") if names else module.__all__:
        found = getattr(module, name)
        lines += _entry("###", name, found)
        if inspect.isclass(found) and not issubclass(found, BaseException):
            for inner in sorted(set(dir(found)) - set(dir(object))):
                method = inspect.getattr_static(found, inner)
                if not inner.startswith("_") and _text_of(method) and callable(getattr(found, inner)):
                    lines += _entry("####", f"{name}.{inner}", getattr(found, inner))
    return "\n".join(lines)


def _entry(level: str, name: str, found: Any) -> list[str]:
    """Heading, signature, text, arguments and errors of one name."""
    told = docstring_parser.parse(_text_of(found))
    lines = ["", f"{level} {name}", ""]
    if not (inspect.isclass(found) and issubclass(found, BaseException)):
        lines += ["```python", f"{name}{_signature(found)}", "```", ""]
    lines += [_markdown(told.short_description), "", _markdown(told.long_description), ""]
    lines += [f"- `{one.arg_name}`: {_markdown(one.description)}" for one in told.params]
    lines += ["", *(f"- raises `{one.type_name}`: {_markdown(one.description)}" for one in told.raises)]
    return lines


def _text_of(found: Any) -> str:
    """Its own docstring, or that of the function behind a decorator; none of a plain value."""
    found = getattr(found, "__func__", found)
    return inspect.cleandoc(getattr(found, "__doc__", None) or "") if callable(found) else ""


def _signature(found: Any) -> str:
    try:
        return str(inspect.signature(found)).replace("'", "")
    except (TypeError, ValueError):
        return "(...)"


def _markdown(text: str | None) -> str:
    """A docstring's text, in which double backticks mark code and nothing is HTML."""
    return (text or "").replace("``", "`").replace("<", "&lt;").replace("{{", "{ {")


def key_tables(path: str) -> str:
    """The tables of the configuration at ``module:Class``, in Markdown."""
    module, _, name = path.partition(":")
    config_type = getattr(importlib.import_module(module), name)
    told, sections, types = descriptions(config_type), sections_of(config_type), get_type_hints(config_type)
    lines: list[str] = []
    shown = None
    for key in own_keys(config_type):
        if sections[key.name] != shown:
            shown = sections[key.name]
            lines += ["", f"**{shown}**", "", "| key | type | default | |", "|---|---|---|---|"]
        text = told[key.name].replace("``", "`").replace("|", r"\|").replace("<", "&lt;")
        lines.append(f"| `{key.name}` | {type_text(types[key.name])} | {default_text(key)} | {text} |")
    return "\n".join(lines)


def own_keys(config_type: type) -> list[dataclasses.Field[Any]]:
    """The fields that the shared configuration lacks, or has with another default."""
    known = shared_keys(config_type)
    fields = [field for field in dataclasses.fields(config_type) if field.init]
    return [field for field in fields if field.name not in known or default_of(field) != known[field.name]]


def shared_keys(config_type: type) -> dict[str, Any]:
    """The defaults of the shared configurations that a class extends; none for RunConfig itself."""
    bases = [shared for shared in reversed(SHARED) if shared in config_type.__mro__[1:]]
    return {field.name: default_of(field) for base in bases for field in dataclasses.fields(base)}


def descriptions(config_type: type) -> dict[str, str]:
    """What stands under each field, in the class itself or the one that it is inherited from."""
    told: dict[str, str] = {}
    for one in reversed(config_type.__mro__[:-1]):
        for key in docstring_parser.parse_from_object(one).params:
            told[key.arg_name] = " ".join((key.description or "").split())
    return told


def sections_of(config_type: type) -> dict[str, str]:
    """The comment that stands above each field, or above the fields before it: ``# Data``."""
    found = dict.fromkeys(shared_keys(config_type), CHANGED)
    for one in reversed(config_type.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(one))
        lines = source.splitlines()
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        section, end = OWN, definition.lineno
        for node in definition.body:
            between = [line.strip() for line in lines[end : node.lineno - 1]]
            section = next((line[2:] for line in between if line.startswith("# ")), section)
            end = node.end_lineno or node.lineno
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.setdefault(node.target.id, section)
    return found


def type_text(hint: Any) -> str:
    """A type in words."""
    members = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(type_text, members))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{member}`" for member in members)
    if get_origin(hint) is list:
        return "list" if members[0] is Any else f"list of {type_text(members[0])}"
    if get_origin(hint) is dict:
        return "mapping"
    return WORDS[hint]


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def default_text(field: dataclasses.Field[Any]) -> str:
    """The default as YAML writes it."""
    default = default_of(field)
    if default is dataclasses.MISSING:
        return "required"
    text = yaml.safe_dump(default, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return f"`{text}`"
