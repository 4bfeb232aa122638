"""The keys that say what of a model is trained: all of it, or an adapter beside weights that stay, quantized or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rayhelper import ConfigError
from rayhelper.text import DID_YOU_MEAN, nearest
from trainers.backends.fsdp.tuners.kinds import CONFIGS, DROPOUTS, field_names, fits, peft_config

LORA_KEYS = {"r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
TARGETS = {"target_modules": "lora_target_modules"}
BITS = ("load_in_4bit", "load_in_8bit")
OF_FOUR_BITS = ("bnb_4bit_quant_type", "use_bnb_nested_quant")
MANY_STEPS = 10**9  # where the length of a run is not known yet
ADALORA = "adalora"  # which shares lora_alpha and lora_dropout with LoRA
PARTS = ("vit", "aligner")  # of a vision model, as modules_to_save names them: the vision tower and what fits it


@dataclass(frozen=True, kw_only=True)
class TunerConfig:
    """What is trained."""

    # Tuner
    tuner_type: Literal["full", "lora", "adalora", "boft", "fourierft", "ia3", "miss", "vera"] = "full"
    """Train all weights, a LoRA adapter beside them (arXiv 2106.09685), or another of peft's adapters (backend: fsdp).
    miss is the adapter that was called Bone."""
    lora_rank: int = 8
    """Rank of the adapter's matrices."""
    lora_alpha: float = 32
    """The adapter is multiplied by lora_alpha / lora_rank. With adalora it is lora_alpha / init_r."""
    lora_dropout: float = 0.0
    """Dropout of the adapter's input (lora and adalora). With ``disable_dropout`` there is none, as in TRL."""
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the layers that get an adapter. all-linear: every linear layer except the head. You may name more layers
    after it (backend: fsdp). auto: the layers that peft chooses for the architecture (backend: fsdp)."""
    lora_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further fields of peft's LoraConfig, such as {use_rslora: true}. {modules_to_save: [vit, aligner]} trains all
    weights of the vision tower and the aligner of a vision model."""
    tuner_kwargs: dict[str, Any] = field(default_factory=dict)
    """Fields of peft's configuration for a tuner other than lora. For adalora, such as {init_r: 12, target_r: 8}."""
    load_in_4bit: bool = False
    """With ``tuner_type: lora``: bitsandbytes quantizes the weights of the model to 4 bits (QLoRA, arXiv 2305.14314).
    The adapter is not quantized."""
    load_in_8bit: bool = False
    """With ``tuner_type: lora``: quantize the weights of the model to 8 bits (arXiv 2208.07339)."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """Data type of load_in_4bit. nf4: quantiles of a normal distribution. fp4: floating-point numbers."""
    use_bnb_nested_quant: bool = False
    """With load_in_4bit: also quantize the scales."""

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, and the weights of the model stay."""
        return self.tuner_type != "full"

    @property
    def quantization(self) -> dict[str, Any]:
        """Fields of transformers' BitsAndBytesConfig; empty: weights are not quantized."""
        if self.load_in_4bit:
            kinds = {"bnb_4bit_quant_type": self.bnb_4bit_quant_type}
            return {"load_in_4bit": True, "bnb_4bit_use_double_quant": self.use_bnb_nested_quant, **kinds}
        return {"load_in_8bit": True} if self.load_in_8bit else {}


def peft_fields(config: TunerConfig, *, disable_dropout: bool) -> dict[str, Any]:
    """Fields of peft's configuration of the tuner; ``disable_dropout``: none for the adapter either, as in TRL."""
    tuner = config.tuner_type
    targets: Any = config.lora_target_modules
    if targets in (["all-linear"], ["auto"]):
        targets = targets[0] if targets == ["all-linear"] else None
    fields: dict[str, Any] = {} if tuner != "lora" else {"r": config.lora_rank}
    if tuner in ("lora", ADALORA):
        fields |= {"lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
    fields |= {"target_modules": targets, **(config.lora_kwargs if tuner == "lora" else config.tuner_kwargs)}
    if disable_dropout and DROPOUTS.get(tuner) in fields:
        fields[DROPOUTS[tuner]] = 0.0
    return fields


def trained_parts(config: Any) -> list[str]:
    """The parts of a vision model that learn themselves beside an adapter of its language model."""
    asked = config.lora_kwargs.get("modules_to_save") if config.tuner_type == "lora" else None
    return [one for one in asked if one in PARTS] if isinstance(asked, (list, tuple)) else []


def check_tuner(config: TunerConfig, *, backend: str, max_steps: int) -> None:
    """Raises ConfigError for keys of a tuner that nobody would read, or whose values have no meaning together.

    ``max_steps``: of the run, where it is positive.
    """
    tuner = config.tuner_type
    if not config.lora_alpha > 0:
        raise ConfigError(
            f"lora_alpha must be positive, got {config.lora_alpha}: the adapter is multiplied by lora_alpha / lora_rank"
        )
    if config.lora_dropout >= 1:
        raise ConfigError(
            f"lora_dropout must lie in [0, 1), got {config.lora_dropout}: the adapter would learn nothing"
        )
    names_none = not config.lora_target_modules and not config.lora_kwargs.get("target_parameters")
    if config.has_adapter and (names_none or not all(map(str.strip, config.lora_target_modules))):
        raise ConfigError(
            "lora_target_modules names no layer. Name some layers, or write all-linear for every linear layer."
        )
    _check_quantization(config)
    if backend == "megatron":
        _check_megatron(config)
    for name, reader in (("lora_kwargs", "lora"), ("tuner_kwargs", "another tuner than lora")):
        if getattr(config, name) and (tuner != "lora" if name == "lora_kwargs" else tuner in ("full", "lora")):
            raise ConfigError(f"{name} are for tuner_type: {reader}; set that, or remove them")
    name, kwargs = ("lora_kwargs", config.lora_kwargs) if tuner == "lora" else ("tuner_kwargs", config.tuner_kwargs)
    taken = TARGETS | (LORA_KEYS if tuner in ("lora", ADALORA) else {})
    for key in kwargs:
        if key in taken and (key != "r" or tuner == "lora"):
            raise ConfigError(f"{name} holds {key}, which is the key {taken[key]}; write it there")
        known = field_names(tuner)
        if key not in known:
            hint = nearest(key, known, DID_YOU_MEAN)
            raise ConfigError(f"{name} must be one of {', '.join(known)}; got {key!r}.{hint}")
        if not fits(tuner, key, kwargs[key]):
            raise ConfigError(
                f"{name}: {key} is {kwargs[key]!r}, which is no value of this field of peft's {CONFIGS[tuner]}. "
                "Correct or remove it."
            )
    if trained_parts(config) and set(trained_parts(config)) != set(PARTS):
        raise ConfigError(f"lora_kwargs: modules_to_save has {trained_parts(config)[0]}. Write both: [vit, aligner]")
    if tuner not in ("full", "lora"):
        steps = max_steps if max_steps > 0 else MANY_STEPS
        peft_config(tuner, peft_fields(config, disable_dropout=False), num_training_steps=steps)


def _check_megatron(config: TunerConfig) -> None:
    """Raises ConfigError for an adapter that only peft builds."""
    if config.tuner_type not in ("full", "lora"):
        raise ConfigError(
            f"tuner_type: {config.tuner_type} is for backend: fsdp; backend: megatron has lora. Write backend: fsdp, "
            "or tuner_type: lora."
        )
    if config.lora_target_modules == ["auto"]:
        raise ConfigError("lora_target_modules: auto is peft's choice, for backend: fsdp. Write all-linear, or names.")
    if "all-linear" in config.lora_target_modules != ["all-linear"]:
        raise ConfigError(
            "lora_target_modules: with backend: megatron all-linear must be the only entry. Write lora_target_modules: "
            "all-linear."
        )


def _check_quantization(config: TunerConfig) -> None:
    """Raises ConfigError for quantized weights that would be trained themselves, or that no adapter is merged into."""
    bits = [name for name in BITS if getattr(config, name)]
    if len(bits) > 1:
        raise ConfigError("load_in_4bit and load_in_8bit cannot both be true. Remove one of them.")
    if bits and config.tuner_type != "lora":
        raise ConfigError(
            f"{bits[0]}: quantized weights are not trained themselves, and tuner_type is {config.tuner_type}. Write "
            f"tuner_type: lora, or remove {bits[0]}."
        )
    if bits and config.lora_kwargs.get("use_dora"):
        raise ConfigError(
            f"lora_kwargs: use_dora scales the weights themselves, which {bits[0]} quantizes. Remove one of them."
        )


def quantization_mistake(config: TunerConfig, strategy: str, workers: Mapping[str, int]) -> str | None:
    """Why these quantized weights cannot be trained here; None if they can.

    ``strategy``: fsdp_sharding_strategy; ``workers``: of each role that learns.
    """
    if not config.quantization:
        return None
    key = next(name for name in BITS if getattr(config, name))
    from trainers.backends.fsdp.tuners.quantized import is_installed

    if not is_installed():
        return (
            f"{key} needs bitsandbytes, which is not installed. pip install bitsandbytes (of a checkout: pip install "
            f"--no-deps -r requirements/qlora.txt), or remove {key}"
        )
    for role, count in workers.items():
        if count > 1 and strategy != "no_shard":
            return (
                f"{key}: quantized weights cannot be sharded, and role {role} has {count} workers. Write "
                "fsdp_sharding_strategy: no_shard, with which each worker has all weights"
            )
    return None


def shown_tuner(config: TunerConfig) -> str:
    """What is trained, in a few words."""
    if not config.has_adapter:
        return "all weights"
    bits = {"load_in_4bit": " beside weights of 4 bits", "load_in_8bit": " beside weights of 8 bits"}
    beside = next((text for name, text in bits.items() if getattr(config, name)), "")
    if config.tuner_type == "lora":
        return f"lora of rank {config.lora_rank}{beside}"
    listed = ", ".join(f"{name} {value}" for name, value in config.tuner_kwargs.items())
    return f"{config.tuner_type}{f' ({listed})' if listed else ''}"
