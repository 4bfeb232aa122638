"""A picture as it travels: a path or the bytes of its file, never its pixels.

    pictures = pictures_of(row["images"], max_pixels=None, urls=False)     # [Picture(...), ...]
    pictures[0].image()                                                    # PIL.Image, RGB

Workers read a picture where they need its pixels. So a prompt's pictures cost a path, or once the bytes of a file, for
all completions of the prompt.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from trainers.data.images.videos import Video

DATA_URI = re.compile(r"data:(?:image|video)/[\w.+-]+;base64,", re.ASCII)
URL = re.compile(r"https?://", re.IGNORECASE)
ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+://", re.IGNORECASE | re.ASCII)  # of any kind
FILE_URI = "file://"
LONGEST_PATH = 4096  # characters; a longer text is base64
LEAST_BASE64 = 64
BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # of PNG, JPEG, GIF and WebP files in base64
BASE64 = re.compile(r"[A-Za-z0-9+/\n\r]+={0,2}\s*")  # in one line or in several
PATH_KEYS = ("path", "url", "image", "image_url", "base64", "bytes")  # where a mapping holds its picture
IN_MAPPING = ("bytes", *PATH_KEYS)  # in the order in which they are looked for
DOWNLOAD_TIMEOUT_S = 30


@dataclass(frozen=True)
class Picture:
    """A picture by the path of its file, or by the file's bytes.

    ``max_pixels``: a picture with more (width x height) is made smaller, as ms-swift's ``max_pixels`` does.
    """

    source: str | bytes
    max_pixels: int | None = None

    def image(self) -> Any:
        """The picture in memory, a ``PIL.Image`` in RGB, turned as its EXIF says: transformers' ``load_image``.

        Raises OSError or ValueError if it cannot be read.
        """
        from PIL import Image, UnidentifiedImageError

        file = self.source if isinstance(self.source, str) else io.BytesIO(self.source)
        try:
            with Image.open(file) as opened:
                image = in_rgb(opened)  # reads all of it
        except UnidentifiedImageError:  # its text names an object in memory
            raise ValueError("it is not a picture in a format that Pillow reads") from None
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from None
        if self.max_pixels is None or image.width * image.height <= self.max_pixels:
            return image
        ratio = image.width / image.height
        height = math.sqrt(self.max_pixels / ratio)
        return image.resize((max(1, int(height * ratio)), max(1, int(height))))

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells pictures apart: equal keys, equal pixels. A file that is written anew has another key."""
        if isinstance(self.source, bytes):
            return hashlib.blake2b(self.source, digest_size=16).digest(), self.max_pixels
        status = Path(self.source).stat()
        return self.source, status.st_mtime_ns, status.st_size, self.max_pixels

    def __repr__(self) -> str:
        shown = repr(self.source) if isinstance(self.source, str) else f"{len(self.source)} bytes"
        return f"Picture({shown})"


def in_rgb(image: Any) -> Any:
    """A ``PIL.Image`` of any mode in RGB, turned as its EXIF says."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image).convert("RGB")


Medium: TypeAlias = "Picture | Video"
# Of a row: of its one document, or of each of them
Pictures: TypeAlias = "tuple[Medium, ...] | tuple[tuple[Medium, ...], ...]"


def pictures_of(value: Any, *, max_pixels: int | None = None, urls: bool = False) -> list[Picture]:
    """The pictures of a column ``images``: None, one picture, or a list of them.

    A picture is a path, a base64 text (with or without ``data:image/png;base64,``), bytes, a ``PIL.Image``, or a
    mapping with one of these as ``path``, ``bytes``, ``url``, ``image``, ``image_url`` or ``base64``. ``urls``: a
    picture of an http address is downloaded.

    Raises:
        ValueError: something that is no picture, or an address without ``urls``. Whether a file is there and holds a
            picture is not asked here.
    """
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        if any(item is None for item in value):
            raise ValueError("a picture of the list is null")
        return [_picture(item, max_pixels, urls) for item in value]
    return [_picture(value, max_pixels, urls)]


def _picture(value: Any, max_pixels: int | None, urls: bool) -> Picture:
    if isinstance(value, Mapping):
        found = next((value[key] for key in IN_MAPPING if value.get(key) is not None), None)
        if found is None:
            raise ValueError(
                f"a picture that is a mapping needs path or bytes; this one has {', '.join(value) or '{}'}"
            )
        return _picture(found, max_pixels, urls)
    if isinstance(value, (bytes, bytearray, memoryview)):
        text = text_of(bytes(value))
        return Picture(bytes(value), max_pixels) if text is None else _picture(text, max_pixels, urls)
    if isinstance(value, Path):
        return Picture(str(value), max_pixels)
    if is_image(value):
        written = io.BytesIO()
        in_rgb(value).save(written, "PNG")
        return Picture(written.getvalue(), max_pixels)
    if not isinstance(value, str):
        raise ValueError(f"a picture is a path, bytes, base64 or a PIL.Image, not {type(value).__name__}")
    if match := DATA_URI.match(value):
        return Picture(decoded_base64(value[match.end() :]), max_pixels)
    if URL.match(value):
        if not urls:
            raise ValueError(
                f"{value[:80]!r} is an address. RayHelper downloads nothing unless you allow it. Set image_urls: "
                "true, or "
                "give a path"
            )
        return Picture(downloaded(value), max_pixels)
    if is_base64(value):
        return Picture(decoded_base64(value), max_pixels)
    check_path(value, "picture")
    path = value.removeprefix(FILE_URI)
    return Picture(str(Path(path).expanduser().absolute()), max_pixels)


def is_image(value: Any) -> bool:
    """Whether a value is a ``PIL.Image``."""
    return hasattr(value, "tobytes") and hasattr(value, "save")


def check_path(text: str, what: str) -> None:
    """Raises ValueError if a text is no path of a picture or video."""
    if not text.strip():
        raise ValueError(f"the path of a {what} is an empty text")
    if match := ADDRESS.match(text):
        raise ValueError(f"{text[:80]!r} is an address of {match[0]}, which RayHelper cannot read. Give a path")


def is_base64(text: str) -> bool:
    """Whether a text is a picture's bytes in base64 rather than a path: it is too long for one, or begins as one."""
    return len(text) > LONGEST_PATH or (
        len(text) >= LEAST_BASE64 and text.startswith(BEGINNINGS) and BASE64.fullmatch(text) is not None
    )


def text_of(value: bytes) -> str | None:
    """The text that bytes are: a table whose column holds paths and bytes makes bytes of all of them."""
    try:
        text = value.decode() if len(value) <= LONGEST_PATH else ""
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() and text else None


def decoded_base64(text: str) -> bytes:
    """The bytes that a text is, in one line or in several. Raises ValueError if it is no base64."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{text[:20]!r}... ({len(text)} characters) is not base64: {error}") from None


def downloaded(url: str) -> bytes:
    """The file of an http address. Raises ValueError if it does not come."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as answer:
            content: bytes = answer.read()
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise ValueError(f"{url[:80]!r} cannot be downloaded: {error}") from None
    return content
