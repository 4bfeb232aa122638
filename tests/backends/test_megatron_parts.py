"""What megatron-core lacks without TransformerEngine and apex, each part by itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from rayhelper import ConfigError
from tests import megatron_on_cpu
from tests.backends.batches import samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import TRAINING, save
from trainers.backends.megatron.attention import rotation, turned
from trainers.backends.megatron.parts import add_weight_gradient, normed


def test_a_gradient_is_added_without_being_rounded_before() -> None:
    torch.manual_seed(0)
    total_NK, exact_NK = torch.zeros(6, 5), torch.zeros(6, 5, dtype=torch.float64)
    for num_tokens in (7, 0, 33):
        input_TK, gradient_TN = (torch.randn(num_tokens, width).bfloat16() for width in (5, 6))
        add_weight_gradient(input_TK, gradient_TN, total_NK)
        exact_NK += gradient_TN.double().T @ input_TK.double()
    torch.testing.assert_close(total_NK, exact_NK.float(), rtol=1e-5, atol=1e-5)


def gradients(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """The buffers of linear layers' gradients after one step of one micro-batch in bfloat16."""
    megatron_on_cpu.install()
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    given: dict[str, Any] = TRAINING | {"dtype": "bfloat16", "max_grad_norm": 0.0}
    backend = MegatronBackend(folder, settings=MegatronSettings(), **given)
    samples = samples_of()
    backend.step(samples, partial(weighted_loss, 1.0), micro_batch_size=len(samples))
    return {
        name: weight.main_grad.clone()
        for name, weight in backend.stages[0].named_parameters()
        if "linear_" in name and weight.dim() == 2
    }


def test_layers_in_bfloat16_have_gradients_in_float32(tmp_path: Path) -> None:
    folder = save("qwen3", tmp_path)
    (found,) = run_ranks(1, gradients, folder, folder=tmp_path)
    assert len(found) == 4 * 4
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert not torch.equal(gradient, gradient.bfloat16().float()), name


def refusals(rank: int, folder: Path) -> list[str]:
    megatron_on_cpu.install()
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    told = []
    for fields in ({"transformer": {"fp8": "hybrid"}}, {"ddp": {"overlap_grad_redusce": True}}):
        with pytest.raises(ConfigError) as refused:
            MegatronBackend(folder, settings=MegatronSettings(**fields), **TRAINING)
        told.append(str(refused.value))
    return told


def test_fields_that_nothing_would_read_are_refused_by_the_backend_too(tmp_path: Path) -> None:
    ((of_engine, unknown),) = run_ranks(1, refusals, save("llama", tmp_path), folder=tmp_path)
    assert "fp8 needs layers of TransformerEngine, but" in of_engine
    assert "overlap_grad_reduce" in unknown


def test_rotation_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    heads_SHD, angles_SR = torch.randn(9, 3, 8), torch.randn(9, 4)
    right_SHD, _ = apply_rotary_pos_emb(
        heads_SHD[None].transpose(1, 2),
        heads_SHD[None].transpose(1, 2),
        *(torch.cat([turn, turn], -1)[None] * 0.7 for turn in (angles_SR.cos(), angles_SR.sin())),
    )
    found_SHD = turned(heads_SHD, *rotation(angles_SR, 0.7, torch.float32))
    torch.testing.assert_close(found_SHD, right_SHD[0].transpose(0, 1))


def test_norms_compute_in_float32() -> None:
    torch.manual_seed(0)
    rows_SH, weight_H = torch.randn(5, 16).bfloat16(), torch.rand(16).bfloat16()
    right_SH = torch.nn.functional.rms_norm(rows_SH.double(), (16,), weight_H.double(), 1e-6)
    torch.testing.assert_close(normed(rows_SH, weight_H, 1e-6), right_SH.bfloat16(), rtol=0, atol=0)
