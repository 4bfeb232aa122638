"""The tokenizer of a run, and the model that ``new_special_tokens`` makes larger.

    tokenizer = load_tokenizer(config, model)     # knows the new tokens
    model = grown_model(config, model)            # a folder that does too, or ``model`` as it is

The grown model is a Hugging Face folder in ``output_dir``. The run takes it in the place of the model, so that policy,
reference and engines have the same tokens. Source: ms-swift's ``swift/model/register.py``: embeddings grow to the next
multiple of 128 where the tokens need more rows than there are, and transformers draws the new rows from the mean and
the covariance of the old ones. Departure: special tokens that the tokenizer has stay special.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from rayhelper import ConfigError
from trainers.backends.fsdp.vision.classifier import classifier_class
from trainers.backends.fsdp.vision.thinker import language_class
from trainers.checkpoint import GROWN
from trainers.configuration.shared import RunConfig, TrainConfig
from trainers.configuration.values import is_there, read_template, read_tokens
from trainers.run.folder_lock import held
from trainers.run.run import resumed_state

ABOUT = "new_special_tokens.json"  # a file of it
MULTIPLE = 128
logger = logging.getLogger(__name__)


def load_tokenizer(config: RunConfig, model: str) -> Any:
    """The tokenizer of the run, with a padding token, the configured chat template and new special tokens."""
    from transformers import AutoTokenizer

    has_grown = is_there(Path(model) / ABOUT, Path.is_file)
    name = model if has_grown else config.tokenizer or model
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # of any kind, by what the folder holds
        said = " ".join(str(error).split()).removesuffix(".")
        raise ConfigError(
            f"no tokenizer could be loaded from {name!r}: {said}. Give a folder or a hub name as model or tokenizer."
        ) from error
    if tokenizer.eos_token_id is None and not (
        getattr(config, "ENCODES", False) and tokenizer.pad_token_id is not None
    ):
        raise ConfigError(f"the tokenizer of {name!r} has no eos_token, so no sequence could end. Set one.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        template = config.chat_template
        tokenizer.chat_template = read_template(template) if is_there(template, Path.is_file) else template
    if not has_grown and (tokens := new_tokens(config)):
        tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    return tokenizer


def tokenizer_there(config: RunConfig) -> Any:
    """The tokenizer of the run, if it is a folder; None where a hub or a plugin is yet to give it."""
    name = config.tokenizer or config.model
    return load_tokenizer(config, name) if is_there(name, Path.is_dir) else None


def check_end(token: str | None, config: RunConfig) -> None:
    """Raises ConfigError unless ``eos_token`` is a single token: a model that learns several does not stop there."""
    tokenizer = None if token is None else tokenizer_there(config)
    if tokenizer is not None and token_id(tokenizer, str(token)) is None:
        raise ConfigError(
            f"eos_token {token!r} is not one token of the tokenizer, so no text would end. Write one that it has, or "
            "add it with new_special_tokens."
        )


def token_id(tokenizer: Any, token: str) -> int | None:
    """The id of one token; None: the tokenizer does not have it."""
    found = tokenizer.convert_tokens_to_ids(token)
    return None if found is None or found == tokenizer.unk_token_id else int(found)


def new_tokens(config: RunConfig) -> list[str]:
    """The tokens that ``new_special_tokens`` names."""
    return read_tokens(config.new_special_tokens) if isinstance(config, TrainConfig) else []


def grown_model(config: RunConfig, model: str) -> str:
    """The folder of the model with rows for new tokens; ``model`` itself where it has enough rows.

    One process calls it. A resumed run takes the folder that the run before it wrote, if there is one: what an adapter
    leaves as it is must have the same numbers.
    """
    tokens = new_tokens(config)
    if not tokens or not isinstance(config, TrainConfig):
        return model
    import torch
    from transformers import AutoConfig

    tokenizer = load_tokenizer(config, model)
    found = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code)
    size = found.get_text_config().vocab_size
    if len(tokenizer) <= size:
        return model
    folder = Path(config.output_dir) / GROWN
    about = {"model": model, "tokenizer": config.tokenizer, "tokens": tokens, "seed": config.seed}
    checkpoint, _ = resumed_state(config)
    if checkpoint is not None and (folder / ABOUT).is_file() and json.loads((folder / ABOUT).read_text()) == about:
        return str(folder)
    is_classifier = any(name.endswith("ForSequenceClassification") for name in found.architectures or ())
    kind: Any = classifier_class(found) if is_classifier else language_class(found)
    with held(folder.parent), torch.random.fork_rng():
        unfinished = folder.with_name(f"{GROWN}.unfinished")
        for old in (unfinished, folder):
            shutil.rmtree(old, ignore_errors=True)
        built = kind.from_pretrained(model, dtype="auto", trust_remote_code=config.trust_remote_code)
        torch.manual_seed(config.seed)
        built.resize_token_embeddings(-(-len(tokenizer) // MULTIPLE) * MULTIPLE)
        built.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / ABOUT).write_text(json.dumps(about))
        unfinished.rename(folder)
    rows = built.get_input_embeddings().weight.shape[0]
    logger.info("new_special_tokens: the model has %d rows of embeddings, up from %d; it is in %s", rows, size, folder)
    return str(folder)
