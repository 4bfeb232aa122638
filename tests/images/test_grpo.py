"""GRPO of vision models: completions of prompts with pictures, and runs off and over workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from benchmarks.tiny.vision import MODELS, png, save_vision
from rayhelper import ConfigError, RayHelper
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import final_bytes, final_weights, grpo_config, lines, together
from tests.golden.tiny import tiny_model
from tests.images.test_sft import image_of, parts_of, taken_by, whole_of
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.megatron.architectures import architecture_mistakes
from trainers.batch import Prompts, Ragged, Rollouts
from trainers.data.images.processor import ImageReader, load_processor
from trainers.grpo.trainer import GRPOTrainer
from trainers.parts.engine import prompts_of
from trainers.parts.model_checks import check_vision_model, configuration_of
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine
from trainers.rollout.vllm.vision import features

QUESTIONS: list[tuple[str, list[int]]] = [
    ("<image>How many?", [0]),
    ("No picture", []),
    ("A <image> and <image>?", [1, 2]),
    ("<image>How many?", [3]),
]
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": text}], "images": [png(number) for number in numbers]}
    for text, numbers in QUESTIONS
]
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: save_vision(tmp_path_factory.mktemp(name), name) for name in MODELS}


def prompts(model: str, tmp_path: Path) -> Prompts:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return prompts_of(grpo_config(model, tmp_path), ROWS, tokenizer, ImageReader(tokenizer, model))


def undrawn(processor: Any) -> list[int]:
    """The ids of all tokens that stand for parts of pictures, videos and sounds."""
    sounds = processor.tokenizer.convert_tokens_to_ids(list(getattr(processor, "sound_tokens", ())))
    return sorted({*processor.seen_token_ids, *sounds})


def greedy_of_transformers(model: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and completions by the processor and ``generate``, a row at a time."""
    module, processor = whole_of(model), load_processor(model)
    prompt_ids, completions = [], []
    for text, numbers in QUESTIONS:
        turns = [{"role": "user", "content": parts_of(text)}]
        shown = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        images = [[image_of(png(number)) for number in numbers]] if numbers else None
        batch = taken_by(module, dict(processor(text=[shown], images=images, return_tensors="pt")))
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        ids = module.generate(**batch, **options, suppress_tokens=undrawn(processor))[0].tolist()
        start = batch["input_ids"].shape[1]
        prompt_ids.append(ids[:start])
        completions.append(ids[start:])
    return prompt_ids, completions


@pytest.mark.parametrize("name", MODELS)
def test_greedy_completions_are_those_of_transformers_and_their_logps_those_of_training(
    name: str, folders: dict[str, str], tmp_path: Path
) -> None:
    model = folders[name]
    wanted_prompts, wanted = greedy_of_transformers(model)
    asked = prompts(model, tmp_path)
    assert [row.tolist() for row in asked.prompt_ids] == wanted_prompts
    backend = FsdpBackend(model)
    engine = HfEngine(backend.module, AutoTokenizer.from_pretrained(model), vision=backend.vision)
    engine.check_decoding()
    found = engine.generate(asked, Sampling(max_completion_length=NEW_TOKENS, temperature=0.0), seed=0)
    assert [row.tolist() for row in found.completion_ids] == wanted
    rollouts = Rollouts(
        found.prompt_ids, found.completion_ids, found.rollout_logps, found.truncated, images=asked.images
    )
    logps = backend.token_logps(rollouts.samples(), micro_batch_size=2)
    np.testing.assert_allclose(logps.values, found.rollout_logps.values, atol=1e-4)
    alone = HfEngine(model, AutoTokenizer.from_pretrained(model))
    own = alone.generate(asked, Sampling(max_completion_length=NEW_TOKENS, temperature=1.0), seed=3)
    again = engine.generate(asked, Sampling(max_completion_length=NEW_TOKENS, temperature=1.0), seed=3)
    assert own.completion_ids == again.completion_ids
    assert isinstance(own.completion_ids, Ragged)


KEYS: dict[str, Any] = {
    "dataset": ROWS,
    "eval_dataset": None,
    "num_generations": 2,
    "max_completion_length": 5,
    "max_prompt_length": None,
    "max_steps": 2,
    "warmup_steps": 0,
    "freeze_vit": False,
}


def trained(model: str, folder: Path, **keys: Any) -> GRPOTrainer:
    trainer = GRPOTrainer(grpo_config(model, folder, **KEYS | keys))
    trainer.train()
    return trainer


def test_a_run_is_the_same_off_in_a_worker_and_over_two_workers(
    folders: dict[str, str], tmp_path: Path, ray_session: RaySession
) -> None:
    model = folders["qwen2_5_vl"]
    with without_runtime():
        trained(model, tmp_path / "off")
    with RayHelper.session(together(1), runtime="inprocess"):
        trained(model, tmp_path / "inprocess")
    with ray_session(together(1)):
        trained(model, tmp_path / "ray")
    with ray_session(together(2)):
        trained(model, tmp_path / "two", adam_epsilon=1e-4)
    with without_runtime():
        trained(model, tmp_path / "alone", adam_epsilon=1e-4)
    assert any(line["loss"] for line in lines(tmp_path / "off"))
    before = AutoModelForImageTextToText.from_pretrained(model).state_dict()
    after = AutoModelForImageTextToText.from_pretrained(tmp_path / "off" / "final").state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before if "visual.blocks" in name)
    for place in ("inprocess", "ray"):
        assert lines(tmp_path / place) == lines(tmp_path / "off")
        assert final_bytes(tmp_path / place) == final_bytes(tmp_path / "off")
    alone = final_weights(tmp_path / "alone")
    for name, weight in final_weights(tmp_path / "two").items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_pictures_count_in_the_length_of_a_prompt(folders: dict[str, str], tmp_path: Path) -> None:
    model = folders["qwen2_5_vl"]
    lengths = prompts(model, tmp_path).prompt_ids.lengths
    limit = int(lengths.max()) - 1
    trainer = GRPOTrainer(
        grpo_config(model, tmp_path, **KEYS | {"max_prompt_length": limit, "drop_long_prompts": True})
    )
    assert len(trainer.rows) == int((lengths <= limit).sum()) < len(ROWS)
    whole = GRPOTrainer(grpo_config(model, tmp_path, **KEYS | {"max_prompt_length": 12}))
    with pytest.raises(ValueError, match="max_prompt_length 12 would cut a picture apart"):
        whole.train()


def test_a_prompts_pictures_travel_once_for_all_its_completions(folders: dict[str, str], tmp_path: Path) -> None:
    import pickle

    model = folders["qwen2_5_vl"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    reader = ImageReader(tokenizer, model)
    config = grpo_config(model, tmp_path)
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    from PIL import Image

    row = {"prompt": ROWS[0]["prompt"], "images": [Image.fromarray(noise)]}
    sizes = [
        len(pickle.dumps(prompts_of(config, [dict(row) for _ in range(count)], tokenizer, reader))) for count in (1, 8)
    ]
    assert sizes[1] - sizes[0] < 8 * 1000 < sizes[0] + 4000
    asked = prompts_of(config, [dict(row) for _ in range(8)], tokenizer, reader)
    assert asked.images is not None
    assert len({id(pictures) for pictures in asked.images}) == 1


def test_a_prompt_whose_picture_is_missing_is_told(folders: dict[str, str], tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": ROWS[0]["prompt"], "images": ["nowhere.png"]}]
    with pytest.raises(
        ConfigError, match=r"1 of 5 rows are broken: row 4 \(images: image 0 .*nowhere.png' does not exist"
    ):
        GRPOTrainer(grpo_config(folders["qwen2_5_vl"], tmp_path, **KEYS | {"dataset": rows}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vllm": ({"rollout_engine": "vllm"}, "rollout_engine: vllm needs torchvision for a model that sees pictures"),
    "shared rows": ({"sequence_parallel_size": 2}, "workers cannot share rows with pictures yet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vision_models_cannot_do_is_refused_before_the_start(
    name: str, folders: dict[str, str], tmp_path: Path
) -> None:
    keys, told = REFUSED[name]
    with pytest.raises(ConfigError, match=told):
        GRPOTrainer.check(grpo_config(folders["qwen2_5_vl"], tmp_path, **KEYS | keys), None)


def test_nothing_that_reads_texts_alone_is_given_rows_with_pictures(folders: dict[str, str], tmp_path: Path) -> None:
    model = folders["qwen2_5_vl"]
    tiny_model(num_labels=1).save_pretrained(blind := tmp_path / "blind")
    with pytest.raises(ConfigError, match="rows have images, which this run cannot read"):
        GRPOTrainer(grpo_config(model, tmp_path, **KEYS | {"reward_model": [str(blind)], "reward_weights": None}))
    told = list(architecture_mistakes(configuration_of(folders["gemma3"], False).to_dict()))
    assert told == [one for one in told if "gemma3" in one and "not known" in one] != []


MEGATRON = {"backend": "megatron", "beta": 0.0}


@pytest.mark.parametrize(
    "keys",
    [
        {"freeze_llm": True} | {"freeze_vit": False, "tuner_type": "lora"},
        {"freeze_llm": True, "freeze_vit": False, "pipeline_model_parallel_size": 2},
        {"vit_lr": 1e-5, "learning_rate": 0.0, "freeze_vit": False},
    ],
)
def test_megatron_refuses_parts_that_it_cannot_train(
    keys: dict[str, Any], folders: dict[str, str], tmp_path: Path
) -> None:
    model, more = folders["qwen3_5"], {"freeze_vit": None}
    with pytest.raises(ConfigError, match=f"{next(iter(keys))} is .*megatron"):
        check_vision_model(
            grpo_config(model, tmp_path, **KEYS | more | MEGATRON | keys), configuration_of(model, False)
        )


@pytest.mark.parametrize("keys", [{"sleep_level": 2}, {"vllm_engine_kwargs": {"load_format": "dummy"}}])
def test_an_engine_keeps_the_tower_that_megatron_does_not_send(
    keys: dict[str, Any], folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "find_spec", lambda name: name)  # as if torchvision were installed here
    model, given = folders["qwen3_5"], KEYS | MEGATRON | {"rollout_engine": "vllm"} | keys
    with pytest.raises(ConfigError, match="does not send the frozen parts of a vision model"):
        check_vision_model(grpo_config(model, tmp_path, **given | {"freeze_vit": None}), configuration_of(model, False))
    whole: dict[str, Any] = {"freeze_vit": False, "freeze_aligner": False}
    apart = given | {"tuner_type": "lora", "vllm_enable_lora": True, "freeze_vit": False, "sleep_level": 1}
    with pytest.raises(ConfigError, match="runs an adapter of the language model only"):
        check_vision_model(
            grpo_config(model, tmp_path, **apart | {"vllm_engine_kwargs": {}}), configuration_of(model, False)
        )
    check_vision_model(grpo_config(model, tmp_path, **given | whole), configuration_of(model, False))
