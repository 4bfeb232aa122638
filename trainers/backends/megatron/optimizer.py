"""megatron-core's gradients and optimizer for the stages of a worker, and transformers' learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from trainers.backends.megatron import patches
from trainers.backends.megatron.settings import MegatronSettings


def with_gradients(stages: Sequence[Any], settings: MegatronSettings) -> list[Any]:
    """The stages with buffers for their gradients, which are summed over workers in float32."""
    patches.forget_reduce_scatter()
    config = stages[0].config
    reduction: dict[str, Any] = {"grad_reduce_in_fp32": True, **settings.ddp_fields}
    chunks = [
        DistributedDataParallel(config, DistributedDataParallelConfig(**reduction), stage, disable_bucketing=k > 0)
        for k, stage in enumerate(stages)
    ]
    config.finalize_model_grads_func = _finalize
    if settings.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    if settings.overlap_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])
    return chunks


def build_optimizer(
    name: str,
    chunks: Sequence[Any],
    settings: MegatronSettings,
    *,
    dtype: torch.dtype,
    learning_rate: float,
    weight_decay: float,
    adam_betas: tuple[float, float],
    adam_epsilon: float,
    max_grad_norm: float,
    kwargs: Mapping[str, Any],
) -> Any:
    """The optimizer of what is trained, ``adamw_torch`` or ``sgd``; biases and norms do not decay.

    ``kwargs``: its further arguments, the ``momentum`` of sgd.
    """
    config = OptimizerConfig(
        optimizer="sgd" if name == "sgd" else "adam",
        lr=learning_rate,
        weight_decay=weight_decay,
        adam_beta1=adam_betas[0],
        adam_beta2=adam_betas[1],
        adam_eps=adam_epsilon,
        sgd_momentum=kwargs.get("momentum", 0.0),
        clip_grad=max_grad_norm,
        bf16=dtype != torch.float32,
        params_dtype=dtype,
        **settings.optimizer_fields,
    )
    overrides = _without_decay(config) | _with_rates(chunks, learning_rate)
    optimizer = get_megatron_optimizer(config, list(chunks), config_overrides=overrides)
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay * group["wd_mult"]  # which the optimizer only notes
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(one.optimizer, torch.optim.AdamW):
            _fuse(one.optimizer)
    return optimizer


def gradient_norm(optimizer: Any) -> float:
    """Of the whole gradient, not clipped yet; every rank calls it. The optimizer's own step may follow."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def build_schedule(
    name: str, *, learning_rate: float, num_warmup_steps: int, num_training_steps: int, kwargs: Mapping[str, Any]
) -> Any:
    """transformers' schedule of that name, on a clock of its own: megatron-core's optimizers are not torch's."""
    from transformers import get_scheduler

    clock = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate)
    return get_scheduler(
        name,
        clock,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_training_steps,
        scheduler_specific_kwargs=dict(kwargs),
    )


def _without_decay(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """As megatron-core has it, biases and what has one dimension; but a weight may say whether it ``decays``."""

    def is_meant(weight: torch.nn.Parameter, name: str) -> bool:
        decays: bool | None = getattr(weight, "decays", None)
        if decays is not None:
            return not decays
        of_heads = "q_layernorm." in name or "k_layernorm." in name
        return (weight.dim() == 1 or name.endswith(".bias")) and not (of_heads and config.apply_wd_to_qk_layernorm)

    key = ParamKey(with_name_predicate=ParamWithNamePredicate(name="no decay", fn=is_meant))
    return {key: ParamGroupOverride(wd_mult=0.0)}


def _with_rates(chunks: Sequence[Any], learning_rate: float) -> dict[ParamKey, ParamGroupOverride]:
    """Weights that have a ``rate`` of their own, such as those of a vision tower: the share of ours is noted."""
    found = {getattr(weight, "rate", None) for chunk in chunks for weight in chunk.parameters()}

    def has(rate: float) -> Any:
        return lambda weight, name: getattr(weight, "rate", None) == rate

    overrides: dict[ParamKey, Any] = {}
    for rate in sorted(one for one in found if one is not None):
        key = ParamKey(with_name_predicate=ParamWithNamePredicate(name=f"rate {rate}", fn=has(rate)))
        overrides[key] = {"lr_mult": rate / learning_rate}
    return overrides


def _fuse(adam: torch.optim.AdamW) -> None:
    """One pass over memory, as ``fsdp/backend.py``; megatron-core builds the form that holds copies of all it steps."""
    for settings in (adam.defaults, *adam.param_groups):
        settings["fused"] = True


def _finalize(model: list[Any], num_tokens: Any = None, **settings: Any) -> None:
    """Gradients are sums: whatever they are to be divided by, the loss was."""
    finalize_model_grads(model, None, **settings)


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
