"""Our divergences against TRL's: whole vocabulary, chunked from hidden states, and a server's top-k; with gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from trl.experimental.gkd import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import (
    ServerDistillationTrainer,
    _add_tail_bucket,
    _jsd_divergence,
)
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from trainers.losses.distillation import (
    chunked_jsd,
    chunked_topk_jsd,
    distillation_loss,
    generalized_jsd,
    topk_jsd,
    topk_logps,
)

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
TEMPERATURES = [1.0, 1.7]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def logits(seed: int, *shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weighted_gradient(per_token: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a sum in which every token counts differently."""
    weights = torch.linspace(0.5, 2.0, per_token.numel()).reshape(per_token.shape)
    return torch.autograd.grad((per_token * weights).sum(), inputs)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("beta", BETAS)
def test_divergences_and_gradients_equal_trls_gkd(beta: float, temperature: float) -> None:
    student, teacher = logits(1, 2, 7, 50).requires_grad_(), logits(2, 2, 7, 50)
    expected_BTV = GKDTrainer.generalized_jsd_loss(student, teacher, None, beta, temperature, reduction="none")

    actual_BT = generalized_jsd(student, teacher, beta=beta, temperature=temperature)

    torch.testing.assert_close(actual_BT, expected_BTV.sum(-1), **TOLERANCE)
    torch.testing.assert_close(
        weighted_gradient(actual_BT, student), weighted_gradient(expected_BTV.sum(-1), student), **TOLERANCE
    )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_of_a_step_equals_trls_gkd(beta: float) -> None:
    """57 tokens in all micro-batches together, of which this one holds 5."""
    student, teacher = logits(1, 2, 4, 50).requires_grad_(), logits(2, 2, 4, 50)
    labels = torch.tensor([[3, 4, 5, -100], [-100, 7, 8, -100]])
    expected = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, num_items_in_batch=torch.tensor(57))

    actual = distillation_loss(generalized_jsd(student, teacher, beta=beta), labels != -100, normaliser=57)

    torch.testing.assert_close(actual, expected, **TOLERANCE)
    torch.testing.assert_close(
        torch.autograd.grad(actual, student), torch.autograd.grad(expected, student), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("beta", BETAS)
def test_chunks_of_hidden_states_equal_trls_kernel(beta: float, temperature: float) -> None:
    torch.manual_seed(3)
    student_head, teacher_head = torch.nn.Linear(8, 50), torch.nn.Linear(12, 50, bias=False)
    student, teacher = logits(4, 11, 8).requires_grad_(), logits(5, 11, 12)
    trained = (student, student_head.weight, student_head.bias)
    expected, expected_entropy = ChunkedDivergenceFunction.apply(
        *trained, teacher, teacher_head.weight, None, beta, temperature
    )

    actual = chunked_jsd(
        student, student_head, teacher, teacher_head, beta=beta, temperature=temperature, chunk_tokens=4
    )

    torch.testing.assert_close(actual.divergence_N, expected, **TOLERANCE)
    torch.testing.assert_close(actual.entropy_N, expected_entropy, **TOLERANCE)
    for ours, trls in zip(
        weighted_gradient(actual.divergence_N, *trained), weighted_gradient(expected, *trained), strict=True
    ):
        torch.testing.assert_close(ours, trls, **TOLERANCE)


def server_answer(num_tokens: int, k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A teacher's top k, the last token of which lacks two entries."""
    ids_NK, logps_NK = topk_logps(logits(2, num_tokens, 50), k, temperature=temperature)
    logps_NK[-1, -2:] = -torch.inf
    ids_NK[-1, -2:] = 0
    return ids_NK, logps_NK


@pytest.mark.parametrize("add_tail", [True, False])
def test_top_k_forward_kl_equals_trls_server_distillation(add_tail: bool) -> None:
    student = logits(1, 9, 50).requires_grad_()
    ids_NK, logps_NK = server_answer(9, 6, 1.0)
    trainer = SimpleNamespace(
        loss_add_tail=add_tail, _reduce_divergence_loss=ServerDistillationTrainer._reduce_divergence_loss
    )
    labels_BT = torch.tensor([[3, 4, 5, 6, -100, 8, 9, 10, 11]])
    expected = ServerDistillationTrainer._compute_server_forward_kl_loss(
        trainer,
        {"topk_logprobs": logps_NK[None], "topk_token_ids": ids_NK[None]},
        student.log_softmax(-1)[None],
        labels_BT,
    )

    divergence_N = topk_jsd(student, ids_NK, logps_NK, beta=0.0, add_tail=add_tail)
    actual = distillation_loss(divergence_N[None], labels_BT != -100, normaliser=8)

    torch.testing.assert_close(actual, expected, **TOLERANCE)
    torch.testing.assert_close(
        torch.autograd.grad(actual, student), torch.autograd.grad(expected, student), **TOLERANCE
    )


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("add_tail", [True, False])
def test_top_k_of_any_beta_equals_what_trl_has_for_given_log_probabilities(
    beta: float, temperature: float, add_tail: bool
) -> None:
    """TRL's trainers stop at k=1 for beta > 0, but the formulas under them take any."""
    head = torch.nn.Linear(8, 50)
    hidden = logits(4, 9, 8).requires_grad_()
    ids_NK, logps_NK = server_answer(9, 6, temperature)
    support = logps_NK > -torch.inf
    student_NK = (head(hidden) / temperature).log_softmax(-1).gather(-1, ids_NK).masked_fill(~support, -torch.inf)
    if add_tail:
        student_NK, support = _add_tail_bucket(student_NK, support)
        teacher_NK, _ = _add_tail_bucket(logps_NK, support[:, :-1])
    else:
        student_NK, teacher_NK = student_NK.log_softmax(-1), logps_NK.log_softmax(-1)
    expected = _jsd_divergence(student_NK, teacher_NK, beta, support).sum(-1)

    actual = chunked_topk_jsd(
        hidden,
        head,
        ids_NK,
        logps_NK,
        beta=beta,
        temperature=temperature,
        add_tail=add_tail,
        teacher_temperature=temperature,
        chunk_tokens=4,
    )

    torch.testing.assert_close(actual.divergence_N, expected, **TOLERANCE)
    torch.testing.assert_close(
        weighted_gradient(actual.divergence_N, hidden), weighted_gradient(expected, hidden), **TOLERANCE
    )


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("add_tail", [True, False])
def test_the_teachers_best_and_the_sampled_token_equal_trls_top_1_path(beta: float, add_tail: bool) -> None:
    """Its support of two: where both are one token, the second entry is absent."""
    student, teacher = logits(1, 6, 50).requires_grad_(), logits(2, 6, 50).log_softmax(-1)
    best = teacher.argmax(-1)
    sampled = torch.where(torch.arange(6) < 2, best, (best + 5) % 50)
    ids_NK = torch.stack([best, sampled], -1)
    logps_NK = teacher.gather(-1, ids_NK)
    trainer = SimpleNamespace(
        beta=beta, loss_add_tail=add_tail, _reduce_divergence_loss=ServerDistillationTrainer._reduce_divergence_loss
    )
    expected = ServerDistillationTrainer._compute_sparse_top_1_divergence_loss(
        trainer, student.log_softmax(-1), best, logps_NK[:, 0], sampled, logps_NK[:, 1], labels=torch.zeros(6)
    )

    logps_NK[:2, 1] = -torch.inf
    divergence_N = topk_jsd(student, ids_NK, logps_NK, beta=beta, add_tail=add_tail)
    actual = distillation_loss(divergence_N, torch.ones(6), normaliser=6)

    torch.testing.assert_close(actual, expected, **TOLERANCE)
    torch.testing.assert_close(
        torch.autograd.grad(actual, student), torch.autograd.grad(expected, student), **TOLERANCE
    )
