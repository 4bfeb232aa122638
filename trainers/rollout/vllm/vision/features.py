"""The pictures of prompts, as vLLM takes them.

    features = Features(engine, processor)
    features.of(pictures, prompt_ids, salt="0")     # vLLM's MultiModalFeatureSpec, one per picture

The trainer's processor has put the tokens of all pictures into a prompt. vLLM's own processor makes the pixels and says
which tokens a picture has. Both must say the same: nothing is tokenized again, and a prompt whose tokens differ is an
error. Pixels are made once for all completions of a prompt.

vLLM keeps what its vision tower made of a picture under the feature's identifier. It begins with ``salt``, which is
another one after new weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rayhelper import ConfigError
from trainers.backends.fsdp.vision.pixels import documents_of
from trainers.data.images.kept import Kept
from trainers.data.images.pictures import Medium, Picture, Pictures
from trainers.data.images.processor import has_videos, is_speaking, is_vision, load_processor
from trainers.rollout.vllm.vision.rotations import rotation_overrides

NEEDED = {"smolvlm": (("num2words", "SmolVLM's processor"),)}  # packages, beside torchvision
NEVER = -100.0  # nats: the most that vLLM lets a bias take from a logit
UNLIKE = {  # kinds of which vLLM (0.32) and transformers (5.19) compute other numbers, and why
    "paddleocr_vl": "between the learned positions of patches vLLM interpolates without aligning the corners, and "
    "transformers aligns them",
}
UNCOMPARED = (
    "gemma4",
    "minicpmv4_6",
    "llama4",
)  # kinds of which nobody has compared vLLM's numbers with those of transformers
CUT_ALONE = ("llava_onevision",)  # a picture beside others is not cut into parts by transformers
Known = list[tuple[np.ndarray, Any]]  # of each picture: its tokens, and vLLM's feature


def seeing(model: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model that sees pictures, of a folder or hub name; None for other models."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    return found if is_vision(found) else None


def check_sees(model: str | Path, key: str, *, trust_remote_code: bool = False) -> None:
    """Raises ConfigError if the folder of a model sees pictures and vLLM cannot read them; ``key`` chose vLLM."""
    if Path(model).is_dir() and (found := seeing(model, trust_remote_code=trust_remote_code)) is not None:
        check_pictures(found, key)


def check_pictures(configuration: Any, key: str = "rollout_engine") -> None:
    """Raises ConfigError if vLLM cannot read pictures as a model of this configuration sees them; ``key`` chose it."""
    if configuration.model_type in UNCOMPARED:
        raise ConfigError(
            f"{key}: vllm has not been compared with the trainer for {configuration.model_type}. Write hf."
        )
    if is_speaking(configuration):
        raise ConfigError(
            f"{key}: vllm does not get the weights of {configuration.model_type}, which is also an audio model. "
            "Write hf."
        )
    for package, why in (("torchvision", "a model that sees pictures"), *NEEDED.get(configuration.model_type, ())):
        if find_spec(package) is None:
            version = " (the version for your torch)" if package == "torchvision" else ""
            raise ConfigError(
                f"{key}: vllm needs {package} for {why}, and it is not installed. Run "
                f"pip install {package}{version}, or write hf."
            )
    if configuration.model_type in UNLIKE:
        raise ConfigError(
            f"{key}: vllm gives other numbers for {configuration.model_type} than the trainer: "
            f"{UNLIKE[configuration.model_type]}. Write hf."
        )
    rotation_overrides(configuration)


def engine_fields_of_vision(
    configuration: Any, given: Mapping[str, Any], processing: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of vLLM's EngineArgs for a model that sees pictures, of this configuration.

    ``given``: those of the run; ``processing``: arguments of the image processor in place of its own.
    """
    overrides = rotation_overrides(configuration, given.get("hf_overrides"))
    return {
        "skip_tokenizer_init": False,  # its processor has a tokenizer
        **({"hf_overrides": overrides} if overrides else {}),
        "mm_processor_cache_gb": given.get("mm_processor_cache_gb", 0),  # ``Features`` keeps what was processed
        "limit_mm_per_prompt": {"video": 0} | dict(given.get("limit_mm_per_prompt") or {}),
        **({"mm_processor_kwargs": dict(processing)} if processing else {}),
    }


class Features:
    """What vLLM's processor makes of pictures. ``engine``: vLLM's LLMEngine."""

    def __init__(
        self,
        engine: Any,
        model: str | Path,
        tokenizer: Any,
        *,
        trust_remote_code: bool = False,
        processing: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        told: dict[str, Any] = {"trust_remote_code": trust_remote_code, "processing": processing}
        processor = load_processor(str(model), tokenizer=tokenizer, **told)
        self.picture_ids = processor.seen_token_ids
        self.place_ids = tokenizer(processor.image_token, add_special_tokens=False)["input_ids"]
        self.tasks = engine.get_supported_tasks()
        self.kind = str(engine.model_config.hf_config.model_type)
        self._kept = Kept(_num_bytes)

    def of(self, pictures: Pictures, prompt_ids: np.ndarray, *, salt: str) -> list[Any]:
        """vLLM's features of the pictures, at the places of their tokens in ``prompt_ids``.

        Raises:
            ConfigError: vLLM gives a picture other tokens than the prompt has, takes fewer pictures, or cuts them up
                otherwise than the trainer.
        """
        flat = tuple(chain.from_iterable(documents_of(pictures))) if pictures else ()
        if self.kind in CUT_ALONE and len(flat) > 1:
            raise ConfigError(
                f"vLLM cuts every picture of a prompt into parts. But {self.kind} is trained with parts only where a "
                f"picture is alone; a prompt has {len(flat)}. Write rollout_engine: hf, or give prompts one picture."
            )
        assert not has_videos(flat), "rows with videos are refused where they are read"
        known = self._known(flat)
        found: list[Any] = []
        start = 0
        for tokens, feature in known:
            place = _place(tokens, prompt_ids, start)
            if place is None:
                raise _mismatch(len(found), len(flat), tokens)
            position = replace(feature.mm_position, offset=place)
            found.append(replace(feature, mm_position=position, identifier=f"{salt}:{feature.identifier}"))
            start = place + len(tokens)
        own = sum(int(np.isin(tokens, self.picture_ids).sum()) for tokens, _ in known)
        if (number := int(np.isin(prompt_ids, self.picture_ids).sum())) != own:
            raise ConfigError(
                f"the trainer's processor gives the {len(flat)} pictures of a prompt {number} tokens, and vLLM's gives "
                f"them {own}. Write rollout_engine: hf for this model."
            )
        return found

    def words_alone(self, params: Any) -> None:
        """Draws no token that stands for a part of a picture; ``params``: vLLM's SamplingParams, changed in place."""
        params.logit_bias = {**(params.logit_bias or {}), **dict.fromkeys(self.picture_ids, NEVER)}

    def _known(self, pictures: tuple[Medium, ...]) -> Known:
        if not pictures:
            return []
        key = tuple(picture.key for picture in pictures)
        name = hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
        return self._kept.get(key, lambda: self._processed(pictures, name))

    def _processed(self, pictures: tuple[Medium, ...], name: str) -> Known:
        """A prompt of places of pictures alone, through vLLM's processor."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        prompt = {
            "prompt_token_ids": [token for _ in pictures for token in self.place_ids],
            "multi_modal_data": {"image": [picture.image() for picture in pictures if isinstance(picture, Picture)]},
            "multi_modal_uuids": {"image": [f"{name}-{number}" for number in range(len(pictures))]},
        }
        try:
            request = self.engine.input_processor.process_inputs(
                name, prompt, SamplingParams(max_tokens=1, detokenize=False), supported_tasks=self.tasks
            )
        except (ValueError, VLLMValidationError) as error:
            said = " ".join(str(error).split())
            raise ConfigError(f"vLLM does not take the {len(pictures)} pictures of a prompt: {said}") from error
        ids = np.array(request.prompt_token_ids, np.int64)
        features = [_narrowed(feature, ids, self.picture_ids) for feature in request.mm_features]
        spans = [(feature, feature.mm_position.offset) for feature in features]
        return [(ids[start : start + feature.mm_position.length], feature) for feature, start in spans]


def _narrowed(feature: Any, ids: np.ndarray, picture_ids: Sequence[int]) -> Any:
    """From the first to the last token that stands for a part of the picture, ``picture_ids``.

    Tokens around them may be one with what stands beside the picture in a prompt: Gemma 3 has blank lines there.
    """
    position = feature.mm_position
    if position.is_embed is None:
        return feature
    own = ids[position.offset : position.offset + position.length]
    places = np.flatnonzero(np.isin(own, picture_ids))
    first, end = int(places[0]), int(places[-1]) + 1
    told = {"offset": position.offset + first, "length": end - first, "is_embed": position.is_embed[first:end]}
    return replace(feature, mm_position=replace(position, **told))


def _place(tokens: np.ndarray, ids: np.ndarray, start: int) -> int | None:
    """Where ``tokens`` stand in ``ids``, at ``start`` or behind it, first; None: nowhere."""
    last = len(ids) - len(tokens)
    if start > last:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ids[start:], len(tokens))
    found = np.flatnonzero((windows == tokens).all(1))
    return int(found[0]) + start if len(found) else None


def _mismatch(number: int, count: int, tokens: np.ndarray) -> ConfigError:
    return ConfigError(
        f"vLLM's processor gives picture {number} of the {count} of a prompt {len(tokens)} tokens, and the trainer's "
        "processor gives it others. Write rollout_engine: hf for this model."
    )


def _num_bytes(known: Known) -> int:
    tensors = [value for _, feature in known for value in feature.data.get_data().values() if hasattr(value, "numel")]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
