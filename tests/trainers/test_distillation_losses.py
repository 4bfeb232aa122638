"""Divergences against loops that can be checked by eye, and the mistakes that distillation is known for."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch._dynamo  # what checkpointing imports at first use; it sets a variable and makes a folder, once a process
from torch import nn

from trainers.losses.distillation import (
    chunked_jsd,
    chunked_topk_jsd,
    distillation_loss,
    generalized_jsd,
    topk_jsd,
    topk_logps,
)
from trainers.losses.tokens import token_entropy

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
TEMPERATURES = [1.0, 1.7]


def logits(seed: int, *shape: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def probabilities(scores: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(score / temperature) for score in scores]
    return [weight / sum(weights) for weight in weights]


def kl(p: list[float], q: list[float]) -> float:
    return sum(p[i] * math.log(p[i] / q[i]) for i in range(len(p)))


def jsd_by_hand(student: list[float], teacher: list[float], beta: float) -> float:
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = [(1 - beta) * student[i] + beta * teacher[i] for i in range(len(student))]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def with_tail(some: list[float]) -> list[float]:
    return [*some, 1 - sum(some)]


def slopes(function: Any, scores: list[float], step: float = 1e-5) -> list[float]:
    """The gradient of a function of Python numbers, by central differences."""
    found = []
    for i in range(len(scores)):
        up, down = ([*scores[:i], scores[i] + sign * step, *scores[i + 1 :]] for sign in (1, -1))
        found.append((function(up) - function(down)) / (2 * step))
    return found


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("beta", [*BETAS, 0.001])
def test_divergences_and_gradients_equal_plain_loops(beta: float, temperature: float) -> None:
    student, teacher = logits(1, 3, 6).requires_grad_(), logits(2, 3, 6)

    actual = generalized_jsd(student, teacher, beta=beta, temperature=temperature)
    (gradient,) = torch.autograd.grad(actual.sum(), student)

    for token in range(3):
        wanted = probabilities(teacher[token].tolist(), temperature)

        def by_hand(scores: list[float], wanted: list[float] = wanted) -> float:
            return jsd_by_hand(probabilities(scores, temperature), wanted, beta)

        scores = student[token].tolist()
        assert actual[token].item() == pytest.approx(by_hand(scores), abs=1e-6)
        assert gradient[token].tolist() == pytest.approx(slopes(by_hand, scores), abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("add_tail", [True, False])
def test_top_k_and_its_gradients_equal_plain_loops(beta: float, add_tail: bool) -> None:
    student, teacher = logits(1, 3, 6).requires_grad_(), logits(2, 3, 6)
    ids, logps = topk_logps(teacher, 2)

    actual = topk_jsd(student, ids, logps, beta=beta, add_tail=add_tail)
    (gradient,) = torch.autograd.grad(actual.sum(), student)

    for token in range(3):
        chosen = ids[token].tolist()

        def on_support(scores: list[float], chosen: list[int] = chosen) -> list[float]:
            some = [probabilities(scores)[i] for i in chosen]
            return with_tail(some) if add_tail else [p / sum(some) for p in some]

        wanted = on_support(teacher[token].tolist())

        def by_hand(scores: list[float], wanted: list[float] = wanted, support: Any = on_support) -> float:
            return jsd_by_hand(support(scores), wanted, beta)

        scores = student[token].tolist()
        assert actual[token].item() == pytest.approx(by_hand(scores), rel=1e-5)
        assert gradient[token].tolist() == pytest.approx(slopes(by_hand, scores), abs=1e-5)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("beta", [*BETAS, 1e-9, 1 - 1e-9])
def test_a_teacher_equal_to_the_student_gives_zero_and_no_gradient(beta: float, temperature: float) -> None:
    student = logits(1, 40, 300).requires_grad_()
    ids, logps = topk_logps(student, 5)
    ids_at_temperature, logps_at_temperature = topk_logps(student, 5, temperature=temperature)
    found = {
        "whole": generalized_jsd(student, student, beta=beta, temperature=temperature),
        "top_k": topk_jsd(student, ids, logps, beta=beta, temperature=temperature, add_tail=False),
        "top_k_with_tail": topk_jsd(
            student,
            ids_at_temperature,
            logps_at_temperature,
            beta=beta,
            temperature=temperature,
            add_tail=True,
            teacher_temperature=temperature,
        ),
    }
    for name, divergence in found.items():
        assert not divergence.any(), name
        assert not torch.autograd.grad(divergence.sum(), student)[0].any(), name


@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_shifted_by_one_position_shows(beta: float) -> None:
    """Logits at a place predict the token after it. A teacher that is attached one place off differs from itself."""
    ids_T = torch.randint(0, 40, (9,), generator=torch.Generator().manual_seed(5))
    model = nn.Embedding.from_pretrained(logits(6, 40, 40))
    predicting = model(ids_T)[:-1]
    shifted = model(ids_T)[1:]

    aligned = generalized_jsd(predicting, predicting, beta=beta)
    off_by_one = generalized_jsd(predicting, shifted, beta=beta)
    top_k_off_by_one = topk_jsd(predicting, *topk_logps(shifted, 8), beta=beta, add_tail=True)

    assert aligned.sum() == 0
    assert off_by_one.min() > 0.05
    assert top_k_off_by_one.min() > 0.05


def test_a_teacher_of_another_length_is_refused_not_cut() -> None:
    student, teacher = logits(1, 8, 6), logits(2, 9, 6)
    with pytest.raises(ValueError, match=re.escape("tokens (8,), got (9,)")):
        generalized_jsd(student, teacher, beta=0.5)
    with pytest.raises(ValueError, match=re.escape("tokens (8,), got (9,)")):
        topk_jsd(student, *topk_logps(teacher, 2), beta=0.5, add_tail=True)
    with pytest.raises(ValueError, match=re.escape("tokens (8,), got (9,)")):
        chunked_jsd(student, nn.Identity(), teacher, nn.Identity(), beta=0.5, chunk_tokens=4)
    with pytest.raises(ValueError, match=re.escape("tokens (8,), got (9,)")):
        chunked_topk_jsd(student, nn.Identity(), *topk_logps(teacher, 2), beta=0.5, add_tail=True, chunk_tokens=4)


def test_vocabularies_padded_to_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="152 and 160 entries"):
        generalized_jsd(logits(1, 4, 152), logits(2, 4, 160), beta=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": -0.1}, "beta must lie between 0"),
        ({"beta": 1.1}, "got 1.1"),
        ({"beta": math.nan}, "got nan"),
        ({"beta": 0.5, "temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generalized_jsd(logits(1, 4, 6), logits(2, 4, 6), **options)
    with pytest.raises(ValueError, match=message):
        topk_jsd(logits(1, 4, 6), *topk_logps(logits(2, 4, 6), 2), add_tail=False, **options)


def test_chunks_below_one_token_and_top_k_of_no_use_are_refused() -> None:
    student, (ids, logps) = logits(1, 4, 6), topk_logps(logits(2, 4, 6), 2)
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, got 0"):
        chunked_jsd(student, nn.Identity(), student, nn.Identity(), beta=0.5, chunk_tokens=0)
    with pytest.raises(ValueError, match=re.escape("one shape, got (4, 2) and (4, 1)")):
        topk_jsd(student, ids, logps[:, :1], beta=0.5, add_tail=True)
    with pytest.raises(ValueError, match=re.escape("teacher_temperature must be above 0, got 0.0")):
        topk_jsd(student, ids, logps, beta=0.5, add_tail=False, teacher_temperature=0.0)
    with pytest.raises(ValueError, match=r"between 1 and 6 entries per token, .* got 0"):
        topk_jsd(student, ids[:, :0], logps[:, :0], beta=0.5, add_tail=True)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 100])
@pytest.mark.parametrize("beta", BETAS)
def test_chunks_equal_the_whole(beta: float, chunk_tokens: int) -> None:
    torch.manual_seed(0)
    student_head, teacher_head = nn.Linear(5, 30), nn.Linear(7, 30)
    student, teacher = logits(1, 11, 5).requires_grad_(), logits(2, 11, 7).requires_grad_()
    options = {"beta": beta, "temperature": 1.7}
    trained = (student, *student_head.parameters())
    whole = generalized_jsd(student_head(student), teacher_head(teacher), **options)
    gradients = torch.autograd.grad(whole.square().sum(), trained)

    found = chunked_jsd(student, student_head, teacher, teacher_head, chunk_tokens=chunk_tokens, **options)
    found.divergence_N.square().sum().backward()

    torch.testing.assert_close(found.divergence_N, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropy_N, token_entropy(student_head(student), 1.7), rtol=1e-6, atol=1e-6)
    assert not found.entropy_N.requires_grad
    for tensor, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-6, atol=1e-6)
    assert teacher.grad is None
    assert all(parameter.grad is None for parameter in teacher_head.parameters())


@pytest.mark.parametrize("add_tail", [True, False])
def test_chunks_of_top_k_equal_the_whole(add_tail: bool) -> None:
    head = nn.Linear(5, 30)
    student, (ids, logps) = logits(1, 11, 5).requires_grad_(), topk_logps(logits(2, 11, 30), 4)
    whole = topk_jsd(head(student), ids, logps, beta=0.3, add_tail=add_tail)
    (gradient,) = torch.autograd.grad(whole.sum(), student)

    found = chunked_topk_jsd(student, head, ids, logps, beta=0.3, add_tail=add_tail, chunk_tokens=4)
    found.divergence_N.sum().backward()

    torch.testing.assert_close(found.divergence_N, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(student.grad, gradient, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropy_N, token_entropy(head(student)), rtol=1e-6, atol=1e-6)


class CountedHead(nn.Linear):
    """Writes down how many tokens each call brought, and whether any was to have a gradient."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__(hidden, vocabulary)
        self.calls: list[int] = []
        self.with_gradient = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(hidden))
        self.with_gradient |= torch.is_grad_enabled()
        return super().forward(hidden)


def test_no_more_than_a_chunk_reaches_a_head_and_no_logits_are_kept() -> None:
    student_head, teacher_head = CountedHead(5, 1000), CountedHead(5, 1000)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda t: t):
        found = chunked_jsd(logits(1, 10, 5), student_head, logits(2, 10, 5), teacher_head, beta=0.5, chunk_tokens=4)
    assert student_head.calls == teacher_head.calls == [4, 4, 2]
    assert not [size for size in kept if size >= 2 * 1000]  # two tokens' logits, the last chunk's

    found.divergence_N.sum().backward()
    assert sorted(student_head.calls) == [2, 2, 4, 4, 4, 4]
    assert student_head.with_gradient
    assert not teacher_head.with_gradient


def test_without_gradients_nothing_is_computed_twice() -> None:
    head = CountedHead(5, 30)
    with torch.no_grad():
        chunked_jsd(logits(1, 10, 5), head, logits(2, 10, 30), nn.Identity(), beta=0.5, chunk_tokens=4)
    assert head.calls == [4, 4, 2]


def test_no_tokens_still_call_the_heads_and_give_no_loss() -> None:
    head, teacher_head = CountedHead(5, 30), CountedHead(5, 30)
    empty = torch.empty(0, 5, requires_grad=True)
    found = chunked_jsd(empty, head, empty, teacher_head, beta=0.5, chunk_tokens=4)
    loss = distillation_loss(found.divergence_N, torch.empty(0), normaliser=0)
    loss.backward()
    assert loss == 0
    assert head.calls[0] == teacher_head.calls[0] == 0
    assert head.weight.grad is not None
    assert not head.weight.grad.any()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("beta", BETAS)
def test_all_tokens_as_top_k_are_the_whole_at_any_temperature(beta: float, temperature: float) -> None:
    """The teacher's log-probabilities come at temperature 1."""
    student, teacher = logits(1, 7, 12), logits(2, 7, 12)
    whole = generalized_jsd(student, teacher, beta=beta, temperature=temperature)
    ids, logps = topk_logps(teacher, 12)
    found = topk_jsd(student, ids, logps, beta=beta, temperature=temperature, add_tail=False)
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_a_tail_never_exceeds_the_whole_and_with_all_tokens_is_it(beta: float) -> None:
    student, teacher = (logits(1, 50, 12) / 4).requires_grad_(), logits(2, 50, 12) / 4  # no mass of rounding size
    whole = generalized_jsd(student, teacher, beta=beta)
    previous = torch.zeros(50)
    for k in range(1, 12):
        found = topk_jsd(student, *topk_logps(teacher, k), beta=beta, add_tail=True)
        assert (found > previous - 1e-5).all()
        assert (found < whole + 1e-5).all()
        previous = found
    all_of_them = topk_jsd(student, *topk_logps(teacher, 12), beta=beta, add_tail=True)
    torch.testing.assert_close(all_of_them, whole, rtol=1e-5, atol=1e-5)
    ours, wanted = (torch.autograd.grad(value.sum(), student)[0] for value in (all_of_them, whole))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_a_tail_at_another_temperature_than_the_teachers_is_refused() -> None:
    student, (ids, logps) = logits(1, 4, 6), topk_logps(logits(2, 4, 6), 2)
    with pytest.raises(ValueError, match=re.escape("tail of a teacher at temperature 1.0 is not known at temperature")):
        topk_jsd(student, ids, logps, beta=0.5, temperature=1.7, add_tail=True)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("add_tail", [True, False])
def test_absent_entries_count_for_nothing_whatever_their_ids(beta: float, add_tail: bool) -> None:
    student, (ids, logps) = logits(1, 4, 9).requires_grad_(), topk_logps(logits(2, 4, 9), 3)
    wanted = topk_jsd(student, ids, logps, beta=beta, add_tail=add_tail)
    (gradient,) = torch.autograd.grad(wanted.sum(), student)

    wider = [torch.cat([ids, ids[:, :1], ids[:, :1] * 0], -1), torch.cat([logps, torch.full((4, 2), -torch.inf)], -1)]
    found = topk_jsd(student, *wider, beta=beta, add_tail=add_tail)

    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), student)[0], gradient, rtol=1e-6, atol=1e-6)
    nothing = topk_jsd(student, ids, torch.full_like(logps, -torch.inf), beta=beta, add_tail=add_tail)
    assert nothing.abs().max() < 1e-6
    assert torch.autograd.grad(nothing.sum(), student)[0].abs().max() < 1e-6


@pytest.mark.parametrize("beta", [*BETAS, 1e-9, 1 - 1e-9])
def test_extreme_logits_stay_finite(beta: float) -> None:
    student = torch.tensor([[0.0, 300.0, 0.0], [300.0, 0.0, 0.0], [1e4, 0.0, -1e4]], requires_grad=True)
    teacher = torch.tensor([[300.0, 0.0, 0.0], [300.0, 0.0, 0.0], [-1e4, 0.0, 1e4]])
    found = {
        "whole": generalized_jsd(student, teacher, beta=beta),
        "top_k": topk_jsd(student, *topk_logps(teacher, 2), beta=beta, add_tail=False),
        "top_k_with_tail": topk_jsd(student, *topk_logps(teacher, 2), beta=beta, add_tail=True),
    }
    for name, divergence in found.items():
        assert divergence.isfinite().all(), name
        assert torch.autograd.grad(divergence.sum(), student)[0].isfinite().all(), name
    expected = {0.0: 300.0, 1.0: 300.0}.get(beta, -beta * math.log(beta or 1) - (1 - beta) * math.log(1 - beta or 1))
    assert found["whole"][0].item() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_a_student_too_sure_of_the_top_k_is_still_pulled_to_the_tail() -> None:
    """Half of the teacher's mass lies outside its top two, all of the student's inside."""
    student = torch.tensor([[40.0, 40.0, 0.0, 0.0]], requires_grad=True)
    ids, logps = torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.25]]).log()
    divergence = topk_jsd(student, ids, logps, beta=0.0, add_tail=True)
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    torch.testing.assert_close(gradient, torch.tensor([[0.25, 0.25, -0.25, -0.25]]))


def test_half_precision_logits_are_judged_in_float32() -> None:
    student, teacher = logits(1, 4, 50).bfloat16(), logits(2, 4, 50).bfloat16()
    found = generalized_jsd(student, teacher, beta=0.5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, generalized_jsd(student.float(), teacher.float(), beta=0.5))


def test_micro_batches_of_a_step_add_up() -> None:
    """Ragged rows, so that a mean of means would differ; outside the mask stands NaN."""
    mask = torch.arange(4)[None, :] < torch.tensor([4, 1, 0, 3, 2])[:, None]
    student, teacher = logits(1, 5, 4, 6).requires_grad_(), logits(2, 5, 4, 6)
    divergence = generalized_jsd(student, teacher, beta=0.5)
    with_rubbish = divergence.masked_fill(~mask, math.nan)

    whole = distillation_loss(with_rubbish, mask, normaliser=10)
    parts = [distillation_loss(with_rubbish[rows], mask[rows], normaliser=10) for rows in (slice(0, 2), slice(2, 5))]

    by_hand = sum(divergence[i, t].item() for i, length in enumerate([4, 1, 0, 3, 2]) for t in range(length)) / 10
    assert whole.item() == pytest.approx(by_hand, rel=1e-6)
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(
        torch.autograd.grad(sum(parts), student, retain_graph=True), torch.autograd.grad(whole, student)
    )


def test_a_step_without_loss_tokens_gives_zero_and_a_mask_of_another_shape_is_refused() -> None:
    assert distillation_loss(torch.full((2, 3), math.nan), torch.zeros(2, 3), normaliser=0) == 0
    with pytest.raises(ValueError, match=re.escape("shape (2, 4), got (2, 3)")):
        distillation_loss(torch.zeros(2, 3), torch.ones(2, 4), normaliser=1)
