"""Reward models and classifiers of vision models, and what reward models judge: GRPO and PPO on pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.tiny.vision import MODELS, save_vision
from rayhelper import ConfigError
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import final_bytes, final_weights, grpo_config, lines, ppo_config, reward_config, together
from tests.golden.tiny import tiny_model
from tests.images.test_pairs import PAIRS
from tests.images.test_sft import image_of, parts_of
from trainers.backends.fresh_weights import value_head
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.vision.classifier import classifier_class
from trainers.classification.config import ClassificationConfig
from trainers.classification.trainer import ClassificationTrainer
from trainers.data.images.processor import ImageReader, load_processor
from trainers.data.preferences import tokenize_comparisons
from trainers.grpo.trainer import GRPOTrainer
from trainers.metrics import Metrics
from trainers.ppo.trainer import PPOTrainer
from trainers.reward.loss import comparison_loss
from trainers.reward.trainer import RewardTrainer
from trainers.rewards.models import RewardModel

MARGIN = 1e-5
SIDES = ("chosen", "rejected")
SHORT: dict[str, Any] = {"eval_dataset": None, "max_steps": 2, "warmup_steps": 0, "freeze_vit": False}
PROMPTS = [{name: row[name] for name in ("prompt", "images")} for row in PAIRS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: save_vision(tmp_path_factory.mktemp(name), name) for name in MODELS}


def batch_of(processor: Any, row: dict[str, Any], completion: list[dict[str, Any]], invites: bool = False) -> Any:
    """A prompt with its pictures and its completion, by the processor alone; ``invites``: an answer."""
    turns = [{**turn, "content": parts_of(turn["content"])} for turn in [*row["prompt"], *completion]]
    text = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=invites)
    images = [[image_of(value) for value in row["images"]]] if row["images"] else None
    return processor(text=[text], images=images, return_tensors="pt")


@pytest.mark.parametrize("name", MODELS)
def test_scores_and_gradients_are_those_of_transformers_own_model_under_a_linear_layer(
    name: str, folders: dict[str, str], tmp_path: Path
) -> None:
    model = folders[name]
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = Dataset.from_list(PAIRS)
    pairs = tokenize_comparisons(rows, tokenizer, max_length=None, images=ImageReader(tokenizer, model))
    settings: dict[str, Any] = {"learning_rate": 0.0, "max_grad_norm": 0.0, "num_training_steps": 2}
    backend = FsdpBackend(model, head="value", values_at="target", **settings)
    values = backend.token_values(pairs.as_sequences(), micro_batch_size=5)
    alone, processor = AutoModel.from_pretrained(model), load_processor(model)
    score_1H = backend.module.score.weight.detach().clone().requires_grad_()
    batches = [batch_of(processor, row, row[side]) for side in SIDES for row in PAIRS]
    wanted = torch.cat([alone(**batch).last_hidden_state[0, -1:] @ score_1H[0] for batch in batches])
    np.testing.assert_allclose(values.values, wanted.detach().numpy(), atol=MARGIN)
    better, worse = wanted.split(len(PAIRS))
    loss = -torch.nn.functional.logsigmoid(better - worse).mean()
    loss.backward()
    theirs = {"score.weight": score_1H.grad} | {f"model.{key}": w.grad for key, w in alone.named_parameters()}
    found: dict[str, torch.Tensor] = {}

    def step(*_: Any, **__: Any) -> None:
        found.update({key: w.grad.clone() for key, w in backend.module.named_parameters() if w.grad is not None})

    assert backend.optimizer is not None
    backend.optimizer.register_step_pre_hook(step)
    config = reward_config(model, tmp_path)

    def loss_of(values_BT: Any, mask_BT: Any, micro: Any, metrics: Metrics) -> torch.Tensor:
        return comparison_loss(config, len(pairs), values_BT, mask_BT, micro, metrics)

    metrics = backend.step(pairs, loss_of, micro_batch_size=2).values()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=MARGIN)
    largest = max(float(gradient.abs().max()) for gradient in theirs.values() if gradient is not None)
    assert any("vis" in key and bool(gradient.any()) for key, gradient in found.items()), "the tower learns"
    for key, gradient in found.items():
        other = torch.zeros_like(gradient) if theirs[key] is None else theirs[key]
        assert float((gradient - other).abs().max()) <= MARGIN * max(1.0, largest), key


def trained(model: str, folder: Path, **keys: Any) -> str:
    RewardTrainer(reward_config(model, folder, **SHORT | {"dataset": PAIRS, "max_length": None} | keys)).train()
    return str(folder / "final")


def test_a_reward_model_of_two_workers_is_that_of_one(
    folders: dict[str, str], tmp_path: Path, ray_session: RaySession
) -> None:
    keys: dict[str, Any] = {"adam_epsilon": 1e-4, "per_device_train_batch_size": 1, "global_batch_size": 4}
    with without_runtime():
        trained(folders["gemma3"], tmp_path / "off", **keys)
    with ray_session(together(2)):
        trained(folders["gemma3"], tmp_path / "two", **keys)
    alone = final_weights(tmp_path / "off")
    for key, weight in final_weights(tmp_path / "two").items():
        torch.testing.assert_close(weight, alone[key], rtol=0, atol=MARGIN, msg=lambda m, n=key: f"{n}: {m}")


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_a_classifier_that_sees_learns_by_transformers_own_loss(
    name: str, folders: dict[str, str], tmp_path: Path
) -> None:
    """The first step's loss is that of transformers' classifier, and one picture more or less changes it."""
    model = folders[name]
    rows = [{"messages": row["prompt"], "images": row["images"], "label": k % 3} for k, row in enumerate(PAIRS)]
    keys: dict[str, Any] = {
        "dataset": rows,
        "num_labels": 3,
        "learning_rate": 1e-3,
        "max_steps": 2,
        "freeze_vit": False,
    }
    keys |= {"per_device_train_batch_size": 6, "max_length": None, "save_strategy": "no", "shuffle_dataset": False}
    config = ClassificationConfig(model=model, output_dir=str(tmp_path / "run"), **keys)
    with without_runtime():
        trainer = ClassificationTrainer(config)
        ClassificationTrainer.check(config, None)
        trainer.train()
    processor = load_processor(model)
    module = classifier_class(AutoConfig.from_pretrained(model)).from_pretrained(model, num_labels=3).eval()
    head_KH = module.score.weight.data
    std = module.config.get_text_config().initializer_range
    head_KH.copy_(value_head(head_KH.shape[1], std, config.seed, 3))
    with torch.no_grad():
        asked = [{**batch_of(processor, row, [], invites=True)} for row in PAIRS]
        logits = torch.cat([module(**batch).logits for batch in asked])
    wanted = float(torch.nn.functional.cross_entropy(logits, torch.tensor([k % 3 for k in range(len(PAIRS))])))
    first = lines(tmp_path / "run")[0]
    assert first["loss"] == pytest.approx(wanted, abs=MARGIN)
    tower = next(key for key in final_weights(tmp_path / "run") if "vis" in key and key.endswith("weight"))
    before = load_file(Path(model) / "model.safetensors")
    assert not torch.equal(final_weights(tmp_path / "run")[tower], before[tower]), "the tower learns"


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_what_is_exported_judges_completions_with_their_pictures(
    name: str, folders: dict[str, str], tmp_path: Path
) -> None:
    model = folders[name]
    with without_runtime():
        judge = trained(model, tmp_path / "off")
    names = {*final_weights(tmp_path / "off")} - {"score.weight"}
    assert names <= {*load_file(Path(model) / "model.safetensors")}, "the names of the model's own checkpoint"

    own = AutoModelForSequenceClassification  # of gemma3 transformers has one
    kind = own if name == "gemma3" else classifier_class(AutoConfig.from_pretrained(judge))
    module, processor = kind.from_pretrained(judge, num_labels=1), load_processor(judge)
    rows = [(row, row["chosen"]) for row in PAIRS]
    with torch.no_grad():
        wanted = [float(module(**batch_of(processor, *row)).logits) for row in rows]
    loaded = RewardModel(judge, batch_size=4)
    prompts, images = ([row[key] for row in PAIRS] for key in ("prompt", "images"))
    completions = [row["chosen"] for row in PAIRS]
    assert loaded(prompts=prompts, completions=completions, images=images) == pytest.approx(wanted, abs=MARGIN)
    blind = loaded(prompts=prompts, completions=completions, images=[images[1][:1] * len(one) for one in images])
    assert blind[2] != pytest.approx(wanted[2], abs=MARGIN), "the picture is seen"

    keys: dict[str, Any] = {**SHORT, "dataset": PROMPTS, "max_completion_length": 5, "max_prompt_length": None}
    keys |= {"reward_model": [judge], "reward_weights": None, "reward_funcs": [], "num_generations": 2, "max_steps": 1}
    with without_runtime():
        trainer = GRPOTrainer(grpo_config(model, tmp_path / "grpo", **keys))
        trainer.train()
        rows_of = trainer.rows.select(range(2))
        starts = trainer.generator.starts(rows_of, trainer.tokenizer, np.arange(2), trainer.images)
        rollouts = trainer.generator.complete(starts, 0)
        found = trainer.rewarder(rows_of, rollouts)[:, 0]
    said = [[{"role": "assistant", "content": text}] for text in trainer.rewarder.texts(rollouts)]
    with torch.no_grad():
        direct = [float(module(**batch_of(processor, *row)).logits) for row in zip(PAIRS[:2], said, strict=True)]
    assert found.tolist() == pytest.approx(direct, abs=MARGIN)


def test_ppo_over_workers_is_the_run_of_one_and_all_its_models_see(
    folders: dict[str, str], tmp_path: Path, ray_session: RaySession
) -> None:
    model = folders["qwen3_vl"]
    with without_runtime():
        judge = trained(model, tmp_path / "judge", max_steps=1)
    keys: dict[str, Any] = {**SHORT, "dataset": PROMPTS[:4], "max_completion_length": 5, "max_prompt_length": None}
    keys |= {"reward_model": judge, "reward_weights": [1.0, 0.1, 1.0], "adam_epsilon": 1e-4, "temperature": 1.0}

    def run(folder: str, **more: Any) -> PPOTrainer:
        trainer = PPOTrainer(ppo_config(model, tmp_path / folder, **keys | more))
        trainer.train()
        return trainer

    with without_runtime():
        run("off")
        seen = [{**row, "images": row["images"][::-1]} for row in PROMPTS[:4]]
        run("turned", dataset=seen)
    assert final_bytes(tmp_path / "turned") != final_bytes(tmp_path / "off"), "the order of pictures matters"
    with ray_session(together(2)):
        run("two")
    for ours, theirs in zip(lines(tmp_path / "two"), lines(tmp_path / "off"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    alone = final_weights(tmp_path / "off")
    for name, weight in final_weights(tmp_path / "two").items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    first = lines(tmp_path / "off")[0]
    assert first["loss/value_avg"] > 0


def test_models_beside_the_policy_that_see_nothing_or_see_otherwise_are_refused(
    folders: dict[str, str], tmp_path: Path
) -> None:
    model, other = folders["qwen3_vl"], Path(save_vision(tmp_path / "other", "qwen3_vl"))
    said = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(said | {"merge_size": 1}))
    keys: dict[str, Any] = {**SHORT, "dataset": PROMPTS[:4]}
    tiny_model(num_labels=1).save_pretrained(blind := tmp_path / "blind")
    with pytest.raises(ConfigError, match="rows have images, which this run cannot read"):
        PPOTrainer(ppo_config(model, tmp_path, **keys | {"value_model": str(blind)}))
    with pytest.raises(ConfigError, match=r"ref_model: the processor of .* gives pictures other tokens"):
        PPOTrainer(ppo_config(model, tmp_path, **keys | {"ref_model": str(other)}))
