"""TRL's mixtures of datasets are TRL's, and a stream of rows is what rows in memory are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from trainers.batch import Ragged, Sequences
from trainers.data.sources import read_source, stream_source
from trainers.data.streaming import RowStream, StreamedSequences


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two folders of data as the hub has them: 30 and 10 rows."""
    for name, count in (("a", 30), ("b", 10)):
        (tmp_path / name).mkdir()
        rows = [{"prompt": f"{name}{i}", "completion": str(i), "extra": i} for i in range(count)]
        (tmp_path / name / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [str(tmp_path / "a"), str(tmp_path / "b")]


MIXTURES: list[list[dict[str, Any]]] = [
    [{}, {}],
    [{"columns": ["prompt", "completion"]}, {"columns": ["prompt", "completion"]}],
    [{"fraction": 0.5}, {"fraction": 0.5}],
    [{"fraction": 3}, {"fraction": 1}],
    [{"fraction": 0.2}, {"fraction": 0.3}],
    [{"split": "train[:5]"}, {"data_files": "train.jsonl"}],
]


@pytest.mark.parametrize("parts", MIXTURES)
def test_a_mixture_is_that_of_trl(parts: list[dict[str, Any]], folders: list[str]) -> None:
    from trl import DatasetMixtureConfig, get_dataset

    described = [{"path": folder, **part} for folder, part in zip(folders, parts, strict=True)]
    theirs = get_dataset(DatasetMixtureConfig(datasets=[dict(part) for part in described]))["train"]
    ours = read_source({"datasets": described})
    assert ours.column_names == theirs.column_names
    assert ours.to_list() == theirs.to_list()


def test_rows_held_back_are_the_split_test(folders: list[str]) -> None:
    source = {"datasets": [{"path": folders[0]}], "test_split_size": 0.2}
    train, test = read_source(source), read_source(source, "test")
    assert (len(train), len(test)) == (24, 6)
    assert not set(train["prompt"]) & set(test["prompt"])
    with pytest.raises(ValueError, match="has the splits train, not 'test'"):
        read_source({"datasets": [{"path": folders[0]}]}, "test")


def test_one_configuration_of_a_folder(folders: list[str]) -> None:
    assert len(read_source({"path": folders[1], "data_files": "train.jsonl"})) == 10
    with pytest.raises(ValueError, match="has no column 'prompts'"):
        read_source({"datasets": [{"path": folders[0], "columns": ["prompts"]}]})


def test_a_stream_has_the_rows_of_the_source(folders: list[str], tmp_path: Path) -> None:
    file = f"{folders[0]}/train.jsonl"
    Dataset.from_list([{"prompt": "x"}]).save_to_disk(str(tmp_path / "saved"))
    DatasetDict({"train": Dataset.from_list([{"prompt": "y"}])}).save_to_disk(str(tmp_path / "both"))
    parts = {"datasets": [{"path": folder, "columns": ["prompt"]} for folder in folders]}
    sources: list[Any] = [file, folders[0], [file, f"{folders[1]}/*.jsonl"], f"{file}#7", parts]
    for source in [*sources, str(tmp_path / "saved"), str(tmp_path / "both"), [{"prompt": "z"}]]:
        assert list(stream_source(source)) == read_source(source).to_list(), source


def lengths(rows: list[dict[str, Any]]) -> Sequences:
    """A sequence for each row but every third: as long as the row's number says, and of that number."""
    kept = [row["extra"] for row in rows if row["extra"] % 3]
    ids = [np.full(number % 4 + 2, number, np.int64) for number in kept]
    ragged = Ragged.split(np.concatenate(ids), [len(one) for one in ids])
    return Sequences(ragged, Ragged.split(np.ones(len(ragged.values), bool), ragged.lengths))


@pytest.mark.parametrize("buffer", [0, 8])
def test_a_stream_goes_on_where_its_state_says(buffer: int, folders: list[str]) -> None:
    rows = RowStream(folders[0], buffer=buffer, chunk_rows=7)
    whole = StreamedSequences(rows, lengths, batch_size=3)
    expected = [whole.next() for _ in range(20)]
    for stop in (0, 1, 2, 5, 6, 7, 13):
        first = StreamedSequences(rows, lengths, batch_size=3)
        for _ in range(stop):
            first.next()
        second = StreamedSequences(rows, lengths, batch_size=3, state=json.loads(json.dumps(first.state)))
        assert [second.next() for _ in range(20 - stop)] == expected[stop:]


def test_an_epoch_of_a_stream_is_one_of_rows_in_memory(folders: list[str]) -> None:
    stream = StreamedSequences(RowStream(folders[0], chunk_rows=7), lengths, batch_size=6)
    batches = [stream.next() for _ in range(4)]
    assert [len(batch) for batch in batches] == [6, 6, 6, 2]  # 20 sequences: the last batch holds what is left
    everything = lengths(read_source(folders[0]).to_list())
    assert Sequences.concat(batches).input_ids == everything.input_ids
    assert [list(batch.row_ids) for batch in batches][-1] == [18, 19]
    assert stream.next().input_ids == batches[0].input_ids


def test_epochs_are_shuffled_apart(folders: list[str]) -> None:
    stream = StreamedSequences(RowStream(folders[0], buffer=8), lengths, batch_size=20)
    first, second = stream.next(), stream.next()
    assert sorted(first.input_ids.values) == sorted(second.input_ids.values)
    assert list(first.input_ids.values) != list(second.input_ids.values)


def test_a_source_without_rows_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"x\.jsonl is empty: it has no rows"):
        StreamedSequences(RowStream(str(tmp_path / "x.jsonl")), lengths, batch_size=2).next()
