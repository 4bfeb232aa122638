"""Adapters: a small trained change of the frozen weights of a model, by peft; LoRA and the others of ``kinds.py``."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rayhelper import ConfigError
from trainers.backends.fresh_weights import adapter_a, adapter_b_of_embedding
from trainers.backends.fsdp.sharding import as_placed, full
from trainers.backends.fsdp.tuners.adalora import Ranks
from trainers.backends.fsdp.tuners.kinds import peft_config
from trainers.backends.fsdp.tuners.quantized import dequantized, is_quantization_state, quantized_layers
from trainers.backends.fsdp.vision.parts import VISUAL, Part, modules_of
from trainers.backends.fsdp.vision.pixels import Vision
from trainers.backends.fsdp.vision.thinker import language_class
from trainers.backends.model_files import read_adapter
from trainers.data.images.processor import is_vision

# Those of peft's LoraConfig that say which layers get an adapter
TARGET_FIELDS = ("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern")
ALL_LINEAR = "all-linear"
TASKS = {"lm": "CAUSAL_LM", "value": "SEQ_CLS", "embedding": "FEATURE_EXTRACTION"}  # peft's, by the model's head
# Beginnings of the names of what peft's layers hold; buffers that all layers of VeRA share, and the rank of AdaLoRA
OF_LAYERS = ("lora_", "boft_", "fourierft_", "ia3_", "miss_", "vera_")
OF_MODULES_TO_SAVE = ".modules_to_save."
SHARED = re.compile(r"\.vera_[AB]\.")
MANY_STEPS = 10**9  # where the length of a run is not known
SHARED_BY_PEFT = "base_model.vera_"  # where peft saves them
logger = logging.getLogger(__name__)


def add_adapter(
    module: Any,
    settings: Mapping[str, Any],
    *,
    tuner: str = "lora",
    head: str,
    seed: int = 0,
    num_training_steps: int = 1,
    vision: Vision | None = None,
) -> Any:
    """A ``PeftModel`` around ``module``, whose layers it changes in place; only the adapter is trained.

    ``settings`` are fields of peft's configuration of the ``tuner``. The ``head`` of a value model is new and is
    trained whole. Unless ``init_lora_weights`` says otherwise LoRA begins as ``fresh_weights.py`` draws it; other
    tuners begin as peft draws them. AdaLoRA divides its ranks over ``num_training_steps``. ``vision``: of a model whose
    frozen parts get no adapter.

    Raises:
        ConfigError: a tied embedding or head that would be trained without the other, or values that peft refuses.
        ValueError: target modules that the model does not have.
    """
    from peft import get_peft_model

    settings = with_modules(module, settings)
    fields = targets_of(module, tuner, settings, () if vision is None else vision.without_adapter())
    if head == "value":
        own = "score" if hasattr(module, "score") else "classifier"
        fields["modules_to_save"] = [own, *(fields.get("modules_to_save") or [])]
    else:
        check_tied(module, fields)
    config = peft_config(tuner, fields, num_training_steps=num_training_steps, task_type=TASKS[head])
    with _compilers_kept():
        adapted = get_peft_model(module, config)
    check_butterflies(module, fields)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        if ".ranknum." in name:  # which peft trains, unasked, beside weights in bfloat16
            parameter.requires_grad_(False)
    if tuner == "lora" and fields.get("init_lora_weights", True) is True:
        for name, part in _layers(module).items():
            for a in part.lora_A.values():
                a.weight.data.copy_(adapter_a(_a_name(name), a.weight.shape, seed))
            for b in part.lora_embedding_B.values():
                b.data.copy_(adapter_b_of_embedding(_b_name(name), b.shape, seed))
    return adapted


@contextlib.contextmanager
def _compilers_kept() -> Iterator[None]:
    """Afterwards the environment names the compilers that it named: without nvcc peft's BOFT leaves gcc there."""
    before = {name: os.environ.get(name) for name in ("CC", "CXX")}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_butterflies(module: Any, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if peft could not compile its kernel, without which BOFT has one butterfly factor alone."""
    asked = settings.get("boft_n_butterfly_factor", 1)
    if asked != 1 and any(getattr(part, "fbd_cuda_available", True) is False for part in module.modules()):
        raise ConfigError(
            f"boft_n_butterfly_factor is {asked}, but peft could not compile its CUDA kernel, without which it is 1. "
            "Install nvcc and ninja, or write 1."
        )


def targets_of(module: Any, tuner: str, settings: Mapping[str, Any], frozen: Sequence[str] = ()) -> dict[str, Any]:
    """``settings`` with the layers that all-linear means in this model, and without those of ``frozen`` parts.

    LoRA: see ``spelled_out``. For other tuners it is every linear layer but the head and routers; experts that lie
    stacked in one weight have no adapter of theirs, and the log says so.
    """
    fields = dict(settings)
    whole = [f"{name}." for name in fields.get("modules_to_save") or ()]  # which learn themselves
    frozen = [*frozen, *(name for name, part in module.named_modules() if _is_linear_in(name, part, whole))]
    if not _has_all_linear(fields.get("target_modules")):
        if frozen and not isinstance(fields.get("target_modules"), str):
            fields.setdefault("exclude_modules", list(frozen))
        return fields
    without = [*_without_adapter(module), *frozen]
    if tuner == "lora":
        if without:
            fields.setdefault("exclude_modules", without)
        return spelled_out(module, fields)
    if any(name.endswith(".experts") for name, _ in module.named_modules()):
        logger.info("lora_target_modules: all-linear leaves out experts, which only tuner_type: lora changes")
    targets = fields["target_modules"]
    others = [name for name in ([] if isinstance(targets, str) else targets) if name != ALL_LINEAR]
    return {**fields, "target_modules": [*(name for name in _linear_layers(module) if name not in without), *others]}


def spelled_out(module: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with the names of all linear layers but the head in the place of an all-linear among other targets.

    By itself it stays, as peft knows it: then experts have an adapter too. But peft has no dropout for experts in one
    weight: with ``lora_dropout`` they are left out, with other layers of their names, and the log says so.
    """
    targets = settings.get("target_modules")
    has_experts = any(name.endswith(".experts") for name, _ in module.named_modules())
    leaves_out = bool(settings.get("lora_dropout")) and has_experts
    if not _has_all_linear(targets) or (isinstance(targets, str) and not leaves_out):
        return dict(settings)
    if leaves_out:
        logger.info(
            "lora_target_modules: all-linear leaves out the experts and layers of their names, as peft has no dropout "
            "for them. With lora_dropout: 0 they also get an adapter"
        )
    others = [name for name in ([] if isinstance(targets, str) else targets or ()) if name != ALL_LINEAR]
    found = _linear_layers(module)
    if leaves_out:
        of_experts = _names_of_experts(module, {name.rpartition(".")[2] for name in found})
        found = [name for name in found if name.rpartition(".")[2] not in of_experts]
    return {**settings, "target_modules": [*found, *others]}


def _names_of_experts(module: Any, names: Iterable[str]) -> set[str]:
    """Those of the last parts of names that peft takes for weights of stacked experts, wherever they stand."""
    from peft import LoraConfig, get_peft_model

    found = set()
    for name in names:
        with torch.device("meta"):
            model = type(module)(module.config)
        try:
            get_peft_model(model, LoraConfig(r=1, target_modules=[name], lora_dropout=0.5), low_cpu_mem_usage=True)
        except ValueError:
            found.add(name)
    return found


def with_modules(module: Any, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """``settings`` whose ``modules_to_save`` has modules in the place of parts of a vision model.

    Raises:
        ConfigError: the model sees nothing, or has weights of these parts in no module.
    """
    asked = settings.get("modules_to_save") or ()
    parts: list[Part] = [one for one in VISUAL if one in asked]
    if not parts:
        return settings
    if not is_vision(module.config):
        raise ConfigError(f"lora_kwargs: modules_to_save has {parts[0]}, but the model has no vision tower. Remove it.")
    try:
        found = modules_of(module, parts)
    except ValueError as error:
        raise ConfigError(f"lora_kwargs: modules_to_save has {', '.join(parts)}, but {error}. Remove them.") from None
    return {**settings, "modules_to_save": [*found, *(one for one in asked if one not in parts)]}


def _is_linear_in(name: str, part: Any, modules: Sequence[str]) -> bool:
    return isinstance(part, torch.nn.Linear) and name.startswith(tuple(modules))


def _has_all_linear(targets: Any) -> bool:
    return targets == ALL_LINEAR or (not isinstance(targets, str) and ALL_LINEAR in (targets or ()))


def check_tied(module: Any, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if ``modules_to_save`` or an adapter would give a tied embedding and head different weights.

    No weights are read: ``module`` may be on the meta device.
    """
    if not module.config.get_text_config().tie_word_embeddings:
        return
    tied = [module.get_input_embeddings(), module.get_output_embeddings()]
    names = [name for name, part in module.named_modules() if any(part is one for one in tied)]
    targets = settings.get("target_modules")
    for asked in () if isinstance(targets, str) else targets or ():
        if _is_named(asked, names):
            raise ConfigError(
                f"lora_target_modules has {asked}, but the model ties {' and '.join(names)}. An adapter of one of them "
                "cannot be merged into the weight that both share. Remove it."
            )
    if settings.get("ensure_weight_tying"):
        return
    for asked in settings.get("modules_to_save") or ():
        if _is_named(asked, names):
            raise ConfigError(
                f"lora_kwargs: modules_to_save has {asked}, but the model ties {' and '.join(names)}. peft would train "
                "a copy, which a merged model cannot hold. Also write lora_kwargs: {ensure_weight_tying: true}, "
                "which trains the tied weight."
            )


def _is_named(asked: str, names: Iterable[str]) -> bool:
    """Whether peft takes ``asked`` for one of the modules of these names."""
    return any(name == asked or name.endswith(f".{asked}") for name in names)


def _without_adapter(module: Any) -> list[str]:
    """Linear layers that ``all-linear`` leaves out: routers that give more than a tensor, and what peft refuses.

    peft adds nothing to ``out_proj`` in models with Mamba layers, whose kernels take its weight and not the layer.
    """
    mamba = getattr(module.config, "model_type", None) in ("falcon_h1", "nemotron_h")
    layers = [(name, part) for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)]
    routers = [name for name, part in layers if type(part).__name__.endswith("Router")]
    refused = [name for name, _ in layers if mamba and name.rpartition(".")[2] == "out_proj"]
    if refused:
        logger.warning(
            "lora_target_modules: all-linear leaves out %d layers out_proj, which peft refuses", len(refused)
        )
    return routers + refused


@contextlib.contextmanager
def without_adapter(adapted: Any, without: bool = True) -> Iterator[None]:
    """Inside, the model is what it was before the adapter was added; nothing changes where there is none."""
    if adapted is None or not without:
        yield
        return
    with adapted.disable_adapter():
        yield


def own_weights(module: Any, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """``weights`` (those of ``module`` by name) with adapters merged, whole, under the names of the model without them.

    One at a time, so that no second model is ever held. The live weights stay as they are. Quantized ones are given in
    the dtype they are computed in. If they lie in shards, every rank must go through all of them.
    """
    adapted, quantized = _adapted(module), quantized_layers(module)
    for name, weight in weights.items():
        if (is_adapter(name) and OF_MODULES_TO_SAVE not in name) or ".original_module." in name:
            continue
        if is_quantization_state(name):
            continue
        weight = full(weight) if name not in quantized else dequantized(quantized[name])
        if name in adapted:
            weight = _merged(adapted[name], name.rpartition(".")[2], weight)
        yield re.sub(r"\.base_layer(?=\.)", "", name).replace(".modules_to_save.default.", "."), weight


def _adapted(module: Any) -> dict[str, Any]:
    """The layers of peft, by the names of the weights that each changes: of stacked experts, one in the other."""
    from peft.tuners.ia3 import IA3Layer
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        if isinstance(part, ParamWrapper):
            inner: Any = part
            while isinstance(inner, ParamWrapper):
                inner, name = inner.base_layer, f"{name}.base_layer"
            found[f"{name}.{part.parameter_name}"] = part
        elif _is_layer(part):
            found[f"{name}.base_layer.weight"] = part
            scales_output = isinstance(part, IA3Layer) and not part.is_feedforward
            adds_bias = isinstance(part, LoraLayer) and part.lora_bias.get("default")
            if (scales_output or adds_bias) and getattr(part.get_base_layer(), "bias", None) is not None:
                found[f"{name}.base_layer.bias"] = part
    return found


def _is_layer(part: Any) -> bool:
    """Whether it is a layer of one of the tuners, which peft has put around one of the model's."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(part, BaseTunerLayer) and str(part.adapter_layer_names[0]).startswith(OF_LAYERS)


def _merged(part: Any, key: str, weight: torch.Tensor) -> torch.Tensor:
    """What ``weight``, whole, of a changed layer becomes with its adapter merged: in float32, given in its own dtype.

    ``key``: weight or bias. LoRA is added; what other tuners do to a weight peft's own merge does to a copy.
    """
    if _is_added(part):
        return _with_lora(part, weight.float()).to(weight.dtype)
    whole = {f"part.{name}": full(value.detach()).float() for name, value in part.named_parameters()}
    whole |= {name: value.clone() for name, value in whole.items() if ".base_layer." in name}
    whole[f"part.base_layer.{key}"] = weight.to(torch.float32, copy=True)
    with torch.no_grad():
        merged: torch.Tensor = torch.func.functional_call(_Merge(part, key), whole, ())
    return merged.to(weight.dtype)


class _Merge(torch.nn.Module):
    """peft's merge of a layer as a function of the layer's parameters, for ``functional_call``."""

    def __init__(self, part: Any, key: str) -> None:
        super().__init__()
        self.part, self.key = part, key

    def forward(self) -> torch.Tensor:
        self.part.merge()
        self.part.merged_adapters.clear()  # what was changed is not the layer's own
        found: torch.Tensor = getattr(self.part.get_base_layer(), self.key).data
        return found


def _is_added(part: Any) -> bool:
    """Whether the adapter of a layer is LoRA's product of two matrices, with DoRA's magnitudes or without."""
    from peft.tuners.adalora.layer import AdaLoraLayer
    from peft.tuners.lora import LoraLayer

    if not isinstance(part, LoraLayer) or isinstance(part, AdaLoraLayer):
        return False
    is_known = "default" not in part.lora_variant or "default" in part.lora_magnitude_vector
    return is_known and not part.lora_bias.get("default")


def _with_lora(part: Any, weight: torch.Tensor) -> torch.Tensor:
    """``weight`` (float32, whole) with the adapter of a layer of peft in it.

    With DoRA (arXiv 2402.09353, equation 5) it is scaled to the trained magnitudes, one a row of W as layers have it.
    """
    weight = weight + _delta(part)
    if "default" not in part.lora_magnitude_vector:
        return weight
    dora = part.lora_magnitude_vector["default"]
    dim = 0 if dora.fan_in_fan_out else 1
    magnitude = full(dora.weight.detach()).float()
    scale: torch.Tensor = magnitude / torch.linalg.norm(weight, dim=dim)
    return weight * scale.unsqueeze(dim)


def _delta(part: Any) -> torch.Tensor:
    """float32, whole: what a layer of peft makes its weight another by. Of stacked experts B has the expert last."""
    if "default" in part.lora_embedding_A:
        a, b = (full(half["default"].detach()).float() for half in (part.lora_embedding_A, part.lora_embedding_B))
        embeddings_VH = (b @ a).T
        return embeddings_VH * float(part.scaling["default"])
    a, b = (full(half["default"].weight.detach()).float() for half in (part.lora_A, part.lora_B))
    num_experts = getattr(part, "num_experts", 1)
    if num_experts > 1:
        a_ERI, b_ORE = a.view(num_experts, -1, a.shape[1]), b.view(len(b), -1, num_experts)
        delta_EOI = torch.einsum("ore,eri->eoi", b_ORE, a_ERI)
        delta = delta_EOI if part._did_swap_in_out_features else delta_EOI.transpose(1, 2)
    else:
        delta = (b @ a).T if part.fan_in_fan_out else b @ a
    scaling: float = part.scaling["default"]
    return delta * scaling


def adapter_weights(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices A and B of the adapter of ``module``, whole, one at a time, under peft's names; its scaling is in B.

    So what they are multiplied by needs to be known to nobody else: rank, alpha, their patterns, rsLoRA. If they lie in
    shards, every rank must go through all of them.
    """
    for name, part in _layers(module).items():
        if "default" in part.lora_embedding_A:
            yield f"base_model.model.{name}.lora_embedding_A", full(part.lora_embedding_A["default"].detach())
            yield _b_name(name), full(part.lora_embedding_B["default"].detach()) * part.scaling["default"]
            continue
        yield _a_name(name), full(part.lora_A["default"].weight.detach())
        b = full(part.lora_B["default"].weight.detach())
        yield f"base_model.model.{name}.lora_B.weight", b * part.scaling["default"]


def _layers(module: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}


def _a_name(layer: str) -> str:
    return f"base_model.model.{layer}.lora_A.weight"


def _b_name(embedding: str) -> str:
    return f"base_model.model.{embedding}.lora_embedding_B"


def layer_names(model: str | Path, target_modules: Sequence[str], *, trust_remote_code: bool = False) -> set[str]:
    """Last parts of the names of layers that an adapter with these ``target_modules`` may change.

    ``all-linear`` among them: of all linear layers but the head, as peft reads it. ``["auto"]``: those that peft
    chooses for the architecture. The model is not loaded.
    """
    if ALL_LINEAR in target_modules:
        others = {name.rpartition(".")[2] for name in target_modules if name != ALL_LINEAR}
        return others | linear_names(without_weights(model, trust_remote_code=trust_remote_code))
    if list(target_modules) != ["auto"]:
        return {name.rpartition(".")[2] for name in target_modules}
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOSEN_BY_PEFT
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    return set(CHOSEN_BY_PEFT.get(found.model_type, ()))


def without_weights(model: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The model on the meta device, as its configuration says. Raises ValueError if it is none that generates text."""
    from transformers import AutoConfig

    settings = {"trust_remote_code": trust_remote_code}
    found = AutoConfig.from_pretrained(model, **settings)
    with torch.device("meta"):
        return language_class(found).from_config(found, **settings)


def linear_names(module: Any) -> set[str]:
    """Last parts of the names of all linear layers but the head."""
    return {name.rpartition(".")[2] for name in _linear_layers(module)}


def _linear_layers(module: Any) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings() or getattr(module, "score", getattr(module, "classifier", None))
    layers = [(name, part) for name, part in module.named_modules() if isinstance(part, (torch.nn.Linear, Conv1D))]
    return [name for name, part in layers if part is not head]


def target_mistake(module: Any, lora: Mapping[str, Any]) -> str | None:
    """Why a model has no adapter by ``lora``, fields of peft's LoraConfig; None if it has one.

    peft itself is asked, and adds it to ``module``, which is one of ``without_weights``. Every name must be that of
    some layer, or of a weight of stacked experts.
    """
    from peft import LoraConfig, NoMatchingPeftModuleError, get_peft_model

    fields = {name: lora[name] for name in (*TARGET_FIELDS, "lora_dropout") if name in lora}
    fields = spelled_out(module, fields)
    names, linear = [name for name, _ in module.named_modules()], sorted(linear_names(module))
    for target in lora.get("target_modules") or ():
        if target == ALL_LINEAR or _is_named(target, names):
            continue
        try:
            get_peft_model(copy.deepcopy(module), LoraConfig(r=1, target_modules=[target]), low_cpu_mem_usage=True)
        except NoMatchingPeftModuleError:
            return f"no layer of the model is named {target}. Its linear layers are {', '.join(linear)}"
        except ValueError:
            continue  # a name of experts that needs another beside it
    try:
        get_peft_model(module, LoraConfig(r=1, **fields), low_cpu_mem_usage=True)
    except ValueError as error:
        return f"{_told(error).rstrip('.')}. Its linear layers are {', '.join(linear)}"
    return None


def _told(error: Exception) -> str:
    """What peft says in one line, without the whole of a module that is no layer."""
    told = " ".join(str(error).split())
    return re.sub(r"\(.*\)", "", told) if told.startswith("Target module ") else told


def tuner_mistake(module: Any, tuner: str, settings: Mapping[str, Any]) -> str | None:
    """Why a layer of a model cannot have an adapter of a tuner beside LoRA; None if all can that shall have one.

    peft itself is asked, on the smallest layers and the largest; ``module`` is one of ``without_weights``.
    """
    if tuner == "lora":
        return None
    fields = targets_of(module, tuner, settings)
    if tuner == "boft":  # whose matrices are as large as the layers' and would be made here
        return _block_mistake(module, fields)
    from peft import get_peft_model

    try:
        config = peft_config(tuner, fields, num_training_steps=MANY_STEPS)
        get_peft_model(module, config, low_cpu_mem_usage=True)
    except (ValueError, TypeError, ArithmeticError) as error:
        return _told(error)
    return None


def _block_mistake(module: Any, fields: Mapping[str, Any]) -> str | None:
    """Why the blocks of BOFT do not divide the input of a layer."""
    size, count = fields.get("boft_block_size", 4), fields.get("boft_block_num", 0)
    targets = fields.get("target_modules")
    for name, part in module.named_modules():
        is_asked = isinstance(targets, list) and _is_named_any(name, targets)
        if is_asked and (width := getattr(part, "in_features", None)) and width % (size or count):
            return f"{name} has {width} inputs, which {size or count} (boft_block_size or boft_block_num) must divide"
    return None


def _is_named_any(name: str, targets: Sequence[str]) -> bool:
    return any(_is_named(target, [name]) for target in targets)


def trained_names(module: Any) -> set[str]:
    """Names, in ``module``, of the weights that a trained adapter makes others of, or that are trained themselves.

    Quantized weights are others than those of the checkpoint, whether an adapter changes them or not.
    """
    trained = {name for name, weight in module.named_parameters(remove_duplicate=False) if weight.requires_grad}
    return trained | _adapted(module).keys() | quantized_layers(module).keys()


def saved_weights(adapted: Any) -> dict[str, torch.Tensor]:
    """What is saved of an adapter, whole, on the CPU, for ``write_adapter``; empty without one.

    If the weights lie in shards, every rank must ask for them.
    """
    own = {} if adapted is None else adapted.state_dict()
    return {
        name: full(weight.detach()).cpu()
        for name, weight in own.items()
        if is_adapter(name) and (not SHARED.search(name) or name.startswith(SHARED_BY_PEFT))
    }


def write_adapter(adapted: Any, folder: Path, weights: Mapping[str, torch.Tensor], ranks: Ranks | None = None) -> None:
    """Writes the adapter as peft reads it; ``weights`` are those of ``saved_weights``. One rank calls it.

    AdaLoRA's with all its ranks: one that is zero now may come back in a later step. ``ranks``: for a run that goes on.
    """
    config = adapted.peft_config["default"]
    pattern = getattr(config, "rank_pattern", None)
    takes_away = config.peft_type == "ADALORA"
    try:
        if takes_away:
            config.rank_pattern = None
        adapted.save_pretrained(folder, state_dict=dict(weights))
    finally:
        if takes_away:
            config.rank_pattern = pattern
    if ranks is not None:
        ranks.save(folder)


def load_adapter(adapted: Any, folder: Path, ranks: Ranks | None = None) -> None:
    """Puts back, in place, the adapter that peft wrote into ``folder``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it has other weights than this model's adapter.
        ConfigError: it is damaged.
    """
    found = read_adapter(folder / "adapter_model.safetensors")
    given = {name: weight for name, weight in found.items() if not name.startswith(SHARED_BY_PEFT)}
    own = {
        _written_name(name): weight
        for name, weight in adapted.named_parameters(remove_duplicate=False)  # peft writes a tied weight twice
        if is_adapter(name) and ".ranknum." not in name
    }
    if own.keys() != given.keys():
        odd = sorted(own.keys() ^ given.keys())[:3]
        raise ValueError(f"the adapter in {folder} does not fit this model. Only one of the two has the weights {odd}")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(as_placed(given[name], weight).to(weight))
    if ranks is not None:
        ranks.load(folder)


def _written_name(name: str) -> str:
    """The name under which peft writes a parameter of an adapter; magnitudes of DoRA have no ``.weight`` there."""
    name = name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector")
    return name.replace(".default.", ".").replace(".modules_to_save.", ".").removesuffix(".default")


def is_adapter(name: str) -> bool:
    """Whether a parameter of a changed model belongs to its adapter."""
    held = (f".{beginning}" in name for beginning in (*OF_LAYERS, "ranknum."))
    return OF_MODULES_TO_SAVE in name or any(held)
