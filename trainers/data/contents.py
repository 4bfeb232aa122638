"""A short text that tells whether rows are those of an earlier run: as many rows may have other contents."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from trainers.batch import Ragged

MOST_ROWS = 1024  # of a dataset are looked at, spread evenly; of token ids all
DIGEST_BYTES = 8


def contents_of(rows: Any) -> str:
    """The fingerprint of a typed batch, or of a ``datasets.Dataset`` by some of its rows.

    What models have computed is left out: it depends on the workers that did.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if hasattr(rows, "column_names"):
        places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_ROWS)).astype(np.int64))
        for row in rows.select(places):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    else:
        _add(digest, rows)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Ragged):
        _add(digest, value.values)
        _add(digest, np.diff(value.offsets))
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, list) and value and isinstance(value[0], tuple):  # pictures
        digest.update(hashlib.blake2b(repr(_sources(value)).encode()).digest())
    elif is_dataclass(value):
        for one in fields(value):
            if one.name == "images" and getattr(value, one.name) is None:  # as before there were pictures
                continue
            if one.name not in ("row_ids", "kl") and not one.name.startswith("ref_"):
                digest.update(one.name.encode())
                _add(digest, getattr(value, one.name))


def _sources(pictures: Any) -> Any:
    inner = (one if isinstance(one, tuple) else one.source for one in pictures)
    return [_sources(one) if isinstance(one, tuple) else one for one in inner]
