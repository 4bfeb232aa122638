"""The keys of rerankers, and which values of them have a meaning. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rayhelper import ConfigError
from trainers.configuration.roles import TRAIN
from trainers.configuration.shared import TrainConfig, unread
from trainers.configuration.values import at_least

OF_LISTS = ("listwise_reranker_temperature", "listwise_reranker_min_group_size")
OF_WORDS = ("generative_reranker_positive_token", "generative_reranker_negative_token", "instruction")


@dataclass(frozen=True, kw_only=True)
class RerankingConfig(TrainConfig):
    """The keys of rerankers beside the shared ones. Batch sizes count queries with their documents."""

    NAMES: ClassVar = ("reranking", "reranker")
    TASK: ClassVar = ("sft", "reranker", "generative_reranker")
    ROLES: ClassVar = {"train": TRAIN}
    SCORES: ClassVar = True
    ENCODES: ClassVar = True

    task_type: Literal["reranker", "generative_reranker"] = "reranker"
    """reranker: a linear layer gives a query with a document its score. generative_reranker: a language model answers
    whether they match. The score is logit(yes) - logit(no), as in Qwen3-Reranker."""
    output_dir: str = "outputs/reranking"
    disable_dropout: bool = False
    loss_type: Literal["pointwise_reranker", "listwise_reranker"] = "pointwise_reranker"
    """pointwise_reranker: each document matches its query, or does not (binary cross entropy). listwise_reranker: find
    the relevant document among the documents of a query (cross entropy)."""
    listwise_reranker_temperature: float = 1.0
    """The scores are divided by it."""
    listwise_reranker_min_group_size: int = 2
    """Queries with fewer documents are not trained on."""
    max_positive_samples: int = 1
    """Relevant documents per row and step, each with its own negatives. If a row has more, some are drawn."""
    max_negative_samples: int = 7
    """Irrelevant documents per relevant document. If a row has more, some are drawn."""
    generative_reranker_positive_token: str = "yes"
    """The token for a document that matches the query."""
    generative_reranker_negative_token: str = "no"
    """The token for a document that does not match the query."""
    instruction: str | None = None
    """The task of a generative_reranker, for rows without a system message. null: the instruction of Qwen3-Reranker."""
    use_chat_template: bool | None = None
    """For reranker: the query is a turn of the user, the document a turn of the assistant. false: the tokenizer joins
    the pair of texts. null: false for encoders and without a template, else true."""
    max_length: int | None = 1024
    """Largest number of tokens of a query with a document. Rows with more are dropped."""
    packing: bool = False
    """Batch sizes count packs instead of queries: a pack has queries of at most max_length tokens. They pass through
    the model without padding, as with padding_free."""
    dataset_num_proc: int | None = None
    """Processes that tokenize."""
    per_device_eval_batch_size: int = 8
    """Queries that a worker passes through the model at once in evaluation, with their documents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unread(self, "a score has no logits of routers", "router_aux_loss_coef")
        at_least(self, 1, "max_length", "dataset_num_proc", "per_device_eval_batch_size")
        at_least(self, 1, "max_positive_samples", "max_negative_samples", "listwise_reranker_min_group_size")
        if self.listwise_reranker_temperature <= 0:
            raise ConfigError(
                f"listwise_reranker_temperature must be above 0, got {self.listwise_reranker_temperature}"
            )
        if self.system:
            raise ConfigError(
                "system is not part of a query with a document. Write instruction (of a generative_reranker), or put a "
                "system message into the rows"
            )
        if self.loss_type != "listwise_reranker":
            unread(self, f"loss_type is {self.loss_type}", *OF_LISTS)
        if not self.is_generative:
            unread(self, f"task_type is {self.task_type}", *OF_WORDS)
        elif self.use_chat_template is False:
            raise ConfigError("a generative_reranker gets its question by the chat template. Remove use_chat_template")

    @property
    def is_generative(self) -> bool:
        return self.task_type == "generative_reranker"
