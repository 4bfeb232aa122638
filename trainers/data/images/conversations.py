"""Rows with pictures and videos: where in a conversation each of them stands.

    row, pictures = placed(row, max_pixels=None, urls=False)

Three ways to write a row, which may be mixed:

    {"messages": [{"role": "user", "content": "<image>What is it?"}, ...], "images": ["cat.png"]}         ms-swift
    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", ...}]}, ...], "images": [...]}   TRL
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, ...]}, ...]}        transformers

Pictures of the column take the places ``<image>`` and ``{"type": "image"}`` in order. If there are fewer places than
pictures, the first ones stand before the first message that is no system message, as in ms-swift. The same holds for
videos, with the column ``videos``, ``<video>`` and ``{"type": "video"}``. Below, *pictures* are both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainers.data.images.pictures import ADDRESS, DATA_URI, FILE_URI, PATH_KEYS, Medium, is_base64, pictures_of
from trainers.data.images.videos import VIDEO_KEYS, Video, video_of, videos_of

if TYPE_CHECKING:
    from datasets import Dataset

Kind = Literal["image", "video"]
OF_KINDS: dict[Kind, tuple[str, ...]] = {"image": ("images", "image"), "video": ("videos", "video")}
COLUMNS = (*OF_KINDS["image"], *OF_KINDS["video"])
CONVERSATIONS = ("prompt", "messages", "completion", "chosen", "rejected")  # in the order in which they are read
ANSWERS = ("completion", "chosen", "rejected")
MARKS: dict[Kind, str] = {"image": "<image>", "video": "<video>"}
MARK = MARKS["image"]
RARE_SIDE, RARE_RATIO = 32, 20  # pixels; long to short side
TYPES: dict[str, Kind] = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}  # of parts
A: dict[Kind, str] = {"image": "an image", "video": "a video"}
IN_PARTS = ("system", "user", "assistant")  # roles whose contents always become lists of parts


def placed(
    row: Mapping[str, Any], *, max_pixels: int | None = None, urls: bool = False
) -> tuple[dict[str, Any], tuple[Medium, ...]]:
    """The row with conversations as chat templates of vision models read them, and its pictures in their order.

    Contents become lists of parts; a place of a picture is ``{"type": "image"}``, of a video ``{"type": "video"}``.

    Raises:
        ValueError: more places than pictures, or fewer where contents are written in parts; a picture that is none;
            pictures beside a text that is no conversation.
    """
    columns: dict[Kind, list[Any]] = {
        "image": [
            one for name in OF_KINDS["image"] for one in pictures_of(row.get(name), max_pixels=max_pixels, urls=urls)
        ],
        "video": [one for name in OF_KINDS["video"] for one in videos_of(row.get(name), urls=urls)],
    }
    kinds = [kind for kind, column in columns.items() if column]
    spoken = [name for name in CONVERSATIONS if isinstance(row.get(name), list)]
    if not spoken:
        for kind in kinds:
            raise ValueError(
                f"the row has {len(columns[kind])} {kind}s, but its text is not a list of messages, which gives them "
                f"a place. Write messages, or set system: '' to make conversations of texts"
            )
        return dict(row), ()
    turns = {name: [dict(message) for message in row[name]] for name in spoken}
    first = turns[spoken[0]]
    in_parts = any(
        isinstance(m.get("content"), list) and m.get("role") == "user" for name in spoken for m in turns[name]
    )
    for kind in kinds:
        count = len(columns[kind])
        missing = count - sum(num_places(message, [kind]) for name in spoken for message in turns[name])
        if missing > 0 and first and not in_parts:
            place = next((k for k, message in enumerate(first) if message.get("role") != "system"), 0)
            first[place]["content"] = MARKS[kind] * missing + (first[place].get("content") or "")
        elif missing:
            raise ValueError(f"the row has {count} {kind}s and {count - missing} places for them")
    for name in ANSWERS:
        for kind in {kind for message in turns.get(name, ()) for kind in kinds_in(message, marks=kinds)}:
            further = ". Write messages, of which every turn may have some" if name == "completion" else ""
            raise ValueError(f"{name} has {A[kind]}: only the prompt may have {kind}s{further}")
    rest, found = {kind: iter(column) for kind, column in columns.items()}, []
    for name in spoken:
        for message in turns[name]:
            if message.get("content") is None:
                continue
            if message.get("role") in IN_PARTS or kinds_in(message, marks=kinds):
                parts = as_parts(message["content"], marks=kinds)
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
                return name, f"a text holds {token!r}, which is reserved for a part of a {kind}"
    column = next((name for name in COLUMNS if row.get(name)), None)
    told = column or next((name for name in CONVERSATIONS if isinstance(row.get(name), list)), "images")
    try:
        _, pictures = placed(row, max_pixels=max_pixels, urls=urls)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        return told, str(error)
    for number, picture in enumerate(pictures):
        kind = "video" if isinstance(picture, Video) else "image"
        before = sum(isinstance(one, Video) == (kind == "video") for one in pictures[:number])
        where = f"{kind} {before}" + (f" {picture.source!r}" if isinstance(picture.source, str) else "")
        try:
            if isinstance(picture, Video):
                if process is not None:
                    process(picture)
                continue
            image = picture.image()
            if process is not None and is_rare(image):
                where += f" ({image.width} x {image.height} pixels)"
                process(image)
        except (OSError, ValueError, SyntaxError, ArithmeticError, RuntimeError, LookupError) as error:
            # of Pillow and of the processor, by what the file holds
            missing = isinstance(error, FileNotFoundError)
            if missing and isinstance(picture, Video) and isinstance(picture.source, tuple):
                where += f", frame {getattr(error, 'filename', None)!r}"
            return told, f"{where} {'does not exist' if missing else f'cannot be read: {error}'}"
    return None


def is_rare(image: Any) -> bool:
    """Whether some processors refuse a picture of this shape: thin or tiny."""
    short, long = sorted((image.width, image.height))
    return bool(short < RARE_SIDE or long > RARE_RATIO * short)


def has_pictures(rows: Dataset, columns: Mapping[str, str] | None = None) -> bool:
    """Whether a column of a table can hold pictures: ``images``, or messages in parts.

    ``columns``: what columns will be called, from the table's name to ours.
    """
    return bool(_called(COLUMNS, rows, columns)) or any(
        any(kind in str(rows.features[name]) for kind in (*MARKS, "Json"))
        for name in _called(CONVERSATIONS, rows, columns)
    )


def _called(names: Sequence[str], rows: Dataset, columns: Mapping[str, str] | None) -> list[str]:
    """The columns of a table that have one of the names, or will have it."""
    return [name for name in rows.column_names if (columns or {}).get(name, name) in names]


def with_folder(rows: Dataset, folder: Path, columns: Mapping[str, str] | None = None) -> Dataset:
    """The rows of a file in ``folder``; relative paths of pictures and videos start there, and are absolute ones.

    One that is no file there, but in the current folder, stays as it is. ``columns``: as of ``has_pictures``.
    """
    media, spoken = (_called(names, rows, columns) for names in (COLUMNS, CONVERSATIONS))
    if not has_pictures(rows, columns):
        return rows

    def moved(row: dict[str, Any]) -> dict[str, Any]:
        made = {name: _moved(row[name], folder) for name in media}
        return made | {name: _moved_turns(row[name], folder) for name in spoken}

    return rows.map(moved, features=rows.features, desc="Looking for pictures")


def encoded(rows: Dataset) -> Dataset:
    """The rows with pictures as bytes and paths, which ``datasets`` would decode whenever a row is read."""
    import datasets

    # of videos in lists of frames nothing is decoded here
    features = [
        (name, kind) for name in COLUMNS if name in rows.column_names for kind in (datasets.Image, datasets.Video)
    ]
    for name, kind in features:
        feature = rows.features[name]
        if isinstance(feature, kind):
            rows = rows.cast_column(name, kind(decode=False))
        elif isinstance(getattr(feature, "feature", None), kind):
            rows = rows.cast_column(name, datasets.List(kind(decode=False)))
        elif isinstance(getattr(getattr(feature, "feature", None), "feature", None), kind):
            rows = rows.cast_column(name, datasets.List(datasets.List(kind(decode=False))))
    return rows


def of_one_type(tables: Sequence[Dataset]) -> list[Dataset]:
    """The tables with columns of pictures in one type, so that they can be joined; equal ones stay as they are."""
    import datasets

    tables = list(tables)
    empty = datasets.Value("null"), datasets.List(datasets.Value("null"))
    kind = datasets.List({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
    for name in OF_KINDS["image"]:
        found = [table.features[name] for table in tables if name in table.column_names]
        found = [feature for feature in found if feature not in empty]
        if all(feature == found[0] for feature in found):
            continue
        for number, table in enumerate(tables):
            if name in table.column_names:
                features = datasets.Features({**table.features, name: kind})
                tables[number] = encoded(table).map(_as_files, fn_kwargs={"name": name}, features=features)
    return tables


def _as_files(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    if row[name] is None:
        return {name: None}
    found = []
    for one in row[name] if isinstance(row[name], list) else [row[name]]:
        own = _own({"type": "image", **one}) if isinstance(one, Mapping) else one
        file = one.get("bytes") if isinstance(one, Mapping) else own if isinstance(own, bytes) else None
        found.append({"bytes": file, "path": own if file is None else None})
    return {name: found}


def num_places(message: Mapping[str, Any], kinds: Sequence[Kind] = tuple(MARKS)) -> int:
    """Places in a message for what columns of these kinds hold."""
    content = message.get("content")
    if isinstance(content, str):
        return sum(content.count(MARKS[kind]) for kind in kinds)
    parts = content if isinstance(content, list) else []
    return sum(
        TYPES.get(str(part.get("type"))) in kinds and _own(part) is None
        if part.get("type") != "text"
        else sum(str(part.get("text") or "").count(MARKS[kind]) for kind in kinds)
        for part in parts
        if isinstance(part, Mapping)
    )


def kinds_in(message: Mapping[str, Any], *, marks: Sequence[Kind] = ()) -> list[Kind]:
    """The kind of each picture and video of a message, its own and those of columns; ``marks``: as of ``as_parts``."""
    content = message.get("content")
    if isinstance(content, str):
        return [kind for kind in marks for _ in range(content.count(MARKS[kind]))]
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return [TYPES[str(part["type"])] for part in parts if part.get("type") in TYPES]


def as_parts(content: Any, *, marks: Sequence[Kind] = ()) -> list[dict[str, Any]]:
    """A content as a list of parts; ``marks``: the kinds of which ``<image>`` and ``<video>`` are places."""
    if not isinstance(content, str):
        parts = [{key: value for key, value in part.items() if value is not None} for part in content]
        if not marks:
            return parts
        split = (as_parts(p.get("text") or "", marks=marks) if p.get("type") == "text" else [p] for p in parts)
        return [part for some in split for part in some]
    kinds = {MARKS[kind]: kind for kind in marks}
    texts = re.split(f"({'|'.join(kinds)})", content) if kinds else [content]
    found = [{"type": kinds[text]} if text in kinds else {"type": "text", "text": text} for text in texts if text]
    return found or [{"type": "text", "text": content}]


def _with_places(
    parts: Sequence[Mapping[str, Any]], rest: Mapping[Kind, Any], *, max_pixels: int | None, urls: bool
) -> tuple[list[dict[str, Any]], list[Medium]]:
    """The parts without the pictures themselves, and the pictures, those without one from ``rest``."""
    shown: list[dict[str, Any]] = []
    pictures: list[Medium] = []
    for part in parts:
        kind = TYPES.get(str(part.get("type")))
        if kind is None:
            shown.append(dict(part))
            continue
        own = _own(part)
        if own is None:
            picture = next(rest[kind], None)
        elif kind == "video":
            picture = video_of(own, urls=urls)
        else:
            picture = pictures_of(own, max_pixels=max_pixels, urls=urls)[0]
        if picture is None:
            raise ValueError(f"a message has a place for {A[kind]} that the row does not have")
        shown.append({"type": kind})
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
    """The picture or video that a part of a message holds itself."""
    keys = VIDEO_KEYS if TYPES.get(str(part.get("type"))) == "video" else PATH_KEYS
    return next((part[key] for key in keys if part.get(key) is not None), None)


def _moved(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_moved(item, folder) for item in value]
    if isinstance(value, Mapping):
        return {key: _moved(item, folder) if key in (*PATH_KEYS, *VIDEO_KEYS) else item for key, item in value.items()}
    if not isinstance(value, str) or is_base64(value) or ADDRESS.match(value) or DATA_URI.match(value):
        return value
    path = Path(value.removeprefix(FILE_URI)).expanduser()
    there = folder.absolute() / path
    if not value or path.is_absolute() or (not there.is_file() and path.is_file()):
        return value
    return str(there)  # also of a file that is nowhere: what is told names the folder of the data


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
