"""What the driver's process has set beside its variables, which a worker's code must find as with Ray off.

    with the construction of an object     Ambient     seeds, torch's defaults, filters of warnings, logging, folder
    with a call                            Mode        grad mode, autocast; and of all others what has been set since

No library is imported for it: what a process has not loaded has its defaults there. A worker that loads torch later
than it is told sets torch up at that moment (``when_loaded``).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rayhelper import folder
from rayhelper.worker.messages import Messages, ToldMessages
from rayhelper.worker.patches import default_device
from rayhelper.worker.random_streams import DriverRandom, NewRandom, RandomState, RandomStream
from rayhelper.worker.when_loaded import when_loaded

_DEVICE_TYPES = ("cpu", "cuda")  # of which autocast is asked


@dataclass(frozen=True)
class Ambient:
    """What the driver's process has set when it constructs an object."""

    random: RandomState
    torch: dict[str, Any] | None  # by name in ``_TORCH``; None: torch is not loaded
    messages: Messages
    folder: str | None  # where relative paths begin

    @classmethod
    def here(cls) -> Ambient:
        torch = sys.modules.get("torch")
        return cls(RandomState.here(), None if torch is None else flags_of(torch), Messages.here(), folder.here())

    def apply(self) -> None:
        """Sets this process up in the same way, but for its random generators."""
        if self.torch is not None:
            when_loaded("torch", functools.partial(_set_flags, self.torch))
        self.messages.apply()
        folder.follow(self.folder)


def _dtype(torch: Any, name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _set_cudnn(cudnn: Any, deterministic: bool, benchmark: bool, enabled: bool) -> None:
    cudnn.deterministic, cudnn.benchmark, cudnn.enabled = deterministic, benchmark, enabled


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
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, value: torch.set_float32_matmul_precision(value),
    ),
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
    folder: str | None  # another than before

    def settled(self, stream: RandomStream) -> Mode:
        """The rest of the mode, after new seeds and defaults have been set: they stay. ``stream``: of the worker."""
        if self.random is not None:
            stream.follow(self.random)
        if self.torch is not None:
            when_loaded("torch", functools.partial(_set_flags, self.torch))
        if self.messages is not None:
            self.messages.apply()
        folder.follow(self.folder)
        return self._replace(random=None, torch=None, messages=None, folder=None)

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
        self.folder = folder.here()

    def constructing(self) -> None:
        """The workers are told all seeds and defaults now."""
        torch = sys.modules.get("torch")
        self.flags = None if torch is None else flags_of(torch)
        self.random.constructing()
        self.messages.constructing()
        self.folder = folder.here()

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
        moved = None if here == self.folder and not is_new_worker else here
        self.folder = here
        as_told = new is None and messages is None and moved is None
        if torch is None:
            return None if as_told else _AS_AT_FIRST._replace(random=new, messages=messages, folder=moved)
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
