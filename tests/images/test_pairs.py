"""DPO and CPO of vision models: pairs whose prompts have pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from benchmarks.tiny.vision import png, save_vision
from rayhelper import ConfigError
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import dpo_config, final_bytes, final_weights, lines, reward_config, together
from tests.images.test_sft import image_of, parts_of
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.cpo.config import CPOConfig
from trainers.cpo.trainer import CPOTrainer
from trainers.data.images.processor import load_processor
from trainers.dpo.scores import pair_logps
from trainers.dpo.trainer import DPOTrainer
from trainers.reward.trainer import RewardTrainer


def said(content: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content}]


PAIRS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": "<image>" * (k % 3) + f"How many? {k}"}],
        "chosen": said("one" * (1 + k % 2)),
        "rejected": said("several of them" * (1 + k % 3)),
        "images": [png(k + number) for number in range(k % 3)],
    }
    for k in range(6)
]
KEYS: dict[str, Any] = {
    "dataset": PAIRS,
    "eval_dataset": None,
    "max_length": None,
    "max_steps": 2,
    "warmup_steps": 0,
    "freeze_vit": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision(tmp_path_factory.mktemp("model"), "gemma3")


def of_transformers(model: str, row: dict[str, Any], name: str) -> float:
    """The log-probability of a completion, by the processor and the model itself."""
    processor, module = load_processor(model), AutoModelForImageTextToText.from_pretrained(model)
    prompt = [{**turn, "content": parts_of(turn["content"])} for turn in row["prompt"]]
    answer = [{**turn, "content": parts_of(turn["content"])} for turn in row[name]]
    images = [[image_of(value) for value in row["images"]]] if row["images"] else None
    template = processor.tokenizer.apply_chat_template
    shown = template([*prompt, *answer], tokenize=False), template(prompt, tokenize=False, add_generation_prompt=True)
    batch, start = (processor(text=[text], images=images, return_tensors="pt") for text in shown)
    first = start["input_ids"].shape[1]
    with torch.no_grad():
        logps_TV = module(**batch).logits[0].log_softmax(-1)
    ids = batch["input_ids"][0]
    return float(sum(logps_TV[t - 1, ids[t]] for t in range(first, len(ids))))


def test_log_probabilities_of_pairs_are_those_of_transformers(model: str, tmp_path: Path) -> None:
    with without_runtime():
        trainer = DPOTrainer(dpo_config(model, tmp_path, **KEYS))
    chosen, rejected = pair_logps(FsdpBackend(model), trainer.pairs, micro_batch_size=2)
    for k, row in enumerate(PAIRS):
        assert float(chosen[k].sum()) == pytest.approx(of_transformers(model, row, "chosen"), abs=1e-4)
        assert float(rejected[k].sum()) == pytest.approx(of_transformers(model, row, "rejected"), abs=1e-4)


def test_a_run_over_two_workers_is_the_run_of_one(model: str, tmp_path: Path, ray_session: RaySession) -> None:
    with without_runtime():
        DPOTrainer(dpo_config(model, tmp_path / "off", **KEYS, adam_epsilon=1e-4)).train()
    with ray_session(together(1)):
        DPOTrainer(dpo_config(model, tmp_path / "ray", **KEYS, adam_epsilon=1e-4)).train()
    with ray_session(together(2)):
        DPOTrainer(dpo_config(model, tmp_path / "two", **KEYS, adam_epsilon=1e-4)).train()
    assert lines(tmp_path / "ray") == lines(tmp_path / "off")
    assert final_bytes(tmp_path / "ray") == final_bytes(tmp_path / "off")
    after, before = (
        AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "off" / "final", model)
    )
    assert any(not torch.equal(after[name], before[name]) for name in after if "vision_tower" in name)
    alone = final_weights(tmp_path / "off")
    for name, weight in final_weights(tmp_path / "two").items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_cpo_sees_the_pictures(model: str, tmp_path: Path) -> None:
    shared = {**vars(dpo_config(model, tmp_path / "cpo", **KEYS))}
    fields = {
        name: shared[name]
        for name in CPOConfig.__dataclass_fields__
        if name in shared and name not in ("beta", "loss_type")
    }
    with without_runtime():
        CPOTrainer(CPOConfig(**fields)).train()
        blind = [row | {"images": [png(7)] * len(row["images"])} for row in PAIRS]
        CPOTrainer(CPOConfig(**fields | {"dataset": blind, "output_dir": str(tmp_path / "blind")})).train()
    one, other = (lines(tmp_path / name)[0]["loss"] for name in ("cpo", "blind"))
    assert np.isfinite(one)
    assert one != other


@pytest.mark.parametrize("question", ["<image>?", [{"type": "image"}, {"type": "text", "text": "?"}]])
def test_a_prompt_that_both_conversations_begin_with_has_its_pictures_once(
    question: Any, model: str, tmp_path: Path
) -> None:
    prompt = [{"role": "user", "content": question}]
    row = {"chosen": said("a"), "rejected": said("b"), "images": [png(0)]}
    whole = row | {name: prompt + row[name] for name in ("chosen", "rejected")}
    apart, found = (
        DPOTrainer(dpo_config(model, tmp_path, **KEYS | {"dataset": [one]})).pairs
        for one in (row | {"prompt": prompt}, whole)
    )
    assert found == apart
    broken = whole | {"images": [png(0)] * 2} if isinstance(question, list) else whole | {"images": ["nowhere.png"]}
    with pytest.raises(ConfigError, match=r"1 of 2 rows are broken: row 1 \(images: "):
        DPOTrainer(dpo_config(model, tmp_path, **KEYS | {"dataset": [whole, broken]}))


def test_answers_have_no_pictures(model: str, tmp_path: Path) -> None:
    broken = PAIRS[0] | {"chosen": said([{"type": "image"}]), "images": [png(0)]}
    with pytest.raises(ConfigError, match="1 of 2 rows are broken: row 1"):
        DPOTrainer(dpo_config(model, tmp_path, **KEYS | {"dataset": [PAIRS[0], broken]}))
    with pytest.raises(ConfigError, match="1 of 2 rows are broken: row 1"):
        RewardTrainer(reward_config(model, tmp_path, eval_dataset=None, dataset=[PAIRS[0], broken]))
