"""Commands of ms-swift's examples: their steps have the numbers that ms-swift logs (``ms_swift/steps.json``)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from benchmarks.tiny.text import tiny_tokenizer
from rayhelper import Channel, RayHelper
from tests.golden.ms_swift.record_steps import CASES, completions, filled, prepare
from tests.golden.training import logged_steps
from trainers.batch import Ragged, Rollouts
from trainers.cli import main
from trainers.commands import Command
from trainers.configuration.others.ms_swift import spelled
from trainers.data.texts.plain import without_template
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.parts.generator import Generator

STEPS = json.loads((Path(__file__).parent / "ms_swift/steps.json").read_text(encoding="utf-8"))
OURS = {"token_acc": "mean_token_accuracy", "acc": "accuracy"}  # names here of what ms-swift logs
OF_REWARD_MODELS = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}
ELSEWHERE = ("learning_rate", "epoch", "step")  # compared below, or counted in micro-batches there
OTHERWISE = ("logits/", "eval_logits/")  # means of means there
OTHERWISE += ("clip_ratio/low_min", "clip_ratio/high_max")  # there of workers, here of completions
REWARDS = tuple(f"{prefix}rewards/{name}" for prefix in ("", "eval_") for name in ("chosen", "rejected", "margins"))
OF_TRL: dict[
    str, tuple[str, ...]
] = {  # numbers that are TRL's here: rewards as they came, one spread of all of them, a KL per token
    **dict.fromkeys(("dpo_losses", "dpo_sorted", "dpo_mixed"), REWARDS),  # there times the sum of loss_weights
    **dict.fromkeys(("grpo_rloo", "grpo_reinforce_plus_plus"), ("reward", "reward_std", "kl")),
    "grpo_chunks": ("reward_std",),
}


class GivenGenerator(Generator):
    """Ours, its engine replaced by ``completions``."""

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, starts: Any, sampling: Any, channel: Channel | None, *numbers: int) -> Rollouts:
        tokenizer = tiny_tokenizer()
        ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in completions(len(starts))]
        logps = Ragged.of([np.full(len(row), np.nan, np.float32) for row in ids], np.float32)
        return Rollouts(starts.prompt_ids, Ragged.of(ids, np.int64), logps, np.zeros(len(ids), bool))


class GivenCompletions(GRPOTrainer):
    """Ours, with that generator."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.generator = GivenGenerator(config, self.policy)


@pytest.mark.parametrize("name", STEPS)
def test_steps_have_the_numbers_that_ms_swift_logs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = STEPS[name]
    command, arguments = spelled(filled(found["words"], prepare(CASES[name], tmp_path)))
    if name.startswith("grpo"):
        monkeypatch.setattr("trainers.cli.command_of", lambda *_: Command(GRPOConfig, GivenCompletions))
    os.environ.update(found["environment"])
    try:
        main(command, [*arguments, "--output_dir", str(tmp_path / "ours")])
    finally:  # by hand: datasets puts back an environment of its own, with these variables
        for variable in found["environment"]:
            os.environ.pop(variable, None)
    ours = logged_steps(tmp_path / "ours")
    for kind in ("loss", "eval_loss"):
        mine, theirs = ([line for line in lines if kind in line] for lines in (ours, found["logged"]))
        assert [line["step"] for line in mine] == [line["step"] for line in theirs]
        if (name, kind) == ("cls", "eval_loss"):  # which ms-swift divides by gradient_accumulation_steps
            theirs = [{**line, kind: 4 * line[kind]} for line in theirs]
        for our_line, their_line in zip(mine, theirs, strict=True):
            assert_same_numbers(name, our_line, their_line)
    rates = [[line["learning_rate"] for line in lines if "loss" in line] for lines in (ours, found["logged"])]
    assert rates[0][1:] == pytest.approx(rates[1][:-1], rel=1e-12)  # ms-swift logs the rate of the next step


def test_only_texts_are_learned_without_the_chat_template() -> None:
    turn = {"role": "assistant", "content": "a"}
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": "q"}, turn], "text": None}])
    assert without_template(rows, "text").to_list() == [{"text": "qa"}]
    with pytest.raises(ValueError, match="this row has assistant, assistant"):
        without_template(Dataset.from_list([{"messages": [turn, turn]}]), "text")


def assert_same_numbers(name: str, ours: dict[str, float], theirs: dict[str, float]) -> None:
    names = OURS | (OF_REWARD_MODELS if name.startswith("rm") else {})
    compared = 0
    for key, value in theirs.items():
        prefix = "eval_" if key.startswith("eval_") else ""
        mine = prefix + names.get(key.removeprefix("eval_"), key.removeprefix("eval_"))
        if mine in ours and key not in (*ELSEWHERE, *OF_TRL.get(name, ())) and not key.startswith(OTHERWISE):
            assert ours[mine] == pytest.approx(value, rel=1e-5, abs=1e-5), f"step {theirs['step']}: {key}"
            compared += 1
    assert compared > 0
