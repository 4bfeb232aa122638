"""A video as it travels: the pictures of its frames, or the path or the bytes of a video file; never its pixels.

    videos = videos_of(row["videos"], urls=False)              # [Video(...), ...]
    frames, metadata = videos[0].read(video_processor)         # (T, H, W, 3), and when each frame was

All frames of a list are seen, at the rate at which the model samples videos. Of a file the model's own video processor
says which frames are seen. transformers' ``load_video`` decodes it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from trainers.data.images.pictures import (
    DATA_URI,
    FILE_URI,
    URL,
    Picture,
    check_path,
    decoded_base64,
    downloaded,
    pictures_of,
    text_of,
)

FPS = 2.0  # frames per second of a model whose video processor names none, as in Qwen's own code and in ms-swift
DECODERS = (("torchcodec", "torchcodec"), ("pyav", "av"), ("decord", "decord"), ("opencv", "cv2"))  # and their modules
VIDEO_KEYS = ("video", "video_url", "path", "url", "bytes", "frames")  # where a mapping holds its video
PICTURE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass(frozen=True)
class Video:
    """A video by its frames, or by the path or the bytes of its file."""

    source: str | bytes | tuple[Picture, ...]

    def read(self, part: Any) -> tuple[Any, dict[str, Any]]:
        """The frames that are seen, and what transformers calls the video's metadata. ``part``: the video processor.

        Raises:
            OSError or ValueError: a frame or the file cannot be read, or frames are of different sizes.
        """
        if not isinstance(self.source, tuple):
            return _decoded(self.source, part)
        frames = [np.asarray(picture.image()) for picture in self.source]
        if len(sizes := {frame.shape for frame in frames}) > 1:
            told = ", ".join(sorted(f"{width} x {height}" for height, width, _ in sizes))
            raise ValueError(f"its frames have different sizes: {told} pixels")
        rate = getattr(part, "fps", None) or FPS
        metadata = {"total_num_frames": len(frames), "fps": rate, "duration": len(frames) / rate}
        return np.stack(frames), metadata | {"frames_indices": list(range(len(frames)))}

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells videos apart, as of ``Picture``."""
        if isinstance(self.source, tuple):
            return "frames", *(picture.key for picture in self.source)
        return "video", *Picture(self.source).key

    def __repr__(self) -> str:
        is_listed = isinstance(self.source, tuple)
        return f"Video({len(self.source)} frames)" if is_listed else f"Video{repr(Picture(self.source))[7:]}"  # type: ignore[arg-type]


def videos_of(value: Any, *, urls: bool = False) -> list[Video]:
    """The videos of a column ``videos``: None, one video, or a list of them.

    A video is a list of frames (pictures as in ``pictures_of``), the path or the bytes of a video file, or a mapping
    with one of these under one of ``VIDEO_KEYS``. ``urls``: a file of an http address is downloaded.

    Raises:
        ValueError: something that is no video, or an address without ``urls``.
    """
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        if any(item is None for item in value):
            raise ValueError("a video of the list is null")
        return [video_of(item, urls=urls) for item in value]
    return [video_of(value, urls=urls)]


def video_of(value: Any, *, urls: bool = False) -> Video:
    """One video. Raises ValueError as ``videos_of``."""
    if isinstance(value, Mapping):
        found = next((value[key] for key in ("bytes", *VIDEO_KEYS) if value.get(key) is not None), None)
        if found is None:
            raise ValueError(f"a video that is a mapping needs path or frames; this one has {', '.join(value) or '{}'}")
        return video_of(found, urls=urls)
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError("a video is a list without frames")
        return Video(tuple(pictures_of(list(value), urls=urls)))
    if isinstance(value, (bytes, bytearray, memoryview)):
        text = text_of(bytes(value))
        return Video(bytes(value)) if text is None else video_of(text, urls=urls)
    if isinstance(value, Path):
        return video_of(str(value))
    if not isinstance(value, str):
        raise ValueError(f"a video is a list of frames, a path or bytes, not {type(value).__name__}")
    if URL.match(value):
        if not urls:
            raise ValueError(
                f"{value[:80]!r} is an address. RayHelper downloads nothing unless you allow it. Set image_urls: true, "
                "or give a path"
            )
        return Video(downloaded(value))
    if match := DATA_URI.match(value):
        return Video(decoded_base64(value[match.end() :]))
    check_path(value, "video")
    path = Path(value.removeprefix(FILE_URI)).expanduser().absolute()
    if path.suffix.lower() in PICTURE_FILES:
        raise ValueError(f"the video {value[:80]!r} is a picture. Write the frames of a video as a list in the list")
    return Video(str(path))


def _decoded(source: str | bytes, part: Any) -> tuple[Any, dict[str, Any]]:
    """The frames of a file that the video processor asks for, and the metadata."""
    from transformers.video_utils import load_video

    decoder = next((name for name, module in DECODERS if find_spec(module) is not None), None)
    if decoder is None:
        raise ValueError(
            "no decoder of video files is installed. Run pip install av (or torchcodec, or opencv-python), or give a "
            "list of frames"
        )
    if isinstance(source, bytes):
        with tempfile.NamedTemporaryFile() as file:
            file.write(source)
            file.flush()
            return _decoded(file.name, part)
    if not Path(source).is_file():
        raise FileNotFoundError(source)
    count = getattr(part, "num_frames", None)
    rate = {"fps": getattr(part, "fps", None) or FPS} if count is None else {"num_frames": count}

    def chosen(metadata: Any, **_: Any) -> Any:
        if metadata.total_num_frames < 1:
            raise ValueError(f"{decoder} finds no frames in it")
        return part.sample_frames(metadata=metadata, **rate)

    path: Any = source  # its annotations do not name paths
    frames, metadata = load_video(path, backend=decoder, sample_indices_fn=chosen)
    indices = [int(index) for index in metadata["frames_indices"]]
    return frames, {**metadata, "frames_indices": indices}
