"""transformers' vision tower of a model: where its features go, and what its weights are called.

    Tower.of(configuration, "Qwen/Qwen2.5-VL-3B-Instruct", frozen=["vit", "aligner"])    # None: the model sees nothing

    pixels --tower--> features ------------> embeddings of the tokens that stand for pictures --> first layer ...
                      deepstack features ------------------------------------------> added behind the first layers

Every worker of the first stage has the whole tower, and sees all pictures of its micro-batches. Other workers know from
it where pictures stand, by which queries and keys are turned.

Of a model that also hears and speaks (Qwen-Omni) it is that of the thinker. The other parts are not built.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rayhelper import ConfigError
from trainers.backends.fsdp.documents import backbone, picture_positions
from trainers.backends.fsdp.optimizer import decayed_names
from trainers.backends.fsdp.vision.parts import Part, linear_layers
from trainers.backends.fsdp.vision.pixels import Vision
from trainers.backends.megatron.architectures import num_later, too_few_layers
from trainers.backends.megatron.attention import Added, looked_up
from trainers.backends.megatron.packing import Pictures
from trainers.backends.megatron.tensors.names import THINKER
from trainers.backends.random_state import zero_dropout
from trainers.backends.scores.inputs import Inputs
from trainers.batch import on_device
from trainers.data.images.processor import is_vision, seeing_part

FROZEN: dict[str, Any] = {"frozen": ["vit", "aligner"]}  # as in ms-swift
FEATURES = ("pooler_output", "deepstack_features")  # of what a tower gives
OF_VIDEOS = ("pixel_values_videos", "video_grid_thw")  # what the tower takes of videos
TIMES = "second_per_grid_ts"  # of videos: the positions alone take it
MODULES = ("visual", "vision_tower", "multi_modal_projector")  # of transformers' models, that make features together


class Tower:
    """The tower of a model with this ``configuration``, without weights until ``build``.

    ``frozen``: parts of the model that do not learn: vit, aligner, llm. ``processing``: arguments of the image
    processor in place of its own; ``videos``: of the video processor. ``rates``: learning rates of parts that have
    their own.
    """

    def __init__(
        self,
        configuration: Any,
        model: str | Path,
        *,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        processing: Mapping[str, Any] | None = None,
        videos: Mapping[str, Any] | None = None,
        frozen: Sequence[Part] = (),
        rates: Mapping[Part, float] | None = None,
    ) -> None:
        from transformers import AutoModelForImageTextToText

        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(seeing_part(configuration), dtype=dtype)
        options: dict[str, Any] = {"processing": processing, "videos": videos, "frozen": frozen, "rates": rates}
        self.vision = Vision(whole, model, trust_remote_code=trust_remote_code, **options)
        part = backbone(whole)
        self.part = part if hasattr(part, "get_image_features") else whole  # a thinker's backbone is blind
        self.inner = f"{THINKER}model." if self.part is whole else "model.language_model."  # of the whole in memory
        self.dtype, self.is_here, self.freezes_language = dtype, False, "llm" in frozen
        weights = {f"model.{name}": weight for name, weight in self.part.named_parameters() if name.startswith(MODULES)}
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.learned = {name for name, weight in weights.items() if weight.requires_grad}

    @classmethod
    def of(cls, configuration: Any, model: str | Path, **options: Any) -> Tower | None:
        """That of a vision model; None for others."""
        return cls(configuration, model, **options) if is_vision(configuration) else None

    @property
    def modules(self) -> dict[str, Any]:
        """The parts of the model that make features of pictures, by their names in it."""
        return {name: getattr(self.part, name) for name in MODULES if hasattr(self.part, name)}

    def build(self) -> dict[str, Any]:
        """The same as modules of the first stage, with weights that are yet to be loaded, and without dropout."""
        for name, empty in self.modules.items():
            with torch.random.fork_rng(devices=[]):
                made = type(empty)(copy.deepcopy(getattr(empty, "config", self.part.config))).to(self.dtype)
            zero_dropout(made)
            for weight, like in zip(made.parameters(), empty.parameters(), strict=True):
                weight.requires_grad_(like.requires_grad)
            setattr(self.part, name, made)
        self.vision.sees_once(self.part)
        self.is_here = True
        return self.modules

    def join(self, stage: Any) -> None:
        """Makes the tower a part of the first stage.

        Raises:
            ConfigError: the stage has too few layers for the features that are added behind them.
        """
        layers = stage.decoder.layers
        if mistake := too_few_layers(self.part.config, len(layers)):
            raise ConfigError(mistake)
        for number in range(num_later(self.part.config)):
            layers[number].register_forward_hook(_adding(number), with_kwargs=True)
        beginning = "" if self.part is self.vision.module else "model."  # of names in the whole
        for part, module in self.build().items():
            setattr(stage, part, module)
            decayed = decayed_names(module)
            for name, weight in module.named_parameters():
                weight.decays, weight.rate = name in decayed, self.vision.rates.get(f"{beginning}{part}.{name}")
                weight.sequence_parallel = stage.config.sequence_parallel  # each worker has those of its own tokens

    def adaptable(self, targets: str | Sequence[str]) -> list[str]:
        """Names of the linear layers of the parts that are not frozen, which an adapter of these ``targets`` is on."""
        parts: list[Part] = [part for part in ("vit", "aligner") if part not in self.vision.frozen]
        beginning = "" if self.part is not self.vision.module else "model."
        names = [f"{beginning}{name}" for name in linear_layers(self.vision.module, parts)]
        if targets in ("all-linear", ["all-linear"]):
            return names
        return [name for name in names if any(f".{name}".endswith(f".{target}") for target in targets)]

    @property
    def has_axes(self) -> bool:
        """Whether tokens of pictures are turned by time, height and width (vision/rotation.py)."""
        return hasattr(self.part, "get_rope_index")

    def positions(self, inputs: Inputs) -> torch.Tensor:
        """(3, B, T) positions of the tokens of documents with pictures: time, height, width."""
        return picture_positions(self.part, inputs).long()

    def features_at(self, ids: torch.Tensor, pixels: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(N,) which feature stands at each of the tokens: those of all pictures, then those of all videos; -1: none.

        Beside these other tokens may mark a picture's ends.
        """
        config, found, start = self.part.config, torch.full_like(ids, -1), 0
        for token in (config.image_token_id, config.video_token_id if OF_VIDEOS[0] in pixels else None):
            is_here = ids == token if token is not None else torch.zeros_like(ids, dtype=torch.bool)
            count = int(is_here.sum())
            found[is_here] = torch.arange(start, start + count, device=ids.device)
            start += count
        return found

    def put_in(
        self, hidden: torch.Tensor, pictures: Pictures | None, spread_over: Any
    ) -> tuple[torch.Tensor, list[Added]]:
        """(S, 1, H) embeddings with features in the places of pictures, and what later layers add.

        ``spread_over``: the group over which the sequence is spread.
        """
        if pictures is None:
            return self._without(hidden), []
        places_V, chosen_V = pictures.places_V, pictures.chosen_V
        if spread_over is not None:
            start = spread_over.rank() * len(hidden)
            own = ((places_V >= start) & (places_V < start + len(hidden))).nonzero().flatten()
            places_V, chosen_V = places_V[own] - start, chosen_V[own]
        own_VH = [found.index_select(0, chosen_V).to(hidden.dtype) for found in self._features(pictures, hidden.device)]
        hidden = hidden.index_copy(0, places_V, own_VH[0][:, None])
        given = own_VH[1:]
        leaves = [one.detach().requires_grad_(one.requires_grad) for one in given]
        if any(one.requires_grad for one in given):
            hidden = _Later.apply(hidden, leaves, *given)  # type: ignore[no-untyped-call]
        return hidden, [Added(places_V, one) for one in leaves]

    def _features(self, pictures: Pictures, device: torch.device) -> list[torch.Tensor]:
        """(N, H) of all pictures and videos, and the same for each of the first layers.

        Raises ValueError for too few tokens.
        """
        pixels = {name: on_device(value, device) for name, value in pictures.pixels.items()}
        videos = {name: pixels[name] for name in OF_VIDEOS if name in pixels}
        images = {name: value for name, value in pixels.items() if name not in (*OF_VIDEOS, TIMES)}
        found = []
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(self.learned)):
            if images:
                found.append(self.part.get_image_features(**images, return_dict=True))
            if videos:
                found.append(self.part.get_video_features(**videos, return_dict=True))
        kinds = [[getattr(one, name, None) for name in FEATURES] for one in found]
        layers = zip(*((first, *(later or ())) for first, later in kinds), strict=True)
        return [torch.cat([features for of_kind in layer for features in of_kind]) for layer in layers]

    def _without(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same embeddings, where weights of the tower learn: they get gradients of zero in every pass."""
        parameters = (weight for module in self.modules.values() for weight in module.parameters())
        learning = [weight for weight in parameters if weight.requires_grad]
        if not learning or not torch.is_grad_enabled():
            return hidden
        nothing = torch.stack([weight.flatten()[0].float() for weight in learning]).sum() * 0.0
        return hidden + nothing.to(hidden.dtype)


class _Later(torch.autograd.Function):
    """Embeddings as they are; in the backward pass what the layers behind them have added to ``leaves`` goes on.

    A layer that is recomputed may not go on into the tower by itself: others still need the tower's graph.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, leaves: Sequence[torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        return (gradients[0], None, *found)


def _adding(number: int) -> Any:
    """What adds the features for layer ``number`` to its output."""

    def add(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        added = looked_up(kwargs["attention_mask"]).added
        if number >= len(added):
            return output
        hidden, *others = output
        places_V, features_VH = added[number]
        return (hidden.index_add(0, places_V, features_VH[:, None]), *others)

    return add


def freeze_language(stage: Any) -> None:
    """Ends the training of all weights but those of the tower."""
    kept = [weight for name, weight in stage.named_parameters() if name.startswith(MODULES) and weight.requires_grad]
    stage.requires_grad_(False)
    for weight in kept:
        weight.requires_grad_(True)
