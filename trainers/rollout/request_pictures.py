"""Pictures in the requests of ms-swift's schedulers: ``<image>`` in a text is the place of the next of ``images``.

request.images = pictures_of(row)                     # what a scheduler reads: paths, base64 texts or PIL images
placed(added, request.images[known:], "Zoom.step")    # the messages of a step, with the pictures it added in them
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from trainers.data.images.conversations import MARKS

MARK = MARKS["image"]


def pictures_of(row: Mapping[str, Any]) -> list[Any]:
    """The pictures of a row as ms-swift gives them to a scheduler: a path or base64 as text; a PIL image stays one."""
    images = row.get("images") or row.get("image") or []
    return [_as_given(image) for image in (images if isinstance(images, (list, tuple)) else [images])]


def placed(messages: Sequence[Mapping[str, Any]], pictures: Sequence[Any], name: str) -> list[dict[str, Any]]:
    """The messages with ``pictures`` as parts in the places of ``<image>``; without pictures it is only text.

    Raises:
        ValueError: there are more or fewer places; ``name``: of what wrote the messages.
    """
    if not pictures:
        return [dict(message) for message in messages]
    texts = [message["content"] for message in messages]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} added images to a message that consists of parts. Write texts with {MARK} in them.")
    if (places := sum(text.count(MARK) for text in texts)) != len(pictures):
        raise ValueError(f"{name} added {len(pictures)} images, and texts with {places} places {MARK} for them")
    left = iter(pictures)
    found = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        for number, text in enumerate(message["content"].split(MARK)):
            parts += [{"type": "image", "image": next(left)}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
        found.append({**message, "content": parts} if len(parts) > 1 or MARK in message["content"] else dict(message))
    return found


def _as_given(image: Any) -> Any:
    value = (image.get("bytes") or image.get("path")) if isinstance(image, Mapping) else image
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
