"""Embedding models and rerankers beside ms-swift's losses and metrics, and whole runs beside plain loops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.golden.training import OUR_ARGUMENTS, Steps, assert_same_training, logged_steps, recorded
from trainers.batch import Ragged
from trainers.data.texts.groups import Groups
from trainers.embedding.config import EmbeddingConfig
from trainers.embedding.correlations import correlations
from trainers.embedding.loss import PoolOf, embedding_loss, similarity_metrics
from trainers.embedding.trainer import EmbeddingTrainer
from trainers.metrics import Metrics
from trainers.reranking.config import RerankingConfig
from trainers.reranking.loss import Counts, reranking_loss
from trainers.reranking.trainer import RerankingTrainer

RECORDED = json.loads((Path(__file__).parent / "ms_swift" / "embeddings.json").read_text(encoding="utf-8"))
SETTINGS: dict[str, Any] = {"learning_rate": 3e-4, "per_device_train_batch_size": 4, "max_steps": 2}
SETTINGS |= {"adam_epsilon": 1e-6, "max_grad_norm": 1.0}
WORDS = ["good", "bad weather", "so-so", "the best of all", "never", "fine", "awful", "as expected"]
Keys = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def groups_of(counts: list[int], labels: list[float] | None = None) -> Groups:
    """Rows of so many texts of one token."""
    numbers = None if labels is None else np.array(labels, np.float32)
    texts = [np.arange(count) for count in counts]
    return Groups(
        Ragged.of(texts, np.int64), Ragged.of([np.ones_like(text) for text in texts], np.int64), labels=numbers
    )


def keys_of(variables: dict[str, str]) -> Keys:
    return {name.lower(): json.loads(value) for name, value in variables.items()}


def gradient(loss: torch.Tensor, inputs: torch.Tensor) -> list[Any]:
    (found,) = torch.autograd.grad(loss, inputs)
    return found.tolist()


@pytest.mark.parametrize("case", RECORDED["infonce"], ids=lambda case: f"{case['counts']} {keys_of(case['variables'])}")
def test_infonce_is_ms_swifts(case: Keys) -> None:
    keys = keys_of(case["variables"])
    texts, counts = torch.tensor(case["texts"], requires_grad=True), case["counts"]
    kept = keys.pop("infonce_hard_negatives", None)
    config = EmbeddingConfig(model="m", dataset="d", **keys)
    rows, used = groups_of(counts), texts
    if kept is not None:  # as the rows come from ``with_hard_negatives``
        starts = np.cumsum(counts) - counts
        used = texts[np.concatenate([np.arange(start, start + 2 + kept) for start in starts])]
        rows = groups_of([2 + kept] * len(counts))
    metrics = Metrics()
    step = PoolOf(len(rows), len(rows), normalize=False)
    loss = embedding_loss(config, step, used, rows, metrics)
    assert float(loss.detach()) == pytest.approx(case["loss"], abs=1e-5)
    np.testing.assert_allclose(gradient(loss, texts), case["gradient"], atol=1e-5)
    found = metrics.values()
    if min(counts) > 2 or config.infonce_use_batch:
        assert {name: found[name] for name in case["metrics"]} == pytest.approx(case["metrics"], abs=1e-5)


@pytest.mark.parametrize("case", RECORDED["pairs"], ids=lambda case: f"{case['loss_type']} {case['labels']}")
def test_losses_and_correlations_of_pairs_are_ms_swifts(case: Keys) -> None:
    texts = torch.tensor(case["texts"], requires_grad=True)
    rows = groups_of([2] * 6, case["labels"])
    config = EmbeddingConfig(model="m", dataset="d", loss_type=case["loss_type"])
    loss = embedding_loss(config, PoolOf(6, 6, normalize=False), texts, rows, Metrics())
    assert float(loss.detach()) == pytest.approx(case["loss"], abs=1e-6)
    np.testing.assert_allclose(gradient(loss, texts), case["gradient"], atol=1e-6)
    pairs = texts.detach().numpy()
    assert correlations(pairs[::2], pairs[1::2], np.array(case["labels"])) == pytest.approx(case["metrics"], abs=1e-5)


@pytest.mark.parametrize("case", RECORDED["rerankers"], ids=lambda case: case["loss_type"])
def test_losses_and_places_of_rerankers_are_ms_swifts(case: Keys) -> None:
    scores, counts = torch.tensor(case["scores"], requires_grad=True), case["counts"]
    keys = {"listwise_reranker_temperature": 0.7} if case["loss_type"].startswith("listwise") else {}
    config = RerankingConfig(model="m", dataset="d", loss_type=case["loss_type"], **keys)
    metrics = Metrics()
    of_step = Counts(sum(counts), sum(count >= 2 for count in counts), len(counts), num_shards=1)
    loss = reranking_loss(config, of_step, scores, groups_of(counts), metrics)
    assert float(loss.detach()) == pytest.approx(case["loss"], abs=1e-6)
    np.testing.assert_allclose(gradient(loss, scores), case["gradient"], atol=1e-6)
    found = metrics.values()
    assert {name: found[name] for name in ("mrr", "ndcg")} == pytest.approx(case["metrics"], abs=1e-6)


def test_matryoshka_adds_up_the_losses_of_the_beginnings() -> None:
    texts, rows = torch.tensor(RECORDED["infonce"][1]["texts"]), groups_of([4, 4, 4])

    def loss(texts: torch.Tensor, **keys: Any) -> float:
        config = EmbeddingConfig(model="m", dataset="d", **keys)
        return float(embedding_loss(config, PoolOf(3, 3, normalize=True), texts, rows, Metrics()))

    assert loss(texts, mrl_dims={2: 0.5, 6: 2.0, 99: 1.0}) == pytest.approx(0.5 * loss(texts[:, :2]) + 2 * loss(texts))


def test_similarities_of_single_rows_have_no_negatives_to_be_ahead_of() -> None:
    config, metrics = EmbeddingConfig(model="m", dataset="d"), Metrics()
    similarity_metrics(config, normalize(torch.ones(2, 3), dim=-1), torch.tensor([2]), metrics)
    assert metrics.values() == {"mean_pos": pytest.approx(1.0)}


# Whole runs


def said(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def embedding_rows() -> list[Keys]:
    """Eight rows in ms-swift's form with one or two negatives."""
    rows = []
    for k, word in enumerate(WORDS):
        negatives = [said(f"{WORDS[k - 3]}!"), said(WORDS[k - 2])][: 1 + k % 2]
        row = {"messages": said(word), "positive_messages": [said(f"{word}, {word}")], "negative_messages": negatives}
        rows.append(row)
    return rows


def plain_loop(network: Any, loss_of: Callable[[Any, list[int]], torch.Tensor]) -> tuple[Steps, Any]:
    """Two steps of four rows each with AdamW and a linear schedule."""
    wide, narrow = [[p for p in network.parameters() if (p.dim() > 1) == is_wide] for is_wide in (True, False)]
    groups = [{"params": wide}, {"params": narrow}]  # in the order of ours
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS["learning_rate"], eps=SETTINGS["adam_epsilon"], weight_decay=0.0)
    steps = []
    for step in range(2):
        rate = SETTINGS["learning_rate"] * (1 - step / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(network, list(range(4 * step, 4 * step + 4)))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        steps.append({"loss": float(loss.detach()), "grad_norm": float(norm), "learning_rate": rate})
        optimizer.step()
        optimizer.zero_grad()
    return steps, network


def templated(*messages: dict[str, str], invites: bool) -> torch.Tensor:
    options: Keys = {"return_dict": False, "add_generation_prompt": invites, "return_tensors": "pt"}
    return tiny_tokenizer().apply_chat_template(list(messages), **options)


def vectors_of(network: Any, rows: list[Keys]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Anchors, positives, and the negatives of each row: the last token's hidden states, of length 1."""

    def vector(messages: list[Keys]) -> torch.Tensor:
        hidden = network(input_ids=templated(*messages, invites=True)).last_hidden_state
        return normalize(hidden[0, -1], dim=-1)

    anchors = torch.stack([vector(row["messages"]) for row in rows])
    positives = torch.stack([vector(row["positive_messages"][0]) for row in rows])
    return anchors, positives, [torch.stack([vector(one) for one in row["negative_messages"]]) for row in rows]


def test_steps_of_an_embedding_model_equal_a_plain_loop_over_whole_batches(model: str, tmp_path: Path) -> None:
    """InfoNCE as its paper has it; all texts of a batch in one graph. What is exported loads, with its files."""
    rows = embedding_rows()

    def loss_of(network: Any, chosen: list[int]) -> torch.Tensor:
        anchors, positives, negatives = vectors_of(network, [rows[k] for k in chosen])
        similar = anchors @ torch.cat([positives, *negatives]).T / 0.1
        return cross_entropy(similar, torch.arange(len(chosen)))

    def ours() -> tuple[Steps, torch.nn.Module]:
        keys: Keys = OUR_ARGUMENTS | SETTINGS | {"eval_dataset": rows, "eval_steps": 2}
        config = EmbeddingConfig(model=model, dataset=rows, output_dir=str(tmp_path / "run"), **keys)
        trainer = EmbeddingTrainer(config)
        last = trainer.train()
        assert {"eval_loss", "eval_margin", "eval_mean_pos", "eval_mean_neg", "eval_accuracy"} <= set(last)
        return logged_steps(tmp_path / "run")[:2], trainer.policy.built.module

    their_run = recorded(lambda: plain_loop(AutoModel.from_pretrained(model).float().train(), loss_of))
    assert_same_training(recorded(ours), their_run)
    final = tmp_path / "run" / "final"
    for name, weight in AutoModel.from_pretrained(final).named_parameters():
        torch.testing.assert_close(weight, their_run.weights[name], rtol=0, atol=1e-5)
    kinds = [module["type"].rpartition(".")[2] for module in json.loads((final / "modules.json").read_text())]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    pooling = json.loads((final / "1_Pooling" / "config.json").read_text())
    assert [name for name in pooling if pooling[name] is True] == ["pooling_mode_lasttoken"]


COMPARED = ("loss", "grad_norm", "margin", "mean_neg", "eval_loss", "eval_margin", "num_tokens")


def test_a_pool_is_the_same_however_it_is_cut(model: str, tmp_path: Path) -> None:
    found = []
    for number, cut in enumerate(({}, {"padding_free": True}, {"token_budget": 60, "disable_dropout": True})):
        keys: Keys = OUR_ARGUMENTS | SETTINGS | {"eval_dataset": embedding_rows(), "eval_steps": 2} | cut
        config = EmbeddingConfig(model=model, dataset=embedding_rows(), output_dir=str(tmp_path / str(number)), **keys)
        last = EmbeddingTrainer(config).train()
        found.append({name: last[name] for name in COMPARED})
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def reranking_rows() -> list[Keys]:
    """Eight queries with a right document and one or two wrong ones, which are all drawn, in some order."""
    return [
        {"query": word, "positive": f"{word}, {word}", "negative": [WORDS[k - 3], WORDS[k - 2]][: 1 + k % 2]}
        for k, word in enumerate(WORDS)
    ]


def documents_of(rows: list[Keys]) -> list[tuple[str, str, float]]:
    return [
        (row["query"], text, float(number == 0))
        for row in rows
        for number, text in enumerate([row["positive"], *row["negative"]])
    ]


@pytest.mark.parametrize("task", ["reranker", "generative_reranker"])
def test_steps_of_a_reranker_equal_a_plain_loop(model: str, tmp_path: Path, task: str) -> None:
    rows, tokenizer = reranking_rows(), tiny_tokenizer()
    yes, no = tokenizer.convert_tokens_to_ids(["y", "n"])
    words = {"generative_reranker_positive_token": "y", "generative_reranker_negative_token": "n"}
    if task == "reranker":
        torch.manual_seed(0)
        network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        network.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
    judge = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    asked = "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {}\n"

    def score(network: Any, query: str, document: str) -> torch.Tensor:
        if task == "reranker":
            pair = (*said(query), *said(document, "assistant"))
            hidden = network.base_model(input_ids=templated(*pair, invites=False)).last_hidden_state
            return network.score(hidden[0, -1])[0]
        question = {"role": "user", "content": f"{asked.format(query)}<Document>: {document}"}
        logits = network(input_ids=templated({"role": "system", "content": judge}, question, invites=True)).logits
        return logits[0, -1, yes] - logits[0, -1, no]

    def loss_of(network: Any, chosen: list[int]) -> torch.Tensor:
        pairs = documents_of([rows[k] for k in chosen])
        scores = torch.stack([score(network, query, text) for query, text, _ in pairs])
        return binary_cross_entropy_with_logits(scores, torch.tensor([label for *_, label in pairs]))

    def ours() -> tuple[Steps, torch.nn.Module]:
        keys: Keys = OUR_ARGUMENTS | SETTINGS | {"eval_dataset": rows, "eval_steps": 2, "task_type": task}
        keys |= words if task == "generative_reranker" else {}
        config = RerankingConfig(model=model, dataset=rows, output_dir=str(tmp_path / "run"), **keys)
        trainer = RerankingTrainer(config)
        assert {"eval_loss", "eval_mrr", "eval_ndcg", "eval_accuracy"} <= set(trainer.train())
        return logged_steps(tmp_path / "run")[:2], trainer.policy.built.module

    kind: Any = AutoModelForSequenceClassification if task == "reranker" else AutoModelForCausalLM
    their_run = recorded(lambda: plain_loop(kind.from_pretrained(model).float().train(), loss_of))
    assert_same_training(recorded(ours), their_run)
    exported = dict(kind.from_pretrained(tmp_path / "run" / "final").named_parameters())
    for name, weight in their_run.weights.items():
        torch.testing.assert_close(exported[name], weight, rtol=0, atol=1e-5)
