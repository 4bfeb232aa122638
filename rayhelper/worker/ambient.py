"""What the driver's process has set beside its variables, which a worker's code must find as with Ray off.

    with the construction of an object     Ambient     seeds, torch's defaults, filters of warnings, logging, folder
    with a call                            Mode        grad mode, autocast; and of all others what has been set since

No library is imported for it: what a process has not loaded has its defaults there. A worker that loads torch later
than it is told sets torch up at that moment (``when_loaded``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rayhelper import folder
from rayhelper.folder import Where
from rayhelper.worker.messages import Messages, ToldMessages
from rayhelper.worker.patches import PRECISIONS, backend_of, default_device, precisions
from rayhelper.worker.random_streams import DriverRandom, NewRandom, RandomState, RandomStream
from rayhelper.worker.when_loaded import when_loaded

_DEVICE_TYPES = ("cpu", "cuda")  # of which autocast is asked


@dataclass(frozen=True)
class Ambient:
    """What the driver's process has set when it constructs an object."""

    random: RandomState
    torch: dict[str, Any] | None  # by name in ``_TORCH``; None: torch is not loaded
    messages: Messages
    where: Where  # relative paths begin, and modules are found

    @classmethod
    def here(cls) -> Ambient:
        torch = sys.modules.get("torch")
        return cls(RandomState.here(), None if torch is None else flags_of(torch), Messages.here(), folder.here())

    def apply(self) -> None:
        """Sets this process up in the same way, but for its random generators."""
        if self.torch is not None:
            when_loaded("torch", functools.partial(_set_flags, self.torch))
        self.messages.apply()
        folder.follow(self.where)


def _dtype(torch: Any, name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _set_cudnn(cudnn: Any, deterministic: bool, benchmark: bool, enabled: bool) -> None:
    cudnn.deterministic, cudnn.benchmark, cudnn.enabled = deterministic, benchmark, enabled


def _matmul_precision(torch: Any) -> str | None:
    """As the older interface names it; None: the newer one has set what that cannot name (``PRECISIONS``)."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return None


def _set_precisions(torch: Any, values: Sequence[str]) -> None:
    for name, value in zip(PRECISIONS, values, strict=False):
        backend = backend_of(torch, name)
        if backend.fp32_precision != value:
            backend.fp32_precision = value


def _num_threads(torch: Any) -> int | None:
    """How many threads an operator uses, if that was set; None: as torch has chosen, which workers do themselves."""
    _first_num_threads(torch)
    num: int = torch.get_num_threads()
    return None if num in _chosen() else num


@functools.cache
def _chosen() -> Collection[int]:
    """The numbers that torch may choose: of the variable, or of the cores."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdecimal():
        return {int(told)}
    cores = {os.cpu_count() or 1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1}
    return cores | {num // 2 for num in cores}


def _set_num_threads(torch: Any, num: int | None) -> None:
    torch.set_num_threads(_first_num_threads(torch) if num is None else num)


@functools.cache
def _first_num_threads(torch: Any) -> int:
    """How many there were when this was first asked, which is before a worker sets any."""
    return int(torch.get_num_threads())


_SMALLEST = float("5e-324")


def _flushes_denormal(_: Any) -> bool:
    """As ``torch.set_flush_denormal`` sets it, for the numbers of Python as well."""
    return _SMALLEST * 1.0 == 0.0


def _set_reduced(matmul: Any, fp16: Any, bf16: Any) -> None:
    matmul.allow_fp16_reduced_precision_reduction = fp16
    matmul.allow_bf16_reduced_precision_reduction = bf16


def _set_enabled(backend: Any, is_on: bool) -> None:
    backend.enabled = is_on


def _set_filling(deterministic: Any, fills: bool) -> None:
    deterministic.fill_uninitialized_memory = fills


def _set_attention(cuda: Any, flash: bool, mem_efficient: bool, math: bool, cudnn: bool) -> None:
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(mem_efficient)
    cuda.enable_math_sdp(math)
    cuda.enable_cudnn_sdp(cudnn)


def _attention(cuda: Any) -> tuple[bool, ...]:
    """The kernels that ``scaled_dot_product_attention`` may use, on any device."""
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


_TORCH: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "default dtype": (
        lambda torch: str(torch.get_default_dtype()),
        lambda torch, name: torch.set_default_dtype(_dtype(torch, name)),
    ),
    "default device": (
        default_device,
        lambda torch, name: torch.set_default_device(None if name == "cpu" else name),
    ),
    "matmul precision": (
        _matmul_precision,
        lambda torch, value: None if value is None else torch.set_float32_matmul_precision(value),
    ),
    "float32 precision of backends": (precisions, _set_precisions),
    "reduced precision of sums": (
        lambda torch: (
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        lambda torch, value: _set_reduced(torch.backends.cuda.matmul, *value),
    ),
    "mkldnn": (
        lambda torch: torch.backends.mkldnn.enabled,
        lambda torch, value: _set_enabled(torch.backends.mkldnn, value),
    ),
    "number of threads": (_num_threads, _set_num_threads),
    "denormal numbers": (_flushes_denormal, lambda torch, value: torch.set_flush_denormal(value)),
    "deterministic algorithms": (
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "anomaly detection": (
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, value: torch.autograd.set_detect_anomaly(value[0], check_nan=value[1]),
    ),
    "numpy's floating-point errors": (
        lambda torch: tuple(np.geterr().items()),
        lambda torch, value: np.seterr(**dict(value)),
    ),
    "cudnn": (
        lambda torch: (
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.enabled,
        ),
        lambda torch, value: _set_cudnn(torch.backends.cudnn, *value),
    ),
    "attention kernels": (
        lambda torch: _attention(torch.backends.cuda),
        lambda torch, value: _set_attention(torch.backends.cuda, *value),
    ),
    "memory of empty tensors": (
        lambda torch: torch.utils.deterministic.fill_uninitialized_memory,
        lambda torch, value: _set_filling(torch.utils.deterministic, value),
    ),
}


def flags_of(torch: Any) -> dict[str, Any]:
    """What ``_TORCH`` names, as it is set here."""
    return {name: get(torch) for name, (get, _) in _TORCH.items()}


def _set_flags(flags: dict[str, Any], torch: Any) -> None:
    for name, value in flags.items():
        get, put = _TORCH[name]
        if get(torch) != value:
            put(torch, value)


class Mode(NamedTuple):
    """What the driver's process has set when it makes a call."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, str], ...]  # device types for which it is on, with the dtype
    autocast_cache: bool
    random: NewRandom | None  # what became of the random generators
    torch: dict[str, Any] | None  # new defaults of torch, by name in ``_TORCH``
    messages: Messages | None  # new filters of warnings, or another logging
    where: Where | None  # another folder or ``sys.path`` than before

    def settled(self, stream: RandomStream) -> Mode:
        """The rest of the mode, after new seeds and defaults have been set: they stay. ``stream``: of the worker."""
        if self.random is not None:
            stream.follow(self.random)
        if self.torch is not None:
            when_loaded("torch", functools.partial(_set_flags, self.torch))
        if self.messages is not None:
            self.messages.apply()
        folder.follow(self.where)
        return self._replace(random=None, torch=None, messages=None, where=None)

    def applied(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, this thread is in the same mode."""
        if self == _AS_AT_FIRST:
            return contextlib.nullcontext()
        import torch

        inference = [torch.inference_mode()] if self.inference else []
        grad = torch.enable_grad() if self.grad else torch.no_grad()
        autocast = [
            torch.autocast(device, _dtype(torch, dtype), cache_enabled=self.autocast_cache)
            for device, dtype in self.autocast
        ]
        return Inside([*inference, grad, *autocast])


_AS_AT_FIRST = Mode(True, False, (), True, None, None, None, None)


class DriverMode:
    """What changes in the driver's process between calls to one group."""

    def __init__(self) -> None:
        self.random = DriverRandom()
        self.flags: dict[str, Any] | None = None  # torch's defaults, as the workers were told
        self.restarts_left: int | None = None  # when they were told the flags
        self.messages = ToldMessages()
        self.where = folder.here()

    def constructing(self) -> None:
        """The workers are told all seeds and defaults now."""
        torch = sys.modules.get("torch")
        self.flags = None if torch is None else flags_of(torch)
        self.random.constructing()
        self.messages.constructing()
        self.where = folder.here()

    def of_call(self, restarts_left: int) -> Mode | None:
        """The mode in which a call is made; None: as the workers are.

        A worker in the place of one that died was told what was set at construction, so all are told again.
        """
        torch = sys.modules.get("torch")
        new = self.random.of_call()
        is_new_worker = self.restarts_left not in (None, restarts_left)
        self.restarts_left = restarts_left
        messages = self.messages.of_call(again=is_new_worker)
        here = folder.here()
        moved = None if here == self.where and not is_new_worker else here
        self.where = here
        as_told = new is None and messages is None and moved is None
        if torch is None:
            return None if as_told else _AS_AT_FIRST._replace(random=new, messages=messages, where=moved)
        flags = flags_of(torch)
        is_told = flags == self.flags and not is_new_worker
        self.flags = flags
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        on = [device for device in _DEVICE_TYPES if torch.is_autocast_enabled(device)]
        if grad and not inference and not on and is_told and as_told:
            return None
        autocast = tuple((device, str(torch.get_autocast_dtype(device))) for device in on)
        told = None if is_told else flags
        return Mode(grad, inference, autocast, torch.is_autocast_cache_enabled(), new, told, messages, moved)


class Inside:
    """Inside, all of several contexts hold. No generator, nor an ``ExitStack``: see ``acting_as``."""

    def __init__(self, contexts: Sequence[contextlib.AbstractContextManager[Any]]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*raised)
