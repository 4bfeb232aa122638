"""What ``prove`` says of two values that differ: where, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper.prove.held import held_of

ROWS = torch.rand(6, 4, 3, generator=torch.Generator().manual_seed(0))


@dataclass
class Batch:
    ids: list[int]
    weights: Any


def unlike(one: Any, other: Any, tolerance: float = 0.0) -> tuple[str, str] | None:
    found = held_of(one).unlike(held_of(other), tolerance)
    return None if found is None else (found.path, found.how)


@pytest.mark.parametrize(
    "value", [1, 1.5, "a", None, [1, [2.0]], {"a": (1, 2)}, ROWS, np.arange(4), Batch([1], ROWS), torch.nn.Linear(2, 2)]
)
def test_a_value_is_as_itself(value: Any) -> None:
    assert unlike(value, value) is None


DIFFERENT: dict[str, tuple[Any, Any, tuple[str, str]]] = {
    "a number": ({"n": 1, "loss": 2.0}, {"n": 1, "loss": 2.5}, ("['loss']", "numbers")),
    "an item": ([{"n": 1}, {"n": 2}], [{"n": 1}, {"n": 3}], ("[1]['n']", "items")),
    "a dtype": (ROWS, ROWS.double(), ("", "dtype")),
    "a shape": ({"x": ROWS}, {"x": ROWS[:5]}, ("['x']", "shape")),
    "a device": (ROWS, ROWS.to("meta"), ("", "device")),
    "a type": ([1], (1,), ("", "type")),
    "a missing key": ({"a": 1, "b": 2}, {"a": 1}, ("['b']", "keys")),
    "another key": ({"a": 1}, {"b": 1}, ("['a']", "keys")),
    "keys in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ("", "order")),
    "rows in another order": (ROWS, ROWS[[1, 0, 2, 3, 4, 5]], ("", "order")),
    "a second dimension in another order": ({"x": ROWS}, {"x": ROWS.flip(1)}, ("['x']", "order")),
    "a third one": (ROWS, ROWS.flip(2), ("", "order")),
    "rows of texts": (["a", "b", "c"], ["c", "a", "b"], ("", "order")),
    "rows of tensors": (list(ROWS), list(ROWS.flip(0)), ("", "order")),
    "a field": (Batch([1, 2], ROWS), Batch([1, 3], ROWS), (".ids[1]", "items")),
    "rounding": (ROWS, ROWS * (1 + 1e-6), ("", "rounding")),
    "other rows": (ROWS, ROWS + 1, ("", "numbers")),
    "a real difference after rounding": ([ROWS, 1.0], [ROWS * (1 + 1e-6), 2.0], ("[1]", "numbers")),
    "not a number": (ROWS, ROWS * float("nan"), ("", "numbers")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_first_thing_that_differs_is_named_by_path_and_kind(name: str) -> None:
    one, other, expected = DIFFERENT[name]
    assert unlike(one, other) == expected


def test_within_the_tolerance_real_numbers_are_equal_and_others_are_not() -> None:
    assert unlike(ROWS, ROWS * (1 + 1e-5), 1e-4) is None
    assert unlike(ROWS, ROWS * 1.01, 1e-4) == ("", "numbers")
    assert unlike([1, ROWS], [2, ROWS], 1e-4) == ("[0]", "items")


def test_the_weights_of_modules_and_what_optimizers_remember_are_compared() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    assert unlike(one, other) is None
    with torch.no_grad():
        other.bias += 1
    assert unlike({"state": one}, {"state": other}) == ("['state'].bias", "numbers")


def test_of_arrays_alone_other_values_do_not_count() -> None:
    one, other = {"t": 1.0, "x": np.arange(3)}, {"t": 2.0, "x": np.arange(3)}
    assert held_of(one, of_arrays_alone=True).unlike(held_of(other, of_arrays_alone=True)) is None
    other["x"] = np.arange(3) + 1
    assert held_of(one, of_arrays_alone=True).unlike(held_of(other, of_arrays_alone=True)) is not None


def test_the_first_item_that_differs_is_counted() -> None:
    other = ROWS.clone()
    other[4] += 1
    found = held_of(ROWS).unlike(held_of(other))
    assert found is not None
    assert (found.item, found.how) == (4, "numbers")
