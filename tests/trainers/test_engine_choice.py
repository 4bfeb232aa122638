"""``rollout_engine: auto``: which engine it stands for; the run, ``--print_config`` and a plan say the same."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayhelper import ConfigError
from rayhelper.planning.dry_run import make_plan
from trainers.configuration.reading.command_line import load_config
from trainers.grpo.config import GRPOConfig
from trainers.rollout import choice
from trainers.run.header import header

TOGETHER = "policy: {device: CPU, ranks: 2, workers: [train, rollout]}"
APART = "a: {device: CPU, ranks: 2, workers: [train]}, b: {device: CPU, ranks: 2, workers: [rollout]}"
BESIDE = "train: {gpus: 2}, rollout: {shares_devices_with: train, gpus: 2}"
OWN = "role rollout has workers of its own"
ALSO = "the workers that train also generate"
LOOP = "hf decodes {} only by transformers' own loop"
MEGATRON = "backend is megatron, whose model cannot generate"


def read(folder: Path, text: str, kind: str, monkeypatch: pytest.MonkeyPatch, *argv: str, vllm: bool = True) -> Any:
    """The configuration of a file whose model is of this kind, with vLLM installed or not."""
    write(folder, text, kind)
    there = object() if vllm else None
    monkeypatch.setattr(choice, "find_spec", lambda name: there if name == "vllm" else find_spec(name))
    return load_config(GRPOConfig, ["--config", str(folder / "x.yaml"), *argv])


def write(folder: Path, text: str, kind: str) -> None:
    (folder / "model").mkdir(exist_ok=True)
    if kind:
        (folder / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    keys = f"model: {folder / 'model'}\ndataset: rows\nreward_funcs: [exact_answer]\nrollout_engine: auto\n"
    (folder / "x.yaml").write_text(keys + text)


CASES = [
    ("", "qwen3", True, "hf", ALSO),
    ("use_ray: true", "gemma3_text", True, "hf", ALSO),  # with sliding windows
    (f"use_ray: true\ndevice_groups: {{{TOGETHER}}}", "qwen3", True, "hf", ALSO),
    (f"use_ray: true\ndevice_groups: {{{APART}}}", "qwen3", True, "vllm", OWN),
    (f"use_ray: true\ndevice_groups: {{{APART}}}", "qwen3", False, "hf", f"{OWN}, but vLLM is not installed"),
    (f"use_ray: true\ndevice_groups: {{{BESIDE}}}", "qwen3", True, "vllm", OWN),
    ("use_ray: true\ntrain: {gpus: 2}\nrollout: {gpus: 2}", "qwen3", True, "vllm", OWN),
    (f"device_groups: {{{APART}}}", "qwen3", True, "hf", ALSO),  # without Ray one process has all roles
    ("backend: megatron", "qwen3", True, "vllm", MEGATRON),
    ("backend: megatron", "qwen3", False, "hf", f"{MEGATRON}, but vLLM is not installed"),
    ("", "bamba", True, "vllm", LOOP.format("bamba")),
    # whose attention cannot be set, and whose heads are too small for vLLM on a CPU
    ("", "bloom", True, "hf", LOOP.format("bloom") + ", but rollout_engine: vllm cannot run bloom on a CPU with"),
    ("", "bamba", False, "hf", LOOP.format("bamba") + ", but vLLM is not installed"),
    ("", "qwen3_next", True, "hf", LOOP.format("qwen3_next") + ", but rollout_engine: vllm cannot run qwen3_next on a"),
    ("", "qwen2_vl", False, "hf", LOOP.format("qwen2_vl, a vision model,") + ", but vLLM is not installed"),
    ("", "", True, "hf", ALSO + "; the architecture of"),
    ("vllm_tensor_parallel_size: 2", "qwen3", False, "vllm", "vllm_tensor_parallel_size is 2"),
]


@pytest.mark.parametrize(("text", "kind", "vllm", "engine", "reason"), CASES)
def test_auto_is_chosen_by_placement_backend_architecture_and_what_is_installed(
    text: str, kind: str, vllm: bool, engine: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read(tmp_path, text, kind, monkeypatch, vllm=vllm)
    assert config.rollout_engine == engine
    (line,) = [line for line in header(config, 1, {}) if line.startswith("rollout_engine")]
    assert yaml.safe_load(line) == {"rollout_engine": engine}  # as it is written to fix it
    assert f"# auto: {reason}" in line
    made = GRPOConfig(**{**vars(config), "rollout_engine": "auto"})
    assert made == config


def test_processes_of_torchrun_lie_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "a run", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert read(tmp_path, f"device_groups: {{{APART}}}", "qwen3", monkeypatch).rollout_engine == "vllm"
    assert read(tmp_path, "", "qwen3", monkeypatch).rollout_engine == "hf"


def test_without_auto_nothing_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(tmp_path, f"device_groups: {{{APART}}}", "qwen3", monkeypatch, *"--rollout_engine hf".split())
    assert config.rollout_engine == GRPOConfig.rollout_engine == "hf"
    assert not [line for line in header(config, 1, {}) if line.startswith("rollout_engine")]


def test_keys_of_the_other_engine_are_passed_over_and_defaults_are_those_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    text = "vllm_max_model_len: 2048\nvllm_block_size: 16\nrollout_batch_size: 8\n"
    config = read(tmp_path, text, "qwen3", monkeypatch)
    assert (config.rollout_engine, config.vllm_max_model_len, config.rollout_batch_size) == ("hf", None, 8)
    assert "vllm_max_model_len, vllm_block_size (rollout_engine: auto took hf)" in caplog.text
    config = read(tmp_path, f"{text}attn_impl: sdpa\n", "bamba", monkeypatch)  # with ms-swift's defaults
    assert (config.rollout_engine, config.vllm_max_model_len, config.rollout_batch_size) == ("vllm", 2048, None)
    assert (config.vllm_engine_kwargs, config.vllm_gpu_memory_utilization) == ({"block_size": 16}, 0.9)
    assert "rollout_batch_size (rollout_engine: auto chose vllm" in caplog.text
    with pytest.raises(ConfigError, match="use_vllm means rollout_engine: vllm, but rollout_engine is auto"):
        read(tmp_path, "use_vllm: true", "qwen3", monkeypatch)


@pytest.mark.parametrize(("groups", "engine"), [(TOGETHER, "hf"), (APART, "vllm")])
def test_a_plan_and_print_config_say_what_the_run_takes(
    groups: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"device_groups: {{{groups}}}\nuse_ray: true"
    assert read(tmp_path, text, "qwen3", monkeypatch).rollout_engine == engine
    with pytest.raises(SystemExit):
        read(tmp_path, text, "qwen3", monkeypatch, "--print_config")
    assert yaml.safe_load(capsys.readouterr().out)["rollout_engine"] == engine
    for trainer in ("grpo", None):
        plan = make_plan(str(tmp_path / "x.yaml"), None, None, None, 80.0, trainer)
        (role,) = [role for group in plan.groups for role in group.roles if role.role == "rollout"]
        assert role.engine == engine
        assert any(f"rollout_engine: {engine}" in told for told in plan.findings.assumed)
