"""QLoRA: bitsandbytes is found by one process of these tests alone, as peft behaves otherwise beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError, DeviceGroups
from tests.golden.tiny import save_tiny
from trainers.configuration.tuners import quantization_mistake
from trainers.parts.checks import check_before_start
from trainers.sft.config import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
BITSANDBYTES = ROOT / ".venv" / "qlora"  # make setup installs it there
QLORA: dict[str, Any] = {"model": "m", "dataset": "d", "tuner_type": "lora", "load_in_4bit": True}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("quantized")
    command = [sys.executable, "-m", "tests.backends.quantized_cases", save_tiny(folder / "model"), str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{BITSANDBYTES}", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    answer: dict[str, dict[str, float]] = json.loads(found.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("bits", ["nf4", "fp4", "int8"])
def test_steps_and_merged_weights_are_those_of_peft_and_bitsandbytes(
    bits: str, cases: dict[str, dict[str, float]]
) -> None:
    found = cases[bits]
    assert found["learned"] > 3e-3
    assert found["quantized"] > 3e-3, "merged weights are the quantized ones, not those of the checkpoint"
    assert found["steps"] < 2e-6
    assert found["merged"] < 1e-6
    assert found["flops"] == 1.0, "two numbers in a byte are two"
    assert found["sent"] == 1.0, "engines get all that is quantized, changed by the adapter or not"


@pytest.mark.parametrize("bits", ["nf4", "fp4", "int8"])
def test_a_quantized_run_resumes_exactly_and_exports_a_model_that_is_not(
    bits: str, cases: dict[str, dict[str, float]]
) -> None:
    found = cases[bits]
    assert (found["names"], found["says quantized"], found["exported"], found["resumed"]) == (1.0, 0.0, 0.0, 0.0)
    assert found["scores"] < (0.1 if bits == "int8" else 1e-5)  # beside 8 bits inputs are quantized too


def test_without_bitsandbytes_one_line_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"load_in_4bit needs bitsandbytes, .* pip install bitsandbytes .*qlora\.txt"):
        check_before_start(SFTConfig(**QLORA), None)


def test_quantized_weights_lie_in_no_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BITSANDBYTES)
    groups = DeviceGroups.parse({"train": {"device": "CPU", "ranks": 2, "workers": ["train"]}})
    with pytest.raises(ConfigError, match=r"role train has 2 workers\. Write fsdp_sharding_strategy: no_shard"):
        check_before_start(SFTConfig(**QLORA), groups)
    assert quantization_mistake(SFTConfig(**QLORA), "full_shard", {"train": 1}) is None
    assert quantization_mistake(SFTConfig(**QLORA), "no_shard", {"train": 2}) is None


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tuner_type": "full"}, "quantized weights are not trained themselves, and tuner_type is full"),
        ({"tuner_type": "vera"}, "tuner_type is vera. Write tuner_type: lora"),
        ({"lora_kwargs": {"use_dora": True}}, "use_dora scales the weights themselves, which load_in_4bit quantizes"),
        ({"backend": "megatron"}, "load_in_4bit is True, but backend is megatron"),
    ],
)
def test_what_has_no_meaning_beside_quantized_weights_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SFTConfig(**QLORA | keys)
