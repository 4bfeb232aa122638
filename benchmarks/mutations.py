"""Whether the tests find a bug: so many places of the library, drawn by a seed, are changed one at a time.

    python -m benchmarks.mutations --tree ../copy --count 40 --seed 22 --out found.json -- tests/backends -n 3

``--tree`` is a clone of this repository, which is changed and put back. After ``--`` stands what pytest is given; the
first test that fails ends a mutation. A mutation that the given tests do not find may be one that changes nothing.

``--in-process`` changes functions in memory, in a fork that has imported all tests: seconds instead of half a minute,
for tests that start no processes. ``--found before.json`` tries those mutations again that an earlier run found. Before
tests are removed, ask these alone, then those that stay for what these have found: what is missing now is lost.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from gc import get_objects, unfreeze  # before the tests take gc's own away
from pathlib import Path

PACKAGES = ("rayhelper", "trainers")
NOT_HELD = 77  # no function that exists has the place: of a class's body, or a module that no test imports
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Mutation:
    """One changed expression or statement. ``start`` and ``end``: of it in the file's bytes."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str


def changed(node: ast.AST) -> ast.AST | None:
    """What stands in the node's place; None: nothing."""
    match node:
        case ast.Compare(ops=[one]):
            return ast.Compare(node.left, [COMPARISONS[type(one)]()], node.comparators)
        case ast.BinOp() if type(node.op) in OPERATORS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            return ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        case ast.BoolOp():
            return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.Constant(value=bool()):
            return ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            return ast.Constant(node.value + 1)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return ast.Pass()
    return None


def mutations_of(root: Path) -> Iterator[Mutation]:
    """All that can be changed in the bodies of functions, one at a time."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            source = path.read_bytes()
            starts = [0]
            for line in source.splitlines(keepends=True):
                starts.append(starts[-1] + len(line))
            for node in _inside_functions(ast.parse(source)):
                replacement = changed(node)
                if replacement is None or node.end_lineno is None:
                    continue
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                before = source[start:end].decode()
                after = ast.unparse(ast.fix_missing_locations(replacement))
                if isinstance(node, ast.expr):
                    after = f"({after})"
                yield Mutation(str(path.relative_to(root)), node.lineno, start, end, before, after)


def _inside_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of bodies of functions that run: no annotations, messages of errors, or defaults."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, inside = waiting.pop()
        if inside:
            yield node
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            continue
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        children = node.body if is_function else list(ast.iter_child_nodes(node))  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        waiting.extend((child, inside or is_function) for child in children)


def tried(mutation: Mutation, tree: Path, arguments: list[str], limit_s: float) -> dict[str, object]:
    """What the tests say of one mutation."""
    path = tree / mutation.file
    source = path.read_bytes()
    path.write_bytes(source[: mutation.start] + mutation.after.encode() + source[mutation.end :])
    env = os.environ | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=limit_s)
        test = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        found = done.returncode != 0
        by = test[1] if test else (done.stdout + done.stderr)[-200:] if found else ""
    except subprocess.TimeoutExpired:
        found, by = True, f"no end after {limit_s:g} s"
    finally:
        path.write_bytes(source)
    return {**asdict(mutation), "found": found, "by": by, "s": round(time.monotonic() - began)}


def tried_in_fork(mutation: Mutation, tree: Path, arguments: list[str], limit_s: float) -> dict[str, object]:
    """The same in a fork of this process, which has imported the tests. Not found: also what did not end in time."""
    began, told = time.monotonic(), ""
    with tempfile.TemporaryFile() as out:
        process = os.fork()
        if process == 0:
            os.setsid()
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            os._exit(pytest_with(mutation, tree, arguments))
        while not (ended := os.waitpid(process, os.WNOHANG))[0] and time.monotonic() < began + limit_s:
            time.sleep(0.05)
        if not ended[0]:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
        out.seek(0)
        told = out.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(ended[1]) if ended[0] else 0
    assert code in (0, 1, NOT_HELD), told
    test = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
    why_not = "in no function that exists" if code == NOT_HELD else "" if ended[0] else f"no end after {limit_s:g} s"
    by = test[1] if test else why_not
    return {**asdict(mutation), "found": code == 1, "by": by, "s": round(time.monotonic() - began)}


def pytest_with(mutation: Mutation, tree: Path, arguments: list[str]) -> int:
    """The exit code of pytest with a mutation in memory, or ``NOT_HELD``."""
    import pytest

    source = (tree / mutation.file).read_bytes()
    changed = source[: mutation.start] + mutation.after.encode() + source[mutation.end :]
    file = str(tree / mutation.file)
    before, after = (
        {code_key(code): code for code in codes_of(compile(text, file, "exec"))} for text in (source, changed)
    )
    other = {key: after[key] for key in before.keys() & after.keys() if before[key] != after[key]}
    unfreeze()  # the tests froze the heap, whose objects are not listed
    functions = [one for one in get_objects() if isinstance(one, types.FunctionType)]
    mine = [one for one in functions if one.__code__.co_filename == file and code_key(one.__code__) in other]
    for function in mine:
        function.__code__ = other[code_key(function.__code__)]
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])) if mine else NOT_HELD


def code_key(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def in_this_process(tree: Path, arguments: list[str]) -> Callable[..., dict[str, object]]:
    """Imports the tests: what tries mutations in forks."""
    import pytest

    os.chdir(tree)
    sys.path[0] = str(tree)
    os.environ |= {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments])
    assert code == 0, "the tests fail without a mutation"
    return tried_in_fork


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="for the tests of one mutation")
    parser.add_argument("--under", nargs="*", default=[""], help="only files whose paths begin so")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--in-process", action="store_true", help="in memory, for tests that start no processes")
    parser.add_argument("--found", type=Path, help="only the mutations that this earlier --out found")
    parser.add_argument("pytest", nargs="+", help="what pytest is given")
    given = parser.parse_args()
    tree = given.tree.resolve()
    everything = [one for one in mutations_of(tree) if one.file.startswith(tuple(given.under))]
    drawn = random.Random(given.seed).sample(everything, given.count)
    if given.found:
        before = [one for one in json.loads(given.found.read_text()) if one["found"]]
        places = {(one["file"], one["start"], one["end"]) for one in before}
        drawn = [one for one in drawn if (one.file, one.start, one.end) in places]
    out = given.out.resolve() if given.out else None
    attempt = in_this_process(tree, given.pytest) if given.in_process else tried
    results = []
    for mutation in drawn:
        results.append(attempt(mutation, tree, given.pytest, given.limit_s))
        last = results[-1]
        said = "found" if last["found"] else "-"
        before = " ".join(mutation.before.split())[:50]
        place = f"{mutation.file}:{mutation.line}"
        print(f"{said:5} {last['s']:4} s  {place}  {before!r} -> {mutation.after[:50]!r}  {last['by']}", flush=True)
        if out:
            out.write_text(json.dumps(results, indent=1))
    print(f"{sum(bool(one['found']) for one in results)} of {len(results)} found; drawn from {len(everything)} places")


if __name__ == "__main__":
    main()
