"""Rows of completions that were judged each by itself, and the keys of KTO, CPO, SimPO and ORPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from rayhelper import ConfigError
from tests.golden.tiny import tiny_tokenizer
from trainers.batch import Ragged
from trainers.commands import command_named
from trainers.configuration.reading.command_line import load_config
from trainers.cpo.config import CPOConfig, ORPOConfig, SimPOConfig
from trainers.data.broken_rows import judged_mistake
from trainers.data.preferences import tokenize_preferences
from trainers.data.unpaired import UnpairedPreferences, tokenize_unpaired
from trainers.kto.config import KTOConfig


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


FORMS: dict[str, list[dict[str, Any]]] = {
    "TRL's conversations": [
        {"prompt": [user("1+1=")], "completion": [assistant("2")], "label": True},
        {"prompt": [user("1+2=")], "completion": [assistant("4")], "label": False},
    ],
    "a text completes a conversation": [
        {"prompt": [user("1+1=")], "completion": "2", "label": True},
        {"prompt": [user("1+2=")], "completion": "4", "label": False},
    ],
    "ms-swift's": [
        {"messages": [user("1+1="), assistant("2")], "label": 1},
        {"messages": [user("1+2="), assistant("4")], "label": 0},
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_form_have_the_same_tokens(form: str) -> None:
    tokenizer = tiny_tokenizer()
    found = tokenize_unpaired(Dataset.from_list(FORMS[form]), tokenizer)
    assert found.is_desirable.tolist() == [True, False]
    texts = [tokenizer.decode(ids) for ids in found.prompt_ids]
    assert texts[1] == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(ids) for ids in found.completion_ids] == ["2<|im_end|>\n", "4<|im_end|>\n"]
    assert all(judged_mistake(row) is None for row in FORMS[form])


def test_a_pair_is_a_desirable_and_an_undesirable_row() -> None:
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "e", "rejected": "f"}]
    found = tokenize_unpaired(Dataset.from_list(rows), tokenizer)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found.completion_ids]
    assert dict(zip(texts, found.is_desirable.tolist(), strict=True)) == {"b": True, "e": True, "c": False, "f": False}


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "a", "completion": "b", "label": None}, "label"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "label"),
        ({"prompt": "a", "completion": "b", "label": 2}, "label"),
        ({"prompt": "a", "completion": None, "label": True}, "completion"),
        ({"prompt": "a", "completion": [assistant("b")], "label": True}, "completion"),
        ({"messages": [user("a")], "label": True}, "messages"),
        ({"messages": [assistant("a")], "label": True}, "messages"),
        ({"chosen": "a", "rejected": None}, "rejected"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_row_is_told_by_its_column(row: dict[str, Any], column: str) -> None:
    mistake = judged_mistake(row)
    assert mistake is not None
    assert mistake[0] == column


def answers(count: int) -> UnpairedPreferences:
    """Row k: a prompt of k + 1 tokens k and a completion of two tokens 10 k."""
    prompts = Ragged.of([[k] * (k + 1) for k in range(count)], np.int64)
    completions = Ragged.of([[10 * k, 10 * k] for k in range(count)], np.int64)
    return UnpairedPreferences(prompts, completions, np.arange(count) % 2 == 0)


def test_prompts_get_the_completion_of_the_row_before_them_in_their_group() -> None:
    def firsts(group_size: int) -> list[int]:
        return [int(ids[0]) for ids in answers(5).mismatched(group_size).completion_ids]

    assert firsts(5) == firsts(9) == [40, 0, 10, 20, 30]
    assert firsts(2) == [10, 0, 30, 20, 40]


def test_sequences_are_cut_after_they_are_joined() -> None:
    start = answers(3).mismatched(3).sequences(max_length=3)
    assert [row.tolist() for row in start.input_ids] == [[0, 20, 20], [1, 1, 0], [2, 2, 2]]
    assert [row.tolist() for row in start.target_mask] == [[False, True, True], [False, False, True], [False] * 3]
    end = answers(3).judged(max_length=2, truncation_mode="keep_end")
    assert [row.tolist() for row in end.target_mask] == [[False, True]] * 3
    assert end.is_desirable is not None
    assert end.is_desirable.tolist() == [True, False, True]


def test_rows_that_are_too_long_may_be_left_out() -> None:
    rows = Dataset.from_list([{"prompt": "ab", "completion": "c" * size, "label": True} for size in (1, 9, 3, 4)])
    whole = tokenize_unpaired(rows, tiny_tokenizer())
    lengths = whole.prompt_ids.lengths + whole.completion_ids.lengths
    kept = tokenize_unpaired(rows, tiny_tokenizer(), max_length=int(lengths[2]), truncation_mode="drop")
    assert kept.completion_ids == whole[[0, 2]].completion_ids
    with pytest.raises(ValueError, match="all are longer than max_length 3"):
        tokenize_unpaired(rows.select([1]), tiny_tokenizer(), max_length=3, truncation_mode="drop")


def test_targets_of_the_prompt_come_before_those_of_the_completion() -> None:
    rows = [{"prompt": "abc", "chosen": "de", "rejected": "f"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    plain = tokenize_preferences(Dataset.from_list(rows), tiny_tokenizer(), max_length=None)
    pairs = plain.with_prompt_targets()
    assert pairs.num_prompt_targets is not None
    assert pairs.num_prompt_targets.tolist() == [2, 0]
    assert [row.tolist() for row in pairs.chosen_mask] == [[False] + [True] * 5, [False, True, True]]
    assert pairs.rejected_mask == plain.rejected_mask


NEEDED: dict[str, Any] = {"model": "m", "dataset": [{"prompt": "a"}]}


@pytest.mark.parametrize(
    ("config_type", "keys", "told"),
    [
        (KTOConfig, {"beta": 0.0}, "beta must be positive"),
        (KTOConfig, {"loss_type": "bco"}, "loss_type must be one of kto, apo_zero_unpaired"),
        (KTOConfig, {"kl_batch_size": 0}, "kl_batch_size must be at least 1"),
        (KTOConfig, {"loss_type": "apo_zero_unpaired", "kl_batch_size": 4}, "which estimates no KL. Remove it"),
        (KTOConfig, {"precompute_ref_log_probs": True}, "Set shuffle_dataset: false, or loss_type: apo_zero_unpaired"),
        (KTOConfig, {"sync_ref_model": True, "tuner_type": "lora"}, "sync_ref_model needs a reference model"),
        (KTOConfig, {"ref_model_sync_steps": 3}, "sync_ref_model is false"),
        (KTOConfig, {"desirable_weight": -1.0}, "desirable_weight must be at least 0"),
        (CPOConfig, {"loss_type": "alphapo"}, "write simpo, cpo_alpha: 0 and alpha"),
        (CPOConfig, {"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing is 0.1, but loss_type is hinge"),
        (CPOConfig, {"simpo_gamma": 0.7}, "simpo_gamma is 0.7, but loss_type is sigmoid"),
        (CPOConfig, {"label_smoothing": 0.5}, r"label_smoothing must lie in \[0, 0.5\)"),
        (SimPOConfig, {"simpo_gamma": -0.1}, "simpo_gamma must be at least 0"),
        (ORPOConfig, {"beta": -1.0}, "beta must be positive"),
    ],
    ids=str,
)
def test_keys_without_a_meaning_are_refused(config_type: Any, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_type(**NEEDED, **keys)


def loaded(rlhf_type: str, folder: Path, text: str) -> Any:
    (folder / "x.yaml").write_text(f"rlhf_type: {rlhf_type}\nmodel: m\ndataset: [{{prompt: a}}]\n{text}")
    return load_config(command_named("rlhf", rlhf_type).config_type, ["--config", str(folder / "x.yaml")])


def test_files_of_ms_swift_choose_trainer_and_defaults(tmp_path: Path) -> None:
    simpo = loaded("simpo", tmp_path, "lr: 1.0e-5")
    assert (simpo.loss_type, simpo.beta, simpo.simpo_gamma, simpo.cpo_alpha) == ("simpo", 2.0, 1.0, 1.0)
    assert simpo.learning_rate == 1e-5
    assert loaded("cpo", tmp_path, "cpo_alpha: 0.5").cpo_alpha == 0.5
    assert type(loaded("orpo", tmp_path, "beta: 0.2")) is ORPOConfig
    kto = loaded("kto", tmp_path, "desirable_weight: 0.8\ncalculate_KL: true\ndefault: {gpus: 2}\nref: {gpus: 2}")
    assert kto.desirable_weight == 0.8
    assert loaded("kto", tmp_path, "loss_type: apo_zero_unpaired\ncalculate_KL: false").estimates_kl is False


@pytest.mark.parametrize(
    ("rlhf_type", "text", "told"),
    [
        ("kto", "calculate_KL: false", "loss_type decides whether KTO estimates a KL"),
        ("dpo", "desirable_weight: 2.0", "Write rlhf_type: kto"),
        ("dpo", "cpo_alpha: 2.0", "Write rlhf_type: cpo or simpo"),
        ("orpo", "simpo_gamma: 2.0", "Write rlhf_type: cpo or simpo"),
    ],
)
def test_keys_of_other_rlhf_types_are_refused_with_theirs(rlhf_type: str, text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        loaded(rlhf_type, tmp_path, text)
