"""Completions of one prompt in one row, so that a pass reads the prompt once: for passes of many short rows on a CPU.

    prompt a1 a2        prompt a1 | b1 b2        b1 sees the prompt and itself, but neither a1 nor a2
    prompt b1 b2 b3 ->                           the last token of a completion predicts nothing, and is left out

Log-probabilities and gradients are those of single rows up to rounding: each token sees the same tokens, at the same
positions. Where prompts are long beside completions, or many completions share one, most of the work is gone (as in
Prefix Grouper, arXiv 2506.05433). On GPUs rows are joined otherwise (``padding_free``, ``packed_attention.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainers.backends.scores.inputs import Inputs
from trainers.batch import Sequences

FEWEST_TOKENS = 4096  # of a pass, padding included; below it a pass costs the time of its calls
WIDEST = 256  # tokens of a row: attention, which looks at all pairs, stays a small part
MOST = 0.7  # of the tokens that single rows have
TOLERANCE = 1e-3  # of the largest value


def shared_inputs(micro: Sequences, device: torch.device) -> Inputs | None:
    """What a model is called with; None where single rows are as good, or rows are not a prompt and its targets."""
    num_rows, lengths = len(micro), micro.input_ids.lengths
    num_tokens = num_rows * int(lengths.max(initial=0))
    if num_tokens < FEWEST_TOKENS or micro.segment_lengths is not None or (micro.images and any(micro.images)):
        return None
    mask, starts = micro.target_mask.values, micro.input_ids.offsets[:-1]
    targets = np.flatnonzero(mask)
    row_of = np.repeat(np.arange(num_rows), lengths)[targets]
    if len(np.unique(row_of)) < num_rows:
        return None
    firsts = targets[np.searchsorted(row_of, np.arange(num_rows))] - starts  # tokens of each prompt
    if not firsts.all():
        return None
    groups: dict[bytes, list[int]] = {}
    for row, prompt_ids in enumerate(micro.input_ids):
        groups.setdefault(prompt_ids[: firsts[row]].tobytes(), []).append(row)
    own = lengths - 1 - firsts  # tokens of each completion but for its last
    width = max(int(firsts[rows[0]] + own[rows].sum()) for rows in groups.values())
    if width > WIDEST or len(groups) * width > MOST * num_tokens:
        return None
    ids_BT, positions_BT, segments_BT = (np.zeros((len(groups), width), np.int64) for _ in range(3))
    segments_BT[:] = num_rows + 1  # padding, which nobody sees
    begins = np.zeros(num_rows, np.int64)  # where the completion of each row stands
    ends = np.zeros(num_rows, np.int64)  # where the last token of its prompt stands
    for k, rows in enumerate(groups.values()):
        size = int(firsts[rows[0]])
        ids_BT[k, :size] = micro.input_ids[rows[0]][:size]
        positions_BT[k, :size] = np.arange(size)
        segments_BT[k, :size] = 0
        place = size
        for row in rows:
            piece = slice(place, place + int(own[row]))
            ids_BT[k, piece] = micro.input_ids[row][size:-1]
            positions_BT[k, piece] = np.arange(size, size + own[row])
            segments_BT[k, piece] = row + 1
            begins[row], ends[row] = k * width + place, k * width + size - 1
            place = piece.stop
    behind = targets - starts[row_of] - firsts[row_of]  # of each target, how far it is behind the first
    places_N = np.where(behind == 0, ends[row_of], begins[row_of] + behind - 1)
    target_ids_N = micro.input_ids.values[targets]
    ids, positions, segments, places, ids_N = (
        torch.from_numpy(values).to(device) for values in (ids_BT, positions_BT, segments_BT, places_N, target_ids_N)
    )
    return Inputs(ids, positions, places, ids_N, sees_BTT=_sees(segments))


def _sees(segments_BT: torch.Tensor) -> torch.Tensor:
    """(B, T, T) bool, True where a query sees a key: one before it, of the prompt or of its own completion."""
    places_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    queries, keys = segments_BT[:, :, None], segments_BT[:, None, :]
    return (places_T <= places_T[:, None]) & ((keys == 0) | (keys == queries))


@torch.no_grad()
def can_share(model: Any) -> bool:
    """Whether a language model gives completions in one row what it gives them in rows of their own: it is asked.

    Only with attention over all that is before a token, which takes a mask of every pair.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if config._attn_implementation != "sdpa" or kinds - {"full_attention"} or getattr(config, "sliding_window", None):
        return False
    device = next(model.parameters()).device
    prompt, size = [1, 2, 3], int(config.vocab_size)
    rows = [[token % size for token in row] for row in ([*prompt, 4, 5, 6], [*prompt, 7, 8])]
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]], device=device)
    joined = torch.tensor([[*rows[0], *rows[1][3:]]], device=device)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4]], device=device)
    training = model.training
    model.eval()
    try:
        mask = _sees(segments)[:, None]
        found = model(input_ids=joined, position_ids=positions, attention_mask=mask, use_cache=False).logits[0]
        alone = [model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0] for row in rows]
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
        return False
    finally:
        model.train(training)
    wanted = torch.cat([alone[0], alone[1][3:]]).float()
    return bool((found.float() - wanted).abs().max() <= TOLERANCE * wanted.abs().max())
