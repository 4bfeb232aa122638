"""YAML files in the form of TRL's, run by our command line and by TRL's scripts: two steps have the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trl_examples import RLOO, Example, compared, equal, examples
from rayhelper import ConfigError
from trainers.commands import command_named

COMMON = """
# The names of model and data are folders, as tiny as this machine
model_name_or_path:
  org/model
gradient_accumulation_steps: 2
per_device_train_batch_size: 4
learning_rate: 2.0e-3
lr_scheduler_type:
  cosine
warmup_steps: 1
weight_decay: 0.1
"""
SFT = f"{COMMON}dataset_name:\n  org/Capybara\nassistant_only_loss: true\nmax_length: 60\n"
LORA = f"{COMMON}datasets:\n  - path: org/Capybara\nuse_peft: true\nlora_r: 4\nlora_alpha: 16\n"
DPO = f"{COMMON}dataset_name: org/hh-rlhf\nbeta: 0.3\nloss_type: [ipo]\nmax_length: 40\n"


@pytest.mark.parametrize(("command", "text"), [("sft", SFT), ("sft", LORA), ("dpo", DPO)], ids=["sft", "lora", "dpo"])
def test_two_steps_of_a_file_equal_those_of_trls_script(command: str, text: str) -> None:
    outcome = compared(Example("a file of ours", command, text))
    assert outcome.word == "equal", (outcome.ours, outcome.theirs, outcome.why)
    assert not equal(outcome.ours[::-1], outcome.theirs), "the second step is the first"


def test_files_and_blocks_that_configure_a_run_are_found(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples/x.yaml").write_text("# trl dpo --config x.yaml\nmodel_name_or_path: m\ndataset_name: d\n")
    (tmp_path / "examples/accelerate.yaml").write_text("num_processes: 2\n")
    page = "Text\n```yaml\n# kto_config.yaml\nmodel_name_or_path: m\ndatasets:\n- path: a\n- path: b\n```\n"
    (tmp_path / "docs/page.md").write_text(page)
    found = list(examples(tmp_path))
    assert [(one.where, one.command) for one in found] == [("examples/x.yaml", "dpo"), ("docs/page.md:3", "kto")]
    assert [one.sources for one in found] == [["d"], ["a", "b"]]


def test_the_error_of_trls_rloo_says_what_was_compared() -> None:
    with pytest.raises(ConfigError, match=" ".join(RLOO)):
        command_named("rloo")
