"""Changes to vLLM that have no public switch. One function a patch; delete when vLLM has the switch.

The first makes decoding quicker and nothing else; ``vllm_patches: false`` leaves it out. It replaces a kernel of vLLM
that was compared in 0.26 and 0.32. Where its call differs, it stays vLLM's own, and one line of log says so.
The engine needs the other patches. Each looks for what it changes by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainers.rollout.vllm.kernel import DecodingKernel

logger = logging.getLogger(__name__)

VERSIONS = ("0.26.", "0.32.")
# What we replace or do the work of, and the first 16 digits of the sha256 of its source in each of these versions
_CACHE = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_PAGES = "vllm.v1.core.single_type_kv_cache_manager"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
SOURCES = {
    "small_blocks_decode": {
        "vllm.v1.attention.ops.triton_unified_attention:unified_attention": ("7f622e55ccdbcee8", "7f622e55ccdbcee8"),
    },
    "decoding_scheduler": {
        f"{_SCHEDULER}.schedule": ("491d8fe7c9e3c94c", "da4f2cf2fc39c39e"),
        f"{_SCHEDULER}._make_cached_request_data": ("8aeb1dc3ba937dd2", "8aeb1dc3ba937dd2"),
        f"{_SCHEDULER}._update_after_schedule": ("64687e40211fcd82", "2b527eb8070d3cce"),
        f"{_SCHEDULER}.update_from_output": ("844367185957e48a", "85b29db96051135c"),
        f"{_SCHEDULER}._update_request_with_output": ("389ae7ea2b1a34e6", "ff6e3f664c996a8f"),
        f"{_SCHEDULER}.finish_requests": ("fc83b2419ccb624c", "b7a4ef7b8aa588bf"),
        f"{_SCHEDULER}.reset_prefix_cache": ("bf241b416138c4d6", "8e03dcc540a25a8f"),
        f"{_ASYNC}._update_after_schedule": ("c49d8b90a61c2b1d", "138d47daea23cdfd"),
        f"{_ASYNC}._update_request_with_output": ("0a8d94d5aaa21fd9", "c4c4ccac872af040"),
        "vllm.v1.core.sched.utils:check_stop": ("6165c7369f4af433", "5149b60c92d21064"),
        "vllm.v1.core.sched.output:SchedulerOutput": ("7194158700f96140", "97fb4463a2eda132"),
        "vllm.v1.core.sched.output:CachedRequestData": ("b0a215b040121b1a", "b0a215b040121b1a"),
        "vllm.v1.request:Request": ("66802a25ba9f70f2", "53bd7cff8118743c"),
        f"{_CACHE}.allocate_slots": ("ad07182657498a47", "8c60d937fd9eb0c8"),
        f"{_CACHE}.cache_blocks": ("43e4641c63772b09", "62ae87327fd28249"),
        f"{_COORDINATOR}.cache_blocks": ("e8ae7cd1a20be5d0", "8a801b2adf06ab1a"),
        f"{_PAGES}:FullAttentionManager.cache_blocks": ("621b47e9e0738729", "981125e4caafbec8"),
        f"{_PAGES}:SingleTypeKVCacheManager.cache_blocks": ("03520a72dfa386ab", "973ea9fec0745c95"),
    },
}

# A quicker kernel


def small_blocks_decode(is_on: bool = True) -> None:
    """Decoding steps of vLLM's Triton attention start the kernel in blocks of two warps, with two stages.

    vLLM (0.26) starts it in blocks of four warps with three stages for prompts and decoding alike
    (vllm/v1/attention/ops/triton_unified_attention.py, ``launch_kwargs``). A decoding step has one query a sequence, so
    that the few heads of a group are all that a block multiplies: ``python -m benchmarks.gpu.attention`` compares the
    two. The numbers are the same but for the order of a product's sums. Where a version has no such kernel nothing
    changes. The kernel is the process's: ``is_on`` False gives engines that start from now on vLLM's own again.
    """
    from vllm.v1.attention.ops import triton_unified_attention as attention

    kernel = getattr(attention, "kernel_unified_attention", None)
    if isinstance(kernel, DecodingKernel):
        if not is_on:
            attention.kernel_unified_attention = kernel.kernel
    elif is_on and kernel is not None and _is_hopper() and is_compared("small_blocks_decode"):
        attention.kernel_unified_attention = DecodingKernel(kernel)


def is_compared(name: str) -> bool:
    """Whether this vLLM's functions are those that ``name`` was compared with; otherwise a line of log says so."""
    import vllm

    version = str(vllm.__version__)
    column = next((column for column, known in enumerate(VERSIONS) if version.startswith(known)), None)
    if column is None:
        _tell(name, version, "this version")
        return False
    others = [place.partition(":")[2] for place, digests in SOURCES[name].items() if _digest(place) != digests[column]]
    if others:
        _tell(name, version, f"its {', '.join(others)}")
    return not others


def _digest(place: str) -> str | None:
    """sha256 of a function's source; None: there is none to read."""
    module, _, name = place.partition(":")
    try:
        source = inspect.getsource(operator.attrgetter(name)(importlib.import_module(module)))
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@functools.cache
def _tell(name: str, version: str, others: str) -> None:
    """Once for a process."""
    logger.warning(
        "vLLM %s: %s stays off, as it was not compared with %s. The numbers are the same; a step takes longer.",
        *(version, name, others),
    )


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


# What the engine cannot do without


def pack_weights(packs: bool) -> bool:
    """Lets vLLM's linear layers on a CPU pack their weights for oneDNN, or not; returns whether they did until now.

    vLLM (0.26, 0.32) packs weights as it loads a model and drops them, so that no others could be loaded into their
    place (vllm/model_executor/layers/utils.py, ``dispatch_cpu_unquantized_gemm``; vllm/_custom_ops.py,
    ``_supports_onednn``). Where a version has no such flag nothing changes. Delete when an engine argument says it.
    """
    from vllm import _custom_ops

    did = getattr(_custom_ops, "_supports_onednn", None)
    if did is None:
        return False
    _custom_ops._supports_onednn = packs
    return bool(did)


def plain_products() -> None:
    """Small linear layers on a CPU with AMX multiply by their weights as these are, not by a packed copy of them.

    vLLM (0.32) packs such weights of 16 bits as it loads a model (vllm/model_executor/layers/utils.py,
    ``check_cpu_sgl_kernel``), and goes on with that copy whatever is loaded later. Where a version has no such function
    nothing changes. Delete when weights that come later are packed too.
    """
    from vllm.model_executor.layers import utils

    if hasattr(utils, "check_cpu_sgl_kernel"):
        utils.check_cpu_sgl_kernel = lambda *_: False


@contextlib.contextmanager
def plain_convolutions(model: Any) -> Iterator[None]:
    """Inside, convolutions of delta layers on a CPU have the weights of checkpoints; afterwards packed ones again.

    vLLM (0.32) packs them in their place as it loads a model, and keeps the others beside
    (vllm/model_executor/layers/utils.py, ``_cpu_unpacked_conv_weight``): weights that are loaded later would be read as
    packed ones. Where a model has none, nothing changes. Delete when weights that come later are packed too.
    """
    packed = [module for module in model.modules() if hasattr(module, "_cpu_unpacked_conv_weight")]
    for module in packed:
        module.weight.data = module._cpu_unpacked_conv_weight.unsqueeze(1)
    try:
        yield
    finally:
        for module in packed:
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def plain_experts() -> None:
    """Experts on a CPU stay as they were loaded, and are packed for each call of their kernel.

    vLLM (0.32) packs them once, as it loads a model, in the place of the weights themselves
    (vllm/model_executor/layers/fused_moe/experts/cpu_moe.py, ``process_weights_after_loading``): weights that are
    loaded later would be read as packed ones. Where a version has no such functions nothing changes. Delete when
    weights that come later are packed too.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError:
        return
    pack: Any = getattr(cpu_moe, "cpu_prepack_moe_weight", None)
    run: Any = getattr(cpu_moe, "cpu_fused_moe", None)
    if pack is None or run is None or isinstance(run, _PackingKernel):
        return
    cpu_moe.cpu_fused_moe = _PackingKernel(run, pack)
    cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight


class _PackingKernel:
    """vLLM's ``cpu_fused_moe``, given weights that are not packed."""

    def __init__(self, run: Callable[..., Any], pack: Callable[..., torch.Tensor]) -> None:
        self.run, self.pack = run, pack
        self.place = list(inspect.signature(run).parameters).index("isa")

    def __call__(self, output: Any, states: Any, w13: torch.Tensor, w2: torch.Tensor, *args: Any, **named: Any) -> Any:
        isa = named["isa"] if "isa" in named else args[self.place - 4]
        return self.run(output, states, self.pack(w13, isa), self.pack(w2, isa), *args, **named)


def flat_rotations() -> None:
    """Rotary embeddings on a CPU get the heads of a token in one row.

    The kernel of vLLM (0.32) rotates queries of shape (tokens, heads, size) by the positions of other tokens, or not at
    all; of shape (tokens, heads x size), as most models give them, it is right. Latent attention (DeepSeek V2 and V3)
    gives the first (vllm/model_executor/layers/rotary_embedding/base.py, ``forward_cpu``). Where a version has no such
    function nothing changes. Delete when the kernel takes both.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate: Any = getattr(RotaryEmbedding, "forward_cpu", None)
    if rotate is None or hasattr(rotate, "__wrapped__"):
        return

    @functools.wraps(rotate)
    def rotated(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        flat = [None if heads is None else heads.reshape(positions.numel(), -1).contiguous() for heads in (query, key)]
        found = rotate(self, positions, *flat)
        return tuple(
            None if given is None else turned.view(given.shape)
            for given, turned in zip((query, key), found, strict=True)
        )

    RotaryEmbedding.forward_cpu = rotated


@contextlib.contextmanager
def keep_threads() -> Iterator[None]:
    """Afterwards torch has as many threads as before, and again a way to set them.

    vLLM's worker on a CPU (0.26, 0.32) puts a function that does nothing in the place of ``torch.set_num_threads``
    (vllm/v1/worker/cpu_worker.py, ``skip_set_num_threads``). Where a version leaves it alone, so does this. Delete when
    all versions do.
    """
    set_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        if torch.set_num_threads is not set_threads:
            torch.set_num_threads = set_threads
        torch.set_num_threads(num_threads)


@contextlib.contextmanager
def changed_variables() -> Iterator[Callable[[], dict[str, str | None]]]:
    """What environment variables were before that this thread has set or taken away inside; None: there was none.

    vLLM (0.26, 0.32) sets variables of other libraries as it starts (``os.environ`` in vllm/platforms/cpu.py,
    vllm/v1/worker/gpu_worker.py and a dozen further files), and other threads may set theirs meanwhile. CPython's
    ``os.environ`` encodes names and values by functions that it keeps as attributes; inside, these take notes of what
    this thread does. Where there are none, it is all variables that changed. Delete when vLLM leaves them alone.
    """
    environ: Any = os.environ
    before = {name: environ.get(name) for name in environ}
    encode_name: Any = getattr(environ, "encodekey", None)
    encode_value: Any = getattr(environ, "encodevalue", None)
    is_known = encode_name is not None and encode_value is not None
    thread, last = threading.get_ident(), ""
    touched: set[str] = set()  # looked for, set or taken away
    written: set[str] = set()

    def noting_name(name: Any) -> Any:
        nonlocal last
        encoded = encode_name(name)  # which raises for what is no name
        if threading.get_ident() == thread:
            touched.add(last := name)
        return encoded

    def noting_value(value: Any) -> Any:
        if threading.get_ident() == thread:
            written.add(last)  # the name is encoded just before
        return encode_value(value)

    def changed() -> dict[str, str | None]:
        names = written | {name for name in list(touched) if name not in environ} if is_known else {*before, *environ}
        return {name: before.get(name) for name in names if before.get(name) != environ.get(name)}

    if is_known:
        environ.encodekey, environ.encodevalue = noting_name, noting_value
    try:
        yield changed
    finally:
        if is_known:
            environ.encodekey, environ.encodevalue = encode_name, encode_value


@contextlib.contextmanager
def own_classes() -> Iterator[None]:
    """Inside, vLLM may build a model of transformers' classes; afterwards the classes are transformers' own again.

    For architectures without a model of its own vLLM (0.32) runs transformers' one, and changes its class for the whole
    process: a further base, another ``__init__`` and ``__call__``
    (vllm/model_executor/models/transformers/base.py, ``_decorate_cls_for_torch_compile``). A policy of that class in
    the same process would fail at its next call ("no attribute 'do_not_compile'"). So vLLM's instances get a subclass
    that has the changes. Where a version has no such function nothing changes. Delete when vLLM subclasses by itself.
    """
    try:
        from vllm.model_executor.models.transformers import base
    except ImportError:
        base = None
    model = getattr(base, "Base", None)
    decorate = getattr(model, "_decorate_cls_for_torch_compile", None)
    if decorate is None:
        yield
        return
    changed: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}
    built: list[Any] = []

    def decorated(self: Any, cls: Any, *args: Any, **settings: Any) -> Any:
        changed.setdefault(cls, (cls.__bases__, dict(vars(cls))))
        found = decorate(self, cls, *args, **settings)
        initialise = cls.__init__

        def noting(instance: Any, *values: Any, **named: Any) -> None:
            built.append(instance)
            initialise(instance, *values, **named)

        cls.__init__ = noting
        return found

    model._decorate_cls_for_torch_compile = decorated  # type: ignore[union-attr]
    try:
        yield
    finally:
        model._decorate_cls_for_torch_compile = decorate  # type: ignore[union-attr]
        for cls, (bases, own) in changed.items():
            further = tuple(base for base in cls.__bases__ if base not in bases)
            added = {name: value for name, value in vars(cls).items() if own.get(name) is not value}
            for name in added:
                if name in own:
                    setattr(cls, name, own[name])
                else:
                    delattr(cls, name)
            cls.__bases__ = bases
            subclass = type(cls.__name__, (cls, *further), {**added, "__module__": cls.__module__})
            for instance in built:
                if type(instance) is cls:
                    instance.__class__ = subclass


SALTED = ("num_computed_tokens", "cache_salt", "block_hashes", "update_block_hashes")  # what is read and written


def salt_again(scheduler: Any, salt: str) -> None:
    """Requests that have computed nothing find in the prefix cache what has this salt, and nothing else.

    vLLM (0.26, 0.32) takes a request's salt as it comes (vllm/v1/request.py, ``cache_salt``) and clears the cache while
    nothing runs only. One that waits, or gave up what it had computed, would otherwise find what older weights left.
    Delete when the cache can be cleared while others run.

    Raises:
        RuntimeError: this version keeps it elsewhere. Without prefix caching there is nothing to find.
    """
    for request in scheduler.requests.values():
        if missing := [name for name in SALTED if not hasattr(request, name)]:
            if not scheduler.kv_cache_manager.enable_caching:
                return
            raise RuntimeError(
                f"this version of vLLM has no {missing[0]} of requests, so waiting requests could begin with "
                "values of older weights. Set vllm_enable_prefix_caching: false."
            )
        if not request.num_computed_tokens:
            request.cache_salt = salt
            for number, feature in enumerate(getattr(request, "mm_features", None) or ()):
                identifier = f"{salt}:{feature.identifier.partition(':')[2]}"  # as ``vision/features.py`` writes it
                request.mm_features[number] = dataclasses.replace(feature, identifier=identifier)
            request.block_hashes.clear()
            request.update_block_hashes()


def end_with_process(engine: Any) -> None:
    """The engine's memory goes with the process: nothing is left to be done as Python ends.

    vLLM (0.32) would shut the engine down then (vllm/v1/engine/core_client.py, ``_finalizer``), and by then its process
    group is left. Where a version has no such finalizer nothing changes. Delete when it can be left out.
    """
    if finalizer := getattr(engine.engine_core, "_finalizer", None):
        finalizer.atexit = False


def leave_group() -> None:
    """vLLM forgets the group of all its processes, after ``destroy_model_parallel``; torch's own group stays.

    vLLM's ``destroy_distributed_environment`` (0.26, 0.32; vllm/distributed/parallel_state.py, ``_WORLD``) ends both,
    and torch's is of whoever joined it. Where a version keeps its group elsewhere nothing changes: the next engine of
    the process finds it there. Delete when vLLM ends only what it began.
    """
    from vllm.distributed import parallel_state

    world = getattr(parallel_state, "_WORLD", None)
    if world is not None:
        world.destroy()
        parallel_state._WORLD = None
