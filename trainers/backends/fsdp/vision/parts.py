"""The parts of a vision model: which weights are of the vision tower, the aligner, the language model and a head.

    part_of(module)                                # {"model.visual.patch_embed.proj.weight": "vit", ...}
    freeze(module, ["vit", "aligner"])

transformers says itself what the tower and the language model are. What is of neither is of the aligner, and so are
the mergers that the Qwen models have at the end of their towers: as in ms-swift's ``swift/model/model_arch.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from trainers.backends.fresh_weights import VALUE_HEAD
from trainers.backends.fsdp.vision.thinker import language_class
from trainers.data.images.processor import is_vision

Part = Literal["vit", "aligner", "llm", "head"]  # head: of a sequence classifier; it always learns
VISUAL: tuple[Part, ...] = ("vit", "aligner")  # that an adapter's modules_to_save may name
MERGERS = ("merger", "merger_list", "deepstack_merger_list")  # parts of a tower
PROJECTIONS = ("proj", "proj1", "proj2")  # of a tower that hears, likewise


def part_of(module: Any) -> dict[str, Part]:
    """The part that each weight of the model is of, by its name in memory."""
    towers = [(module.get_encoder(modality="image"), MERGERS)]
    hearing = module.get_encoder(modality="audio")  # without one it is the model itself
    if hearing not in (module, getattr(module, "thinker", None)):
        towers.append((hearing, PROJECTIONS))
    language = [module.get_decoder(), module.get_input_embeddings(), module.get_output_embeddings()]
    of_language = {id(weight) for part in language if part is not None for weight in part.parameters()}
    mergers = [part for tower, names in towers for name, part in tower.named_children() if name in names]
    of_mergers = {id(weight) for part in mergers for weight in part.parameters()}
    of_tower = {id(weight) for tower, _ in towers for weight in tower.parameters()} - of_mergers

    def part(name: str, weight: torch.Tensor) -> Part:
        if name in (VALUE_HEAD, f"thinker.{VALUE_HEAD}"):
            return "head"
        return "llm" if id(weight) in of_language else "vit" if id(weight) in of_tower else "aligner"

    return {name: part(name, weight) for name, weight in module.named_parameters(remove_duplicate=False)}


def freeze(module: Any, frozen: Iterable[Part]) -> None:
    """The weights of these parts do not learn."""
    kept = set(frozen)
    parts = part_of(module)
    for name, weight in module.named_parameters(remove_duplicate=False):
        if parts[name] in kept:
            weight.requires_grad_(False)


def modules_of(module: Any, of: Iterable[Part]) -> list[str]:
    """The names of the outermost modules whose weights are all of these parts.

    Raises:
        ValueError: a weight of these parts is in no such module.
    """
    kept, parts = set(of), part_of(module)
    left = {name for name, part in parts.items() if part in kept}
    found = []
    for name, _ in module.named_modules():
        inside = {weight for weight in parts if weight.startswith(f"{name}.")}
        if inside and inside <= left:
            found.append(name)
            left -= inside
    if left:
        raise ValueError(
            f"{sorted(left)[0]} of the {' and '.join(sorted(kept))} is in a module that also holds other parts"
        )
    return found


def linear_layers(module: Any, of: Iterable[Part]) -> list[str]:
    """The names of the linear layers of these parts."""
    kept, parts = set(of), part_of(module)
    layers = [(name, part) for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)]
    return [name for name, _ in layers if parts[f"{name}.weight"] in kept]


def counted(folder: str) -> dict[Part, tuple[int, tuple[tuple[str, int, int], ...]]] | None:
    """How many parameters each part of a folder's model has, and the ends of the names and the sizes of its linear
    layers; None for a model that sees nothing, or that transformers itself does not build.

    No weights are read.
    """
    from transformers import AutoConfig

    try:
        configuration = AutoConfig.from_pretrained(folder)
        if not is_vision(configuration):
            return None
        with torch.device("meta"):
            module = language_class(configuration).from_config(configuration)
        parts = part_of(module)
    except (ValueError, KeyError, OSError, AttributeError, ImportError):  # ImportError: a tower of a further package
        return None
    weights = dict(module.named_parameters())
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}

    def sizes(part: Part) -> tuple[int, tuple[tuple[str, int, int], ...]]:
        own = [name for name in linear_layers(module, [part]) if part != "llm"]
        linear = [(name.rpartition(".")[2], layers[name].in_features, layers[name].out_features) for name in own]
        return sum(weight.numel() for name, weight in weights.items() if parts[name] == part), tuple(linear)

    return {"vit": sizes("vit"), "aligner": sizes("aligner"), "llm": sizes("llm")}
