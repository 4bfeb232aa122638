"""The gated delta rule over the documents of a row, in plain torch.

A head has a state M of K keys by V values, which is zero at the start of every document. Token t has a query, a key and
a value, a decay g_t <= 0 (a logarithm) and a strength beta_t (Gated Delta Networks, arXiv 2412.06464, equation 10):

    M_t = exp(g_t) M_{t-1} + beta_t k_t (v_t - exp(g_t) M_{t-1}^T k_t)^T        o_t = M_t^T q_t / sqrt(K)

Queries and keys have length one. Tokens go through it in chunks (section 3.3 there; the inverse is the UT transform of
arXiv 2406.06484): what is within a chunk is computed for all chunks of the row at once, and states go from chunk to
chunk, those of all documents together.

S tokens of the row, H heads, N chunks of C tokens, the first chunks of all documents before the second ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

CHUNK = 64  # tokens
EPS = 1e-6  # of the length of queries and keys, as flash-linear-attention has it


def gated_delta_rule(
    query_SHK: torch.Tensor,
    key_SHK: torch.Tensor,
    value_SHV: torch.Tensor,
    decay_SH: torch.Tensor,
    beta_SH: torch.Tensor,
    lengths: Sequence[int],
) -> torch.Tensor:
    """(S, H, V) in the dtype of the queries, computed in float32; ``lengths``: tokens of each document, S in all."""
    chunk = min(CHUNK, max(lengths))
    place_S, counts = chunks(tuple(lengths), chunk)
    place_S = place_S.to(query_SHK.device)
    num_chunks = sum(counts)

    def chunked(rows: torch.Tensor) -> torch.Tensor:
        """(N, H, C, ...) of (S, H, ...), with zeros behind the documents."""
        empty = rows.new_zeros(num_chunks * chunk, *rows.shape[1:])
        return empty.index_copy(0, place_S, rows).view(num_chunks, chunk, *rows.shape[1:]).transpose(1, 2)

    wide = [x.float() for x in (query_SHK, key_SHK, value_SHV, decay_SH, beta_SH)]
    query, key = (of_length_one(x) for x in wide[:2])
    query_NHCK, key_NHCK, value_NHCV, decay_NHC, beta_NHC = (
        chunked(x) for x in (query * query.shape[-1] ** -0.5, key, *wide[2:])
    )
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=place_S.device).triu(1)
    total_NHC = decay_NHC.cumsum(-1)
    between_NHCC = (total_NHC[..., :, None] - total_NHC[..., None, :]).masked_fill(later, float("-inf")).exp()
    strong_NHCK = key_NHCK * beta_NHC[..., None]
    system_NHCC = (strong_NHCK @ key_NHCK.mT) * between_NHCC
    scores_NHCC = (query_NHCK @ key_NHCK.mT) * between_NHCC
    right_NHCX = torch.cat([value_NHCV * beta_NHC[..., None], strong_NHCK * total_NHC.exp()[..., None]], -1)
    solved_NHCX = torch.linalg.solve_triangular(system_NHCC, right_NHCX, upper=False, unitriangular=True)
    new_NHCV, read_NHCK = solved_NHCX.split([value_NHCV.shape[-1], key_NHCK.shape[-1]], -1)

    query_NHCK = query_NHCK * total_NHC.exp()[..., None]
    key_NHCK = key_NHCK * (total_NHC[..., -1:] - total_NHC).exp()[..., None]
    fading_NH11 = total_NHC[..., -1].exp()[..., None, None]
    parts = [x.split(counts) for x in (query_NHCK, key_NHCK, scores_NHCC, new_NHCV, read_NHCK, fading_NH11)]
    state = value_NHCV.new_zeros(counts[0], key_NHCK.shape[1], key_NHCK.shape[-1], value_NHCV.shape[-1])
    outputs = []
    for query, key, scores, new, read, fading in zip(*parts, strict=True):
        state = state[: len(query)]
        new = new - read @ state
        outputs.append(query @ state + scores @ new)
        state = state * fading + key.mT @ new
    output_SHV = torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, place_S)
    return output_SHV.to(query_SHK.dtype)


def of_length_one(rows: torch.Tensor) -> torch.Tensor:
    """Each row divided by its length."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + EPS)


@functools.lru_cache(maxsize=64)
def chunks(lengths: tuple[int, ...], chunk: int) -> tuple[torch.Tensor, list[int]]:
    """(S,) where each token of the row lies among those of the chunks, and how many documents have a k-th chunk."""
    sizes = torch.tensor(lengths)
    numbers = -(-sizes // chunk)
    rank = torch.empty_like(sizes)  # of the documents, those with most chunks first
    rank[torch.argsort(numbers, descending=True, stable=True)] = torch.arange(len(sizes))
    counts = [int((numbers > step).sum()) for step in range(max(1, int(numbers.max())))]
    before = torch.tensor([0, *counts]).cumsum(0)
    document_S = torch.arange(len(sizes)).repeat_interleave(sizes)
    within_S = torch.arange(len(document_S)) - (sizes.cumsum(0) - sizes)[document_S]
    number_S = before[within_S // chunk] + rank[document_S]
    return number_S * chunk + within_S % chunk, counts
