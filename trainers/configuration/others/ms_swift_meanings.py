"""Keys that mean one thing in ms-swift and another in TRL: in a file of ms-swift's names, as keys of ours that say it.

    reward_funcs: [accuracy]      [ms_swift_accuracy]; so are the other functions that come with ms-swift
    soft_*, cosine_*, repetition_*    arguments of these, which stand beside the other keys there
    scale_rewards                 refused where an estimator here divides by something else
    label_smoothing of sigmoid    cdpo; what differs further in DPO's losses is refused
    strict, top_k: -1             skip_broken_rows, top_k: 0
    max_length of GKD             max_length and max_prompt_length: it cuts what is to be completed too
    epsilon, epsilon_high         nothing with a loss that clips nothing
    router_aux_loss_coef          nothing with a model whose class adds no loss of its routers
    rope_scaling, max_model_len   model_init_kwargs: {rope_parameters: ..., max_position_embeddings: ...}
    INFONCE_TEMPERATURE ...       keys of the same names in small letters, of embeddings and rerankers
    sequence_parallel_size        of GRPO: accumulation and generations count all workers there
    loss_scale of SFT             with +ignore_empty_think, where the chat template writes empty thoughts
    preserve_thinking             true, or false if only the last round is learned, where the template knows thoughts
    enable_thinking               false in prompts, where the chat template writes empty thoughts
    stop_words                    stop_token_ids, of words that are tokens of their own
    wandb_project, swanlab_token  variables of env, which the trackers read
    temperature, response_prefix  nothing where nothing is generated

Defaults are ``defaults.py``. What a key of ours says already, is left.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.configuration.others.ms_swift_keys import choose_backend
from trainers.configuration.others.ms_swift_pictures import configuration_of, pictures_as_there
from trainers.configuration.others.ms_swift_rows import rows_as_there
from trainers.configuration.reading.given_keys import GivenKeys, plain
from trainers.configuration.values import read_template
from trainers.data.texts.thoughts import may_not_think

REWARDS = ("accuracy", "format", "cosine", "repetition", "soft_overlong")
# Their arguments: keys there, and what the function here calls them
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "cosine": {
        "cosine_max_len": "max_len",
        "cosine_min_len_value_wrong": "min_len_value_wrong",
        "cosine_max_len_value_wrong": "max_len_value_wrong",
        "cosine_min_len_value_correct": "min_len_value_correct",
        "cosine_max_len_value_correct": "max_len_value_correct",
    },
    "repetition": {"repetition_n_grams": "n_grams", "repetition_max_penalty": "max_penalty"},
    "soft_overlong": {"soft_max_length": "soft_max_length", "soft_cache_length": "soft_cache_length"},
}
# Keys that ms-swift reads from variables of the environment, of the same names in large letters
OF_ENVIRONMENT = (
    "infonce_",
    "listwise_reranker_",
    "generative_reranker_",
    "max_positive_samples",
    "max_negative_samples",
)
OWN_SCALES = {"rloo": "none", "reinforce_plus_plus": "batch"}  # where nobody says, there too
OF_MODELS: Mapping[str, Mapping[str, str]] = {  # swift/template/templates/llm.py (GMETemplate) and qwen.py
    "gme-Qwen2-VL": {"end_token": "<|endoftext|>"},
    "Qwen3-VL-Embedding": {"end_token": "<|endoftext|>", "system": "Represent the user's input."},
}
FAKE_MARGIN = "infonce_fake_neg_margin"
SWITCHES = ("infonce_use_batch", "infonce_mask_fake_negative", "infonce_include_qq", "infonce_include_dd")  # 1 is true
SMOOTH = ("sapo", "vespo", "real")  # losses whose weights fall smoothly instead of being clipped
OF_GENERATION = (  # which ms-swift reads in such a training only with predict_with_generate
    *("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "num_beams", "stop_words", "logprobs"),
    *("top_logprobs", "structured_outputs_regex", "response_prefix"),
)
OF_PROMPTS = {"num_labels", "max_negative_samples", "infonce_temperature"}  # trainers whose rows may lack an answer
THOUGHTS = "disable_ignore_empty_think"
THINKING = "the chat template, which reads thoughts"
OF_TRACKERS = {
    "wandb_project": "WANDB_PROJECT",
    "swanlab_project": "SWANLAB_PROJECT",
    "swanlab_token": "SWANLAB_API_KEY",
}
LIMITED = {"cosine": "max_len", "soft_overlong": "soft_max_length"}  # by max_completion_length, where nobody says


def mean_as_there(given: GivenKeys, config_type: type, defaults: Mapping[str, Any]) -> None:
    """Puts our keys in place of ms-swift's in ``given``, before other translations."""
    choose_backend(given)
    rows_as_there(given, config_type, defaults)
    _rewards(given, defaults)
    _clipping(given, defaults)
    _routers(given)
    _sequences(given, defaults)
    _variables(given)
    _embedding_models(given)
    pictures_as_there(given)
    _positions(given)
    _pairs(given)
    _scales(given)
    _thoughts(given, defaults)
    _without_generation(given)
    _stop_words(given)
    _trackers(given)
    if given.get("dynamic_sample") is True and "dynamic_sample" in given.known:
        given.notes["max_resample_times"] = (
            "after this number of draws, prompts with equal rewards fill the generation; ms-swift then uses its "
            "whole first draw"
        )
    if given.get("top_k") == -1:  # all tokens
        given.values["top_k"] = 0
    if given.foreign("strict") and "skip_broken_rows" in given.known:
        given.put("skip_broken_rows", given.take("strict") is not True, "strict")
    is_distillation = {"gkd_logits_topk", "max_prompt_length", "max_length"} <= set(given.known)
    if is_distillation and given.get("max_length") is not None and "max_prompt_length" not in given.values:
        given.put("max_prompt_length", given.get("max_length"), "max_length")
    if is_distillation and _has_micro_batches(given, defaults):
        given.notes["per_device_train_batch_size"] = (
            "the loss is a mean over all tokens of a step; in ms-swift it is one per micro-batch, and then over these"
        )


def _has_micro_batches(given: GivenKeys, defaults: Mapping[str, Any]) -> bool:
    """Whether a step has several micro-batches, of one worker or of several."""
    steps = given.get("gradient_accumulation_steps", defaults.get("gradient_accumulation_steps"))
    return steps != 1 or given.get("use_ray") is True or "TORCHELASTIC_RUN_ID" in os.environ


def _without_generation(given: GivenKeys) -> None:
    """Every training there has the keys of generation, and most generate nothing."""
    if {"max_completion_length", "num_return_sequences"} & set(given.known):
        return
    for name in OF_GENERATION:
        ends_prompt = name == "response_prefix" and OF_PROMPTS & set(given.known)
        if given.foreign(name) and not ends_prompt:
            given.take(name)
            given.notes[name] = "this training generates nothing, and ms-swift does not read it either"


def _trackers(given: GivenKeys) -> None:
    """Keys that name a tracker's project or key, as the variables that the tracker reads."""
    for name, variable in OF_TRACKERS.items():
        if given.foreign(name) and "env" in given.known and isinstance(given.get(name), str):
            given.put_inner("env", variable, given.take(name), name)


def _stop_words(given: GivenKeys) -> None:
    """Words that are tokens of their own, such as ``<|im_end|>``; there other words end a completion too."""
    name = "stop_words"
    if not given.foreign(name) or "stop_token_ids" not in given.known or not given.get(name):
        return
    words = given.get(name)
    words = [words] if isinstance(words, str) else words
    known = _own_tokens(given)
    if isinstance(words, list) and known is not None and all(str(word) in known for word in words):
        given.take(name)
        said = given.get("stop_token_ids") or []
        given.put("stop_token_ids", [*said, *(known[str(word)] for word in words)], name)


def _own_tokens(given: GivenKeys) -> dict[str, int] | None:
    """The tokens that the model's tokenizer finds before it cuts text, and their ids; None: it is not there yet."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(given.values["model"])
    except (KeyError, OSError, TypeError, ValueError):  # who loads the tokenizer says what is wrong with it
        return None
    return dict(tokenizer.get_added_vocab())


def _thoughts(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """Of models that think: which thoughts stand in conversations, which are learned, and whether prompts invite them.

    A model that may think or not does not think there, unless ``enable_thinking`` says so.
    """
    learns, completes = "preserve_thinking" in given.known, "chat_template_kwargs" in given.known
    template = _chat_template(given) if learns or completes else ""
    said_by = "model" if "model" in given.where else "chat_template"
    if completes and may_not_think(template) and not given.foreign("enable_thinking"):
        given.put_inner("chat_template_kwargs", "enable_thinking", False, said_by)
    if not learns:
        return
    scale = _scale_of_thoughts(given, defaults, template, said_by)
    if "<think>" in template and given.get("assistant_only_loss") is not True:
        if given.get("preserve_thinking") is None:
            given.values["preserve_thinking"] = scale is not None and not scale.startswith("last_round")
            given.where["preserve_thinking"] = given.where[said_by]
            given.origins["preserve_thinking"] = THINKING
        if given.foreign("enable_thinking"):
            given.take("enable_thinking")
            given.notes["enable_thinking"] = "the answers of rows are learned as they stand, also in ms-swift"
    elif given.get("preserve_thinking") is None and given.values.pop("add_non_thinking_prefix", None) is not None:
        given.notes["add_non_thinking_prefix"] = "the chat template knows no thoughts"


def _scale_of_thoughts(given: GivenKeys, defaults: Mapping[str, Any], template: str, said_by: str) -> str | None:
    """``loss_scale``, with empty thoughts that are not learned; None: of a trainer of pairs, the last round alone."""
    if "loss_scale" not in given.known:
        return "default" if "learns_prompts" in given.known else None  # of ORPO, which ms-swift tells apart
    disables = given.foreign(THOUGHTS) and type(given.get(THOUGHTS)) is bool and given.take(THOUGHTS)
    scale = given.get("loss_scale", defaults.get("loss_scale"))
    if not isinstance(scale, str) or disables or scale == "all" or "ignore_empty_think" in scale:
        return str(scale)
    if may_not_think(template):
        given.values["loss_scale"] = f"{scale}+ignore_empty_think"
        given.where.setdefault("loss_scale", given.where[said_by])
        given.origins["loss_scale"] = "the chat template, which writes empty thoughts"
    return scale


def _chat_template(given: GivenKeys) -> str:
    """The text of the chat template that is named, or else of the model's; '' if the model is not there yet."""
    from transformers.utils.hub import cached_file

    said = given.values.get("chat_template")
    if isinstance(said, str):
        path = Path(said).expanduser()
        return read_template(path) if said.endswith(".jinja") and path.is_file() else said
    model = given.values.get("model")
    if not isinstance(model, str):
        return ""
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            file = cached_file(model, name)
            text = Path(file).read_text(encoding="utf-8") if file else ""
            found = text if name.endswith(".jinja") or not text else json.loads(text).get("chat_template")
        except (OSError, ValueError):  # who loads the tokenizer says what is wrong with it
            continue
        if found:
            return str(found)
    return ""


def _clipping(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    loss = given.get("loss_type", defaults.get("loss_type"))
    for name in ("epsilon", "epsilon_high"):
        if name in given.known and name in given.values and loss in SMOOTH:
            del given.values[name]
            given.notes[name] = f"loss_type {loss} does not read it"


def _pairs(given: GivenKeys) -> None:
    """Losses of DPO that are others there under one name (``swift/rlhf_trainers/dpo_trainer.py``)."""
    if "rpo_alpha" not in given.known:
        return
    listed = given.get("loss_type", "sigmoid")
    types = listed.split() if isinstance(listed, str) else list(listed or ["sigmoid"])
    smoothing = given.get("label_smoothing")
    if smoothing and "sigmoid" in types:
        given.values["loss_type"] = ["cdpo" if name == "sigmoid" else name for name in types]
        given.where.setdefault("loss_type", given.where["label_smoothing"])
        given.origins["loss_type"] = f"label_smoothing {smoothing}"
    if "exo_pair" in types and not smoothing:
        given.values["label_smoothing"] = 1e-3
        given.where.setdefault("label_smoothing", given.where["loss_type"])
    if "bco_pair" in types and "bco_shift" in given.known and "bco_shift" not in given.values:
        given.values["bco_shift"], given.where["bco_shift"] = True, given.where["loss_type"]
        given.origins["bco_shift"] = "loss_type bco_pair"
        given.notes["loss_type"] = (
            "bco_pair shifts rewards by their mean over optimizer steps; ms-swift's mean counts each micro-batch, "
            "also in evaluations"
        )
    if "ipo" in types and len(types) > 1:
        given.refuse(
            "loss_type",
            "ms-swift divides all losses by lengths if ipo is one of them. RayHelper cannot do this. Write one",
        )
    if given.get("ld_alpha") is not None:
        given.refuse(
            "ld_alpha",
            "ld_alpha of ms-swift weighs only the policy; here it weighs the reference too. Remove it, or write "
            "defaults: trl",
        )


def _scales(given: GivenKeys) -> None:
    """What advantages are divided by, where it is said: each estimator here has its own (``swift/rl_core``)."""
    scale, estimator = given.get("scale_rewards"), given.get("advantage_estimator")
    if "scale_rewards" not in given.known or scale is None:
        return
    if scale == "gdpo":
        given.refuse(
            "scale_rewards",
            "scale_rewards gdpo adds 1e-8 to deviations, which is not built. Write multi_objective_aggregation: "
            "normalize_then_sum, which adds 1e-4, in its place",
        )
        given.values["scale_rewards"] = "group"
    elif estimator in OWN_SCALES and scale == "group":
        own = OWN_SCALES[estimator]
        given.refuse(
            "scale_rewards",
            f"scale_rewards group of ms-swift divides advantages of {estimator} by the deviation of their group, which "
            f"is not built. Write scale_rewards: {own}",
        )


def _rewards(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    if "reward_funcs" not in given.known or not given.values.get("reward_funcs"):
        return
    listed = given.get("reward_funcs")
    names = listed.split() if isinstance(listed, str) else listed
    if not isinstance(names, list):
        return
    longest = given.get("max_completion_length", defaults.get("max_completion_length"))
    own = _registered(given.get("external_plugins"))
    given.values["reward_funcs"] = [_meant(plain(name), given, longest, own) for name in names]
    called = [spec.get("name") if isinstance(spec, Mapping) else spec for spec in map(plain, names)]
    for name in [name for name in REWARDS if name in called and name not in own]:
        for key in ARGUMENTS.get(name, {}):
            given.values.pop(key, None)


def _embedding_models(given: GivenKeys) -> None:
    """What ms-swift's templates of embedding models that see put around a text; it knows them by their names too."""
    name = Path(str(given.get("model"))).name
    for beginning, keys in OF_MODELS.items():
        for key, value in keys.items():
            is_known = key in given.known and "mrl_dims" in given.known
            if name.startswith(beginning) and is_known and not given.values.get(key):
                given.values[key], given.where[key], given.origins[key] = value, given.where["model"], "model"


def _variables(given: GivenKeys) -> None:
    """What the environment says of the losses of embeddings and rerankers, if no key does.

    A variable that the loss does not read is left: ms-swift does not look at it either.
    """
    names = [name for name in given.known if name.startswith(OF_ENVIRONMENT)]
    loss, in_batch = str(given.get("loss_type", "infonce")), plain(os.environ.get("INFONCE_USE_BATCH", "true"))
    unread = {"pointwise_reranker": "listwise_", "listwise_reranker": " "}.get(
        loss, " " if loss == "infonce" else "infonce_"
    )
    of_batch = ("infonce_mask", "infonce_include", "infonce_fake") if in_batch in (False, 0, "0") else ()
    for name in names:
        said = os.environ.get(name.upper())
        is_question = given.get("task_type") == "generative_reranker" or not name.startswith("generative_")
        if said is None or name in given.values or name.startswith((unread, *of_batch)) or not is_question:
            continue
        value = said if name.endswith("_token") else plain(said)
        given.values[name] = bool(value) if type(value) is int and name in SWITCHES else value
        given.where[name] = "environment"
        given.origins[name] = name.upper()
    if given.get("infonce_mask_fake_negative") is not True and given.origins.get(FAKE_MARGIN) == FAKE_MARGIN.upper():
        del given.values[FAKE_MARGIN]


def _routers(given: GivenKeys) -> None:
    """A class that adds no loss of its routers ignores the coefficient there. Nothing is known of a hub's model."""
    name, folder = "router_aux_loss_coef", Path(str(given.get("model"))).expanduser()
    coef = given.get(name)
    is_asked = (
        isinstance(coef, (int, float)) and coef > 0 and name in given.known and given.get("backend") != "megatron"
    )
    if not is_asked or not (folder / "config.json").is_file():
        return
    from transformers import AutoConfig

    from trainers.backends.fsdp import router

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception:  # of any kind, by what the folder holds; whoever loads the model says it
        return
    kind = router.class_of(config)
    if kind is not None and router.lacks_loss(kind, config):
        given.take(name)
        given.notes[name] = f"{kind.__name__} of transformers adds no such loss, also not in ms-swift"


def _positions(given: GivenKeys) -> None:
    """``rope_scaling`` with ``max_model_len``: how a model reaches more positions than it knows.

    The factor is max_model_len / positions, rounded up (``swift/arguments/base_args/model_args.py``).
    """
    names = [name for name in ("rope_scaling", "max_model_len") if given.foreign(name)]
    if not names or "model_init_kwargs" not in given.known:
        return
    said: dict[str, Any] = {name: given.take(name) for name in names}
    asked, longest = said.get("rope_scaling"), said.get("max_model_len")
    scaling: dict[str, Any] = (
        {"rope_type": asked} if isinstance(asked, str) else dict(asked) if isinstance(asked, Mapping) else {}
    )
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    config = configuration_of(given)
    if (asked is None and longest is None) or config is None:  # who loads the model says why there is none
        return
    text = config.get_text_config()
    own: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    known: Any = getattr(text, "max_position_embeddings", None)
    is_plain = "rope_theta" in own and isinstance(known, int) and text is config
    if given.get("backend") == "megatron" or not scaling or not is_plain:
        given.refuse(
            names[0],
            f"{' and '.join(names)}: RayHelper scales positions for backend: fsdp, for language models with one "
            "rotary embedding, and with rope_scaling. Write them into the model's config.json, and remove them",
        )
        return
    known = (
        scaling.get("original_max_position_embeddings")
        or own.get("original_max_position_embeddings")
        or (known // own["factor"] if own.get("factor") else known)
    )
    if "factor" not in scaling and type(longest) is not int:
        given.refuse("rope_scaling", f"rope_scaling {asked} needs a factor, or max_model_len: a number. Write one")
        return
    factor = scaling.get("factor") or max(float(math.ceil(longest / known)), 1.0)
    kept = {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if own.get(name) is not None}
    parameters = {**kept, **scaling, "factor": factor, "original_max_position_embeddings": int(known)}
    given.put_inner("model_init_kwargs", "rope_parameters", parameters, names[0])
    given.put_inner("model_init_kwargs", "max_position_embeddings", longest or int(known * factor), names[0])


def _sequences(given: GivenKeys, defaults: Mapping[str, Any]) -> None:
    """In GRPO a step has as many sequences there as without shared rows; here workers that share rows count once."""
    name = "sequence_parallel_size"
    size = given.get(name)
    if "steps_per_generation" not in given.known or type(size) is not int or size < 2:
        return
    for counted in ("gradient_accumulation_steps", "steps_per_generation"):
        count = given.get(counted, defaults.get(counted))
        if type(count) is int and count > 0 and given.get("global_batch_size") is None:
            given.values[counted] = count * size
            given.where.setdefault(counted, given.where[name])
            given.origins[counted] = f"{counted} {count}, {name} {size}"


def _meant(spec: Any, given: GivenKeys, longest: Any, own: set[str]) -> Any:
    name = spec.get("name") if isinstance(spec, Mapping) else spec
    if name not in REWARDS or name in own:
        return spec
    said = dict(spec) if isinstance(spec, Mapping) else {}
    arguments = {meant: given.get(key) for key, meant in ARGUMENTS.get(name, {}).items() if given.get(key) is not None}
    if name in LIMITED:
        arguments = {LIMITED[name]: longest, **arguments}
    arguments |= {key: value for key, value in said.items() if key != "name"}
    return {"name": f"ms_swift_{name}", **arguments} if arguments else f"ms_swift_{name}"


def _registered(plugins: Any) -> set[str]:
    """Names of these functions that a plugin's file registers for functions of its own."""
    files = [plugins] if isinstance(plugins, str) else plugins if isinstance(plugins, list) else []
    found: set[str] = set()
    for file in [one for text in files for one in str(text).split()]:
        path = Path(file).expanduser()
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        found |= {name for name in REWARDS if re.search(rf"(orms\[|register_reward\()\s*['\"]{name}['\"]", text)}
    return found
