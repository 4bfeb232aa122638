"""Changes to other libraries, and what they keep to themselves, stand in files called ``patches.py``."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("foreign_state")  # one process reads all files
ROOT = Path(__file__).resolve().parents[1]
FILES = [file for folder in ("rayhelper", "trainers") for file in sorted((ROOT / folder).rglob("*.py"))]
OURS = ("rayhelper", "trainers")
# Private by their names alone: documented, or the only name of what is read (and nothing is written)
READ = {
    *("_replace", "_asdict", "_make"),  # of named tuples
    *("_exit", "_current_frames"),  # of os and sys
    *("_dynamo", "_functorch"),  # of torch: documented functions and settings
    *("_C", "_cdata", "_version"),  # of torch: whether somebody holds a storage, and how often a tensor was changed
    *("_attn_implementation", "_did_swap_in_out_features"),  # of transformers' configurations and peft's layers
    *("_get_model_param_range_map", "_replace_state_dict_keys_with_sharded_keys"),  # of megatron-core, one version
    *("_fmt", "_style"),  # of logging's formatters
    "_bootstrap",
}
IN_PLACE = "decoding.py"  # what a patch puts in the place of vLLM's functions does their work


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.Module) -> Iterator[str]:
    """Private names that a file of ours gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@functools.cache
def all_own_names() -> set[str]:
    return {name for file in FILES for name in own_names(ast.parse(file.read_text())) if is_private(name)}


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that a file imports from others, and the modules that they are of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.partition(".")[0], alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def mistakes(tree: ast.Module) -> Iterator[str]:
    """Where a file changes another library, or says a name that is the library's own."""
    foreign = {}
    for name, module in imported(tree):
        if module.partition(".")[0] in OURS:
            continue
        foreign[name] = module
        if hidden := [part for part in module.split(".") if is_private(part) and part not in READ]:
            yield f"imports {module}, and {hidden[0]} is private"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.ctx, (ast.Store, ast.Del)) and root_of(node) in foreign:
                yield f"line {node.lineno} changes {ast.unparse(node)}"
            if is_private(node.attr) and node.attr not in all_own_names() | READ:
                yield f"line {node.lineno} takes {ast.unparse(node)}"
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_call and node.func.id in ("setattr", "delattr") and root_of(node.args[0]) in foreign:
            yield f"line {node.lineno} changes {ast.unparse(node)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_other_libraries_are_changed_in_patches_alone(file: Path) -> None:
    if file.name in ("patches.py", IN_PLACE):
        return
    assert not list(mistakes(ast.parse(file.read_text())))


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.set_num_threads = print",
        "from transformers import masking_utils\nsetattr(masking_utils, 'find', None)",
        "from vllm import _custom_ops",
        "from ray._private.worker import global_worker",
        "import ray\nray._private.state.nodes()",
        "def restore(group):\n    return group._fsdp_state",
        "import os\ndel os.environ.encodekey",
    ],
)
def test_a_change_elsewhere_would_be_found(line: str) -> None:
    assert len(list(mistakes(ast.parse(line)))) == 1


def test_our_own_names_and_objects_are_not_others() -> None:
    ours = "from trainers.metrics import Metrics\nMetrics.limit = 3\n"
    assert not list(mistakes(ast.parse(ours + "def of(span, host): return span._replace(rank=host._runtime)")))
