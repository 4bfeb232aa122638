"""The ``hf`` rollout engine, in the process of the worker that hosts it: no copy of the weights, no second system.

    prompts ──► waiting ──► slots (``decoder.py``) ──► completions
                       └──► transformers' ``generate`` (``batches.py``), for what slots do not know

The log-probability of each token is taken from the model's own logits, divided by the temperature and before any
truncation of the distribution. The trainer computes the same for the same token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from rayhelper import ConfigError
from trainers.backends.device import default_device
from trainers.backends.fsdp.hf_model import build_model, evaluating, load_named_weights, named_weights
from trainers.backends.fsdp.vision.pixels import Vision
from trainers.batch import Prompts, Ragged, Rollouts
from trainers.losses.tokens import token_logps
from trainers.parts.fingerprints import fingerprints
from trainers.rollout.base import Completion, Sampling
from trainers.rollout.completions import completions_of, no_rollouts, rollouts_of
from trainers.rollout.hf.attention import attending
from trainers.rollout.hf.batches import READ_PADDING, Batches
from trainers.rollout.hf.biases import BIASES
from trainers.rollout.hf.draws import TRUNCATIONS, Draws, uniform
from trainers.rollout.hf.norms import quick_norms
from trainers.rollout.hf.requests import Request, kind_of
from trainers.rollout.hf.settings import check_generation_kwargs, refuse_empty_prompts, stop_token_ids

if TYPE_CHECKING:
    from trainers.rollout.hf.decoder import Decoder

KEPT_SHARE = 0.125  # of a GPU's memory: a larger cache is given back after every generation, with its graphs
KNOWN_TO_SLOTS = {*TRUNCATIONS, *BIASES}  # fields of generation_kwargs

logger = logging.getLogger(__name__)


class HfEngine:
    """Completes prompts with a model of its own (a folder or hub name), or with one it shares with a trainer.

    ``batch_size``: at most so many at a time; None: as many as there is memory for. ``memory_share``: of the free
    memory, for keys and values. ``cuda_graphs``: decoding steps on GPUs are captured.
    ``whole_weights`` of a shared model gathers its weights where they lie in shards; then every worker generates.
    ``vision``: of a shared model that sees pictures. Such a model draws no token that stands for a part of a picture.
    ``processing``: of a model of its own, arguments of its image processor in place of the processor's; ``videos``: of
    its video processor.
    ``gets_part``: a model of its own that sees keeps what ``load_weights`` is not given, such as a frozen tower.
    """

    has_weights = True

    def __init__(
        self,
        model: torch.nn.Module | str | Path,
        tokenizer: Any,
        *,
        batch_size: int | None = None,
        memory_share: float = 0.5,
        cuda_graphs: bool = True,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str | torch.device | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        whole_weights: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
        vision: Vision | None = None,
        processing: Mapping[str, Any] | None = None,
        videos: Mapping[str, Any] | None = None,
        gets_part: bool = False,
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
        self.batch_size, self.memory_share, self.cuda_graphs = batch_size, memory_share, cuda_graphs
        self.version: int | None = None if self.shares_weights else 0
        self.stop_token_ids = stop_token_ids(self.module.generation_config.eos_token_id, tokenizer)
        pad = tokenizer.pad_token_id
        self.pad_token_id = int(pad if pad is not None else tokenizer.eos_token_id)
        if not self.shares_weights:
            told: dict[str, Any] = {"trust_remote_code": trust_remote_code, "processing": processing, "videos": videos}
            vision = Vision.of(self.module, str(model), **told)
        self.vision, self.gets_part = vision, gets_part and vision is not None
        self.batches = Batches(self.module, self.pad_token_id, vision)
        self._number = 0
        self._waiting: deque[Request] = deque()  # that neither slots nor batches have taken
        self._decoder: Decoder | None = None
        self._is_probed = self._has_told = self._is_attending = self._keeps_rows = False
        self._attention = contextlib.ExitStack()

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        *,
        seed: int,
        between: Callable[[], object] | None = None,
        interval: int = 1,
        finished: Callable[[Completion], object] | None = None,
    ) -> Rollouts:
        """One completion per prompt, in order, which depends on weights, its prompt, the seed and its number alone.

        ``between`` is called after every ``interval`` steps, and may load weights; ``finished`` for each completion as
        soon as it is there.

        Raises:
            ValueError: an empty prompt, or a wrong field of ``generation_kwargs``.
        """
        assert not self.num_running, "completions of submit are still running: advance until they have finished"
        numbers = np.arange(len(prompts)) if prompts.numbers is None else prompts.numbers
        numbered = dataclasses.replace(prompts, numbers=numbers)
        done: list[Completion | None] = [None] * len(prompts)
        num_steps = 0
        with self._generating():
            try:
                first = self.submit(numbered, sampling, seed=seed).start
                self._keeps_rows = False  # nobody comes back
                while self.num_running:
                    for completion in self._advance(None if between is None else interval):
                        place = completion.number - first
                        done[place] = completion
                        if finished is not None:
                            finished(dataclasses.replace(completion, number=place))
                    num_steps += 1
                    if between is not None and self.num_running and not num_steps % interval:
                        between()
            finally:
                self.abort()
                self._free()
        if not done:
            return no_rollouts()
        rollouts = rollouts_of([completion for completion in done if completion is not None])
        return rollouts if self.version is not None else dataclasses.replace(rollouts, policy_versions=None)

    def submit(self, prompts: Prompts, sampling: Sampling, *, seed: int) -> range:
        """The numbers under which ``advance`` gives out the prompts' completions. Others may be running.

        Until ``abort``, rows of the cache are kept for prompts that begin with what was completed.

        Prompts draw by ``seed`` and their numbers; without numbers by their places and ``seed``.

        Raises:
            ValueError: an empty prompt, or a wrong field of ``generation_kwargs``.
        """
        refuse_empty_prompts(prompts)
        check_generation_kwargs(sampling.generation_kwargs)
        self._keeps_rows = True
        if self.vision is not None:
            sampling = self.vision.words_alone(sampling)
        images = prompts.images or [()] * len(prompts)
        kind = kind_of(sampling, tuple(sorted(self.stop_token_ids | set(sampling.stop_token_ids))))
        numbers = range(self._number, self._number + len(prompts))
        self._number = numbers.stop
        places = range(len(prompts))
        given = prompts.numbers
        entropy = [(place, seed) for place in places] if given is None else [(seed, int(number)) for number in given]
        for pair, number, prompt_ids, seen in zip(entropy, numbers, prompts.prompt_ids, images, strict=True):
            limit = sampling.max_completion_length if sampling.temperature else 0
            ids = np.array(prompt_ids, np.int64)
            self._waiting.append(Request(number, ids, sampling, kind, uniform(*pair, limit), seen))
        return numbers

    def advance(self) -> list[Completion]:
        """A few steps of everything that is running; those that have finished with them."""
        with self._generating():
            return self._advance()

    def abort(self) -> None:
        """Gives up all that is running."""
        self._waiting.clear()
        if self._decoder is not None:
            self._decoder.abort()

    @property
    def num_running(self) -> int:
        """Completions that were submitted and have not finished."""
        inside = 0 if self._decoder is None else len(self._decoder.running) + len(self._decoder.waiting)
        return inside + len(self._waiting)

    def kv_cache_usage(self) -> float:
        """The share of the KV cache that is in use."""
        return 0.0 if self._decoder is None else self._decoder.usage()

    def all_agree(self, is_so: bool) -> bool:
        """Whether it is so: no other worker holds the same model with this one."""
        return is_so

    def _advance(self, most_steps: int | None = None) -> list[Completion]:
        """``most_steps``: before the caller wants to be asked; slots look at weights no later."""
        version = -1 if self.version is None else self.version
        decoder = self._slots()
        is_idle = decoder is None or not (decoder.running or decoder.waiting)
        if decoder is not None:
            while self._waiting and self._suits_slots(self._waiting[0].sampling):
                decoder.submit(self._waiting.popleft())
            if decoder.running or decoder.waiting:
                self._attend(in_slots=True)
                decoder.kept.is_on = self._keeps_rows
                return decoder.advance(version, most_steps)
        if not self._waiting or not is_idle:
            return []
        self._attend(in_slots=False)
        return self._complete_batch()

    def _complete_batch(self) -> list[Completion]:
        """Those that wait first, of one kind, by transformers' ``generate``."""
        head = self._waiting[0]
        batch = self._batch_of(head)
        if self._decoder is not None and self.vision is None:
            fields = ", ".join(sorted(head.sampling.generation_kwargs.keys() - KNOWN_TO_SLOTS))
            self._say_once(f"generation_kwargs {fields} need it")
        draws = None
        if head.sampling.temperature:
            draws = Draws(head.sampling, np.stack([request.uniform_L for request in batch]))
        prompt_ids = Ragged.of([request.prompt_ids for request in batch], np.int64)
        told: dict[str, Any] = {"version": self.version, "images": [request.images for request in batch]}
        rollouts = self.batches.complete(prompt_ids, head.sampling, list(head.stops), draws, **told)
        numbers = [request.number for request in batch]
        return [
            dataclasses.replace(completion, number=number)
            for number, completion in zip(numbers, completions_of(rollouts, 0), strict=True)
        ]

    def _batch_of(self, head: Request) -> list[Request]:
        """Those that wait and may be completed together with ``head``, in order."""
        needs_one_length = not head.sampling.generation_kwargs.keys().isdisjoint(READ_PADDING)
        batch: list[Request] = []
        others: deque[Request] = deque()
        for request in self._waiting:
            is_alike = (request.sampling, request.stops) == (head.sampling, head.stops)
            fits = not needs_one_length or len(request.prompt_ids) == len(head.prompt_ids)
            has_room = self.batch_size is None or len(batch) < self.batch_size
            (batch if is_alike and fits and has_room else others).append(request)
        self._waiting = others
        return batch

    def _slots(self) -> Decoder | None:
        """What decodes in slots; None where the architecture is not known to it."""
        if self._is_probed:
            return self._decoder
        self._is_probed = True
        from trainers.rollout.hf.decoder import Decoder

        try:
            self._attend(in_slots=True)
            if not self._is_attending:
                raise ValueError("its attention cannot be set")
            decoder = Decoder(
                self.module, max_slots=self.batch_size, memory_share=self.memory_share, uses_graphs=self.cuda_graphs
            )
            decoder.probe()
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            self._say_once(f"{type(self.module).__name__} is not known to decode in slots ({error})")
            return None
        self._decoder = decoder
        return decoder

    def _say_once(self, reason: str) -> None:
        if not self._has_told:
            logger.warning("rollout_engine: hf generates by transformers' own loop, which is slower: %s", reason)
            self._has_told = True

    def _free(self) -> None:
        """Graphs are kept with the cache that they read, if that leaves the GPU to what trains there."""
        decoder = self._decoder
        if decoder is None:
            return
        num_bytes = decoder.cache.bytes_per_token * decoder.cache.num_slots * decoder.cache.length
        if not decoder.graphs.graphs or num_bytes > KEPT_SHARE * torch.cuda.mem_get_info(self.module.device)[1]:
            decoder.release()

    def check_decoding(self) -> None:
        """What the model says of tokens as it draws them, with a cache, is what it says of them at once.

        Every worker of the role calls it. Where it is not so in slots, transformers' ``generate`` is taken.

        Raises:
            ConfigError: it is not so there either, as with MiniMax in transformers 5.19.
        """
        if (gap := self._gap()) <= self._most_gap:
            return
        if self._decoder is not None:
            self._decoder = None
            self._say_once(f"{type(self.module).__name__} decodes differently in slots ({gap:.1g} nats per token)")
            if (gap := self._gap()) <= self._most_gap:
                return
        raise ConfigError(
            f"rollout_engine: hf: {type(self.module).__name__} gives other log-probabilities in generation (with a "
            f"cache and padding) than in training. The difference is {gap:.1g} nats per token. Use another engine, "
            "such as rollout_engine: vllm."
        )

    @property
    def _most_gap(self) -> float:
        return 1e-3 if self.dtype == torch.float32 else 0.5  # nats

    def _gap(self) -> float:
        """The mean distance, of the worse of two prompts, to log-probabilities of one pass over all tokens."""
        random = np.random.default_rng(0)
        size = int(self.module.get_input_embeddings().weight.shape[0])
        prompts = Prompts(Ragged.of([random.integers(size, size=length) for length in (5, 2)], np.int64))
        stops, self.stop_token_ids = self.stop_token_ids, {size}
        try:
            drawn = self.generate(prompts, Sampling(max_completion_length=4, temperature=0.0), seed=0)
        finally:
            self.stop_token_ids = stops
        gaps = []
        with self._generating():
            for prompt, completion, logps in zip(
                prompts.prompt_ids, drawn.completion_ids, drawn.rollout_logps, strict=True
            ):
                ids_1T = torch.from_numpy(np.concatenate([prompt, completion]))[None].to(self.module.device)
                logits_NV = self.module(input_ids=ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1]
                expected = token_logps(logits_NV, ids_1T[0, len(prompt) :], 1.0).float().cpu().numpy()
                gaps.append(float(np.abs(expected - logps).mean()))
        return max(gaps) if all(gap == gap for gap in gaps) else float("inf")

    def load_weights(
        self, named_weights: Iterable[tuple[str, torch.Tensor]], *, part: bool = False, version: int | None = None
    ) -> None:
        """Takes the weights in place; ``part``: what is not given stays as it is."""
        assert self.version is not None, "the policy itself is not loaded"
        load_named_weights(self.module, named_weights, part=part or self.gets_part)
        self.version = self.version + 1 if version is None else version

    def fingerprints(self) -> dict[str, int]:
        """Of the weights that the model holds."""
        return fingerprints(named_weights(self.module))

    def sleep(self) -> None:
        """Frees the cache of completions."""
        if self._decoder is not None:
            self._decoder.release()

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Nothing: the cache is made when it is needed."""

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Evaluation mode and no defaults of the model's own; the model is left as it was found."""
        from transformers import GenerationConfig

        device, defaults = self.module.device, self.module.generation_config
        casts = self.dtype != torch.float32 and self.module.dtype == torch.float32
        # A graph would go on reading weights that autocast has cast and then freed
        keeps_casts = not (self.cuda_graphs and device.type == "cuda")
        self.module.generation_config = GenerationConfig()
        try:
            with (
                self.whole_weights(),
                evaluating(self.module),
                torch.autocast(device.type, self.dtype, enabled=casts, cache_enabled=keeps_casts),
                torch.no_grad(),
                quick_norms(self.module),
                self._attention,
            ):
                if self._decoder is not None and self._decoder.graphs.is_on:
                    self._decoder.weights_lie_at([weight.data_ptr() for weight in self.module.parameters()])
                yield
        finally:
            self.module.generation_config = defaults

    def _attend(self, *, in_slots: bool) -> None:
        """By the rows of slots, or as the model does of itself; until ``_generating`` ends."""
        if in_slots and not self._is_attending:
            self._is_attending = self._attention.enter_context(attending(self.module))
            self._attention.callback(setattr, self, "_is_attending", False)
        elif not in_slots:
            self._attention.close()

    def _suits_slots(self, sampling: Sampling) -> bool:
        """Slots read no pictures."""
        return self.vision is None and sampling.generation_kwargs.keys() <= KNOWN_TO_SLOTS
