"""Beside numbers that ms-swift's own functions gave (``ms_swift/``: each file with the script that made it)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sympy import sympify

from tests.golden.ms_swift.record_defaults import THEIR_KEYS
from tests.golden.tiny import tiny_tokenizer
from trainers.configuration.defaults import TABLE
from trainers.data.loss_scale import parsed
from trainers.data.rows import tokenize_sft
from trainers.losses.distillation import topk_jsd, topk_logps
from trainers.rewards import ms_swift
from trainers.rewards.functions import resolve_rewards, score

FOLDER = Path(__file__).parent / "ms_swift"
REWARDS = {
    "accuracy": "ms_swift_accuracy",
    "format": "ms_swift_format",
    "cosine": {"name": "ms_swift_cosine", "max_len": 40},
    "repetition": "ms_swift_repetition",
    "soft_overlong": {"name": "ms_swift_soft_overlong", "soft_max_length": 20, "soft_cache_length": 8},
}
OTHER_NAMES = {"packing_strategy": {"bfd": "binpack"}}  # the same thing
# Defaults that ms-swift's source says in code, behind None
IN_CODE = ("beta", "loss_type", "use_bias_correction_kl", "gradient_accumulation_steps", "truncation_mode")
IN_CODE += (
    "kl_clip_max",
    "system",
    "rollout_importance_sampling_clip_max",
    "gkd_topk_add_tail",
    "rollout_engine",
    "dataloader_drop_last",
    "metric_for_best_model",
    "learns_prompts",  # what TRL's loss is given there for labels has none of the prompt
    "shuffle_generation",  # no key: its trainer gives each step the next completions
    "fsdp_sharding_strategy",  # quantized weights are not cut: its launcher is DDP's
)


def recorded(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("form", ["texts", "messages"])
def test_ms_swifts_rewards_score_as_there(name: str, form: str) -> None:
    found = recorded("rewards")
    functions, _ = resolve_rewards([REWARDS[name]])
    texts = found["completions"]
    completions = texts if form == "texts" else [[{"role": "assistant", "content": text}] for text in texts]
    ids = [[1] * length for length in found["lengths"]]
    scores = score(functions, ["p"] * len(texts), completions, ids, {"solution": found["solutions"]})
    np.testing.assert_allclose(scores[:, 0], found[name], atol=1e-6)
    assert len(set(found[name])) > 1


@pytest.mark.parametrize("reads_latex", [False, True])
def test_ms_swifts_math_compares_with_the_last_turn(reads_latex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded("rewards")
    texts, truths = zip(*found["boxed"], strict=True)
    if reads_latex:  # as where antlr 4.11 is installed; these texts, without braces, are read alike by sympify
        read = {"\\frac12": "1/2", "2x": "2*x"}
        monkeypatch.setattr("sympy.parsing.latex.parse_latex", lambda text: sympify(read.get(text, text)))
    monkeypatch.setattr(ms_swift, "_reads_latex", lambda: reads_latex)
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": truth}] for truth in truths]
    wanted = found["math_by_sympy" if reads_latex else "math"]
    assert ms_swift.ms_swift_math(texts, messages=messages) == wanted
    assert ms_swift.ms_swift_math(texts, solution=truths) == wanted
    assert len(set(wanted)) > 1
    with pytest.raises(ValueError, match="needs the right answers"):
        ms_swift.ms_swift_math(texts, messages=[turns[:1] for turns in messages])


def test_our_own_meanings_of_these_names_are_others() -> None:
    found = recorded("rewards")
    texts, ids = found["completions"], [[1] * length for length in found["lengths"]]
    specs = ["accuracy", "format", {"name": "soft_overlong", "soft_max_length": 20, "soft_cache_length": 8}]
    functions, _ = resolve_rewards(specs)
    scores = score(functions, ["p"] * len(texts), texts, ids, {"solution": found["solutions"]})
    assert (scores[0, 0], found["accuracy"][0]) == (0.0, 1.0)
    for k, name in enumerate(("accuracy", "format", "soft_overlong")):
        assert not np.allclose(scores[:, k], found[name])
    assert scores[:, 2].min() == -1.0 > min(found["soft_overlong"])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.9])
def test_a_teachers_top_k_without_a_tail_is_ms_swifts_divergence(beta: float, temperature: float) -> None:
    found = recorded("gkd")
    student, teacher = torch.tensor(found["student"]), torch.tensor(found["teacher"])
    ids, logps = topk_logps(teacher, 4, temperature=temperature)
    settings: dict[str, Any] = {"beta": beta, "temperature": temperature, "teacher_temperature": temperature}
    without = topk_jsd(student, ids, logps, add_tail=False, **settings).sum()
    assert float(without) == pytest.approx(found["sums"][f"{beta} {temperature}"], abs=1e-5)
    assert abs(float(topk_jsd(student, ids, logps, add_tail=True, **settings).sum()) - float(without)) > 1e-2


@pytest.mark.parametrize("case", recorded("answers"), ids=lambda case: case["loss_scale"])
def test_the_tokens_that_are_learned_of_conversations_are_those_of_ms_swifts_template(case: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"max_length": None, "loss_scale": parsed(case["loss_scale"])}
    rows = Dataset.from_list([{"messages": case["messages"]}])
    if case["loss_scale"] == "all" and any("loss" in message for message in case["messages"]):
        with pytest.raises(ValueError, match="set loss_scale: default"):
            tokenize_sft(rows, tiny_tokenizer(), **settings)
        return
    found = tokenize_sft(rows, tiny_tokenizer(), **settings)
    assert found.input_ids[0].tolist() == case["input_ids"]
    learned = np.flatnonzero(found.target_mask[0]).tolist()
    assert learned == [place for place in case["learned"] if place]  # nothing predicts the first token


@pytest.mark.parametrize("case", recorded("weights")["templates"], ids=lambda case: case["loss_scale"])
def test_the_weights_of_tokens_are_those_of_ms_swifts_template(case: dict[str, Any]) -> None:
    rows = Dataset.from_list([{"messages": case["messages"]}])
    scale = parsed(case["loss_scale"])
    assert scale is not None
    found = tokenize_sft(rows, tiny_tokenizer(), max_length=None, loss_scale=scale)
    assert found.input_ids[0].tolist() == case["input_ids"]
    assert np.flatnonzero(found.target_mask[0]).tolist() == np.flatnonzero(case["weights"]).tolist()
    assert (found.weights is not None) is scale.is_weighted
    if found.weights is not None:
        assert found.weights[0].tolist() == [weight for weight in case["weights"] if weight]
        assert len(set(case["weights"])) > 2


@pytest.mark.parametrize("case", recorded("weights")["agentflan"], ids=lambda case: case["query"])
def test_agentflan_weighs_what_follows_a_call_or_a_whole_answer_by_its_question(case: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": case["query"]}, {"role": "assistant", "content": case["answer"]}]
    tokenizer = tiny_tokenizer()
    rows = Dataset.from_list([{"messages": messages}])
    found = tokenize_sft(rows, tokenizer, max_length=None, loss_scale=parsed("agentflan"))
    pairs = zip(case["pieces"], case["weights"], strict=True)
    expected = [weight for text, weight in pairs for _ in tokenizer(text)["input_ids"] if weight]
    assert found.weights is not None
    assert found.weights[0].tolist() == [*expected, 1.0, 1.0]  # <|im_end|> and what follows it


def test_the_table_of_defaults_has_the_values_that_ms_swifts_source_says() -> None:
    files, asked = recorded("defaults"), 0
    for default in [default for defaults in TABLE.values() for default in defaults]:
        if callable(default.value) or default.key in IN_CODE:
            continue
        theirs = OTHER_NAMES.get(default.key, {}).get(default.value, default.value)
        assert files[default.file][THEIR_KEYS.get(default.key, default.key)] == theirs, default
        asked += 1
    assert asked > 15
