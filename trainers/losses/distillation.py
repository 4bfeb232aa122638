"""Divergences between a student and a teacher as plain functions of tensors: whole vocabulary, in chunks, or top-k.

    beta 0           KL(teacher || student), forward: the student covers all that the teacher does
    beta 1           KL(student || teacher), reverse: the student keeps to what the teacher likes best
    between          beta KL(teacher || M) + (1 - beta) KL(student || M),  M = (1 - beta) student + beta teacher

This is the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, equation 1). It vanishes as beta approaches
either end, while at the ends themselves stand the KLs: beta 0.01 is not almost the forward KL but about a hundredth of
it. Everything is in nats and float32, temperature divides the logits of both sides, and gradients reach the student
only. A student equal to its teacher, computed by the same operations, has a divergence and a gradient of exactly 0.

Each function gives one divergence a token; ``distillation_loss`` sums them, by the rules of ``tokens.py``: no
configuration, no collectives, a normaliser of the whole optimizer step. Both sides must predict the *same* token in
the same place, and shifting is the caller's: nothing here is cut to the shorter side. Sizes in names: N tokens,
H hidden, V vocabulary (or those of its columns that this process holds: ``vocabulary.py``), K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from trainers.losses.tokens import token_entropy
from trainers.losses.vocabulary import WHOLE, Vocabulary

ABSENT = -1e4  # log-probability on both sides of a top-k entry that the teacher did not send: finite, and exp gives 0
MAX_LOG_MASS = -1e-7  # of the top k, so that its tail is never empty; float32 does not resolve less
NEAREST_TO_MINUS_ONE = -1 + 2**-24  # in float32, from above

LogitsHead = Callable[[torch.Tensor], torch.Tensor]  # (n, H) hidden states -> (n, V) logits


class Divergences(NamedTuple):
    """One entry a token, float32."""

    divergence_N: torch.Tensor
    entropy_N: torch.Tensor  # of the student at the same temperature, without gradient


def generalized_jsd(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    vocabulary: Vocabulary = WHOLE,
) -> torch.Tensor:
    """Divergences (...) of softmax(logits / temperature), logits (..., V), which must be finite.

    Raises: ValueError for shapes that differ, the vocabulary's size included, and for a beta or temperature out of
    range.
    """
    _check_options(beta, temperature=temperature)
    if student_logits.shape[-1:] != teacher_logits.shape[-1:]:
        raise ValueError(
            f"student and teacher must share one vocabulary, got logits of {student_logits.shape[-1]} and "
            f"{teacher_logits.shape[-1]} entries. If only the padding of the embeddings differs, cut both to the "
            "tokenizer's size. If the tokenizers differ, these divergences do not apply."
        )
    _check_same_tokens("teacher_logits", teacher_logits.shape[:-1], student_logits.shape[:-1])
    student_logps = _logps(student_logits, temperature, vocabulary)
    teacher_logps = _logps(teacher_logits.detach(), temperature, vocabulary)
    return _divergence(student_logps, teacher_logps, beta, vocabulary)


def chunked_jsd(
    student_hidden_NH: torch.Tensor,
    student_head: LogitsHead,
    teacher_hidden_NH: torch.Tensor,
    teacher_head: LogitsHead,
    *,
    beta: float,
    temperature: float = 1.0,
    chunk_tokens: int,
) -> Divergences:
    """``generalized_jsd`` from hidden states, which never holds the logits of more than ``chunk_tokens`` tokens.

    Each chunk's logits, the teacher's too, are computed again in the backward pass. No tokens at all are one empty
    chunk, so that the heads are called on every worker. The two H may differ.

    Raises: ValueError, as ``generalized_jsd``, and for a ``chunk_tokens`` below 1.
    """
    _check_same_tokens("teacher_hidden_NH", teacher_hidden_NH.shape[:-1], student_hidden_NH.shape[:-1])

    def score(student_hidden: torch.Tensor, teacher_hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            teacher_logits = teacher_head(teacher_hidden)
        student_logits = student_head(student_hidden)
        divergence = generalized_jsd(student_logits, teacher_logits, beta=beta, temperature=temperature)
        return divergence, token_entropy(student_logits.detach(), temperature)

    return _in_chunks(score, chunk_tokens, student_hidden_NH, teacher_hidden_NH)


def topk_logps(
    logits: torch.Tensor, k: int, *, temperature: float = 1.0, vocabulary: Vocabulary = WHOLE
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a teacher hands on: its k most probable ids (..., k) and their log-probabilities, at that temperature."""
    logps, ids = vocabulary.topk(_logps(logits.detach(), temperature, vocabulary), k)
    return ids, logps


def topk_jsd(
    student_logits: torch.Tensor,
    teacher_ids_NK: torch.Tensor,
    teacher_logps_NK: torch.Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    add_tail: bool,
    teacher_temperature: float = 1.0,
    vocabulary: Vocabulary = WHOLE,
) -> torch.Tensor:
    """Divergences (...) on K tokens that the teacher chose. ``student_logits`` are (..., V), the other arguments (...,
    K).

    With ``add_tail`` all other tokens form one more entry, and the result is a lower bound of ``generalized_jsd``. The
    tail is 1 minus the sum of the K, so its mass is known to about 1e-7. Below 1e-5, only the first digits are exact.
    Without it, both sides are renormalised over the K, which ignores mass elsewhere: K=1 is always 0.

    ``teacher_logps_NK`` are over the whole vocabulary, at ``teacher_temperature``: 1 for values of inference servers.
    Without the tail, they are converted exactly to any ``temperature``. With it, the two temperatures must be equal:
    the tail's mass at another temperature depends on each of its tokens.

    The ids of one token differ from each other and are below V. An entry of -inf is absent, with any id below V. A
    token without any entry gives 0.

    Departure from TRL: TRL takes the gradient of the student's tail through 1 - sum(p). It vanishes when the mass of
    the tail is below 1e-7. Here the gradient comes from the tokens in the tail, and does not vanish.

    Raises: ValueError for shapes that do not fit, a beta or temperature out of range, or a tail at another temperature
    than the teacher's.
    """
    _check_options(beta, temperature=temperature, teacher_temperature=teacher_temperature)
    _check_topk(student_logits, teacher_ids_NK, teacher_logps_NK, vocabulary.size_of(student_logits))
    if add_tail and temperature != teacher_temperature:
        raise ValueError(
            f"the tail of a teacher at temperature {teacher_temperature} is not known at temperature {temperature}. "
            "Set add_tail=False, or use the teacher's temperature. Or let the teacher compute at the wanted "
            "temperature, and pass it as teacher_temperature."
        )
    absent_NK = teacher_logps_NK == -torch.inf
    # Both sides go through the same operations, so that a teacher equal to the student gives exactly 0.
    logps_NV = _logps(student_logits, teacher_temperature, vocabulary)
    rescale = teacher_temperature / temperature
    student_NK = (vocabulary.pick(logps_NV, teacher_ids_NK) * rescale).masked_fill(absent_NK, ABSENT)
    teacher_NK = (teacher_logps_NK.detach().float() * rescale).masked_fill(absent_NK, ABSENT)
    if not add_tail:
        return _divergence(student_NK.log_softmax(-1), teacher_NK.log_softmax(-1), beta)
    outside = _log_mass_outside(logps_NV, teacher_ids_NK, absent_NK, vocabulary)
    # The value is the teacher's formula, the gradient (of a difference that is 0) that of the tokens in the tail.
    student_tail = _log_tail(student_NK.detach()) + (outside - outside.detach())
    student, teacher = torch.cat([student_NK, student_tail], -1), torch.cat([teacher_NK, _log_tail(teacher_NK)], -1)
    return _divergence(student, teacher, beta)


def chunked_topk_jsd(
    student_hidden_NH: torch.Tensor,
    student_head: LogitsHead,
    teacher_ids_NK: torch.Tensor,
    teacher_logps_NK: torch.Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    add_tail: bool,
    teacher_temperature: float = 1.0,
    chunk_tokens: int,
) -> Divergences:
    """``topk_jsd`` from the student's hidden states, chunked and with the errors of ``chunked_jsd``."""
    _check_same_tokens("teacher_ids_NK", teacher_ids_NK.shape[:-1], student_hidden_NH.shape[:-1])
    _check_same_tokens("teacher_logps_NK", teacher_logps_NK.shape[:-1], student_hidden_NH.shape[:-1])

    def score(hidden: torch.Tensor, ids: torch.Tensor, logps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = student_head(hidden)
        divergence = topk_jsd(
            logits,
            ids,
            logps,
            beta=beta,
            temperature=temperature,
            add_tail=add_tail,
            teacher_temperature=teacher_temperature,
        )
        return divergence, token_entropy(logits.detach(), temperature)

    return _in_chunks(score, chunk_tokens, student_hidden_NH, teacher_ids_NK, teacher_logps_NK)


def distillation_loss(divergence_BT: torch.Tensor, mask_BT: torch.Tensor, *, normaliser: float) -> torch.Tensor:
    """sum(divergence) / normaliser, which is the number of loss tokens of the optimizer step. 0 if there are none.

    Values where the mask is False are ignored, also NaN. Raises: ValueError for shapes that differ.
    """
    if divergence_BT.shape != mask_BT.shape:
        raise ValueError(
            f"divergence_BT must have the mask's shape {tuple(mask_BT.shape)}, got {tuple(divergence_BT.shape)}"
        )
    return divergence_BT.masked_fill(~mask_BT.bool(), 0.0).sum() / (normaliser or 1.0)


def _divergence(
    student_logps: torch.Tensor, teacher_logps: torch.Tensor, beta: float, vocabulary: Vocabulary = WHOLE
) -> torch.Tensor:
    """The divergence over the last dimension of two normalised distributions, by the table at the top.

    Gradients are written such that they are 0 entry by entry where both are equal. For beta > 0 the log-ratios are
    held constant: what they would add sums to 0 over the vocabulary, because the probabilities sum to 1.
    """
    student, teacher = student_logps.exp(), teacher_logps.exp()
    if beta == 0.0:
        return vocabulary.total(teacher * (teacher_logps - student_logps) + (student - teacher))
    gap = teacher_logps - student_logps.detach()
    if beta == 1.0:
        return -vocabulary.total(student * gap)
    # log M less the larger of the two: log(1 - w + w e^-|gap|), w being the weight of the smaller one
    weight = torch.where(gap > 0, 1 - beta, beta)
    below_larger = (weight * torch.expm1(-gap.abs())).clamp(min=NEAREST_TO_MINUS_ONE).log1p()
    above_teacher = below_larger - gap.clamp(max=0)
    above_student = below_larger + gap.clamp(min=0)
    return -vocabulary.total(beta * teacher * above_teacher + (1 - beta) * student * above_student)


def _logps(logits: torch.Tensor, temperature: float, vocabulary: Vocabulary) -> torch.Tensor:
    return vocabulary.log_softmax(logits.float() / temperature)


def _log_tail(logps_NK: torch.Tensor) -> torch.Tensor:
    """log(1 - sum(exp(logps))) (..., 1), for a sum that rounding may have brought to 1 or above."""
    return torch.log(-torch.expm1(logps_NK.logsumexp(-1, keepdim=True).clamp(max=MAX_LOG_MASS)))


def _log_mass_outside(
    logps_NV: torch.Tensor, ids_NK: torch.Tensor, absent_NK: torch.Tensor, vocabulary: Vocabulary
) -> torch.Tensor:
    """log(sum(exp(logps))) (..., 1) over the ids that are not there; if all are, a finite number without gradient."""
    inside_NV = vocabulary.marked(logps_NV, ids_NK, ~absent_NK)
    outside_NV = logps_NV.masked_fill(inside_NV, torch.finfo(torch.float32).min)
    return vocabulary.logsumexp(outside_NV).unsqueeze(-1)


def _in_chunks(
    score: Callable[..., tuple[torch.Tensor, torch.Tensor]], chunk_tokens: int, *columns: torch.Tensor
) -> Divergences:
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    parts = []
    for start in range(0, max(1, len(columns[0])), chunk_tokens):
        chunk = [column[start : start + chunk_tokens] for column in columns]
        with_gradient = torch.is_grad_enabled()
        parts.append(checkpoint(score, *chunk, use_reentrant=False) if with_gradient else score(*chunk))
    return Divergences(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _check_options(beta: float, **temperatures: float) -> None:
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie between 0 (forward KL) and 1 (reverse KL), got {beta}")
    for name, temperature in temperatures.items():
        if not temperature > 0:
            raise ValueError(f"{name} must be above 0, got {temperature}")


def _check_same_tokens(name: str, found: torch.Size, wanted: torch.Size) -> None:
    if found != wanted:
        raise ValueError(
            f"{name} must hold one row for each of the student's tokens {tuple(wanted)}, got {tuple(found)}. Choose "
            "the positions that predict the same tokens on both sides."
        )


def _check_topk(student_logits: torch.Tensor, ids_NK: torch.Tensor, logps_NK: torch.Tensor, vocab_size: int) -> None:
    if ids_NK.shape != logps_NK.shape:
        raise ValueError(
            f"teacher_ids_NK and teacher_logps_NK must have one shape, got {tuple(ids_NK.shape)} and "
            f"{tuple(logps_NK.shape)}"
        )
    _check_same_tokens("teacher_ids_NK", ids_NK.shape[:-1], student_logits.shape[:-1])
    if not 1 <= ids_NK.shape[-1] <= vocab_size:
        raise ValueError(
            f"the teacher must send between 1 and {vocab_size} entries per token, the student's vocabulary, got "
            f"{ids_NK.shape[-1]}"
        )
