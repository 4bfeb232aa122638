"""The tokenizer of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayhelper import ConfigError
from trainers.configuration.shared import RunConfig
from trainers.configuration.values import is_there, read_template


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


def tokenizer_there(config: RunConfig) -> Any:
    """The tokenizer of the run, if it is a folder; None where a hub or a plugin is yet to give it."""
    name = config.tokenizer or config.model
    return load_tokenizer(config, name) if is_there(name, Path.is_dir) else None
