"""What the hf engine asks of the kernels of GPUs, with plain torch in their place: the same completions as without."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.tiny.architectures import save
from tests.golden.tiny import tiny_tokenizer
from tests.rollout.prompts import as_sequences, completions, prompts_of
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.losses.tokens import token_logps
from trainers.rollout.base import Sampling
from trainers.rollout.hf import attention, cache, norms, slots
from trainers.rollout.hf.draws import drawn
from trainers.rollout.hf.engine import HfEngine
from trainers.rollout.hf.graphs import Graphs

LENGTHS = (3, 11, 1, 27, 5, 8)
GREEDY = Sampling(max_completion_length=12, temperature=0.0)


def attend(query_BHD: Any, key: Any, value: Any, mask_BT: Any, spans_B2: Any, scale: float | None) -> Any:
    """Of keys within the spans alone, those that the mask shows."""
    places_T = torch.arange(mask_BT.shape[1])
    inside_BT = (places_T >= spans_B2[:, :1]) & (places_T < spans_B2[:, 1:])
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query_BHD[:, :, None], key, value, attn_mask=(inside_BT & mask_BT)[:, None, None], scale=scale, enable_gqa=True
    )
    return mixed[:, :, 0]


def write(keys: Any, values: Any, new_keys_BHD: Any, new_values_BHD: Any, positions_B: Any) -> None:
    rows_B = torch.arange(len(positions_B))
    keys[rows_B, :, positions_B], values[rows_B, :, positions_B] = new_keys_BHD, new_values_BHD


def draw(logits_BV: Any, uniform_B: Any, temperature: float) -> Any:
    chosen_B = drawn(logits_BV.float() / temperature, uniform_B[:, None])[:, 0]
    return chosen_B, token_logps(logits_BV, chosen_B, temperature)


def rms_norm(states: Any, weight: Any, eps: float) -> Any:
    wide = states.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(states.dtype) * weight


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each was called."""
    counts = dict.fromkeys(("attend", "write", "draw", "rms_norm"), 0)

    def counted(function: Any) -> Any:
        def counting(*given: Any) -> Any:
            counts[function.__name__] += 1
            return function(*given)

        return counting

    kernels = SimpleNamespace(**{name: counted(globals()[name]) for name in counts})
    monkeypatch.setitem(sys.modules, "trainers.rollout.hf.decoding_kernels", kernels)
    for module in (attention, cache, norms, slots, sys.modules["trainers.rollout.hf.engine"]):
        if hasattr(module, "has_kernels"):
            monkeypatch.setattr(module, "has_kernels", lambda device: True)
    from trainers.rollout.hf import decoder

    monkeypatch.setattr(decoder, "has_kernels", lambda device: True)
    return counts


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_completions_by_kernels_are_those_without(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = save(name, tmp_path)
    prompts, sampling = prompts_of(LENGTHS), Sampling(max_completion_length=16, temperature=0.9)
    expected = HfEngine(folder, tiny_tokenizer(), batch_size=2).generate(prompts, GREEDY, seed=0)
    calls = request.getfixturevalue("calls")
    backend = FsdpBackend(folder)
    engine = HfEngine(backend.module, tiny_tokenizer(), batch_size=2)
    assert completions(engine.generate(prompts, GREEDY, seed=0)) == completions(expected)
    assert not calls["draw"]
    sampled = engine.generate(prompts, sampling, seed=1)
    found = backend.token_logps(as_sequences(sampled), micro_batch_size=1, temperature=0.9)
    np.testing.assert_allclose(sampled.rollout_logps.values, found.values, atol=3e-6)
    assert calls["write"]
    assert calls["draw"]
    has_plain_scores = name not in ("gemma2", "gpt_oss")  # a cap, and sinks
    assert engine._decoder is not None
    assert (engine._decoder.reads_filled, calls["attend"] > 0) == (has_plain_scores, has_plain_scores)
    assert (calls["rms_norm"] > 100) == (not name.startswith("gemma"))  # which multiplies by 1 + weight
    assert all("forward" not in vars(part) for part in backend.module.modules())


@pytest.mark.parametrize(
    ("further", "is_plain"),
    [({}, True), ({"temperature": 0.7}, True), ({"top_p": 0.9}, False), ({"top_k": 5}, False), ({"min_p": 0.1}, False),
     ({"repetition_penalty": 1.2}, False), ({"temperature": 0.0}, False)],
)  # fmt: skip
def test_only_a_plain_softmax_is_drawn_from_without_sorting(
    further: dict[str, Any], is_plain: bool, tmp_path: Path, calls: dict[str, int]
) -> None:
    engine = HfEngine(save("llama", tmp_path), tiny_tokenizer())
    engine.generate(prompts_of((3, 4)), Sampling(max_completion_length=3, **further), seed=0)
    assert (calls["draw"] > 0) == is_plain


def test_steps_that_draw_otherwise_are_other_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the one may not be loaded yet as a step of the other has run, and then cannot be captured."""
    shapes: list[set[Any]] = []

    def run(self: Graphs, shape: Any, step: Any) -> None:
        shapes[-1].add(shape)
        step()

    monkeypatch.setattr(Graphs, "run", run)
    engine = HfEngine(save("llama", tmp_path), tiny_tokenizer())
    for temperature in (1.0, 0.0):
        shapes.append(set())
        engine.generate(prompts_of((3, 4)), Sampling(max_completion_length=3, temperature=temperature), seed=0)
    assert shapes[0]
    assert not shapes[0] & shapes[1]


def test_spans_hold_all_that_a_mask_shows() -> None:
    mask_BT = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()
    assert attention.spans(mask_BT).tolist() == [[1, 5], [0, 1], [5, 6]]


def test_graphs_of_all_generations_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for every stream, which made each GRPO step on an H100 hold 32 MiB more."""
    made: list[Any] = []
    used: list[Any] = []

    def stream() -> Any:
        made.append(SimpleNamespace(wait_stream=lambda _: None))
        return made[-1]

    def captured(step: Any, *, pool: Any, stream: Any) -> Any:
        used.append(stream)
        return SimpleNamespace(replay=step, pool=lambda: "pool")

    current = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("trainers.rollout.hf.graphs.captured", captured)
    graphs, steps = Graphs(is_on=True), []
    for generation in range(3):
        for _ in range(3):
            graphs.run("shape", lambda: steps.append(1))
        graphs.clear()
        assert len(steps) == 3 * (generation + 1)
    assert len(made) == 1
    assert used == made * 3
