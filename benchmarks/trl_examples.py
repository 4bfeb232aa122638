"""Do the YAML files of TRL's own examples and pages run here, unchanged and with TRL's numbers?

    python -m benchmarks.trl_examples PATH_TO_TRL [--only TEXT]

Every YAML under ``examples``, ``docs`` and ``trl`` of a checkout that configures a training run is read: files, and
blocks of Markdown. Its model and data sets are folders of the very names that it has, tiny and local, so that neither
is overridden. Both sides get ``OVERRIDES`` on the command line: two steps, rows in their order, float32. Theirs is the
script of the installed TRL (``trl.scripts``), which reads the file with TrlParser. Both run on the CPU, in one process.

``equal``: the loss of each step to 1e-5, the norm of its gradient to 1e-4 of itself. ``refused``: with the remedy of
the message applied, the numbers are equal. ``differs``: they are not, refused or not.

Completions of GRPO and RLOO are the same given texts on both sides, some of them right, as two generators of random
numbers draw different ones. For the same reason weights that no checkpoint gives (matrices A of LoRA, the head of a
reward model) are drawn by us for both, and LoRA has no dropout.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml

from benchmarks.tiny.text import save_tiny, tiny_tokenizer
from rayhelper import Channel, ConfigError, RayHelper
from trainers.backends.fresh_weights import adapter_a, value_head
from trainers.batch import Ragged, Rollouts
from trainers.cli import run
from trainers.commands import command_named
from trainers.configuration.reading.command_line import read_config
from trainers.grpo.trainer import GRPOTrainer
from trainers.parts.generator import Generator

Row = dict[str, Any]
COMMANDS = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
NAMED = re.compile(rf"\b(?:trl )?({'|'.join(COMMANDS)})(?:_config|_output| --config)")
BLOCK = re.compile(r"```ya?ml\n(.*?)```", re.DOTALL)
OVERRIDES = "--max_steps 2 --logging_steps 1 --save_strategy no --report_to none --bf16 false".split()
SEQUENTIAL = ["--train_sampling_strategy", "sequential"]
UNSHUFFLED = ["--shuffle_dataset", "false"]  # of GRPO and RLOO
WITHOUT_DROPOUT = ["--lora_dropout", "0"]  # beside use_peft: the two draw different masks
RLOO = (  # TRL's trainer of that name, as the error of ``rayhelper rloo`` says
    "--advantage_estimator rloo --loss_type grpo --importance_sampling_level sequence_product --beta 0.05 "
    "--num_generations 2"
).split()
STARTS_PROCESSES = "num_processes"
WORDS = "one two three four five six seven eight nine ten".split()
NUM_ROWS = 32


@dataclass(frozen=True)
class Example:
    """A YAML of TRL's: where it stands, which command it is for, its text."""

    where: str
    command: str
    text: str

    @property
    def keys(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(self.text)
        return found

    @property
    def sources(self) -> list[str]:
        """The data sets that it names."""
        mixed = [one["path"] for one in self.keys.get("datasets", [])]
        return mixed or [self.keys["dataset_name"]]

    @property
    def title(self) -> str:
        """Its keys besides model, data and rewards."""
        common = ("model_name_or_path", "dataset_name", "reward_funcs")
        return ", ".join(f"`{key}`" for key in self.keys if key not in common) or "model and data alone"


@dataclass
class Outcome:
    """What became of an example: one word, the numbers of both sides, and what was refused or differs."""

    example: Example
    word: str
    ours: list[tuple[float, float]] = field(default_factory=list)
    theirs: list[tuple[float, float]] = field(default_factory=list)
    why: str = ""


def examples(checkout: Path) -> Iterator[Example]:
    """Every YAML of the checkout that names a model and is a training run's."""
    for file in sorted(checkout.glob("examples/**/*.y*ml")):
        yield from _example(file.relative_to(checkout).as_posix(), file.read_text(), "")
    for folder in ("docs", "examples", "trl"):
        for file in sorted(checkout.glob(f"{folder}/**/*.md")):
            text = file.read_text()
            for block in BLOCK.finditer(text):
                line = text[: block.start()].count("\n") + 2
                behind = text[block.end() : block.end() + 200]
                yield from _example(f"{file.relative_to(checkout).as_posix()}:{line}", block.group(1), behind)


def _example(where: str, text: str, behind: str) -> Iterator[Example]:
    keys = yaml.safe_load(text)
    if isinstance(keys, dict) and "model_name_or_path" in keys:
        command = NAMED.search(text + behind)
        yield Example(where, command.group(1) if command else "sft", text)


def counted(i: int, times: int) -> str:
    return " ".join(WORDS[: 1 + times * i % 7])


def turn(role: str, content: str) -> Row:
    return {"role": role, "content": content}


def rows_of(command: str, name: str) -> list[Row]:
    """Rows in the format of the data set of that name, as far as the command reads it."""
    rows: list[Row] = []
    for i in range(NUM_ROWS):
        good, bad, question = counted(i, 5), counted(i, 3), [turn("user", f"Count to {i}.")]
        if command == "sft" and "Capybara" in name:
            rows.append({"messages": [*question, turn("assistant", good)]})
        elif command == "sft":
            rows.append({"text": f"I counted {good} and then {bad}."})
        elif command == "dpo" and "hh-rlhf" in name:  # the prompt is what both begin with
            rows.append(
                {key: f"\n\nHuman: {i}?\n\nAssistant: {text}" for key, text in (("chosen", good), ("rejected", bad))}
            )
        elif command in ("dpo", "reward"):
            rows.append(
                {"chosen": [*question, turn("assistant", good)], "rejected": [*question, turn("assistant", bad)]}
            )
        elif command == "kto":
            answer = [turn("assistant", good if i % 3 else bad)]
            rows.append({"prompt": question, "completion": answer, "label": bool(i % 3)})
        else:
            rows.append({"prompt": [turn("user", f"{i % 4} + 1?")], "solution": f"${i % 4 + 1}$"})
    return rows


def completions(generation: int, count: int) -> list[list[int]]:
    """Answers 1 and 2, ended by the end token: some of them are right."""
    tokenizer, draws = tiny_tokenizer(), np.random.default_rng([3, generation])
    answers = [f"\\boxed{{{draws.integers(1, 3)}}}" + "." * int(draws.integers(0, 4)) for _ in range(count)]
    return [tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id] for answer in answers]


class GivenGenerator(Generator):
    """Ours, its engine replaced by ``completions``."""

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, starts: Any, sampling: Any, channel: Channel | None, *numbers: int) -> Rollouts:
        ids = completions(numbers[0], len(starts))
        ended = np.zeros(len(ids), bool)
        logps = Ragged.of([np.full(len(row), np.nan, np.float32) for row in ids], np.float32)
        return Rollouts(starts.prompt_ids, Ragged.of(ids, np.int64), logps, ended)


class GivenCompletions(GRPOTrainer):
    """Ours, with that generator."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.generator = GivenGenerator(config, self.policy)


def train_ours(example: Example, file: Path) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of each step.

    Raises:
        ConfigError: the file is refused.
    """
    is_rloo = example.command == "rloo"
    command = command_named("grpo" if is_rloo else example.command)
    arguments = [*overrides(example), "--output_dir", "ours", *(RLOO if is_rloo else [])]
    config, header = read_config(command.config_type, ["--config", str(file), *arguments], prog="trainers")
    run(GivenCompletions if example.command in ("grpo", "rloo") else command.trainer, config, header)
    lines = Path("ours/metrics.jsonl").read_text().splitlines()
    return [(step["loss"], step["grad_norm"]) for step in map(json.loads, lines) if "loss" in step]


def train_theirs(example: Example, file: Path) -> list[tuple[float, float]]:
    """The same of TRL's script."""
    import trl

    script = importlib.import_module(f"trl.scripts.{example.command}")
    name = ("Reward" if example.command == "reward" else example.command.upper()) + "Trainer"
    kept: list[Any] = []
    theirs = getattr(trl, name)

    def train(self: Any, *arguments: Any, **keys: Any) -> Any:
        kept.append(self)
        draw_as_ours(self.model, self.args.seed)
        return theirs.train(self, *arguments, **keys)

    def generated(self: Any, prompts: Sequence[Any], *_: Any) -> Any:
        ids = completions(getattr(self, "num_generated", 0), len(prompts))
        self.num_generated = getattr(self, "num_generated", 0) + 1
        return ids if example.command == "rloo" else (ids, None)

    given = {"_generate_single_turn": generated} if example.command in ("grpo", "rloo") else {}
    arguments = ["--config", str(file), *overrides(example), "--output_dir", "theirs", "--use_cpu", "true"]
    parser = script.make_parser()
    *parsed, _ = parser.parse_args_and_config(arguments, return_remaining_strings=True)  # the rest is Accelerate's
    with patch.object(trl, name, type(name, (theirs,), {"train": train, **given})):
        script.main(*parsed)
    return [(step["loss"], step["grad_norm"]) for step in kept[0].state.log_history if "loss" in step]


def draw_as_ours(model: Any, seed: int) -> None:
    """Puts our draws into weights that no checkpoint gives: matrices A of adapters, the head of a reward model."""
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            weight.data.copy_(adapter_a(name.replace(".default.", "."), tuple(weight.shape), seed))
        elif name.endswith("score.weight"):
            weight.data.copy_(value_head(weight.shape[1], model.config.initializer_range, seed))


def overrides(example: Example) -> list[str]:
    """What both sides are given on the command line."""
    dropout = WITHOUT_DROPOUT if example.keys.get("use_peft") else []
    in_order = UNSHUFFLED if example.command in ("grpo", "rloo") else SEQUENTIAL
    return [*OVERRIDES, *in_order, *dropout]


def compared(example: Example) -> Outcome:
    """Both sides' two steps, in a folder of their own."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            save_tiny(example.keys["model_name_or_path"])
            for source in example.sources:
                Path(source).mkdir(parents=True)
                lines = map(json.dumps, rows_of(example.command, source))
                Path(source, "train.jsonl").write_text("\n".join(lines))
            file = Path("example.yaml")
            file.write_text(example.text)
            outcome = Outcome(example, "equal")
            try:
                outcome.ours = train_ours(example, file)
            except ConfigError as error:
                outcome.word, outcome.why = "refused", str(error)
                file.write_text(re.sub(rf"(?m)^{STARTS_PROCESSES}:.*\n?", "", example.text))
                outcome.ours = train_ours(example, file)
                file.write_text(example.text)
            outcome.theirs = train_theirs(example, file)
            if not equal(outcome.ours, outcome.theirs):
                outcome.word = "differs"
            return outcome
        finally:
            os.chdir(here)


def equal(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> bool:
    """Two steps on both sides, within the tolerance of the golden tests."""
    pairs = list(zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) == 2 and all(
        abs(mine[0] - other[0]) <= 1e-5 and abs(mine[1] - other[1]) <= 1e-4 * abs(other[1]) + 1e-9
        for mine, other in pairs
    )


def main() -> None:
    import trl

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="only files or commands that contain this text")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"TRL {trl.__version__}; files of {(options.checkout / 'VERSION').read_text().strip()}\n", flush=True)
    print("| file | command | keys | | loss, grad_norm here | loss, grad_norm of TRL |\n|---|---|---|---|---|---|")
    for example in examples(options.checkout):
        if options.only in f"{example.command} {example.where}":
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                one = compared(example)
            numbers = ["; ".join(f"{loss:.5f}, {norm:.4f}" for loss, norm in side) for side in (one.ours, one.theirs)]
            print(
                f"| {example.where} | {example.command} | {example.title} | {one.word} | {' | '.join(numbers)} |",
                flush=True,
            )
            if one.why:
                print(one.why)


if __name__ == "__main__":
    main()
