"""Every key of any trainer and of ms-swift is told by its name, and a remedy names only keys of the same trainer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.test_other_names import KEYS, KINDS, load, told
from trainers.configuration.others.ms_swift_only import MS_SWIFT_ONLY
from trainers.configuration.others.other_names import ALIASES, NEUTRAL, REFUSED, TRANSLATED
from trainers.dpo.config import DPOConfig
from trainers.grpo.config import GRPOConfig
from trainers.sampling.config import SamplingConfig
from trainers.sft.config import SFTConfig


def fields(kind: type[Any]) -> set[str]:
    return set(kind.__dataclass_fields__)


def remedies(message: str) -> Iterator[str]:
    """What lines say to write."""
    for line in message.splitlines():
        yield from re.findall(r"(?:^|[.:;,] )[Ww]rite ([^.]+)", line)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_remedy_names_keys_of_the_same_trainer(kind: type[Any], tmp_path: Path) -> None:
    own = fields(kind)
    foreign = {*KEYS, *REFUSED, *MS_SWIFT_ONLY} - own - {*ALIASES, "config"}
    message = told(kind, "\n".join(f"{name}: x7" for name in sorted(foreign)), tmp_path)
    assert "unknown key" not in message
    assert "did you mean" not in message
    named = {word for text in remedies(message) for word in re.findall(r"\w+", text) if word in KEYS}
    assert {key for key in named if "_" in key} - own - {*NEUTRAL, *TRANSLATED} == set()


TOLD: list[tuple[type[Any], str, str]] = [
    (SFTConfig, "eval_limit: 10", "eval_limit is not supported: it belongs to evalscope"),
    (GRPOConfig, "eval_use_evalscope: true", "val_dataset names rows to evaluate on"),
    (GRPOConfig, "chord_mu_peak: 0.5", "RayHelper does not have CHORD"),
    (SFTConfig, "stop_words: [x]", "stop_words is not supported: it is for trainers with stop_token_ids. Remove it"),
    (DPOConfig, "num_iterations: 2", "num_iterations is not supported: it is a key of grpo. Remove it"),
    (SFTConfig, "beta: 0.2", "beta is not supported: it is a key of cpo, simpo, orpo, dpo and others. Remove it"),
    (SFTConfig, "cpo_alpha: 0.5", "it is a key of cpo and simpo. Remove it"),
    (SFTConfig, "optim: muon\nmuon_num_ns_steps: 9", "Write optim_kwargs, or remove it"),
    (SFTConfig, "backend: megatron\ndsa_indexer_loss_coeff: 0.5", "it follows from the model's config.json"),
    (SamplingConfig, "target_regex: x", "it is for trainers with lora_target_modules. Remove it"),
]


@pytest.mark.parametrize(("kind", "text", "words"), TOLD, ids=[text for _, text, _ in TOLD])
def test_a_key_is_refused_by_name_and_not_as_a_typing_error(
    kind: type[Any], text: str, words: str, tmp_path: Path
) -> None:
    message = told(kind, text, tmp_path)
    assert words in message
    assert "did you mean" not in message


def test_defaults_of_ms_swift_are_no_error(tmp_path: Path) -> None:
    text = "eval_use_evalscope: false\nchord_sft_dataset: []\nrepetition_penalty: 1.0\nmrl_dims: null"
    assert load(GRPOConfig, text, tmp_path) == load(GRPOConfig, "", tmp_path)


def test_settings_of_other_optimizers_and_of_megatron_core_are_read(tmp_path: Path) -> None:
    found = load(SFTConfig, "optimizer: sgd\nsgd_momentum: 0.8\nmuon_num_ns_steps: 9", tmp_path)
    assert found.optim_kwargs == {"momentum": 0.8}
    text = "backend: megatron\nmegatron_extra_kwargs: {qk_clip: true}\napply_wd_to_qk_layernorm: true"
    assert load(SFTConfig, text, tmp_path).megatron == {"qk_clip": True, "apply_wd_to_qk_layernorm": True}
