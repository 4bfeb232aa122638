"""The keys of sequence classification, and which values of them have a meaning. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rayhelper import ConfigError
from trainers.configuration.roles import TRAIN
from trainers.configuration.shared import TrainConfig, unread
from trainers.configuration.values import at_least
from trainers.data.rows import TruncationMode

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TrainConfig):
    """The keys of sequence classification beside the shared ones."""

    NAMES: ClassVar = ("classification", "seq_cls")
    TASK: ClassVar = ("sft", "seq_cls")  # the command, and its task_type, that mean this trainer too
    ROLES: ClassVar = {"train": TRAIN}
    SCORES: ClassVar = True

    task_type: Literal["seq_cls"] = "seq_cls"
    """The value with which ``rayhelper sft`` runs this trainer."""
    output_dir: str = "outputs/classification"
    num_labels: int
    """The number of values that the head gives for each row: classes, labels or regression values."""
    problem_type: ProblemType | None = None
    """single_label_classification (cross entropy), multi_label_classification (binary cross entropy) or regression
    (mean squared error). null: regression for one label, else single_label_classification."""
    use_chat_template: bool = True
    """Write conversations with the chat template. false: read the text of the only user turn unchanged."""
    max_length: int | None = 1024
    """Tokens of a row; truncation_mode sets how longer rows are cut."""
    truncation_mode: TruncationMode = "keep_start"
    """For a row that is too long: keep_start, keep_end, or drop."""
    packing: bool = False
    """Batch sizes count packs instead of rows. A pack has several rows of at most max_length tokens together. It passes
    through the model without padding, as with padding_free."""
    dataset_num_proc: int | None = None
    """Processes that tokenize."""
    per_device_eval_batch_size: int = 8
    """Rows that a worker passes through the model at once in evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unread(self, "transformers' sequence classifiers give no logits of their routers", "router_aux_loss_coef")
        at_least(self, 1, "num_labels", "max_length", "dataset_num_proc", "per_device_eval_batch_size")
        if self.problem == "single_label_classification" and self.num_labels < 2:
            raise ConfigError("single_label_classification chooses among labels: num_labels must be 2 at least")
        if self.system and not self.use_chat_template:
            raise ConfigError("use_chat_template: false leaves the system message out. Remove system")

    @property
    def problem(self) -> ProblemType:
        """``problem_type``, or what it is by default."""
        return self.problem_type or ("regression" if self.num_labels == 1 else "single_label_classification")
