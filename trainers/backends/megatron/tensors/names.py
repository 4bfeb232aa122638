"""How weights are called in checkpoints of models that also see, and here: as those of a language model alone.

layers.0.mlp.gate_proj.weight                   here model.layers.0.mlp.gate_proj.weight
thinker.model.layers.0.mlp.gate_proj.weight     here model.layers.0.mlp.gate_proj.weight
visual.merger.mlp.0.weight                      here model.visual.merger.mlp.0.weight
"""

from __future__ import annotations

from collections.abc import Mapping

SIGHT = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")  # parts that make features of pictures
LANGUAGE, HEAD = "model.", "lm_head."
BEGINNINGS = {  # of names in a checkpoint, and what stands here in their place
    "model.language_model.": LANGUAGE,
    "thinker.model.": LANGUAGE,  # of models that also speak
    "language_model.model.": LANGUAGE,
    "thinker.lm_head.": HEAD,
    "language_model.lm_head.": HEAD,
    "visual.": SIGHT[0],
    "thinker.visual.": SIGHT[0],
    "vision_tower.": SIGHT[1],
    "multi_modal_projector.": SIGHT[2],
    "language_model.": LANGUAGE,  # behind those that begin so too
    "": LANGUAGE,
}
BARE = ("layers.", "embed_tokens.", "norm.")  # names in a checkpoint of a model without a head, as AutoModel writes it
BESIDE = ("mtp.", "thinker.audio_tower.", "talker.", "token2wav.", "code2wav.")  # that no worker has
THINKER = "thinker."


def beginning_of(name: str) -> str | None:
    """Which of ``BEGINNINGS`` a name in a checkpoint has; None: it is called here as it is there."""
    named = next((beginning for beginning in BEGINNINGS if beginning and name.startswith(beginning)), None)
    return "" if named is None and name.startswith(BARE) else named


def canonical(name: str) -> str:
    """The name in a checkpoint of a language model alone; of what sees the one that begins with one of ``SIGHT``."""
    beginning = beginning_of(name)
    return name if beginning is None else name.replace(beginning, BEGINNINGS[beginning], 1)


def outer(name: str, beginnings: Mapping[str, str]) -> str:
    """What ``canonical`` made the name of; ``beginnings``: of the checkpoint, by what stands here in their place."""
    own = next((own for own in (*SIGHT, HEAD, LANGUAGE) if name.startswith(own)), None)
    return name if own is None else name.replace(own, beginnings.get(own, own), 1)
