"""A ledger that survives being cut anywhere, and the outputs made from it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rayhelper import ConfigError
from trainers.data.sources import read_source
from trainers.sampling.candidates import answered
from trainers.sampling.store import Entry, Ledger, cached_answers, check_writable, row_id, write_output

IDS = ["a", "b", "c"]
KEYS = {"seed": 1, "data_range": []}


def entry(row: int, state: str = "kept", texts: tuple[str, ...] = ("yes",), **more: Any) -> Entry:
    counted = {"num_candidates": 4, "num_failed": 1, "num_correct": 2, "num_samples": len(texts), "num_tokens": 9}
    answers = [{"text": text, "score": float(k)} for k, text in enumerate(texts)]
    return {"row": row, "id": IDS[row], "state": state, **counted, "answers": answers, **more}


ENTRIES = [entry(2), entry(0, "failed", (), reason="zu spät\u2028"), entry(1, texts=("1", "2"), rejected="3")]


def test_a_ledger_cut_anywhere_goes_on_from_its_last_whole_line(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with Ledger(whole, KEYS, IDS) as ledger:
        ledger.append(ENTRIES[:2])
        ledger.append(ENTRIES[2:])
    content = whole.read_bytes()
    ends = [k + 1 for k, byte in enumerate(content) if byte == ord("\n")]
    for size in {0, *range(1, len(content), 13), *ends, *(end - 1 for end in ends)}:
        cut = tmp_path / "cut"
        cut.write_bytes(content[:size])
        with Ledger(cut, KEYS, IDS) as ledger:
            num_whole = max(0, content[:size].count(b"\n") - 1)
            assert list(ledger.states) == [2, 0, 1][:num_whole]
            ledger.append(found for found in ENTRIES if found["row"] not in ledger.states)
            assert list(ledger.in_order(range(3))) == [ENTRIES[1], ENTRIES[2], ENTRIES[0]]
        assert cut.read_bytes() == content


def test_it_counts_what_became_of_rows_and_a_later_entry_replaces_an_earlier(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger", KEYS, IDS) as ledger:
        ledger.append(ENTRIES)
        assert {name: ledger.counts[name] for name in ("rows", "kept", "failed", "num_samples")} == {
            "rows": 3,
            "kept": 2,
            "failed": 1,
            "num_samples": 3,
        }
        ledger.append([entry(0)])
    with Ledger(tmp_path / "ledger", KEYS, IDS) as ledger:
        assert (ledger.counts["rows"], ledger.counts["kept"], ledger.counts["failed"]) == (3, 3, 0)
        assert list(ledger.in_order([0])) == [entry(0)]


def test_a_ledger_of_other_keys_or_rows_is_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger", KEYS, IDS) as ledger:
        ledger.append(ENTRIES)
    with pytest.raises(ConfigError, match="seed was 1 and is 2"):
        Ledger(tmp_path / "ledger", {**KEYS, "seed": 2}, IDS)
    with pytest.raises(ConfigError, match="rows was 3 and is 4"):
        Ledger(tmp_path / "ledger", KEYS, [*IDS, "d"])
    with pytest.raises(ConfigError, match="row 2 of the dataset is not the one"):
        Ledger(tmp_path / "ledger", KEYS, ["a", "b", "d"])


def test_two_processes_do_not_write_one_ledger(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger", KEYS, IDS), pytest.raises(ConfigError, match="another process is writing"):
        Ledger(tmp_path / "ledger", KEYS, IDS)


ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{k}?"}],
        "id": k,
        "when": datetime.datetime(2026, 1, k + 1),
        "tags": ["x"],
    }
    for k in range(3)
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_output_has_a_line_an_answer_and_the_columns_of_its_row(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{suffix}"
    write_output(path, Dataset.from_list(ROWS), [ENTRIES[1], ENTRIES[2], ENTRIES[0]])
    found = list(read_source(str(path)))
    assert [row["messages"] for row in found] == [
        answered(ROWS[k]["prompt"], text) for k, text in [(1, "1"), (1, "2"), (2, "yes")]
    ]
    assert [(row["id"], row["source_id"], row["rejected_response"]) for row in found] == [
        ("b", 1, "3"),
        ("b", 1, "3"),
        ("c", 2, None),
    ]
    assert [(row["score"], row["tags"]) for row in found] == [(0.0, ["x"]), (1.0, ["x"]), (0.0, ["x"])]
    assert [str(row["when"])[:10] for row in found] == ["2026-01-02", "2026-01-02", "2026-01-03"]
    assert "prompt" not in found[0]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert cached_answers([str(path)]) == {"b": ["1", "2"], "c": ["yes"]}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_output_of_nothing_is_written_too(suffix: str, tmp_path: Path) -> None:
    for k, rows in enumerate([ROWS, [{"prompt": "only"}]]):
        path = tmp_path / f"out{k}{suffix}"
        write_output(path, Dataset.from_list(rows), [ENTRIES[1]])
        assert path.is_file()


def test_what_json_cannot_hold_is_told_before_anything_is_sampled() -> None:
    check_writable(Path("out.jsonl"), ROWS[0])
    check_writable(Path("out.parquet"), {"image": b"\x00"})
    with pytest.raises(ConfigError, match=r"column 'image' cannot be written as JSON .*samples\.parquet"):
        check_writable(Path("out.jsonl"), {"image": b"\x00"})


def test_the_id_of_a_row_is_that_of_its_content() -> None:
    assert row_id(ROWS[0]) == row_id(json.loads(json.dumps(ROWS[0], default=str)) | {"when": ROWS[0]["when"]})
    assert row_id({"a": 1, "b": None}) == row_id({"a": 1})
    assert row_id({"a": 1, "b": b"\x00"}) != row_id({"a": 1, "b": b"\x01"})
    assert len({row_id(row) for row in ROWS}) == 3


def test_cache_files_are_outputs_of_sampling(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="not an output of sampling: it has the columns prompt"):
        cached_answers([str(tmp_path / "x.jsonl")])
