"""Which keys and prompts the ``hf`` engine takes, and which tokens end its completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rayhelper import ConfigError
from trainers.batch import Prompts
from trainers.configuration.others.engine_names import no_field
from trainers.rollout.base import Sampling
from trainers.rollout.hf.biases import logit_bias_of

# Fields of GenerationConfig that may not be given, and why
_TAKEN = {
    "it is set by a key of the trainer": ["max_new_tokens", "max_length", "do_sample", "pad_token_id"],
    "model and tokenizer set it; write further ones as the key stop_token_ids": ["eos_token_id"],
    "a prompt has one completion, drawn token by token": [
        *["num_beams", "num_return_sequences", "prompt_lookup_num_tokens", "assistant_early_exit", "is_assistant"],
        *[
            "penalty_alpha",
            "dola_layers",
            "prefill_chunk_size",
            "guidance_scale",
            "token_healing",
            "return_dict_in_generate",
            "use_cache",
        ],
    ],
    "the engine reads log-probabilities from the running model, which must not be compiled": [
        "disable_compile",
        "compile_config",
    ],
    "a completion ends with a token: write its id as the key stop_token_ids": ["stop_strings"],
    "tokens are drawn by the seeds of their prompts, so a watermark would have no effect": ["watermarking_config"],
}


def check_generation_kwargs(
    given: Mapping[str, Any], *, key: str = "generation_kwargs", beside: Collection[str] | None = None
) -> None:
    """Raises ConfigError, naming ``key``, for a field that GenerationConfig lacks, or that other keys set.

    It may also hold ``logit_bias``, which is vLLM's. ``beside``: the keys that there are; None: all that ``Sampling``
    has fields for.
    """
    if not given:
        return
    from transformers import GenerationConfig

    known = {name for name in GenerationConfig().to_dict() if not name.startswith("_")} | {"logit_bias"}
    reasons = {name: reason for reason, names in _TAKEN.items() for name in names}
    reasons |= keys_of_sampling(key, beside)
    check_fields(given, key, "transformers' GenerationConfig", known, reasons)
    logit_bias_of(given, key)


def keys_of_sampling(key: str, beside: Collection[str] | None = None) -> dict[str, str]:
    """Why fields of ``Sampling`` may not be given in ``key``; ``beside`` as above."""
    names = [field.name for field in dataclasses.fields(Sampling)]
    return {
        name: f"write the key {name} in addition to {key}"
        if beside is None or name in beside
        else "this trainer has it not"
        for name in names
    }


def check_fields(
    given: Iterable[str], key: str, owner: str, known: Collection[str], reasons: Mapping[str, str]
) -> None:
    """Raises ConfigError, naming ``key``, for a field with a reason not to be given, or that its owner lacks."""
    for name in given:
        if name in reasons:
            raise ConfigError(f"{key} may not hold {name!r}: {reasons[name]}")
        if name not in known:
            raise ConfigError(no_field(name, key, owner, set(known) - reasons.keys()))


def refuse_empty_prompts(prompts: Prompts) -> None:
    """Raises ValueError naming the first prompt that has no tokens."""
    empty = np.flatnonzero(prompts.prompt_ids.lengths == 0)
    if len(empty):
        raise ValueError(
            f"prompt {empty[0]} of {len(prompts)} has no tokens, and a completion needs one to begin with. Drop "
            "the row, or start every prompt with a token such as bos"
        )


def stop_token_ids(ids: int | Sequence[int] | None, tokenizer: Any) -> set[int]:
    """What ends a completion: the ``eos_token_id`` of a GenerationConfig, and the tokenizer's."""
    listed = ids if isinstance(ids, (list, tuple)) else [ids]
    return {int(stop) for stop in [*listed, tokenizer.eos_token_id] if stop is not None}


def check_stop_tokens(ids: Collection[int], tokenizer: Any) -> None:
    """Raises ConfigError for ``stop_token_ids`` that the tokenizer has no token of."""
    if not ids:
        return
    known = set(tokenizer.get_vocab().values())
    for token in ids:
        if token not in known:
            raise ConfigError(f"stop_token_ids holds {token}, but the tokenizer's tokens are 0 to {max(known)}")
