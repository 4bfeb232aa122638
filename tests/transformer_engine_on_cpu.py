"""A stand-in for TransformerEngine in plain torch, on which megatron-core builds its layers on a CPU. For tests alone.

It has what megatron-core 0.16 imports and what its layers call, with TransformerEngine's signatures (2.9) and no more:
an argument that is not known fails. Tensor- and sequence-parallel products are computed as theirs are; parameters have
the same marks, layers the same extra states. Under ``fp8_autocast`` products are exact, but take only matrices that fp8
can multiply, and multiply by the weights of the last call that began a step, as TransformerEngine does.

``install`` in a forked rank, before ``megatron_on_cpu.install``: other processes go on without.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, rms_norm

VERSION = "2.9.0"


# Between workers


class Gathered(torch.autograd.Function):
    """The rows of all workers; in the backward pass their sums are given back in parts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return scattered(gradient, ctx.group), None


class Scattered(torch.autograd.Function):
    """A worker's part of the sum of all workers' rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scattered(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gathered(gradient, ctx.group), None


class Copied(torch.autograd.Function):
    """What all workers have; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return summed(gradient, ctx.group), None


class Summed(torch.autograd.Function):
    """The sum of what workers have; each gets the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        return summed(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def gathered(rows: Tensor, group: Any) -> Tensor:
    whole = rows.new_empty(len(rows) * group.size(), *rows.shape[1:])
    dist.all_gather_into_tensor(whole, rows.contiguous(), group=group)
    return whole


def scattered(rows: Tensor, group: Any) -> Tensor:
    part = rows.new_empty(len(rows) // group.size(), *rows.shape[1:])
    dist.reduce_scatter_tensor(part, rows.contiguous(), group=group)
    return part


def summed(rows: Tensor, group: Any) -> Tensor:
    total = rows.clone()
    dist.all_reduce(total, group=group)
    return total


# fp8


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class Recipe:
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    rows = 16

    def delayed(self) -> bool:
        return False


class Float8CurrentScaling(Recipe): ...


class Float8BlockScaling(Recipe): ...


class MXFP8BlockScaling(Recipe):
    rows = 32


class DelayedScaling(Recipe):
    def __init__(self, **settings: Any) -> None:
        raise NotImplementedError("the backend does not scale by what was seen before")


class FP8GlobalStateManager:
    recipe: Recipe | None = None
    num_products = 0  # that fp8 would have computed

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls) -> Recipe | None:
        return cls.recipe

    @classmethod
    def check(cls, *matrices: Tensor) -> None:
        assert cls.recipe is not None
        cls.num_products += 1
        for matrix in matrices:
            for size in (matrix.shape[:-1].numel(), matrix.shape[-1]):
                assert size % cls.recipe.rows == 0, f"fp8 cannot multiply by {tuple(matrix.shape)}"


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    before, FP8GlobalStateManager.recipe = FP8GlobalStateManager.recipe, fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


@contextlib.contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    yield


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    recipe = FP8GlobalStateManager.recipe

    def run(*inputs: Any) -> Any:
        with fp8_autocast(recipe is not None, fp8_recipe=recipe):
            return function(*inputs, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


class Fp8Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, m_splits: list[int]) -> list[int]:
        recipe = FP8GlobalStateManager.recipe
        rows = self.align_size or (recipe.rows if recipe else 16)
        return [-(-size // rows) * rows for size in m_splits]

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        sizes = self.padded(m_splits)
        parts = zip(inp.split(m_splits), sizes, strict=True)
        return torch.cat(
            [torch.cat([part, part.new_zeros(size - len(part), part.shape[1])]) for part, size in parts]
        ), sizes


class Fp8Unpadding(Fp8Padding):
    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:  # type: ignore[override]
        parts = zip(inp.split(self.padded(m_splits)), m_splits, strict=True)
        return torch.cat([part[:size] for part, size in parts])


# Layers


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.workspaces: dict[str, Tensor] = {}
        self.num_gemms = 1

    def parallel(
        self, tp_group: Any, tp_size: int, mode: str | None, sequence_parallel: bool, fuse_wgrad_accumulation: bool
    ) -> None:
        assert not fuse_wgrad_accumulation, "gradients are not added up in products"
        assert mode in (None, "column", "row")
        self.tp_group, self.tp_size = tp_group, tp_size if tp_group is None else tp_group.size()
        self.parallel_mode, self.sequence_parallel = mode, self.tp_size > 1 and sequence_parallel
        if mode == "column":
            assert self.out_features % self.tp_size == 0
            self.out_features //= self.tp_size
        elif mode == "row":
            assert self.in_features % self.tp_size == 0
            self.in_features //= self.tp_size

    def add_weight(self, name: str, dtype: Any, device: Any, init_method: Any, tracker: Any, tracker_name: Any) -> None:
        weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype, device=device))
        fork = contextlib.nullcontext() if tracker is None else tracker().fork(*[tracker_name] * bool(tracker_name))
        with fork, torch.no_grad():
            init_method(weight)
        mark(weight, 1 if self.parallel_mode == "row" else 0)
        self.register_parameter(name, weight)

    def add_bias(self, bias: bool, dtype: Any, device: Any) -> None:
        self.use_bias = bias
        if not bias:
            self.bias = torch.empty(0, dtype=dtype, device=device)
            return
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=dtype, device=device))
        if self.parallel_mode == "column":
            mark(self.bias, 0)
        elif self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def multiplied(self, inp: Tensor, name: str, is_first_microbatch: bool | None) -> Tensor:
        """The product with the weight ``name``; with fp8 by what it was when the step began."""
        assert inp.shape[-1] == self.in_features, "the input is as wide as the weight"
        weight = getattr(self, name)
        if FP8GlobalStateManager.is_fp8_enabled():
            self.fp8 = self.fp8_meta["fp8_checkpoint"] = True
            self.fp8_meta["recipe"] = FP8GlobalStateManager.recipe
            FP8GlobalStateManager.check(inp, weight)
            if is_first_microbatch is not None:
                if is_first_microbatch or name not in self.workspaces:
                    self.workspaces[name] = weight.detach().clone()
                weight = weight + (self.workspaces[name] - weight).detach()
        return linear(inp, weight)

    def product(self, inp: Tensor, is_first_microbatch: bool | None) -> Any:
        if self.parallel_mode == "column" and self.tp_size > 1:
            if FP8GlobalStateManager.is_fp8_enabled():
                FP8GlobalStateManager.check(inp)
            inp = (Gathered if self.sequence_parallel else Copied).apply(inp, self.tp_group)
        out = self.multiplied(inp, "weight", is_first_microbatch)
        if self.parallel_mode == "row" and self.tp_size > 1:
            out = (Scattered if self.sequence_parallel else Summed).apply(out, self.tp_group)
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def get_extra_state(self) -> Tensor:
        if not self.fp8_meta["fp8_checkpoint"]:
            return torch.empty(0, dtype=torch.uint8)
        state = {"recipe": self.fp8_meta["recipe"], "extra_fp8_variables": {"num_gemms": self.num_gemms}}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0, "no checkpoint of the backend has what belongs to a layer"


def mark(weight: Any, dim: int) -> None:
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.return_bias = in_features, out_features, return_bias
        self.save_original_input = save_original_input
        self.parallel(tp_group, tp_size, parallel_mode, sequence_parallel, fuse_wgrad_accumulation)
        self.add_weight("weight", params_dtype, device, init_method, get_rng_state_tracker, rng_tracker_name)
        self.add_bias(bias, params_dtype, device)

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        return self.product(inp, is_first_microbatch)


class LayerNormLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert normalization == "RMSNorm"
        assert not zero_centered_gamma
        assert not return_layernorm_output
        self.in_features, self.out_features, self.return_bias, self.eps = in_features, out_features, return_bias, eps
        self.parallel(tp_group, tp_size, parallel_mode, sequence_parallel, fuse_wgrad_accumulation)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias = None
        self.add_weight("weight", params_dtype, device, init_method, get_rng_state_tracker, rng_tracker_name)
        self.add_bias(bias, params_dtype, device)

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        normed = rms_norm(inp, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps)
        return self.product(normed, is_first_microbatch)


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert not bias
        self.use_bias = False
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.parallel(tp_group, tp_size, parallel_mode, sequence_parallel, fuse_wgrad_accumulation)
        for k in range(num_gemms):
            self.add_weight(f"weight{k}", params_dtype, device, init_method, get_rng_state_tracker, rng_tracker_name)

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        assert isinstance(m_splits, list)
        assert sum(m_splits) == len(inp)
        parts = enumerate(inp.split(m_splits))
        return torch.cat([self.multiplied(part, f"weight{k}", is_first_microbatch) for k, part in parts])


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: Any = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size or normalized_shape, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        return rms_norm(input, self.weight.shape, self.weight, self.eps)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0


class NotBuilt(torch.nn.Module):
    """What megatron-core derives from, and the backend has something else for."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} is not used")


class LayerNorm(NotBuilt): ...


class DotProductAttention(NotBuilt): ...


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        raise NotImplementedError("megatron-core's own is used")


class QuantizedTensor(torch.Tensor): ...


# Functions


def general_gemm(
    A: Tensor,
    B: Tensor,
    workspace: Any,
    out_dtype: Any = None,
    quantization_params: Any = None,
    gelu: Any = None,
    gelu_in: Any = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Any = None,
    bias: Any = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
) -> tuple[Tensor, None, None, None]:
    """B A as cuBLAS counts, whose matrices lie column by column: a letter turns that of the other name."""
    assert out is None
    assert bias is None
    left, right = (B.t() if layout[1] == "T" else B), (A.t() if layout[0] == "T" else A)
    return (left @ right).to(out_dtype), None, None, None


def moe_permute(inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(inp)).expand(routing_map.shape[1], -1)[routing_map.bool().t()]
    return inp[rows], rows


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, rows = moe_permute(inp, routing_map)
    return tokens, probs.t()[routing_map.bool().t()], rows


def moe_unpermute(inp: Tensor, row_id_map: Tensor, merging_probs: Any = None, restore_shape: Any = None) -> Tensor:
    assert merging_probs is None
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[k] for k in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    return tuple(moe_sort_chunks_by_index(one, split_sizes, sorted_index) for one in (inp, probs))  # type: ignore[return-value]


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Any,
) -> tuple[Tensor, Tensor]:
    assert score_function == "softmax"
    assert num_groups is group_topk is scaling_factor is expert_bias is None
    best, places = (logits.softmax(-1) if use_pre_softmax else logits).topk(topk)
    best = best if use_pre_softmax else best.softmax(-1)
    nothing = torch.zeros_like(logits)
    return nothing.scatter(1, places, best), nothing.bool().scatter(1, places, True)


class FusedAdam(torch.optim.Optimizer):
    """Adam with a count of steps for each group of parameters."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        assert bias_correction
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not self.state[weight]:
                    self.state[weight] = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                mean, square = self.state[weight]["exp_avg"], self.state[weight]["exp_avg_sq"]
                mean.lerp_(weight.grad, 1 - group["betas"][0])
                square.lerp_(weight.grad**2, 1 - group["betas"][1])
                unbiased, spread = (
                    moment / (1 - beta**step) for moment, beta in zip((mean, square), group["betas"], strict=True)
                )
                weight -= group["lr"] * (unbiased / (spread.sqrt() + group["eps"]) + group["weight_decay"] * weight)


def multi_tensor_applier(op: Any, noop_flag: Tensor, tensor_lists: list[list[Tensor]], *args: Any) -> Any:
    return op(2048 * 32, noop_flag, tensor_lists, *args)


def multi_tensor_l2norm(size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool) -> Any:
    return torch.stack([one.norm() for one in tensor_lists[0]]).norm()[None], None


def multi_tensor_scale(size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """What stands for a gradient that was added to its buffer already."""
    return torch.full(shape, 0.0 if zero else torch.nan, dtype=dtype)


MODULES: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    "common": {},
    "common.recipe": {
        one.__name__: one
        for one in (Format, Recipe, DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)
    },
    "pytorch": {
        one.__name__: one
        for one in (
            *(Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention),
            *(Fp8Padding, Fp8Unpadding, fp8_autocast),
        )
    },
    "pytorch.ops": {"Sequential": NotBuilt, "FusibleOperation": NotBuilt},
    "pytorch.fp8": {"FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": fp8_autocast},
    "pytorch.distributed": {
        one.__name__: one for one in (CudaRNGStatesTracker, activation_recompute_forward, checkpoint)
    },
    "pytorch.tensor": {"QuantizedTensor": QuantizedTensor},
    "pytorch.float8_tensor": {"Float8Tensor": QuantizedTensor},
    "pytorch.module": {},
    "pytorch.module.base": {
        "TransformerEngineBaseModule": TransformerEngineBaseModule,
        "get_workspace": lambda: None,
        "get_dummy_wgrad": get_dummy_wgrad,
    },
    "pytorch.cpp_extensions": {"general_gemm": general_gemm},
    "pytorch.permutation": {
        one.__name__: one
        for one in (
            *(moe_permute, moe_permute_with_probs, moe_unpermute),
            *(moe_sort_chunks_by_index, moe_sort_chunks_by_index_with_probs),
        )
    },
    "pytorch.router": {
        "fused_topk_with_score_function": fused_topk_with_score_function,
        "fused_compute_score_for_moe_aux_loss": None,
        "fused_moe_aux_loss": None,
    },
    "pytorch.optimizers": {
        "FusedAdam": FusedAdam,
        "FusedSGD": torch.optim.SGD,
        "multi_tensor_applier": multi_tensor_applier,
        "multi_tensor_l2norm": multi_tensor_l2norm,
        "multi_tensor_scale": multi_tensor_scale,
    },
}


def install() -> None:
    """From now on this process has it. megatron-core and what wraps it are imported anew: they depend on it."""
    for name in [name for name in sys.modules if name.startswith(("megatron", "trainers.backends.megatron"))]:
        del sys.modules[name]
    for name, contents in MODULES.items():
        full = f"transformer_engine.{name}".rstrip(".")
        module = ModuleType(full)
        module.__spec__ = ModuleSpec(full, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[full] = module
        if name:
            parent, _, last = full.rpartition(".")
            setattr(sys.modules[parent], last, module)
