"""SFT's and pretraining's keys, and which values of them have a meaning. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayhelper import ConfigError
from trainers.configuration.fixed_rows import AnswersConfig
from trainers.configuration.roles import TRAIN
from trainers.configuration.shared import unread
from trainers.configuration.values import at_least
from trainers.data.loss_scale import parsed
from trainers.data.rows import PackingStrategy, TruncationMode
from trainers.losses.types import SFTLossType


@dataclass(frozen=True, kw_only=True)
class SFTConfig(AnswersConfig):
    """SFT's keys beside the shared ones."""

    ROLES: ClassVar = {"train": TRAIN}
    JOINS_ROWS: ClassVar = True

    output_dir: str = "outputs/sft"
    disable_dropout: bool = False
    streaming: bool = False
    """Read, tokenize and pack rows while the run continues, 1,000 at a time; needs ``max_steps``."""
    shuffle_buffer_size: int = 1000
    """With ``streaming`` and ``shuffle_dataset``: the next row is drawn from this number of rows."""
    dataset_text_field: str = "text"
    """The column that holds plain text."""
    dataset_num_proc: int | None = None
    """Processes that tokenize."""
    eos_token: str | None = None
    """The token that ends plain texts and completions. null: the tokenizer's token."""
    max_length: int | None = 1024
    """Largest number of tokens per sequence (with packing: per row). Longer sequences are cut."""
    truncation_mode: TruncationMode = "keep_start"
    """For a sequence that is too long: keep_start, keep_end, or drop."""
    packing: bool = False
    """Put several documents into each row of ``max_length`` tokens."""
    packing_strategy: PackingStrategy = "bfd"
    """bfd: whole documents. bfd_split: long documents are split. wrapped: one stream is cut into rows."""
    completion_only_loss: bool | None = None
    """Learn only completions. null: true if rows have prompt and completion."""
    assistant_only_loss: bool = False
    """Learn only assistant turns. The chat template must mark them with {% generation %}."""
    loss_scale: str | None = None
    """Which tokens of conversations are learned, in ms-swift's names. default: the assistant's answers, with the token
    that ends each answer. last_round: only the answers after the last user turn. all: all tokens. After a +, you may
    add ignore_empty_think, ignore_think_prefix or one rule. A rule weighs parts of answers, such as tool calls by 2.
    The rules are hermes, react, qwen, agentflan and alpha_umi. The loss is sum(weight x nll) / number of learned
    tokens. A message may have ``loss: true``, ``loss: false``, or its own weight as ``loss_scale``. null:
    completion_only_loss and assistant_only_loss decide."""
    loss_type: SFTLossType = "nll"
    """nll: negative log-likelihood. dft: nll, weighted by the token's probability (arXiv 2508.05629)."""
    neftune_noise_alpha: float | None = None
    """Add uniform noise to the embeddings in training (NEFTune, arXiv 2310.05914). The noise is at most
    neftune_noise_alpha / sqrt(length of a row x hidden size). null or 0: no noise. It needs backend: fsdp."""
    per_device_eval_batch_size: int = 8
    """Sequences that a worker passes through the model at once in evaluation."""
    max_eval_sequences: int | None = None
    """Largest number of sequences in an evaluation (with packing: of packs). The first ones are used. null: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 2, "max_length")
        at_least(self, 0, "neftune_noise_alpha")
        if self.neftune_noise_alpha and self.backend == "megatron":
            raise ConfigError(
                f"neftune_noise_alpha is {self.neftune_noise_alpha}, but backend megatron adds no noise to embeddings. "
                "Remove it, or write backend: fsdp."
            )
        joins = self.padding_free or (self.per_device_train_batch_size == 1 and self.token_budget is None)
        if self.neftune_noise_alpha and self.packing and self.packing_strategy != "wrapped" and not joins:
            raise ConfigError(
                "neftune_noise_alpha: the noise depends on the length of an input, and other systems join packed "
                "rows into one input. Set padding_free: true, or per_device_train_batch_size: 1"
            )
        at_least(self, 1, "dataset_num_proc", "per_device_eval_batch_size", "max_eval_sequences")
        if self.max_eval_sequences is not None and not self.evaluates:
            raise ConfigError("max_eval_sequences is set, but nothing is evaluated. Give eval_dataset, or remove it.")
        try:
            scale = parsed(self.loss_scale)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if scale is not None and scale.base != "all" and self.completion_only_loss is False:
            raise ConfigError(f"loss_scale {self.loss_scale} learns only answers; remove completion_only_loss: false")
        if self.assistant_only_loss:
            unread(self, "assistant_only_loss learns what the chat template marks", "preserve_thinking")
        if scale is not None and scale.base == "all" and self.completion_only_loss:
            raise ConfigError("with loss_scale all, the loss covers every token; remove completion_only_loss")
        at_least(self, 1, "shuffle_buffer_size")
        if self.streaming and self.max_steps <= 0:
            raise ConfigError("streaming reads rows during the run, so their number is not known: set max_steps.")
        if self.streaming and self.split_dataset_ratio:
            raise ConfigError(
                "split_dataset_ratio holds rows out, and a stream has no last row that is known: give eval_dataset."
            )
        if self.streaming and self.dataloader_drop_last:
            raise ConfigError("dataloader_drop_last is not supported with streaming. Remove it.")
        if self.streaming:
            unread(self, "streaming reads rows while the run continues", "group_by_length")
        if not (self.streaming and self.shuffle_dataset):
            unread(self, "rows are not drawn from a stream's buffer", "shuffle_buffer_size")
        if scale is not None and self.assistant_only_loss:
            raise ConfigError("assistant_only_loss and loss_scale both set which turns are learned; remove one of them")
        if self.packing and self.truncation_mode == "keep_end":
            raise ConfigError(f"packing keeps the start of long documents; truncation_mode is {self.truncation_mode!r}")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(SFTConfig):
    """SFT on plain text, cut from one stream of tokens."""

    NAMES: ClassVar = ("pretrain", "pt")

    output_dir: str = "outputs/pretrain"
    use_chat_template: bool = True
    """false: the text of a conversation is learned unchanged, without the chat template. A conversation then has one
    turn of the assistant, or one of the user and one of the assistant."""
    packing: bool = True
    packing_strategy: PackingStrategy = "wrapped"
