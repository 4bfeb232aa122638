"""Where rows come from: files, folders, registered datasets, the hub, or memory.

What columns must be called and hold is not decided here: that is ``rows.py``.
"""

from __future__ import annotations

import contextlib
import glob
import inspect
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayhelper.text import DID_YOU_MEAN, is_unicode, nearest
from trainers.data.broken_rows import warn_left_out
from trainers.data.held_out import Part
from trainers.data.images.conversations import has_pictures, of_one_type, with_folder
from trainers.data.images.in_memory import for_table, unreadable
from trainers.plugins import DATASETS, exits_are_errors

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SPLIT_SEED = 42  # of the rows that a mixture holds back
COUNTED = re.compile(r"(.+)#(:?)([0-9]+)", re.DOTALL)
FILE_TYPES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def read_source(
    source: Any, split: str = "train", *, skip_broken: bool = False, columns: Mapping[str, str] | None = None
) -> Dataset:
    """The rows of a source, as they are.

    A source is a file or a list of them (.jsonl, .json, .parquet, .csv; patterns with ``*`` too), a folder of files or
    of ``save_to_disk``, a registered dataset, a hub name (``name`` or ``name:configuration``), a Dataset, a list of
    mappings, or one of TRL's forms: ``{path: ..., name: ...}``, ``{datasets: [{path: ..., fraction: ...}, ...]}``.
    ``split`` chooses among the splits of folders, hub and registered datasets. ``name#500`` are 500 rows of a named
    source, drawn without repetition, the same in every run; ``name#:500`` are its first 500. Of a source that has
    fewer, some come again. A ``Part`` of a source is read too. ``skip_broken`` leaves out lines of a .jsonl file that
    are no JSON objects in UTF-8, and rows whose text is none. ``columns``: what columns will be called, from the
    source's name to ours. Nothing is renamed here, but paths of pictures in them start in the folder of their file.

    Raises FileNotFoundError or ValueError saying what is wrong and what there is instead.
    """
    import datasets

    options: dict[str, Any] = {"skip_broken": skip_broken, "columns": columns}
    if isinstance(source, Part):
        return _read_part(source, split, **options)
    if isinstance(source, datasets.Dataset):
        return source
    if isinstance(source, Mapping):  # DatasetDict too
        if isinstance(source.get("datasets"), list):
            return read_mixture(source["datasets"], split, source.get("test_split_size"), **options)
        if isinstance(source.get("path"), str):
            return read_part(source, split, **options)
        if split not in source:
            raise ValueError(
                f"there is no split {split!r}.{nearest(split, source, DID_YOU_MEAN)} Splits: {', '.join(source)}."
            )
        return read_source(source[split], split, **options)
    if isinstance(source, (str, Path)):
        return _read_named(str(source), split, **options)
    items = list(source)
    if items and all(isinstance(item, (str, Path)) for item in items):
        return _joined([read_source(item, split, **options) for item in items])
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(f"row {index} of the dataset is a {type(item).__name__}: rows are mappings of columns")
    if broken := {index: why for index, item in enumerate(items) if (why := _mistake(item))}:
        first, why = next(iter(broken.items()))
        told = f"{len(broken)} of {len(items)} rows are broken: row {first} {why}"
        if not skip_broken:
            raise ValueError(f"{told}. Correct it, or set skip_broken_rows: true.")
        warn_left_out(len(broken), "skip_broken_rows: %s. They are left out.", told)
        items = [item for index, item in enumerate(items) if index not in broken]
    names = list(dict.fromkeys(name for item in items for name in item))
    rows = for_table([{name: item.get(name) for name in names} for item in items])
    return datasets.Dataset.from_list(rows, on_mixed_types="use_json")


def read_mixture(
    parts: Sequence[Mapping[str, Any]], split: str = "train", test_split_size: float | int | None = None, **options: Any
) -> Dataset:
    """The rows of several sources, one after the other: what ``trl.get_dataset`` makes of a DatasetMixtureConfig.

    ``fraction`` of a part is its share of the mixture: shares are divided by their sum, and the mixture is as large as
    it can be without a row that comes twice; each part gives its first rows. ``test_split_size`` (a share, or
    rows) holds back rows drawn at random, the same in every run, as the split ``test``. ``options``: as
    ``read_source``.

    Raises ValueError if some parts have a fraction and others none, or for a split that a mixture does not have.
    """
    tables = [read_part(part, part.get("split", "train"), **options) for part in parts]
    shares: list[Any] = [part.get("fraction") for part in parts]
    if any(share is not None for share in shares):
        if any(share is None or share < 0 for share in shares) or not sum(shares):
            raise ValueError(f"datasets: fraction must be given for all, and be positive, or for none; got {shares}")
        weights = [share / sum(shares) for share in shares]
        total = min(len(table) / weight for table, weight in zip(tables, weights, strict=True) if weight)
        tables = [table.select(range(round(w * total))) for table, w in zip(tables, weights, strict=True)]
    mixture = _joined(tables)
    splits: Mapping[str, Dataset] = {"train": mixture}
    if test_split_size is not None:
        splits = mixture.train_test_split(test_size=test_split_size, seed=SPLIT_SEED)
    if split not in splits:
        raise ValueError(
            f"datasets: a mixture has the splits {', '.join(splits)}, not {split!r}. test_split_size holds back rows "
            "as the split test."
        )
    return splits[split]


def read_part(part: Mapping[str, Any], split: str = "train", **options: Any) -> Dataset:
    """The rows of one source in TRL's words: ``path``, ``name``, ``data_dir``, ``data_files``, ``columns``."""
    path, further = part["path"], {key: part[key] for key in ("name", "data_dir", "data_files") if part.get(key)}
    if further:
        import datasets

        try:
            rows = datasets.load_dataset(path, split=split, **further)
        except Exception as error:
            said = ", ".join(f"{key} {value!r}" for key, value in further.items())
            raise ValueError(f"dataset {path!r} with {said}: {type(error).__name__}: {error}") from error
    else:
        rows = read_source(path, split, **options)
    wanted = part.get("columns")
    if wanted is not None:
        for name in wanted:
            if name not in rows.column_names:
                near = nearest(name, rows.column_names, DID_YOU_MEAN)
                raise ValueError(f"datasets: {path!r} has no column {name!r}.{near}")
        rows = rows.select_columns(list(wanted))
    return rows


def stream_source(source: Any, split: str = "train") -> IterableDataset:
    """The rows of a source, read as they are asked for. Files, folders and the hub are never held as a whole.

    ``source`` is what ``read_source`` takes; rows in memory, registered datasets and mixtures with fractions are read
    whole first.
    """
    import datasets

    if isinstance(source, Mapping) and isinstance(source.get("datasets"), list):
        parts = source["datasets"]
        if source.get("test_split_size") is None and all(part.get("fraction") is None for part in parts):
            streams = [_stream_part(part, part.get("split", "train")) for part in parts]
            return datasets.concatenate_datasets(streams)
    elif isinstance(source, Mapping) and isinstance(source.get("path"), str):
        return _stream_part(source, split)
    elif isinstance(source, list) and source and all(isinstance(item, (str, Path)) for item in source):
        return datasets.concatenate_datasets([stream_source(item, split) for item in source])
    elif isinstance(source, (str, Path)) and source not in DATASETS and "#" not in str(source):
        path = Path(source).expanduser()
        if path.is_dir() and not {"state.json", "dataset_dict.json"} & {file.name for file in path.iterdir()}:
            return datasets.load_dataset(str(path), split=split, streaming=True)
        files = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(str(source)) else [str(path)]
        types = {FILE_TYPES.get(Path(file).suffix) for file in files}
        if empty := [file for file in files if Path(file).is_file() and not Path(file).stat().st_size]:
            raise ValueError(f"dataset file {empty[0]} is empty: it has no rows")
        if len(types) == 1 and (kind := types.pop()) and all(Path(file).is_file() for file in files):
            return datasets.load_dataset(kind, data_files=files, split="train", streaming=True)
    return read_source(source, split).to_iterable_dataset()


def _stream_part(part: Mapping[str, Any], split: str) -> IterableDataset:
    import datasets

    further = {key: part[key] for key in ("name", "data_dir", "data_files") if part.get(key)}
    if further:
        rows = datasets.load_dataset(part["path"], split=split, streaming=True, **further)
    else:
        rows = stream_source(part["path"], split)
    return rows if part.get("columns") is None else rows.select_columns(list(part["columns"]))


def _mistake(item: Mapping[str, Any]) -> str | None:
    """Why a table cannot hold a row."""
    if not _is_unicode(item):
        return "holds text that is not Unicode (half a surrogate pair)"
    kind = unreadable(item)
    return kind and f"has a picture of type {kind}: a picture is a path, bytes, base64 or a PIL.Image"


def _is_unicode(value: Any) -> bool:
    """Whether all texts in a value can be written as UTF-8."""
    if isinstance(value, str):
        return is_unicode(value)
    if isinstance(value, Mapping):
        return all(_is_unicode(item) for pair in value.items() for item in pair)
    return all(map(_is_unicode, value)) if isinstance(value, (list, tuple)) else True


def _read_named(name: str, split: str, skip_broken: bool = False, columns: Mapping[str, str] | None = None) -> Dataset:
    """The dataset behind a name: registered, a pattern, a folder, a file, or on the hub."""

    whole, count, is_first = counted(name)
    if count is not None:
        return _taken(_read_named(whole, split, skip_broken, columns), count, is_first)
    if name in DATASETS:
        function = DATASETS[name]
        takes_split = "split" in inspect.signature(function).parameters
        with exits_are_errors(f"dataset {name!r}"):
            found = function(split=split) if takes_split else function()
        return read_source(found, split, skip_broken=skip_broken, columns=columns)
    path = Path(name).expanduser()
    if path.is_dir():
        return _read_folder(path, split, columns)
    if path.is_file():
        return read_files([path], skip_broken, columns)
    if glob.has_magic(name):
        files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True))]
        if not files:
            raise FileNotFoundError(f"no file matches {name!r}. {_beside(path)}")
        return read_files(files, skip_broken, columns)
    if path.suffix in FILE_TYPES or name.startswith(("/", "./", "../", "~")):
        raise FileNotFoundError(f"dataset file {name!r} does not exist. {_beside(path)}")
    return _read_hub(name, split)


def _read_folder(path: Path, split: str, columns: Mapping[str, str] | None) -> Dataset:
    import datasets

    is_saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    try:
        found = datasets.load_from_disk(str(path)) if is_saved else datasets.load_dataset(str(path), split=split)
    except Exception as error:  # of any kind, by what the folder holds
        reason = error if error.__cause__ is None else error.__cause__
        told = " ".join(str(reason).split())
        raise ValueError(
            f"folder {str(path)!r} cannot be read as a dataset: {type(reason).__name__}: {told}"
        ) from error
    return read_source(found, split) if is_saved else with_folder(found, path, columns)


def _read_part(part: Part, split: str, **options: Any) -> Dataset:
    """The rows of a part; each source of a list by itself."""
    source = part.source
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, (str, Path)) for item in source):
        return _joined([_read_part(part.of(item), split, **options) for item in source])
    whole, count, is_first = counted(source) if isinstance(source, (str, Path)) else (source, None, False)
    rows = read_source(whole, split, **options)
    return rows.select(part.indices(len(rows), count, is_first=is_first))


def counted(source: str | Path) -> tuple[str, int | None, bool]:
    """The source whose rows ``name#500`` or ``name#:500`` are, how many (None: all), and whether they are the first."""
    match = COUNTED.fullmatch(str(source))
    return (match[1], int(match[3]), bool(match[2])) if match else (str(source), None, False)


def _taken(rows: Dataset, count: int, is_first: bool) -> Dataset:
    """``count`` of the rows, drawn in an order of their own or the first ones; all of them before any comes again."""
    if is_first:
        return rows.select(np.resize(np.arange(len(rows)), count))
    orders = [np.random.default_rng([0, k]).permutation(len(rows)) for k in range(-(-count // max(1, len(rows))))]
    return rows.select(np.concatenate([np.array([], np.int64), *orders])[:count])


def read_files(files: list[Path], skip_broken: bool = False, columns: Mapping[str, str] | None = None) -> Dataset:
    """The rows of files, whatever is registered under their names. ``columns``: as of ``read_source``."""
    import datasets

    types = {file.suffix for file in files}
    if unknown := types - FILE_TYPES.keys():
        raise ValueError(f"{files[0]}: cannot read files of type {sorted(unknown)}; known: {', '.join(FILE_TYPES)}")
    if len({FILE_TYPES[suffix] for suffix in types}) > 1:
        return _joined([read_files([file], skip_broken, columns) for file in files])
    for file in files:
        if not file.stat().st_size:
            raise ValueError(f"dataset file {file} is empty: it has no rows")
    try:
        for file in files:
            check_constants(file)
        with _without_its_errors():
            names = [str(file) for file in files]
            rows = datasets.load_dataset(FILE_TYPES[types.pop()], data_files=names, split="train")
        rows.data.validate(full=True)  # bytes that are not UTF-8 are read as text unseen
        are_apart = len({file.parent for file in files}) > 1
        if are_apart and has_pictures(rows, columns):  # whose paths are relative to their file
            return _joined([read_files([file], skip_broken, columns) for file in files])
        return with_folder(rows, files[0].parent, columns)
    except Exception as error:
        told = [mistake for file in files if file.suffix == ".jsonl" for mistake in _line_mistakes(file)]
        if not told:
            raise ValueError(f"cannot read {', '.join(map(str, files))}: {type(error).__name__}: {error}") from error
        if not skip_broken:
            more = f" ({len(told) - 1} further lines are broken too)" if len(told) > 1 else ""
            raise ValueError(f"{told[0]}{more}. Correct it, or set skip_broken_rows: true.") from error
        first = "skip_broken_rows: %d lines are broken and left out; the first: %s"
        warn_left_out(len(told), first, len(told), told[0])
        return read_source([row for file in files for row in _unbroken_rows(file)])


def check_constants(file: Path) -> None:
    """Raises ValueError if a file of JSON holds a bare NaN or Infinity.

    Arrow does not read these. ``datasets`` gives such a file to pandas, which makes numbers of all texts such as "2".
    """
    if FILE_TYPES.get(file.suffix) != "json":
        return
    with file.open("rb") as lines:
        found = any(_holds_constant(line) for line in lines)
    if found or (file.suffix == ".json" and _holds_constant(file.read_bytes())):  # an object over many lines
        raise ValueError("it holds NaN or Infinity, which are not JSON values. Write null")


def _holds_constant(text: bytes) -> bool:
    if b"NaN" not in text and b"Infinity" not in text:
        return False
    try:
        json.loads(text, parse_constant=_refused)
    except _ConstantError:
        return True
    except (ValueError, RecursionError):  # not JSON by itself
        pass
    return False


class _ConstantError(ValueError):
    """A bare NaN, Infinity or -Infinity."""


def _refused(constant: str) -> Any:
    raise _ConstantError(f"it holds {constant}, which is not a JSON value (write null)")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Raises ValueError for a key that stands in it twice: which one is meant?"""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it holds the key {twice!r} twice in one object")
    return found


@contextlib.contextmanager
def _without_its_errors() -> Iterator[None]:
    """Inside, ``datasets`` logs no error: what is wrong with a file is in the error that is raised."""
    import datasets

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def _joined(parts: list[Dataset]) -> Dataset:
    """The rows of all parts. Columns they share get the first part's types: a CSV's strings are not a JSON's."""
    import datasets

    parts = of_one_type(parts)
    wanted = {name: kind for name, kind in parts[0].features.items() if kind != datasets.Value("null")}
    try:
        alike = [
            part.cast(datasets.Features({k: wanted.get(k, v) for k, v in part.features.items()})) for part in parts
        ]
        return datasets.concatenate_datasets(alike)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the files of the dataset hold columns of different types: {error}") from error


def _line_mistakes(file: Path) -> Iterator[str]:
    """What is wrong with each line of a .jsonl file that is not one JSON object."""
    for number, found in _parsed_lines(file):
        if isinstance(found, str):
            yield f"{file}:{number} {found}"


def _unbroken_rows(file: Path) -> Iterator[dict[str, Any]]:
    for _, found in _parsed_lines(file):
        if not isinstance(found, str):
            yield found


def _parsed_lines(file: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Every line that is not blank with its number, from 1: its row, or what is wrong with it."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text, parse_constant=_refused, object_pairs_hook=_once_each)
            except UnicodeDecodeError as error:
                yield number, f"is not UTF-8: {error.reason} at byte {error.start}"
                continue
            except (ValueError, RecursionError) as error:
                shown = line.decode("utf-8", errors="replace").strip()[:80]
                yield number, f"is not JSON: {error}. The line: {shown!r}"
                continue
            if not isinstance(row, dict):
                yield number, f"is not a JSON object of columns: {line.strip()[:80].decode(errors='replace')!r}"
            elif not _is_unicode(row):
                yield number, "holds text that is not Unicode (half a surrogate pair)"
            else:
                yield number, row


def _read_hub(name: str, split: str) -> Dataset:
    import datasets

    path, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(path, configuration or None, split=split)
    except Exception as error:
        raise ValueError(
            f"dataset {name!r} is not a file, a folder or a registered dataset (registered: "
            f"{', '.join(DATASETS) or 'none'}), and the hub has none: {type(error).__name__}: {error}."
            f"{nearest(name, DATASETS, DID_YOU_MEAN)} {_beside(Path(name))}"
        ) from error


def _beside(path: Path) -> str:
    """What there is where ``path`` should be: the end of an error message."""
    folder = path.parent
    while glob.has_magic(str(folder)) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"Folder {folder} does not exist either."
    known = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or entry.suffix in FILE_TYPES)
    near = nearest(path.name, known, "Did you mean {!r}? ")
    return f"{near}In {folder}: {', '.join(known[:10]) or 'no data files'}."


def shown(source: Any) -> str:
    """How an error message calls a source."""
    return repr(str(source)) if isinstance(source, (str, Path)) else f"of type {type(source).__name__}"


def with_fields(rows: Dataset, columns: Mapping[str, str]) -> Dataset:
    """The rows with the fields that ``columns`` names (``extra_info.question``) as columns of their own.

    A field that becomes ``prompt`` replaces the rows' own ``prompt``, unless that column is renamed. The column that
    holds the field stays as it is. What is no field of a column is left for the caller to report.
    """
    import datasets

    given = rows
    for path, new in columns.items():
        parent = path.partition(".")[0]
        if path in given.column_names or parent not in given.column_names:
            continue
        field = given.select_columns([parent]).flatten()
        if path not in field.column_names:
            continue
        if new in rows.column_names and new not in (*columns, parent):
            rows = rows.remove_columns([new])
        rows = datasets.concatenate_datasets([rows, field.select_columns([path])], axis=1)
    return rows
