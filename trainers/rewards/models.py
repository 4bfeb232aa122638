"""Reward models: sequence classifiers of one label that give a prompt and its completion a number.

    reward = RewardModel("path/to/model")
    reward.score(prompts, completions)      # one number a completion
    reward(prompts=..., completions=...)    # the same, as a reward function: functions.py takes it like any other
    reward.score(prompts, completions, images)  # of a vision model: prompts with places, and the pictures of each

For inference alone. A sequence is tokenized as the reward trainer does it, in the reward model's own chat template and
tokens: the score is read where the model learned to give it. Departure from TRL, whose GRPO scores texts without their
special tokens and end of sequence, and so at a token at which its RewardTrainer trains none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from trainers.backends.device import default_device
from trainers.backends.fsdp.documents import picture_arguments
from trainers.backends.fsdp.vision.classifier import classifier_class
from trainers.backends.fsdp.vision.pixels import Vision
from trainers.backends.scores.inputs import seen_by
from trainers.configuration.values import is_there
from trainers.data.images.conversations import COLUMNS, as_parts
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.preferences import completed_ids
from trainers.plugins import MODELS, REWARDS

CLASSIFIER = "AutoModelForSequenceClassification"  # what reward models are loaded as


class RewardModel:
    """A reward model on one device, in evaluation mode.

    ``model`` is a folder or hub name, ``batch_size`` the completions scored at once, ``chat_template_kwargs`` the
    variables of its chat template. As a reward function it goes by its ``model_name``.

    Raises:
        ValueError: the checkpoint has no head for one score, or its tokenizer has nothing to pad with.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        batch_size: int = 64,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.__name__ = model_name(model)
        self.batch_size = batch_size
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.tokenizer = _load_tokenizer(model, trust_remote_code)
        self.module = _load_module(model, getattr(torch, dtype), trust_remote_code)
        self.module.config.get_text_config().pad_token_id = (
            self.tokenizer.pad_token_id
        )  # where the head looks for the end
        self.module.to(default_device() if device is None else torch.device(device)).eval()
        self.vision = Vision.of(self.module, model, trust_remote_code=trust_remote_code)
        self.reader: ImageReader | None = None
        if self.vision is not None:
            self.reader = ImageReader(self.tokenizer, str(model), trust_remote_code=trust_remote_code)
            self.tokenizer.chat_template = self.reader.processor.chat_template or self.tokenizer.chat_template

    def score(
        self, prompts: Sequence[Any], completions: Sequence[Any], images: Sequence[Pictures] | None = None
    ) -> list[float]:
        """One number a completion. Prompts are texts or conversations, and completions of the same form.

        Texts end with the end of sequence, written by the model or not. The batch size changes no more than rounding
        does. ``images``: the pictures of each prompt, which has a part ``{"type": "image"}`` for each of them.

        Raises ValueError naming the row whose score is not finite, and for pictures that the model does not see.
        """
        if images is not None and any(images) and self.vision is None:
            raise ValueError(f"reward model {self.__name__!r} reads only texts, and the prompts have pictures")
        pictures = [()] * len(prompts) if images is None else images
        sequences = [torch.tensor(self._ids(*row)) for row in zip(prompts, completions, pictures, strict=True)]
        scores: list[float] = []
        for start in range(0, len(sequences), self.batch_size):
            rows = sequences[start : start + self.batch_size]
            ids_BT = pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id)
            mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            device = self.module.device
            given: dict[str, Any] = {"input_ids": ids_BT.to(device), "attention_mask": mask_BT.to(device)}
            beside = pictures[start : start + self.batch_size]
            if self.vision is not None and any(beside):
                given |= picture_arguments(self.module, seen_by(self.vision, beside, given["input_ids"]))
            with torch.inference_mode():
                logits_B1 = self.module(**given).logits
            scores += logits_B1[:, 0].float().tolist()
        for row, value in enumerate(scores):
            if not math.isfinite(value):
                raise ValueError(
                    f"reward model {self.__name__!r} gave {value} for row {row}, {str(completions[row])[:80]!r}: "
                    "rewards must be finite. Try dtype: float32."
                )
        return scores

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """As ``score``; ``columns`` of the dataset may hold the pictures (``images``)."""
        if self.reader is None:
            return self.score(prompts, completions)
        names = [name for name in COLUMNS if name in columns]
        rows = [{"prompt": prompt} | {name: columns[name][k] for name in names} for k, prompt in enumerate(prompts)]
        found = [self.reader.prompt(row) for row in rows]
        return self.score([row["prompt"] for row, _ in found], completions, [pictures for _, pictures in found])

    def _ids(self, prompt: Any, completion: Any, pictures: Any) -> list[int]:
        if self.reader is None:
            return completed_ids(prompt, completion, self.tokenizer, self.chat_template_kwargs)
        if not isinstance(prompt, str):
            prompt, completion = _turns(prompt), _turns(completion)
        return completed_ids(prompt, completion, self.reader.tokenizer(pictures), self.chat_template_kwargs)


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates of vision models read them."""
    return [
        {**message, "content": as_parts(message["content"])} if message.get("content") else dict(message)
        for message in messages
    ]


def model_name(model: str | Path) -> str:
    """The name under which a model's scores are logged: the last part of its own that says which model it is.

    Every run leaves its model in a folder ``final``, or in ``checkpoint-N``: these go by the folder of the run.
    """
    path = Path(str(model)).expanduser().absolute()
    while path.parent.name and re.fullmatch(r"final|checkpoint-\d+", path.name):
        path = path.parent
    return path.name


def names_reward_model(spec: Any) -> bool:
    """Whether a reward is given as a model and not as a function: a folder, a hub name, a model of a plugin."""
    if not isinstance(spec, str) or spec in REWARDS:
        return False
    return spec in MODELS or "/" in spec or is_there(spec, Path.is_dir)


def check_reward_model(model: str | Path, trust_remote_code: bool) -> None:
    """Raises ValueError for a folder whose config.json says that it holds no sequence classifier.

    Such are language models, and process reward models whose own code scores the steps. Of a hub's model nothing is
    known before it is loaded.
    """
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
        names, own = found.get("architectures") or [], found.get("auto_map") or {}
    except (OSError, ValueError, AttributeError):  # who loads the model says what is wrong with it
        return
    is_own = CLASSIFIER in own
    if names and not is_own and not any(CLASSIFIER.removeprefix("AutoModel") in str(name) for name in names):
        raise ValueError(
            f"{str(model)!r} is a {names[0]}, but reward models are loaded as {CLASSIFIER}. Write a function that "
            "loads it in a file of external_plugins, and name that function (reward_funcs; in sampling prm_model)"
        )
    if is_own and not trust_remote_code:
        raise ValueError(f"{str(model)!r} has its own code ({own[CLASSIFIER]}). Set trust_remote_code: true")


def _load_tokenizer(model: str | Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of reward model {str(model)!r} has no pad_token and no eos_token. Set one."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_module(model: str | Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    if config.num_labels != 1:
        config.num_labels = 1  # two labels are what a configuration says that says nothing
    try:
        module, report = classifier_class(config).from_pretrained(
            model, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except RuntimeError as error:
        raise ValueError(f"{str(model)!r} is not a reward model of one score: {error}") from error
    if report["missing_keys"] or report.get("mismatched_keys"):
        missing = sorted(report["missing_keys"]) or report["mismatched_keys"]
        raise ValueError(
            f"{str(model)!r} is not a reward model: its checkpoint lacks {missing}, which would be random. Give a "
            "sequence-classification checkpoint of one label."
        )
    return module
