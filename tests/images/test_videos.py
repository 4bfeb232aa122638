"""Rows with videos: as transformers has them, in one process that can import torchvision, and who refuses them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.tiny.vision import frames, save_vision
from rayhelper import ConfigError
from tests import torchvision_on_cpu
from tests.e2e.runs import sft_config
from tests.images.test_sft import turns
from trainers.data.images.videos import Video, videos_of
from trainers.parts.inputs import videos_mistake
from trainers.sft.trainer import SFTTrainer

MARGIN = 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("videos")
    environment = torchvision_on_cpu.environment(tmp_path_factory.mktemp("operators"))
    command = [sys.executable, "-m", "tests.images.video_cases", str(folder)]
    ended = subprocess.run(
        command, cwd=torchvision_on_cpu.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    answer: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answer


def test_losses_and_gradients_are_those_of_transformers_padded_padding_free_and_packed(found: dict[str, Any]) -> None:
    gaps = {name: value for name, value in found.items() if name.startswith(("padded", "padding free", "packed"))}
    assert len(gaps) == 16
    assert {name: value for name, value in gaps.items() if max(value) > MARGIN} == {}


def test_ranks_with_pictures_alone_gather_the_tower_as_often_as_ranks_with_videos(found: dict[str, Any]) -> None:
    assert max(found["sharded"]) < MARGIN
    assert max(found["sharded thinker"]) < MARGIN  # of pictures alone


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "qwen3_5", "internvl"])
def test_megatron_in_parts_gives_the_numbers_of_transformers(name: str, found: dict[str, Any]) -> None:
    gaps = found[f"megatron {name}"]
    assert max(gaps["logps"], gaps["losses"], gaps["norms"]) < MARGIN
    assert gaps["weights"] < 5e-5


def test_pairs_have_the_log_probabilities_of_transformers(found: dict[str, Any]) -> None:
    assert found["dpo loss"] == pytest.approx(0.6931472, abs=MARGIN)  # ln 2: the policy is its reference
    assert max(found["pairs chosen"], found["pairs rejected"]) < 1e-4


@pytest.mark.parametrize("name", ["cpo", "reward", "kto", "classification", "gkd"])
def test_other_trainers_see_the_videos(name: str, found: dict[str, Any]) -> None:
    seen, others = found[f"trainer {name}"]
    assert abs(seen - others) > MARGIN


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_greedy_completions_are_those_of_transformers(name: str, found: dict[str, Any]) -> None:
    ours, theirs = found[f"completions {name}"]
    assert ours == theirs
    assert found[f"logps {name}"] < MARGIN


def test_gemma_4_gives_the_numbers_of_transformers_for_pictures(found: dict[str, Any]) -> None:
    """Its processor needs torchvision. The audio tower is frozen with the vision tower."""
    gaps = {name: found[f"gemma4 {name}"] for name in ("padded", "padding free", "checkpointed", "mixture")}
    assert {name: value for name, value in gaps.items() if max(value) > MARGIN} == {}
    ours, theirs = found["gemma4 completions"]
    assert ours == theirs
    assert found["gemma4 trained"] == []
    assert found["gemma4 demoted"] == []


def test_llama_4_gives_the_numbers_of_transformers_for_pictures(found: dict[str, Any]) -> None:
    """Its processor needs torchvision."""
    assert max(*found["llama4 by 8"], *found["llama4 by 1"]) < MARGIN


def test_runs_of_grpo_and_ppo_learn_from_prompts_with_videos(found: dict[str, Any]) -> None:
    assert len(found["grpo"]) == 2
    assert found["grpo"][1] != 0
    assert found["ppo"][0] > 0


def test_the_models_video_processor_chooses_the_frames_of_a_file(found: dict[str, Any]) -> None:
    of_files = {name: value for name, value in found.items() if name.startswith("file")}
    assert len(of_files) == 6
    assert found["number of frames"]
    assert {name for name, (same, ours, theirs) in of_files.items() if not same or ours != theirs or not ours} == set()


def test_a_video_may_be_written_in_any_of_these_ways(found: dict[str, Any]) -> None:
    assert len(found["forms"]) == 7
    assert all(found["forms"].values())
    assert found["learned"] == "a square<|im_end|>"


BROKEN = {
    "missing": "nowhere.png' does not exist",
    "null": "a video of the list is null",
    "empty": "a video is a list without frames",
    "one frame": "must be larger than temporal_factor",
    "sizes": "its frames have different sizes: 24 x 32, 40 x 20 pixels",
    "a picture": "'0.png' is a picture. Write the frames of a video as a list in the list",
    "no file": "nowhere.mp4' does not exist",
    "no video": "opencv finds no frames in it",
    "address": "image_urls: true",
    "places": "the row has 1 videos and 2 places for them",
    "no place": "a place for a video that the row does not have",
    "token": "a text holds '<|video_pad|>'",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_row_whose_video_is_missing_or_broken_is_told(name: str, found: dict[str, Any]) -> None:
    assert "1 of 1 rows are broken: row 0" in found[f"broken {name}"]
    assert BROKEN[name] in found[f"broken {name}"]


def test_lengths_and_arguments_are_looked_at(found: dict[str, Any]) -> None:
    assert "max_length 12 would cut a picture apart" in found["cut"]
    assert "video_processor_kwargs: most_frames is not an argument" in found["argument"]
    assert "rows are broken" not in found["argument"]
    assert found["small"] == [2]  # two pairs of frames, of one token of 8 x 8 pixels each


def test_videos_of_several_lengths_are_told_where_a_model_takes_one(found: dict[str, Any]) -> None:
    assert "the videos of a micro-batch have 4, 6 frames" in found["stacks"]
    assert "Write per_device_train_batch_size: 1" in found["stacks"]


def test_a_model_without_videos_is_named(found: dict[str, Any]) -> None:
    assert "1 of 1 rows have videos: Gemma3Processor" in found["gemma3"]
    assert "the row has a video: Gemma3Processor" in found["gemma3 part"]


def test_without_torchvision_videos_are_refused_with_the_remedy(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "model", "qwen3_vl")
    rows = [{"messages": turns("<video>What?", "one"), "videos": [frames(0)]}]
    with pytest.raises(ConfigError, match="1 of 1 rows have videos: transformers processes videos with torchvision"):
        SFTTrainer(sft_config(model, tmp_path, dataset=rows, eval_dataset=None))
    inner = [{"messages": turns([{"type": "video", "video": "a.mp4"}], "one")}]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the row has a video: .* Run pip install torchvision"):
        SFTTrainer(sft_config(model, tmp_path, dataset=inner, eval_dataset=None))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"rollout_engine": "vllm"}, "rollout_engine: vllm, written or chosen by auto, passes no videos"),
        ({"teacher_engine": "vllm"}, "teacher_engine: vllm passes no videos to a model. Write teacher_engine: hf"),
        ({"has_environment": True}, "environments and tools pass no videos"),
    ],
)
def test_who_shows_no_videos_says_what_to_write(keys: dict[str, Any], told: str) -> None:
    config = SimpleNamespace(video_processor_kwargs={}, trust_remote_code=False)
    mistake = videos_mistake(SimpleNamespace(**vars(config) | keys), "nowhere", {})
    assert mistake is not None
    assert told in mistake


def test_videos_are_told_apart_by_their_frames() -> None:
    one, same, other = (videos_of([frames(number)])[0] for number in (0, 0, 1))
    assert isinstance(one, Video)
    assert one.key == same.key != other.key
    assert repr(one) == "Video(4 frames)"
