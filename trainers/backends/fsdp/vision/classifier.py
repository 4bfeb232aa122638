"""Sequence classifiers of vision models: the model without its vocabulary, and a linear ``score`` on top of it.

    classifier_class(configuration).from_pretrained(...)      # AutoModelForSequenceClassification, which now knows it

transformers has such a class of few vision models (Gemma 3, Qwen3.5). Of the others one is made in the same way:
transformers' own general classifier over the model. Weights have the names that ms-swift's reward models have.
"""

from __future__ import annotations

from typing import Any

from trainers.backends.fsdp.vision.thinker import thinking_class
from trainers.data.images.processor import is_speaking, is_vision

ENDING = "ForSequenceClassification"


def classifier_class(configuration: Any) -> Any:
    """``AutoModelForSequenceClassification``, which afterwards knows the model if it sees pictures."""
    from transformers import AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    kind: Any = type(configuration)
    if is_vision(configuration) and MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(kind, None) is None:
        made = thinking_class(kind, scores=True) if is_speaking(configuration) else _made_for(kind)
        AutoModelForSequenceClassification.register(kind, made, exist_ok=True)  # kind is transformers' own
    return AutoModelForSequenceClassification


def _made_for(kind: Any) -> Any:
    """A classifier of the models of a configuration class. Its checkpoint has the names of the model's own."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    speaks: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    base = next(one for one in speaks.__mro__[1:] if issubclass(one, PreTrainedModel))
    name = speaks.__name__.removesuffix("ForConditionalGeneration") + ENDING
    # of transformers' module, so that weights are read under the names that its models have
    made = type(name, (GenericForSequenceClassification, base), {"__module__": base.__module__, "config_class": kind})
    if (names := get_checkpoint_conversion_mapping(speaks.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, names, overwrite=True)
    return made
