"""Models that also hear and speak: what reads and sees learns as transformers' own thinker does, and all is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from benchmarks.tiny.vision import save_vision
from rayhelper import ConfigError
from tests.images.test_grpo import NEW_TOKENS, greedy_of_transformers, prompts
from tests.images.test_sft import (
    MARGIN,
    ROWS,
    assert_same,
    our_gradients,
    sequences_of,
    transformers_gradients,
    whole_of,
)
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Ragged, Sequences
from trainers.classification.config import ClassificationConfig
from trainers.embedding.config import EmbeddingConfig
from trainers.embedding.trainer import check_embedding
from trainers.parts.model_checks import check_vision_model
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine
from trainers.rollout.vllm.vision.features import check_pictures

KINDS = ["qwen2_5_omni", "qwen3_omni_moe"]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose checkpoint also has weights that speak."""
    folder = Path(save_vision(tmp_path_factory.mktemp("model"), request.param))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"talker.some.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"enable_audio_output": True}))
    (folder / "spk_dict.pt").write_bytes(b"voices")
    return str(folder)


@pytest.mark.parametrize("padding_free", [False, True])
def test_loss_and_gradients_are_those_of_transformers_thinker(model: str, padding_free: bool) -> None:
    loss, theirs = transformers_gradients(model)
    our_loss, ours = our_gradients(model, sequences_of(model), padding_free=padding_free)
    assert our_loss == pytest.approx(loss, abs=MARGIN)
    assert_same(ours, {f"thinker.{name}": gradient for name, gradient in theirs.items()})
    assert any(".visual." in name for name in ours), "the tower learns"


def test_what_does_not_learn_is_written_as_it_was(model: str, tmp_path: Path) -> None:
    backend = FsdpBackend(model, learning_rate=0.1, num_training_steps=2, vision={"frozen": ["vit"]})
    backend.step(sequences_of(model), lambda logps, *_: logps.sum() / 100, micro_batch_size=8)
    backend.export(tmp_path, AutoTokenizer.from_pretrained(model))
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (model, tmp_path))
    assert after.keys() == before.keys()
    same = {name for name, weight in before.items() if torch.equal(weight, after[name])}
    assert {"talker.some.weight", "thinker.audio_tower.conv1.weight"} & before.keys() <= same
    assert "thinker.model.norm.weight" not in same
    aligner = [name for name in before if ".visual.merger" in name]
    assert {name for name in before if ".visual." in name} - same == set(aligner)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == AutoConfig.from_pretrained(model).architectures
    assert config.enable_audio_output
    assert (tmp_path / "spk_dict.pt").read_bytes() == b"voices"


def test_greedy_completions_are_those_of_transformers_thinker(model: str, tmp_path: Path) -> None:
    wanted_prompts, wanted = greedy_of_transformers(model)
    asked = prompts(model, tmp_path)
    assert [row.tolist() for row in asked.prompt_ids] == wanted_prompts
    backend = FsdpBackend(model)
    engine = HfEngine(backend.module, AutoTokenizer.from_pretrained(model), vision=backend.vision)
    engine.check_decoding()
    found = engine.generate(asked, Sampling(max_completion_length=NEW_TOKENS, temperature=0.0), seed=0)
    assert [row.tolist() for row in found.completion_ids] == wanted


def test_a_classifier_reads_its_numbers_off_the_thinkers_last_token(model: str) -> None:
    batch = sequences_of(model, ROWS[:1])
    is_last = np.zeros(len(batch.input_ids.values), bool)
    is_last[-1] = True
    batch = Sequences(batch.input_ids, Ragged(is_last, batch.input_ids.offsets), images=batch.images)
    told = {"head": "value", "num_labels": 3, "values_at": "target"}
    backend = FsdpBackend(model, learning_rate=0.1, num_training_steps=2, **told)
    values = backend.token_values(batch, micro_batch_size=1)
    thinker = whole_of(model).eval()
    prompt = torch.from_numpy(batch.input_ids.values)[None]
    assert backend.vision is not None
    assert batch.images is not None
    with torch.no_grad():
        thinker.lm_head = torch.nn.Identity()
        seen = backend.vision.seen(batch.images)
        hidden = thinker(input_ids=prompt, attention_mask=torch.ones_like(prompt), **seen).logits[0, -1]
    wanted = torch.nn.functional.linear(hidden, backend.module.score.weight)
    assert torch.allclose(torch.from_numpy(values.values).flatten(), wanted, atol=1e-5)
    backend.step(batch, lambda values_BT, *_: values_BT.sum(), micro_batch_size=1)
    names = [name for name, _ in backend.named_weights()]
    assert "thinker.score.weight" in names  # as ms-swift calls it
    assert not any("lm_head" in name for name in names)


def test_what_nothing_here_computes_of_such_a_model_is_refused(model: str) -> None:
    found = AutoConfig.from_pretrained(model)
    with pytest.raises(ConfigError, match="vllm has not been compared with the trainer for gemma4"):
        check_pictures(AutoConfig.for_model("gemma4"))
    with pytest.raises(ConfigError, match="vllm does not get the weights of qwen"):
        check_pictures(found)
    with pytest.raises(ConfigError, match="has no embeddings of texts here"):
        check_embedding(EmbeddingConfig(model=model, dataset=[{}]), found)
    with pytest.raises(ConfigError, match=r"llama4.* has no linear head"):
        check_vision_model(ClassificationConfig(model="m", dataset=[{}], num_labels=2), AutoConfig.for_model("llama4"))
