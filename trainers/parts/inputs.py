"""What every trainer reads: the rows of its data, its model's path, and the tokenizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rayhelper import ConfigError, RayHelper
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import RunConfig, TrainConfig
from trainers.configuration.values import is_there, read_template
from trainers.data.broken_rows import prompt_mistake, without_broken
from trainers.data.rows import load_rows, prompt_of
from trainers.parts.model_checks import check_vocabulary, configuration_of
from trainers.plugins import load_plugins, resolve_model


def read_rows(config: RunConfig, source: Any, split: str) -> Any:
    """The rows of ``dataset`` or ``eval_dataset``. Raises ConfigError if there are none of the kind."""
    with mistakes_of("dataset"):
        return load_rows(
            source,
            split=split,
            columns=config.columns,
            prompt_template=config.prompt_template,
            system=config.system,
            skip_broken=skips_broken(config),
        )


def read_prompts(config: RunConfig, source: Any, split: str) -> Any:
    """As ``read_rows``, of rows that each have a prompt to complete.

    Raises:
        ConfigError: rows have none, or a broken one, and ``skip_broken_rows`` is false. It names the first few.
    """
    rows = read_rows(config, source, split)
    with mistakes_of("dataset"):
        if not {"prompt", "messages"} & set(rows.column_names):
            prompt_of(rows[0])
        mistake = partial(prompt_mistake, empty=getattr(config, "has_environment", False))
        return without_broken(rows, mistake, "prompt", "messages", skip=skips_broken(config))


def skips_broken(config: RunConfig) -> bool:
    """Whether rows that cannot be used are left out: ``skip_broken_rows``, which only trainers have."""
    return isinstance(config, TrainConfig) and config.skip_broken_rows


def load_model_and_tokenizer(config: RunConfig) -> tuple[str, Any]:
    """The folder or hub name of the model, built first if a plugin builds it, and its tokenizer.

    Raises:
        ConfigError: a tokenizer that cannot be loaded, has no end-of-sequence token, or has more tokens than the model.
    """
    with mistakes_of("external_plugins"):
        load_plugins(config.external_plugins)
    model = model_path(config)
    tokenizer = load_tokenizer(config, model)
    found = configuration_of(model, config.trust_remote_code)
    check_vocabulary(tokenizer, found, config.tokenizer or model, model)
    return model, tokenizer


@RayHelper.function(group="driver", execute="first")
def model_path(config: RunConfig) -> str:
    """The folder or hub name of the model. One that a plugin builds is built once, and needs a folder that all see."""
    return resolve_model(config.model, output_dir=config.output_dir, seed=config.seed)


def load_tokenizer(config: RunConfig, model: str) -> Any:
    """The tokenizer of the run, with a padding token and the configured chat template."""
    from transformers import AutoTokenizer

    name = config.tokenizer or model
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer could be loaded from {name!r}: {error}. Give a folder or a hub name as model or tokenizer."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name!r} has no eos_token, so that no sequence could end. Set one.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        template = config.chat_template
        tokenizer.chat_template = read_template(template) if is_there(template, Path.is_file) else template
    return tokenizer
