"""Batches of prompts completed by transformers' ``generate``: for models and settings that slots do not know.

Prompts are padded on the left and completed together, until the last of them has finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainers.backends.fsdp.documents import picture_arguments
from trainers.backends.fsdp.vision.pixels import Vision
from trainers.backends.scores.inputs import seen_by
from trainers.batch import Ragged, Rollouts
from trainers.losses.tokens import token_logps
from trainers.rollout.base import Sampling
from trainers.rollout.hf.biases import for_transformers
from trainers.rollout.hf.draws import TRUNCATIONS, Draws

# Fields of GenerationConfig that read the tokens of a row as they stand, padding too: their prompts have one length
READ_PADDING = (
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "min_length"),
)


class Batches:
    """Completes batches of prompts with a model in evaluation mode and without defaults of its own."""

    def __init__(self, module: Any, pad_token_id: int, vision: Vision | None = None) -> None:
        self.module = getattr(module, "thinker", module)  # of a model that also speaks: what answers in text
        self.pad_token_id, self.vision = pad_token_id, vision

    def complete(
        self,
        prompt_ids: Ragged,
        sampling: Sampling,
        stops: list[int],
        draws: Draws | None = None,
        version: int | None = None,
        images: Sequence[Any] = (),
    ) -> Rollouts:
        """All prompts; ``draws`` None: greedily. ``version``: of the weights. ``images``: the pictures of each."""
        config = self._generation_config(sampling, stops)
        device = self.module.device
        flipped = Ragged.of([row[::-1] for row in prompt_ids], np.int64)  # padding on the left
        attention_mask_BT = flipped.mask(device).long().flip(1)
        # Attention does not see the padding but a repetition penalty does, so it must not be eos: any token of the row
        last_B1 = torch.tensor([[row[-1]] for row in prompt_ids], device=device)
        input_ids_BT = torch.where(attention_mask_BT.bool(), flipped.padded(0, device).flip(1), last_B1)
        seen: dict[str, Any] = {}
        if self.vision is not None and any(images):
            seen = picture_arguments(self.module, seen_by(self.vision, images, input_ids_BT))
        with _LogpRecorder(self.module, sampling.temperature or 1.0) as recorder:
            sequences = self.module.generate(
                input_ids=input_ids_BT,
                attention_mask=attention_mask_BT,
                **seen,
                generation_config=config,
                logits_processor=[] if draws is None else draws.processors(input_ids_BT.shape[1], device),
                synced_gpus=False,  # weights are whole: ranks need not take as many steps, nor calls, as each other
            )
        completions_BT = sequences[:, input_ids_BT.shape[1] :]
        logps_BT = recorder.logps_of(completions_BT)
        is_stop_BT = torch.isin(completions_BT, torch.tensor(stops, device=device))
        truncated_B = ~is_stop_BT.any(1)
        width = completions_BT.shape[1]
        lengths_B = torch.where(truncated_B, width, is_stop_BT.int().argmax(1) + 1)
        kept_BT = torch.arange(width, device=device)[None, :] < lengths_B[:, None]
        lengths = lengths_B.cpu().numpy()
        versions = None if version is None else np.full(lengths.sum(), version, np.int64)
        return Rollouts(
            prompt_ids=prompt_ids,
            completion_ids=Ragged.split(completions_BT[kept_BT].cpu().numpy(), lengths),
            rollout_logps=Ragged.split(logps_BT[kept_BT].cpu().numpy(), lengths),
            truncated=truncated_B.cpu().numpy(),
            policy_versions=None if versions is None else Ragged.split(versions, lengths),
        )

    def _generation_config(self, sampling: Sampling, stops: list[int]) -> Any:
        from transformers import GenerationConfig

        size = int(self.module.get_input_embeddings().weight.shape[0])
        given = for_transformers(sampling.generation_kwargs, size)
        further = {name: value for name, value in given.items() if name not in TRUNCATIONS}
        return GenerationConfig(
            **{
                "max_new_tokens": sampling.max_completion_length,
                "do_sample": False,  # ``Draws`` leaves one token to choose
                "repetition_penalty": sampling.repetition_penalty,
                "eos_token_id": stops,
                "pad_token_id": self.pad_token_id,
                "use_cache": True,
                "disable_compile": True,
                **further,
            }
        )


class _LogpRecorder:
    """Log-probabilities of the sampled tokens, from the logits of each forward pass of ``generate``.

    ``LogitsProcessor`` would be the usual place, but those of a caller run behind the repetition penalty.
    """

    def __init__(self, module: Any, temperature: float) -> None:
        self.module = module
        self.temperature = temperature
        self.previous_BV: torch.Tensor | None = None
        self.logps: list[torch.Tensor] = []

    def __enter__(self) -> _LogpRecorder:
        self.handle = self.module.register_forward_hook(self._after_forward, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _after_forward(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.previous_BV is not None:
            self._record(kwargs["input_ids"][:, -1])
        self.previous_BV = output.logits[:, -1].clone()  # a view would keep the logits of a whole prompt alive

    def _record(self, chosen_B: torch.Tensor) -> None:
        assert self.previous_BV is not None, "generate runs the model before it draws a token"
        self.logps.append(token_logps(self.previous_BV, chosen_B, self.temperature))

    def logps_of(self, completions_BT: torch.Tensor) -> torch.Tensor:
        """(B, T) log-probabilities; the last tokens have not been seen by the model, so they come from here."""
        width = completions_BT.shape[1]
        if len(self.logps) < width:
            self._record(completions_BT[:, -1])
        assert len(self.logps) == width, f"{len(self.logps)} log-probabilities for {width} tokens a row"
        return torch.stack(self.logps, 1)
