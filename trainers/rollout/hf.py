"""The ``hf`` rollout engine: transformers' ``generate``, needing nothing but the declared dependencies.

Prompts are padded on the left and completed together. The log-probability of each sampled token is taken from the
model's own logits as they pass by, divided by the temperature and before any truncation of the distribution, which is
what the trainer computes for the same token; only one step's logits are held at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainers.backends.fsdp import load_named_weights
from trainers.batch import Prompts, Ragged, Rollouts
from trainers.plugins import nearest
from trainers.rollout.base import Sampling

_OWN_FIELDS = {"max_new_tokens", "max_length", "do_sample", "num_return_sequences", "num_beams", "pad_token_id"}


class HfEngine:
    """Completes prompts with a model of its own (a folder or hub name), or with one it shares with a trainer."""

    def __init__(
        self,
        model: torch.nn.Module | str | Path,
        tokenizer: Any,
        *,
        batch_size: int | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        model_init_kwargs: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.dtype = getattr(torch, dtype)
        if isinstance(model, torch.nn.Module):
            self.module: Any = model
        else:
            from transformers import AutoModelForCausalLM

            self.module = AutoModelForCausalLM.from_pretrained(
                model, dtype=self.dtype, trust_remote_code=trust_remote_code, **(model_init_kwargs or {})
            )
            self.module.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.batch_size = batch_size
        self.stop_token_ids = _stop_token_ids(self.module, tokenizer)
        pad = tokenizer.pad_token_id
        self.pad_token_id = int(pad if pad is not None else tokenizer.eos_token_id)

    def generate(self, prompts: Prompts, sampling: Sampling, *, seed: int) -> Rollouts:
        """One completion a prompt, in order; the same weights, prompts and seed give the same ones.

        Raises:
            ValueError: an empty prompt, or a wrong field of ``generation_kwargs``.
        """
        empty = np.flatnonzero(prompts.prompt_ids.lengths == 0)
        if len(empty):
            raise ValueError(f"prompt {empty[0]} of {len(prompts)} has no tokens; a completion needs at least one")
        size = self.batch_size or max(1, len(prompts))
        stops = sorted(self.stop_token_ids | set(sampling.stop_token_ids))
        config = self._generation_config(sampling, stops)
        with self._generating(), torch.random.fork_rng(self._cuda_devices()):
            torch.manual_seed(seed)
            parts = [
                self._complete(prompts[start : start + size].prompt_ids, config, stops, sampling.temperature or 1.0)
                for start in range(0, len(prompts), size)
            ]
        return Rollouts.concat(parts) if parts else _no_rollouts()

    def _complete(self, prompt_ids: Ragged, config: Any, stops: list[int], temperature: float) -> Rollouts:
        device = self.module.device
        flipped = Ragged.of([row[::-1] for row in prompt_ids], np.int64)  # padding on the left
        input_ids_BT = flipped.padded(self.pad_token_id, device).flip(1)
        attention_mask_BT = flipped.mask(device).long().flip(1)
        with _LogpRecorder(self.module, temperature) as recorder:
            sequences = self.module.generate(
                input_ids=input_ids_BT, attention_mask=attention_mask_BT, generation_config=config
            )
        completions_BT = sequences[:, input_ids_BT.shape[1] :]
        logps_BT = recorder.finish(completions_BT[:, -1])
        is_stop_BT = torch.isin(completions_BT, torch.tensor(stops, device=device))
        truncated_B = ~is_stop_BT.any(1)
        width = completions_BT.shape[1]
        lengths_B = torch.where(truncated_B, width, is_stop_BT.int().argmax(1) + 1)
        kept_BT = torch.arange(width, device=device)[None, :] < lengths_B[:, None]
        lengths = lengths_B.cpu().numpy()
        return Rollouts(
            prompt_ids=prompt_ids,
            completion_ids=Ragged.split(completions_BT[kept_BT].cpu().numpy(), lengths),
            rollout_logps=Ragged.split(logps_BT[kept_BT].cpu().numpy(), lengths),
            truncated=truncated_B.cpu().numpy(),
        )

    def load_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the weights in place."""
        load_named_weights(self.module, named_weights)

    def _generation_config(self, sampling: Sampling, stops: list[int]) -> Any:
        from transformers import GenerationConfig

        known = set(GenerationConfig().to_dict())
        for name in sampling.generation_kwargs:
            if name in _OWN_FIELDS | {f.name for f in dataclasses.fields(Sampling)}:
                raise ValueError(f"generation_kwargs may not hold {name!r}: it is set by the trainer's own keys")
            if name not in known:
                raise ValueError(f"generation_kwargs: GenerationConfig has no field {name!r}. {nearest(name, known)}")
        greedy = sampling.temperature == 0
        return GenerationConfig(
            **{
                "max_new_tokens": sampling.max_completion_length,
                "do_sample": not greedy,
                "temperature": 1.0 if greedy else sampling.temperature,
                "top_p": 1.0 if greedy else sampling.top_p,
                "top_k": 0 if greedy else sampling.top_k,
                "min_p": None if greedy else sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "eos_token_id": stops,
                "pad_token_id": self.pad_token_id,
                **sampling.generation_kwargs,
            }
        )

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Evaluation mode and no defaults of the model's own; a shared model is left as it was found."""
        from transformers import GenerationConfig

        training, defaults = self.module.training, self.module.generation_config
        self.module.eval()
        self.module.generation_config = GenerationConfig()
        try:
            with torch.autocast(self.module.device.type, self.dtype, enabled=self._needs_autocast()):
                yield
        finally:
            self.module.generation_config = defaults
            self.module.train(training)

    def _needs_autocast(self) -> bool:
        return bool(self.dtype != torch.float32 and self.module.dtype == torch.float32)

    def _cuda_devices(self) -> list[torch.device]:
        return [self.module.device] if self.module.device.type == "cuda" else []


class _LogpRecorder:
    """Log-probabilities of the sampled tokens, from the logits of each forward pass of ``generate``."""

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
        self.previous_BV = output.logits[:, -1]

    def _record(self, chosen_B: torch.Tensor) -> None:
        assert self.previous_BV is not None
        from trainers.losses import token_logps

        self.logps.append(token_logps(self.previous_BV, chosen_B, self.temperature))

    def finish(self, chosen_B: torch.Tensor) -> torch.Tensor:
        """(B, T) log-probabilities, the last tokens being ``chosen_B``."""
        self._record(chosen_B)
        return torch.stack(self.logps, 1)


def _stop_token_ids(module: Any, tokenizer: Any) -> set[int]:
    ids = module.generation_config.eos_token_id
    listed = ids if isinstance(ids, (list, tuple)) else [ids]
    return {int(stop) for stop in [*listed, tokenizer.eos_token_id] if stop is not None}


def _no_rollouts() -> Rollouts:
    return Rollouts(Ragged.of([], np.int64), Ragged.of([], np.int64), Ragged.of([], np.float32), np.zeros(0, bool))
