"""Whole runs of sampling: the same output wherever the roles run, after a kill, from a cache, and from a server."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError, DeviceGroups, RayHelper
from tests import warm
from tests.conftest import RaySession, without_runtime
from tests.e2e.completion_server import Answer, fails, question, says, serving
from tests.e2e.runs import separate, together
from tests.e2e.sampling_rewards import has_a_vowel
from tests.golden.tiny import save_tiny
from tests.trainers.test_reward_models import save_reward_model
from trainers.cli import load_config, placement, run
from trainers.data.sources import read_source
from trainers.sampling.config import SamplingConfig
from trainers.sampling.trainer import SamplingTrainer

ROOT = Path(__file__).resolve().parents[2]
WORDS = "a bee sees two deer near the sea".split()
ROWS: list[dict[str, Any]] = [{"prompt": word, "answer": word[0], "number": k} for k, word in enumerate(WORDS)]
APART = {
    "sample_group": {"device": "CPU", "ranks": 2, "workers": ["sampler"]},
    "rm_group": {"device": "CPU", "ranks": 2, "workers": ["prm", "orm"]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a language model and of a reward model."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "writer")
    save_reward_model(folder / "judge")
    return folder


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run in this process."""
    folder = tmp_path_factory.mktemp("whole")
    with without_runtime():
        run(SamplingTrainer, config(models, folder))
    return folder


def config(models: Path, folder: Path, **keys: Any) -> SamplingConfig:
    """Eight rows, four candidates each, judged by a reward model and a function."""
    settings: dict[str, Any] = {
        "model": str(models / "writer"),
        "prm_model": str(models / "judge"),
        "prm_threshold": -100.0,
        "orm_model": "tests.e2e.sampling_rewards.has_a_vowel",
        "dataset": ROWS,
        "output_dir": str(folder),
        "dtype": "float32",
        "report_to": ["none"],
        "num_return_sequences": 4,
        "n_best_to_keep": 2,
        "max_completion_length": 10,
        "num_sampling_batch_size": 3,
        "logging_steps": 100,
    }
    return SamplingConfig(**(settings | keys))


def test_a_column_that_a_reward_asks_for_is_missed_before_anything_is_sampled(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"orm_model: reward function 'ms_swift_accuracy' needs 'solution'"):
        SamplingTrainer(config(models, tmp_path, orm_model="ms_swift_accuracy"))


def samples(folder: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def ledger(folder: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    """What became of the rows; the first line, which has the keys, left out."""
    return [json.loads(line) for line in (folder / f"{name}.ledger").read_bytes().splitlines()[1:]]


def files(folder: Path) -> tuple[bytes, bytes]:
    """Output and ledger, byte for byte, the ledger without the keys."""
    return (folder / "samples.jsonl").read_bytes(), (folder / "samples.jsonl.ledger").read_bytes().partition(b"\n")[2]


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def test_every_row_ends_in_one_state_and_the_best_are_kept(whole: Path) -> None:
    entries = ledger(whole)
    assert [entry["row"] for entry in entries] == list(range(8))
    assert {entry["state"] for entry in entries} == {"kept", "no_positive"}
    found = samples(whole)
    assert [row["number"] for row in found] == [entry["row"] for entry in entries for _ in entry["answers"]]
    assert all(has_a_vowel([row["messages"][-1]["content"]]) == [1.0] for row in found)
    assert all(row["messages"][0] == {"role": "user", "content": WORDS[row["number"]]} for row in found)
    for entry in entries:
        scores = [answer["score"] for answer in entry["answers"]]
        assert scores == sorted(scores, reverse=True)
        assert all(1.0 <= score <= 11.0 for score in scores)
    assert any("rejected_response" in row for row in found)
    last = metrics(whole)[-1]
    assert [line["step"] for line in metrics(whole)] == [1, 2, 3]
    assert last["rows"] == 8
    assert last["kept"] + last["no_positive"] == 8
    assert last["num_samples"] == len(found)
    assert last["acceptance"] == last["kept"] / 8


@pytest.mark.parametrize("size", [1, 8])
def test_neither_batches_nor_shards_change_a_row(size: int, whole: Path, models: Path, tmp_path: Path) -> None:
    for shard in range(3):
        run(SamplingTrainer, config(models, tmp_path, num_sampling_batch_size=size, data_range=[shard, 3]))
    found = [row for shard in range(3) for row in samples(tmp_path, f"samples-{shard}-of-3.jsonl")]
    assert found == samples(whole)


def test_a_further_stop_token_ends_a_candidate(models: Path, tmp_path: Path) -> None:
    SamplingTrainer(config(models, tmp_path, stop_token_ids=list(range(260)))).train()
    assert [entry["num_tokens"] for entry in ledger(tmp_path)] == [
        entry["num_candidates"] for entry in ledger(tmp_path)
    ]


def test_vllm_draws_for_a_row_what_it_draws_in_any_batch(tmp_path: Path) -> None:
    """That two workers which hold one model together complete as one: tests/rollout/test_vllm_parallel.py."""
    model = save_tiny(tmp_path / "model", head_dim=32)
    whole: dict[str, Any] = {"model": str(model), "prm_model": None, "orm_model": None, "sampler_engine": "vllm"}
    whole |= {
        "prm_threshold": 0.0,
        "engine_kwargs": {"max_model_len": 24, "enforce_eager": True},
        "num_sampling_batch_size": None,
    }
    rows = [*ROWS, {"prompt": "too long for the engine", "answer": "t", "number": 9}]
    SamplingTrainer(config(tmp_path, tmp_path / "one", dataset=rows, **whole)).train()
    *found, last = ledger(tmp_path / "one")
    assert [entry["state"] for entry in found] == ["kept"] * len(ROWS)
    assert "vLLM's max_model_len has room for 14" in str(last)
    SamplingTrainer(
        config(tmp_path, tmp_path / "two", **whole | {"num_sampling_batch_size": 3, "dataset": rows})
    ).train()
    answers = [[(entry["row"], entry.get("answers")) for entry in ledger(tmp_path / name)] for name in ("one", "two")]
    assert answers[0] == answers[1]


def test_the_output_is_the_same_on_any_workers(whole: Path, models: Path, tmp_path: Path) -> None:
    with RayHelper.session(APART, runtime="inprocess", strict=True):
        SamplingTrainer(config(models, tmp_path)).train()
    assert files(tmp_path) == files(whole)
    assert metrics(tmp_path) == metrics(whole)


def test_the_output_of_two_ray_workers_is_that_of_one_process(
    whole: Path, models: Path, tmp_path: Path, ray_session: RaySession
) -> None:
    with ray_session(together(2)):
        SamplingTrainer(config(models, tmp_path)).train()
    assert files(tmp_path) == files(whole)
    assert metrics(tmp_path) == metrics(whole)


def test_while_a_batch_is_scored_the_next_one_is_sampled(models: Path, tmp_path: Path, ray_session: RaySession) -> None:
    """The score of a row waits until the server is asked for the next row."""
    words = WORDS[:4]
    with ray_session(separate()), serving(lambda request: says(question(request).upper())) as (url, _):
        pairs = zip(words, [*words[1:], None], strict=True)
        rows = [{"prompt": word, "url": url, "after": after} for word, after in pairs]
        SamplingTrainer(
            config(
                models,
                tmp_path,
                **from_server(url),
                orm_model="tests.e2e.sampling_rewards.the_next_is_asked",
                num_sampling_batch_size=1,
                dataset=rows,
                num_return_sequences=1,
            )
        ).train()
    assert [entry["state"] for entry in ledger(tmp_path)] == ["kept"] * 3 + ["no_positive"]


def from_server(url: str) -> dict[str, Any]:
    """Keys of a run that asks a server and has no process rewards."""
    return {"sampler_engine": "client", "base_url": url, "model": "m", "prm_model": None, "prm_threshold": 0.0}


# After a kill

KILLED_WHILE_WRITING = """
import os, signal, sys
from trainers.sampling import store as sample_store
from trainers.cli import main

append = sample_store.Ledger.append

def append_and_die(ledger, entries):
    if len(ledger.states) < 3:
        return append(ledger, entries)
    lines = b"".join(map(sample_store._line, entries))
    os.write(ledger.file.fileno(), lines[: len(lines) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

sample_store.Ledger.append = append_and_die
main("sampling", sys.argv[1:])
"""


def test_a_run_that_was_killed_goes_on_and_leaves_what_an_uninterrupted_one_leaves(
    whole: Path, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    keys = config(models, tmp_path / "out", dataset=str(tmp_path / "rows.jsonl"))
    (tmp_path / "x.yaml").write_text(json.dumps(dataclasses.asdict(keys)))
    (tmp_path / "killed.py").write_text(KILLED_WHILE_WRITING)
    command = [warm.python(), str(tmp_path / "killed.py"), "--config", str(tmp_path / "x.yaml")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    written = (tmp_path / "out" / "samples.jsonl.ledger").read_bytes()
    assert not written.endswith(b"\n")
    assert not (tmp_path / "out" / "samples.jsonl").exists()
    run(SamplingTrainer, dataclasses.replace(keys, resume=True, num_sampling_batch_size=2))
    assert files(tmp_path / "out") == files(whole)
    before = files(tmp_path / "out")
    run(SamplingTrainer, dataclasses.replace(keys, resume=True))  # nothing is left to do
    assert files(tmp_path / "out") == before


def test_rows_that_failed_may_be_taken_once_more(models: Path, tmp_path: Path) -> None:
    broken = {"deer"}

    def answer(request: dict[str, Any]) -> Answer:
        return fails(400, "no deer") if question(request) in broken else says(question(request)[::-1])

    with serving(answer) as (url, server):
        keys = config(models, tmp_path, **from_server(url), num_return_sequences=1)
        assert run(SamplingTrainer, keys)["failed"] == 1
        (failed,) = [entry for entry in ledger(tmp_path) if entry["state"] == "failed"]
        assert failed["row"] == 4
        assert "no deer" in failed["reason"]
        broken.clear()
        assert run(SamplingTrainer, dataclasses.replace(keys, resume=True))["failed"] == 1
        num_asked = len(server.requests)
        assert run(SamplingTrainer, dataclasses.replace(keys, resume=True, retry_failed=True))["failed"] == 0
        assert len(server.requests) == num_asked + 1
    assert [row["number"] for row in samples(tmp_path)] == list(range(8))


# From a cache


def test_scores_may_come_later_from_what_an_earlier_run_sampled(whole: Path, models: Path, tmp_path: Path) -> None:
    run(
        SamplingTrainer,
        config(models, tmp_path, prm_model=None, orm_model=None, prm_threshold=0.0, output_file="all.parquet"),
    )
    assert len(read_source(str(tmp_path / "all.parquet"))) == 8 * 4
    cached = {"sampler_engine": "no", "model": "", "cache_files": [str(tmp_path / "all.parquet")]}
    run(SamplingTrainer, config(models, tmp_path, **cached))
    assert samples(tmp_path) == samples(whole)
    more = config(models, tmp_path, **cached, num_return_sequences=5, output_file="more.jsonl")
    assert run(SamplingTrainer, more)["failed"] == 8


# From a server


def test_a_server_is_distilled_through_its_troubles(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right and wrong answers, a 429 and a 500, empty ones, one row that everybody knows and one that nobody does."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    troubles = [fails(429), fails(500)]
    counts: dict[str, int] = dict.fromkeys(WORDS, 0)

    def answer(request: dict[str, Any]) -> Answer:
        assert request["messages"][0] == {"role": "system", "content": "Spell."}
        if troubles:
            return troubles.pop()
        word = question(request)
        counts[word] += 1
        if word == "near" or counts[word] == 1:
            return says("")
        right = word == "the" or counts[word] % 2 == 0
        return says(word[0] if right else "?", reasoning=f"{word} begins so")

    with serving(answer) as (url, server):
        keys = config(
            models,
            tmp_path,
            dataset=[
                {**row, "answer": f"<think>{row['prompt']} begins so</think>\n\n<answer>{row['answer']}</answer>"}
                for row in ROWS
            ],
            model="teacher",
            system="Spell.",
            sampler_type="distill",
            sampler_engine="client",
            base_url=url,
            max_concurrent_requests=1,
            num_return_sequences=5,
            prm_model=None,
            prm_threshold=0.0,
            orm_model="tests.e2e.sampling_rewards.is_answer",
            easy_query_threshold=0.8,
            output_file="distilled.parquet",
        )
        numbers = run(SamplingTrainer, keys)
    assert server.keys == {"Bearer secret"}
    assert "secret" not in (tmp_path / "config.yaml").read_text()
    states = {WORDS[entry["row"]]: entry["state"] for entry in ledger(tmp_path, "distilled.parquet")}
    assert states == dict.fromkeys(WORDS, "kept") | {"the": "easy", "near": "failed"}
    assert numbers["num_failed"] == 7 + 5
    found = list(read_source(str(tmp_path / "distilled.parquet")))
    assert [row["number"] for row in found] == [k for k in range(8) if k not in (5, 6) for _ in range(2)]
    assert found[0]["messages"] == [
        {"role": "system", "content": "Spell."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>a begins so</think>\n\n<answer>a</answer>"},
    ]
    assert found[0]["rejected_response"] == "<think>a begins so</think>\n\n<answer>?</answer>"


# Examples

EXAMPLES = ("quickstart", "device_groups", "distill")


@contextmanager
def small_example(name: str, folder: Path, model: str, *more: str) -> Iterator[SamplingConfig]:
    arguments = ["--config", f"examples/sampling/{name}.yaml", f"--output_dir={folder}", f"--model={model}"]
    small = ["--num_return_sequences=3", "--num_sampling_batches=2", "--num_sampling_batch_size=2", "--seed=1"]
    yield load_config(SamplingConfig, [*arguments, *small, *more])


def test_every_example_is_known_here() -> None:
    assert {path.stem for path in (ROOT / "examples" / "sampling").glob("*.yaml")} == set(EXAMPLES)


def test_the_examples_run(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    writer = str(models / "writer")
    with small_example("quickstart", tmp_path, writer) as keys:
        assert run(SamplingTrainer, keys)["rows"] == 4
    with small_example("device_groups", tmp_path, writer) as keys:
        groups: DeviceGroups = placement(SamplingTrainer, keys)
        assert [(group.roles, group.num_workers) for group in groups.groups] == [(("sampler",), 2), (("prm", "orm"), 1)]
    with (
        serving(lambda request: says("It is \\boxed{72}.", reasoning="48 + 24")) as (url, _),
        small_example("distill", tmp_path, "m", f"--base_url={url}") as keys,
    ):
        assert run(SamplingTrainer, keys)["kept"] == 1
    (row,) = read_source(str(tmp_path / "gsm8k.parquet"))
    assert row["messages"][-1]["content"] == "<think>48 + 24</think>\n\n<answer>It is \\boxed{72}.</answer>"
