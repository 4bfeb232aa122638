"""Whether two models speak of the same tokens."""

from __future__ import annotations

from typing import Any

from rayhelper import ConfigError
from trainers.gkd.config import GKDConfig
from trainers.parts.model_checks import configuration_of


def common_vocab_size(config: GKDConfig, student: str, teacher: str | None, tokenizer: Any) -> int:
    """How many tokens both models score: the smaller of the two sizes, which differ by padding of embeddings at most.

    ``tokenizer`` is the run's. Only configurations and tokenizers are read.

    Raises:
        ConfigError: a model that cannot be read, another tokenizer of the teacher's, a vocabulary without some of the
            tokenizer's tokens, or a ``gkd_logits_topk`` beyond it.
    """
    sizes = {"model": _vocab_size(config, "model", student)}
    if teacher is not None:
        sizes["teacher_model"] = _vocab_size(config, "teacher_model", teacher)
        _check_same_tokens(config, teacher, tokenizer)
    for key, size in sizes.items():
        if size < len(tokenizer):
            raise ConfigError(f"{key} scores {size} tokens, and the tokenizer has {len(tokenizer)}: some have no score")
    common = min(sizes.values())
    if config.gkd_logits_topk is not None and config.gkd_logits_topk > common:
        raise ConfigError(f"gkd_logits_topk={config.gkd_logits_topk} is more than the vocabulary of {common} tokens")
    return common


def _vocab_size(config: GKDConfig, key: str, model: str) -> int:
    loaded = configuration_of(model, config.trust_remote_code, key)
    return int(loaded.get_text_config().vocab_size)


def _check_same_tokens(config: GKDConfig, teacher: str, tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(teacher, trust_remote_code=config.trust_remote_code).get_vocab()
    except Exception as error:  # of any kind, by what the folder holds
        told = " ".join(str(error).split())
        raise ConfigError(
            f"teacher_model: no tokenizer could be loaded from {teacher!r} to compare with the student's: {told}"
        ) from error
    ours = tokenizer.get_vocab()
    odd = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if odd:
        raise ConfigError(
            f"teacher_model: its tokenizer is another than the student's: {len(odd)} tokens differ, {odd[0]!r} is "
            f"{ours.get(odd[0], 'unknown')} here and {theirs.get(odd[0], 'unknown')} there. Both models must score the "
            "same tokens: choose a teacher of the student's family."
        )
