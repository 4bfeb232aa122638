"""Which steps start vLLM's Triton attention otherwise, and that all others start it as vLLM does."""

from typing import Any

import pytest
import torch

from trainers.rollout import vllm_patches

STEP = {
    "query_ptr": torch.zeros(8, 4, 128),
    "seq_lens_ptr": torch.zeros(8),
    "key_cache_ptr": torch.zeros(1, dtype=torch.bfloat16),
    "HEAD_SIZE": 128,
    "TILE_SIZE": 32,
}


class Kernel:
    """Keeps how it was started."""

    cache = "its own"

    def __init__(self) -> None:
        self.started: list[tuple[Any, dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **arguments: self.started.append((grid, arguments))


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.attention.ops import triton_unified_attention

    monkeypatch.setattr(triton_unified_attention, "kernel_unified_attention", Kernel())
    monkeypatch.setattr(vllm_patches, "_is_hopper", lambda: True)
    return triton_unified_attention


def started(attention: Any, grid: tuple[int, ...] = (10, 2), **changed: Any) -> dict[str, Any]:
    """What the kernel was given that the caller did not give it."""
    kernel = attention.kernel_unified_attention.kernel
    given = STEP | changed
    attention.kernel_unified_attention[grid](**given)
    seen_grid, arguments = kernel.started[-1]
    assert seen_grid == grid
    assert all(arguments[name] is value for name, value in given.items())
    return {name: value for name, value in arguments.items() if name not in given}


def test_decoding_steps_start_the_kernel_in_small_blocks(attention: Any) -> None:
    vllm_patches.small_blocks_decode()
    assert started(attention) == {"num_warps": 2, "num_stages": 2}
    assert started(attention, num_warps=8) == {"num_stages": 2}  # what vLLM says itself stays


@pytest.mark.parametrize(
    "changed",
    [
        {"query_ptr": torch.zeros(9, 4, 128)},  # a prompt among them
        {"grid": (10, 2, 16)},  # several blocks share a sequence
        {"HEAD_SIZE": 64},
        {"TILE_SIZE": 16},
        {"key_cache_ptr": torch.zeros(1, dtype=torch.float8_e4m3fn)},
        {"key_cache_ptr": torch.zeros(1)},
    ],
)
def test_other_steps_start_it_as_vllm_does(attention: Any, changed: dict[str, Any]) -> None:
    vllm_patches.small_blocks_decode()
    assert started(attention, **changed) == {}


def test_a_version_that_says_less_of_a_step_starts_it_as_it_does(attention: Any) -> None:
    vllm_patches.small_blocks_decode()
    attention.kernel_unified_attention[(10, 2)](1, 2, HEAD_SIZE=128)
    assert attention.kernel_unified_attention.kernel.started == [((10, 2), {"HEAD_SIZE": 128})]


def test_it_is_changed_once_and_stays_the_kernel_for_all_else(attention: Any) -> None:
    kernel = attention.kernel_unified_attention
    for _ in range(2):
        vllm_patches.small_blocks_decode()
    assert attention.kernel_unified_attention.kernel is kernel
    assert attention.kernel_unified_attention.cache == "its own"


def test_where_it_was_not_measured_nothing_changes(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = attention.kernel_unified_attention
    monkeypatch.setattr(vllm_patches, "_is_hopper", lambda: False)
    vllm_patches.small_blocks_decode()
    assert attention.kernel_unified_attention is kernel
    monkeypatch.setattr(vllm_patches, "_is_hopper", lambda: True)
    monkeypatch.setattr(attention, "kernel_unified_attention", None)
    vllm_patches.small_blocks_decode()
    assert attention.kernel_unified_attention is None


def test_the_kernel_takes_what_the_choice_is_made_by() -> None:
    """The names are vLLM's: were they others, a decoding step would fail."""
    import inspect

    from vllm.v1.attention.ops import triton_unified_attention as attention

    source = inspect.getsource(attention.unified_attention)
    assert "kernel_unified_attention[grid](" in source
    for name in STEP:
        assert f"{name}=" in source
