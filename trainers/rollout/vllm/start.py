"""How vLLM's engine is built in this process, and what it finds in the environment as it starts."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rayhelper import ConfigError, RayHelper
from rayhelper.logs import shows_progress
from trainers.rollout.vllm.expected import expect
from trainers.rollout.vllm.patches import (
    changed_variables,
    end_with_process,
    flat_rotations,
    keep_threads,
    own_classes,
    pack_weights,
    plain_experts,
    plain_products,
    small_blocks_decode,
)
from trainers.rollout.vllm.scheduling.choice import decoding_scheduler

logger = logging.getLogger(__name__)


def start(fields: Mapping[str, Any], *, on_cpu: bool, alone: bool, has_processes: bool, is_patched: bool) -> Any:
    """vLLM's LLMEngine of these fields of EngineArgs.

    ``alone``, ``has_processes``: as ``VllmEngine`` has it. ``is_patched``: with what makes its steps quicker, a
    scheduler of ours among it.
    """
    expect()
    with starting(on_cpu, alone=alone, joins=not has_processes):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        small_blocks_decode(is_patched)
        with own_classes(), _refusals():
            arguments = EngineArgs(**{"use_tqdm_on_load": shows_progress(), **fields})
            model = arguments.create_model_config() if on_cpu else None
            if model is not None and model.use_mla and arguments.attention_backend is None:
                # Of a CPU with AMX vLLM (0.32) takes a backend for bfloat16 alone, which packs weights as it loads them
                arguments.attention_backend = "CPU_MLA"
            if model is not None and model.is_hybrid and arguments.enable_prefix_caching:
                logger.warning("without effect on a CPU: enable_prefix_caching, as the model's layers have states")
                arguments.enable_prefix_caching = False  # vLLM caches states in chunks alone, which seeds do not stand
            config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
            if is_patched and (scheduler := decoding_scheduler(config.scheduler_config)):
                config.scheduler_config.scheduler_cls = scheduler
            engine: Any = LLMEngine.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)
    if not has_processes:
        end_with_process(engine)
    if on_cpu and fields["tensor_parallel_size"] > 1:
        _forget_shared_memory()
    return engine


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What vLLM says of a model or settings that it does not take is a ConfigError, in one line."""
    from pydantic import ValidationError

    try:
        yield
    except ConfigError:
        raise
    except (ValueError, NotImplementedError, AssertionError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        said = " ".join(said.split())
        raise ConfigError(f"vLLM refuses the model or its settings: {said}") from error


@contextlib.contextmanager
def starting(on_cpu: bool, *, alone: bool, joins: bool) -> Iterator[None]:
    """Inside, vLLM finds what it reads as it starts; ``joins``: this process is in a process group.

    It takes its place in the group for that of a launcher's process. Generators of random numbers and torch's threads,
    which it sets for the whole process, are left as they were.
    """
    if joins:
        _join_process_group(on_cpu, alone=alone)
    device = 0 if on_cpu else torch.cuda.current_device()
    with (
        tempfile.TemporaryDirectory() as sockets,  # workers of a tensor-parallel group have met when this ends
        variables(_place(device, on_cpu=on_cpu, joins=joins) | {"VLLM_RPC_BASE_PATH": sockets}),
        keep_threads(),
        torch.random.fork_rng([] if on_cpu else [device]),
        _plain_weights(on_cpu),
    ):
        yield


@contextlib.contextmanager
def variables(ours: Mapping[str, str]) -> Iterator[None]:
    """Inside, the process has these environment variables; afterwards they are as before, and so is what vLLM changed.

    But for vLLM's own, which are named VLLM_*: those stay. Each name is put back on its own, so that other threads of
    the process miss none of theirs at any moment, and keep what they set.
    """
    with changed_variables() as changed:
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in changed().items():
                if name not in ours and name.startswith("VLLM_"):
                    continue
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _place(device: int, *, on_cpu: bool, joins: bool) -> dict[str, str]:
    """The variables that say which of a launcher's processes this is, and where vLLM's own things are."""
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
    return {name: str(value) for name, value in place.items()}


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
def _plain_weights(on_cpu: bool) -> Iterator[None]:
    """Inside, a model on a CPU gets weights into whose place others can be loaded, and rotates what it is given."""
    packed = pack_weights(False) if on_cpu else False
    if on_cpu:
        plain_experts()
        plain_products()
        flat_rotations()
    try:
        yield
    finally:
        if packed:
            pack_weights(True)


def _forget_shared_memory() -> None:
    """All workers have it open; on a CPU its names are the same each time, and one left behind would stop the next."""
    for file in Path("/dev/shm").glob("*-tp:*-cpushm_*"):
        file.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
