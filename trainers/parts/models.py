"""The further models of a run (references, teachers, reward models): where they are, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rayhelper import ConfigError, RayHelper
from trainers.configuration.shared import TrainConfig
from trainers.plugins import resolve_model


@RayHelper.function(group="driver", execute="first")
def resolved_models(config: TrainConfig, policy: str, names: Iterable[str]) -> dict[str, str]:
    """The folder or hub name of each named model. One that a plugin builds is built once; the policy is ``policy``."""
    found = {config.model: policy}
    for name in names:
        if name not in found:
            found[name] = resolve_model(name, output_dir=config.output_dir, seed=config.seed)
    return found


def check_same_tokens(key: str, model: str, tokenizer: Any, trust_remote_code: bool = False) -> None:
    """Raises ConfigError if a model that reads the policy's token ids has a tokenizer, and it is another one."""
    from transformers import AutoTokenizer

    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        return  # weights alone
    try:
        own = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code).get_vocab()
    except (OSError, ValueError):
        return
    if any(own.get(token) != token_id for token, token_id in tokenizer.get_vocab().items()):
        raise ConfigError(
            f"{key}: {model!r} has other tokens than the policy, whose token ids it would be given. Set {key} to a "
            "model with the policy's tokenizer, such as the policy itself."
        )
