"""Episodes with pictures: an environment answers a vision model with images, which it sees in all later turns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from benchmarks.tiny.vision import picture, save_vision
from rayhelper import RayHelper
from tests.conftest import registries_restored, without_runtime
from tests.e2e.runs import final_bytes, final_weights, grpo_config, lines, together
from tests.golden.tiny import save_tiny
from trainers.data.images.processor import load_processor
from trainers.grpo.trainer import GRPOTrainer
from trainers.plugins import ENVIRONMENTS
from trainers.rollout.environments import Reply
from trainers.rollout.schedulers import MultiTurnScheduler, Scheduled

ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": "<image>" * (k % 2) + "Look."}],
        "images": [picture(k)] * (k % 2),
        "first": k,
    }
    for k in range(4)
]
KEYS: dict[str, Any] = {"dataset": ROWS, "eval_dataset": None, "num_generations": 2, "max_completion_length": 120}
KEYS |= {"max_prompt_length": None, "max_steps": 2, "warmup_steps": 0, "freeze_vit": False, "reward_funcs": []}
KEYS |= {"reward_weights": None, "max_turns": 3, "completion_length_limit_scope": "per_round", "temperature": 1.0}


class Camera:
    """Shows another picture after each turn, and likes long words."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.number = int(row["first"])

    def step(self, text: str) -> Reply:
        self.number += 1
        parts = [{"type": "text", "text": "Now: "}, {"type": "image", "image": picture(self.number)}]
        return Reply([{"role": "user", "content": parts}], reward=float(len(text)), goes_on=True)


CAMERA = "tests.images.test_episodes.Camera"


def config(model: str, folder: Path, **keys: Any) -> Any:
    keys = {"environment": CAMERA, "max_completion_length": 5} | keys
    return grpo_config(model, folder, **KEYS | keys)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "internvl"])
def test_log_probabilities_of_all_turns_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_vision(tmp_path / "model", name)
    with without_runtime():
        trainer = GRPOTrainer(config(model, tmp_path / "out"))
        trainer.build(1)
        starts = trainer.generator.starts(trainer.rows, trainer.tokenizer, np.arange(4), trainer.images)
        rollouts = trainer.generator.complete(starts, 0)
        ours = trainer.policy.logps(rollouts.samples())
    assert rollouts.num_turns.tolist() == [3] * 4  # type: ignore[union-attr]
    assert rollouts.images is not None
    assert [len(pictures) for pictures in rollouts.images] == [2, 3, 2, 3]
    np.testing.assert_allclose(rollouts.rollout_logps.values[rollouts.is_sampled.values], ours.values, atol=1e-4)  # type: ignore[union-attr]
    processor, module = load_processor(model), AutoModelForImageTextToText.from_pretrained(model)
    for k, row in enumerate(rollouts[k : k + 1] for k in range(4)):
        numbers = [*[k] * (k % 2), k + 1, k + 2]
        ids = np.concatenate([row.prompt_ids[0], row.completion_ids[0]])
        text = " ".join([processor.image_token] * len(numbers))
        seen = processor(text=[text], images=[[picture(number) for number in numbers]], return_tensors="pt")
        counted = np.isin(seen["input_ids"][0].numpy(), processor.image_token_ids).sum()
        assert np.isin(ids, processor.image_token_ids).sum() == counted, "each picture has all of its tokens"
        marks = {
            key: torch.from_numpy(np.isin(ids, processor.image_token_ids)).long()[None]
            for key in ("mm_token_type_ids", "token_type_ids")
            if key in seen
        }
        pixels = {key: value for key, value in seen.items() if key not in ("input_ids", "attention_mask", *marks)}
        with torch.no_grad():
            logits = module(input_ids=torch.from_numpy(ids)[None], **pixels, **marks).logits[0]
        logps = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(ids)[1:, None])[:, 0].numpy()
        is_sampled = row.is_sampled[0]  # type: ignore[index]
        np.testing.assert_allclose(logps[-len(is_sampled) :][is_sampled], ours[k], atol=1e-4)


def test_a_run_in_a_worker_is_that_without_and_what_is_shown_matters(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "model")
    with without_runtime():
        GRPOTrainer(config(model, tmp_path / "off")).train()
        GRPOTrainer(config(model, tmp_path / "blind", environment="tests.images.test_episodes.Blind")).train()
    with without_runtime(), RayHelper.session(together(1), runtime="inprocess", strict=True):
        GRPOTrainer(config(model, tmp_path / "one")).train()
    assert lines(tmp_path / "one") == lines(tmp_path / "off")
    assert final_bytes(tmp_path / "one") == final_bytes(tmp_path / "off")
    other = final_weights(tmp_path / "blind")
    assert any(not torch.equal(weight, other[key]) for key, weight in final_weights(tmp_path / "off").items())


class Blind(Camera):
    """The same with one picture for all."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.number = 0

    def step(self, text: str) -> Reply:
        self.number = 0
        return super().step(text)


def test_pictures_of_an_environment_need_a_model_that_sees(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Look."}], "first": 0}]
    trainer = GRPOTrainer(config(save_tiny(tmp_path / "model"), tmp_path / "out", dataset=rows, freeze_vit=None))
    with pytest.raises(ValueError, match="answers with an image, and a model of this run reads only texts"):
        trainer.train()


class Zoom(MultiTurnScheduler):
    """A scheduler of ms-swift that shows what ``Camera`` shows."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        assert len(infer_request.images) == current_turn - 1 + infer_request.data_dict["first"] % 2
        return False

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        number = infer_request.data_dict["first"] + current_turn
        infer_request.messages.append({"role": "user", "content": "Now: <image>"})
        infer_request.images.append(picture(number))
        infos = {"images": infer_request.images, "total_reward": 0.0}
        return {"infer_request": infer_request, "rollout_infos": infos}


class Changed(Zoom):
    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.images = [picture(5)] * (2 if current_turn == 1 else 4)
        infer_request.messages.append({"role": "user", "content": "<image>" * 2})
        return {"infer_request": infer_request}


def test_a_schedulers_pictures_are_shown_as_an_environments(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "model")

    def drawn(environment: str) -> Any:
        with without_runtime():
            trainer = GRPOTrainer(config(model, tmp_path / "out", environment=environment))
            trainer.build(1)
            starts = trainer.generator.starts(trainer.rows, trainer.tokenizer, np.arange(4), trainer.images)
            return trainer.generator.complete(starts, 0)

    with registries_restored():
        ENVIRONMENTS.register("zoom")(Scheduled("zoom", Zoom))
        ENVIRONMENTS.register("changed")(Scheduled("changed", Changed))
        one, other = drawn(CAMERA), drawn("zoom")
        with pytest.raises(ValueError, match="Changed changed images that the model has seen"):
            drawn("changed")
    assert one.completion_ids == other.completion_ids
    assert one.rollout_logps == other.rollout_logps
    keys = [[[image.key for image in row] for row in rollouts.images] for rollouts in (one, other)]
    assert keys[0] == keys[1]
    assert other.rollout_infos is not None
    assert "images" not in other.rollout_infos[0]
