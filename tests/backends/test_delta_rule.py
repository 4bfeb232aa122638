"""The gated delta rule and what is around it, against loops over the tokens of each document."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated, torch_recurrent_gated_delta_rule

from trainers.backends.megatron.delta_rule.kernels import by_documents, by_kernel, why_none
from trainers.backends.megatron.delta_rule.mixing import convolved, decay, gated_norm
from trainers.backends.megatron.delta_rule.rule import gated_delta_rule

Inputs = tuple[torch.Tensor, ...]


def inputs(num_tokens: int, *, heads: int = 3, keys: int = 5, values: int = 7) -> Inputs:
    """Queries, keys, values, decays and strengths, as a layer makes them."""
    torch.manual_seed(num_tokens)
    wide = (torch.randn(num_tokens, heads, width, dtype=torch.float64) for width in (keys, keys, values))
    alpha, beta = torch.randn(2, num_tokens, heads, dtype=torch.float64)
    rate = decay(alpha, torch.linspace(-4.0, 1.0, heads), torch.ones(heads))
    return (*(x.float() for x in wide), rate, beta.sigmoid().float())


def one_by_one(given: Inputs, lengths: list[int]) -> torch.Tensor:
    """transformers' loop over tokens, of each document by itself."""
    documents = zip(*(x.split(lengths) for x in given), strict=True)
    found = []
    for document in documents:
        query, key, value, rate, beta = (x[None] for x in document)
        found.append(
            torch_recurrent_gated_delta_rule(query, key, value, rate, beta, use_qk_l2norm_in_kernel=True)[0][0]
        )
    return torch.cat(found)


@pytest.mark.parametrize("lengths", [[1], [64], [65], [3, 200, 1, 64, 63, 130], [2, 2, 2], [129, 5]])
def test_a_row_in_chunks_is_its_documents_token_by_token(lengths: list[int]) -> None:
    given = [x.requires_grad_() for x in inputs(sum(lengths))]
    right = one_by_one(tuple(given), lengths)
    found = gated_delta_rule(*given, lengths)
    torch.testing.assert_close(found, right, atol=2e-6, rtol=1e-5)
    taste = torch.randn_like(right)
    wanted = torch.autograd.grad((right * taste).sum(), given)
    for gradient, right_one in zip(torch.autograd.grad((found * taste).sum(), given), wanted, strict=True):
        scale = float(right_one.abs().max())
        torch.testing.assert_close(gradient, right_one, atol=1e-5 * max(1.0, scale), rtol=1e-5)


def test_a_state_that_fades_fast_makes_no_number_of_nothing() -> None:
    query, key, value, rate, beta = inputs(150)
    given = [x.requires_grad_() for x in (query, key, value, rate * 400, beta)]
    found = gated_delta_rule(*given, [150])
    torch.testing.assert_close(found, one_by_one(tuple(given), [150]), atol=2e-6, rtol=1e-5)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.sum(), given))


@pytest.mark.parametrize("width", [2, 4])
def test_a_convolution_sees_its_own_document_alone(width: int) -> None:
    torch.manual_seed(0)
    lengths, num_channels = [1, 5, 3, 8], 6
    rows, weight = torch.randn(sum(lengths), num_channels), torch.randn(num_channels, width)
    positions = torch.cat([torch.arange(length) for length in lengths])
    right = [
        silu(torch.nn.functional.conv1d(document.T[None], weight[:, None], padding=width - 1, groups=num_channels))
        for document in rows.split(lengths)
    ]
    wanted = torch.cat([one[0, :, :length].T for one, length in zip(right, lengths, strict=True)])
    torch.testing.assert_close(convolved(rows, weight, positions), wanted)


def test_a_gated_norm_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    rows, gate, weight = torch.randn(5, 8), torch.randn(5, 8), torch.rand(8)
    norm = Qwen3NextRMSNormGated(8, eps=1e-3)
    norm.weight.data.copy_(weight)
    torch.testing.assert_close(gated_norm(rows, gate, weight, 1e-3), norm(rows, gate))


@pytest.mark.parametrize(
    ("version", "capability", "told"),
    [
        (
            "3.6.0",
            (9, 0),
            r"Triton 3\.6\.0 computes wrong numbers on this GPU .* Install Triton 3\.7\.1 or later, or tilelang",
        ),
        ("3.4.0+git1", (9, 0), r"Triton 3\.4\.0\+git1 computes wrong"),
        ("3.6.0", (8, 0), None),
        ("3.3.1", (9, 0), None),
        ("3.7.1", (9, 0), None),
    ],
)
def test_kernels_that_are_wrong_are_not_taken(
    version: str, capability: tuple[int, int], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: dict[str, Any] = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule")}
    modules["fla.ops"].gated_delta_rule = modules["fla.ops.gated_delta_rule"]
    modules["triton"] = SimpleNamespace(__version__=version)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = why_none(capability)
    assert (reason is None) == (told is None)
    if told is not None:
        assert re.search(told, str(reason))


def test_kernels_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7.1"))
    assert "pip install 'rayhelper[delta]'" in str(why_none((9, 0)))


def test_a_kernel_gets_one_row_and_the_starts_of_documents() -> None:
    lengths, seen = [3, 70, 1], {}
    given = inputs(sum(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0)

    def kernel(*rows: torch.Tensor, cu_seqlens: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, None]:
        seen.update(settings)
        return gated_delta_rule(*(x[0] for x in rows), cu_seqlens.diff().tolist())[None], None

    found = by_kernel(kernel, *given, starts)
    assert seen == {"use_qk_l2norm_in_kernel": True}
    torch.testing.assert_close(found, by_documents(*given, lengths, starts), rtol=0, atol=0)
