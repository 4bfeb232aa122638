"""Reward models: sequence classifiers of one label that give a prompt and its completion a number.

    reward = RewardModel("path/to/model")
    reward.score(prompts, completions)      # one number a completion
    reward(prompts=..., completions=...)    # the same, as a reward function: rewards.py takes it like any other

For inference alone. What is scored is TRL's: prompt and completion in the reward model's own chat template and tokens,
padded on the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from trainers.backends.hf_model import default_device
from trainers.plugins import MODELS, REWARDS


class RewardModel:
    """A reward model on one device, in evaluation mode.

    ``model`` is a folder or hub name, ``batch_size`` the completions scored at once. As a reward function it goes by
    the last part of its name.

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
        self.__name__ = Path(str(model)).name
        self.batch_size = batch_size
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.tokenizer = _load_tokenizer(model, trust_remote_code)
        self.module = _load_module(model, getattr(torch, dtype), trust_remote_code)
        self.module.config.get_text_config().pad_token_id = (
            self.tokenizer.pad_token_id
        )  # where the head looks for the end
        self.module.to(default_device() if device is None else torch.device(device)).eval()

    def score(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """One number a completion. Prompts are texts or conversations, and completions of the same form.

        The batch size changes no more than rounding does.
        """
        texts = [self._text(*pair) for pair in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            encoded = self.tokenizer(
                text=texts[start : start + self.batch_size],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            )
            with torch.inference_mode():
                logits_B1 = self.module(**encoded.to(self.module.device)).logits
            scores += logits_B1[:, 0].float().tolist()
        return scores

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        return self.score(prompts, completions)

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        return str(
            self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **self.chat_template_kwargs)
        )


def names_reward_model(spec: Any) -> bool:
    """Whether a reward is given as a model and not as a function: a folder, a hub name, a model of a plugin."""
    if not isinstance(spec, str) or spec in REWARDS:
        return False
    return spec in MODELS or "/" in spec or Path(spec).expanduser().is_dir()


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
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    if config.num_labels != 1:
        config.num_labels = 1  # two labels are what a configuration says that says nothing
    try:
        module, report = AutoModelForSequenceClassification.from_pretrained(
            model, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except RuntimeError as error:
        raise ValueError(f"{str(model)!r} is no reward model of one score: {error}") from error
    if report["missing_keys"] or report.get("mismatched_keys"):
        missing = sorted(report["missing_keys"]) or report["mismatched_keys"]
        raise ValueError(
            f"{str(model)!r} is no reward model: its checkpoint lacks {missing}, which would be random. Give a "
            "sequence-classification checkpoint of one label."
        )
    return module
