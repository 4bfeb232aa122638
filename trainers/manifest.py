"""The manifest of a checkpoint: every file with its size and checksum, written when all else is on the disk.

    write_manifest(folder)      manifest.json: {"algorithm": "blake2b", "files": {"model.safetensors": [size, digest]}}
    damage(folder)              what the folder lacks of its manifest, in words; None if it is whole

Process 0 writes and reads it; the workers write the files that it lists. Several files are read at once, in threads:
hashing lets other threads run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from rayhelper.authenticated.own_files import is_alive

MANIFEST_FILE = "manifest.json"
ALGORITHM = "blake2b"
DIGEST_BYTES = 32
NUM_THREADS = 8


def write_manifest(folder: Path) -> None:
    """Lists every file below ``folder``. Nobody may write there any more. What killed writers left is removed."""
    unfinished = folder / f"{MANIFEST_FILE}.{os.getpid()}"
    paths = [path for path in _files(folder) if path.parent != folder or not path.name.startswith(MANIFEST_FILE)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        digests = list(pool.map(_digest, paths))
    listed = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, digest]
        for path, digest in zip(paths, digests, strict=True)
    }
    text = json.dumps({"algorithm": ALGORITHM, "files": listed}, indent=1)
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, folder / MANIFEST_FILE)  # a kill leaves no torn one
    for left_over in folder.glob(f"{MANIFEST_FILE}.*"):
        writer = left_over.suffix.removeprefix(".")
        if writer.isdigit() and not is_alive(int(writer)):
            left_over.unlink(missing_ok=True)


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file()


def damage(folder: Path) -> str | None:
    """What differs from the manifest, naming the file; None if nothing does, or if there is no manifest.

    Files that no manifest lists are not looked at. A folder that has not changed since is not read twice.
    """
    if not has_manifest(folder):
        return None
    stamps = []
    for path in _files(folder):
        stat = path.stat()
        stamps.append((str(path), stat.st_size, stat.st_ctime_ns, stat.st_ino))
    return _damage(folder, tuple(stamps))


@functools.lru_cache(maxsize=32)
def _damage(folder: Path, stamps: tuple[Any, ...]) -> str | None:
    """``stamps`` say what the answer holds for: names, sizes, times and numbers of the files."""
    try:
        found = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        algorithm = found["algorithm"]
        listed = {str(name): (int(size), str(digest)) for name, (size, digest) in found["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return f"{MANIFEST_FILE} cannot be read"
    if algorithm != ALGORITHM:
        return f"{MANIFEST_FILE} has checksums of {algorithm!r}, and only {ALGORITHM} is known"
    if not listed:
        return f"{MANIFEST_FILE} lists no file"
    for name, (size, _) in listed.items():
        path = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"{MANIFEST_FILE} lists {name}, which is outside of the folder"
        if not path.is_file():
            return f"{name} is not there"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, and was written with {size}"
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        digests = pool.map(_digest_if_read, [folder / name for name in listed])
        for (name, (_, digest)), seen in zip(listed.items(), digests, strict=True):
            if seen is None:
                return f"{name} cannot be read"
            if seen != digest:
                return f"{name} differs from the written file (checksum)"
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest_if_read(path: Path) -> str | None:
    """None for a file that the disk, or its rights, do not give."""
    try:
        return _digest(path)
    except OSError:
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()
