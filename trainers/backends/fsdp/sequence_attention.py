"""Attention over rows that several ranks share: ``sequence_parallel_size`` (DeepSpeed-Ulysses, arXiv 2309.14509).

    each of N ranks:  its tokens, all heads  --all-to-all-->  all tokens, its heads  --attention-->
                      all tokens, its heads  --all-to-all-->  its tokens, all heads

Rank r has the r-th of N equal parts of every row. All that a model does beside attention, it does token by token. So
this file is all that has to do with other ranks, beside the sum of scores in ``scores/scorer.py``. What attention must
know of whole rows travels as an argument through the model, because gradient checkpointing calls a layer once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rayhelper import ConfigError
from trainers.backends.fsdp.documents import LOW_TOLERANCE, TOLERANCE, backbone
from trainers.backends.fsdp.packed_attention import (
    LAYERS,
    LOW,
    by_kernel,
    check_plain,
    one_by_one,
    prefer,
    varlen_attention,
)
from trainers.backends.fsdp.packed_attention import NAME as VARLEN
from trainers.backends.scores.inputs import Inputs, Part
from trainers.backends.scores.sums import total

NAME = "sequence_parallel"
KEY = "sequence_parallel_size"
RECURRENT = ("linear_num_value_heads", "mamba_d_state", "mamba_d_conv", "ssm_state_size", "state_size", "conv_L_cache")
SINKS = ("gpt_oss",)  # models whose attention has a weight per head that no token has
LOOKS_AT_LENGTH = ("dynamic", "longrope")  # rotary embeddings that change with the longest position of a call


@dataclass(frozen=True, eq=False)
class SequenceRanks:
    """The ranks that share this rank's rows: ``size`` consecutive ones, of which this is the ``index``-th."""

    group: dist.ProcessGroup
    index: int
    size: int
    takes_kernel: bool  # documents by torch's FlashAttention kernel, as in ``packed_attention.py``

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """What a model is called with for this rank's part of the rows."""
        # transformers hands a mask of four dimensions through to the attention, which needs none: nothing is built
        no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.input_ids_BT.device)
        return {
            "input_ids": inputs.input_ids_BT,
            "position_ids": inputs.position_ids_BT,
            "attention_mask": no_mask,
            "shared_rows": SharedRows(self, inputs.document_starts, inputs.longest_document),
        }

    def of_all(self, values_M: torch.Tensor, part: Part) -> torch.Tensor:
        """(N, ...) the numbers of the targets of all ranks, from those of this rank's own."""
        shape = (part.num_targets, *values_M.shape[1:])
        return total(values_M.new_zeros(shape).index_copy(0, part.targets_M, values_M), self.group)


@dataclass(frozen=True, eq=False)
class SharedRows:
    """What attention must know of rows of which each rank has a part."""

    ranks: SequenceRanks
    starts: torch.Tensor | None  # where documents begin, in the whole flattened (B, T); None: every row is a document
    longest: int  # tokens of a document


def share_rows(model: Any, size: int) -> SequenceRanks:
    """Lets ``size`` consecutive ranks share the rows that the model is called with. Every rank calls it.

    Raises:
        ConfigError: the ranks cannot be grouped so, or the model would give other numbers. It is asked once.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks % size:
        raise ConfigError(
            f"{KEY} {size} does not divide the {num_ranks} workers of the role. Start a multiple of {size} workers."
        )
    for mistake in sequence_mistakes(model.config, size):
        raise ConfigError(mistake)
    _register()
    group, _ = dist.new_subgroups(size)
    assert group is not None, "every rank is in a group of its own"
    config = model.config.get_text_config()
    try:
        if config._attn_implementation != VARLEN and model.device.type == "cuda":
            model.set_attn_implementation("sdpa")
            prefer(model)
        takes_kernel = config._attn_implementation == VARLEN
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise ConfigError(_refusal(model, str(error))) from error
    ranks = SequenceRanks(group, dist.get_rank() % size, size, takes_kernel)
    _check_model(model, ranks)
    return ranks


def sequence_mistakes(configuration: Any, size: int) -> Iterator[str]:
    """Why ranks cannot share the rows of a model of transformers with this configuration, each with a remedy."""
    remedy = f"Set {KEY}: 1"
    config = configuration.get_text_config()
    name = getattr(configuration, "model_type", "the model")
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        yield f"{KEY} {size}: the configuration of {name} has no number of attention heads. {remedy}."
    elif heads % size:
        sizes = ", ".join(str(one) for one in range(1, heads + 1) if heads % one == 0)
        yield f"{KEY} {size} does not divide the {heads} attention heads of the model. Choose among {sizes}."
    towers = [key for key in ("vision_config", "audio_config") if getattr(configuration, key, None) is not None]
    if towers:
        yield f"{KEY} {size}: {name} has a {towers[0]}, but workers share only rows of text. {remedy}."
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - LAYERS)
    states = [key for key in RECURRENT if getattr(config, key, None) is not None]
    if kinds or states:
        yield (
            f"{KEY} {size}: layers of {name} have a state or chunks ({', '.join(kinds + states)}), which ranks do not "
            f"share. {remedy}."
        )
    for key in ("attention_chunk_size", "attn_logit_softcapping", "alibi"):
        if getattr(config, key, None):
            yield f"{KEY} {size}: the attention of {name} has {key}, which is not supported. {remedy}."
    if name in SINKS:
        yield f"{KEY} {size}: the attention of {name} has sinks, which are not supported. {remedy}."
    types = sorted(set(_rope_types(config)) & set(LOOKS_AT_LENGTH))
    if types:
        yield (
            f"{KEY} {size}: the rotary embedding of {name} is of type {types[0]}, which changes with the length of the "
            f"whole row. Choose another rope_type, or set {KEY}: 1."
        )


def _rope_types(config: Any) -> Iterator[str]:
    for key in ("rope_parameters", "rope_scaling"):
        found = getattr(config, key, None)
        if isinstance(found, dict):  # of all layers, or of each kind of layer
            for one in (found, *(value for value in found.values() if isinstance(value, dict))):
                yield str(one.get("rope_type", one.get("type", "")))


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, sequence_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls with whole rows, such as an engine's


def sequence_attention(
    module: torch.nn.Module,
    query_BHLD: torch.Tensor,
    key_BHLD: torch.Tensor,
    value_BHLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    shared_rows: SharedRows | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """(B, L, H, D) causal attention of this rank's tokens to all before them, also of other ranks.

    Keys and values may have fewer heads; they are repeated where there are too few of them for all ranks. Without
    ``shared_rows``: as ``varlen``, of rows that are whole.

    Raises:
        ValueError: as ``varlen_attention``, or attention that is not causal.
    """
    given = (query_BHLD, key_BHLD, value_BHLD)
    if shared_rows is None:
        settings = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window, **others}
        return varlen_attention(module, *given, attention_mask, **settings)
    check_plain(module, dropout, others, NAME)
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} attends to later tokens. Set {KEY}: 1.")
    ranks = shared_rows.ranks
    copies = ranks.size // math.gcd(ranks.size, key_BHLD.shape[1])
    if copies > 1:
        given = (query_BHLD, key_BHLD.repeat_interleave(copies, 1), value_BHLD.repeat_interleave(copies, 1))
    # the values' dtype is that of the layer's products; under autocast norms leave queries and keys in float32
    alike = (heads.to(value_BHLD.dtype) for heads in given)
    query_BHTD, key_BHTD, value_BHTD = _Exchange.apply(ranks, True, *alike)  # type: ignore[no-untyped-call]
    rows, length = query_BHTD.shape[0], query_BHTD.shape[2]
    if shared_rows.starts is None and (sliding_window is None or length <= sliding_window):
        mixed_BHTD = torch.nn.functional.scaled_dot_product_attention(
            query_BHTD, key_BHTD, value_BHTD, is_causal=True, scale=scaling, enable_gqa=True
        )
    else:
        starts, longest = shared_rows.starts, shared_rows.longest
        if starts is None:
            starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=value_BHLD.device)
            longest = length
        is_low = value_BHLD.is_cuda and value_BHLD.dtype in LOW
        attend = by_kernel if ranks.takes_kernel and is_low else one_by_one
        query_NHD, key_NHD, value_NHD = (
            heads.transpose(1, 2).flatten(0, 1) for heads in (query_BHTD, key_BHTD, value_BHTD)
        )
        mixed_NHD = attend(query_NHD, key_NHD, value_NHD, starts, longest, scale=scaling, window=sliding_window)
        mixed_BHTD = mixed_NHD.unflatten(0, (rows, length)).transpose(1, 2)
    (mixed_BHLD,) = _Exchange.apply(ranks, False, mixed_BHTD)  # type: ignore[no-untyped-call]
    return mixed_BHLD.transpose(1, 2), None


class _Exchange(torch.autograd.Function):
    """Each rank gives tokens and gets heads, (B, H, L, D) to (B, H/N, T, D), or the other way; the gradient returns."""

    @staticmethod
    def forward(ctx: Any, ranks: SequenceRanks, to_heads: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.to_heads = ranks, to_heads
        return _exchanged(ranks, to_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *_exchanged(ctx.ranks, not ctx.to_heads, gradients)


def _exchanged(ranks: SequenceRanks, to_heads: bool, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """All tensors by a single all-to-all. The pieces for rank r, or from it, are the r-th heads or the r-th tokens."""
    given, got = (1, 2) if to_heads else (2, 1)  # dimension that is cut here, and that is joined
    pieces = [torch.stack(tensor.chunk(ranks.size, dim=given)) for tensor in tensors]
    sent = torch.cat([piece.flatten(1) for piece in pieces], dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    parts = received.split([piece[0].numel() for piece in pieces], dim=1)
    shaped = (part.reshape(piece.shape) for part, piece in zip(parts, pieces, strict=True))
    return tuple(torch.cat(part.unbind(), dim=got) for part in shaped)


@torch.no_grad()
def _check_model(model: Any, ranks: SequenceRanks) -> None:
    """Raises ConfigError on every rank for a model that gives other numbers where ranks share rows.

    The row has two documents, and then one; whole rows are attended to as by ``sdpa``.
    """
    device = next(model.parameters()).device
    length = 6 * ranks.size
    cuts = [length - 5, 5]
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, length), generator=random).to(device)
    positions = torch.arange(length)[None].to(device)
    starts = torch.tensor([0, cuts[0], length], dtype=torch.int32, device=device)
    within = torch.cat([torch.arange(cut) for cut in cuts])[None].to(device)
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    own = slice(ranks.index * length // ranks.size, (ranks.index + 1) * length // ranks.size)
    part, mistake = backbone(model), ""
    modes = [(layer, layer.training) for layer in model.modules()]
    model.eval()
    try:
        if part is None:
            raise ValueError("it has no backbone that can be called separately")
        for whole_ids, inputs in (
            ([ids], Inputs(ids[:, own], positions[:, own], nothing, nothing)),
            (ids.split(cuts, dim=1), Inputs(ids[:, own], within[:, own], nothing, nothing, starts, max(cuts))),
        ):
            wanted = torch.cat([part(input_ids=one, use_cache=False)[0] for one in whole_ids], dim=1)[0, own]
            found = part(**ranks.arguments(inputs), use_cache=False)[0][0]
            tolerance = TOLERANCE.get(found.dtype, LOW_TOLERANCE)
            away = (found.float() - wanted.float()).norm(dim=-1)
            if not bool((away <= tolerance * wanted.float().norm(dim=-1)).all()):
                mistake = "one process gives other numbers"
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError, ImportError) as error:
        mistake = f"{type(error).__name__}: {error}"
    finally:
        for layer, training in modes:
            layer.training = training
    failed = torch.tensor(float(bool(mistake)), device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=ranks.group)
    if failed:
        raise ConfigError(_refusal(model, mistake or "another worker found other numbers"))


def _refusal(model: Any, why: str) -> str:
    return f"{KEY}: {type(model).__name__} does not run with rows that workers share ({why}). Set {KEY}: 1."
