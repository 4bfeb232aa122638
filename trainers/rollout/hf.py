"""The ``hf`` rollout engine: transformers' ``generate``, needing nothing but the declared dependencies.

Prompts are padded on the left and completed together. The log-probability of each sampled token is taken from the
model's own logits as they pass by, divided by the temperature and before any truncation of the distribution, which is
what the trainer computes for the same token; only one step's logits are held at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rayhelper import ConfigError
from trainers.backends.device import default_device
from trainers.backends.fsdp.hf_model import build_model, evaluating, load_named_weights, named_weights
from trainers.batch import Prompts, Ragged, Rollouts
from trainers.configuration.others.engine_names import no_field
from trainers.losses.tokens import token_logps
from trainers.parts.fingerprints import fingerprints
from trainers.rollout.base import Completion, Sampling
from trainers.rollout.draws import TRUNCATIONS, Draws

# Fields of GenerationConfig that may not be given, and why
_TAKEN = {
    "it is set by a key of the trainer": ["max_new_tokens", "max_length", "do_sample", "pad_token_id"],
    "model and tokenizer say it; write further ones as the key stop_token_ids": ["eos_token_id"],
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
    "log-probabilities are taken as the model runs, which must not be compiled": ["disable_compile", "compile_config"],
    "a completion ends with a token: write its id as the key stop_token_ids": ["stop_strings"],
    "tokens are drawn by the seeds of their prompts, behind which a watermark would do nothing": [
        "watermarking_config"
    ],
}


class HfEngine:
    """Completes prompts with a model of its own (a folder or hub name), or with one it shares with a trainer.

    ``whole_weights`` of a shared model gathers its weights where they lie in shards; then every worker generates.
    """

    has_weights = True

    def __init__(
        self,
        model: torch.nn.Module | str | Path,
        tokenizer: Any,
        *,
        batch_size: int | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str | torch.device | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        whole_weights: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.shares_weights = isinstance(model, torch.nn.Module)
        if isinstance(model, torch.nn.Module):
            self.module: Any = model
        else:
            self.module = build_model(
                model,
                dtype=self.dtype,
                device=default_device() if device is None else torch.device(device),
                model_init_kwargs=model_init_kwargs,
                trust_remote_code=trust_remote_code,
            ).eval()
        self.whole_weights = contextlib.nullcontext if whole_weights is None else whole_weights
        self.batch_size = batch_size
        self.version: int | None = None if self.shares_weights else 0
        self.stop_token_ids = stop_token_ids(self.module.generation_config.eos_token_id, tokenizer)
        pad = tokenizer.pad_token_id
        self.pad_token_id = int(pad if pad is not None else tokenizer.eos_token_id)

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        *,
        seed: int,
        finished: Callable[[Completion], object] | None = None,
    ) -> Rollouts:
        """One completion a prompt, in order, which depends on weights, its prompt, the seed and its number alone.

        ``finished`` is called for each when those that were completed with it have finished too.

        Raises:
            ValueError: an empty prompt, or a wrong field of ``generation_kwargs``.
        """
        refuse_empty_prompts(prompts)
        size = self.batch_size or max(1, len(prompts))
        stops = sorted(self.stop_token_ids | set(sampling.stop_token_ids))
        config = self._generation_config(sampling, stops)
        numbers = np.arange(len(prompts)) if prompts.numbers is None else prompts.numbers
        parts = []
        with self._generating():
            for start in range(0, len(prompts), size):
                prompt_ids = prompts[start : start + size].prompt_ids
                draws = None if sampling.temperature == 0 else Draws(sampling, seed, numbers[start : start + size])
                parts.append(self._complete(prompt_ids, config, stops, sampling.temperature or 1.0, draws))
                if finished is not None:
                    for completion in completions_of(parts[-1], start):
                        finished(completion)
        return Rollouts.concat(parts) if parts else no_rollouts()

    def check_decoding(self) -> None:
        """What the model says of tokens as it draws them, with a cache and padding, is what it says of them at once.

        Every worker of the role calls it.

        Raises:
            ConfigError: it is not, as with MiniMax in transformers 5.19.
        """
        random = np.random.default_rng(0)
        size = int(self.module.get_input_embeddings().weight.shape[0])
        prompts = Ragged.of([random.integers(size, size=length) for length in (5, 2)], np.int64)
        greedy = Sampling(max_completion_length=4, temperature=0.0)
        with self._generating(), torch.no_grad():
            drawn = self._complete(prompts, self._generation_config(greedy, [size]), [size], 1.0)
            for prompt, completion, logps in zip(prompts, drawn.completion_ids, drawn.rollout_logps, strict=True):
                ids_1T = torch.from_numpy(np.concatenate([prompt, completion]))[None].to(self.module.device)
                logits_NV = self.module(input_ids=ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1]
                expected = token_logps(logits_NV, ids_1T[0, len(prompt) :], 1.0).float().cpu().numpy()
                gap = np.abs(expected - logps).mean()  # nats
                if not gap <= (1e-3 if self.dtype == torch.float32 else 0.5):
                    raise ConfigError(
                        f"rollout_engine: hf: {type(self.module).__name__} gives other log-probabilities as it "
                        f"generates, with a cache and behind padding, than in training ({gap:.1f} nats "
                        f"per token). Take another engine, such as rollout_engine: vllm."
                    )

    def _complete(
        self, prompt_ids: Ragged, config: Any, stops: list[int], temperature: float, draws: Draws | None = None
    ) -> Rollouts:
        device = self.module.device
        flipped = Ragged.of([row[::-1] for row in prompt_ids], np.int64)  # padding on the left
        attention_mask_BT = flipped.mask(device).long().flip(1)
        # Attention does not see the padding but a repetition penalty does, so it must not be eos: any token of the row
        last_B1 = torch.tensor([[row[-1]] for row in prompt_ids], device=device)
        input_ids_BT = torch.where(attention_mask_BT.bool(), flipped.padded(0, device).flip(1), last_B1)
        with _LogpRecorder(self.module, temperature) as recorder:
            sequences = self.module.generate(
                input_ids=input_ids_BT,
                attention_mask=attention_mask_BT,
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
        versions = None if self.version is None else np.full(lengths.sum(), self.version, np.int64)
        return Rollouts(
            prompt_ids=prompt_ids,
            completion_ids=Ragged.split(completions_BT[kept_BT].cpu().numpy(), lengths),
            rollout_logps=Ragged.split(logps_BT[kept_BT].cpu().numpy(), lengths),
            truncated=truncated_B.cpu().numpy(),
            policy_versions=None if versions is None else Ragged.split(versions, lengths),
        )

    def load_weights(
        self, named_weights: Iterable[tuple[str, torch.Tensor]], *, part: bool = False, version: int | None = None
    ) -> None:
        """Takes the weights in place; ``part``: what is not given stays as it is."""
        assert self.version is not None, "the policy itself is not loaded"
        load_named_weights(self.module, named_weights, part=part)
        self.version = self.version + 1 if version is None else version

    def fingerprints(self) -> dict[str, int]:
        """Of the weights that the model holds."""
        return fingerprints(named_weights(self.module))

    def sleep(self) -> None:
        """Nothing: between two calls the engine holds its weights alone."""

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Nothing; see ``sleep``."""

    def _generation_config(self, sampling: Sampling, stops: list[int]) -> Any:
        from transformers import GenerationConfig

        check_generation_kwargs(sampling.generation_kwargs)
        further = {name: value for name, value in sampling.generation_kwargs.items() if name not in TRUNCATIONS}
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

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Evaluation mode and no defaults of the model's own; the model is left as it was found."""
        from transformers import GenerationConfig

        device, defaults = self.module.device, self.module.generation_config
        casts = self.dtype != torch.float32 and self.module.dtype == torch.float32
        self.module.generation_config = GenerationConfig()
        try:
            with (
                self.whole_weights(),
                evaluating(self.module),
                torch.autocast(device.type, self.dtype, enabled=casts),
            ):
                yield
        finally:
            self.module.generation_config = defaults


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


def check_generation_kwargs(
    given: Mapping[str, Any], *, key: str = "generation_kwargs", beside: Collection[str] | None = None
) -> None:
    """Raises ConfigError, naming ``key``, for a field that GenerationConfig lacks, or that other keys set.

    ``beside``: the keys that there are; None: all that ``Sampling`` has fields for.
    """
    if not given:
        return
    from transformers import GenerationConfig

    known = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    reasons = {name: reason for reason, names in _TAKEN.items() for name in names}
    reasons |= keys_of_sampling(key, beside)
    check_fields(given, key, "transformers' GenerationConfig", known, reasons)


def keys_of_sampling(key: str, beside: Collection[str] | None = None) -> dict[str, str]:
    """Why fields of ``Sampling`` may not be given in ``key``; ``beside`` as above."""
    names = [field.name for field in dataclasses.fields(Sampling)]
    return {
        name: f"write the key {name} beside {key}" if beside is None or name in beside else "this trainer has it not"
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
            f"prompt {empty[0]} of {len(prompts)} has no tokens, and a completion needs one to begin with: "
            "drop the row, or start every prompt with a token such as bos"
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


def completions_of(rollouts: Rollouts, first: int) -> Iterator[Completion]:
    """The rows, numbered from ``first``."""
    versions = rollouts.policy_versions
    if versions is None:
        lengths = rollouts.completion_ids.lengths
        versions = Ragged.split(np.full(lengths.sum(), -1, np.int64), lengths)
    columns: tuple[Any, ...] = (rollouts.prompt_ids, rollouts.completion_ids, rollouts.rollout_logps, versions)
    for number, row in enumerate(zip(*columns, rollouts.truncated.tolist(), strict=True), start=first):
        yield Completion(number, *row)


def no_rollouts() -> Rollouts:
    """What becomes of no prompts."""
    none = Ragged.of([], np.int64)
    return Rollouts(none, none, Ragged.of([], np.float32), np.zeros(0, bool), policy_versions=none)
