"""vLLM's engine core, given requests and stepped, without what vLLM puts around it for servers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from trainers.rollout.vllm.model import scale_logits
from trainers.rollout.vllm.patches import salt_again
from trainers.rollout.vllm.processes import uninterrupted
from trainers.rollout.vllm.scheduling.rows import DecodedTokens
from trainers.rollout.vllm.scheduling.steps import take_decoded


class Core:
    """The core of ``engine``, an LLMEngine."""

    def __init__(self, engine: Any, *, on_cpu: bool) -> None:
        self.engine, self.on_cpu = engine, on_cpu
        self.tasks = engine.get_supported_tasks()
        self.adapter: Any = None  # what requests say of it
        self.sees = False  # whether prompts may have pictures
        self.cache_salt = 0  # requests share what is cached with those of the same one
        self._scale = 1.0

    @property
    def scheduler(self) -> Any:
        """What chooses the requests of each step."""
        return self.engine.engine_core.engine_core.scheduler

    def add(self, name: str, prompt_ids: np.ndarray, params: Any, features: Sequence[Any] = ()) -> str:
        """The id of a new request; ``params``: vLLM's SamplingParams. ``features``: of pictures in the prompt."""
        prompt = {"prompt_token_ids": prompt_ids.tolist(), "cache_salt": str(self.cache_salt)}
        request = self.engine.input_processor.process_inputs(
            name, prompt, params, supported_tasks=self.tasks, lora_request=self.adapter
        )
        if features:
            request.mm_features = list(features)
        self.engine.input_processor.assign_request_id(request)
        self.engine.engine_core.add_request(request)
        return str(request.request_id)

    def step(self) -> tuple[list[DecodedTokens], Sequence[Any]]:
        """Tokens that end nothing, and vLLM's outputs of all other requests of one step."""
        # on a CPU small functions of vLLM's would be compiled, for half a minute
        eager = torch.compiler.set_stance("force_eager") if self.on_cpu else contextlib.nullcontext()
        with uninterrupted(), eager:
            outputs = self.engine.engine_core.get_output().outputs
        return take_decoded(self.scheduler), outputs

    def abort(self, requests: dict[str, Any]) -> None:
        """Gives up the requests, and forgets them."""
        self.engine.engine_core.abort_requests(list(requests))
        requests.clear()

    @contextlib.contextmanager
    def aborting(self, requests: dict[str, Any]) -> Iterator[None]:
        """A failure inside leaves none of the requests running."""
        try:
            yield
        except BaseException:
            self.abort(requests)
            raise

    def set_temperature(self, temperature: float, *, is_running: bool) -> None:
        """The model divides its logits by it from now on."""
        scale = 1.0 / temperature
        if scale == self._scale:
            return
        assert not is_running, "all running requests must have one temperature"
        with uninterrupted():
            self.engine.apply_model(partial(scale_logits, scale))
        self._scale = scale

    def forget_cached(self, *, is_running: bool) -> None:
        """Nothing that starts from now on finds in the cache what was computed before.

        vLLM clears its cache only while nothing runs. So requests carry a salt, which is the same on all workers that
        hold one model; one that waits has computed nothing, or gave it up, and gets the new salt.
        """
        self.cache_salt += 1
        if is_running:
            salt_again(self.scheduler, str(self.cache_salt))
        else:
            self.engine.reset_prefix_cache()
            if self.sees:
                self.engine.reset_encoder_cache()

    def batches(self) -> Any:
        """What was given to the GPU and not yet looked at, the newest first: vLLM plans a step ahead."""
        return self.engine.engine_core.engine_core.batch_queue or ()

    def kv_cache_usage(self) -> float:
        """The share of the KV cache that is in use: a step that ends completions has let go of theirs."""
        return float(self.scheduler.kv_cache_manager.usage)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Thousands of short steps that leave no cycles behind: looking for some would take a good part of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
