"""Which rows a file of ms-swift's names learns from and evaluates on, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError
from trainers.cli import load_config
from trainers.cpo.config import CPOConfig
from trainers.data.held_out import Part
from trainers.data.sources import counted, read_source
from trainers.dpo.config import DPOConfig
from trainers.gkd.config import GKDConfig
from trainers.grpo.config import GRPOConfig
from trainers.kto.config import KTOConfig
from trainers.ppo.config import PPOConfig
from trainers.reward.config import RewardConfig
from trainers.sampling.config import SamplingConfig
from trainers.sft.config import SFTConfig


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "{k}"}}\n' for k in range(10)))
    return str(path)


def load(kind: type[Any], text: str, tmp_path: Path) -> Any:
    """The configuration of a file of ms-swift's."""
    data = "" if "\ndataset:" in f"\n{text}" else "dataset: d\n"
    needed = {GRPOConfig: "reward_funcs: [accuracy]\n", PPOConfig: "reward_model: r\n", GKDConfig: "teacher_model: t\n"}
    (tmp_path / "x.yaml").write_text(f"model: m\n{data}{needed.get(kind, '')}{text}\ndefaults: ms-swift\n")
    return load_config(kind, ["--config", str(tmp_path / "x.yaml")])


def told(kind: type[Any], text: str, tmp_path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        load(kind, text, tmp_path)
    return str(error.value)


def numbers(source: Any) -> list[int]:
    return [int(text) for text in read_source(source)["text"]]


def test_the_first_rows_of_a_source_come_in_their_order_and_again_where_there_are_fewer(file: str) -> None:
    assert numbers(f"{file}#:4") == [0, 1, 2, 3]
    assert numbers([f"{file}#:2", f"{file}#:3"]) == [0, 1, 0, 1, 2]
    assert numbers(f"{file}#:13") == [*range(10), 0, 1, 2]
    assert numbers(f"{file}#4") != [0, 1, 2, 3]
    assert counted("a#b#:7") == ("a#b", 7, True)
    assert counted("#7") == ("#7", None, False)


@pytest.mark.parametrize(
    ("count", "held", "learned"),
    [
        ("", [8, 9], [*range(8)]),
        ("#:5", [9], [0, 1, 2, 3]),
        ("#:25", [8, 9], [*range(8), *range(8), *range(7)]),
    ],
)
def test_the_last_rows_are_held_out_where_none_is_drawn(
    file: str, count: str, held: list[int], learned: list[int]
) -> None:
    """As ``DatasetMeta.post_process`` of ms-swift divides with ``shuffle=False``."""
    parts = [Part([file + count], 0.2, 7, is_held_out, holds_last=True) for is_held_out in (True, False)]
    assert [numbers(part) for part in parts] == [held, learned]


def test_rows_held_out_at_random_are_among_the_first_ones(file: str) -> None:
    held, learned = (numbers(Part(f"{file}#:5", 0.4, 7, is_held_out)) for is_held_out in (True, False))
    assert sorted([*held, *learned]) == [0, 1, 2, 3, 4]
    assert len(held) == 2


def test_without_a_shuffle_ms_swift_takes_the_first_rows_and_holds_out_the_last(file: str, tmp_path: Path) -> None:
    config = load(SFTConfig, f"dataset: [{file}#4]\ndataset_shuffle: false\nsplit_dataset_ratio: 0.25", tmp_path)
    assert config.dataset == [f"{file}#:4"]
    assert numbers(config.training_data[0]) == [0, 1, 2]
    assert numbers(config.evaluation_data[0]) == [9]
    drawn = load(SFTConfig, f"dataset: [{file}#4]\ndataset_shuffle: true\nsplit_dataset_ratio: 0.25", tmp_path)
    assert (drawn.dataset, drawn.split_dataset_rows) == ([f"{file}#4"], "random")
    several = load(SamplingConfig, f"dataset: {file}#4 {file}#12\ndataset_shuffle: false", tmp_path)
    assert several.dataset == [f"{file}#:4", f"{file}#:12"]


def test_ms_swift_evaluates_the_first_rows_unless_it_shuffles_them(file: str, tmp_path: Path) -> None:
    assert load(SFTConfig, f"val_dataset: {file}#4", tmp_path).eval_dataset == f"{file}#:4"
    assert load(SFTConfig, f"val_dataset: {file}#4\nval_dataset_shuffle: true", tmp_path).eval_dataset == f"{file}#4"
    assert load(SFTConfig, f"eval_dataset: {file}#4", tmp_path).eval_dataset == f"{file}#4"


def test_a_stream_of_ms_swift_is_of_the_first_rows(file: str, tmp_path: Path) -> None:
    config = load(SFTConfig, f"dataset: {file}#4\nval_dataset: {file}#2\nstreaming: true\nmax_steps: 1", tmp_path)
    assert (config.dataset, config.eval_dataset) == (f"{file}#:4", f"{file}#:2")


MEGATRON = "tensor_model_parallel_size: 2\n"
FIXED = "goes through one random order in every epoch"


@pytest.mark.parametrize(
    ("kind", "text", "shuffles"),
    [
        (SFTConfig, "dataset_shuffle: false", True),  # the data loader draws
        (SFTConfig, "dataset_shuffle: false\ntrain_dataloader_shuffle: false", False),
        (SFTConfig, "dataset_shuffle: true\ntrain_dataloader_shuffle: true", True),
        (SFTConfig, "train_dataloader_shuffle: false\nnum_train_epochs: 1", True),  # one order, drawn once
        (SFTConfig, "train_dataloader_shuffle: false", FIXED),
        (SFTConfig, "train_dataloader_shuffle: false\nmax_steps: 9\nnum_train_epochs: 1", FIXED),
        (SFTConfig, "train_dataloader_shuffle: maybe", "must be true or false"),
        (SFTConfig, "shuffle_dataset: false\ntrain_dataloader_shuffle: true", "remove one of them"),
        (SFTConfig, "shuffle_dataset: false", False),  # our own name
        (SFTConfig, "dataset_shuffle: false\nstreaming: true\nmax_steps: 1", False),
        (DPOConfig, "dataset_shuffle: false", True),
        (DPOConfig, "dataset_shuffle: false\ntrain_dataloader_shuffle: false", False),
        (RewardConfig, "dataset_shuffle: false\ntrain_dataloader_shuffle: false", True),  # transformers' sampler
        (KTOConfig, "dataset_shuffle: false\ntrain_dataloader_shuffle: false", True),
        (CPOConfig, "dataset_shuffle: false", True),
        (GKDConfig, "dataset_shuffle: false", True),
        (PPOConfig, "dataset_shuffle: false", True),
        (GRPOConfig, "dataset_shuffle: false", False),
        (GRPOConfig, "train_dataloader_shuffle: false", True),
        (GRPOConfig, f"{MEGATRON}train_dataloader_shuffle: false", True),
        (GRPOConfig, f"{MEGATRON}dataset_shuffle: false", False),
        (KTOConfig, f"{MEGATRON}dataset_shuffle: false\ntrain_dataloader_shuffle: false", False),
        (RewardConfig, f"{MEGATRON}dataset_shuffle: false", True),
        (RewardConfig, f"{MEGATRON}train_dataloader_shuffle: false", FIXED),
        (SamplingConfig, "dataset_shuffle: false", False),
    ],
)
def test_rows_have_the_order_that_ms_swift_gives_them(
    kind: type[Any], text: str, shuffles: bool | str, tmp_path: Path
) -> None:
    if isinstance(shuffles, str):
        assert shuffles in told(kind, text, tmp_path)
    else:
        assert load(kind, text, tmp_path).shuffle_dataset is shuffles


def test_the_order_of_the_data_loader_is_refused_by_name_in_a_file_of_trls(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model: m\ndataset: d\ndefaults: trl\ntrain_dataloader_shuffle: false\n")
    with pytest.raises(ConfigError, match="shuffle_dataset sets the order of rows"):
        load_config(SFTConfig, ["--config", str(tmp_path / "x.yaml")])


def test_rows_to_hold_out_are_named_only_where_some_are_held_out(tmp_path: Path) -> None:
    assert "split_dataset_ratio is 0" in told(SFTConfig, "split_dataset_rows: last", tmp_path)
