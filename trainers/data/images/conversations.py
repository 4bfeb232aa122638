"""Rows with pictures: where in a conversation each picture stands.

    row, pictures = placed(row, max_pixels=None, urls=False)

Three ways to write a row, which may be mixed:

    {"messages": [{"role": "user", "content": "<image>What is it?"}, ...], "images": ["cat.png"]}         ms-swift
    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", ...}]}, ...], "images": [...]}   TRL
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, ...]}, ...]}        transformers

Pictures of the column take the places ``<image>`` and ``{"type": "image"}`` in order. If there are fewer places than
pictures, the first ones stand before the first message that is no system message, as in ms-swift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.data.images.pictures import DATA_URI, FILE_URI, PATH_KEYS, URL, Picture, is_base64, pictures_of

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ("images", "image")
CONVERSATIONS = ("prompt", "messages", "completion", "chosen", "rejected")  # in the order in which they are read
ANSWERS = ("completion", "chosen", "rejected")
MARK = "<image>"
RARE_SIDE, RARE_RATIO = 32, 20  # pixels; long to short side
TYPES = ("image", "image_url")  # of a part of a message
IN_PARTS = ("system", "user", "assistant")  # roles whose contents become lists of parts


def placed(
    row: Mapping[str, Any], *, max_pixels: int | None = None, urls: bool = False
) -> tuple[dict[str, Any], tuple[Picture, ...]]:
    """The row with conversations as chat templates of vision models read them, and its pictures in their order.

    Contents become lists of parts; a place of a picture is ``{"type": "image"}``.

    Raises:
        ValueError: more places than pictures, or fewer where contents are written in parts; a picture that is none;
            pictures beside a text that is no conversation.
    """
    column = [picture for name in COLUMNS for picture in pictures_of(row.get(name), max_pixels=max_pixels, urls=urls)]
    spoken = [name for name in CONVERSATIONS if isinstance(row.get(name), list)]
    if not spoken:
        if column:
            raise ValueError(
                f"the row has {len(column)} images and no conversation that says where they stand: its text is no list "
                "of messages. Write messages, or set system: '' to make conversations of texts"
            )
        return dict(row), ()
    turns = {name: [dict(message) for message in row[name]] for name in spoken}
    first = turns[spoken[0]]
    missing = len(column) - sum(num_places(message) for name in spoken for message in turns[name])
    in_parts = any(
        isinstance(m.get("content"), list) and m.get("role") == "user" for name in spoken for m in turns[name]
    )
    if missing > 0 and first and not in_parts:
        place = next((k for k, message in enumerate(first) if message.get("role") != "system"), 0)
        first[place]["content"] = MARK * missing + (first[place].get("content") or "")
        missing = 0
    if missing and column:
        raise ValueError(f"the row has {len(column)} images and {len(column) - missing} places for them")
    for name in ("chosen", "rejected"):
        if any(num_pictures(message, marks=bool(column)) for message in turns.get(name, ())):
            raise ValueError(f"{name} has an image: only the prompt of a pair may have images")
    rest, found = iter(column), []
    for name in spoken:
        for message in turns[name]:
            if message.get("role") in IN_PARTS and message.get("content") is not None:
                parts = as_parts(message["content"], marks=bool(column))
                message["content"], own = _with_places(parts, rest, max_pixels=max_pixels, urls=urls)
                found += own
    return {**row, **turns}, tuple(found)


def picture_mistake(
    row: Mapping[str, Any],
    *,
    max_pixels: int | None = None,
    urls: bool = False,
    tokens: Sequence[str] = (),
    process: Callable[[Any], object] | None = None,
) -> tuple[str, str] | None:
    """The column and what is wrong with the pictures of a row, if anything is; each is read.

    ``tokens``: texts that stand for parts of pictures or sounds, which no text may hold. ``process``: of the model's
    processor, which is asked about pictures of a rare shape.
    """
    for name in (*CONVERSATIONS, "text"):
        for token in tokens:
            if any(token in text for text in _texts(row.get(name))):
                kind = "sound" if "audio" in token.lower() else "picture"
                return name, f"a text holds {token!r}, which stands for a part of a {kind}"
    column = next((name for name in COLUMNS if row.get(name)), None)
    told = column or next((name for name in CONVERSATIONS if isinstance(row.get(name), list)), "images")
    try:
        _, pictures = placed(row, max_pixels=max_pixels, urls=urls)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        return told, str(error)
    for number, picture in enumerate(pictures):
        where = f"image {number}" + (f" {picture.source!r}" if isinstance(picture.source, str) else "")
        try:
            image = picture.image()
            if process is not None and is_rare(image):
                where += f" ({image.width} x {image.height} pixels)"
                process(image)
        except (OSError, ValueError, SyntaxError, ArithmeticError, RuntimeError, LookupError) as error:
            # of Pillow and of the processor, by what the file holds
            missing = isinstance(error, FileNotFoundError)
            return told, f"{where} {'does not exist' if missing else f'cannot be read: {error}'}"
    return None


def is_rare(image: Any) -> bool:
    """Whether some processors refuse a picture of this shape: thin or tiny."""
    short, long = sorted((image.width, image.height))
    return bool(short < RARE_SIDE or long > RARE_RATIO * short)


def has_pictures(rows: Dataset) -> bool:
    """Whether a column of a table can hold pictures: ``images``, or messages in parts."""
    return bool(set(COLUMNS) & set(rows.column_names)) or any(
        "image" in str(rows.features[name]) or "Json" in str(rows.features[name])
        for name in CONVERSATIONS
        if name in rows.column_names
    )


def with_folder(rows: Dataset, folder: Path) -> Dataset:
    """The rows of a file in ``folder``; relative paths of pictures that lie below it are absolute ones."""
    present = [name for name in (*COLUMNS, *CONVERSATIONS) if name in rows.column_names]
    if not present or not has_pictures(rows):
        return rows

    def moved(row: dict[str, Any]) -> dict[str, Any]:
        columns = {name: _moved(row[name], folder) for name in COLUMNS if name in present}
        return columns | {name: _moved_turns(row[name], folder) for name in CONVERSATIONS if name in present}

    return rows.map(moved, features=rows.features, desc="Looking for pictures")


def encoded(rows: Dataset) -> Dataset:
    """The rows with pictures as bytes and paths, which ``datasets`` would decode whenever a row is read."""
    from datasets import Image, List

    for name in [name for name in COLUMNS if name in rows.column_names]:
        feature = rows.features[name]
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            rows = rows.cast_column(name, List(Image(decode=False)))
    return rows


def num_places(message: Mapping[str, Any]) -> int:
    """Places in a message for pictures of the column."""
    content = message.get("content")
    if isinstance(content, str):
        return content.count(MARK)
    parts = content if isinstance(content, list) else []
    return sum(
        part.get("type") in TYPES and _own(part) is None
        if part.get("type") != "text"
        else str(part.get("text") or "").count(MARK)
        for part in parts
        if isinstance(part, Mapping)
    )


def num_pictures(message: Mapping[str, Any], *, marks: bool) -> int:
    """Pictures of a message, its own and those of the column; ``marks``: ``<image>`` is a place of one."""
    content = message.get("content")
    if isinstance(content, str):
        return content.count(MARK) if marks else 0
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return sum(part.get("type") in TYPES for part in parts)


def as_parts(content: Any, *, marks: bool) -> list[dict[str, Any]]:
    """A content as a list of parts; ``marks``: ``<image>`` is a place."""
    if not isinstance(content, str):
        parts = [{key: value for key, value in part.items() if value is not None} for part in content]
        if not marks:
            return parts
        split = (as_parts(p.get("text") or "", marks=True) if p.get("type") == "text" else [p] for p in parts)
        return [part for some in split for part in some]
    if not marks or MARK not in content:
        return [{"type": "text", "text": content}]
    found: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(MARK)):
        found += [{"type": "image"}] if number else []
        found += [{"type": "text", "text": text}] if text else []
    return found


def _with_places(
    parts: Sequence[Mapping[str, Any]], rest: Any, **options: Any
) -> tuple[list[dict[str, Any]], list[Picture]]:
    """The parts without the pictures themselves, and the pictures, those without one from ``rest``."""
    shown: list[dict[str, Any]] = []
    pictures: list[Picture] = []
    for part in parts:
        if part.get("type") not in TYPES:
            shown.append(dict(part))
            continue
        own = _own(part)
        picture = next(rest, None) if own is None else pictures_of(own, **options)[0]
        if picture is None:
            raise ValueError("a message has a place for an image that the row does not have")
        shown.append({"type": "image"})
        pictures.append(picture)
    return shown, pictures


def _texts(value: Any) -> list[str]:
    """The texts of a column: itself, or those of its messages."""
    if isinstance(value, str):
        return [value]
    contents = [message.get("content") for message in value or () if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return [text for text in (*contents, *texts) if isinstance(text, str)]


def _own(part: Mapping[str, Any]) -> Any:
    """The picture that a part of a message holds itself."""
    return next((part[key] for key in PATH_KEYS if part.get(key) is not None), None)


def _moved(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_moved(item, folder) for item in value]
    if isinstance(value, Mapping):
        return {key: _moved(item, folder) if key in PATH_KEYS else item for key, item in value.items()}
    if not isinstance(value, str) or is_base64(value) or URL.match(value) or DATA_URI.match(value):
        return value
    path = Path(value.removeprefix(FILE_URI)).expanduser()
    there = folder.absolute() / path
    return str(there) if not path.is_absolute() and there.is_file() else value


def _moved_turns(messages: Any, folder: Path) -> Any:
    def part_of(part: Any) -> Any:
        is_picture = isinstance(part, Mapping) and part.get("type") in TYPES
        return _moved(part, folder) if is_picture else part

    if not isinstance(messages, list):
        return messages
    return [
        {**message, "content": [part_of(part) for part in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
