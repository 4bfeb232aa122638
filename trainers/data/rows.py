"""Datasets: from what a user has to what a trainer takes.

    rows = load_rows("train.jsonl", columns={"question": "prompt"})   # any source, one table, TRL's column names
    sequences = tokenize_sft(rows, tokenizer, max_length=1024)        # to learn from: Sequences
    sequences = pack(sequences, max_length=1024)                      # several documents a row
    ids = tokenize_prompts(rows.select(range(8)), tokenizer)          # to complete: token ids
    batches = Batches(len(rows), batch_size=8, seed=42)               # batches[step]: indices of rows

Formats are TRL's. Language modeling: ``text`` or ``messages``; prompt-only: ``prompt``; prompt-completion: ``prompt``
and ``completion``. Each is text or a conversation (``[{"role": ..., "content": ...}]``), which may have ``tools`` and
``chat_template_kwargs`` beside it. Further columns go to the reward functions. Everything here runs on the driver;
where rows are read from is ``sources.py``.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from rayhelper import ConfigError
from rayhelper.text import DID_YOU_MEAN, nearest
from trainers.batch import Ragged, Sequences
from trainers.data.answers import OWN_KEYS, Answer, answers_of
from trainers.data.broken_rows import warn_left_out
from trainers.data.formats import in_our_columns, with_names
from trainers.data.images.conversations import COLUMNS, OF_KINDS, encoded
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.loss_scale import LossScale
from trainers.data.sources import read_source, shown, with_fields

if TYPE_CHECKING:
    from datasets import Dataset


MEDIA = (*COLUMNS, "rejected_images", "audios", "audio")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
TruncationMode = Literal["keep_start", "keep_end", "drop"]
PromptTruncation = Literal["left", "error"]
PackingStrategy = Literal["bfd", "bfd_split", "wrapped"]


# Rows


def load_rows(
    source: Any,
    *,
    split: str = "train",
    max_rows: int | None = None,
    columns: Mapping[str, str] | None = None,
    prompt_template: str | None = None,
    system: str | None = None,
    skip_broken: bool = False,
    names: Mapping[str, Sequence[str] | None] | None = None,
    images: bool = False,
    no_videos: str | None = None,
) -> Dataset:
    """The rows of ``source`` as one ``datasets.Dataset`` in one of TRL's formats.

    ``source`` is anything that ``sources.read_source`` reads: files, a folder, a registered dataset, a hub name, rows.
    ``columns`` renames columns (or fields, ``extra_info.question``), from the source's name to ours.
    ``prompt_template`` writes ``prompt`` from the other columns, under their old or new names:
    ``"Question: {question}\\nAnswer:"``. ``system`` is put before every
    conversation that has no system message; texts become conversations by it, and ``system=""`` does only that.
    ShareGPT ``conversations`` and ms-swift's columns become ``messages``, or ``prompt``, ``chosen`` and ``rejected``
    (``formats.py``, which also says what ``names`` are). What was to be changed in a broken row is null afterwards, or
    as it was: ``broken_rows.py`` finds them. ``skip_broken``: as ``read_source``. ``images``: the model sees
    pictures, so that rows may have some (``images/conversations.py``), and videos unless ``no_videos`` says why not.

    Raises FileNotFoundError or ValueError saying what is wrong with the source and what there is instead.
    """
    rows = read_source(source, split, skip_broken=skip_broken, columns=columns)
    if len(rows) == 0:
        raise ValueError(f"dataset {shown(source)} is empty (split {split!r}): it has no rows")
    if max_rows is not None:
        rows = rows.select(range(min(max_rows, len(rows))))
    rows = encoded(_renamed(with_fields(rows, columns or {}), columns or {}))
    check_seen(rows, MEDIA[len(COLUMNS) :] if images else MEDIA)
    if no_videos is not None:
        check_seen(rows, OF_KINDS["video"], no_videos)
    rows = _sharegpt_converted(rows)
    if prompt_template is None and (not columns or {"query", "response"} & set(columns.values())):
        rows = in_our_columns(rows)  # other columns say themselves what they are
    rows = with_names(rows, names or {})
    if prompt_template is not None:
        rows = _with_prompt(rows, prompt_template, columns or {})
    if system is not None:
        rows = rows.map(_with_system, fn_kwargs={"system": system}, desc="Adding the system message")
    return rows


def check_seen(rows: Dataset, media: Sequence[str] = MEDIA, reason: str | None = None) -> None:
    """Raises ValueError for rows with images, videos or sounds, of which the model would see nothing.

    ``reason``: why it would not, and what to do.
    """
    import pyarrow.compute as pc
    from pyarrow import types

    for name in [name for name in media if name in rows.column_names]:
        column = rows.with_format("arrow")[:][name]
        is_listed = types.is_list(column.type) or types.is_large_list(column.type)
        sizes = pc.list_value_length(column) if is_listed else pc.is_valid(column)
        if count := pc.sum(pc.greater(sizes.cast("int64"), 0)).as_py():
            if reason is not None:
                raise ValueError(f"{count} of {len(rows)} rows have {name}: {reason}.")
            raise ValueError(
                f"{count} of {len(rows)} rows have {name}, which this run cannot read: the model would learn only the "
                "text around them. Images and videos need a vision model, for every model of the run. All trainers "
                "take them, except pretraining with packing_strategy: wrapped. Schedulers and environments of GKD do "
                f"not take them. Remove these rows, or the column {name!r} if the model needs no {name}."
            )


def _renamed(rows: Dataset, columns: Mapping[str, str]) -> Dataset:
    names = rows.column_names
    for old, new in columns.items():
        if old not in names:
            raise ValueError(
                f"columns: there is no column {old!r}.{nearest(old, names, DID_YOU_MEAN)} Columns: {', '.join(names)}."
            )
        if new in names and new not in columns:
            raise ValueError(f"columns: {old!r} cannot become {new!r}, which exists. Rename that one as well.")
    return rows.rename_columns({old: new for old, new in columns.items() if old != new})


def _sharegpt_converted(rows: Dataset) -> Dataset:
    """Rows whose messages say role and content, where they said from and value."""
    keys = ("conversations", "messages", "prompt", "completion")
    present = [key for key in keys if key in rows.column_names and isinstance(rows[0][key], list)]
    if not any("from" in message for key in present for message in rows[0][key] if isinstance(message, dict)):
        return rows
    return rows.map(
        _from_sharegpt, fn_kwargs={"keys": present}, remove_columns=present, desc="Converting ShareGPT rows"
    )


def _from_sharegpt(row: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    from trl import maybe_convert_to_chatml  # type: ignore[attr-defined]

    for key in keys:
        is_listed = row[key] is None or isinstance(row[key], list)
        if not is_listed or not all(isinstance(message, Mapping) for message in row[key] or []):
            return dict.fromkeys(["messages" if key == "conversations" else key for key in keys])
    converted = maybe_convert_to_chatml({key: [dict(message) for message in row[key] or []] for key in keys})
    for messages in converted.values():
        for message in messages:
            if "role" in message:  # ``broken_rows.py`` finds messages without one
                message["role"] = SHAREGPT_ROLES.get(message["role"], message["role"])
    return dict(converted)


def _with_prompt(rows: Dataset, template: str, columns: Mapping[str, str]) -> Dataset:
    def prompt(row: dict[str, Any]) -> dict[str, Any]:
        values = row | {old: row[new] for old, new in columns.items()}
        lacks_one = any(values.get(name, "") is None for name in used)
        return {"prompt": None if lacks_one else template.format_map(values)}

    try:
        used_in_full = [name for _, name, _, _ in string.Formatter().parse(template) if name]
        used = [re.split(r"[.\[]", name)[0] for name in used_in_full]
        if private := [name for name in used_in_full if re.search(r"[.\[]_", name)]:
            raise ValueError(f"{{{private[0]}}} is no value of a column")
        prompt(rows[0])
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"prompt_template {template!r} cannot be filled: {type(error).__name__}: {error}. Columns: "
            f"{', '.join({**rows[0], **columns})}. A brace that is text is written twice."
        ) from error
    return rows.map(prompt, desc="Filling prompt_template")


def _with_system(row: dict[str, Any], system: str) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    answers = ("completion", *(("chosen", "rejected") if isinstance(row.get("prompt"), str) else ()))
    for key, role in (("prompt", "user"), *((name, "assistant") for name in answers)):
        if isinstance(row.get(key), str):
            changed[key] = [{"role": role, "content": row[key]}]
    key = "prompt" if "prompt" in row else "messages"
    messages = changed.get(key, row.get(key))
    if not system and not {"prompt", "messages"} & row.keys():
        return changed
    if not {"prompt", "messages"} & row.keys():
        raise ValueError(f"system: needs rows with 'prompt' or 'messages', got columns {', '.join(row)}")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return changed
    if system and messages and messages[0].get("role") != "system":
        changed[key] = [{"role": "system", "content": system}, *messages]
    return changed


def prompt_of(row: Mapping[str, Any]) -> Any:
    """The prompt of a row: its ``prompt``, or its ``messages`` without a last turn of the assistant."""
    if row.get("prompt") is not None:
        return row["prompt"]
    if row.get("messages"):
        messages = row["messages"]
        return messages[:-1] if messages[-1]["role"] == "assistant" else messages
    raise ValueError(f"rows have no prompt: they need a column 'prompt' or 'messages', got {', '.join(row)}")


# Tokenising


def tokenize_sft(
    rows: Dataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    truncation_mode: TruncationMode = "keep_start",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    text_field: str = "text",
    eos: str | None = None,
    num_proc: int | None = None,
    loss_scale: LossScale | None = None,
    images: ImageReader | None = None,
) -> Sequences:
    """One sequence a row and, as targets, the tokens to learn: TRL's SFT preparation.

    Texts end with ``eos`` (default: the tokenizer's), conversations as their template ends them. A completion starts
    where prompt and prompt + completion part as tokens; by default only completions are learned where there are any.
    ``assistant_only_loss`` learns what the template marks with ``{% generation %}``. Rows are cut to ``max_length``
    tokens, and those left without a target are dropped, with one line in the log. The first token is no target.
    ``loss_scale`` chooses among the tokens that would be learned, and weighs them: see ``loss_scale.py``.
    ``pack`` with ``bfd_split`` or ``wrapped`` wants ``max_length=None``. ``images``: of a model that sees pictures; a
    row whose pictures would be cut raises ValueError. Where answers are chosen, the tokens of their pictures are no
    targets, as in ms-swift.

    Departures from TRL: it keeps rows without a target when it packs, and refuses rows without an assistant's turn.
    """
    _check_choice("truncation_mode", truncation_mode, TruncationMode)
    template = _chat_template(rows[0], tokenizer, assistant_only_loss)
    eos = eos or tokenizer.eos_token
    told = (template, completion_only_loss, assistant_only_loss, text_field, eos, loss_scale)
    is_weighted = loss_scale is not None and loss_scale.is_weighted
    longest = max_length if truncation_mode == "drop" else None
    cut = slice(-max_length, None) if max_length and truncation_mode == "keep_end" else slice(max_length)

    def encode_all(table: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        ids, masks, weights, kept = [], [], [], []
        for position, index in enumerate(indices):
            try:
                row = {name: column[position] for name, column in table.items()}
                own = tokenizer
                if images is not None:
                    row, pictures = images.placed(row)
                    own = images.tokenizer(pictures)
                row_ids, row_weights = SFTEncoder(own, *told)(row)
                if images is not None and longest is None:
                    images.check_cut(row_ids, row_ids[cut], f"max_length {max_length}")
                if images is not None and pictures and (assistant_only_loss or loss_scale is not None):
                    row_weights = images.unlearned(row_ids, row_weights)
            except Exception as error:
                error.add_note(f"while tokenizing row {index} of the dataset")
                raise
            row_weights = [0.0, *row_weights[cut][1:]]
            if any(row_weights) and (longest is None or len(row_ids) <= longest):
                ids.append(row_ids[cut])
                masks.append([weight > 0 for weight in row_weights])
                weights.append(row_weights)
                kept.append(index)
        columns: dict[str, list[Any]] = {"input_ids": ids, "target_mask": masks, "row": kept}
        columns |= {"weights": weights} if is_weighted else {}
        return {name: columns[name] for name in features}

    features = _features(is_weighted, sees=images is not None)
    options: dict[str, Any] = {"batched": True, "with_indices": True, "num_proc": num_proc, "desc": "Tokenizing"}
    table = rows.map(encode_all, remove_columns=rows.column_names, features=features, **options)
    if dropped := len(rows) - len(table):
        warn_left_out(
            dropped,
            "dropped %d of %d rows that %s within max_length %s",
            dropped,
            len(rows),
            "have no token to learn" if longest is None else "do not lie",
            max_length,
        )
    if len(table) == 0:
        raise ValueError(
            f"none of {len(rows)} rows has a token to learn within max_length {max_length} ({truncation_mode}, "
            f"assistant_only_loss={assistant_only_loss}). Raise max_length, or print one row's tokens."
        )
    mask = _ragged(table, "target_mask", np.bool_)
    pictures: list[Pictures] | None = None
    if images is not None:
        pictures = [images.placed(rows[index])[1] for index in table["row"]]
    return Sequences(_ragged(table, "input_ids", np.int64), mask, weights=_weights(table, mask), images=pictures)


@dataclass(frozen=True)
class SFTEncoder:
    """Token ids of a row, and how much each counts in the loss."""

    tokenizer: Any
    chat_template: str | None
    completion_only_loss: bool | None
    assistant_only_loss: bool
    text_field: str
    eos: str | None
    loss_scale: LossScale | None = None

    def __call__(self, row: dict[str, Any]) -> tuple[list[int], list[float]]:
        if row.get("prompt") is not None and row.get("completion") is not None:
            prompt_ids, ids, weights = self._prompt_completion(row)
            start = _common_prefix(prompt_ids, ids) if self.completion_only_loss is not False else 0
        elif self.completion_only_loss:
            raise ValueError(
                "completion_only_loss: true learns completions, and this row has none: it needs 'prompt' and "
                "'completion'. Of messages, loss_scale: default (or assistant_only_loss) learns only the answers."
            )
        elif row.get("messages"):
            ids, weights = self._conversation(row["messages"], row)
            start = 0
        elif row.get(self.text_field) is not None:
            ids, weights = self._text("", row[self.text_field])
            start = 0
        else:
            raise ValueError(
                f"a row to learn from has {self.text_field!r}, 'messages', or 'prompt' and 'completion'; this one has "
                f"{', '.join(name for name, value in row.items() if value is not None)}. Rename with `columns`. "
                "Texts are learned unchanged. With system: '' they become conversations of the chat template."
            )
        return list(ids), [0.0] * start + [float(weight) for weight in weights[start:]]

    def _prompt_completion(self, row: dict[str, Any]) -> tuple[list[int], list[int], Sequence[float]]:
        if isinstance(row["prompt"], str):
            return self.tokenizer(row["prompt"])["input_ids"], *self._text(row["prompt"], row["completion"])
        prompt_ids = self.tokenizer.apply_chat_template(
            _messages(row["prompt"]), add_generation_prompt=True, return_dict=False, **self._options(row)
        )
        return prompt_ids, *self._conversation(row["prompt"] + row["completion"], row)

    def _text(self, prompt: str, answer: str) -> tuple[list[int], Sequence[float]]:
        whole = prompt + self._ended(answer)
        if self.loss_scale is None or not self.loss_scale.names:
            ids = self.tokenizer(whole)["input_ids"]
            return ids, [1.0] * len(ids)
        size = len(whole)
        content_end = size - len(self.eos or "")
        return self._weighed(whole, [Answer(len(prompt), size + 1, content_end, prompt)], self.loss_scale, True)

    def _weighed(
        self, text: str, answers: Sequence[Answer], loss_scale: LossScale, is_text: bool = False
    ) -> tuple[list[int], list[float]]:
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError("answers are found only by a fast tokenizer, which gives the position of each token")
        encoded = self.tokenizer(text, add_special_tokens=is_text, return_offsets_mapping=True)
        return encoded["input_ids"], loss_scale.weights(text, answers, encoded["offset_mapping"])

    def _conversation(self, messages: list[dict[str, Any]], row: dict[str, Any]) -> tuple[list[int], Sequence[float]]:
        if self.loss_scale is not None and self.loss_scale.base != "all":
            return self._answers(messages, row, self.loss_scale)
        for key in OWN_KEYS:
            if any(message.get(key) is not None for message in messages):
                raise ValueError(
                    f"messages have {key}, which is used only if answers are learned: set loss_scale: default, or "
                    f"remove {key} from the rows"
                )
        encoded = self.tokenizer.apply_chat_template(
            _messages(messages),
            return_dict=True,
            return_assistant_tokens_mask=self.assistant_only_loss,
            **self._options(row),
        )
        return encoded["input_ids"], encoded.get("assistant_masks") or [1.0] * len(encoded["input_ids"])

    def _answers(
        self, messages: list[Any], row: dict[str, Any], loss_scale: LossScale
    ) -> tuple[list[int], Sequence[float]]:
        def render(some: Any, invites: bool) -> str:
            shown = [{k: v for k, v in message.items() if k not in OWN_KEYS} for message in _messages(some)]
            options = self._options(row) | {"tokenize": False, "add_generation_prompt": invites}
            text: str = self.tokenizer.apply_chat_template(shown, **options)
            return text

        turns: Any = loss_scale.base
        return self._weighed(render(messages, False), answers_of(messages, render, turns), loss_scale)

    def _options(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"chat_template": self.chat_template} | _template_options(row)

    def _ended(self, text: str) -> str:
        if self.eos is None:
            raise ValueError("the tokenizer has no eos_token, with which texts end: name one as `eos`")
        return text if text.endswith(self.eos) else text + self.eos


def _chat_template(row: Mapping[str, Any], tokenizer: Any, assistant_only_loss: bool) -> str | None:
    """The template to tokenize with: None for the tokenizer's own, or TRL's copy of it with generation marks."""
    from trl import get_training_chat_template  # type: ignore[attr-defined]
    from trl.chat_template_utils import has_generation_markers

    conversational = any(isinstance(row.get(key), list) for key in ("prompt", "messages"))
    if conversational and not tokenizer.chat_template:
        raise ValueError("the rows are conversations, but the tokenizer has no chat_template: set one, or use texts")
    if not assistant_only_loss:
        return None
    if not conversational:
        raise ValueError(
            "assistant_only_loss needs conversations ('messages', or 'prompt' and 'completion'), got texts"
        )
    if has_generation_markers(tokenizer.chat_template):
        return None
    try:
        return get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ValueError(
            "assistant_only_loss needs a chat template that marks the assistant's words with {% generation %} ... "
            "{% endgeneration %}. The template of this tokenizer has no marks, and TRL has no marked copy of it. Add "
            "the marks, or turn assistant_only_loss off."
        ) from error


def tokenize_prompts(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    max_prompt_length: int | None = None,
    truncation: PromptTruncation = "left",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
) -> list[list[int]]:
    """Token ids of each row's prompt, ready to be completed.

    A conversation gets the generation prompt, or continues its last message if that is the assistant's. A prompt of
    more than ``max_prompt_length`` tokens loses its beginning (``left``) or raises ValueError (``error``);
    ``drop_long_prompts`` takes such rows out beforehand. A row's own ``chat_template_kwargs`` win. ``images``: of a
    model that sees pictures; a prompt that would lose a part of one raises ValueError.
    """
    _check_choice("truncation", truncation, PromptTruncation)
    prompts: list[list[int]] = []
    asked: Any = None
    whole: list[int] = []
    for index, row in enumerate(rows):
        before, asked = asked, (prompt_of(row), _template_options(row))
        if asked != before or images is not None:  # the completions of a prompt stand together
            whole = _prompt_ids(row, tokenizer, dict(chat_template_kwargs or {}), images)
        ids = list(whole)
        if max_prompt_length is not None and len(ids) > max_prompt_length:
            if truncation == "error":
                raise ValueError(
                    f"the prompt of row {index} has {len(ids)} tokens, max_prompt_length is {max_prompt_length}. "
                    "Raise it, or truncate, or remove long prompts."
                )
            kept = ids[len(ids) - max_prompt_length :]
            if images is not None:
                images.check_cut(ids, kept, f"max_prompt_length {max_prompt_length}")
            ids = kept
        prompts.append(ids)
    return prompts


def drop_long_prompts(
    rows: Dataset,
    tokenizer: Any,
    *,
    max_prompt_length: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
) -> Dataset:
    """The rows whose prompts have at most ``max_prompt_length`` tokens. Raises ValueError if there are none."""
    options = dict(chat_template_kwargs or {})
    kept = [i for i, row in enumerate(rows) if len(_prompt_ids(row, tokenizer, options, images)) <= max_prompt_length]
    if not kept:
        raise ValueError(f"all {len(rows)} prompts have more than max_prompt_length {max_prompt_length} tokens")
    if len(kept) < len(rows):
        warn_left_out(
            len(rows) - len(kept),
            "%d of %d rows are left out: their prompts are longer than max_prompt_length %d",
            *(len(rows) - len(kept), len(rows), max_prompt_length),
        )
    return rows.select(kept)


def _prompt_ids(
    row: Mapping[str, Any], tokenizer: Any, options: dict[str, Any], images: ImageReader | None = None
) -> list[int]:
    if images is not None:
        row, pictures = images.prompt(row)
        tokenizer = images.tokenizer(pictures)
    prompt = prompt_of(row)
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not prompt:
        raise ValueError("a prompt is a conversation without messages: remove the row")
    continued = prompt[-1]["role"] == "assistant"
    options = options | _template_options(row) | {"continue_final_message": continued, "return_dict": False}
    return list(tokenizer.apply_chat_template(_messages(prompt), add_generation_prompt=not continued, **options))


def _template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's ``chat_template_kwargs`` and ``tools``, without the None that a table puts where a row has nothing."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else _filled(tools)
    options: dict[str, Any] = _filled(row.get("chat_template_kwargs") or {})
    return {"tools": tools or None} | options


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{k: _filled(v) for k, v in message.items() if v is not None or k == "content"} for message in messages]


def _filled(value: Any) -> Any:
    """``value`` without the keys, at any depth, that are None."""
    if isinstance(value, Mapping):
        return {key: _filled(item) for key, item in value.items() if item is not None}
    return [_filled(item) for item in value] if isinstance(value, list) else value


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}; known: {', '.join(get_args(choices))}")


# Packing


def pack(sequences: Sequences, *, max_length: int, strategy: PackingStrategy = "bfd") -> Sequences:
    """The same documents in fewer rows of at most ``max_length`` tokens, packed by ``trl.pack_dataset``.

    ``bfd`` (best fit, longest first) cuts longer documents off, ``bfd_split`` cuts them into several; the documents of
    a row see only themselves. ``wrapped`` fills rows to the brim: documents run on across rows, a row is one context.
    The first token of a document, or of a piece of one, is no target; in ``wrapped`` TRL counts those inside a row.
    """
    from trl import pack_dataset  # type: ignore[attr-defined]

    _check_choice("packing_strategy", strategy, PackingStrategy)
    if sequences.segment_lengths is not None:
        raise ValueError("these sequences are packed already")
    if len(sequences) == 0:
        return sequences
    if sequences.images is not None and strategy != "bfd" and any(sequences.images):
        raise ConfigError(f"packing_strategy {strategy} cuts documents, and pictures with them. Write bfd.")
    table = pack_dataset(_dataset(sequences), max_length, strategy)
    ids, mask = _ragged(table, "input_ids", np.int64), _ragged(table, "target_mask", np.bool_)
    lengths = None if strategy == "wrapped" else _ragged(table, "seq_lengths", np.int64)
    pieces = ids.lengths if lengths is None else lengths.values
    starts = np.cumsum(pieces) - pieces
    mask.values[starts] = False  # none is empty
    images: list[Any] | None = None
    if sequences.images is not None and lengths is not None:
        documents = _ragged(table, "document", np.int64).values[starts]
        rows = Ragged.split(documents, lengths.lengths)
        images = [tuple(sequences.images[number] for number in row if sequences.images[number]) for row in rows]
    return Sequences(ids, mask, lengths, weights=_weights(table, mask), images=images)


def _weights(table: Dataset, mask: Ragged) -> Ragged | None:
    """Of a table's weight a token, those of the targets."""
    if "weights" not in table.column_names:
        return None
    return Ragged.split(_ragged(table, "weights", np.float32).values[mask.values], [int(row.sum()) for row in mask])


def _features(is_weighted: bool = False, sees: bool = False) -> Any:
    from datasets import Features, LargeList, Value

    types = {"input_ids": "int64", "target_mask": "bool"} | ({"weights": "float32"} if is_weighted else {})
    columns: dict[str, Any] = {name: LargeList(Value(type)) for name, type in types.items()}
    return Features(columns | ({"row": Value("int64")} if sees else {}))


def _dataset(sequences: Sequences) -> Dataset:
    import pyarrow
    from datasets import Dataset

    columns = {"input_ids": sequences.input_ids, "target_mask": sequences.target_mask}
    if sequences.weights is not None:
        weights = np.zeros(len(sequences.input_ids.values), np.float32)
        weights[sequences.target_mask.values] = sequences.weights.values
        columns["weights"] = Ragged(weights, sequences.input_ids.offsets)
    if sequences.images is not None:  # which document a token is of
        numbers = np.repeat(np.arange(len(sequences)), sequences.input_ids.lengths)
        columns["document"] = Ragged(numbers, sequences.input_ids.offsets)
    arrays = [pyarrow.LargeListArray.from_arrays(c.offsets, pyarrow.array(c.values)) for c in columns.values()]
    return Dataset(pyarrow.Table.from_arrays(arrays, names=list(columns)))


def _ragged(table: Dataset, name: str, dtype: Any) -> Ragged:
    chunks = table.with_format("arrow")[:][name].chunks
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    lengths = [chunk.value_lengths().to_numpy() for chunk in chunks]
    return Ragged.split(np.concatenate(values, dtype=dtype), np.concatenate(lengths))
