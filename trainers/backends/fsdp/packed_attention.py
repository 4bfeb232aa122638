"""Attention over rows of several documents by where the documents begin, instead of by a mask: ``varlen``.

With transformers' ``sdpa`` a mask of T x T entries keeps the documents of a row apart, which no FlashAttention kernel
takes: the time of all T x T pairs is spent, though few of them are within a document. ``varlen`` takes torch's own
FlashAttention kernel for documents of any lengths (``torch.nn.attention.varlen``), forward and backward. Where that
does not run, on a CPU or in float32, the documents are attended to one after the other: same numbers, for debugging.
Rows of a single document, and generation, are attended to as by ``sdpa``. On GPUs and in bfloat16 a model that knows it
is given it unless ``model_init_kwargs`` names another (``prefer``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch

from rayhelper import ConfigError
from trainers.backends.fsdp.patches import tell_single_documents
from trainers.backends.scores.inputs import Inputs
from trainers.data.images.processor import is_vision

NAME = "varlen"
TORCH = torch.torch_version.TorchVersion(torch.__version__)
ASKS_FOR_GROUPS = TORCH >= "2.12"  # fewer heads of keys than of queries: before, the kernel took them unasked
LOW = (torch.bfloat16, torch.float16)  # what the kernel takes
LAYERS = {"full_attention", "sliding_attention"}
Attend = Callable[..., torch.Tensor]


def register() -> None:
    """Lets transformers know ``attn_implementation: varlen``. More than once changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without documents


def packed_arguments(config: Any, inputs: Inputs) -> dict[str, Any]:
    """What a model is called with beside ids and positions, so that it keeps the documents of ``inputs`` apart."""
    if inputs.document_starts is None or config._attn_implementation != NAME:
        return {}
    # transformers hands a mask of four dimensions through to the attention, which needs none: nothing is built
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.input_ids_BT.device)
    return {
        "attention_mask": no_mask,
        "cu_seq_lens_q": inputs.document_starts,
        "cu_seq_lens_k": inputs.document_starts,
        "max_length_q": inputs.longest_document,
        "max_length_k": inputs.longest_document,
    }


@contextlib.contextmanager
def single_documents(inputs: Inputs) -> Iterator[None]:
    """Inside, if every row is one document, transformers does not look on the device whether it is: that would wait."""
    _tell_once()
    known = _are_single.set(inputs.position_ids_BT is None)
    try:
        yield
    finally:
        _are_single.reset(known)


_are_single = ContextVar("_are_single", default=False)  # of this thread: another may have rows of documents


@functools.cache
def _tell_once() -> None:
    tell_single_documents(_are_single.get)


def varlen_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    attend: Attend | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """(B, T, H, D) causal attention within documents, under the signature of transformers' attention functions.

    Keys and values may have fewer heads. ``cu_seq_lens_q``: (documents + 1,) int32, where each document begins among
    the B x T tokens, and their number; None: as ``sdpa``. ``attend``: in place of torch's kernel, or of the loop.

    Raises:
        ValueError: dropout, or what some architectures do to the scores, which the kernel does not know.
    """
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        settings = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window, **others}
        return sdpa_attention_forward(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **settings)
    check_plain(module, dropout, others)
    assert max_length_q is not None, "it comes with where documents begin"
    size = query_BHTD.shape[0], query_BHTD.shape[2]
    # the values' dtype is that of the layer's products; under autocast norms leave queries and keys in float32
    given = (query_BHTD, key_BHTD, value_BHTD)
    query_NHD, key_NHD, value_NHD = (heads.to(value_BHTD.dtype).transpose(1, 2).flatten(0, 1) for heads in given)
    if attend is None:
        # the loop is not to be compiled, a program for every set of lengths; said here, as it imports the compiler
        is_low = value_BHTD.is_cuda and value_BHTD.dtype in LOW
        attend = by_kernel if is_low else torch.compiler.disable(one_by_one)
    mixed_NHD = attend(query_NHD, key_NHD, value_NHD, cu_seq_lens_q, max_length_q, scale=scaling, window=sliding_window)
    return mixed_NHD.unflatten(0, size), None


def check_plain(module: torch.nn.Module, dropout: float, others: Mapping[str, Any], name: str = NAME) -> None:
    """Raises ValueError for dropout, or what some architectures do to the scores, which the kernel does not know."""
    foreign = [key for key in ("softcap", "s_aux", "position_bias") if others.get(key) is not None]
    if dropout or foreign:
        raise ValueError(
            f"{type(module).__name__} has {' and '.join(foreign or ['dropout'])}, which attn_implementation: {name} "
            "does not support. Set another attn_implementation."
        )


def by_kernel(
    query_NHD: torch.Tensor,
    key_NHD: torch.Tensor,
    value_NHD: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """(N, H, D) by torch's FlashAttention kernel: bfloat16 or float16 on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    further: dict[str, Any] = {"enable_gqa": True} if ASKS_FOR_GROUPS else {}
    left = -1 if window is None else window - 1  # tokens behind a query that it looks at
    places = (starts, starts, longest, longest)
    mixed_NHD = varlen_attn(query_NHD, key_NHD, value_NHD, *places, scale=scale, window_size=(left, 0), **further)
    assert isinstance(mixed_NHD, torch.Tensor), "a pair only if it is asked for"
    return mixed_NHD


def one_by_one(
    query_NHD: torch.Tensor,
    key_NHD: torch.Tensor,
    value_NHD: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """(N, H, D) by a loop over documents, on any device and in any dtype."""
    parts = []
    for start, end in pairwise(starts.tolist()):
        query, key, value = (heads[start:end].transpose(0, 1)[None] for heads in (query_NHD, key_NHD, value_NHD))
        mask = None
        if window is not None and end - start > window:
            places = torch.arange(end - start, device=query.device)
            behind = places[:, None] - places
            mask = (behind >= 0) & (behind < window)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)


def prefer(model: Any) -> None:
    """Gives a model ``varlen`` in place of ``sdpa`` if it keeps documents apart by it, with layers in bfloat16."""
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or TORCH < "2.11" or is_vision(model.config):
        return
    model.set_attn_implementation(NAME)
    try:
        with torch.autocast(model.device.type, torch.bfloat16):
            check_model(model, tolerance=5e-2)
    except (ConfigError, RuntimeError):  # the kernel does not take all sizes of heads
        model.set_attn_implementation("sdpa")


@torch.no_grad()
def check_model(model: Any, *, tolerance: float | None = None) -> None:
    """Raises ConfigError for a model with ``attn_implementation: varlen`` that would not keep documents apart by it.

    So the model is asked once for two documents, in one row and apart; they may differ by ``tolerance`` of the largest
    value.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != NAME:
        return
    told = f"model_init_kwargs: attn_implementation: {NAME}"
    if is_vision(model.config):
        raise ConfigError(f"{told} does not support pictures, which {type(model).__name__} reads. Use sdpa.")
    if torch.cuda.is_available() and TORCH < "2.11":
        raise ConfigError(
            f"{told} needs torch 2.11 or newer on a GPU; this is {torch.__version__}. Use sdpa, or update."
        )
    other = sorted(set(getattr(config, "layer_types", None) or ()) - LAYERS)
    if other or getattr(config, "attention_chunk_size", None):
        raise ConfigError(
            f"{told} supports layers of full and of sliding attention; {type(model).__name__} has "
            f"{', '.join(other) or 'attention in chunks'}. Use sdpa."
        )
    device = next(model.parameters()).device
    ids = torch.arange(7, device=device)[None] % config.vocab_size
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]], device=device)
    starts = torch.tensor([0, 4, 7], dtype=torch.int32, device=device)
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    arguments = packed_arguments(config, Inputs(ids, positions, nothing, nothing, starts, 4))
    training = model.training
    model.eval()
    try:
        together = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **arguments)[0]
        apart = [model.base_model(input_ids=part, use_cache=False)[0] for part in ids.split([4, 3], dim=1)]
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{told}: {type(model).__name__} does not run with it ({error}). Use sdpa.") from error
    finally:
        model.train(training)
    wanted = torch.cat(apart, dim=1).float()
    if tolerance is None:
        tolerance = 1e-3 if together.dtype == torch.float32 else 5e-2
    if not bool((together.float() - wanted).abs().max() <= tolerance * wanted.abs().max()):
        raise ConfigError(f"{told}: {type(model).__name__} does not separate documents with it. Use sdpa.")
