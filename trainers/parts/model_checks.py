"""Whether a model, its tokenizer and the arguments of both and of the optimizer go together, before a worker starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayhelper import ConfigError, DeviceGroups
from trainers.backends.megatron.architectures import SEEING, SPEAKING
from trainers.backends.model_files import generation_mistake, weights_mistake
from trainers.backends.own_code import own_code_mistake
from trainers.configuration.megatron_checks import config_file, learns, models_of
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import RunConfig, TrainConfig, changed
from trainers.configuration.values import is_there
from trainers.configuration.vision import vision_mistake, vision_settings
from trainers.data.images.processor import is_one_piece, is_vision
from trainers.parts.models import check_same_tokens, lora_settings
from trainers.parts.tokenizer import load_tokenizer, new_tokens, tokenizer_there
from trainers.rewards.models import check_reward_model

logger = logging.getLogger(__name__)

# Arguments of from_pretrained that are no fields of a model's configuration
OF_FROM_PRETRAINED = (
    *("attn_implementation", "experts_implementation", "cache_dir", "force_download", "proxies", "local_files_only"),
    *("token", "revision", "code_revision", "subfolder", "use_safetensors", "weights_only", "variant", "key_mapping"),
    *("low_cpu_mem_usage", "quantization_config", "ignore_mismatched_sizes", "generation_config", "gguf_file"),
    *("max_memory", "offload_folder", "offload_buffers", "use_kernels", "kernel_config", "strict", "adapter_kwargs"),
    *("tp_plan", "tp_size", "device_mesh", "distributed_config", "dtype", "torch_dtype", "fusion_config"),
)
ADAPTER = "adapter_config.json"
OTHER_FILES = frozenset({"gguf_file", "subfolder", "variant", "use_safetensors"})  # arguments that choose the weights
FAR_BEYOND = 16  # times the positions that a model knows: a row of packed documents may hold so many of its lengths
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def check_optimizer(config: TrainConfig) -> None:
    """Raises ConfigError for ``optim_kwargs`` that the optimizer does not take: one makes a step on a few weights."""
    _check_matrices(config)
    if config.backend != "fsdp" or not config.optim_kwargs:
        return
    if "weight_decay" in config.optim_kwargs:  # which every group of weights has already
        raise ConfigError("optim_kwargs holds weight_decay, which is the key weight_decay. Write it there.")
    import torch

    from trainers.backends.fsdp.optimizer import build_optimizer

    layer = torch.nn.Linear(2, 2)
    for weight in layer.parameters():
        weight.grad = torch.ones_like(weight)
    try:
        optimizer = build_optimizer(
            config.optim,
            layer,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            adam_betas=(config.adam_beta1, config.adam_beta2),
            adam_epsilon=config.adam_epsilon,
            kwargs=config.optim_kwargs,
        )
        for _ in range(2):  # the second adds up
            optimizer.step()
        if not all(weight.isfinite().all() for weight in layer.parameters()):
            raise ValueError("weights are no finite numbers after two steps")
    except Exception as error:  # of any kind, by what is given
        raise ConfigError(f"optim_kwargs={config.optim_kwargs} do not fit optim={config.optim}: {error}") from None


def _check_matrices(config: TrainConfig) -> None:
    """Raises ConfigError for a model with other weights than matrices and vectors, where all are Muon's."""
    if config.optim != "muon" or config.has_adapter or config_file(config.model) is None:
        return
    from trainers.backends.fsdp.optimizer import muon_groups
    from trainers.backends.fsdp.tuners.adapters import without_weights
    from trainers.backends.fsdp.vision.parts import freeze

    try:
        module = without_weights(config.model, trust_remote_code=config.trust_remote_code)
    except ValueError:
        return
    if is_vision(module.config):
        freeze(module, vision_settings(config)["frozen"])
    muon_groups(module, 0.0, {})


def check_files(config: TrainConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for the folder of any role's model in which another file than the weights cannot be read."""
    for key, folder in _folders(config, groups):
        if key == "reward_model":  # of PPO's critic; what is no reward model at all is told as such
            with mistakes_of(key):
                check_reward_model(folder, config.trust_remote_code)
        configuration_of(str(folder), config.trust_remote_code, key)
        if (folder / ADAPTER).is_file():
            raise ConfigError(
                f"{key}: {str(folder)!r} holds an adapter beside a model ({ADAPTER}), and transformers would load the "
                f"base model that this file names. Give the folder of the merged model, or remove {ADAPTER}."
            )
        if mistake := generation_mistake(folder):
            raise ConfigError(f"{key}: {str(folder)!r} cannot be loaded: {mistake}. Copy or download the model again.")


def check_weights(config: TrainConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for the folder of any role's model without weights, or with a file whose header is damaged.

    Apart from the other checks: a configuration can be checked where its models lie without weights.
    """
    for key, folder in _folders(config, groups):
        chosen = config.model_init_kwargs.keys() & OTHER_FILES if key == "model" else ()
        if not chosen and (mistake := weights_mistake(folder)):
            raise ConfigError(f"{key}: {str(folder)!r} cannot be loaded: {mistake}. Copy or download the model again.")


def _folders(config: TrainConfig, groups: DeviceGroups | None) -> Iterator[tuple[str, Path]]:
    """The folders of the models of all roles, with the keys that name them. Models of the hub or of plugins have none
    yet."""
    for role, model in models_of(config, groups):
        if is_there(folder := Path(model).expanduser(), Path.is_dir):
            named = next((name for name in config.ROLES[role].models if getattr(config, name, None)), "model")
            yield named, folder


def check_model_folder(config: TrainConfig) -> None:
    """Raises ConfigError for a folder that is no model, arguments it does not take, and a tokenizer of another model.

    A model by a hub name, or of a plugin, is not there yet.
    """
    if not is_there(config.model, Path.is_dir):
        return
    found = configuration_of(config.model, config.trust_remote_code)
    check_whole(found, config.model, config.backend, scores=config.SCORES)
    if config.backend == "megatron" and found.model_type in SEEING and new_tokens(config):
        raise ConfigError(
            f"new_special_tokens: {config.model!r} is a vision model, and would lose its tower with rows for new "
            "tokens. Remove them."
        )
    check_vision_model(config, found)
    if config.backend == "fsdp":
        check_arguments("model_init_kwargs", config.model_init_kwargs, config.model, config.trust_remote_code)
        check_adapter(config, config.model)
        check_balance(config, found)
    if config.tokenizer is None or is_there(config.tokenizer, Path.is_dir):
        tokenizer, name = load_tokenizer(config, config.model), config.tokenizer or config.model
        check_vocabulary(tokenizer, found, name, config.model, without=new_tokens(config))


def check_new_tokens(config: TrainConfig) -> None:
    """Raises ConfigError for a model beside the policy that does not know the tokens of ``new_special_tokens``.

    Warns of an adapter that leaves their embeddings as they are drawn.
    """
    if not config.new_special_tokens:
        return
    tokenizer = tokenizer_there(config)
    for key in ("ref_model", "teacher_model", "critic_model"):
        model = getattr(config, key, None)
        if tokenizer is not None and model not in (None, config.model) and Path(model).is_dir():
            with_key = "value_model" if key == "critic_model" else key
            check_same_tokens(with_key, model, tokenizer, config.trust_remote_code)
    lora = lora_settings(config)
    whole = ("modules_to_save", "trainable_token_indices")
    if lora and not any(lora.get(name) for name in whole) and "embed_tokens" not in config.lora_target_modules:
        logger.warning(
            "new_special_tokens: the adapter does not train embeddings and head, so the new tokens keep their "
            "first rows. lora_kwargs: {modules_to_save: [embed_tokens, lm_head]} trains both"
        )


def check_adapter(config: TrainConfig, model: str) -> None:
    """Raises ConfigError for an adapter, or fields beside it, that does not fit the model or parts its tied weights.

    No weights are read, and nothing is known of a model that cannot be built without them. Adapters of ``backend:
    megatron`` are checked by ``megatron_checks.py``.
    """
    lora = lora_settings(config)
    if lora is None or config.backend != "fsdp":
        return
    is_all = lora["target_modules"] == "all-linear"
    if config.tuner_type == "lora" and is_all and not config.lora_kwargs:
        return
    from trainers.backends.fsdp.tuners.adapters import (
        check_tied,
        spelled_out,
        target_mistake,
        tuner_mistake,
        with_modules,
        without_weights,
    )
    from trainers.backends.fsdp.tuners.kinds import fields_mistake

    try:
        module = without_weights(model, trust_remote_code=config.trust_remote_code)
    except ValueError:
        return
    settings = with_modules(module, lora)
    check_tied(module, settings)
    if mistake := None if is_all else target_mistake(module, settings):
        told = ", ".join(config.lora_target_modules) or "empty"
        raise ConfigError(
            f"lora_target_modules is {told}, which do not fit {model!r}: {mistake}. Name some of these, or write "
            "all-linear for all."
        )
    if mistake := tuner_mistake(module, config.tuner_type, settings):
        raise ConfigError(f"tuner_type: {config.tuner_type} does not fit {model!r}: {mistake}")
    if config.tuner_type == "lora" and config.lora_kwargs:
        module = without_weights(model, trust_remote_code=config.trust_remote_code)  # peft changed the first
        mistake = _numbers_mistake(config, module, settings) or fields_mistake(module, spelled_out(module, settings))
        if mistake:
            raise ConfigError(f"lora_kwargs do not fit {model!r}: {mistake}. Correct or remove them.")


def _numbers_mistake(config: TrainConfig, module: Any, settings: Mapping[str, Any]) -> str | None:
    """What in fields of an adapter names a layer, a token or a module that the model lacks, of which peft says
    nothing."""
    text = module.config.get_text_config()
    for name, size in (("layers_to_transform", text.num_hidden_layers), ("trainable_token_indices", text.vocab_size)):
        asked = settings.get(name)
        found = [asked] if isinstance(asked, int) else asked if isinstance(asked, (list, tuple)) else ()
        if odd := [one for one in found if not 0 <= one < size]:
            return f"{name} has {odd[0]}, and the model has the numbers 0 to {size - 1}"
    names = [name for name, _ in module.named_modules()]
    for asked in () if gives_values(config) else settings.get("modules_to_save") or ():
        if not any(f".{name}".endswith(f".{asked}") for name in names):
            return f"modules_to_save has {asked}, and no module of the model has this name"
    weights = [name for name, _ in module.named_parameters()]
    for asked in settings.get("target_parameters") or ():
        if not any(f".{name}".endswith(f".{asked}") for name in weights):
            return f"target_parameters has {asked}, and no weight of the model has this name"
    return None


def check_balance(config: TrainConfig, configuration: Any) -> None:
    """Raises ConfigError if experts shall be balanced, and transformers' class has none or no loss that does it.

    A class that comes with the model is asked where it is built.
    """
    if not config.router_aux_loss_coef:
        return
    from trainers.backends.fsdp import router

    kind = router.class_of(configuration)
    if kind is not None and (mistake := router.mistake(kind, configuration)):
        raise ConfigError(f"router_aux_loss_coef is {config.router_aux_loss_coef}, but {mistake}")


def check_sequences(config: TrainConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for workers and models with which ``sequence_parallel_size`` workers cannot share rows.

    A model that is not there yet is asked where it is built.
    """
    size = config.sequence_parallel_size
    if size == 1:
        return
    from trainers.backends.fsdp.sequence_attention import sequence_mistakes

    for role, model in models_of(config, groups):
        num_workers = 1 if groups is None else groups.group_of(role).num_workers
        if num_workers % size:
            raise ConfigError(
                f"sequence_parallel_size {size} lets this number of workers share rows, but role {role} has "
                f"{num_workers} of them. Start a multiple of {size}, or remove the key."
            )
        if config_file(model) is None:
            continue
        kwargs = config.model_init_kwargs
        if role == "teacher":
            kwargs = getattr(config, "teacher_model_init_kwargs", None) or {}
        fields = {key: value for key, value in kwargs.items() if key not in OF_FROM_PRETRAINED}
        found = configuration_of(model, config.trust_remote_code, **fields)
        for mistake in sequence_mistakes(found, size):
            raise ConfigError(f"role {role}: {mistake}")
        dropout = [name for name in ATTENTION_DROPOUT if getattr(found.get_text_config(), name, 0)]
        if learns(config, role) and not config.disable_dropout and dropout:
            raise ConfigError(
                f"disable_dropout is false and the model has {dropout[0]}, which attention over shared rows "
                f"(sequence_parallel_size {size}) does not apply. Write disable_dropout: true."
            )


def check_lengths(config: RunConfig) -> None:
    """Raises ConfigError for a limit of tokens that is far beyond the positions that the model knows.

    Nothing is known of a model that is not there yet, nor where its positions are scaled.
    """
    said = dict(changed(config, ("max_length", "max_completion_length")))
    lengths = {name: value for name, value in said.items() if value is not None}
    if not lengths or config_file(config.model) is None:
        return
    fields = {key: value for key, value in config.model_init_kwargs.items() if key not in OF_FROM_PRETRAINED}
    positions = positions_of(configuration_of(config.model, config.trust_remote_code, **fields))
    for name, length in lengths.items():
        if positions is not None and length > FAR_BEYOND * positions:
            raise ConfigError(
                f"{name} is {length}, but the model {config.model!r} has {positions} positions "
                f"(max_position_embeddings), and its configuration does not scale them. Write {positions} at most, "
                "or scale its rope_parameters by model_init_kwargs."
            )


def positions_of(configuration: Any) -> int | None:
    """Positions that a model knows; None: it does not say, or scales them, so that vLLM takes another number."""
    text = configuration.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "llama3" and ("factor" in rope or kind in ("longrope", "su")):
        return None
    return getattr(text, "max_position_embeddings", None)


def check_whole(configuration: Any, model: str, backend: str = "fsdp", *, scores: bool = False) -> None:
    """Raises ConfigError for a model that no class here builds whole; ``scores``: it is a sequence classifier.

    That is one of which transformers has no class that gives tokens, or one that sees or hears, of which a class for
    text alone would be trained and saved.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if backend == "fsdp" and is_vision(configuration):
        return
    if backend == "megatron" and configuration.model_type in SEEING:  # it has the tower too
        return
    towers = [name for name in ("vision_config", "audio_config") if getattr(configuration, name, None) is not None]
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(configuration), None)
    is_known = configuration.model_type in CONFIG_MAPPING and not getattr(configuration, "auto_map", None)
    if backend == "fsdp" and kind is None and is_known and not scores:
        raise ConfigError(
            f"model: {model!r} is of the type {configuration.model_type}, which neither AutoModelForCausalLM nor "
            "AutoModelForImageTextToText of transformers can build. Use a language model or a vision model."
        )
    if towers and kind is not None and getattr(kind, "config_class", None) is not type(configuration):
        raise ConfigError(
            f"model: {model!r} has a {towers[0].removesuffix('_config')} tower, and is trained here by "
            f"{kind.__name__}, which is only for text. The saved model would lack its tower. Train vision models with "
            "backend: fsdp. Audio models are not supported yet."
        )


def check_vision_model(config: TrainConfig, found: Any) -> None:
    """Raises ConfigError for what a vision model cannot do yet, and for keys of one that a language model has not."""
    sees = is_vision(found)
    if mistake := vision_mistake(config, sees=sees):
        raise ConfigError(f"{mistake}.")
    if not sees:
        return
    if gives_values(config) and is_one_piece(found):
        raise ConfigError(
            f"model: {config.model!r} ({found.model_type}) has no linear head (reward models, classifiers, critics): "
            "transformers has no class of the model without its own head. Take another vision model."
        )
    if config.backend == "megatron":  # whose adapters are on the language model
        if found.model_type in SPEAKING and gives_values(config):
            raise ConfigError(
                f"model: {config.model!r} ({found.model_type}) is also an audio model, and has no linear head (reward "
                "models, classifiers, critics). Use another vision model."
            )
        if found.model_type in SPEAKING and hasattr(config, "rollout_engine"):
            raise ConfigError(
                f"model: {config.model!r} ({found.model_type}) is also an audio model, and no engine completes prompts "
                "for such a model here. Train it in SFT, DPO or KTO, or use another vision model."
            )
        rates = [name for name in ("vit_lr", "aligner_lr") if getattr(config, name) is not None]
        if rates and not config.learning_rate:
            raise ConfigError(
                f"{rates[0]} is a share of learning_rate with backend: megatron, but learning_rate is 0. Raise "
                "it, and write "
                "freeze_llm: true to keep the language model unchanged."
            )
        if config.freeze_llm and config.has_adapter:
            raise ConfigError(
                "freeze_llm is true, but an adapter of backend: megatron is only on the language model. "
                "Remove freeze_llm or the adapter."
            )
        if config.freeze_llm and config.pipeline_model_parallel_size > 1:
            raise ConfigError(
                "freeze_llm is true, but with backend: megatron only the first pipeline stage has other trained "
                "weights. Write pipeline_model_parallel_size: 1, or backend: fsdp."
            )
    if config.sequence_parallel_size > 1:
        raise ConfigError(
            f"sequence_parallel_size is {config.sequence_parallel_size}, but workers cannot share rows with pictures "
            "yet. Remove it."
        )
    if getattr(config, "rollout_engine", "hf") == "vllm":
        check_engine_sees(config, found)


def check_engine_sees(config: Any, found: Any) -> None:
    """Raises ConfigError if vLLM cannot complete prompts for a vision model of this configuration, which is trained."""
    from trainers.rollout.vllm.vision.features import check_pictures

    check_pictures(found)
    frozen = set(vision_settings(config)["frozen"])
    is_whole = not {"vit", "aligner"} & frozen
    if config.vllm_enable_lora and not {"vit", "aligner"} <= frozen:
        raise ConfigError(
            "vllm_enable_lora: the engine runs an adapter of the language model only. Set freeze_vit: true and "
            "freeze_aligner: true, or vllm_enable_lora: false, which merges the adapter into the engine's weights."
        )
    drops = getattr(config, "sleep_level", 0) == 2 or config.vllm_engine_kwargs.get("load_format") == "dummy"
    if config.backend == "megatron" and not is_whole and drops:
        raise ConfigError(
            "backend: megatron does not send the frozen parts of a vision model to the engine. So the engine must "
            "keep the parts that it has read. Set sleep_level: 1, and no load_format: dummy."
        )


def gives_values(config: Any) -> bool:
    """Whether a model of the run has a linear head: the classifier that is trained, or PPO's critic."""
    return getattr(config, "SCORES", False) or hasattr(config, "value_model")


def configuration_of(model: str, trust_remote_code: bool, key: str = "model", **kwargs: Any) -> Any:
    """The configuration of the model that ``key`` names; with ``return_unused_kwargs`` the arguments that are none of
    its fields too.

    Raises ConfigError.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, **kwargs)
    except Exception as error:  # of any kind, by what the folder holds
        raise ConfigError(_configuration_mistake(key, model, error)) from None


def _configuration_mistake(key: str, model: str, error: Exception) -> str:
    """Why there is no configuration of the model, in words."""
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        is_adapter = (folder / ADAPTER).is_file()
        return f"{key}: {model!r} has no config.json. " + (
            "It holds an adapter alone. Give the folder of the merged model."
            if is_adapter
            else "Give the folder that holds it, with weights and tokenizer."
        )
    if (file := config_file(model)) is not None:
        try:
            found = json.loads(file.read_bytes())
        except (OSError, ValueError) as unread:
            return f"{key}: {str(file)!r} cannot be read as JSON: {unread}. Copy or download the model again."
        if not isinstance(found, dict):
            return f"{key}: {str(file)!r} is not a JSON object of fields. Copy or download the model again."
        if mistake := own_code_mistake(model, found):
            return mistake
    told = " ".join(str(error).split()) or type(error).__name__
    return f"{key}: {model!r} has no configuration that can be read: {told}"


def is_encoder(configuration: Any) -> bool:
    """Whether a model of this configuration fills in masked tokens, such as BERT: it sees those to the right too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    return MODEL_FOR_MASKED_LM_MAPPING.get(type(configuration), None) is not None


def check_arguments(name: str, kwargs: Mapping[str, Any], model: str, trust_remote_code: bool) -> None:
    """Raises ConfigError for arguments that are neither of ``from_pretrained`` nor fields of the configuration."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from trainers.backends.fsdp import packed_attention

    fields = {key: value for key, value in kwargs.items() if key not in OF_FROM_PRETRAINED}
    if fields:
        _, unused = configuration_of(model, trust_remote_code, return_unused_kwargs=True, **fields)
        if unused:
            raise ConfigError(
                f"{name} holds {', '.join(unused)}, which is neither an argument of from_pretrained nor a field of the "
                "model's configuration. Remove it."
            )
    packed_attention.register()
    attention = kwargs.get("attn_implementation")
    known = ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())
    if isinstance(attention, str) and attention not in known and "/" not in attention:
        raise ConfigError(f"{name}: attn_implementation must be one of {', '.join(known)}; got {attention!r}")
    if attention is not None and not isinstance(attention, (str, Mapping)):
        raise ConfigError(f"{name}: attn_implementation must be a name, got {attention!r}")


def check_vocabulary(
    tokenizer: Any, configuration: Any, tokenizer_name: str, model: str, *, without: Sequence[str] = ()
) -> None:
    """Raises ConfigError if the tokenizer has ids that the model has no embeddings of, ``without`` some tokens."""
    size = getattr(configuration.get_text_config(), "vocab_size", None)
    highest = max((k for token, k in tokenizer.get_vocab().items() if token not in without), default=-1)
    if isinstance(size, int) and highest >= size:
        raise ConfigError(
            f"tokenizer: {tokenizer_name!r} has token ids up to {highest}, but the model {model!r} has embeddings of "
            f"{size} tokens. Name the model's own tokenizer, or give the model larger embeddings."
        )
