"""What ms-swift's and peft's keys of tuners, and ms-swift's of quantized weights, mean in ours.

adalora_*, boft_*, fourier_*, vera_*, reft_rank (of bone)      tuner_kwargs, fields of peft's configuration
use_rslora, use_dora, init_weights, modules_to_save            lora_kwargs, or tuner_kwargs
quant_method: bnb, quant_bits, bnb_4bit_*                      load_in_4bit, load_in_8bit, use_bnb_nested_quant
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainers.configuration.others.other_names import KNOWN_TUNERS, QUANTIZED
from trainers.configuration.reading.given_keys import GivenKeys

BONE, MISS = "bone", "miss"  # two names of one tuner
OF_LANGUAGE = "lora_llm"
ALL_ROUTER, ROUTER = "all-router", "mlp.gate.weight"  # ms-swift's word, and peft's name of a router's weight
OTHER_TUNERS = (  # of ms-swift and peft
    *("adapter", "llamapro", "loha", "lokr", "longlora", "oft", "prefix_tuning", "prompt_tuning"),
    *("p_tuning", "qlora", "reft"),
)
OF_LORA = {"use_rslora": "use_rslora", "use_dora": "use_dora", "init_weights": "init_lora_weights"}
FIELDS: dict[str, dict[str, str]] = {  # ms-swift's names of fields of peft's configurations
    "lora": OF_LORA,
    "adalora": OF_LORA
    | {
        f"adalora_{name}": name
        for name in ("target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight")
    },
    "boft": {f"boft_{name}": f"boft_{name}" for name in ("block_size", "block_num", "n_butterfly_factor", "dropout")},
    "fourierft": {"fourier_n_frequency": "n_frequency", "fourier_scaling": "scaling"},
    "ia3": {},
    MISS: {"reft_rank": "r", "init_weights": "init_weights"},
    "vera": {
        "vera_rank": "r",
        "vera_projection_prng_key": "projection_prng_key",
        "vera_dropout": "vera_dropout",
        "vera_d_initial": "d_initial",
    },
}
OF_SWIFT_ALONE: dict[str, dict[str, float]] = {
    "fourierft": {"n_frequency": 2000, "scaling": 300.0},
    MISS: {"r": 4},
}  # its defaults, not peft's
UNASKED: dict[str, Any] = {"use_rslora": False, "use_dora": False, "init_weights": True}  # what peft does anyway
BEGINNINGS = ("adalora_", "boft_", "fourier_", "vera_")
OF_MEGATRON: Mapping[str, tuple[str, ...]] = {  # layers of Megatron's: those of a checkpoint that they are made of
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
PARTS_OF_MEGATRON = {"word_embeddings": "embed_tokens", "output_layer": "lm_head"}  # and their names in a checkpoint
OF_FOUR_BITS = ("bnb_4bit_quant_type", "use_bnb_nested_quant")
BITS: dict[Any, str] = {4: "load_in_4bit", 8: "load_in_8bit"}


def translate_tuner(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Puts our keys in place of others' of tuners and of quantized weights in ``given``."""
    if "tuner_type" not in given.known:
        return
    tuner = given.get("tuner_type", defaults.get("tuner_type"))
    if not isinstance(tuner, str):
        return  # whoever reads its type says that it is none
    if tuner in OTHER_TUNERS:
        written = given.written.get("tuner_type", "tuner_type")
        given.take("tuner_type")
        meant = "lora and load_in_4bit: true" if tuner == "qlora" else "lora (or full)"
        given.refuse(
            "tuner_type",
            f"{written} {tuner} is not supported: of tuners there are {KNOWN_TUNERS}. Write tuner_type: {meant}",
        )
        tuner = "lora"
    elif tuner == OF_LANGUAGE:
        tuner = given.values["tuner_type"] = "lora"
        _whole_tower(given)
    elif tuner == BONE:
        tuner = given.values["tuner_type"] = MISS
    is_ms_swift = defaults.get("defaults") == "ms-swift"
    if given.foreign("tuner_backend") and given.get("tuner_backend") == "unsloth" and tuner == "lora":
        given.take("tuner_backend")
        given.notes["tuner_backend"] = "peft computes the adapter, for which unsloth has faster kernels"
    _megatron_layers(given)
    _quantization(given, is_ms_swift=is_ms_swift)
    _fields(given, tuner, is_ms_swift=is_ms_swift)
    _modules_to_save(given, tuner)


def _whole_tower(given: GivenKeys) -> None:
    """ms-swift's lora_llm: all weights of vision tower and aligner, and an adapter of the language model."""
    for name in [name for name in ("freeze_vit", "freeze_aligner", "freeze_llm") if name in given.values]:
        given.take(name)
        given.notes[name] = f"tuner_type is {OF_LANGUAGE}: all weights of vision tower and aligner are trained"
    if given.get("backend") != "megatron" and given.get("lora_dropout", 0.0) != 0.0:
        given.take("lora_dropout")
        given.notes["lora_dropout"] = f"tuner_type is {OF_LANGUAGE}, which does not read it"
    if given.get("backend") != "megatron":
        given.put("lora_dropout", 0.0, "tuner_type")
    given.put_inner("lora_kwargs", "modules_to_save", ["vit", "aligner"], "tuner_type")


def _megatron_layers(given: GivenKeys) -> None:
    """Megatron's names of layers, by the names in a checkpoint: each of these has an adapter of its own."""
    name = "lora_target_modules"
    listed = given.get(name)
    names = listed.split() if isinstance(listed, str) else listed
    if given.get("backend") == "megatron" and isinstance(names, list) and ALL_ROUTER in names:
        names = given.values[name] = [one for one in names if one != ALL_ROUTER]
        given.put_inner("lora_kwargs", "target_parameters", [ROUTER], name)
    if given.get("backend") != "megatron" or not isinstance(names, list) or not set(OF_MEGATRON) & {*map(str, names)}:
        return
    given.values[name] = [one for layer in names for one in OF_MEGATRON.get(str(layer), (layer,))]
    given.notes[given.written.get(name, name)] = f"it is {', '.join(given.values[name])}, with an adapter each"


def _fields(given: GivenKeys, tuner: Any, *, is_ms_swift: bool) -> None:
    """The fields of the tuner; keys of another one are read by nobody, in ms-swift neither."""
    place = "lora_kwargs" if tuner in ("full", "lora") else "tuner_kwargs"
    own = FIELDS.get(tuner, OF_LORA)
    for name in [name for name in given.values if given.foreign(name)]:
        if name in own or (name in OF_LORA and tuner == "full"):
            value = given.take(name)
            if value == "lora-ga":
                given.refuse(name, f"{name} lora-ga is not supported: it is no initialization of peft. Write true")
            elif value is not None and (name not in UNASKED or value is not UNASKED[name]):
                given.put_inner(place, own.get(name, name), value, name)
        elif name.startswith(BEGINNINGS) or name in OF_LORA:
            given.take(name)
            given.notes[name] = f"tuner_type is {tuner}, which does not read it"
    if not is_ms_swift or tuner in ("full", "lora"):
        return
    for field, value in OF_SWIFT_ALONE.get(tuner, {}).items():
        if field not in (given.get("tuner_kwargs") or {}):
            given.put_inner("tuner_kwargs", field, value, "tuner_type")
    read = ("lora_alpha", "lora_dropout") if tuner == "adalora" else ()
    for name in ("lora_rank", "lora_alpha", "lora_dropout"):
        if name in given.values and name not in read:
            given.take(name)
            given.notes[name] = f"tuner_type is {tuner}, which does not read it"
    if tuner == "adalora":
        given.notes[given.written.get("tuner_type", "tuner_type")] = (
            "the regularizer counts once a step, in every training. In ms-swift it counts once a micro-batch, and only "
            "in SFT and pretraining without weights of loss_scale"
        )
    if tuner == "vera" and given.get("lora_target_modules", ["all-linear"]) in ("all-linear", ["all-linear"]):
        given.notes["tuner_type"] = (
            "vera changes all linear layers, as in peft. In ms-swift it changes only layers as large as v_proj. "
            "lora_target_modules chooses layers"
        )


def _modules_to_save(given: GivenKeys, tuner: Any) -> None:
    name = "modules_to_save"
    if not given.foreign(name) or not given.get(name):
        return
    value = given.get(name)
    names = value.split() if isinstance(value, str) else value
    if given.get("backend") == "megatron":
        names = [PARTS_OF_MEGATRON.get(one, one) for one in names]
    if tuner != "full" and (whole := [one for one in names if one.startswith("all-")]):
        given.refuse(name, f"{name}: {whole[0]} is a word of ms-swift's. Write the names of modules")
    elif tuner != "full":
        given.put_inner("lora_kwargs" if tuner == "lora" else "tuner_kwargs", name, names, name)
    else:
        given.notes[name] = "tuner_type is full: every weight is trained"
    given.take(name)


def _quantization(given: GivenKeys, *, is_ms_swift: bool) -> None:
    """ms-swift quantizes where ``quant_method`` says so; what belongs to another choice is read by nobody there."""
    said = {name: given.take(name) for name in QUANTIZED if given.foreign(name)}
    method, bits = said.get("quant_method"), said.get("quant_bits")
    if method not in ("bnb", None):
        given.refuse(
            "quant_method",
            f"{', '.join(said)}: quant_method {method} is not supported, because only bitsandbytes quantizes weights. "
            "Write quant_method: bnb, quant_bits: 4 or 8, and remove the keys of other methods",
        )
    elif method is None and bits is not None:
        given.notes["quant_bits"] = "without quant_method nothing is quantized, also in ms-swift"
    elif method is not None and bits not in BITS:
        given.refuse("quant_method", f"quant_method bnb needs quant_bits: 4 or 8, got {bits}")
    elif method is not None:
        given.put(BITS[bits], True, "quant_bits")
    _engine_beside_quantized(given, is_ms_swift=is_ms_swift)
    if given.get("load_in_4bit") is not True:
        for name in [name for name in OF_FOUR_BITS if is_ms_swift and name in given.values]:
            given.take(name)
            given.notes[name] = "weights are not quantized to 4 bits"
        return
    if (nested := said.get("bnb_4bit_use_double_quant")) is not None:
        given.put("use_bnb_nested_quant", nested, "bnb_4bit_use_double_quant")
    computed, dtype = said.get("bnb_4bit_compute_dtype"), given.get("dtype", "auto")
    if computed is not None and computed != dtype:
        given.refuse(
            "bnb_4bit_compute_dtype",
            f"bnb_4bit_compute_dtype is {computed}, but products are computed in dtype, which is {dtype}. Write the "
            "same for both",
        )


def _engine_beside_quantized(given: GivenKeys, *, is_ms_swift: bool) -> None:
    """ms-swift's engine has an adapter beside weights that are not quantized. Here it gets the policy's weights."""
    name = "vllm_enable_lora"
    quantizes = any(given.get(bits) is True for bits in BITS.values())
    if is_ms_swift and quantizes and name in given.known and given.get(name) is True:
        given.take(name)
        given.notes[name] = (
            "the engine gets the dequantized weights with the adapter merged; ms-swift's engine has unquantized "
            "weights and a separate adapter"
        )
