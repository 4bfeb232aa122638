"""A transformers model as backends and engines share it: built, read, written, and its weights by name.

A model in memory and its checkpoint may differ in names and shapes (experts are stacked here and single there). Outside
this file weights always go by the names of the checkpoint, which is what other engines and tools know.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from rayhelper import ConfigError
from trainers.backends.fresh_weights import VALUE_HEAD, value_head
from trainers.backends.fsdp import packed_attention
from trainers.backends.fsdp.sharding import as_placed
from trainers.backends.fsdp.tuners.adapters import own_weights, trained_names
from trainers.backends.fsdp.tuners.quantized import compute_alike, loading_arguments, quantized_layers, written_whole
from trainers.backends.fsdp.vision.classifier import classifier_class
from trainers.backends.fsdp.vision.headless import attach_headless
from trainers.backends.fsdp.vision.thinker import language_class
from trainers.backends.model_files import file_mistake, safetensors_files
from trainers.data.images.processor import is_vision

ModelHead = Literal["lm", "value", "embedding"]
HEADS = {VALUE_HEAD, f"thinker.{VALUE_HEAD}"}  # of a classifier that is read from a language model
STACK = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")

logger = logging.getLogger(__name__)


def build_model(
    model: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    head: ModelHead = "lm",
    num_labels: int = 1,
    model_init_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    quantization: Mapping[str, Any] | None = None,
) -> Any:
    """The causal language model of a folder or hub name, with its vision tower if it has one, or a sequence classifier
    (``value``), or a model without a head (``embedding``).

    A classifier has ``num_labels`` labels. It may be read from a language model; its head is then drawn
    (``fresh_weights.py``). ``quantization``: fields of transformers' BitsAndBytesConfig (see ``tuners/quantized.py``).
    """
    from transformers import AutoConfig, AutoModel

    packed_attention.register()
    settings = {"dtype": dtype, "trust_remote_code": trust_remote_code, **dict(model_init_kwargs or {})}
    if quantization:
        settings |= loading_arguments(quantization, dtype, device)
    configuration = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    if head == "value":
        # of a vision model it is a field of the part that reads text: there its ``forward`` looks for the last token
        pad_token_id = settings.pop("pad_token_id", None) if is_vision(configuration) else None
        built, missing = _without_report(classifier_class(configuration), model, num_labels=num_labels, **settings)
        if pad_token_id is not None:
            built.config.get_text_config().pad_token_id = pad_token_id
        if HEADS & missing:
            head_KH = built.score.weight.data
            std = built.config.get_text_config().initializer_range
            head_KH.copy_(value_head(head_KH.shape[1], std, seed, num_labels))
    elif head == "embedding":
        built, _ = _without_report(AutoModel, model, **settings)
    else:
        built = language_class(configuration).from_pretrained(model, **settings)
        attach_headless(built)
    if quantization:  # it is on its device, and cannot be moved
        compute_alike(built)
    else:
        built = built.to(device)
    packed_attention.check_model(built)
    _cap_scores(built, asked=settings.get("attn_implementation"))
    return built


def _without_report(kind: Any, model: str | Path, **settings: Any) -> tuple[Any, set[str]]:
    """A model whose head a checkpoint may lack, or have in its place; and the names of the weights that it lacks."""
    with _silent():
        built, found = kind.from_pretrained(model, output_loading_info=True, **settings)
    missing = set(found["missing_keys"])
    if drawn := missing - HEADS:
        logger.warning("%s: its files lack %s, which are drawn at random", model, ", ".join(sorted(drawn)[:3]))
    return built, missing


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Inside, transformers prints no table of the weights that a checkpoint lacks or has beside: they are expected."""
    from transformers.utils import logging as verbosity

    level = verbosity.get_verbosity()
    verbosity.set_verbosity_error()
    try:
        yield
    finally:
        verbosity.set_verbosity(level)


def _cap_scores(model: Any, asked: str | None) -> None:
    """Gives a model that caps its attention scores (Gemma 2) ``eager`` in place of ``sdpa``, which drops the cap.

    Raises:
        ConfigError: ``sdpa`` was asked for by name.
    """
    config = model.config.get_text_config()
    if not getattr(config, "attn_logit_softcapping", None) or config._attn_implementation != "sdpa":
        return
    if asked is not None:
        raise ConfigError(
            f"model_init_kwargs: attn_implementation: sdpa ignores the soft cap of {type(model).__name__}'s "
            f"attention scores (attn_logit_softcapping {config.attn_logit_softcapping}). Use eager."
        )
    model.set_attn_implementation("eager")


def add_noise(module: Any, alpha: float) -> None:
    """In training mode embeddings get uniform noise of at most alpha / sqrt(L d): NEFTune (arXiv 2310.05914).

    L is the length of the rows as the model gets them, with padding or with all documents of a row, as in transformers,
    whose hook it is. The noise is drawn by torch's generator, so that a checkpoint holds where it goes on.
    """
    from transformers.integrations.neftune import neftune_post_forward_hook

    embeddings = module.get_input_embeddings()
    embeddings.neftune_noise_alpha = alpha
    embeddings.register_forward_hook(neftune_post_forward_hook)


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every part is in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def named_weights(module: Any, *, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under the names of a checkpoint, tied ones once, adapters merged, whole tensors one at a time.

    ``trained_only``: those alone that training can change.
    """
    own = untied(module)
    if trained_only:
        kept = trained_names(module)
        own = {name: weight for name, weight in own.items() if name in kept}
    weights = own_weights(module, own)
    if getattr(module, "_weight_conversions", None):
        from transformers.core_model_loading import revert_weight_conversion

        weights = iter(revert_weight_conversion(module, dict(weights)).items())
    yield from weights


def load_named_weights(
    module: Any, named_weights: Iterable[tuple[str, torch.Tensor]], share: float = 1.0, *, part: bool = False
) -> None:
    """Copies weights in place by the names of a checkpoint; those tied to a given one follow.

    ``share`` below 1 moves each weight only that part of the way. ``part``: what is not given stays as it is.

    Raises:
        ValueError: a name or shape the model does not have, or a weight that was not given.
    """
    if getattr(module, "_weight_conversions", None):
        named_weights = _converted(module, named_weights, part=part)
    own = module.state_dict(keep_vars=True)
    given: set[int] = set()
    with torch.no_grad():
        for name, weight in named_weights:
            if name not in own or own[name].shape != weight.shape:
                there = f"has {tuple(own[name].shape)}" if name in own else "has no weight of that name"
                raise ValueError(
                    f"weight {name!r} {tuple(weight.shape)} does not fit: {type(module).__name__} {there}. "
                    "Are these the weights of another model?"
                )
            if _place(own[name]) in given:
                continue
            weight = as_placed(weight, own[name]).to(own[name])
            own[name].copy_(weight if share == 1.0 else torch.lerp(own[name], weight, share))
            given.add(_place(own[name]))
    missing = [name for name, weight in own.items() if weight.numel() and _place(weight) not in given]
    if missing and not part:
        raise ValueError(f"{len(missing)} of {len(own)} weights of the model were not given, among them {missing[:3]}")


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights in a checkpoint's safetensors files, one at a time, on the CPU.

    Raises:
        FileNotFoundError: the folder holds none.
    """
    from safetensors import safe_open

    for file in safetensors_files(folder):
        if mistake := file_mistake(file):
            raise ConfigError(f"{folder} cannot be read: {mistake}. Use another checkpoint.")
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it cannot be iterated)
                yield name, opened.get_tensor(name)


def write_model(
    module: Any, weights: Mapping[str, torch.Tensor], folder: Path, *, dtype: torch.dtype, config: Any
) -> None:
    """Writes a Hugging Face folder of the whole ``weights``, parameters in ``dtype`` (buffers keep theirs).

    One process calls it.
    """
    buffers = {name for name, _ in module.named_buffers()}
    weights = {
        name: weight.to(dtype) if name not in buffers and weight.is_floating_point() else weight
        for name, weight in weights.items()
    }
    with written_whole(module):
        module.save_pretrained(folder, state_dict=weights)
    if config.model_type == "qwen3_vl_moe":
        exchange_sides(folder)
    config = copy.deepcopy(config)
    config.architectures = [type(module).__name__]
    config.dtype = dtype
    if quantized_layers(module):  # whose weights are given as others are
        del config.quantization_config
    config.save_pretrained(folder)


def exchange_sides(folder: Path) -> None:
    """Writes stacks of experts (E, 2 I, H) as (E, H, 2 I), and (E, H, I) as (E, I, H).

    So the files of Qwen's own Qwen3-VL have them, and vLLM reads no others. transformers reads both, but for stacks of
    squares, which stay, and always writes the first.
    """
    from safetensors.torch import load_file, save_file

    for file in folder.glob("model*.safetensors"):
        tensors = load_file(file)
        stacks = [name for name, tensor in tensors.items() if STACK.fullmatch(name) and len({*tensor.shape[1:]}) == 2]
        if stacks:
            exchanged = {name: tensors[name].transpose(1, 2).contiguous() for name in stacks}
            save_file(tensors | exchanged, file, metadata={"format": "pt"})


def untied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights under the names of the model in memory; of those that share their memory, the first."""
    seen: set[int] = set()
    weights = {}
    for name, weight in module.state_dict(keep_vars=True).items():
        if _place(weight) not in seen or not weight.numel():
            seen.add(_place(weight))
            weights[name] = weight.detach()
    return weights


def _place(weight: torch.Tensor) -> int:
    """What tells apart weights that do not share their memory; a shard may be empty, and then has no memory."""
    return id(weight) if isinstance(weight, DTensor) else weight.data_ptr()


def _converted(
    module: Any, named_weights: Iterable[tuple[str, torch.Tensor]], *, part: bool
) -> Iterable[tuple[str, torch.Tensor]]:
    """Weights of a checkpoint, or a part of them, under the names and in the shapes of the model in memory.

    Only transformers' own loading knows how, so a second model is built on the CPU for the moment.
    """
    weights = {name: weight.to("cpu", copy=True) for name, weight in named_weights}
    with _silent() if part else contextlib.nullcontext():
        loaded, report = type(module).from_pretrained(
            None, config=module.config, state_dict=weights, dtype=module.dtype, output_loading_info=True
        )
    missing = set(report.pop("missing_keys")) if part else set()
    wrong = {kind: sorted(names)[:3] for kind, names in report.items() if kind.endswith("_keys") and names}
    if wrong:
        raise ValueError(f"the weights do not fit {type(module).__name__}: {wrong}. Are they of another model?")
    converted: dict[str, torch.Tensor] = loaded.state_dict()
    absent = {_place(weight) for name, weight in converted.items() if name in missing}
    return [(name, weight) for name, weight in converted.items() if _place(weight) not in absent]
