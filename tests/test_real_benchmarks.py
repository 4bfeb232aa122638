"""The sides of ``benchmarks/real``: what a side did before it failed or was ended is kept."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.real import peers
from benchmarks.real.grpo import in_words
from benchmarks.real.gsm8k import write_prompts
from benchmarks.real.learning.accuracy import accuracy
from benchmarks.real.learning.plot import svg
from benchmarks.real.learning.stages import PPO_EPOCHS, RUNS, TINY, Begin, command
from benchmarks.real.sides import median, parsed, report, run_side
from benchmarks.real.verl_side import compute_score
from benchmarks.tiny.text import tiny_model, tiny_tokenizer
from trainers.configuration.reading.command_line import load_config
from trainers.configuration.reading.folders import configurations
from trainers.sampling.config import SamplingConfig

WRITES = """
import json, sys, time
file = open(sys.argv[1], "w")
for k in range(4):
    print(json.dumps({"seconds": k}), file=file)
"""
ENDS = {
    "well": "file.close()",
    "failed": "file.close(); sys.exit('no memory')",
    "too long": "file.write('{\"sec'); file.flush(); print('waits', flush=True); time.sleep(60)",
}
COLUMNS = {"s": lambda one: f"{median(one, 'seconds'):.1f}", "steps": lambda one: str(len(one["steps"]))}


@pytest.mark.parametrize("how", ENDS)
def test_a_side_keeps_its_steps_however_it_ends(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", WRITES + ENDS[how], str(tmp_path / "steps")]
    found = run_side(command, tmp_path / "steps", tmp_path / "log", 8 if how == "too long" else 60)
    assert [step["seconds"] for step in found["steps"]] == [0, 1, 2, 3]
    assert len(found["ends"]) == 4
    assert median(found, "seconds") == 2.5, "without the two that warm up"
    reason, log = {"well": (None, ""), "failed": ("ended with 1", "no memory"), "too long": ("took", "waits")}[how]
    assert str(found.get("failed")).startswith(str(reason))
    report("GRPO", {"ours": found, "trl": {"steps": [], "failed": "ended with 1", "log": "nothing\n"}}, COLUMNS)
    printed = capsys.readouterr().out
    assert "ours  2.5      4" in printed
    assert "trl     -      -" in printed
    assert log in printed


def test_a_side_may_have_keys_of_its_own() -> None:
    found = parsed("ours:torch_compile=true,rollout_engine=vllm,token_budget=9")
    assert found == ("ours", {"torch_compile": True, "rollout_engine": "vllm", "token_budget": 9})


def asked(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    data = tmp_path / "prompts.jsonl"
    write_prompts([{"question": "Half of 8?", "answer": "8 / 2 = <<8/2=4>>4\n#### 4"}], data)
    sizes = {"rows": 8, "prompts": 2, "generations": 4, "length": 12, "steps": 3, "micro": 4}
    files = {"folder": str(tmp_path), "steps_file": str(tmp_path / "steps.jsonl"), "data": str(data)}
    return {**files, **sizes, "model": "folder", "rewards": "exact_answer", "keys": keys}


def test_ms_swift_is_asked_for_the_same_rows_and_given_the_same_prompts(tmp_path: Path) -> None:
    words, _ = peers.swift(asked(tmp_path, vllm_max_num_seqs=512))
    told = dict(pairwise(words))
    assert (told["--per_device_train_batch_size"], told["--gradient_accumulation_steps"]) == ("4", "2")
    assert (told["--num_generations"], told["--max_completion_length"], told["--max_steps"]) == ("4", "12", "3")
    assert told["--vllm_max_num_seqs"] == "512"
    row = json.loads(Path(told["--dataset"]).read_text())
    assert row["messages"][-1] == {"role": "user", "content": "Half of 8?"}
    assert row["answer"].endswith("#### 4")


def test_verl_is_asked_for_the_same_rows_and_scores_by_the_same_reward(tmp_path: Path) -> None:
    words, _ = peers.verl(asked(tmp_path, **{"actor_rollout_ref.rollout.max_num_seqs": 512}))
    told = dict(word.split("=", 1) for word in words if "=" in word)
    sizes = ("data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.ppo_mini_batch_size")
    assert [told[name] for name in sizes] == ["2", "4", "2"]  # one optimizer step per generation
    assert told["actor_rollout_ref.rollout.max_num_seqs"] == "512"
    (row,) = pandas.read_parquet(told["data.train_files"]).to_dict("records")
    truth = row["reward_model"]["ground_truth"]
    assert compute_score("gsm8k", "#### 4", truth) == 1.0
    assert compute_score("gsm8k", "#### 5", truth) == 0.0


def test_a_step_of_verl_generates_until_its_engine_has_the_new_weights() -> None:
    timers = {"timing_s/step": 9.0, "timing_s/gen": 4.0, "timing_s/update_weights": 1.5, "timing_s/update_actor": 3.0}
    step = {"step": 1, "data": {**timers, "critic/score/mean": 0.25, "response_length/mean": 100.0}}
    (found,) = in_words({"steps": [step]}, rows=8)["steps"]
    assert (found["seconds"], found["generate"], found["update"]) == (9.0, 5.5, 3.5)
    assert (found["reward"], found["tokens"]) == (0.25, 800.0)


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(num_hidden_layers=4).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_the_curves_is_a_yaml_that_its_trainer_reads(
    name: str, reading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DPO's pairs are of the rows that have a wrong sample too; a further key wins."""
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]

    def sampled(command: list[str], **_: Any) -> None:
        config = load_config(SamplingConfig, command[4:])
        assert (config.num_return_sequences, config.orm_model) == (4, TINY.reward)
        turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
        written = [{"messages": turns, "rejected_response": "3"}, {"messages": turns}]
        (tmp_path / name / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in written))

    monkeypatch.setattr("benchmarks.real.learning.stages.subprocess.run", sampled)
    begin = Begin(tmp_path / name, reading, 5, rows, TINY)
    words, model = command(name, begin, {"learning_rate": 0.5})
    assert words[1:3] == ["-m", f"trainers.{name}"]
    config = load_config(configurations()[name], words[3:])
    assert (config.seed, config.learning_rate) == (5, 0.5)
    assert config.max_steps == TINY.steps * (PPO_EPOCHS if name == "ppo" else 1)
    assert 0 < config.save_steps < config.max_steps
    assert len(Path(str(config.dataset)).read_text().splitlines()) == (1 if name == "dpo" else 4)
    assert (model == reading) == (name != "gkd")
    if name == "gkd":
        assert config.teacher_model == reading
        smaller, whole = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, reading))
        assert sum(name.endswith("o_proj.weight") for name in smaller) == 2
        for layer, origin in ((0, 0), (1, 3)):
            ours, theirs = (f"model.layers.{k}.self_attn.o_proj.weight" for k in (layer, origin))
            assert torch.equal(smaller[ours], whole[theirs])


def test_accuracy_counts_the_problems_that_greedy_completions_solve(reading: str, tmp_path: Path) -> None:
    """Of an answer that the model gives, and of one that it does not."""
    model = AutoModelForCausalLM.from_pretrained(reading, tie_word_embeddings=False)
    for weight in model.parameters():
        torch.nn.init.zeros_(weight) if weight.dim() > 1 else torch.nn.init.ones_(weight)
    torch.nn.init.ones_(model.get_input_embeddings().weight)
    tokenizer = tiny_tokenizer()
    torch.nn.init.ones_(model.lm_head.weight[tokenizer.convert_tokens_to_ids("5")])
    model.save_pretrained(tmp_path)  # writes 5 whatever it is asked
    tokenizer.save_pretrained(tmp_path)
    prompt = [{"role": "user", "content": "5 + 50?"}]
    found = accuracy(str(tmp_path), [{"prompt": prompt, "answer": f"#### {right}"} for right in (55, 5, 55, 55)], 2)
    assert (found["accuracy"], found["problems"], found["truncated"]) == (0.75, 4, 1.0)
    picture = svg("a < b", {"seed 0": [(0, 1.0), (4, 9.0)], "seed 1": [(0, 2.0), (4, 3.0)]})
    assert ElementTree.fromstring(picture).findall("{http://www.w3.org/2000/svg}polyline")[1].get("points")
