"""Ranks that hold some columns of the logits each, against autograd over all columns, in float64, in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backends.ranks import run_ranks
from trainers.backends.scores import head
from trainers.backends.scores.evaluated import TargetNumbers
from trainers.backends.scores.head import LinearHead
from trainers.backends.scores.top_logps import TopLogps
from trainers.backends.scores.vocabulary import ShardedVocabulary
from trainers.gkd.loss import TopDivergence, WholeDivergence
from trainers.losses.distillation import generalized_jsd, topk_jsd, topk_logps
from trainers.losses.tokens import token_entropy, token_logps
from trainers.losses.vocabulary import WHOLE, Vocabulary

SIZE, NUM_TOKENS, HIDDEN, K = 97, 11, 16, 6
COMMON = 95  # columns that student and teacher share
TEACHERS = 96  # columns of the teacher
SHARDS = [(1, 97), (2, 49), (4, 25), (4, 40)]  # ranks and columns of each: the last ones have fewer, or none
TEMPERATURE = 0.7
BETAS = [0.0, 0.5, 1.0]

Values = tuple[torch.Tensor, ...]
Answer = tuple[list[torch.Tensor], list[torch.Tensor]]  # values, one a token; gradients


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The logs of the sums are near 0: a few roundings of a number of 5, as those of heads are, come to more than 1e-6.
LOGITS, TEACHER = numbers(1, NUM_TOKENS, SIZE) - 3.8, numbers(2, NUM_TOKENS, SIZE) - 3.8
IDS = torch.tensor([0, 24, 25, 49, 50, 74, 75, 96, 13, 48, 94])  # of every rank
IDS = IDS.where(torch.arange(NUM_TOKENS) % 3 > 0, LOGITS.argmax(-1))  # some of them the likeliest
TOP_LOGPS, TOP_IDS = (TEACHER / TEMPERATURE).log_softmax(-1).topk(K)
TOP_LOGPS[2, 3:] = TOP_LOGPS[5, 1] = -torch.inf
TOP_IDS[2, 3:] = 0
FEATURES, WEIGHT = numbers(3, NUM_TOKENS, HIDDEN) / 2, numbers(4, SIZE, HIDDEN) / 3
TEACHER_WEIGHT = numbers(5, TEACHERS, HIDDEN) / 3
HEAD_IDS = IDS.where(torch.arange(NUM_TOKENS) % 3 > 0, (FEATURES @ WEIGHT.T).argmax(-1))


# The oracle: plain formulas of all columns


def plain_logps(logits: torch.Tensor, ids: torch.Tensor = IDS, temperature: float = TEMPERATURE) -> torch.Tensor:
    return (logits / temperature).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def plain_entropy(logits: torch.Tensor, temperature: float = TEMPERATURE) -> torch.Tensor:
    logps = (logits / temperature).log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


def plain_divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Of two tables of probabilities; an entry that the teacher gives 0 has 0 of the student's too."""

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p.clamp(min=1e-300) / q.clamp(min=1e-300)).log()).sum(-1)

    if beta in (0.0, 1.0):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = (1 - beta) * student + beta * teacher
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def plain_jsd(logits: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    return plain_divergence((logits / TEMPERATURE).softmax(-1), (teacher.double() / TEMPERATURE).softmax(-1), beta)


def plain_topk_jsd(
    logits: torch.Tensor, ids: torch.Tensor, logps: torch.Tensor, beta: float, add_tail: bool
) -> torch.Tensor:
    teacher = logps.double().exp()
    student = (logits / TEMPERATURE).softmax(-1).gather(-1, ids) * (teacher > 0)
    if add_tail:
        student, teacher = (torch.cat([some, 1 - some.sum(-1, keepdim=True)], -1) for some in (student, teacher))
    else:
        student, teacher = (some / some.sum(-1, keepdim=True) for some in (student, teacher))
    return plain_divergence(student, teacher, beta)


def is_top1(logits: torch.Tensor, ids: torch.Tensor = IDS) -> torch.Tensor:
    return (logits.argmax(-1) == ids).to(logits.dtype)


def answer(values: Values, *leaves: torch.Tensor) -> Answer:
    """Values, and the gradients of a loss to which every token and value adds another share."""
    learnt = [value for value in values if value.requires_grad]
    loss = sum((value * torch.linspace(0.5, 2.0 + i, NUM_TOKENS)).sum() for i, value in enumerate(learnt))
    gradients = torch.autograd.grad(loss, leaves) if learnt else ()  # type: ignore[arg-type]
    return [value.detach() for value in values], list(gradients)


# Functions of logits

Function = Callable[[torch.Tensor, Vocabulary], Values]


def functions(vocabulary: Vocabulary) -> dict[str, Function]:
    teacher_NV = vocabulary.own(TEACHER)
    top: dict[str, Any] = {"temperature": TEMPERATURE, "teacher_temperature": TEMPERATURE}
    found: dict[str, Function] = {
        "logps": lambda x, v: (token_logps(x, IDS, TEMPERATURE, vocabulary=v),),
        "entropy": lambda x, v: (token_entropy(x, TEMPERATURE, vocabulary=v),),
        "top 1": lambda x, v: ((v.argmax(x) == IDS).float(),),
        "mean": lambda x, v: (v.mean(x),),
        "sum": lambda x, v: (v.total(v.softmax(x) ** 2),),
        "top k": lambda x, v: topk_logps(x, K, temperature=TEMPERATURE, vocabulary=v)[::-1],
    }
    for beta in BETAS:
        settings = {"beta": beta, "temperature": TEMPERATURE}
        found[f"jsd {beta}"] = lambda x, v, s=settings: (generalized_jsd(x, teacher_NV, **s, vocabulary=v),)  # type: ignore
        for tail in (False, True):
            found[f"top k jsd {beta} {tail}"] = lambda x, v, tail=tail, beta=beta: (  # type: ignore[misc]
                topk_jsd(x, TOP_IDS, TOP_LOGPS, beta=beta, add_tail=tail, **top, vocabulary=v),
            )
    return found


def plain_functions() -> dict[str, Callable[[torch.Tensor], Values]]:
    found: dict[str, Callable[[torch.Tensor], Values]] = {
        "logps": lambda x: (plain_logps(x),),
        "entropy": lambda x: (plain_entropy(x),),
        "top 1": lambda x: (is_top1(x.detach()),),
        "mean": lambda x: (x.mean(-1),),
        "sum": lambda x: ((x.softmax(-1) ** 2).sum(-1),),
        "top k": lambda x: tuple((x.detach() / TEMPERATURE).log_softmax(-1).topk(K)),
    }
    for beta in BETAS:
        found[f"jsd {beta}"] = lambda x, beta=beta: (plain_jsd(x, TEACHER, beta),)  # type: ignore[misc]
        for tail in (False, True):
            found[f"top k jsd {beta} {tail}"] = lambda x, tail=tail, beta=beta: (  # type: ignore[misc]
                plain_topk_jsd(x, TOP_IDS, TOP_LOGPS, beta, tail),
            )
    return found


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def answers_of_functions(rank: int, shard: int) -> dict[str, Answer]:
    vocabulary = ShardedVocabulary(SIZE, shard, group())
    found = {}
    for name, function in functions(vocabulary).items():
        own = vocabulary.own(LOGITS).clone().requires_grad_()
        found[name] = answer(function(own, vocabulary), own)
    return found


def assert_equal(
    ranks: list[dict[str, Answer]], expected: dict[str, Answer], *, sharded: int, limit_of_values: float
) -> None:
    """Of each question; the first gradient lies in shards along dimension ``sharded``."""
    for name in ranks[0]:
        say = partial("{}: {}".format, name)
        wanted_values, wanted_gradients = expected[name]
        columns = [rank[name][1][0] for rank in ranks if wanted_gradients]
        for values, gradients in (rank[name] for rank in ranks):
            for value, wanted in zip(values, wanted_values, strict=True):
                torch.testing.assert_close(value.double(), wanted.double(), atol=limit_of_values, rtol=0, msg=say)
            found = [torch.cat(columns, sharded), *gradients[1:]] if gradients else []
            for gradient, wanted in zip(found, wanted_gradients, strict=True):
                assert wanted.abs().max() > 1e-3
                limit = 1e-6 * float(wanted.abs().max())
                torch.testing.assert_close(gradient.double(), wanted, atol=limit, rtol=0, msg=say)


# Heads


def rows_of(vocabulary: Vocabulary, weight_VH: torch.Tensor) -> torch.Tensor:
    return vocabulary.own(weight_VH.T).T.contiguous()


def teacher(beta: float, shard: int) -> Any:
    """A model whose columns lie as the student's, in shards of another size, or all in each process."""
    held: dict[float, Vocabulary] = {
        0.0: ShardedVocabulary(TEACHERS, shard, group()),
        0.5: ShardedVocabulary(TEACHERS, shard + 1, group()),
        1.0: WHOLE,
    }
    columns = held[beta]
    weight = rows_of(columns, TEACHER_WEIGHT)
    return SimpleNamespace(vocabulary=columns, logits=LinearHead(lambda: weight, columns).logits)


def answers_of_heads(rank: int, shard: int) -> dict[str, Answer]:
    head.CHUNK_BYTES = 4 * 4 * shard  # four tokens
    vocabulary = ShardedVocabulary(SIZE, shard, group())
    found: dict[str, Answer] = {}

    def ask(name: str, room: int = 0, **settings: Any) -> None:
        features, weight = FEATURES.clone().requires_grad_(), rows_of(vocabulary, WEIGHT).requires_grad_()
        part = LinearHead(lambda: weight, vocabulary, scale=1.3, room=room)
        assert part.chunk_rows() == 4
        scores = part.scores(features, HEAD_IDS, TEMPERATURE, **settings)
        found[name] = answer((*scores[:3], *scores.further), weight, features)

    ask("plain")
    ask("kept", room=5 * 4 * SIZE)  # of five tokens, or more where the columns lie on several ranks
    ask("entropy", entropy_gradient=True)
    for beta in BETAS:
        settings = {"beta": beta, "temperature": TEMPERATURE, "vocab_size": COMMON}
        function: Any = WholeDivergence(teacher(beta, shard), **settings)  # type: ignore[arg-type]
        ask(f"whole {beta}", token_function=function, token_inputs=(FEATURES.flip(0),))
        for tail in (False, True):
            function = TopDivergence(add_tail=tail, **settings)  # type: ignore[arg-type]
            ask(f"top {beta} {tail}", token_function=function, token_inputs=(TOP_IDS, TOP_LOGPS), entropy_gradient=True)
    ask("pairs", token_function=TargetNumbers(True), token_inputs=(HEAD_IDS,))
    with torch.no_grad():
        ask("likeliest", token_function=TopLogps(K, TEMPERATURE))
    weight = rows_of(vocabulary, WEIGHT).requires_grad_()
    features = FEATURES.clone().requires_grad_()
    logits = LinearHead(lambda: weight, vocabulary, scale=1.3).logits(features)
    found["logits"] = answer((token_logps(logits, HEAD_IDS, vocabulary=vocabulary),), weight, features)
    return found


def plain_answers_of_heads() -> dict[str, Answer]:
    found: dict[str, Answer] = {}

    def ask(
        name: str, further: Callable[[torch.Tensor], Values] = lambda x: (), entropy_gradient: bool = False
    ) -> None:
        features, weight = FEATURES.double().requires_grad_(), WEIGHT.double().requires_grad_()
        logits = 1.3 * features @ weight.T
        entropy = plain_entropy(logits if entropy_gradient else logits.detach())
        scores = (plain_logps(logits, HEAD_IDS), entropy, is_top1(logits.detach(), HEAD_IDS))
        found[name] = answer((*scores, *further(logits)), weight, features)

    def divergence(beta: float, logits: torch.Tensor) -> Values:
        wanted = (FEATURES.flip(0).double() @ TEACHER_WEIGHT.double().T)[:, :COMMON]
        student = logits[:, :COMMON]
        agrees = is_top1(student.detach(), wanted.argmax(-1))
        return plain_jsd(student, wanted, beta), agrees, plain_entropy(student.detach())

    def top_divergence(beta: float, tail: bool, logits: torch.Tensor) -> Values:
        student, logps = logits[:, :COMMON], TOP_LOGPS.masked_fill(TOP_IDS >= COMMON, -torch.inf)
        value = plain_topk_jsd(student, TOP_IDS.clamp(max=COMMON - 1), logps, beta, tail)
        return value, is_top1(student.detach(), TOP_IDS[:, 0]), plain_entropy(student.detach())

    def pairs(logits: torch.Tensor) -> Values:
        logits = logits.detach()
        return logits.mean(-1), is_top1(logits, HEAD_IDS), (logits.softmax(-1) ** 2).sum(-1).log()

    ask("plain")
    ask("kept")
    ask("entropy", entropy_gradient=True)
    for beta in BETAS:
        ask(f"whole {beta}", partial(divergence, beta))
        for tail in (False, True):
            ask(f"top {beta} {tail}", partial(top_divergence, beta, tail), entropy_gradient=True)
    ask("pairs", pairs)
    with torch.no_grad():
        ask("likeliest", lambda logits: tuple((logits / TEMPERATURE).log_softmax(-1).topk(K)))
    features, weight = FEATURES.double().requires_grad_(), WEIGHT.double().requires_grad_()
    logits = 1.3 * features @ weight.T
    found["logits"] = answer((plain_logps(logits, HEAD_IDS, 1.0),), weight, features)
    return found


# Small whole numbers, many of them equal; the likeliest is the first column of a rank in some rows.
ROUND = (2 * numbers(6, NUM_TOKENS, SIZE)).round()
ROUND[0, 49] = ROUND[1, 25] = ROUND[2, 40] = ROUND[3, 0] = 9.0


def ties(rank: int, shard: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest values, their ids, the likeliest, and whether each id is (tokens, ids)."""
    head.CHUNK_BYTES = 400 * 4 * shard
    vocabulary = ShardedVocabulary(SIZE, shard, group())
    values, ids = vocabulary.topk(vocabulary.own(ROUND), 40)
    weight = rows_of(vocabulary, ROUND.T)
    features, each_id = torch.eye(NUM_TOKENS).repeat_interleave(SIZE, 0), torch.arange(SIZE).repeat(NUM_TOKENS)
    scores = LinearHead(lambda: weight, vocabulary).scores(features, each_id, 1.0)
    return values, ids, vocabulary.argmax(vocabulary.own(ROUND)), scores.is_top1_N.view(NUM_TOKENS, SIZE)


def nothing(rank: int, shard: int) -> list[torch.Tensor]:
    vocabulary = ShardedVocabulary(SIZE, shard, group())
    features, weight = FEATURES[:0].clone().requires_grad_(), rows_of(vocabulary, WEIGHT).requires_grad_()
    part = LinearHead(lambda: weight, vocabulary)
    function = TopDivergence(beta=0.5, temperature=1.0, add_tail=True, vocab_size=COMMON)
    inputs = (TOP_IDS[:0], TOP_LOGPS[:0])
    plain = part.scores(features, HEAD_IDS[:0], 1.0)
    top = part.scores(features, HEAD_IDS[:0], 1.0, token_function=function, token_inputs=inputs)
    loss = plain.logps_N.sum() + top.logps_N.sum() + top.further[0].sum()
    return [loss.detach(), *torch.autograd.grad(loss, [features, weight])]


def padded(rank: int, shard: int) -> list[str]:
    vocabulary = ShardedVocabulary(SIZE, shard, group())
    weight = torch.nn.functional.pad(rows_of(vocabulary, WEIGHT), (0, 0, 0, 1))
    said = []
    for settings in ({}, {"token_function": TopLogps(K, 1.0)}):
        with pytest.raises(AssertionError) as error:
            LinearHead(lambda: weight, vocabulary).scores(FEATURES, HEAD_IDS, 1.0, **settings)  # type: ignore[arg-type]
        said.append(str(error.value))
    with pytest.raises(AssertionError) as error:
        ShardedVocabulary(shard * dist.get_world_size() + 1, shard, group())
    return [*said, str(error.value)]


QUESTIONS = (answers_of_functions, answers_of_heads, ties, nothing, padded)


def all_answers(rank: int, shard: int) -> list[Any]:
    return [question(rank, shard) for question in QUESTIONS]


@pytest.fixture(scope="module", params=SHARDS, ids="{0[0]} ranks of {0[1]}".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """Each rank's answers to each of the questions."""
    num_ranks, shard = request.param
    found = run_ranks(num_ranks, all_answers, shard, folder=tmp_path_factory.mktemp("ranks"))
    return dict(zip(QUESTIONS, zip(*found, strict=True), strict=True))  # type: ignore[arg-type]


def test_functions_of_columns_in_shards_are_those_of_all_columns(ranks: dict[Any, list[Any]]) -> None:
    expected = {}
    for name, function in plain_functions().items():
        logits = LOGITS.double().requires_grad_()
        expected[name] = answer(function(logits), logits)
    assert ranks[answers_of_functions][0].keys() == expected.keys()
    assert_equal(ranks[answers_of_functions], expected, sharded=1, limit_of_values=1e-6)


def test_a_head_in_shards_has_the_scores_and_gradients_of_the_whole(ranks: dict[Any, list[Any]]) -> None:
    expected = plain_answers_of_heads()
    assert (TOP_IDS >= COMMON).any(), "the teacher must like a token that the student lacks"
    assert 0.2 < expected["plain"][0][2].mean() < 0.8, "some targets must be the likeliest"
    assert ranks[answers_of_heads][0].keys() == expected.keys()
    assert_equal(ranks[answers_of_heads], expected, sharded=0, limit_of_values=3e-6)


def test_of_equal_logits_the_lowest_id_comes_first(ranks: dict[Any, list[Any]]) -> None:
    values, ids = ROUND.sort(dim=-1, descending=True, stable=True)
    assert (values[:, 0] == values[:, 1]).any(), "there must be several likeliest"
    for top_values, top_ids, likeliest, is_top1_NV in ranks[ties]:
        assert torch.equal(top_values, values[:, :40])
        assert torch.equal(top_ids, ids[:, :40])
        assert torch.equal(likeliest, ids[:, 0])
        assert torch.equal(is_top1_NV, (ids[:, :1] == torch.arange(SIZE)).float())


def test_no_tokens_give_no_loss_and_no_gradient(ranks: dict[Any, list[Any]]) -> None:
    for loss, features, weight in ranks[nothing]:
        assert loss == 0
        assert features.shape == (0, HIDDEN)
        assert not weight.any()
    assert sum(len(weight) for _, _, weight in ranks[nothing]) == SIZE


def test_columns_that_pad_a_shard_are_refused(ranks: dict[Any, list[Any]]) -> None:
    for plain, function, no_room in ranks[padded]:
        assert plain == function
        assert "columns are given" in plain
        assert "columns do not fit into" in no_room
