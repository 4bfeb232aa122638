"""Models that also hear and speak (Qwen-Omni): of them the thinker is trained, which reads, sees and answers in text.

    language_class(configuration).from_pretrained(...)      # the model without its talker

The class made here is transformers' own of the whole model, built without the parts that speak. So weights and the
configuration have the names that the checkpoint has. The parts that speak are written as they were
(``Vision.unread_weights``). A classifier has ``thinker.score`` in place of ``thinker.lm_head``, as in ms-swift.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from trainers.backends.fsdp.vision.headless import Headless, with_positions
from trainers.data.images.processor import is_speaking, is_vision

SPEAKS = (r"^talker\.", r"^token2wav\.", r"^code2wav\.")  # weights of the parts that are not built


def language_class(configuration: Any) -> Any:
    """transformers' class that builds the whole of a model: with its vision tower, if it has one.

    It is one of transformers' ``AutoModel`` classes, which afterwards knows a model that also speaks.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if is_speaking(configuration):
        kind: Any = type(configuration)
        AutoModelForImageTextToText.register(kind, thinking_class(kind), exist_ok=True)
    return AutoModelForImageTextToText if is_vision(configuration) else AutoModelForCausalLM


@cache
def thinking_class(kind: Any, *, scores: bool = False) -> Any:
    """The class of the models of a configuration class that speak; ``scores``: their sequence classifier."""
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    whole: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[kind]

    class Thinking(whole):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = SPEAKS
        # transformers' own also reads voices of the part that speaks
        from_pretrained: Any = classmethod(PreTrainedModel.from_pretrained.__func__)  # type: ignore[attr-defined]

        def __init__(self, config: Any) -> None:
            speaks, config.enable_audio_output = config.enable_audio_output, False
            super().__init__(config)
            config.enable_audio_output = speaks
            self.has_talker = False
            thinker = self.thinker
            thinker.generation_config = GenerationConfig()  # which of the whole model's checkpoint stays with it
            if scores:
                hidden_size = config.get_text_config().hidden_size
                thinker.score = torch.nn.Linear(hidden_size, config.num_labels, bias=False)
                thinker.lm_head = torch.nn.Identity()
            # what ``documents.backbone`` finds; no part of its own
            self.__dict__["headless"] = Headless(thinker, thinker)
            # the layers that are sharded alone: those that every pass runs
            layers = (thinker.visual.blocks[0], thinker.model.layers[0])
            self._no_split_modules = {type(layer).__name__ for layer in layers}

        @property
        def score(self) -> Any:  # where classifiers have it; other models have none
            return self.thinker.score

        def forward(self, **inputs: Any) -> Any:
            return self.thinker(**with_positions(self.thinker, inputs))

        def set_attn_implementation(self, *given: Any, **options: Any) -> None:
            # from the whole, parts within parts would change only once
            self.thinker.set_attn_implementation(*given, **options)

        def get_encoder(self, modality: str | None = None) -> Any:
            return self.thinker.get_encoder(modality)

        def get_decoder(self) -> Any:
            return self.thinker.get_decoder()

        def get_input_embeddings(self) -> Any:
            return self.thinker.get_input_embeddings()

        def set_input_embeddings(self, value: Any) -> None:
            self.thinker.set_input_embeddings(value)

        def get_output_embeddings(self) -> Any:
            return None if scores else self.thinker.get_output_embeddings()

        def set_output_embeddings(self, value: Any) -> None:
            self.thinker.set_output_embeddings(value)

    name = whole.__name__
    Thinking.__name__ = name.replace("ForConditionalGeneration", "ForSequenceClassification") if scores else name
    Thinking.__module__ = whole.__module__  # so that weights are read under the names that its models have
    return Thinking
