"""Any value that a call may carry, as hypothesis strategies: columns of items, and nestings of anything that pickles.

A value is drawn as a dtype, a shape and a seed rather than number by number, so that an example is made in no time.
``same`` is what the tests mean by *exactly*.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas
import torch
from hypothesis import strategies as st
from transformers import BatchEncoding

from trainers.batch import Prompts, Ragged, Samples

ARRAY_DTYPES = [
    *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
    *("U4", "S3", "M8[s]", "m8[ms]", "V5", "O", np.dtype([("id", "i4"), ("score", "f8")])),
]
TENSOR_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
]


class Pair(NamedTuple):
    first: Any
    second: Any


def same(one: Any, other: Any) -> bool:
    """Equal in type, dtype, shape and bytes, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        if one.dtype.hasobject:
            return bool(alike and one.tolist() == other.tolist())
        return bool(alike and one.tobytes() == other.tobytes())
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape and one.requires_grad == other.requires_grad
        return bool(alike and (one == other).all())
    if isinstance(one, (dict, collections.UserDict)):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, datasets.Dataset):
        return bool(one.features == other.features and one[:] == other[:])
    if isinstance(one, pandas.DataFrame):
        return bool(one.equals(other) and one.index.equals(other.index) and (one.dtypes == other.dtypes).all())
    if isinstance(one, pandas.Series):
        return bool(one.equals(other) and one.name == other.name)
    return bool(one == other)


def array(dtype: Any, shape: tuple[int, ...], seed: int) -> Any:
    """An array of any dtype; object arrays hold texts, numbers and None."""
    kind = np.dtype(dtype)
    if kind.hasobject:
        made = np.empty(shape, object)
        made.ravel()[:] = np.array(["x", 1, None, 0.5], object)[np.arange(made.size) % 4]
        return made
    raw = np.random.default_rng(seed).integers(0, 2 if kind.kind == "b" else 100, (*shape, kind.itemsize), np.uint8)
    if kind.kind == "U":
        return np.random.default_rng(seed).integers(0, 999, shape).astype(kind)
    return np.frombuffer(raw.tobytes(), kind).reshape(shape).copy()


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    numbers = np.random.default_rng(seed).integers(-9 if dtype.is_signed else 0, 9, shape)
    return torch.from_numpy(np.asarray(numbers)).to(dtype)


def laid_out(made: Any, layout: str) -> Any:
    """The same values in another layout of memory."""
    if layout == "strided" and made.ndim:
        twice = (np.repeat if isinstance(made, np.ndarray) else torch.repeat_interleave)(made, 2, 0)
        return twice[::2]
    if layout == "transposed" and made.ndim > 1:
        axes = (-1, *range(made.ndim - 1))
        back = (*range(1, made.ndim), 0)
        if isinstance(made, np.ndarray):
            return np.ascontiguousarray(made.transpose(axes)).transpose(back)
        return made.permute(*(axis % made.ndim for axis in axes)).contiguous().permute(*back)
    if layout == "read-only" and isinstance(made, np.ndarray):
        made.flags.writeable = False
    return made


seeds = st.integers(0, 2**16)
layout_names = st.sampled_from(["plain", "strided", "transposed", "read-only"])
trailing = st.sampled_from([(), (), (1,), (3,), (2, 3), (0,)])


def arrays(count: int) -> st.SearchStrategy[Any]:
    made = st.builds(
        lambda dtype, rest, seed: array(dtype, (count, *rest), seed), st.sampled_from(ARRAY_DTYPES), trailing, seeds
    )
    return st.builds(laid_out, made, layout_names)


def tensors(count: int) -> st.SearchStrategy[Any]:
    made = st.builds(
        lambda dtype, rest, seed: tensor(dtype, (count, *rest), seed), st.sampled_from(TENSOR_DTYPES), trailing, seeds
    )
    return st.builds(laid_out, made, layout_names)


def lists(count: int) -> st.SearchStrategy[Any]:
    """Lists of numbers, texts, ragged rows, records, arrays, tensors, pairs."""
    make: dict[str, Callable[[int], Any]] = {
        "numbers": lambda k: k * 7 % 5,
        "texts": lambda k: "x" * (k % 4),
        "rows": lambda k: list(range(k % 4)),
        "nones": lambda k: None,
        "records": lambda k: {"id": k, "messages": [{"role": "user", "content": str(k)}]},
        "arrays": lambda k: np.arange(k % 4, dtype=np.int32),
        "tensors": lambda k: torch.full((1 + k % 3,), k, dtype=torch.bfloat16),
        "pairs": lambda k: Pair(k, [k]),
    }
    return st.sampled_from(sorted(make)).map(lambda kind: [make[kind](k) for k in range(count)])


def tables(count: int) -> list[Any]:
    """What comes as a table of its own: a dataset, frames, typed batches."""
    numbers = [k * 7 % 5 for k in range(count)]
    features = datasets.Features({"n": datasets.Value("int64"), "text": datasets.Value("string")})
    ids = Ragged.of([list(range(k % 4)) for k in range(count)], np.int64)
    frame = pandas.DataFrame({"n": np.array(numbers, np.int32), "text": ["x"] * count}, index=np.arange(count) * 10)
    return [
        datasets.Dataset.from_dict({"n": numbers, "text": ["x"] * count}, features=features),
        frame,
        frame["n"],
        ids,
        Prompts(ids),
        Samples(ids, Ragged(ids.values > 1, ids.offsets), advantages=np.array(numbers, np.float32)),
    ]


def columns(count: int) -> st.SearchStrategy[Any]:
    """Values of ``count`` items: flat ones, and mappings and named tuples of them, with columns of None."""
    flat = st.one_of(lists(count), arrays(count), tensors(count), st.sampled_from(tables(count)))

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        some = st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
        named = st.tuples(some, st.booleans()).map(lambda drawn: drawn[0] | ({"none": None} if drawn[1] else {}))
        mappings = st.sampled_from([dict, collections.OrderedDict, collections.UserDict, BatchEncoding])
        return st.one_of(st.builds(lambda kind, table: kind(table), mappings, named), st.builds(Pair, inner, inner))

    return st.recursive(flat, nested, max_leaves=4)


def num_rows(value: Any) -> int:
    """How many items a value has; its first column that is not None says it."""
    if isinstance(value, (dict, collections.UserDict, Pair)):
        inner = value if isinstance(value, tuple) else value.values()
        return next(num_rows(column) for column in inner if column is not None)
    return len(value)


def leaves() -> st.SearchStrategy[Any]:
    shapes = st.sampled_from([(), (), (0,), (1,), (5,), (3, 4), (2, 0, 3), (2, 3, 2), (70_000,)])
    dtypes: list[Any] = [*ARRAY_DTYPES, ">i4", np.dtype("U0"), np.dtypes.StringDType()]
    any_array = st.builds(laid_out, st.builds(array, st.sampled_from(ARRAY_DTYPES), shapes, seeds), layout_names)
    any_tensor = st.builds(laid_out, st.builds(tensor, st.sampled_from(TENSOR_DTYPES), shapes, seeds), layout_names)
    learnt = st.builds(tensor, st.sampled_from([torch.float32, torch.bfloat16]), shapes, seeds)
    return st.one_of(
        st.sampled_from([None, True, 3, 2.5, "text", b"bytes", 1j, range(3), math.inf]),
        any_array,
        any_tensor,
        learnt.map(lambda made: made.requires_grad_()),
        learnt.map(torch.nn.Parameter),
        st.builds(many, st.integers(32, 80), st.sampled_from(dtypes), seeds, st.sampled_from([list, tuple])),
        st.builds(many, st.integers(32, 80), st.sampled_from(TENSOR_DTYPES), seeds, st.sampled_from([list, tuple])),
    )


def many(count: int, dtype: Any, seed: int, kind: type) -> Any:
    """Many arrays or tensors of one dtype and of shapes that differ."""
    shapes = [[(4,), (1, 2), (), (0,), (2, 2, 1)][(seed + k * k) % 5] for k in range(count)]
    if isinstance(dtype, torch.dtype):
        return kind(tensor(dtype, shape, seed + k) for k, shape in enumerate(shapes))
    if isinstance(dtype, np.dtypes.StringDType):
        return kind(np.full(shape, "text", dtype) for shape in shapes)
    return kind(array(dtype, shape, seed + k) for k, shape in enumerate(shapes))


def nestings(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.builds(Pair, inner, inner),
            inner.map(lambda value: collections.OrderedDict(x=value)),
        )

    return st.recursive(leaf, nested, max_leaves=5)
