"""LoRA: a small trained addition to the frozen weights of a model (arXiv 2106.09685), by peft."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rayhelper import ConfigError
from trainers.backends.fresh_weights import adapter_a, adapter_b_of_embedding
from trainers.backends.fsdp.sharding import as_placed, full

# Those of peft's LoraConfig that say which layers get an adapter
TARGET_FIELDS = ("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern")
ALL_LINEAR = "all-linear"
logger = logging.getLogger(__name__)


def add_adapter(module: Any, settings: Mapping[str, Any], *, value_head: bool, seed: int = 0) -> Any:
    """A ``PeftModel`` around ``module``, whose layers it changes in place; only the adapter is trained.

    ``settings`` are fields of peft's LoraConfig. The head of a value model is new and is trained whole. Unless
    ``init_lora_weights`` says otherwise the adapter begins as ``fresh_weights.py`` draws it.

    Raises:
        ConfigError: a tied embedding or head that would be trained without the other.
        ValueError: target modules that the model does not have.
    """
    from peft import LoraConfig, get_peft_model

    fields = dict(settings)
    if _has_all_linear(fields.get("target_modules")) and (without := _without_adapter(module)):
        fields.setdefault("exclude_modules", without)
    fields = spelled_out(module, fields)
    if value_head:
        fields["modules_to_save"] = ["score", *(fields.get("modules_to_save") or [])]
    else:
        check_tied(module, fields)
    adapted = get_peft_model(module, LoraConfig(task_type="SEQ_CLS" if value_head else "CAUSAL_LM", **fields))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if fields.get("init_lora_weights", True) is True:
        for name, part in _layers(module).items():
            for a in part.lora_A.values():
                a.weight.data.copy_(adapter_a(_a_name(name), a.weight.shape, seed))
            for b in part.lora_embedding_B.values():
                b.data.copy_(adapter_b_of_embedding(_b_name(name), b.shape, seed))
    return adapted


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
            "for them. With lora_dropout: 0 they get an adapter too"
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
                f"lora_target_modules has {asked}, but the model ties {' and '.join(names)}: an adapter of one of them "
                "cannot be merged into a weight that both have. Remove it."
            )
    if settings.get("ensure_weight_tying"):
        return
    for asked in settings.get("modules_to_save") or ():
        if _is_named(asked, names):
            raise ConfigError(
                f"lora_kwargs: modules_to_save has {asked}, but the model ties {' and '.join(names)}: peft would train "
                "a copy that a merged model has no place for. Write lora_kwargs: {ensure_weight_tying: true} too, "
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
    """``weights`` (those of ``module`` by name) with adapters added, whole, under the names of the model without them.

    One at a time, so that no second model is ever held. The live weights stay as they are. If they lie in shards, every
    rank must go through all of them.
    """
    adapted = _adapted(module)
    for name, weight in weights.items():
        if (is_adapter(name) and ".modules_to_save." not in name) or ".original_module." in name:
            continue
        weight = full(weight)
        if name in adapted:
            weight = _merged(adapted[name], weight.float()).to(weight.dtype)
        yield re.sub(r"\.base_layer(?=\.)", "", name).replace(".modules_to_save.default.", "."), weight


def _adapted(module: Any) -> dict[str, Any]:
    """The layers of peft, by the names of the weights that each stands beside: of stacked experts, one in the other."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        if isinstance(part, ParamWrapper):
            inner: Any = part
            while isinstance(inner, ParamWrapper):
                inner, name = inner.base_layer, f"{name}.base_layer"
            found[f"{name}.{part.parameter_name}"] = part
        elif isinstance(part, LoraLayer):
            found[f"{name}.base_layer.weight"] = part
    return found


def _merged(part: Any, weight: torch.Tensor) -> torch.Tensor:
    """``weight`` (float32, whole) with the adapter of a layer of peft in it.

    With DoRA (arXiv 2402.09353, equation 5) it is scaled to the trained magnitudes, one a row of W as layers have it.
    """
    weight = weight + _delta(part)
    if "default" not in part.lora_magnitude_vector:
        return weight
    dora = part.lora_magnitude_vector["default"]
    dim = 0 if dora.fan_in_fan_out else 1
    factor: torch.Tensor = full(dora.weight.detach()).float() / torch.linalg.norm(weight, dim=dim)
    return weight * factor.unsqueeze(dim)


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
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, **settings), **settings)


def linear_names(module: Any) -> set[str]:
    """Last parts of the names of all linear layers but the head."""
    return {name.rpartition(".")[2] for name in _linear_layers(module)}


def _linear_layers(module: Any) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings() or getattr(module, "score", None)
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
        told = " ".join(str(error).split())
        if told.startswith("Target module "):  # and the whole of a module that is no layer
            told = re.sub(r"\(.*\)", "", told)
        return f"{told.rstrip('.')}. Its linear layers are {', '.join(linear)}"
    return None


def trained_names(module: Any) -> set[str]:
    """Names, in ``module``, of the weights that a trained adapter makes others of, or that are trained themselves."""
    trained = {name for name, weight in module.named_parameters(remove_duplicate=False) if weight.requires_grad}
    return trained | _adapted(module).keys()


def load_adapter(adapted: Any, folder: Path) -> None:
    """Puts back, in place, the adapter that peft wrote into ``folder``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it has other weights than this model's adapter.
    """
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no adapter_model.safetensors, so it is no checkpoint of a LoRA run")
    given = load_file(file)
    own = {
        _written_name(name): weight
        for name, weight in adapted.named_parameters(remove_duplicate=False)  # peft writes a tied weight twice
        if is_adapter(name)
    }
    if own.keys() != given.keys():
        odd = sorted(own.keys() ^ given.keys())[:3]
        raise ValueError(f"the adapter in {folder} has other weights than this model's, among them {odd}")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(as_placed(given[name], weight).to(weight))


def _written_name(name: str) -> str:
    """The name under which peft writes a parameter of an adapter; magnitudes of DoRA have no ``.weight`` there."""
    name = name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector")
    return name.replace(".default.", ".").replace(".modules_to_save.", ".").removesuffix(".default")


def is_adapter(name: str) -> bool:
    """Whether a parameter of a changed model belongs to its adapter."""
    return ".lora_" in name or ".modules_to_save." in name
