"""Sampling by vision models: candidates are transformers' own, and reward models see what was asked about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.tiny.vision import png, save_vision
from rayhelper import ConfigError, RayHelper
from tests.conftest import without_runtime
from tests.e2e.runs import together
from tests.images.test_grpo import QUESTIONS, greedy_of_transformers
from tests.images.test_rewards import batch_of
from trainers.backends.fsdp.hf_model import build_model
from trainers.data.images.processor import load_processor
from trainers.sampling.config import SamplingConfig
from trainers.sampling.trainer import SamplingTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def judge(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("judge")
    built = build_model(model, dtype=torch.float32, device=torch.device("cpu"), head="value", seed=3)
    built.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).write_bytes((Path(model) / name).read_bytes())
    return str(folder)


def data(folder: Path) -> str:
    """A file with the questions of ``test_grpo`` and pictures beside it; the last row's is missing."""
    rows = []
    for k, (text, numbers) in enumerate(QUESTIONS):
        for number in numbers:
            (folder / f"{number}.png").write_bytes(png(number))
        names = [f"{number}.png" for number in numbers]
        rows.append({"messages": [{"role": "user", "content": text}], "images": names, "number": k})
    rows.append({"messages": [{"role": "user", "content": "<image>?"}], "images": ["nowhere.png"], "number": 4})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def config(model: str, folder: Path, **keys: Any) -> SamplingConfig:
    settings: dict[str, Any] = {"model": model, "output_dir": str(folder), "dtype": "float32", "report_to": ["none"]}
    settings |= {"num_return_sequences": 1, "temperature": 0.0, "max_completion_length": 6, "prm_threshold": -100.0}
    return SamplingConfig(**settings | keys)


def found_in(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Samples, and the ledger without its first line."""
    samples, ledger = ((folder / f"samples.jsonl{end}").read_text().splitlines() for end in ("", ".ledger"))
    return list(map(json.loads, samples)), list(map(json.loads, ledger[1:]))


def test_candidates_are_those_of_transformers_and_are_judged_by_their_pictures(
    model: str, judge: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"dataset": data(tmp_path), "prm_model": judge}
    with without_runtime():
        SamplingTrainer(config(model, tmp_path / "off", **keys)).train()
    samples, ledger = found_in(tmp_path / "off")
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = [tokenizer.decode(ids, skip_special_tokens=True) for ids in greedy_of_transformers(model)[1]]
    kept = [k for k, text in enumerate(wanted) if text.strip()]
    assert len(kept) > 1
    assert [(one["number"], one["messages"][-1]["content"]) for one in samples] == [(k, wanted[k]) for k in kept]
    assert "nowhere.png' does not exist" in ledger[-1]["reason"]
    module = build_model(judge, dtype=torch.float32, device=torch.device("cpu"), head="value").eval()
    processor = load_processor(judge)
    for sample in samples:
        text, numbers = QUESTIONS[sample["number"]]
        assert sample["images"] == [str(tmp_path / f"{number}.png") for number in numbers]
        row = {"prompt": [{"role": "user", "content": text}], "images": [png(number) for number in numbers]}
        with torch.no_grad():
            score = float(module(**batch_of(processor, row, sample["messages"][-1:])).logits)
        assert sample["prm_score"] == pytest.approx(score, abs=1e-5)
    with without_runtime(), RayHelper.session(together(2), runtime="inprocess"):
        SamplingTrainer(config(model, tmp_path / "two", **keys)).train()
    assert found_in(tmp_path / "two") == (samples, ledger)


def test_an_engine_that_sees_nothing_is_given_no_pictures(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"dataset": data(tmp_path), "sampler_engine": "client", "base_url": "http://localhost:1/v1"}
    keys["prm_threshold"] = 0.0
    with pytest.raises(ConfigError, match="rows have images, which this run cannot read"):
        SamplingTrainer(config(model, tmp_path / "out", **keys))
    with pytest.raises(ConfigError, match="max_pixels, image_processor_kwargs and image_urls are for"):
        config(model, tmp_path / "out", **keys, max_pixels=100)
