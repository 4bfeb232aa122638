"""The further models of a run (references, teachers, reward models): where they are, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rayhelper import ConfigError, RayHelper
from trainers.config import TrainConfig
from trainers.plugins import resolve_model


@RayHelper.function(group="driver", execute="first")
def resolved_models(config: TrainConfig, policy: str, names: Iterable[str]) -> dict[str, str]:
    """The folder or hub name of each named model. One that a plugin builds is built once; the policy is ``policy``."""
    found = {config.model: policy}
    for name in names:
        if name not in found:
            found[name] = resolve_model(name, output_dir=config.output_dir, seed=config.seed)
    return found


def check_same_tokens(key: str, model: str, tokenizer: Any) -> None:
    """Raises ConfigError if a model that reads the policy's token ids has a tokenizer, and it is another one."""
    from transformers import AutoTokenizer

    try:
        own = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):  # weights alone
        return
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{key}: {model!r} has other tokens than the policy, whose token ids it would be given. Set {key} to a "
            "model with the policy's tokenizer."
        )
