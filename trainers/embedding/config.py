"""The keys of embedding models, and which values of them have a meaning. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rayhelper import ConfigError
from trainers.configuration.roles import TRAIN
from trainers.configuration.shared import TrainConfig, unread
from trainers.configuration.values import at_least

LossType = Literal["infonce", "cosine_similarity", "contrastive", "online_contrastive"]
Pooling = Literal["last", "mean", "cls"]
OF_BATCH = ("infonce_mask_fake_negative", "infonce_include_qq", "infonce_include_dd")
OF_INFONCE = (
    "infonce_temperature",
    "infonce_use_batch",
    "infonce_hard_negatives",
    "infonce_fake_neg_margin",
    *OF_BATCH,
)


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(TrainConfig):
    """The keys of embedding models beside the shared ones."""

    NAMES: ClassVar = ("embedding",)
    TASK: ClassVar = ("sft", "embedding")  # the command, and its task_type, that mean this trainer too
    ROLES: ClassVar = {"train": TRAIN}
    SCORES: ClassVar = True
    ENCODES: ClassVar = True

    task_type: Literal["embedding"] = "embedding"
    """The value with which ``rayhelper sft`` runs this trainer."""
    output_dir: str = "outputs/embedding"
    disable_dropout: bool = False
    loss_type: LossType = "infonce"
    """infonce: find the positive of a row among all texts of the pool. cosine_similarity: the label is the cosine of
    the two texts. contrastive, online_contrastive: label 1 brings the two texts closer, and label 0 separates them."""
    infonce_temperature: float = 0.1
    """The similarities are divided by it."""
    infonce_use_batch: bool = True
    """The texts of other rows are also negatives. A pool is per_device_train_batch_size rows of each worker. false:
    only the row's own negatives."""
    infonce_hard_negatives: int | None = None
    """Number of negatives per row. If a row has more, the first ones are used. If it has fewer, some are used twice.
    null: all of them."""
    infonce_mask_fake_negative: bool = False
    """Leave out negatives that are more similar than the positive by infonce_fake_neg_margin."""
    infonce_fake_neg_margin: float = 0.1
    """By how much a negative may be more similar than the positive."""
    infonce_include_qq: bool = False
    """The anchors of other rows are also negatives."""
    infonce_include_dd: bool = False
    """Texts that are similar to the positive also count as negatives (Qwen3-Embedding)."""
    margin: float = 0.5
    """Contrastive losses push two texts with label 0 to this cosine distance."""
    mrl_dims: dict[Any, float] | None = None
    """Matryoshka representations (arXiv 2205.13147). Each entry is a number of leading dimensions and the weight of
    their loss: {64: 0.5, 768: 1.0}. null: only the loss of the whole embeddings."""
    pooling: Pooling | None = None
    """The hidden states that become the embedding: the last token's, the mean, or the first token's. null: the choice
    in the model's sentence-transformers files. Without these files: last, or mean for encoders."""
    use_chat_template: bool | None = None
    """Write texts with the chat template. false: the text itself, after the system message. null: false for encoders,
    for models with files of sentence-transformers, and without a template; else true."""
    end_token: str | None = None
    """A token to add after each text of the chat template. The embedding is the hidden state at this token. null:
    none."""
    max_length: int | None = 1024
    """Tokens of each text; truncation_mode sets how longer texts are cut."""
    truncation_mode: Literal["drop", "keep_start"] = "drop"
    """drop: leave out rows with a longer text. keep_start: keep the start of the text, and the special tokens at its
    end."""
    dataset_num_proc: int | None = None
    """Processes that tokenize."""
    per_device_eval_batch_size: int = 8
    """Rows that a worker passes through the model at once in evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unread(self, "an embedding has no logits of routers", "router_aux_loss_coef")
        at_least(self, 1, "max_length", "dataset_num_proc", "per_device_eval_batch_size", "infonce_hard_negatives")
        at_least(self, 0, "margin", "infonce_fake_neg_margin")
        if self.infonce_temperature <= 0:
            raise ConfigError(f"infonce_temperature must be above 0, got {self.infonce_temperature}")
        if self.backend == "megatron" and self.has_adapter:
            raise ConfigError(
                "backend: megatron trains all weights of embedding models, and no adapter. Write tuner_type: full, or "
                "backend: fsdp"
            )
        if self.loss_type != "infonce":
            unread(self, f"loss_type is {self.loss_type}", *OF_INFONCE)
        if not self.loss_type.endswith("contrastive"):
            unread(self, f"loss_type is {self.loss_type}", "margin")
        if not self.infonce_use_batch:
            unread(self, "infonce_use_batch is false", *OF_BATCH)
        if not self.infonce_mask_fake_negative:
            unread(self, "infonce_mask_fake_negative is false", "infonce_fake_neg_margin")
        if self.use_chat_template is False:
            unread(self, "use_chat_template is false", "end_token")
        for size, weight in (self.mrl_dims or {}).items():
            if not str(size).isdecimal() or int(size) < 1 or not weight > 0:
                raise ConfigError(f"mrl_dims holds {size}: {weight}. Write sizes of embeddings, and weights above 0")
        if self.is_pooled and self.token_budget == "auto" and not self.disable_dropout:
            raise ConfigError(
                "token_budget: auto changes micro-batches during the first step. Dropout would then differ "
                "between the two passes of a step. Write disable_dropout: true, or per_device_train_batch_size"
            )

    @property
    def weights_of_sizes(self) -> dict[int | None, float]:
        """The weight of the loss of the first so many numbers of the embeddings; None: of all of them."""
        return {None: 1.0} if self.mrl_dims is None else {int(size): weight for size, weight in self.mrl_dims.items()}

    @property
    def is_pooled(self) -> bool:
        """Whether the loss of a row depends on other rows."""
        return self.loss_type == "online_contrastive" or (self.loss_type == "infonce" and self.infonce_use_batch)
