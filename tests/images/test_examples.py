"""The example with pictures: its data, its reward, and two steps of it on a tiny model, off and on Ray."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from benchmarks.tiny.vision import save_vision
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import final_bytes, lines, together
from trainers.cli import load_config, main, run
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.plugins import DATASETS, REWARDS, load_plugins

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/grpo/count_shapes.yaml"
MS_SWIFT = "examples/ms_swift/grpo_images.yaml"


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch, own_registries: None) -> None:
    monkeypatch.chdir(ROOT)


def configured(model: str, folder: Path) -> GRPOConfig:
    small: dict[str, Any] = {"model": model, "output_dir": folder, "max_steps": 2, "max_completion_length": 6}
    small |= {"global_batch_size": 8, "num_generations": 4, "per_device_train_batch_size": 4, "eval_strategy": "no"}
    small |= {"learning_rate": 1e-2, "warmup_steps": 0}
    config: GRPOConfig = load_config(
        GRPOConfig, ["--config", EXAMPLE, *[f"--{key}={value}" for key, value in small.items()]]
    )
    return config


def test_the_example_trains_two_steps_off_and_the_same_on_ray(tmp_path: Path, ray_session: RaySession) -> None:
    model = save_vision(tmp_path / "model")
    with without_runtime():
        run(GRPOTrainer, configured(model, tmp_path / "off"))
    told = [line for line in lines(tmp_path / "off") if "loss" in line]
    assert len(told) == 2
    assert all({"rewards/external_r1v_acc/mean", "rewards/format/mean"} <= line.keys() for line in told)
    with ray_session(together(1)):
        GRPOTrainer(configured(model, tmp_path / "ray")).train()
    assert lines(tmp_path / "ray") == lines(tmp_path / "off")
    assert final_bytes(tmp_path / "ray") == final_bytes(tmp_path / "off")


def test_the_file_in_ms_swifts_form_trains_two_steps(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "model")
    small = ["--max_steps=2", "--max_completion_length=6", "--global_batch_size=8", "--steps_per_generation=1"]
    arguments = [f"--config={MS_SWIFT}", f"--model={model}", f"--output_dir={tmp_path / 'out'}", *small]
    with without_runtime():
        with pytest.raises(SystemExit):  # told in one line
            main("rlhf", [*arguments, "--use_ray=false"])
        main("rlhf", [*arguments, "--use_vllm=false", "--use_ray=false", "--report_to=none"])
    assert len([line for line in lines(tmp_path / "out") if "loss" in line]) == 2
    adapter = load_file(tmp_path / "out" / "final" / "adapter" / "adapter_model.safetensors")
    assert all("language_model" in name for name in adapter)


def test_solutions_count_the_shapes_that_are_asked_for() -> None:
    load_plugins([str(ROOT / "examples/grpo/count_shapes.py")])
    rows = DATASETS["count_shapes"](split="train")
    assert len(rows) == 256
    assert rows == DATASETS["count_shapes"](split="train")
    assert not {row["images"][0] for row in rows} & {row["images"][0] for row in DATASETS["count_shapes"](split="test")}
    cell = 28
    for row in rows[:40]:
        image = Image.open(io.BytesIO(row["images"][0])).convert("RGB")
        # what stands in the middle of each cell, a little below, where every kind of shape is
        places = [(x + cell // 2, y + cell // 2 + 4) for x in range(0, 112, cell) for y in range(0, 112, cell)]
        found = [image.getpixel(place) for place in places]
        asked = row["messages"][0]["content"].removeprefix("<image>How many ").split()[0]
        wanted = [Image.new("RGB", (1, 1), asked).getpixel((0, 0))] if asked != "shapes" else None
        number = sum(colour != (255, 255, 255) and (wanted is None or colour in wanted) for colour in found)
        assert row["solution"] == f"<answer> {number} </answer>"


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        ("<think>two and one</think><answer>3</answer>", 1.0),
        ("<answer> 3 </answer>", 1.0),
        ("3", 1.0),
        ([{"role": "assistant", "content": "<answer>3</answer>"}], 1.0),
        ("<answer>4</answer>", 0.0),
        ("", 0.0),
        ("none at all", 0.0),
    ],
)
def test_a_right_number_is_worth_one(said: Any, worth: float) -> None:
    load_plugins([str(ROOT / "examples/grpo/count_shapes.py")])
    assert REWARDS["external_r1v_acc"]([said], solution=["<answer> 3 </answer>"]) == [worth]
