"""megatron-core on a machine without a GPU, over gloo: what asks for CUDA gets the CPU. For tests alone.

Importing this installs it. As a plugin (``external_plugins: [tests.megatron_on_cpu]``) it comes before a run imports
megatron; tests that fork ranks preload it, ``take_back`` at once, and ``install`` it in each rank.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

CREATORS = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")
CUDA_TYPES = {"torch.FloatTensor": "torch.cuda.FloatTensor", "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor"}
CPU = torch.device("cpu")


class TypeName(str):
    """The name of a tensor's type, equal to that of the same type on a GPU: the optimizers compare such names."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or CUDA_TYPES.get(str(self)) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


class Stream:
    """A stream or event of a device that runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, *args: Any) -> Stream:
        return self

    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def uncompiled(function: Any = None, **settings: Any) -> Any:
    return function if function is not None else lambda inner: inner


def on_cpu(create: Callable[..., Any]) -> Callable[..., Any]:
    def created(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return create(*args, **kwargs)

    return created


def uneven_all_gather(gather: Callable[..., Any]) -> Callable[..., Any]:
    """gloo gathers tensors of one shape alone."""

    def gathered(tensors: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({one.shape for one in tensors}) == 1:
            return gather(tensors, tensor, group=group, async_op=async_op)
        for k, source in enumerate(dist.get_process_group_ranks(group or dist.group.WORLD)):
            if source == dist.get_rank():
                tensors[k].copy_(tensor)
            dist.broadcast(tensors[k], source, group=group)
        return None

    return gathered


def uneven_reduce_scatter(scatter: Callable[..., Any]) -> Callable[..., Any]:
    def scattered(
        output: Any, tensors: list[Any], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({one.shape for one in tensors}) == 1:
            return scatter(output, tensors, op=op, group=group, async_op=async_op)
        for k, target in enumerate(dist.get_process_group_ranks(group or dist.group.WORLD)):
            total = tensors[k].clone()
            dist.all_reduce(total, op=op, group=group)
            if target == dist.get_rank():
                output.copy_(total)
        return None

    return scattered


def end_groups() -> None:
    """No process group is left but the default one: those of gloo have threads that look for work all the time."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    gc.collect()  # models, which have groups
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


@contextlib.contextmanager
def fork_generator(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """``CudaRNGStatesTracker.fork`` on the one generator that there is."""
    if name not in tracker.states_:
        raise KeyError(name)
    before = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)


_changed: list[tuple[Any, str, Any]] = []  # owner, name and what stood there before, while it is installed


def put(owner: Any, name: str, value: Any) -> None:
    _changed.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def take_back() -> None:
    while _changed:
        setattr(*_changed.pop())


def install() -> None:
    """Puts the CPU in the place of CUDA, in this process; again is harmless."""
    if _changed:
        return
    from torch._dynamo import trace_rules
    from torch.utils._device import _device_constructors

    trace_rules.get_torch_obj_rule_map()  # tables of torch's own functions, made once and for all
    _device_constructors()
    cuda: Any = torch.cuda
    put(torch, "compile", uncompiled)
    put(cuda, "current_device", lambda: CPU)
    for name in ("synchronize", "set_device", "empty_cache"):
        put(cuda, name, lambda *args, **kwargs: None)  # one each: torch.compile knows functions by what they are
    put(cuda, "manual_seed", torch.manual_seed)
    for module in (cuda, cuda.random):
        put(module, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state())
        put(module, "set_rng_state", lambda state, *args: torch.set_rng_state(state))
    put(cuda, "Stream", Stream)
    put(cuda, "Event", Stream)
    put(cuda, "current_stream", lambda *args: Stream())
    put(cuda, "stream", lambda *args: contextlib.nullcontext())
    for name in CREATORS:
        put(torch, name, on_cpu(getattr(torch, name)))
    tensor_type = torch.Tensor.type

    def type_of(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        found = tensor_type(tensor, *args, **kwargs)
        return TypeName(found) if isinstance(found, str) else found

    put(torch.Tensor, "type", type_of)
    put(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)
    put(torch.nn.Module, "cuda", lambda module, *args, **kwargs: module)
    put(dist, "all_gather", uneven_all_gather(dist.all_gather))
    put(dist, "reduce_scatter", uneven_reduce_scatter(dist.reduce_scatter))

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    put(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    put(random.CudaRNGStatesTracker, "fork", fork_generator)

    def to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    put(token_dispatcher, "maybe_move_tensor_to_cpu", to_numpy)


install()  # importing is enough; what preloads megatron alone takes it back, and each rank installs it
