"""What the layers of a model are made of: TransformerEngine's parts where they are installed, or megatron-core's own.

Either way attention is that of ``attention.py``: it knows documents in a row, also where their tokens are spread over
workers, in one way for both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

TRANSFORMER_ENGINE, LOCAL = "transformer_engine", "local"  # values of megatron-core's field transformer_impl
OLDEST = "2.7.0"  # of TransformerEngine, that has what the fields below ask for
FP8_FIELDS = (
    *("fp8", "fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    *("disable_parameter_transpose_cache", "moe_router_padding_for_quantization"),
)
ENGINE_FIELDS = (*FP8_FIELDS, "moe_permute_fusion", "moe_router_fusion")  # that TransformerEngine's layers alone read
RECIPES = ("tensorwise", "blockwise", "mxfp8")


def why_no_engine() -> str | None:
    """Why this process cannot have TransformerEngine's layers, as the end of a sentence; None: it can."""
    if importlib.util.find_spec(TRANSFORMER_ENGINE) is None:
        return "TransformerEngine is not installed"
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.utils import get_te_version, is_te_min_version

    if not HAVE_TE:
        return "megatron-core cannot import the TransformerEngine that is installed"
    if not is_te_min_version(OLDEST):
        return f"TransformerEngine {get_te_version()} is installed, which is older than {OLDEST}"
    return None


def implementation(further: Mapping[str, Any], *, own_only: bool) -> str:
    """``TRANSFORMER_ENGINE`` or ``LOCAL``: what ``further`` fields say, else the former where it can be had.

    ``own_only``: megatron-core's own layers are wanted. An adapter stands beside these: TransformerEngine's have norms
    inside, and it needs what these give. Gated delta-rule layers and their attention are made of these too.
    """
    given: str | None = further.get("transformer_impl")
    if given is not None:
        return given
    return LOCAL if own_only or why_no_engine() else TRANSFORMER_ENGINE


def engine_mistake(further: Mapping[str, Any], *, has_adapter: bool) -> str | None:
    """What is wrong with the choice of layers in ``further``, and with fields that are not as they are by default."""
    chosen = further.get("transformer_impl")
    if chosen not in (None, TRANSFORMER_ENGINE, LOCAL):
        return f"transformer_impl must be {TRANSFORMER_ENGINE} or {LOCAL}, got {chosen!r}."
    asked = [name for name in ENGINE_FIELDS if name in further]
    if chosen == TRANSFORMER_ENGINE:
        asked.append(f"transformer_impl: {chosen}")
    if not asked:
        return None
    reason = why_no_engine()
    if chosen == LOCAL:
        reason = f"transformer_impl is {LOCAL}"
    elif has_adapter:
        reason = "an adapter is added to megatron-core's own layers"
    if reason is not None:
        return f"{asked[0]} needs layers of TransformerEngine, but {reason}. Remove it{as_there(asked[0])}."
    of_fp8 = [name for name in FP8_FIELDS if name in further]
    return _fp8_mistake(further, of_fp8[0]) if of_fp8 else None


def as_there(name: str) -> str:
    """How ms-swift says a field of fp8, for the end of a sentence."""
    return " (of ms-swift: fp8_format, fp8_recipe)" if name in FP8_FIELDS else ""


def _fp8_mistake(further: Mapping[str, Any], first: str) -> str | None:
    form, recipe = further.get("fp8"), further.get("fp8_recipe", "delayed")
    if form is None:
        return f"{first} is of fp8. Also write fp8: hybrid, or remove it."
    if recipe not in RECIPES:
        return (
            f"with fp8, fp8_recipe must be one of {', '.join(RECIPES)}; it is {recipe!r}. (The default of "
            "megatron-core is delayed, which scales by earlier values. Then scores would depend on these values, and "
            "checkpoints do not store them.)"
        )
    return None


def fp8_rows(further: Mapping[str, Any]) -> int:
    """What rows and columns of matrices must be a multiple of to be multiplied in fp8; without fp8 of nothing, 1."""
    if not further.get("fp8"):
        return 1
    return 32 if further.get("fp8_recipe") == "mxfp8" else 16
