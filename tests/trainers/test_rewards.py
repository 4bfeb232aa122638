"""Reward functions: what they are given, what they may return, how they are named, and the built-in ones."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers.batch import Ragged
from trainers.plugins import REWARDS
from trainers.rewards.functions import (
    check_columns,
    exact_answer,
    format_reward,
    is_async,
    known_rewards,
    resolve_rewards,
    reward_name,
    score,
)
from trainers.rewards.texts import chat_completions

IDS = [[1, 2], [3]]


def length(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


async def async_length(completions: list[str], scale: float = 1.0) -> list[float]:
    await asyncio.sleep(0)
    return [scale * len(c) for c in completions]


class Judge:
    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset

    async def __call__(self, completions: list[str], **columns: Any) -> list[float | None]:
        return [self.offset, None]


def call(function: Any, completions: Any = ("ab", "c"), **columns: Any) -> np.ndarray:
    return score([function], ["p", "q"], completions, IDS, columns)


# Scoring


def test_every_function_is_one_column_and_none_is_nan() -> None:
    rewards = score([length, Judge(5.0), async_length], ["p", "q"], ["ab", "c"], IDS, {})
    assert rewards.dtype == np.float32
    np.testing.assert_array_equal(rewards, [[2, 5, 2], [1, math.nan, 1]])


def test_no_function_gives_no_column() -> None:
    assert score([], ["p"], ["a"], [[1]], {}).shape == (1, 0)


def test_a_function_gets_only_what_it_accepts() -> None:
    seen: dict[str, Any] = {}

    def picky(completion_ids: Any, answer: Any, level: Any = "none") -> list[int]:
        seen.update(completion_ids=completion_ids, answer=answer, level=level)
        return [0, 0]

    def greedy(**everything: Any) -> list[int]:
        seen["all"] = sorted(everything)
        return [0, 0]

    columns = {"answer": ["1", "2"], "prompt": ["x", "y"], "completion_ids": [[9], [9]], "other": [0, 0]}
    ids = Ragged.of(IDS, np.int64)
    score([picky, greedy], ["p", "q"], ["ab", "c"], ids, columns, context={"trainer_state": 3})
    assert seen["completion_ids"] == IDS
    assert seen["answer"] == ["1", "2"]
    assert seen["level"] == "none"
    assert seen["all"] == ["answer", "completion_ids", "completions", "other", "prompts", "trainer_state"]


def test_a_partial_keeps_its_bound_argument_over_a_column_of_that_name() -> None:
    assert call(functools.partial(async_length, scale=3.0), scale=[7, 7]).tolist() == [[6.0], [3.0]]


def test_async_functions_of_a_batch_run_at_the_same_time() -> None:
    meeting: list[asyncio.Barrier] = []

    async def meet(completions: list[str]) -> list[float]:
        if not meeting:
            meeting.append(asyncio.Barrier(2))
        await asyncio.wait_for(meeting[0].wait(), timeout=60)
        return [1.0, 1.0]

    assert score([meet, meet], ["p", "q"], ["a", "b"], IDS, {}).sum() == 4


def test_scoring_works_inside_a_running_event_loop() -> None:
    async def main() -> np.ndarray:
        return call(async_length)

    assert asyncio.run(main()).tolist() == [[2.0], [1.0]]


def test_a_runner_keeps_one_event_loop_over_batches() -> None:
    loops = []

    async def remember(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0, 0.0]

    with asyncio.Runner() as runner:
        for _ in range(2):
            score([remember], ["p", "q"], ["a", "b"], IDS, {}, runner=runner)
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ([1.0], ValueError, "'bad' returned 1 rewards for 2 completions"),
        ([1.0, "2"], TypeError, "'bad' returned '2' for row 1"),
        ([1.0, math.inf], ValueError, "'bad' returned inf for row 1"),
        ([math.nan, 1.0], ValueError, "'bad' returned nan for row 0: rewards must be finite. Return None"),
        (np.array([1.0, np.nan]), ValueError, "'bad' returned nan for row 1"),
        (1.0, TypeError, "'bad' must return a list of numbers or None, got float"),
        ({"a": 1, "b": 2}, TypeError, "got dict"),
    ],
)
def test_a_wrong_result_names_the_function_and_the_row(returned: Any, error: type[Exception], message: str) -> None:
    def bad(completions: Any) -> Any:
        return returned

    with pytest.raises(error, match=message):
        call(bad)


def test_a_coroutine_in_disguise_is_explained() -> None:
    with pytest.raises(TypeError, match="declare it"):
        call(lambda completions: async_length(completions))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_exception_keeps_its_type_and_says_which_function_raised_it(kind: str) -> None:
    def broken(completions: Any) -> Any:
        raise KeyError("boom")

    async def async_broken(completions: Any) -> Any:
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom") as raised:
        call(broken if kind == "sync" else async_broken)
    name = "broken" if kind == "sync" else "async_broken"
    assert raised.value.__notes__ == [f"raised by reward function '{name}'"]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("code", [None, 3])
def test_a_function_does_not_end_the_run_in_silence(kind: str, code: int | None) -> None:
    def leaving(completions: Any) -> Any:
        sys.exit(code)

    async def async_leaving(completions: Any) -> Any:
        sys.exit(code)

    name, function = ("leaving", leaving) if kind == "sync" else ("async_leaving", async_leaving)
    with pytest.raises(RuntimeError, match=rf"^SystemExit\({code or ''}\) raised by reward function '{name}'$"):
        call(function)


def test_ctrl_c_in_a_function_stays_what_it_is() -> None:
    def interrupted(completions: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        call(interrupted)
    assert not hasattr(raised.value, "__notes__")


def test_a_missing_column_is_named_before_anything_runs() -> None:
    def needs(completions: Any, gold: Any) -> Any:
        raise AssertionError("not reached")

    with pytest.raises(ValueError, match=r"'needs' needs 'gold', .*there are: prompts, completions, .*answer"):
        call(needs, answer=["1", "2"])


def test_the_columns_that_functions_ask_for_are_known_before_anything_is_scored() -> None:
    def needs(completions: Any, gold: Any, weight: float = 1.0) -> Any:
        raise AssertionError("not called")

    def takes_all(completions: Any, **columns: Any) -> Any:
        raise AssertionError("not called")

    def by_place(completions: Any, gold: Any, /) -> Any:
        raise AssertionError("not called")

    named = [(takes_all, "takes_all"), (needs, "needs"), (functools.partial(needs, gold="1"), "bound")]
    check_columns(named, ["prompt", "gold"])
    for missing in ("answer", "prompt"):
        with pytest.raises(ValueError, match=r"'needs' needs 'gold', but eval_dataset has no such column"):
            check_columns(named, [missing], "eval_dataset")
    with pytest.raises(ValueError, match="'by_place' takes 'completions' by position only"):
        check_columns([(by_place, "by_place")], ["gold"])
    with pytest.raises(ValueError, match="exact_answer compares with column 'answer' or 'solution'"):
        check_columns([(exact_answer, "exact_answer")], ["gold"])
    check_columns([(exact_answer, "exact_answer")], ["solution"])
    math = [(REWARDS["ms_swift_math"], "ms_swift_math")]
    with pytest.raises(ValueError, match=r"ms_swift_math needs the right answers: .* or a column solution"):
        check_columns(math, ["prompt"])
    check_columns(math, ["messages"])


def test_columns_must_have_one_entry_a_prompt() -> None:
    with pytest.raises(ValueError, match="answer has 1 entries for 2 prompts"):
        call(length, answer=["1"])


def test_arrays_and_tensors_are_rewards_too() -> None:
    import torch

    assert call(lambda completions: np.array([1, 2])).tolist() == [[1.0], [2.0]]
    assert call(lambda completions: torch.tensor([0.5, 1.5])).tolist() == [[0.5], [1.5]]
    assert call(lambda completions: [True, np.float64(0.25)]).tolist() == [[1.0], [0.25]]


# Names


def test_metric_names_are_those_of_trl() -> None:
    from trl.trainer.utils import get_callable_name, is_async_callable

    for function in (length, functools.partial(async_length, scale=2.0), Judge(), Judge, async_length):
        assert reward_name(function) == get_callable_name(function)
        assert is_async(function) == is_async_callable(function) or function is Judge
    assert reward_name(functools.partial(functools.partial(length))) == "length"
    assert reward_name(Judge()) == "Judge"


def test_specs_are_names_paths_mappings_and_callables() -> None:
    specs = [
        "exact_answer",
        f"{__name__}:length",
        f"{__name__}.async_length",
        {"name": f"{__name__}:Judge", "offset": 4.0},
        {"name": "soft_overlong_punishment", "max_completion_len": 4, "soft_punish_cache": 2},
        length,
    ]
    pairs, weights = resolve_rewards(specs)
    assert [name for _, name in pairs] == [
        "exact_answer",
        "length",
        "async_length",
        "Judge",
        "soft_overlong_punishment_reward",
        "length_2",
    ]
    assert weights.tolist() == [1.0] * 6
    rewards = score(pairs, ["p", "q"], ["#### 1", "5"], [[1] * 3, [1] * 9], {"answer": ["1", "?"]})
    np.testing.assert_array_equal(rewards, [[1, 6, 6, 4, -0.5, 6], [math.nan, 1, 1, math.nan, -1, 1]])


def test_weights_must_be_as_many_as_functions() -> None:
    assert resolve_rewards("exact_answer", [0.5])[1].tolist() == [0.5]
    with pytest.raises(ValueError, match=r"2 values for 1 reward functions \(exact_answer\)"):
        resolve_rewards("exact_answer", [0.5, 1.0])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact_answr", r"Did you mean 'exact_answer'\?.*@register_reward\('exact_answr'\)"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:nothing", "cannot be imported: AttributeError"),
        ("get_cosine_scaled_reward", "missing a required argument: 'max_len'"),
        ({"name": "cosine_scaled", "max_length": 5}, "It takes .max_len: int"),
        ({"name": "exact_answer"} | {"name": f"{__name__}:length", "wrong": 1}, "unexpected keyword argument 'wrong'"),
        ({"max_len": 5}, "needs its `name`"),
    ],
)
def test_a_wrong_spec_says_what_is_known(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_rewards([spec])


def test_a_module_in_the_current_folder_is_found_by_the_command_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_this_folder").mkdir()
    (tmp_path / "of_this_folder" / "rewards.py").write_text("def one(completions, **_):\n    return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (function, name), *_ = resolve_rewards("of_this_folder.rewards.one")[0]
    assert (name, score([(function, name)], ["p"], ["c"], [[1]], {}).tolist()) == ("one", [[1.0]])


def test_trl_functions_have_their_names_and_read_completions_of_either_form() -> None:
    assert {"accuracy_reward", "accuracy", "think_format", "get_repetition_penalty_reward"} <= set(known_rewards())
    pairs, _ = resolve_rewards(["accuracy_reward", "think_format", {"name": "cosine_scaled", "max_len": 2}])
    assert [name for _, name in pairs] == ["accuracy_reward", "think_format_reward", "cosine_scaled_reward"]
    texts = ["<think>x</think> \\boxed{4}", "\\boxed{5}"]
    expected = [[1, 1, 0.5], [0, 0, -0.75]]
    for prompts in (["p", "q"], [[{"role": "user", "content": "p"}]] * 2):
        rewards = score(pairs, prompts, chat_completions(prompts, texts), IDS, {"solution": ["$4$", "$4$"]})
        np.testing.assert_allclose(rewards, expected)


def test_resolved_rewards_travel_to_other_processes() -> None:
    specs = ["accuracy", {"name": "repetition_penalty", "ngram_size": 1}, "format", "exact_answer"]
    pairs, _ = pickle.loads(pickle.dumps(resolve_rewards(specs)))
    rewards = score(pairs, ["p", "q"], ["4", "5"], [[1, 1], [1, 2]], {"solution": ["4", "5"]})
    assert rewards[:, 1].tolist() == [-0.5, 0.0]


# exact_answer and format


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("She has 3 + 4 = 7 apples.", "7", 1.0),
        ("7 is wrong, it is 8", "7", 0.0),
        ("16 - 3 = 13\n#### 13", "so 48/2 = <<48/2=24>>24\n#### 13", 1.0),
        ("#### 13 and then 99", "13", 1.0),
        ("#### Step 2\nThe total is 18.", "18", 1.0),
        ("The answer is $1,234.50.", "1234.5", 1.0),
        ("1{,}000 \\text{ km}", "#### 1,000", 1.0),
        ("-5", "-5", 1.0),
        ("12-5", "5", 1.0),
        ("\u22125", "-5", 1.0),
        ("-$5", -5, 1.0),
        ("\\boxed{42} as in 43", "42", 1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{x}, not 3", "3", 0.0),
        ("<think>3</think><answer>The sum is 4</answer>", 4.0, 1.0),
        ("\\boxed{1} no, <answer>2</answer>", "2", 1.0),
        ("1/2", "2", 0.0),
        ("72.0", "72", 1.0),
        ("1,2345", "2345", 1.0),
        ("H2O", "2", 0.0),
        ("\u7b54\u6848\u662f18", "18", 1.0),
        ("9" * 5000, "9", 0.0),
        ("no number", "3", 0.0),
        ("", "3", 0.0),
        ("3", "three", None),
        ("3", None, None),
        ("3", "between 2 and 3", None),
        ("1", True, None),
        ("3", "3%", 1.0),
    ],
)
def test_exact_answer(completion: str, answer: Any, reward: float | None) -> None:
    assert exact_answer([completion], answer=[answer]) == [reward]
    messages = [{"role": "assistant", "content": completion}]
    assert exact_answer([messages], solution=[answer]) == [reward]


def test_exact_answer_needs_a_column_to_compare_with() -> None:
    with pytest.raises(ValueError, match="column 'answer' or 'solution'"):
        exact_answer(["3"])


def test_every_gsm8k_answer_is_a_number_and_scores_itself() -> None:
    file = Path(__file__).parents[2] / "examples/grpo/gsm8k/train.jsonl"
    answers = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert exact_answer(answers, answer=answers) == [1.0] * 64
    assert exact_answer([a.replace("#### ", "#### 1") for a in answers], answer=answers) == [0.0] * 64


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<think><think>a</think><answer>b</answer>", 0.0),
        ("<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
    ],
)
def test_format(completion: str, reward: float) -> None:
    assert format_reward([completion]) == [reward]


def test_soft_overlong_falls_over_its_last_tokens_under_either_name() -> None:
    theirs = {"name": "soft_overlong_punishment", "max_completion_len": 10, "soft_punish_cache": 4}
    functions, _ = resolve_rewards([{"name": "soft_overlong", "soft_max_length": 10, "soft_cache_length": 4}, theirs])
    assert functions[0][1] == "soft_overlong"
    lengths = [[1] * length for length in (1, 6, 8, 10, 11)]
    rewards_BK = score(functions, ["p"] * 5, ["c"] * 5, lengths, {})
    assert rewards_BK[:, 0].tolist() == rewards_BK[:, 1].tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="soft_cache_length=0 must lie in"):
        resolve_rewards([{"name": "soft_overlong", "soft_max_length": 10, "soft_cache_length": 0}])


@pytest.mark.parametrize("name", ["accuracy", "ms_swift_accuracy", "reasoning_accuracy", "ms_swift_cosine"])
def test_a_reward_whose_package_is_not_installed_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a run starts, as all rewards are found then; else its first score would end it."""
    arguments = {"max_len": 8} if name == "ms_swift_cosine" else {}
    resolve_rewards([{"name": name, **arguments}])
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"needs math-verify, which is not installed: pip install math-verify"):
        resolve_rewards([{"name": name, **arguments}])
