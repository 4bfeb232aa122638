"""The files of a sampling run: its ledger, its output, and the outputs of earlier runs that it takes completions from.

    samples.jsonl.ledger    one line a row of the dataset: what became of it, and its answers; written as the run goes
    samples.jsonl           one line an answer, the row's other columns beside it; made from the ledger at the end

The first line of the ledger says under which keys it was written. A kill leaves at most one line without its end,
which the next run takes away: a row is there whole, or it is sampled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayhelper import ConfigError
from trainers.data.rows import prompt_of
from trainers.data.sources import read_source
from trainers.sampling.candidates import answered

if TYPE_CHECKING:
    from datasets import Dataset

Entry = dict[str, Any]  # of one row; see ``Ledger.append``
OWN_COLUMNS = ("messages", "id", "rejected_response", "score", "prm_score", "orm_score")
STATES = ("kept", "easy", "no_positive", "failed")
COUNTED = ("num_candidates", "num_failed", "num_correct", "num_samples", "num_tokens")


class Ledger:
    """What became of each row so far, on disk; a context manager, open in one process at a time.

    ``ids`` are those of all rows of the dataset, ``deciding`` what else decides what a row becomes. ``anew`` forgets
    what is there, but not while another process writes it.

    Raises:
        ConfigError: another process writes it, or it belongs to other rows or keys.
    """

    def __init__(self, path: Path, deciding: Mapping[str, Any], ids: Sequence[str], *, anew: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.states: dict[int, str] = {}  # by the row's position in the dataset
        self.counts: Counter[str] = Counter()
        self.places: dict[int, int] = {}  # where a row's line begins
        self.file = path.open("a+b")
        try:
            self._lock()
            if anew:
                self.file.truncate(0)
            self._recover({"rows": len(ids), **deciding}, ids)
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def append(self, entries: Iterable[Entry]) -> None:
        """Writes what became of rows, and returns when that survives a kill and a power cut.

        An entry has ``row`` (its position), ``id``, ``state``, what is ``COUNTED``, ``answers`` (each its ``text`` and
        rewards), and where there is one the ``rejected`` text and a ``reason``. A later entry of a row replaces it.
        """
        lines = []
        for entry in entries:
            lines.append(_line(entry))
            self._note(entry, self.end)
            self.end += len(lines[-1])
        self.file.write(b"".join(lines))
        self._flush()

    def in_order(self, positions: Iterable[int]) -> Iterator[Entry]:
        """The entries of rows, as far as there are any."""
        with self.path.open("rb") as file:
            for position in positions:
                if position in self.places:
                    file.seek(self.places[position])
                    yield json.loads(file.readline())

    def _note(self, entry: Entry, place: int) -> None:
        row = entry["row"]
        if row in self.places:
            (old,) = self.in_order([row])
            self.counts.subtract(_counts_of(old))
        self.counts.update(_counts_of(entry))
        self.states[row] = entry["state"]
        self.places[row] = place

    def _recover(self, header: Entry, ids: Sequence[str]) -> None:
        """Notes the entries of whole lines and cuts off what follows; a ledger without any gets its first line."""
        self.end = 0
        self.file.seek(0)
        for line in self.file:
            if not line.endswith(b"\n"):
                break
            if self.end:
                entry = json.loads(line)
                self._check_same_row(entry, ids)
                self._note(entry, self.end)
            else:
                self._check_same_keys(json.loads(line), header)
            self.end += len(line)
        self.file.truncate(self.end)
        if not self.end:
            line = _line(header)
            self.file.write(line)
            self.end = len(line)
            self._flush()

    def _check_same_keys(self, written: Entry, header: Entry) -> None:
        changed = [
            f"{name} was {written.get(name)!r} and is {header.get(name)!r}"
            for name in {**written, **header}
            if written.get(name) != header.get(name)
        ]
        if changed:
            raise ConfigError(
                f"resume: {self.path} belongs to a run under other keys ({'; '.join(changed)}). Undo these changes, "
                "choose another output_file, or set override_exist_file to start over."
            )

    def _check_same_row(self, entry: Entry, ids: Sequence[str]) -> None:
        if ids[entry["row"]] != entry["id"]:
            raise ConfigError(
                f"resume: row {entry['row']} of the dataset is not the one that {self.path} was written for. Use the "
                "original dataset, choose another output_file, or set override_exist_file to start over."
            )

    def _lock(self) -> None:
        """Until the file is closed, or the process ends, however it ends."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is writing {self.path}. Give this one another output_file, or its own data_range."
            ) from None
        except OSError:  # a file system without locks
            pass

    def _flush(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())


def _line(entry: Entry) -> bytes:
    return (json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")


def _counts_of(entry: Entry) -> dict[str, int]:
    return {"rows": 1, entry["state"]: 1, **{name: entry[name] for name in COUNTED}}


# Output


def write_output(path: Path, rows: Dataset, entries: Iterable[Entry]) -> None:
    """Writes the answers of the entries to a .jsonl or .parquet file, which is there whole or not at all.

    Columns: ``messages``, ``id``, ``rejected_response`` and rewards where there are any, and those of the row without
    its ``prompt``. A column of the row that has one of these names becomes ``source_<name>``.
    """
    unfinished = path.with_name(path.name + ".tmp")
    if path.suffix == ".parquet":
        _write_parquet(unfinished, rows, entries)
    else:
        kept = _kept_columns(rows.column_names)
        with unfinished.open("w", encoding="utf-8", errors="replace") as file:
            for entry in entries:
                row = rows[entry["row"]] if entry["answers"] else {}
                for sample in samples_of(entry, row, kept):
                    file.write(json.dumps(sample, ensure_ascii=False, default=plain) + "\n")
            file.flush()
            os.fsync(file.fileno())
    unfinished.replace(path)


def samples_of(entry: Entry, row: Mapping[str, Any], kept: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The lines of the output that a row gives; ``kept`` names its columns that go with them."""
    for answer in entry["answers"]:
        columns = {new: row[old] for old, new in kept.items()}
        rewards = {name: value for name, value in answer.items() if name != "text"}
        rejected = {"rejected_response": entry["rejected"]} if entry.get("rejected") is not None else {}
        yield {
            "messages": answered(prompt_of(row), answer["text"]),
            "id": entry["id"],
            **rejected,
            **rewards,
            **columns,
        }


def check_writable(path: Path, row: Mapping[str, Any]) -> None:
    """Raises ConfigError if a row has what the type of the output cannot hold."""
    for name, value in row.items() if path.suffix == ".jsonl" else ():
        try:
            json.dumps(value, default=plain)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"column {name!r} cannot be written as JSON ({error}); set output_file: samples.parquet"
            ) from None


def plain(value: Any) -> Any:
    """For JSON: arrays and scalars of NumPy as lists and numbers, dates as text."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _write_parquet(path: Path, rows: Dataset, entries: Iterable[Entry]) -> None:
    """The row's columns keep their types: they go from table to table."""
    import datasets

    kept = _kept_columns(rows.column_names)
    positions: list[int] = []
    samples: list[dict[str, Any]] = []
    for entry in entries:
        found = list(samples_of(entry, rows[entry["row"]], {}))
        positions += [entry["row"]] * len(found)
        samples += found
    columns = rows.select_columns(list(kept)).rename_columns({old: new for old, new in kept.items() if old != new})
    if not samples:
        columns.select([]).to_parquet(str(path))
        return
    table = read_source(samples)
    if kept:
        table = datasets.concatenate_datasets([table, columns.select(positions).flatten_indices()], axis=1)
    table.to_parquet(str(path))


def _kept_columns(names: Iterable[str]) -> dict[str, str]:
    """The columns of a row that go into the output, and what they are called there."""
    return {
        name: f"source_{name}" if name in OWN_COLUMNS else name for name in names if name not in ("prompt", "messages")
    }


# Rows and what earlier runs made of them


def row_id(row: Mapping[str, Any]) -> str:
    """The same for equal rows, 32 characters; a column that is null does not count."""
    text = json.dumps(_filled(row), sort_keys=True, default=_hashed)
    return hashlib.md5(text.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(item) for key, item in value.items() if item is not None}
    return [_filled(item) for item in value] if isinstance(value, list) else value


def _hashed(value: Any) -> Any:
    content = value.tobytes() if hasattr(value, "tobytes") else value if isinstance(value, bytes) else None
    if content is not None:
        return hashlib.md5(content, usedforsecurity=False).hexdigest()
    try:
        return plain(value)
    except TypeError:
        return str(value)


def cached_answers(files: Sequence[str]) -> dict[str, list[str]]:
    """What the assistant said last in the samples of earlier outputs, by the id of the row, in their order.

    Raises ConfigError for a file that is no output of sampling.
    """
    answers: dict[str, list[str]] = {}
    for file in files:
        try:
            rows = read_source(file)
        except (ValueError, FileNotFoundError) as error:
            raise ConfigError(f"cache_files: {error}") from error
        if not {"id", "messages"} <= set(rows.column_names):
            raise ConfigError(
                f"cache_files: {file} is not an output of sampling: it has the columns "
                f"{', '.join(rows.column_names)}, not id and messages"
            )
        for sample_id, messages in zip(rows["id"], rows["messages"], strict=True):
            answers.setdefault(sample_id, []).append(messages[-1]["content"])
    return answers
