"""Placements that an engine cannot work in are told of before anything starts, and none that it can."""

from __future__ import annotations

from typing import Any

import pytest

from rayhelper import ConfigError, DeviceGroups
from trainers.configuration.completion import KEYS_AND_FIELDS, CompletionConfig
from trainers.gkd.config import GKDConfig
from trainers.parts.checks import check_completions
from trainers.parts.engine import build_vllm, vllm_settings
from trainers.rollout.vllm.settings import checked_engine_kwargs

pytestmark = pytest.mark.xdist_group("vllm")  # in the process that imports it

TRAIN: dict[str, Any] = {"device": "GPU", "ranks": [0, 1], "workers": ["train"]}
TOGETHER: dict[str, Any] = {"all": {"device": "GPU", "ranks": 2, "workers": ["train", "rollout"]}}
ON_CPU: dict[str, Any] = {"all": {"device": "CPU", "ranks": 2, "workers": ["train", "rollout"]}}


def apart(gpus_per_worker: int = 1) -> dict[str, Any]:
    """Four GPUs for role rollout."""
    rollout = {"device": "GPU", "ranks": [2, 3, 4, 5], "workers": ["rollout"], "gpus_per_worker": gpus_per_worker}
    return {"learner": TRAIN, "actors": rollout}


def check(keys: dict[str, Any], groups: dict[str, Any] | None) -> None:
    config = CompletionConfig(model="any", dataset="any", rollout_engine="vllm", **keys)
    check_completions(config, None if groups is None else DeviceGroups.parse(groups))


FIT: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "one process": ({}, None),
    "workers alone": ({}, apart()),
    "two workers a model": ({"vllm_tensor_parallel_size": 2}, apart()),
    "two GPUs of a worker a model": ({"vllm_tensor_parallel_size": 2}, apart(2)),
    "sleeps on GPUs": ({"sleep_level": 2}, TOGETHER),
    "room for one token more": ({"vllm_max_model_len": 513}, None),
    "room for one token after a prompt": (
        {"vllm_max_model_len": 101, "max_prompt_length": 100, "vllm_clip_completions": True},
        None,
    ),
    "just room": ({"vllm_max_model_len": 612, "max_prompt_length": 100}, None),
    "just room by vLLM's name": ({"vllm_engine_kwargs": {"max_model_len": 612}, "max_prompt_length": 100}, None),
    "as long as fits": ({"vllm_engine_kwargs": {"max_model_len": -1}, "max_prompt_length": 100}, None),
    "a key beside other fields": ({"vllm_max_num_seqs": 4, "vllm_engine_kwargs": {"enforce_eager": True}}, None),
}


@pytest.mark.parametrize("name", FIT)
def test_what_an_engine_can_work_in_is_accepted(name: str) -> None:
    check(*FIT[name])


MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "a GPU idles": ({}, apart(2), "vllm_tensor_parallel_size=1, but a worker of role rollout has 2 GPUs"),
    "GPUs idle": ({"vllm_tensor_parallel_size": 2}, apart(4), "Make the two equal"),
    "a GPU too few": ({"vllm_tensor_parallel_size": 4}, apart(2), "Make the two equal"),
    "a worker remains": ({"vllm_tensor_parallel_size": 3}, apart(), "does not divide the 4 workers of role rollout"),
    "slices of each": ({"vllm_tensor_parallel_size": 2}, TOGETHER, "workers that also train have a slice each"),
    "sleeps on a CPU": ({"sleep_level": 1}, ON_CPU, "sleep_level=1: vLLM frees only memory of GPUs"),
    "no room to complete": ({"vllm_max_model_len": 512}, None, "no room for a prompt of at least 1 and a comp"),
    "no room for a token": (
        {"vllm_max_model_len": 100, "max_prompt_length": 100, "vllm_clip_completions": True},
        None,
        "no room for a token after a prompt of 100",
    ),
    "nothing ends them": ({"vllm_clip_completions": True}, None, "Set that, or remove it"),
    "no room for both": ({"vllm_max_model_len": 611, "max_prompt_length": 100}, None, "no room for a prompt of 100"),
    "no room by vLLM's name": (
        {"vllm_engine_kwargs": {"max_model_len": 611}, "max_prompt_length": 100},
        None,
        "^vllm_engine_kwargs: {max_model_len: 611} has no room for a prompt of 100 and a completion of 512 tokens",
    ),
    "no such field": (
        {"vllm_engine_kwargs": {"max_num_seq": 3}},
        None,
        r"^unknown key vllm_max_num_seq: vLLM's EngineArgs has no field .* \(did you mean vllm_max_num_seqs\?\)$",
    ),
    "almost a key": ({"vllm_engine_kwargs": {"tensor_paralel_size": 3}}, None, "mean vllm_tensor_parallel_size"),
    "like nothing": ({"vllm_engine_kwargs": {"qqq": 3}}, None, "has no field 'qqq' for vllm_engine_kwargs$"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_it_cannot_work_in_is_told_before_anything_starts(name: str) -> None:
    keys, groups, message = MISFITS[name]
    with pytest.raises(ConfigError, match=message):
        check(keys, groups)


TWICE: dict[str, tuple[Any, Any]] = {
    "max_model_len": (600, 600),
    "max_num_seqs": (4, 8),
    "gpu_memory_utilization": (0.5, 0.6),
    "enable_prefix_caching": (False, True),
    "enforce_eager": (True, False),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_field_is_said_by_a_key_or_by_vllms_name(name: str) -> None:
    by_key, by_name = TWICE[name]
    message = f"vllm_{name}: {by_key} and vllm_engine_kwargs: {{{name}: {by_name}}} set the same field"
    with pytest.raises(ConfigError, match=message):
        check({f"vllm_{name}": by_key, "vllm_engine_kwargs": {name: by_name}}, None)


def test_the_keys_that_have_a_field_of_their_name_are_those_that_set_it() -> None:
    keys = {key: value for key, (value, _) in TWICE.items()}
    config = CompletionConfig(
        model="any", dataset="any", rollout_engine="vllm", **{f"vllm_{name}": value for name, value in keys.items()}
    )
    assert vllm_settings(config, shares_devices=False) == keys
    assert set(KEYS_AND_FIELDS) == set(keys)


# --- changes to vLLM


@pytest.mark.parametrize("keys", [{}, {"vllm_patches": False}])
def test_an_engine_is_built_with_patches_unless_the_key_says_otherwise(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[dict[str, Any]] = []
    monkeypatch.setattr("trainers.rollout.vllm.engine.VllmEngine", lambda *_, **settings: built.append(settings))
    config = CompletionConfig(model="any", dataset="any", rollout_engine="vllm", dtype="float32", **keys)
    build_vllm(config, "any", None, shares_devices=False)
    assert [settings["patches"] for settings in built] == [not keys]


def test_an_engine_sleeps_where_a_model_is_trained_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, Any]] = []
    monkeypatch.setattr("trainers.rollout.vllm.engine.VllmEngine", lambda *_, **settings: built.append(settings))
    config = CompletionConfig(model="any", dataset="any", rollout_engine="vllm", dtype="float32", sleep_level=2)
    for shares_devices in (True, False):
        build_vllm(config, "any", None, shares_devices=shares_devices)
    assert [settings["sleep_level"] for settings in built] == [2, 0]


def test_the_key_of_patches_needs_an_engine_of_vllm_be_it_a_teachers() -> None:
    keys: dict[str, Any] = {"model": "any", "dataset": "any", "vllm_patches": False}
    with pytest.raises(ConfigError, match="vllm_patches needs rollout_engine: vllm, but it is hf"):
        CompletionConfig(**keys)
    with pytest.raises(ConfigError, match="vllm_patches needs rollout_engine: vllm, but it is hf"):
        GKDConfig(**keys, teacher_model="any")
    assert not GKDConfig(**keys, teacher_model="any", teacher_engine="vllm", gkd_logits_topk=8).vllm_patches


@pytest.mark.parametrize("key", ["vllm_engine_kwargs", "teacher_engine_kwargs"])
def test_patches_are_no_field_of_an_engine(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} may not hold 'patches'.*Write the key vllm_patches"):
        checked_engine_kwargs({"patches": False}, key=key)
