"""GKD's loss: how far a student is from its teacher at each target token, in training and in evaluation.

Two ways to compare with a teacher; which one depends on where the teacher lives. Both are ``TokenFunction``s, which
see the student's logits a chunk of tokens at a time:

    WholeDivergence   the teacher is in this process: its hidden states of the micro-batch, its logits of the chunk
    TopDivergence     the teacher is anywhere: its K likeliest tokens came with the samples

The formulas are ``losses/distillation.py``. Here both vocabularies are cut to their common size, ``vocab_size``: models
of one tokenizer may pad their embeddings differently. Logits may be those columns of a vocabulary in shards that this
process holds; the teacher's are brought to the places of the student's where theirs are others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainers.backends.base import Backend
from trainers.backends.scores.head import CHUNK_BYTES
from trainers.batch import on_device
from trainers.gkd.config import GKDConfig
from trainers.gkd.samples import DistillationSamples, target_ids
from trainers.losses.distillation import distillation_loss, generalized_jsd, topk_jsd
from trainers.losses.tokens import sft_loss, token_entropy, token_logps
from trainers.losses.vocabulary import WHOLE, Vocabulary
from trainers.metrics import Metrics

NAMES = ("divergence", "teacher_agreement", "tempered_entropy")  # what both functions give, in this order


@dataclass(frozen=True)
class StepNumbers:
    """What the micro-batches of one optimizer step have in common: counted over all of them, and all workers."""

    num_tokens: int  # response tokens
    sft_alpha: float  # weight of the cross-entropy; 0: there is none


def gkd_loss(
    config: GKDConfig,
    step: StepNumbers,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: DistillationSamples,
    metrics: Metrics,
    divergence_BT: torch.Tensor,
    teacher_agreement_BT: torch.Tensor,
    tempered_entropy_BT: torch.Tensor,
) -> torch.Tensor:
    """The loss of one micro-batch, divided by the response tokens of the whole optimizer step."""
    num_targets = mask_BT.sum()
    metrics.mean("entropy", tempered_entropy_BT.sum(), num_targets)
    metrics.mean("teacher_agreement", teacher_agreement_BT.sum(), num_targets)
    loss = distillation_loss(divergence_BT, mask_BT, normaliser=step.num_tokens)
    if step.sft_alpha:
        cross_entropy = sft_loss(logps_BT, mask_BT, normaliser=step.num_tokens)
        metrics.sum("divergence", loss)
        metrics.sum("sft_loss", cross_entropy)
        loss = loss + step.sft_alpha * cross_entropy
    return loss


class WholeDivergence:
    """The divergence over the whole vocabulary; whether both models' likeliest token is the same; student's entropy.

    ``adapter`` False: the teacher without its LoRA adapter, which is the student before training. The entropy is at the
    temperature of the divergence.
    """

    names: tuple[str, ...] = NAMES

    def __init__(
        self, teacher: Backend, *, adapter: bool = True, beta: float, temperature: float, vocab_size: int
    ) -> None:
        self.teacher, self.adapter = teacher, adapter
        self.beta, self.temperature, self.vocab_size = beta, temperature, vocab_size

    def inputs(self, micro: DistillationSamples) -> tuple[torch.Tensor, ...]:
        """(N, H) the teacher's hidden states, those that predict the targets from what the teacher sees."""
        return (self.teacher.target_features(micro.as_teacher_sequences(), adapter=self.adapter),)

    def __call__(
        self, logits_NV: torch.Tensor, *inputs: torch.Tensor, vocabulary: Vocabulary = WHOLE
    ) -> tuple[torch.Tensor, ...]:
        (features_NH,) = inputs
        student_NV, vocabulary = vocabulary.cut(logits_NV, self.vocab_size)
        with torch.no_grad():
            teacher_NV, held_by = self.teacher.vocabulary.cut(self.teacher.logits(features_NH), self.vocab_size)
            teacher_NV = vocabulary.take(teacher_NV, held_by)
        divergence_N = generalized_jsd(
            student_NV, teacher_NV, beta=self.beta, temperature=self.temperature, vocabulary=vocabulary
        )
        agrees_N = (vocabulary.argmax(student_NV.detach()) == vocabulary.argmax(teacher_NV)).float()
        return divergence_N, agrees_N, token_entropy(student_NV.detach(), self.temperature, vocabulary=vocabulary)


class TopDivergence:
    """As ``WholeDivergence``, on the K tokens that the teacher found likeliest.

    ``add_tail``: all other tokens together are one more entry. Tokens of the teacher's that the student lacks, padding
    of its embedding, are left out.
    """

    names: tuple[str, ...] = NAMES

    def __init__(self, *, beta: float, temperature: float, add_tail: bool, vocab_size: int) -> None:
        self.beta, self.temperature, self.add_tail, self.vocab_size = beta, temperature, add_tail, vocab_size

    def inputs(self, micro: DistillationSamples) -> tuple[torch.Tensor, ...]:
        """(N, K) ids and log-probabilities, as they came."""
        assert micro.top_ids is not None, "the teacher was asked before"
        assert micro.top_logps is not None, "ids come with their log-probabilities"
        return torch.tensor(micro.top_ids.values), torch.tensor(micro.top_logps.values)

    def __call__(
        self, logits_NV: torch.Tensor, *inputs: torch.Tensor, vocabulary: Vocabulary = WHOLE
    ) -> tuple[torch.Tensor, ...]:
        ids_NK, logps_NK = (on_device(column, logits_NV.device) for column in inputs)
        student_NV, vocabulary = vocabulary.cut(logits_NV, self.vocab_size)
        is_padding_NK = ids_NK >= self.vocab_size
        divergence_N = topk_jsd(
            student_NV,
            ids_NK.masked_fill(is_padding_NK, 0),
            logps_NK.masked_fill(is_padding_NK, -torch.inf),
            beta=self.beta,
            temperature=self.temperature,
            add_tail=self.add_tail,
            teacher_temperature=self.temperature,
            vocabulary=vocabulary,
        )
        agrees_N = (vocabulary.argmax(student_NV.detach()) == ids_NK[:, 0]).float()
        return divergence_N, agrees_N, token_entropy(student_NV.detach(), self.temperature, vocabulary=vocabulary)


Divergence = WholeDivergence | TopDivergence


def divergence_of(config: GKDConfig, teacher: Backend, vocab_size: int) -> Divergence:
    """What the configuration asks for; ``teacher`` is used if it compares the whole vocabulary."""
    beta, temperature = config.beta, config.temperature
    if config.gkd_logits_topk is None:
        return WholeDivergence(
            teacher, adapter=config.has_live_teacher, beta=beta, temperature=temperature, vocab_size=vocab_size
        )
    return TopDivergence(beta=beta, temperature=temperature, add_tail=config.gkd_topk_add_tail, vocab_size=vocab_size)


@torch.no_grad()
def measure_divergence(
    student: Backend,
    function: Divergence,
    samples: DistillationSamples,
    *,
    micro_batch_size: int,
    num_micro: int,
    sft_alpha: float,
) -> Metrics:
    """Means over the targets, under training's names, without learning. ``sft_alpha``: as in ``StepNumbers``.

    Every rank calls it with the same ``num_micro``: behind the end of its samples a rank's micro-batches are empty.
    """
    metrics = Metrics()
    chunk_tokens = max(1, CHUNK_BYTES // (4 * function.vocab_size))
    for k in range(num_micro):
        micro = samples[k * micro_batch_size : (k + 1) * micro_batch_size]
        targets = torch.tensor(target_ids(micro))
        columns = (student.target_features(micro.as_sequences()), targets, *function.inputs(micro))
        for start in range(0, len(columns[0]), chunk_tokens):
            features_NX, ids_N, *inputs = (column[start : start + chunk_tokens] for column in columns)
            logits_NV = student.logits(features_NX)
            loss_N, *others = function(logits_NV, *inputs, vocabulary=student.vocabulary)
            found = dict(zip(("teacher_agreement", "entropy"), others, strict=True))
            if sft_alpha:
                ids_N = on_device(ids_N, logits_NV.device)
                found |= {
                    "divergence": loss_N,
                    "sft_loss": -token_logps(logits_NV, ids_N, vocabulary=student.vocabulary),
                }
                loss_N = loss_N + sft_alpha * found["sft_loss"]
            for name, values_N in {"loss": loss_N, **found}.items():
                metrics.mean(name, values_N.sum(), len(values_N))
    return metrics
