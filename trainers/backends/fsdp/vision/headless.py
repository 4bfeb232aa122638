"""Models with no part that sees and gives hidden states: their own forward pass, whose head does nothing.

    attach_headless(model)                  # afterwards documents.backbone(model) finds it

Such are the thinkers of models that also speak (``thinker.py``), and Llama 4, whose head is a part of its language
model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

GRIDS = ("image_grid_thw", "video_grid_thw")  # arguments by which pictures get positions of three dimensions


class Headless(torch.nn.Module):
    """What a model answers with below its head, ``lm_head`` of ``holder``."""

    model: Any
    holder: Any

    def __init__(self, model: Any, holder: Any) -> None:
        super().__init__()
        self.__dict__ |= {"model": model, "holder": holder}  # of which this is no copy
        if hasattr(model, "get_rope_index"):
            self.get_rope_index = model.get_rope_index

    def forward(self, **inputs: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        with self._without_head():
            outputs = self.model(**with_positions(self.model, inputs))
        routers = getattr(outputs, "router_logits", None)
        return MoeModelOutputWithPast(last_hidden_state=outputs.logits, router_logits=routers)

    def get_image_features(self, **pixels: Any) -> Any:
        """The tower's outputs; ``pooler_output`` is what the language model takes."""
        outputs = self.model.get_image_features(**pixels)
        if getattr(outputs, "pooler_output", None) is None:  # Llama 4 projects them elsewhere
            outputs.pooler_output = self.model.multi_modal_projector(outputs.last_hidden_state.flatten(0, 1))
        return outputs

    @contextlib.contextmanager
    def _without_head(self) -> Iterator[None]:
        """Inside, logits are what the head would have taken."""
        head = self.holder.lm_head
        self.holder.lm_head = torch.nn.Identity()
        try:
            yield
        finally:
            self.holder.lm_head = head


def attach_headless(model: Any) -> None:
    """Gives a model whose head is in a part of it a ``headless``; others stay as they are."""
    head = model.get_output_embeddings()
    if head is None or hasattr(model, "headless") or model.base_model is not model or hasattr(model, "model"):
        return
    holder = next((part for part in model.children() if getattr(part, "lm_head", None) is head), None)
    if holder is not None:
        model.__dict__["headless"] = Headless(model, holder)


def with_positions(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with the positions of pictures; without a mask a thinker would give them those of text.

    Padding is behind all tokens, whose positions it does not change.
    """
    grids = {name: inputs[name] for name in GRIDS if inputs.get(name) is not None}
    given = ("position_ids", "attention_mask", "past_key_values")
    if not grids or any(inputs.get(name) is not None for name in given):
        return inputs
    ids_BT = inputs["input_ids"]
    positions_3BT, _ = model.get_rope_index(ids_BT, attention_mask=torch.ones_like(ids_BT), **grids)
    return {**inputs, "position_ids": positions_3BT}
