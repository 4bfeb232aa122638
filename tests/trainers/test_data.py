"""From any source to token ids, packed rows and batches."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.tiny import CHAT_TEMPLATE, tiny_tokenizer
from trainers.batch import Ragged, Sequences
from trainers.data.batches import Batches, DrawnRows
from trainers.data.packs import batches_of
from trainers.data.rows import drop_long_prompts, load_rows, pack, prompt_of, tokenize_prompts, tokenize_sft
from trainers.plugins import DATASETS, register_dataset

GSM8K = Path(__file__).parents[2] / "examples/grpo/gsm8k"
USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
TOKENIZER = tiny_tokenizer()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train.jsonl (rows 0, 1), test.jsonl (row 2), more.parquet (row 3), and a file that is no data."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "p0", "n": 0}\n{"prompt": "p1", "n": 1}\n')
    (tmp_path / "test.jsonl").write_text('{"prompt": "p2", "n": 2}\n')
    (tmp_path / "LICENSE").write_text("free")
    return tmp_path


def write(file: Path, *lines: str) -> Path:
    file.write_text("".join(line + "\n" for line in lines))
    return file


def shown(ids: Any) -> str:
    return TOKENIZER.decode(ids)


# Sources


def test_files_patterns_lists_and_folders_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load_rows("train.jsonl")["n"] == [0, 1]
    assert load_rows(folder / "train.jsonl", max_rows=1)["n"] == [0]
    assert load_rows("t*.jsonl")["n"] == [2, 0, 1]
    assert load_rows(["train.jsonl", "test.jsonl"])["n"] == [0, 1, 2]
    assert load_rows(folder)["n"] == [0, 1]
    assert load_rows(folder, split="test")["n"] == [2]


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_every_file_type_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": "a, b", "n": 1}, {"prompt": 'say "c"', "n": 2}]
    file = tmp_path / f"rows.{kind}"
    if kind == "json":
        file.write_text(json.dumps(rows))
    else:
        getattr(datasets.Dataset.from_list(rows), f"to_{kind}")(str(file))
    assert load_rows(str(file)).to_list() == rows
    (tmp_path / "more.jsonl").write_text('{"prompt": "d", "n": 3}\n')
    assert load_rows(str(tmp_path / "*"))["n"] == [3, 1, 2]
    (tmp_path / "odd.jsonl").write_text('{"prompt": {"a": [1]}}\n')
    with pytest.raises(ValueError, match="hold columns of different types"):
        load_rows([file, tmp_path / "odd.jsonl"])


def test_saved_datasets_and_dictionaries_of_splits_are_read(tmp_path: Path) -> None:
    train, test = datasets.Dataset.from_list([{"prompt": "a"}]), datasets.Dataset.from_list([{"prompt": "b"}])
    train.save_to_disk(str(tmp_path / "one"))
    both = datasets.DatasetDict(train=train, test=test)
    both.save_to_disk(str(tmp_path / "both"))
    assert load_rows(tmp_path / "one").to_list() == [{"prompt": "a"}]
    assert load_rows(tmp_path / "both", split="test").to_list() == [{"prompt": "b"}]
    assert load_rows(both, split="test").to_list() == [{"prompt": "b"}]
    with pytest.raises(ValueError, match=r"no split 'tset'. Did you mean 'test'\?"):
        load_rows(both, split="tset")


def test_registered_datasets_are_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DATASETS, "entries", {})
    register_dataset("plain")(lambda: [{"prompt": "a"}])
    assert load_rows("plain").to_list() == [{"prompt": "a"}]

    @register_dataset("by_split")
    def by_split(split: str) -> list[dict[str, str]]:
        return [{"prompt": split}]

    assert load_rows("by_split", split="test").to_list() == [{"prompt": "test"}]
    with pytest.raises(ValueError, match=r"registered: plain, by_split.*Did you mean 'by_split'\?"):
        load_rows("by_splitt")


def test_keys_that_some_rows_lack_are_none_in_memory_as_in_files(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": "1"}]
    file = write(tmp_path / "rows.jsonl", *map(json.dumps, rows))
    expected = [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": "1"}]
    assert load_rows(rows).to_list() == load_rows(file).to_list() == expected


def test_a_missing_file_is_answered_with_the_nearest_ones(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'train.jsonl'\?.*test.jsonl, train.jsonl"):
        load_rows(folder / "trian.jsonl")
    with pytest.raises(FileNotFoundError, match=r"no file matches .*parquet.*test.jsonl, train.jsonl"):
        load_rows(f"{folder}/*.parquet")
    with pytest.raises(FileNotFoundError, match="nowhere does not exist either"):
        load_rows(folder / "nowhere" / "train.jsonl")


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", '{"prompt": "a"}')
    bad = write(tmp_path / "bad.jsonl", '{"prompt": "a"}', "", '{"prompt": ')
    with pytest.raises(ValueError, match=r"bad.jsonl:3 is not JSON: .* '{\"prompt\":'"):
        load_rows([good, bad])
    with pytest.raises(ValueError, match=r"list.jsonl:1 is not a JSON object of columns: '\[1, 2\]'"):
        load_rows(write(tmp_path / "list.jsonl", "[1, 2]", "[3]"))


def test_nothing_is_said_to_be_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.jsonl is empty"):
        load_rows(write(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"dataset of type list is empty"):
        load_rows([])
    with pytest.raises(ValueError, match="row 1 of the dataset is a str"):
        load_rows([{"prompt": "a"}, "b"])
    with pytest.raises(ValueError, match=r"cannot read files of type \['.txt'\]"):
        load_rows(write(tmp_path / "rows.txt", "a"))


# Formats


def test_gsm8k_becomes_conversations_with_answers() -> None:
    rows = load_rows(GSM8K, split="test", columns={"question": "prompt", "answer": "answer"}, system="Be brief.")
    assert len(rows) == 32
    assert len(load_rows(GSM8K)) == 64
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert rows[0]["prompt"][1]["content"].startswith("Janet")
    assert rows[0]["answer"].endswith("#### 18")


@pytest.mark.parametrize("template", ["Question: {question}\nAnswer:", "Question: {prompt}\nAnswer:"])
def test_a_prompt_template_sees_old_and_new_names(template: str) -> None:
    rows = load_rows([{"question": "why?", "level": 3}], columns={"question": "prompt"}, prompt_template=template)
    assert rows.to_list() == [{"prompt": "Question: why?\nAnswer:", "level": 3}]


def test_wrong_columns_and_templates_say_what_there_is() -> None:
    rows = [{"question": "why?", "answer": "so"}]
    with pytest.raises(ValueError, match=r"no column 'qestion'. Did you mean 'question'\? Columns: question, answer"):
        load_rows(rows, columns={"qestion": "prompt"})
    with pytest.raises(ValueError, match="'question' cannot become 'answer', which exists"):
        load_rows(rows, columns={"question": "answer"})
    with pytest.raises(ValueError, match=r"cannot be filled: KeyError: 'q'. Columns: question, answer"):
        load_rows(rows, prompt_template="{q}")
    with pytest.raises(
        ValueError, match=r"cannot be filled: ValueError: \{question\.__class__\} is no value of a column"
    ):
        load_rows(rows, prompt_template="{question.__class__}")
    swapped = load_rows(rows, columns={"question": "answer", "answer": "question"})
    assert swapped.to_list() == [{"answer": "why?", "question": "so"}]


def test_a_system_prompt_is_added_once() -> None:
    own = {"role": "system", "content": "mine"}
    rows = load_rows([{"prompt": [own, USER]}, {"prompt": [USER]}], system="yours")
    assert [row["prompt"][0]["content"] for row in rows] == ["mine", "yours"]
    assert load_rows([{"messages": [USER, ASSISTANT]}], system="s")[0]["messages"][0]["role"] == "system"
    [row] = load_rows([{"prompt": "2+2?", "completion": "4"}], system="")
    assert row == {"prompt": [USER], "completion": [ASSISTANT]}
    with pytest.raises(ValueError, match="needs rows with 'prompt' or 'messages', got columns text"):
        load_rows([{"text": "a"}], system="s")


@pytest.mark.parametrize("column", ["conversations", "messages"])
def test_sharegpt_becomes_messages(column: str) -> None:
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    assert load_rows([{column: turns, "n": 1}]).to_list() == [{"n": 1, "messages": [USER, ASSISTANT]}]


def test_the_prompt_of_messages_ends_before_the_assistants_last_turn() -> None:
    assert prompt_of({"messages": [USER, ASSISTANT]}) == [USER]
    assert prompt_of({"messages": [USER]}) == [USER]
    assert prompt_of({"prompt": "a", "completion": "b"}) == "a"
    with pytest.raises(ValueError, match="need a column 'prompt' or 'messages', got text"):
        prompt_of({"text": "a"})


# Tokenising


def test_texts_end_with_eos_once_and_conversations_as_their_template_says() -> None:
    text = tokenize_sft(load_rows([{"text": "ab"}, {"text": "ab<|im_end|>"}]), TOKENIZER, max_length=None)
    assert [shown(ids) for ids in text.input_ids] == ["ab<|im_end|>"] * 2
    assert [mask.tolist() for mask in text.target_mask] == [[False, True, True]] * 2
    chat = tokenize_sft(load_rows([{"messages": [USER, ASSISTANT]}]), TOKENIZER, max_length=None)
    assert shown(chat.input_ids[0]).endswith("4<|im_end|>\n")
    other = tokenize_sft(
        load_rows([{"body": "ab"}]), TOKENIZER, max_length=None, text_field="body", eos="<|endoftext|>"
    )
    assert shown(other.input_ids[0]) == "ab<|endoftext|>"


@pytest.mark.parametrize("form", ["text", "conversation"])
def test_only_completions_are_learned_by_default(form: str) -> None:
    row = {"prompt": "2+2?", "completion": "4"} if form == "text" else {"prompt": [USER], "completion": [ASSISTANT]}
    learned = tokenize_sft(load_rows([row]), TOKENIZER, max_length=None)
    assert shown(learned.input_ids[0][learned.target_mask[0]]) == ("4<|im_end|>" if form == "text" else "4<|im_end|>\n")
    everything = tokenize_sft(load_rows([row]), TOKENIZER, max_length=None, completion_only_loss=False)
    assert everything.target_mask[0].tolist() == [False] + [True] * (len(everything.input_ids[0]) - 1)


def test_a_completion_starts_where_the_tokens_part() -> None:
    """A template whose generation prompt is not what a conversation contains."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\\n' -}}{%- endif", "assistant\\n<think>' -}}{%- endif")
    rows = load_rows([{"prompt": [USER], "completion": [ASSISTANT]}])
    sequences = tokenize_sft(rows, tokenizer, max_length=None)
    assert "<think>" in shown(tokenize_prompts(rows, tokenizer)[0])
    assert shown(sequences.input_ids[0][sequences.target_mask[0]]) == "4<|im_end|>\n"


def test_assistant_only_loss_learns_what_the_template_marks() -> None:
    rows = load_rows([{"messages": [USER, ASSISTANT, USER, ASSISTANT]}, {"messages": [USER]}])
    sequences = tokenize_sft(rows, TOKENIZER, max_length=None, assistant_only_loss=True)
    assert [shown(sequences.input_ids[0][sequences.target_mask[0]])] == ["4<|im_end|>4<|im_end|>"]


def test_a_template_without_marks_is_explained_or_taken_from_trl() -> None:
    from trl.chat_template_utils import qwen2_5_chat_template

    rows, tokenizer = load_rows([{"messages": [USER, ASSISTANT]}]), tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    with pytest.raises(ValueError, match=r"marks the assistant's words with {% generation %}"):
        tokenize_sft(rows, tokenizer, max_length=None, assistant_only_loss=True)
    tokenizer.chat_template = qwen2_5_chat_template
    sequences = tokenize_sft(rows, tokenizer, max_length=None, assistant_only_loss=True)
    assert shown(sequences.input_ids[0][sequences.target_mask[0]]).strip() == "4<|im_end|>"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat_template"):
        tokenize_sft(rows, tokenizer, max_length=None)
    with pytest.raises(ValueError, match="assistant_only_loss needs conversations"):
        tokenize_sft(load_rows([{"text": "a"}]), tokenizer, max_length=None, assistant_only_loss=True)


def test_rows_are_cut_and_those_without_targets_dropped(caplog: pytest.LogCaptureFixture) -> None:
    rows = load_rows([{"prompt": "abcdef", "completion": "gh"}, {"prompt": "a", "completion": "bcdefgh"}])
    start = tokenize_sft(rows, TOKENIZER, max_length=4)
    assert [shown(ids) for ids in start.input_ids] == ["abcd"]
    assert "dropped 1 of 2 rows" in caplog.text
    end = tokenize_sft(rows, TOKENIZER, max_length=4, truncation_mode="keep_end")
    assert [shown(ids) for ids in end.input_ids] == ["fgh<|im_end|>", "fgh<|im_end|>"]
    assert end.target_mask.values.tolist() == [False, True, True, True] * 2
    with pytest.raises(ValueError, match="none of 2 rows has a token to learn within max_length 1"):
        tokenize_sft(rows, TOKENIZER, max_length=1)
    with pytest.raises(ValueError, match="truncation_mode is 'middle'; known: keep_start, keep_end"):
        tokenize_sft(rows, TOKENIZER, max_length=4, truncation_mode="middle")  # type: ignore[arg-type]


def test_a_row_of_no_known_format_is_named() -> None:
    with pytest.raises(ValueError, match=r"this one has question\. Rename with `columns`") as raised:
        tokenize_sft(load_rows([{"question": "a"}]), TOKENIZER, max_length=None)
    assert "while tokenizing row 0 of the dataset" in raised.value.__notes__


def test_tools_and_template_options_reach_the_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{%- for tool in tools or [] -%}{{- tool.name + (' with ' + tool.arg if tool.arg is defined else '') + '|' -}}"
        "{%- endfor -%}{{- 'loud:' if loud is defined -}}{{- 'call:' if messages[0].calls is defined -}}"
        "{{- messages[0]['content'] -}}"
    )
    rows = load_rows(
        [
            {
                "prompt": [USER | {"calls": 1}],
                "tools": [{"name": "t", "arg": "x"}],
                "chat_template_kwargs": {"loud": 1},
            },
            {"prompt": [USER], "tools": [{"name": "u"}]},
            {"prompt": [USER]},
        ]
    )
    texts = [shown(ids) for ids in tokenize_prompts(rows, tokenizer)]
    assert texts == ["t with x|loud:call:2+2?", "u|2+2?", "2+2?"]
    as_json = load_rows([{"prompt": [USER], "tools": json.dumps([{"name": "u"}])}])
    assert shown(tokenize_prompts(as_json, tokenizer, chat_template_kwargs={"loud": True})[0]) == "u|loud:2+2?"


def test_prompts_are_ready_to_be_completed() -> None:
    rows = [{"prompt": "2+2="}, {"prompt": [USER]}, {"prompt": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}]
    opened = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert [shown(ids) for ids in tokenize_prompts(rows, TOKENIZER)] == ["2+2=", opened, opened + "4", opened]


def test_long_prompts_keep_their_end_raise_or_are_dropped() -> None:
    rows = load_rows([{"prompt": "abcdef"}, {"prompt": "ab"}])
    assert [shown(ids) for ids in tokenize_prompts(rows, TOKENIZER, max_prompt_length=3)] == ["def", "ab"]
    with pytest.raises(ValueError, match="the prompt of row 0 has 6 tokens, max_prompt_length is 3"):
        tokenize_prompts(rows, TOKENIZER, max_prompt_length=3, truncation="error")
    assert drop_long_prompts(rows, TOKENIZER, max_prompt_length=3)["prompt"] == ["ab"]
    with pytest.raises(ValueError, match="all 2 prompts"):
        drop_long_prompts(rows, TOKENIZER, max_prompt_length=1)


# Packing


def documents(lengths: list[int]) -> Sequences:
    """Documents whose tokens say which document and position they are; every token but the first is a target."""
    rows = [np.arange(length) + 10_000 * i for i, length in enumerate(lengths)]
    masks = [np.arange(length) > 0 for length in lengths]
    return Sequences(Ragged.of(rows, np.int64), Ragged.of(masks, np.bool_))


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packing_keeps_every_token_and_its_target_over_many_rows(strategy: Any) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 2500).tolist()  # TRL packs 1000 rows at a time
    sequences = documents(lengths)
    packed = pack(sequences, max_length=16, strategy=strategy)
    kept = [value for value in sequences.input_ids.values.tolist() if strategy != "bfd" or value % 10_000 < 16]
    assert Counter(packed.input_ids.values.tolist()) == Counter(kept)
    assert packed.input_ids.lengths.max() == 16
    assert len(packed) < 0.95 * len(lengths) * np.mean(lengths) / 8
    pieces = packed.input_ids.lengths if packed.segment_lengths is None else packed.segment_lengths.values
    starts = set(np.cumsum([0, *pieces[:-1]]).tolist())
    for position, (value, target) in enumerate(
        zip(packed.input_ids.values.tolist(), packed.target_mask.values.tolist(), strict=True)
    ):
        assert target == (position not in starts and value % 10_000 != 0)
    if packed.segment_lengths is not None:
        row_sums = [lengths.sum() for lengths in packed.segment_lengths]
        assert row_sums == packed.input_ids.lengths.tolist()


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12), max_length=st.integers(1, 8))
def test_documents_stay_whole_and_in_order_within_a_segment(lengths: list[int], max_length: int) -> None:
    packed = pack(documents(lengths), max_length=max_length, strategy="bfd_split")
    assert packed.segment_lengths is not None
    for segment in Ragged.split(packed.input_ids.values, packed.segment_lengths.values):
        assert np.array_equal(segment, segment[0] + np.arange(len(segment)))
        assert segment[0] % 10_000 % max_length == 0


def test_packing_refuses_what_it_cannot_do() -> None:
    packed = pack(documents([2, 3]), max_length=8)
    with pytest.raises(ValueError, match="packed already"):
        pack(packed, max_length=8)
    with pytest.raises(ValueError, match="packing_strategy is 'best'; known: bfd, bfd_split, wrapped"):
        pack(documents([2]), max_length=8, strategy="best")  # type: ignore[arg-type]
    assert len(pack(documents([]), max_length=8)) == 0


# Batches


@given(num_rows=st.integers(1, 40), batch_size=st.integers(1, 12), seed=st.integers(0, 2**31), shuffle=st.booleans())
def test_an_epoch_visits_every_row_once_and_any_step_can_be_asked_first(
    num_rows: int, batch_size: int, seed: int, shuffle: bool
) -> None:
    batches = Batches(num_rows, batch_size, seed, shuffle)
    steps = batches.steps_per_epoch
    assert steps == -(-num_rows // batch_size)
    order = [batches[step] for step in range(2 * steps)]
    for epoch in range(2):
        visited = np.concatenate(order[epoch * steps : (epoch + 1) * steps])
        assert sorted(visited.tolist()) == list(range(num_rows))
        assert shuffle or visited.tolist() == list(range(num_rows))
    resumed = Batches(num_rows, batch_size, seed, shuffle)
    assert resumed[2 * steps - 1].tolist() == order[-1].tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    batches = Batches(50, 50, seed=1)
    assert batches[0].tolist() != batches[1].tolist()
    assert batches[0].tolist() != Batches(50, 50, seed=2)[0].tolist()
    assert [batches.epoch(step) for step in (0, 1, 2)] == [0, 1, 2]
    assert [Batches(10, 4).epoch(step) for step in (0, 2, 3, 6)] == [0, 0, 1, 2]


def test_rows_of_a_batch_are_about_equally_long_where_they_are_grouped_by_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 90)

    def spread(batches: Batches) -> float:
        return float(np.mean([np.ptp(lengths[batches[step]]) for step in range(batches.steps_per_epoch)]))

    grouped = batches_of(lengths, 4, seed=1, shuffle=True, by_length=True)
    assert isinstance(grouped, Batches)
    assert spread(grouped) < spread(Batches(90, 4, seed=1)) / 3
    epochs = [[grouped[step].tolist() for step in range(epoch * 23, epoch * 23 + 23)] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == list(range(90))
        assert lengths[epoch[0][0]] == lengths.max()  # what does not fit ends the run at once
    assert epochs[0] != epochs[1]
    resumed = batches_of(lengths, 4, seed=1, shuffle=True, by_length=True)
    assert [resumed[step].tolist() for step in range(23, 46)] == epochs[1]
    in_order = batches_of(lengths, 4, seed=1, shuffle=True, by_length=False)
    assert in_order[0].tolist() == Batches(90, 4, seed=1)[0].tolist()


def test_a_batch_that_is_changed_does_not_change_the_order() -> None:
    batches = Batches(8, 4, seed=0)
    first = batches[0].tolist()
    batches[0][:] = 0
    assert batches[0].tolist() == first


def test_drop_last_leaves_the_incomplete_batch_out() -> None:
    batches = Batches(10, 4, drop_last=True)
    assert batches.steps_per_epoch == 2
    assert [len(batches[step]) for step in range(4)] == [4, 4, 4, 4]
    with pytest.raises(ValueError, match="the rows fill no batch of 4"):
        Batches(3, 4, drop_last=True)
    accumulated = Batches(11, 4, drop_last=True, num_rounds=2)  # micro-batches of 2, whole ones
    assert [len(accumulated[step]) for step in range(accumulated.steps_per_epoch)] == [4, 4, 2]
    assert (
        Batches(10, 4, drop_last=True, num_rounds=3).steps_per_epoch == 2
    )  # a resumed run whose steps divide otherwise
    with pytest.raises(ValueError, match="got 0 rows"):
        Batches(0, 4)
    with pytest.raises(IndexError, match="steps start at 0"):
        batches[-1]


def test_rows_that_a_step_draws_are_the_data_sets_and_each_ones_own() -> None:
    dataset = datasets.Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{k}?"}], "answer": k} for k in range(4)]
    )
    places = np.array([3, 3, 0, 2])
    drawn, selected = DrawnRows(dataset, places), dataset.select(places)
    assert (len(drawn), drawn.column_names, list(drawn)) == (4, selected.column_names, list(selected))
    assert drawn[:] == selected[:]
    assert list(drawn.select(np.array([1, 3]))) == list(selected.select([1, 3]))
    for rows in (list(drawn), [{"prompt": prompt} for prompt in drawn[:]["prompt"]]):
        rows[0]["prompt"][0]["content"] = "written into"
        assert rows[1]["prompt"][0]["content"] == "3?"
    assert list(drawn) == list(selected)
