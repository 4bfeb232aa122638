"""What every trainer reads: the rows of its data, its model's path, and the tokenizer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rayhelper import RayHelper
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import RunConfig, TrainConfig
from trainers.data.broken_rows import Counted, counted, prompt_mistake, without_broken
from trainers.data.images.conversations import COLUMNS
from trainers.data.images.processor import ImageReader, is_vision, seen_too
from trainers.data.rows import drop_long_prompts, load_rows, prompt_of
from trainers.parts.model_checks import (
    check_adapter,
    check_vision_model,
    check_vocabulary,
    check_whole,
    configuration_of,
)
from trainers.parts.tokenizer import grown_model, load_tokenizer
from trainers.plugins import load_plugins, resolve_model


def read_rows(config: RunConfig, source: Any, split: str, images: ImageReader | None = None) -> Any:
    """The rows of ``dataset`` or ``eval_dataset``; ``images``: of a model that sees pictures, which rows then may have.

    Of the rows to learn from it is counted how many are left out, here and later. Raises ConfigError if there are none
    of the kind.
    """
    learns = isinstance(config, TrainConfig) and (source, split) == config.training_data
    counted.set(Counted((source, split), is_open=True) if learns else replace(counted.get(), is_open=False))
    with mistakes_of("dataset"):
        rows = load_rows(
            source,
            split=split,
            columns=config.columns,
            prompt_template=config.prompt_template,
            system=config.system,
            skip_broken=skips_broken(config),
            names={"model_name": config.model_name, "model_author": config.model_author},
            images=images is not None,
        )
    if learns:
        counted.set(replace(counted.get(), num_read=len(rows) + counted.get().num_left_out))
    return rows


def image_reader(config: TrainConfig, model: str, tokenizer: Any) -> ImageReader | None:
    """What reads the pictures of rows for a model that sees some; None for others, and where others read texts alone.

    Environments and reward models read texts alone. The chat template is the processor's, unless the configuration
    gives one.

    Raises:
        ConfigError: the model's processor cannot be loaded.
    """
    is_blind = getattr(config, "has_environment", False) or getattr(config, "reward_model", None)
    if config.backend != "fsdp" or is_blind or not is_vision(configuration_of(model, config.trust_remote_code)):
        return None
    with mistakes_of("model"):
        told: dict[str, Any] = {"max_pixels": config.max_pixels, "urls": config.image_urls}
        reader = ImageReader(tokenizer, model, trust_remote_code=config.trust_remote_code, **told)
        own = reader.processor.chat_template
    if config.chat_template is None and own is not None:
        tokenizer.chat_template = own
    return reader


def read_prompts(config: RunConfig, source: Any, split: str, images: ImageReader | None = None) -> Any:
    """As ``read_rows``, of rows that each have a prompt to complete.

    Raises:
        ConfigError: rows have none, or a broken one, and ``skip_broken_rows`` is false. It names the first few.
    """
    rows = read_rows(config, source, split, images)
    with mistakes_of("dataset"):
        if not {"prompt", "messages"} & set(rows.column_names):
            prompt_of(rows[0])
        mistake = seen_too(partial(prompt_mistake, empty=getattr(config, "has_environment", False)), images)
        columns = ("prompt", "messages", *(() if images is None else COLUMNS))
        return without_broken(rows, mistake, *columns, skip=skips_broken(config))


def without_long(config: CompletionConfig, rows: Any, tokenizer: Any, images: ImageReader | None = None) -> Any:
    """The rows, less those of long prompts where ``drop_long_prompts`` says so. Raises ConfigError if none is left."""
    if not config.drop_long_prompts or config.max_prompt_length is None:
        return rows
    with mistakes_of("dataset"):
        return drop_long_prompts(
            rows,
            tokenizer,
            max_prompt_length=config.max_prompt_length,
            chat_template_kwargs=config.chat_template_kwargs,
            images=images,
        )


def skips_broken(config: RunConfig) -> bool:
    """Whether rows that cannot be used are left out: ``skip_broken_rows``, which only trainers have."""
    return isinstance(config, TrainConfig) and config.skip_broken_rows


def load_model_and_tokenizer(config: RunConfig) -> tuple[str, Any]:
    """The folder or hub name of the model, built first if a plugin builds it or it grows, and its tokenizer.

    Raises:
        ConfigError: a tokenizer that cannot be loaded, has no end-of-sequence token, or has more tokens than the model.
    """
    with mistakes_of("external_plugins"):
        load_plugins(config.external_plugins)
    model = model_path(config)
    tokenizer = load_tokenizer(config, model)
    found = configuration_of(model, config.trust_remote_code)
    check_vocabulary(tokenizer, found, config.tokenizer or model, model)
    check_whole(found, model, getattr(config, "backend", "fsdp"))
    was_known = model == config.model and Path(model).is_dir()  # and so checked before anything started
    if isinstance(config, TrainConfig) and not was_known:
        check_vision_model(config, found)
        check_adapter(config, model)
    return model, tokenizer


@RayHelper.function(group="driver", execute="first")
def model_path(config: RunConfig) -> str:
    """The folder or hub name of the model, with rows for ``new_special_tokens``.

    One that a plugin builds, or that grows, is built once, and needs a folder that all see.
    """
    return grown_model(config, resolve_model(config.model, output_dir=config.output_dir, seed=config.seed))
