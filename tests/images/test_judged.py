"""KTO and distillation of vision models: pictures belong to prompts, and a teacher sees them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from benchmarks.tiny.vision import png, save_vision
from rayhelper import ConfigError
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import final_bytes, final_weights, gkd_config, kto_config, lines, together
from tests.images.test_pairs import PAIRS, of_transformers
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.gkd.trainer import GKDTrainer
from trainers.kto.trainer import KTOTrainer

JUDGED = [
    {name: row[name] for name in ("prompt", "images")} | {"completion": row["chosen"], "label": k % 2 == 0}
    for k, row in enumerate(PAIRS)
]
SHORT: dict[str, Any] = {"eval_dataset": None, "max_steps": 2, "warmup_steps": 0, "freeze_vit": False}
ANSWERED = [{name: row[name] for name in ("prompt", "images", "completion")} for row in JUDGED]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision(tmp_path_factory.mktemp("teacher"), seed=1)


def test_log_probabilities_of_judged_completions_are_those_of_transformers(model: str, tmp_path: Path) -> None:
    with without_runtime():
        trainer = KTOTrainer(kto_config(model, tmp_path, **SHORT, dataset=JUDGED, max_length=None))
    judged = trainer.rows.judged(max_length=None)
    found = FsdpBackend(model).token_logps(judged, micro_batch_size=2)
    for k, row in enumerate(PAIRS):
        assert float(found[k].sum()) == pytest.approx(of_transformers(model, row, "chosen"), abs=1e-4)
    others = trainer.rows.mismatched(3)
    assert others.images == trainer.rows.images
    assert others.completion_ids != trainer.rows.completion_ids


def test_kto_over_two_workers_is_the_run_of_one(model: str, tmp_path: Path, ray_session: RaySession) -> None:
    keys: dict[str, Any] = {**SHORT, "dataset": JUDGED, "max_length": None, "adam_epsilon": 1e-4}
    with without_runtime():
        KTOTrainer(kto_config(model, tmp_path / "off", **keys)).train()
    with ray_session(together(2)):
        KTOTrainer(kto_config(model, tmp_path / "two", **keys)).train()
    alone = final_weights(tmp_path / "off")
    for name, weight in final_weights(tmp_path / "two").items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    with pytest.raises(ConfigError, match="pictures are not divided between them yet"):
        KTOTrainer(kto_config(model, tmp_path / "pairs", **keys | {"dataset": PAIRS}))


DISTILLED: dict[str, dict[str, Any]] = {
    "student": {"lmbda": 1.0, "sft_alpha": 0.0},
    "dataset": {"lmbda": 0.0, "sft_alpha": 0.1},
    "teacher": {"seq_kd": True, "lmbda": 0.0, "sft_alpha": 0.0},
    "top_k": {"lmbda": 0.0, "gkd_logits_topk": 5},
}


@pytest.mark.parametrize("name", DISTILLED)
def test_a_student_learns_from_a_teacher_that_sees_the_same(
    name: str, model: str, teacher: str, tmp_path: Path, ray_session: RaySession
) -> None:
    keys: dict[str, Any] = {**SHORT, "dataset": ANSWERED, "teacher_model": teacher, **DISTILLED[name]}
    with without_runtime():
        GKDTrainer(gkd_config(model, tmp_path / "off", **keys)).train()
    with ray_session(together(1)):
        GKDTrainer(gkd_config(model, tmp_path / "ray", **keys)).train()
    assert lines(tmp_path / "ray") == lines(tmp_path / "off")
    assert final_bytes(tmp_path / "ray") == final_bytes(tmp_path / "off")
    assert all(line["loss"] > 0 for line in lines(tmp_path / "off") if "loss" in line)
    blind = [row | {"images": [png(7)] * len(row["images"])} for row in ANSWERED]
    with without_runtime():
        GKDTrainer(gkd_config(model, tmp_path / "blind", **keys | {"dataset": blind})).train()
    assert lines(tmp_path / "blind")[0]["loss"] != lines(tmp_path / "off")[0]["loss"]


def test_the_divergence_is_that_of_both_models_of_transformers(model: str, teacher: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {**SHORT, "dataset": ANSWERED, "teacher_model": teacher, "temperature": 1.0, "beta": 0.0}
    keys |= {"lmbda": 0.0, "sft_alpha": 0.0, "learning_rate": 0.0, "max_steps": 1, "global_batch_size": len(ANSWERED)}
    with without_runtime():
        trainer = GKDTrainer(gkd_config(model, tmp_path, **keys))
        trainer.train()
    samples = trainer.samples
    assert samples is not None
    total, count = 0.0, 0
    models = [AutoModelForImageTextToText.from_pretrained(folder) for folder in (model, teacher)]
    vision = FsdpBackend(model).vision
    assert vision is not None
    assert samples.images is not None
    for ids, mask, pictures in zip(samples.input_ids, samples.target_mask, samples.images, strict=True):
        seen = vision.seen([pictures]) if pictures else {}
        marks = torch.from_numpy(vision.kinds(ids)).long()[None]
        given: dict[str, Any] = {"input_ids": torch.tensor(ids)[None], "mm_token_type_ids": marks, **seen}
        with torch.no_grad():
            student, taught = (one(**given).logits[0].log_softmax(-1) for one in models)
        places = np.flatnonzero(mask) - 1
        total += float((taught.exp() * (taught - student))[places].sum())
        count += len(places)
    assert lines(tmp_path)[0]["loss"] == pytest.approx(total / count, abs=1e-5)


def test_a_teacher_that_sees_nothing_or_otherwise_is_refused(model: str, teacher: str, tmp_path: Path) -> None:
    other = Path(save_vision(tmp_path / "other"))
    fields = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(fields | {"image_mean": [0.1, 0.2, 0.3]}))
    keys: dict[str, Any] = {**SHORT, "dataset": ANSWERED, "lmbda": 0.0}
    with pytest.raises(ConfigError, match="gives pictures other tokens than the processor"):
        GKDTrainer(gkd_config(model, tmp_path, **keys, teacher_model=str(other)))
