"""Equal values have equal contents; others have not, as far as they are looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper.values.contents import contents_of


@dataclass
class Batch:
    ids: Any
    name: str


def equal(one: Any, other: Any, **how: Any) -> bool:
    return contents_of([one], **how).equals(contents_of([other], **how))


VALUES: list[Callable[[], Any]] = [
    lambda: [1, 2, 3],
    lambda: {"a": "text", "b": [None, True, b"bytes"]},
    lambda: (1.5, float("nan")),
    lambda: Batch(np.arange(5), "x"),
    lambda: torch.arange(6).view(2, 3),
    lambda: torch.tensor([1.0, float("nan")]),
    lambda: torch.ones(3, dtype=torch.bfloat16),
    lambda: np.array(["a", None], object),
    lambda: torch.eye(3).to_sparse(),
    lambda: object(),
]


@pytest.mark.parametrize("make", VALUES)
def test_equal_values_have_equal_contents(make: Callable[[], Any]) -> None:
    assert equal(make(), make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]),
        ([1], [True]),
        ("a", "b"),
        ({"a": 1}, {"b": 1}),
        (torch.arange(4), torch.arange(4).flip(0)),
        (torch.arange(4), torch.arange(4).view(2, 2)),
        (torch.arange(4), torch.arange(4).float()),
        (torch.rand(9), torch.rand(9)),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.ones(100_000), torch.cat([torch.full((1,), 9e4), torch.ones(99_999)])),
        (Batch([1], "x"), Batch([2], "x")),
        (Batch([1], "x"), Batch([1], "y")),
        (float("nan"), 1.0),
    ],
)
def test_other_values_have_others(one: Any, other: Any) -> None:
    assert not equal(one, other)


def test_last_bits_of_real_numbers_are_not_looked_at() -> None:
    numbers = torch.rand(1000)
    assert equal(numbers, numbers * (1 + 1e-6))
    assert not equal(numbers, numbers * 1.1)


def test_the_same_items_in_another_order_are_told_from_others() -> None:
    one, turned, other = ([*map(torch.tensor, rows)] for rows in ([[1, 2], [3, 4]], [[3, 4], [1, 2]], [[1, 2], [9, 9]]))
    assert contents_of([one]).is_reordered(contents_of([turned]))
    assert not contents_of([one]).is_reordered(contents_of([other]))
    assert not contents_of([one]).is_reordered(contents_of([one]))
    for num_rows in (3, 256):
        rows = torch.arange(2 * num_rows).view(num_rows, 2)
        assert contents_of([rows]).is_reordered(contents_of([rows.flip(0)]))


def test_what_is_not_the_same_items_is_not_called_another_order() -> None:
    assert not contents_of([[1, 2], 4]).is_reordered(contents_of([[1, 2], 5]))
    assert not contents_of([[1, 2], {"k": 4}]).is_reordered(contents_of([[1, 2], {"k": 5}]))
    assert not contents_of([[1], [2]]).is_reordered(contents_of([[2], [1]]))  # two arguments changed places
    many = torch.arange(257)
    assert not contents_of([many]).is_reordered(contents_of([many + 1]))  # of so many it is not known
