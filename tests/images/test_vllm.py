"""vLLM completes and scores prompts with pictures, against the policy: one process for all of the file."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests import torchvision_on_cpu

pytestmark = pytest.mark.xdist_group("vllm")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pictures")
    environment = torchvision_on_cpu.environment(tmp_path_factory.mktemp("operators"))
    command = [sys.executable, "-m", "tests.images.vllm_cases", str(folder)]
    ended = subprocess.run(
        command, cwd=torchvision_on_cpu.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    answer: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answer


@pytest.mark.parametrize("name", ["first", "new", "frozen tower"])
def test_greedy_completions_and_their_logps_are_the_policys(name: str, found: dict[str, Any]) -> None:
    expected, completions, gap = found[name]
    assert completions == expected
    assert gap < 1e-4


def test_weights_of_all_parts_come_anew(found: dict[str, Any]) -> None:
    expected, completions, gap = found["old"]
    assert completions != expected
    assert gap > 0.1
    parts = found["fingerprints"]
    for part in ("patch_embed.proj", "visual.blocks.0", "visual.merger.mlp.0", "layers.0", "embed_tokens", "lm_head"):
        assert any(part in name for name in parts), part
    assert "1 of 1 parts of the engine's model differ from the trainer's" in found["stale tower"]


def test_what_the_tower_made_of_pictures_is_forgotten_in_sleep_and_with_new_weights(found: dict[str, Any]) -> None:
    assert min(found["kept"]) > 0
    assert min(found["kept again"]) > 0  # it sees again after it woke
    assert found["kept asleep"] == found["kept after new weights"] == [0, 0]


def test_no_token_of_a_picture_is_drawn(found: dict[str, Any]) -> None:
    assert found["pictures drawn"] == 0
    assert found["drawn"] < 1e-4


@pytest.mark.parametrize("name", ["scores", "top scores"])
def test_scores_of_rows_with_pictures_are_the_policys(name: str, found: dict[str, Any]) -> None:
    assert found[name] < 1e-4


def test_what_does_not_fit_is_told(found: dict[str, Any]) -> None:
    assert "vLLM's processor gives picture 0 of the 1 of a prompt 12 tokens" in found["another number of tokens"]
    assert "vLLM does not take the 3 pictures of a prompt: At most 2 image(s)" in found["too many"]


def test_samples_are_those_of_the_hf_engine(found: dict[str, Any]) -> None:
    (samples, ledger), theirs = found["sampled"]
    assert [samples, ledger] == theirs
    assert any(sample["images"] for sample in samples)
    assert "nowhere.png' does not exist" in ledger[-1]["reason"]


def test_a_run_trains_an_adapter_that_the_engine_holds_apart(found: dict[str, Any]) -> None:
    first, second = found["steps"]
    for step in (first, second):
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
    assert second["grad_norm"] > 0
    assert found["adapter"]
    assert not any("visual" in name for name in found["adapter"])


def test_ms_swifts_file_on_pictures_runs_on_megatron_with_vllm(found: dict[str, Any]) -> None:
    steps = found["ray_grpo_colocate"]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-4


def test_ms_swifts_file_with_students_and_teachers_of_qwen3_5_in_vllm(found: dict[str, Any]) -> None:
    steps = found["standalone"]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(0 < step["loss"] < 10 for step in steps)
