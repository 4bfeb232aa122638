"""What architectures do to their logits behind the output embedding, and the dtype of what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.backends.batches import plain_scores, samples_of
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend

SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.5,
}


@pytest.mark.parametrize(
    ("model_type", "key", "value", "is_known"),
    [
        ("granite", "logits_scaling", 4.0, True),  # divides
        ("hyperclovax", "logits_scaling", 4.0, False),  # multiplies: the same key, the other way round
        ("cohere", "logit_scale", 0.25, True),
        ("nanochat", "final_logit_softcapping", 4.0, True),
        ("gpt_neox", "attention_dropout", 0.0, True),
    ],
)
def test_logits_are_the_models_own_whatever_its_head_does(
    model_type: str, key: str, value: float, is_known: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE, **{key: value})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    backend = FsdpBackend(tmp_path, learning_rate=1e-3, num_training_steps=1)
    assert backend.scorer.head.known is is_known
    samples = samples_of()
    with torch.no_grad():
        expected = plain_scores(backend.module, samples, 0.7)[0].numpy()
    logps = backend.token_logps(samples, micro_batch_size=3, temperature=0.7)
    np.testing.assert_allclose(logps.values, expected, atol=2e-5)
    assert expected.std() > 0.3

    weight = backend.module.get_output_embeddings().weight
    (wanted,) = torch.autograd.grad(plain_scores(backend.module, samples)[0].mean(), weight)
    seen: list[torch.Tensor] = []
    backend.optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.clone()))  # type: ignore[union-attr]
    backend.max_grad_norm = 0.0
    backend.step(samples, lambda logps, *_: logps.sum() / len(expected), micro_batch_size=3)
    torch.testing.assert_close(seen[0], wanted, atol=1e-5, rtol=1e-4)


def test_a_head_that_is_not_known_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = AutoConfig.for_model("hyperclovax", **SHAPE, logits_scaling=4.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    FsdpBackend(tmp_path)
    assert "HyperCLOVAXForCausalLM" in caplog.text


def test_an_export_has_the_dtype_of_training_and_a_checkpoint_all_digits(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", tie_word_embeddings=True, attention_dropout=0.25)
    backend = FsdpBackend(model, dtype="bfloat16", learning_rate=1e-3, num_training_steps=1)
    backend.export(tmp_path / "exported")
    backend.save(tmp_path / "saved")
    own = dict(backend.named_weights())
    for folder, dtype in (("exported", torch.bfloat16), ("saved", torch.float32)):
        written = load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == own.keys()
        assert all(torch.equal(written[name], own[name].to(dtype)) for name in own)
        config = AutoConfig.from_pretrained(tmp_path / folder)
        assert config.dtype == dtype
        assert config.attention_dropout == 0.25, "training without dropout is no property of the model"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").dtype == torch.bfloat16


def test_a_step_without_sequences_asks_for_no_loss_and_changes_nothing(tmp_path: Path) -> None:
    backend = FsdpBackend(save_tiny(tmp_path), learning_rate=1e-3, num_training_steps=1)
    before = {name: weight.clone() for name, weight in backend.named_weights()}
    metrics = backend.step(samples_of([4])[:0], lambda *_: pytest.fail("a loss of nothing"), micro_batch_size=2)
    nothing = {"loss": 0.0, "grad_norm": 0.0, "update_tokens": 0.0, "update_flops": 0.0}
    assert metrics.values() == nothing | {"learning_rate": 1e-3}
    assert all(torch.equal(weight, before[name]) for name, weight in backend.named_weights())
