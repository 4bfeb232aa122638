"""Sampling without a model: its keys, the rows it takes, what engines and scorers are asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayhelper import ConfigError, DeviceGroups
from tests.golden.tiny import tiny_tokenizer
from trainers.batch import Prompts, Ragged, Rollouts
from trainers.cli import load_config, save_config
from trainers.sampling.candidates import Candidates, Questions
from trainers.sampling.config import SamplingConfig
from trainers.sampling.openai_client import Reply
from trainers.sampling.samplers import CachedSampler, ClientSampler, LocalSampler, distilled
from trainers.sampling.scorers import OutcomeScorer, ProcessScorer, Rewards
from trainers.sampling.trainer import SamplingTrainer, cached_by_position, positions_of

SERVER = {"sampler_engine": "client", "base_url": "http://localhost:1/v1"}


def config(**changed: Any) -> SamplingConfig:
    return SamplingConfig(**({"model": "tiny", "dataset": "sums", "num_return_sequences": 2} | changed))


MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"num_return_sequences": 0}, ["num_return_sequences must be at least 1"]),
    ({"top_p": 0.0}, ["top_p must lie in (0, 1]"]),
    ({"data_range": [4, 4]}, ["data_range must be [shard, total]", "[4, 4]"]),
    ({"data_range": [0]}, ["data_range must be [shard, total]"]),
    ({"model": ""}, ["model must be given"]),
    ({"sampler_engine": "lmdeploy"}, ["sampler_engine must be one of hf, transformers, vllm, client, no"]),
    ({"sampler_engine": "vllm", "rollout_batch_size": 2}, ["rollout_batch_size is for sampler_engine hf"]),
    ({"sampler_engine": "vllm", "temperature": 0.0}, ["temperature 0 gives"]),
    ({"sampler_engine": "vllm", "sampler_type": "distill"}, ["distill requests the server"]),
    ({"sampler_engine": True}, ["sampler_engine must be one of"]),
    ({"sampler_engine": "no"}, ["samples nothing", "cache_files"]),
    ({"sampler_type": "distill"}, ["distill requests the server", "sampler_engine client"]),
    ({"sampler_engine": "client"}, ["needs base_url"]),
    ({"base_url": "http://x"}, ["base_url is for sampler_engine client"]),
    ({**SERVER, "engine_kwargs": {"api_key": "x"}}, ["api_key is a separate key"]),
    ({"temperature": 0.0}, ["temperature 0 gives 2 times the same candidate"]),
    ({"stop_token_ids": [-5]}, ["stop_token_ids must be a list of token ids"]),
    ({**SERVER, "stop_token_ids": [5]}, ["stop_token_ids is for sampler_engine hf and vllm", "engine_kwargs: {stop: "]),
    ({"cache_files": ["nowhere.jsonl"]}, ["cache_files: there is no file 'nowhere.jsonl'"]),
    ({"easy_query_threshold": 0.5}, ["no orm_model", "Add one"]),
    ({"easy_query_threshold": 2.0, "orm_model": "exact_answer"}, ["easy_query_threshold must lie in (0, 1]"]),
    ({"prm_threshold": 0.5}, ["no prm_model"]),
    ({"output_file": "x.csv"}, ["output_file must end in .jsonl or .parquet"]),
    ({"resume": True, "override_exist_file": True}, ["set one of them"]),
    ({"retry_failed": True}, ["also set resume"]),
    ({"max_concurrent_requests": 0}, ["max_concurrent_requests must be at least 1"]),
    ({"dataset": ""}, ["dataset is empty"]),
    ({"max_retries": 9}, ["max_retries is 9, but sampler_engine is hf"]),
    ({**SERVER, "model_init_kwargs": {"rope_theta": 1.0}}, ["model_init_kwargs is ", "sampler_engine is client"]),
]


@pytest.mark.parametrize(("changed", "told"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_in_a_key_is_told(changed: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config(**changed)
    for words in told:
        assert words in str(error.value)


def test_ms_swifts_names_and_yamls_no_are_understood(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").touch()
    (tmp_path / "x.yaml").write_text(
        f"sampler_engine: no\ncache_files: {tmp_path}/old.jsonl\ndataset: d\nmax_new_tokens: 7\ndataset_shuffle: true\n"
    )
    found = load_config(SamplingConfig, ["--config", str(tmp_path / "x.yaml"), "--data_range", "[1, 4]"])
    assert (found.engine, found.max_completion_length, found.shuffle_dataset) == ("no", 7, True)
    assert found.output_path == Path("sample_output/samples-1-of-4.jsonl")  # ms-swift's folder
    assert config(sampler_engine="transformers").engine == "hf"


def test_a_key_of_a_server_is_shown_nowhere(tmp_path: Path) -> None:
    found = config(**SERVER, api_key="secret")
    assert "secret" not in repr(found) + str(found.deciding())
    save_config(dataclasses.replace(found, api_key=None), tmp_path)
    assert load_config(SamplingConfig, ["--config", str(tmp_path / "config.yaml")]).api_key is None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"orm_model": "exact_answr"}, ["orm_model: unknown reward 'exact_answr'", "Did you mean"]),
        ({"prm_model": "nowhere.reward"}, ["prm_model", "'nowhere.reward' cannot be imported"]),
        ({"orm_model": "tests.e2e.runs.evenness"}, ["orm_model", "needs completion_ids"]),
        ({"external_plugins": ["no.such_plugin"]}, ["external_plugins"]),
        ({"engine_kwargs": {"typical": 0.9}}, ["engine_kwargs", "no field 'typical'"]),
        ({"engine_kwargs": {"top_p": 0.9}}, ["write the key top_p in addition to engine_kwargs"]),
        ({"engine_kwargs": {"min_p": 0.1}}, ["may not hold 'min_p': this trainer has it not"]),
    ],
    ids=str,
)
def test_what_cannot_work_is_told_before_anything_starts(changed: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingTrainer.check(config(**changed), None)
    for words in told:
        assert words in str(error.value)


def test_what_an_earlier_run_left_is_not_written_over_unasked(tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path)}
    (tmp_path / "samples.jsonl.ledger").touch()
    with pytest.raises(ConfigError, match="already exists"):
        SamplingTrainer.check(config(**settings), None)
    SamplingTrainer.check(config(**settings, resume=True), None)
    SamplingTrainer.check(config(**settings, override_exist_file=True), None)
    SamplingTrainer.check(config(**settings, data_range=[0, 2]), None)


def test_samplers_that_would_be_idle_are_told_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    groups = DeviceGroups.single(["sampler", "prm", "orm"], "CPU", 4)
    SamplingTrainer.check(config(output_dir=str(tmp_path), num_sampling_batch_size=4), groups)
    assert not caplog.records
    SamplingTrainer.check(config(output_dir=str(tmp_path), num_sampling_batch_size=3), groups)
    assert "1 of 4 sampler workers will be idle" in caplog.text


# Rows


@pytest.mark.parametrize("total", [1, 3, 4, 12])
@pytest.mark.parametrize("shuffle", [False, True])
def test_shards_take_every_row_once(total: int, shuffle: bool) -> None:
    shards = [positions_of(config(data_range=[k, total], shuffle_dataset=shuffle), 10) for k in range(total)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(10))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert (np.concatenate(shards).tolist() == list(range(10))) is not shuffle


def test_the_order_of_rows_has_a_seed_of_its_own() -> None:
    def order(**changed: Any) -> list[int]:
        return positions_of(config(shuffle_dataset=True, **changed), 20).tolist()

    assert order(seed=1, dataset_seed=3) == order(seed=2, dataset_seed=3) == order(seed=3) != order(seed=2)


def test_batches_limit_the_rows_and_a_server_gets_enough_of_them_at_once() -> None:
    assert positions_of(config(num_sampling_batches=2, num_sampling_batch_size=3), 10).tolist() == list(range(6))
    assert config().rows_a_batch == 1
    assert config(**SERVER, max_concurrent_requests=16).rows_a_batch == 32
    assert config(**SERVER, num_sampling_batch_size=1).rows_a_batch == 1


def test_equal_rows_share_out_the_completions_of_an_earlier_run(tmp_path: Path) -> None:
    lines = [(name, f"{name}{k}") for name, count in (("a", 4), ("b", 1), ("c", 3)) for k in range(count)]
    text = "".join(f'{{"id": "{i}", "messages": [{{"role": "assistant", "content": "{t}"}}]}}\n' for i, t in lines)
    (tmp_path / "old.jsonl").write_text(text)
    found = cached_by_position(config(cache_files=[str(tmp_path / "old.jsonl")]), ["a", "b", "a", "c", "a", "d"])
    assert found == {0: ["a0", "a1"], 2: ["a2", "a3"], 3: ["c0", "c1"]}


# Candidates


class Counting:
    """An engine whose completion says the seed of its call and the place of its prompt; every third one is empty."""

    def generate(self, prompts: Prompts, sampling: Any, *, seed: int) -> Rollouts:
        texts = ["" if k % 3 == 2 else f"{seed}.{k}" for k in range(len(prompts))]
        ids = Ragged.of([[*tiny_tokenizer()(text)["input_ids"], 2] for text in texts], np.int64)
        logps = Ragged.split(np.zeros(len(ids.values), np.float32), ids.lengths)
        return Rollouts(prompts.prompt_ids, ids, logps, np.zeros(len(texts), bool))

    def load_weights(self, named_weights: Any) -> None: ...


class Echo:
    """A client whose replies say what was asked, and under which seed."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def complete(self, requests: Sequence[dict[str, Any]]) -> list[Reply]:
        self.asked += requests
        return [Reply(f"{r['messages'][-1]['content']}:{r['seed']}", num_tokens=3) for r in requests]


def questions(positions: list[int], cached: dict[int, list[str]] | None = None) -> Questions:
    rows = [{"prompt": f"row {position}"} for position in positions]
    return Questions(np.array(positions), rows, [(cached or {}).get(position) for position in positions])


@pytest.mark.parametrize("kind", ["local", "client"])
def test_candidates_depend_on_the_row_and_not_on_those_beside_it(kind: str) -> None:
    def sampled(*positions: int) -> list[list[str]]:
        local = LocalSampler(Counting(), tiny_tokenizer(), config(num_return_sequences=4))
        client: Any = Echo()
        server = ClientSampler(client, config(**SERVER | {"num_return_sequences": 4}))
        return (local if kind == "local" else server).sample(questions(list(positions))).texts

    together = sampled(5, 6, 7)
    assert [sampled(position)[0] for position in (5, 6, 7)] == together
    assert len({text for texts in together for text in texts}) == (9 if kind == "local" else 12)


def test_empty_completions_and_bad_prompts_are_failures_of_candidates() -> None:
    sampler = LocalSampler(Counting(), tiny_tokenizer(), config(num_return_sequences=3, max_prompt_length=6))
    found = sampler.sample(questions([1, 1000000]))
    assert [len(texts) for texts in found.texts] == [2, 0]
    assert found.failures[0] == ["empty completion"]
    assert len(found.failures[1]) == 3
    assert "has 11 tokens, max_prompt_length is 6" in found.failures[1][0]


def test_a_row_without_a_prompt_fails_alone() -> None:
    both = Questions(np.array([0, 1]), [{"prompt": None}, {"prompt": "b"}], [None, None])
    client: Any = Echo()
    for sampler in (LocalSampler(Counting(), tiny_tokenizer(), config()), ClientSampler(client, config(**SERVER))):
        found = sampler.sample(both)
        assert [len(texts) for texts in found.texts] == [0, 2]
        assert "rows have no prompt" in found.failures[0][0]
        assert outcomes(always_one, found) == [[], [1.0, 1.0]]


def test_conversations_without_a_chat_template_end_the_run() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    chat = Questions(np.array([0]), [{"prompt": [{"role": "user", "content": "a"}]}], [None])
    with pytest.raises(ConfigError, match="has no chat_template"):
        LocalSampler(Counting(), tokenizer, config()).sample(chat)


def test_cached_rows_are_not_sampled() -> None:
    client: Any = Echo()
    found = ClientSampler(client, config(**SERVER)).sample(questions([0, 1], {0: ["x", "y"]}))
    assert found.texts[0] == ["x", "y"]
    assert found.num_tokens.tolist() == [0, 6]
    assert len(client.asked) == 2
    alone = CachedSampler(config()).sample(questions([0, 1], {0: ["x", "y"]}))
    assert alone.texts == [["x", "y"], []]
    assert alone.failures == [[], ["cache_files hold no 2 completions of the row"] * 2]


def test_a_request_says_what_the_keys_say_and_engine_kwargs_have_the_last_word() -> None:
    client: Any = Echo()
    keys = {
        "temperature": 0.5,
        "top_k": 20,
        "max_completion_length": 9,
        "engine_kwargs": {"seed": 7, "top_p": None, "n": 1},
    }
    ClientSampler(client, config(**SERVER | {"num_return_sequences": 1}, **keys)).sample(questions([0]))
    messages = [{"role": "user", "content": "row 0"}]
    assert client.asked == [
        {"model": "tiny", "messages": messages, "temperature": 0.5, "top_k": 20, "max_tokens": 9, "seed": 7, "n": 1}
    ]


def test_reasoning_is_distilled_where_there_is_some() -> None:
    assert distilled(Reply("4", "2 and 2")) == "<think>2 and 2</think>\n\n<answer>4</answer>"
    assert distilled(Reply("4")) == "4"


# Scores


def candidates(*texts: list[str]) -> Candidates:
    rows = [{"prompt": f"row {k}", "answer": str(k)} for k in range(len(texts))]
    return Candidates(rows, list(texts), [[] for _ in texts], np.zeros(len(texts), np.int64))


def outcomes(function: Any, found: Candidates) -> Rewards:
    scorer = OutcomeScorer(config())
    scorer.build(function)
    return scorer.score(found)


def processes(function: Any, found: Candidates) -> Rewards:
    scorer = ProcessScorer(config())
    scorer.build(function)
    return scorer.score(found)


def is_answer(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def always_one(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def of_steps(prompts: list[str], completions: list[str], **_: Any) -> list[Any]:
    """One number a letter; for a single letter just that number; nothing for a question mark."""
    steps = [[ord(letter) - 96.0 for letter in text] for text in completions]
    return [None if t == "?" else s[0] if len(s) == 1 else s for t, s in zip(completions, steps, strict=True)]


async def later(completions: list[str], **_: Any) -> list[list[float]]:
    return [[float(len(text)), 2.0] for text in completions]


def test_a_function_scores_the_candidates_of_each_row_with_its_columns() -> None:
    assert outcomes(is_answer, candidates(["0", "1"], [], ["2"])) == [[1.0, 0.0], [], [1.0]]
    assert outcomes(is_answer, candidates()) == []
    assert outcomes(is_answer, candidates([])) == [[]]


def test_of_the_steps_of_a_completion_the_lowest_counts() -> None:
    found = processes(of_steps, candidates(["cab", "d", "?"]))
    np.testing.assert_array_equal(found, [[1.0, 4.0, np.nan]])
    assert processes(later, candidates(["a", "abc"])) == [[1.0, 2.0]]
    with pytest.raises(TypeError, match="'of_steps' returned"):
        outcomes(of_steps, candidates(["cab"]))
