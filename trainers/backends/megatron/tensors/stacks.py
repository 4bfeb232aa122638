"""Experts that a checkpoint has stacked, as Qwen3.5's have: ``experts.gate_up_proj`` (E, 2 I, H), ``down_proj``.

Those of Qwen3-VL are transposed: (E, H, 2 I). Either is read as the tensors of each expert that all other checkpoints
have, and written as it was.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class OfStack:
    """The rows of one expert in a slice of a file, as a slice of a tensor of its own."""

    stack: Any
    expert: int
    start: int
    num_rows: int
    is_transposed: bool = False

    def get_shape(self) -> list[int]:
        return [self.num_rows, self.stack.get_shape()[1 if self.is_transposed else 2]]

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = (*index, slice(None))[:2] if isinstance(index, tuple) else (index, slice(None))
        first, last, _ = rows.indices(self.num_rows)
        own_rows, expert = slice(self.start + first, self.start + last), slice(self.expert, self.expert + 1)
        own: torch.Tensor = self.stack[
            (expert, columns, own_rows) if self.is_transposed else (expert, own_rows, columns)
        ]
        return own[0].T if self.is_transposed else own[0]


def is_transposed(name: str, stack: Any, hidden: int, size: int) -> bool:
    """Whether rows and columns of a stack are exchanged: of experts of ``size`` in a model as wide as ``hidden``.

    As in transformers, one that fits either way is not.
    """
    right = [2 * size, hidden] if name.endswith("gate_up_proj") else [hidden, size]
    given: list[int] = stack.get_shape()[1:]
    return given != right and given == right[::-1]


def unstacked(name: str, stack: Any, *, is_transposed: bool = False) -> Iterator[tuple[str, OfStack]]:
    """The tensors of the experts in a stack, by name; none of a tensor that is no stack."""
    found = STACK.fullmatch(name)
    if found is None:
        return
    experts, kind = found.groups()
    count, *sides = stack.get_shape()
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    each = sides[is_transposed] // len(parts)
    for expert in range(count):
        for k, part in enumerate(parts):
            yield f"{experts}.{expert}.{part}.weight", OfStack(stack, expert, k * each, each, is_transposed)


def apart(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with each stack as the tensors of its experts."""
    for name, weight in named:
        found = STACK.fullmatch(name)
        if found is None:
            yield name, weight
            continue
        experts, kind = found.groups()
        for number, one in enumerate(weight):
            parts = {"gate": one.chunk(2)[0], "up": one.chunk(2)[1]} if kind == "gate_up_proj" else {"down": one}
            yield from ((f"{experts}.{number}.{part}_proj.weight", rows) for part, rows in parts.items())


def stack_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same tensors with experts stacked, each stack where the last of its tensors was."""
    counts: dict[str, int] = {}
    for name in shapes:
        if found := OF_EXPERT.fullmatch(name):
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    stacked: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found = OF_EXPERT.fullmatch(name)
        if found is None:
            stacked[name] = shape
        elif int(found[2]) == counts[found[1]] - 1 and found[3] != "gate":
            rows = 2 * shape[0] if found[3] == "up" else shape[0]
            kind = "gate_up_proj" if found[3] == "up" else "down_proj"
            stacked[f"{found[1]}.{kind}"] = (counts[found[1]], rows, shape[1])
    return stacked


def stacking(
    weights: Iterator[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    transposed: Collection[str] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with experts stacked; ``shapes``: of the stacks, by name. A stack comes behind its last tensor.

    ``transposed``: stacks that are given with rows and columns exchanged.
    """
    stacks: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    for name, weight in weights:
        found = OF_EXPERT.fullmatch(name)
        if found is None:
            yield name, weight
            continue
        kind = "down_proj" if found[3] == "down" else "gate_up_proj"
        stack = f"{found[1]}.{kind}"
        if stack not in stacks:
            stacks[stack] = weight.new_empty(shapes[stack])
            missing[stack] = shapes[stack][0] * (1 if kind == "down_proj" else 2)
        start = weight.shape[0] if found[3] == "up" else 0
        stacks[stack][int(found[2]), start : start + weight.shape[0]].copy_(weight)
        missing[stack] -= 1
        if not missing[stack]:
            made = stacks.pop(stack)
            yield stack, made.transpose(1, 2).contiguous() if stack in transposed else made
