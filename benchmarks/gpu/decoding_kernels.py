"""Do the kernels of a decoding step give what plain torch gives, and how long do they take?

    python -m benchmarks.gpu.decoding_kernels

Attention of one query a slot (heads of several sizes, windows, slots of a larger cache), keys and values into rows, the
draw with its log-probability, RMS norms. Raises AssertionError where one is further from torch than rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainers.losses.tokens import token_logps
from trainers.rollout.hf.attention import spans
from trainers.rollout.hf.decoding_kernels import attend, draw, rms_norm, write
from trainers.rollout.hf.draws import drawn

SHAPES = ((512, 9, 3, 64, 320), (7, 16, 8, 128, 1024), (5, 4, 1, 80, 96), (3, 8, 8, 256, 130))  # B, H, key heads, D, T
FAR = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


def check_attention(dtype: torch.dtype, shape: tuple[int, ...]) -> float:
    """The largest difference to torch in float32; and that ``write`` writes what indexing does."""
    batch, heads, key_heads, size, length = shape
    query_BHD = torch.randn(batch, heads, size, device="cuda", dtype=dtype)
    keys = torch.randn(batch + 3, key_heads, length + 32, size, device="cuda", dtype=dtype)
    values = torch.randn_like(keys)
    key_BHTD, value_BHTD = keys[:batch, :, :length], values[:batch, :, :length]
    positions_B = torch.randint(length, (batch,), device="cuda")
    places_T, worst = torch.arange(length, device="cuda"), 0.0
    for window in (length, 17):
        mask_BT = (places_T <= positions_B[:, None]) & (places_T > positions_B[:, None] - window)
        found = attend(query_BHD, key_BHTD, value_BHTD, mask_BT, spans(mask_BT), None).float()
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query_BHD.float()[:, :, None],
            key_BHTD.float(),
            value_BHTD.float(),
            attn_mask=mask_BT[:, None, None],
            enable_gqa=True,
        )[:, :, 0]
        worst = max(worst, float((found - wanted).abs().max()))
    new_keys = torch.randn(batch, key_heads, size, device="cuda")
    new_values = torch.randn(batch, key_heads, size, device="cuda", dtype=dtype)
    written = keys.clone(), values.clone()
    write(*written, new_keys, new_values, positions_B)
    rows_B = torch.arange(batch, device="cuda")
    keys[rows_B, :, positions_B], values[rows_B, :, positions_B] = new_keys.to(dtype), new_values
    assert torch.equal(written[0], keys)
    assert torch.equal(written[1], values)
    assert worst <= FAR[dtype], f"attention of {shape} in {dtype} is off by {worst}"
    return worst


def check_draw(dtype: torch.dtype, width: int, temperature: float) -> float:
    """The share of tokens that are torch's, which differ where the cumulated sums round otherwise."""
    logits_BV = (torch.randn(512, width, device="cuda") * 3).to(dtype)
    uniform_B1 = torch.rand(512, 1, device="cuda", dtype=torch.float64)
    uniform_B1[0], uniform_B1[1] = 0.0, 1 - 2**-53
    chosen_B, logps_B = draw(logits_BV, uniform_B1[:, 0], temperature)
    wanted_B = drawn(logits_BV.float() / temperature, uniform_B1)[:, 0]
    far = (logps_B - token_logps(logits_BV, chosen_B, temperature)).abs().max()
    same = float((chosen_B == wanted_B).float().mean())
    assert far < 1e-4, f"log-probabilities are off by {far}"
    assert same > 0.97, f"{same:.1%} of the tokens are torch's"
    return same


def check_norm(dtype: torch.dtype, size: int) -> None:
    """As transformers' LlamaRMSNorm."""
    states_BTH, weight_H = torch.randn(64, 3, size, device="cuda").to(dtype), torch.randn(size, device="cuda").to(dtype)
    wide = states_BTH.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight_H
    torch.testing.assert_close(rms_norm(states_BTH, weight_H, 1e-6), normed, rtol=FAR[dtype], atol=1e-6)


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, of twenty in a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 20


def main() -> None:
    torch.manual_seed(0)
    for dtype in FAR:
        for shape in SHAPES:
            print(f"attention {shape} {dtype}: off by {check_attention(dtype, shape):.1e}", flush=True)
        for size in (64, 576, 1024, 5120):
            check_norm(dtype, size)
        for width in (1000, 49152, 151936):
            for temperature in (1.0, 0.7):
                print(f"draw {width} {dtype} {temperature}: {check_draw(dtype, width, temperature):.1%} as torch")
    chances = torch.log(torch.tensor([0.1, 0.0, 0.2, 0.7], device="cuda")).expand(100_000, 4).contiguous()
    tokens, _ = draw(chances, torch.rand(100_000, device="cuda", dtype=torch.float64), 1.0)
    shares = torch.bincount(tokens, minlength=4) / len(tokens)
    assert shares[1] == 0
    assert (shares - chances[0].exp()).abs().max() < 0.01
    for heads, key_heads, size in ((9, 3, 64), (16, 8, 128)):
        query = torch.randn(512, heads, size, device="cuda", dtype=torch.bfloat16)
        keys = torch.randn(512, key_heads, 320, size, device="cuda", dtype=torch.bfloat16)
        mask = (torch.arange(320, device="cuda") < 272).expand(512, 320).contiguous()
        given = query, keys, torch.randn_like(keys), mask, spans(mask), None
        print(
            f"attention of 272 tokens, {key_heads} x {size}: {milliseconds(lambda given=given: attend(*given)):.3f} ms"
        )
    for width in (49152, 151936):
        logits = torch.randn(512, width, device="cuda", dtype=torch.bfloat16)
        uniform = torch.rand(512, device="cuda", dtype=torch.float64)
        call = lambda logits=logits, uniform=uniform: draw(logits, uniform, 1.0)  # noqa: E731
        print(f"draw of {width}: {milliseconds(call):.3f} ms")


if __name__ == "__main__":
    main()
