"""How a model is called so that the documents of a row see only themselves, and whether any way of calling does it.

    positions   position ids that start over with every document: transformers makes the mask of them
    lengths     beside that where documents begin, for kernels of recurrent and convolution layers
                (flash-linear-attention, causal-conv1d); all rows become one
    masks       beside that the mask of each kind of layer, for models that do not make it of the positions (gpt-oss)

A model is asked once, as it is built: for two documents, in one row and apart. Layers with a state run on from document
to document unless a kernel for them is told; without these kernels the row is refused.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args

import torch

from rayhelper import ConfigError
from trainers.backends.fsdp.packed_attention import packed_arguments
from trainers.backends.scores.inputs import Inputs, Seen

Way = Literal["positions", "lengths", "masks"]
LENGTHS = (9, 8)  # tokens of the two documents that a model is asked for
PICTURE_MARKS = ("mm_token_type_ids", "token_type_ids")  # how models call the marks of a picture's tokens
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the norm of what the documents give apart
LOW_TOLERANCE = 5e-2


def backbone(model: Any) -> Any:
    """The part of a language model that gives hidden states; None if there is none that can be called."""
    base = getattr(model, "headless", model.base_model)  # of one that also speaks (``vision/thinker.py``)
    if base is model:  # Llama 4, whose prefix names no part; or a model without a head, which is the whole
        base = getattr(model, "model", None if model.get_output_embeddings() is not None else model)
    return base if isinstance(base, torch.nn.Module) else None


def model_arguments(model: Any, inputs: Inputs, way: Way | None) -> dict[str, Any]:
    """What the model is called with.

    Raises:
        ConfigError: rows hold several documents, and the model has no way to keep them apart.
    """
    config = model.config.get_text_config()
    if inputs.sees_BTT is not None:
        mask = inputs.sees_BTT[:, None]
        return {"input_ids": inputs.input_ids_BT, "position_ids": inputs.position_ids_BT, "attention_mask": mask}
    arguments = {"input_ids": inputs.input_ids_BT, **packed_arguments(config, inputs)}
    if inputs.seen is not None:
        arguments |= picture_arguments(model, inputs.seen)
    if inputs.position_ids_BT is None:
        return arguments
    if way is None:
        raise ConfigError(refusal(model))
    arguments["position_ids"] = positions_of(model, inputs)
    if way == "lengths":
        arguments |= _lengths(inputs)
    elif way == "masks":
        arguments["attention_mask"] = _masks(model, config, inputs)
    return arguments


def picture_arguments(model: Any, seen: Seen) -> dict[str, Any]:
    """The pixels, and which tokens stand for pictures, by the names that the model gives them."""
    taken = inspect.signature(backbone(model).forward).parameters
    marks = next((name for name in PICTURE_MARKS if name in taken), None)
    return seen.pixels | ({} if marks is None else {marks: seen.kind_BT})


def positions_of(model: Any, inputs: Inputs) -> torch.Tensor:
    """(B, T) positions within documents.

    Of a model whose positions have three dimensions where there are pictures (M-RoPE, arXiv 2409.12191) (4, B, T):
    before these the positions by which transformers keeps documents apart. The model itself says where its pictures
    lie; it is asked for each document alone.
    """
    positions_BT = inputs.position_ids_BT
    assert positions_BT is not None
    part = backbone(model)
    if not hasattr(part, "get_rope_index"):
        return positions_BT
    if inputs.seen is None:
        return positions_BT.expand(4, -1, -1)
    return torch.cat([positions_BT[None], picture_positions(part, inputs)])


def picture_positions(part: Any, inputs: Inputs) -> torch.Tensor:
    """(3, B, T) positions within documents that have pictures, as ``part`` says: a backbone that knows M-RoPE."""
    assert inputs.document_starts is not None
    assert inputs.seen is not None
    lengths_D = inputs.document_starts.diff()
    places_L = torch.arange(inputs.longest_document, device=lengths_D.device)
    is_there_DL = places_L < lengths_D[:, None]
    ids_DL = torch.zeros_like(is_there_DL, dtype=torch.long)
    marks_DL = torch.zeros_like(ids_DL)
    ids_DL[is_there_DL], marks_DL[is_there_DL] = inputs.input_ids_BT.flatten(), inputs.seen.kind_BT.flatten()
    taken = inspect.signature(part.get_rope_index).parameters
    grids = {name: value for name, value in inputs.seen.pixels.items() if name in taken}  # of videos their times too
    marks = {"mm_token_type_ids": marks_DL} if "mm_token_type_ids" in taken else {}
    positions_3DL, _ = part.get_rope_index(input_ids=ids_DL, attention_mask=is_there_DL.long(), **marks, **grids)
    positions_3BT: torch.Tensor = positions_3DL[:, is_there_DL].unflatten(1, tuple(inputs.input_ids_BT.shape))
    return positions_3BT


def refusal(model: Any) -> str:
    """Why rows of several documents are refused, and what to do."""
    return (
        f"{type(model).__name__} does not separate the documents of one row here: one document would change the "
        "numbers of another. Set packing: false and padding_free: false. (Recurrent and convolution layers need the "
        "kernels of flash-linear-attention and causal-conv1d, or mamba-ssm, on a GPU.)"
    )


@torch.no_grad()
def way_of(model: Any) -> Way | None:
    """The first way by which two documents in one row give what they give apart; None: there is none."""
    part = backbone(model)
    config = model.config.get_text_config()
    if part is None or "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return None  # Llama 4 counts its chunks from the beginning of the row, and they are longer than LENGTHS
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, sum(LENGTHS)), generator=random).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    starts = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32, device=device)
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    inputs = Inputs(ids, positions, nothing, nothing, starts, max(LENGTHS))
    modes = [(layer, layer.training) for layer in model.modules()]
    model.eval()
    try:
        apart = torch.cat([part(input_ids=one, use_cache=False)[0] for one in ids.split(LENGTHS, dim=1)], dim=1)
        return next((way for way in get_args(Way) if _is_way(part, model, inputs, way, apart)), None)
    finally:
        for layer, training in modes:
            layer.training = training


def _is_way(part: Any, model: Any, inputs: Inputs, way: Way, apart_1TH: torch.Tensor) -> bool:
    try:
        together_1TH = part(**model_arguments(model, inputs, way), use_cache=False)[0]
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError, ImportError):
        return False  # it cannot be called like that
    wanted_1TH = apart_1TH.float()
    tolerance = TOLERANCE.get(together_1TH.dtype, LOW_TOLERANCE)
    away_T = (together_1TH.float() - wanted_1TH).norm(dim=-1)[0]
    return bool((away_T <= tolerance * wanted_1TH.norm(dim=-1)[0]).all())


def _lengths(inputs: Inputs) -> dict[str, Any]:
    assert inputs.document_starts is not None
    assert inputs.position_ids_BT is not None
    ids_1N, positions_1N = inputs.input_ids_BT.reshape(1, -1), inputs.position_ids_BT.reshape(1, -1)
    return {
        "input_ids": ids_1N,
        "position_ids": positions_1N,
        "seq_idx": ((positions_1N == 0).cumsum(-1) - 1).to(torch.int32),
        "cu_seq_lens_q": inputs.document_starts,
        "cu_seq_lens_k": inputs.document_starts,
        "max_length_q": inputs.longest_document,
        "max_length_k": inputs.longest_document,
    }


def _masks(model: Any, config: Any, inputs: Inputs) -> dict[str, Any]:
    from transformers import masking_utils

    shape = (*inputs.input_ids_BT.shape, 1)
    given: dict[str, Any] = {
        "config": config,
        "inputs_embeds": torch.empty(shape, dtype=model.dtype, device=inputs.input_ids_BT.device),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": inputs.position_ids_BT,
    }
    makers: dict[str, Any] = {
        "full_attention": masking_utils.create_causal_mask,
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
    }
    return {kind: makers[kind](**given) for kind in set(config.layer_types)}
