"""How large pictures become: arguments of the image processor, and ms-swift's variables that mean them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny.vision import png, save_vision
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.vision.pixels import Vision
from trainers.configuration.reading.command_line import load_config
from trainers.configuration.vision import vision_settings
from trainers.data.images.pictures import pictures_of
from trainers.data.images.processor import Processors, load_processor
from trainers.grpo.config import GRPOConfig
from trainers.parts.inputs import image_reader, load_model_and_tokenizer
from trainers.rollout.vllm.vision.features import engine_fields_of_vision, seeing
from trainers.sft.config import SFTConfig

SWIFT = ["--dataset", "d", "--defaults", "ms-swift", "--tuner_type", "full"]


def config_of(model: str, *more: str) -> SFTConfig:
    return load_config(SFTConfig, ["--model", model, *SWIFT, *more])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A token of a picture has 8 x 8 pixels."""
    return save_vision(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


def test_variables_of_ms_swift_say_how_large_pictures_become(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(model).image_processor_kwargs == {"min_pixels": 4 * 64, "max_pixels": 16384 * 64}
    monkeypatch.setenv("MAX_PIXELS", "1003520")
    assert config_of(model).image_processor_kwargs["max_pixels"] == 1003520
    monkeypatch.setenv("IMAGE_MAX_TOKEN_NUM", "9")  # wins there too
    assert config_of(model).image_processor_kwargs["max_pixels"] == 9 * 64
    given = config_of(model, "--model_kwargs", '{"image_max_token_num": 7}')
    assert given.image_processor_kwargs["max_pixels"] == 7 * 64
    assert load_config(SFTConfig, ["--model", model, "--dataset", "d"]).image_processor_kwargs == {}


def test_variables_of_ms_swift_say_which_frames_of_a_video_are_seen(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By hand: a token of these models has 8 x 8 pixels."""
    sizes: dict[str, Any] = {"size": {"shortest_edge": 128 * 64, "longest_edge": 768 * 64}, "max_video_tokens": 128000}
    frames = {"fps": 2.0, "min_frames": 4, "max_frames": 768, "cap_pixels_per_frame": True}
    assert config_of(model).video_processor_kwargs == frames | sizes
    monkeypatch.setenv("FPS_MAX_FRAMES", "12")
    monkeypatch.setenv("VIDEO_MAX_PIXELS", "6400")
    given = config_of(model, "--model_kwargs", '{"fps": 0.5}')
    assert given.video_processor_kwargs["size"] == {"shortest_edge": 128 * 64, "longest_edge": 6400}
    assert given.video_processor_kwargs | sizes == frames | sizes | {"fps": 0.5, "max_frames": 12}
    third = config_of(save_vision(tmp_path, "qwen3_vl")).video_processor_kwargs  # whose sizes are of all frames
    assert third["max_video_tokens"] == 100
    assert third["size"] == {"shortest_edge": 128 * 64, "longest_edge": 2 * int(128000 * 64 * 0.9)}
    assert load_config(SFTConfig, ["--model", model, "--dataset", "d"]).video_processor_kwargs == {}


def test_a_policy_that_sees_completes_by_vllm_where_ms_swifts_does(model: str) -> None:
    words = ["--reward_funcs", "exact_answer", "--use_vllm", "true", "--vllm_gpu_memory_utilization", "0.5"]
    words += ["--vllm_limit_mm_per_prompt", '{"image": 2}']
    config = load_config(GRPOConfig, ["--model", model, *SWIFT, *words, "--sleep_level", "1"])
    assert (config.rollout_engine, config.sleep_level) == ("vllm", 1)
    assert config.image_processor_kwargs["max_pixels"] > 0
    given = config.vllm_engine_kwargs["limit_mm_per_prompt"]
    assert engine_fields_of_vision(seeing(model), {"limit_mm_per_prompt": given}, {})["limit_mm_per_prompt"] == {
        "image": 2,
        "video": 0,
    }


def test_an_engine_beside_megatron_keeps_the_frozen_tower_as_it_sleeps(model: str) -> None:
    words = ["--reward_funcs", "exact_answer", "--use_vllm", "true", "--sleep_level", "2", "--backend", "megatron"]
    frozen = load_config(GRPOConfig, ["--model", model, *SWIFT, *words])
    assert (frozen.rollout_engine, frozen.sleep_level) == ("vllm", 1)
    trained = ["--freeze_vit", "false", "--freeze_aligner", "false"]
    assert load_config(GRPOConfig, ["--model", model, *SWIFT, *words, *trained]).sleep_level == 2


def test_a_language_model_reads_no_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_PIXELS", "1003520")
    assert config_of(save_tiny(tmp_path)).image_processor_kwargs == {}


def test_driver_and_worker_make_pictures_of_one_size(model: str) -> None:
    """By hand: 24 x 32 pixels are 12 tokens of 8 x 8; at most 6 tokens leave 2 x 2 of whole ones."""
    (shown,) = pictures_of([png(0)])
    counts = []
    for limit in ("100", "6"):
        config = config_of(model, "--image_processor_kwargs", f'{{"min_pixels": 64, "max_pixels": {int(limit) * 64}}}')
        reader = image_reader(config, *load_model_and_tokenizer(config))
        assert reader is not None
        text, _ = reader.expanded(reader.processor.image_token, (shown,))
        counts.append(text.count(reader.processor.image_token))
        vision = object.__new__(Vision)
        vision.processors = Processors(model, False, *vision_settings(config, trains=False).values())
        patches = vision._processed((shown,))["image_grid_thw"].prod()
        assert int(patches) == 4 * counts[-1]  # a token is 2 x 2 patches
    assert counts == [12, 4]


def test_an_argument_that_no_processor_takes_is_refused(model: str) -> None:
    config = config_of(model, "--image_processor_kwargs", '{"most_pixels": 64}')
    with pytest.raises(Exception, match="most_pixels is no argument"):
        image_reader(config, *load_model_and_tokenizer(config))


@pytest.mark.parametrize(
    ("kind", "given", "is_taken"),
    [
        ("qwen2_5_vl", {"patch_size": 8}, False),
        ("qwen2_5_vl", {"merge_size": 1}, False),
        ("qwen2_5_vl", {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 400}}, True),
        ("gemma3", {"size": {"height": 24, "width": 24}}, False),
        ("gemma3", {"size": 16}, True),
        ("internvl", {"size": {"height": 24, "width": 24}}, False),
        ("smolvlm", {"max_image_size": {"longest_edge": 24}}, False),
        ("smolvlm", {"size": {"longest_edge": 48}}, True),
    ],
)
def test_an_argument_that_does_not_fit_the_tower_is_refused(
    kind: str, given: dict[str, Any], is_taken: bool, tmp_path: Path
) -> None:
    model = save_vision(tmp_path, kind)
    if is_taken:
        assert load_processor(model, processing=given).image_token
        return
    with pytest.raises(ValueError, match=rf"image_processor_kwargs: {next(iter(given))} is .* needs .*\. Remove it"):
        load_processor(model, processing=given)
