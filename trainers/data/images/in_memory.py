"""Rows in memory with pictures, written so that a table can hold them.

    rows = for_table([{"images": ["cat.png"]}, {"images": [Image.open("dog.png")]}])   # a path and the bytes of a PNG

A column of a table has one type. It is JSON if rows differ in more than numbers and texts, or if messages have parts.
JSON holds no bytes and no ``PIL.Image``, so there a picture becomes a text ``data:image/png;base64,...``.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.data.images.conversations import COLUMNS, CONVERSATIONS, TYPES
from trainers.data.images.pictures import IN_MAPPING, is_image, pictures_of, text_of
from trainers.data.images.videos import VIDEO_KEYS

BYTES = (bytes, bytearray, memoryview)
PLAIN = (str, Path, int, float, *BYTES, type(None))
KEYS = (*IN_MAPPING, *VIDEO_KEYS)


def unreadable(row: Mapping[str, Any]) -> str | None:
    """The name of the type of something in the row that cannot be a picture or a frame, if there is one."""
    places = [row.get(name) for name in COLUMNS]
    places += [part.get(key) for part in _parts(row) for key in KEYS]
    found = (type(one).__name__ for place in places for one, _ in _leaves(place) if not _is_known(one))
    return next(found, None)


def for_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with pictures and frames as one type in each column; a column that has one already stays."""
    known: dict[int, bytes] = {}

    def file_of(image: Any) -> bytes:
        """The bytes of a ``PIL.Image``; one that comes in several rows is written once."""
        if id(image) not in known:
            source = pictures_of(image)[0].source
            assert isinstance(source, bytes)
            known[id(image)] = source
        return known[id(image)]

    def as_value(one: Any) -> Any:
        return file_of(one) if is_image(one) else str(one) if isinstance(one, Path) else one

    def as_text(one: Any) -> Any:
        one = as_value(one)
        if not isinstance(one, BYTES):
            return one
        text = text_of(bytes(one))
        return f"data:image/png;base64,{base64.b64encode(one).decode()}" if text is None else text

    made = [dict(row) for row in rows]
    for name in COLUMNS:
        values = [row.get(name) for row in made]
        for change in (_unwrapped, as_value, as_text):
            if _is_of_one_type(values):
                break
            values = [_changed(value, change) for value in values]
        for row, value in zip(made, values, strict=True):
            if name in row:
                row[name] = value
    for row in made:
        if not all(isinstance(part.get(key), (str, type(None))) for part in _parts(row) for key in KEYS):
            row |= {name: _with_texts(row[name], as_text) for name in CONVERSATIONS if isinstance(row.get(name), list)}
    return made


def _is_known(one: Any) -> bool:
    return isinstance(one, (*PLAIN, Mapping)) or is_image(one)


def _is_of_one_type(values: Sequence[Any]) -> bool:
    """Whether a column of a table holds the values as they are: all as deep in lists, and all of one kind."""
    kinds = {(depth, _kind(one)) for value in values for one, depth in _leaves(value) if one is not None}
    return len(kinds) < 2 and all(kind != "other" for _, kind in kinds)


def _kind(one: Any) -> Any:
    if isinstance(one, Mapping):
        inner = {key: _kind(value) for key, value in one.items() if value is not None}
        return "other" if {"image", "other"} & set(map(str, inner.values())) else tuple(sorted(inner))
    if isinstance(one, BYTES):
        return "file"
    return "text" if isinstance(one, str) else "image" if is_image(one) else "other"


def _leaves(value: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    """What lists of lists hold, and how deep."""
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one, depth + 1)
    else:
        yield value, depth


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    return [_changed(one, change) for one in value] if isinstance(value, (list, tuple)) else change(value)


def _unwrapped(one: Any) -> Any:
    """What a mapping holds as its picture or video; it itself if it holds none."""
    return next((one[key] for key in KEYS if one.get(key) is not None), one) if isinstance(one, Mapping) else one


def _parts(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of messages that stand for pictures and videos."""
    for name in CONVERSATIONS:
        for message in row[name] if isinstance(row.get(name), list) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, Mapping) and part.get("type") in TYPES:
                    yield part


def _with_texts(messages: Sequence[Any], as_text: Callable[[Any], Any]) -> list[Any]:
    def value_of(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: value_of(one) for key, one in value.items()}
        return _changed(value, lambda one: value_of(one) if isinstance(one, Mapping) else as_text(one))

    def part_of(part: Any) -> Any:
        return value_of(part) if isinstance(part, Mapping) and part.get("type") in TYPES else part

    return [
        {**message, "content": [part_of(part) for part in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
