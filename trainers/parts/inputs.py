"""What every trainer reads: the rows of its data, its model's path, and the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rayhelper import ConfigError, RayHelper
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import RunConfig, TrainConfig
from trainers.data.broken_rows import Counted, counted, prompt_mistake, without_broken
from trainers.data.images.conversations import COLUMNS
from trainers.data.images.processor import ImageReader, is_vision, load_processor, seen_too, video_refusal
from trainers.data.rows import drop_long_prompts, load_rows, prompt_of
from trainers.parts.model_checks import (
    check_adapter,
    check_vision_model,
    check_vocabulary,
    check_whole,
    configuration_of,
)
from trainers.parts.tokenizer import grown_model, load_tokenizer, tokenizer_there
from trainers.plugins import load_plugins, resolve_model
from trainers.rewards.functions import check_columns, resolve_rewards

REWARD_MODEL = "reward_model"


def read_rows(config: RunConfig, source: Any, split: str, images: ImageReader | None = None) -> Any:
    """The rows of ``dataset`` or ``eval_dataset``; ``images``: of a model that sees pictures, which rows then may have.

    For training rows it counts how many are left out, here and later. Raises ConfigError if there are no rows.
    """
    learns = isinstance(config, TrainConfig) and (source, split) == config.training_data
    counted.set(Counted((source, split), is_open=True) if learns else replace(counted.get(), is_open=False))
    with mistakes_of("dataset"):
        rows = load_rows(
            source,
            split=split,
            columns=config.columns,
            prompt_template=config.prompt_template,
            system=config.system,
            skip_broken=skips_broken(config),
            names={"model_name": config.model_name, "model_author": config.model_author},
            images=images is not None,
            no_videos=None if images is None else images.no_videos,
        )
    if learns:
        counted.set(replace(counted.get(), num_read=len(rows) + counted.get().num_left_out))
    return rows


def image_reader(
    config: Any,
    model: str,
    tokenizer: Any,
    beside: Mapping[str, str] | None = None,
    *,
    no_videos: str | None = None,
) -> ImageReader | None:
    """What reads the pictures of rows for a model that sees some; None for others, and where others read texts alone.

    ``config``: of training or of sampling. ``beside``: the other models of the run by the keys that name them; all
    must see pictures too. ``no_videos``: why the trainer shows no videos, and what to do. The chat template is the
    processor's, unless the configuration gives one.

    Raises:
        ConfigError: the model's processor cannot be loaded, or a model that is given its tokens has another one.
    """
    is_blind = getattr(config, "has_environment", False) and not getattr(config, "SEES_EPISODES", False)
    if is_blind:
        return None
    named = dict(beside or {})
    for name in (model, *named.values()):
        if not is_vision(configuration_of(name, config.trust_remote_code)):
            return None
    for key, name in named.items():
        if not key.startswith(REWARD_MODEL):  # which makes tokens of its own
            check_same_pixels(key, model, name, config.trust_remote_code, config.image_processor_kwargs)
    with mistakes_of("model"):
        told: dict[str, Any] = {"max_pixels": config.max_pixels, "urls": config.image_urls}
        told["processing"] = config.image_processor_kwargs
        told["videos"] = getattr(config, "video_processor_kwargs", None)
        told["no_videos"] = no_videos or videos_mistake(config, model, named)
        reader = ImageReader(tokenizer, model, trust_remote_code=config.trust_remote_code, **told)
        own = reader.processor.chat_template
        if told["videos"] and told["no_videos"] is None:
            load_processor(model, trust_remote_code=config.trust_remote_code, videos=told["videos"])
    if config.chat_template is None and own is not None:
        tokenizer.chat_template = own
    return reader


def videos_mistake(config: Any, model: str, beside: Mapping[str, str]) -> str | None:
    """Why the rows of a run of vision models cannot have videos, and what to do; None: they can.

    ``beside``: as of ``image_reader``.
    """
    if not hasattr(config, "video_processor_kwargs"):
        return "sampling passes no videos to a model. Use rows without videos"
    for key in ("rollout_engine", "teacher_engine"):
        if getattr(config, key, "hf") == "vllm":
            if key == "rollout_engine":  # auto takes it too, before rows are read
                told = "vllm, written or chosen by auto, passes no videos to a model"
                return f"{key}: {told}. auto does not read the rows. Write {key}: hf"
            return f"{key}: vllm passes no videos to a model. Write {key}: hf"
    if getattr(config, "has_environment", False):
        return "environments and tools pass no videos to a model. Remove them, or use rows without videos"
    trusted = config.trust_remote_code
    for name in dict.fromkeys((model, *beside.values())):
        if mistake := video_refusal(name, trust_remote_code=trusted):
            return mistake
    for key, name in beside.items():
        if key.startswith(REWARD_MODEL) or name == model:
            continue
        own, theirs = (load_processor(one, trust_remote_code=trusted, videos={}) for one in (model, name))
        if own.video_processor.to_dict() != theirs.video_processor.to_dict():
            return f"{key}: its processor makes other tokens of videos than the policy's. Use the same processor"
    return None


def check_same_pixels(
    key: str, policy: str, model: str, trust_remote_code: bool, processing: Mapping[str, Any]
) -> None:
    """Raises ConfigError for a model that makes other tokens of pictures than the policy, whose token ids it gets."""
    if model == policy:
        return
    told: dict[str, Any] = {"trust_remote_code": trust_remote_code, "processing": processing}
    own, theirs = (load_processor(name, **told) for name in (policy, model))
    if own.image_processor.to_dict() != theirs.image_processor.to_dict():
        raise ConfigError(
            f"{key}: the processor of {model!r} gives pictures other tokens than the processor of {policy!r}. But it "
            "would get the token ids of the policy. Use a model with the same processor."
        )


def read_prompts(
    config: RunConfig,
    source: Any,
    split: str,
    images: ImageReader | None = None,
    tokenizer: Any = None,
    *,
    added_columns: Sequence[str] = (),
) -> Any:
    """The rows of ``read_rows``, checked: each has a prompt to complete, and the columns that ``reward_funcs`` need.

    ``tokenizer``: the run's. None: the tokenizer of ``config.model``, if that is a folder. ``added_columns``: the
    columns for the functions that the trainer itself adds before it rewards completions.

    Raises:
        ConfigError: rows have no prompt, or a broken one, and ``skip_broken_rows`` is false. It names the first few.
            Or prompts are conversations, and the tokenizer has no chat template. Or a column is missing.
    """
    rows = read_rows(config, source, split, images)
    _check_reward_columns(config, source, split, [*rows.column_names, *added_columns])
    with mistakes_of("dataset"):
        if not {"prompt", "messages"} & set(rows.column_names):
            prompt_of(rows[0])
        mistake = seen_too(partial(prompt_mistake, empty=getattr(config, "has_environment", False)), images)
        columns = ("prompt", "messages", *(() if images is None else COLUMNS))
        rows = without_broken(rows, mistake, *columns, skip=skips_broken(config))
        if images is None and not getattr(config, "has_environment", False) and not isinstance(prompt_of(rows[0]), str):
            check_chat_template(tokenizer_there(config) if tokenizer is None else tokenizer)
    return rows


def _check_reward_columns(config: Any, source: Any, split: str, columns: Sequence[str]) -> None:
    """Raises ConfigError if a function of ``reward_funcs`` asks for another column. Not all trainers have that key."""
    if named := getattr(config, "reward_funcs", None):
        key = "eval_dataset" if (source, split) == config.evaluation_data else "dataset"
        told = [] if getattr(config, "environment", None) is None else ["rollout_infos"]  # by a scheduler
        with mistakes_of("reward_funcs"):
            check_columns(resolve_rewards(named)[0], [*columns, *told], key)


def check_chat_template(tokenizer: Any) -> None:
    """Raises ConfigError for a tokenizer that reads conversations by a template and has none.

    ``tokenizer`` None: it is not there yet.
    """
    from transformers import PreTrainedTokenizerBase

    by_template = getattr(type(tokenizer), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template
    if by_template and not tokenizer.chat_template:
        raise ConfigError(
            "chat_template: the prompts are conversations, and the tokenizer has no chat template. Write "
            "chat_template: FILE, with a Jinja template. Or use an instruct model, or prompts that are text."
        )


def without_long(config: CompletionConfig, rows: Any, tokenizer: Any, images: ImageReader | None = None) -> Any:
    """The rows, less those of long prompts where ``drop_long_prompts`` says so. Raises ConfigError if none is left."""
    if not config.drop_long_prompts or config.max_prompt_length is None:
        return rows
    with mistakes_of("dataset"):
        return drop_long_prompts(
            rows,
            tokenizer,
            max_prompt_length=config.max_prompt_length,
            chat_template_kwargs=config.chat_template_kwargs,
            images=images,
        )


def skips_broken(config: RunConfig) -> bool:
    """Whether rows that cannot be used are left out: ``skip_broken_rows``, which only trainers have."""
    return isinstance(config, TrainConfig) and config.skip_broken_rows


def load_model_and_tokenizer(config: RunConfig) -> tuple[str, Any]:
    """The folder or hub name of the model, and its tokenizer. If a plugin makes the model, or it needs new tokens, it
    is built first.

    Raises:
        ConfigError: a tokenizer that cannot be loaded, has no end-of-sequence token, or has more tokens than the model.
    """
    with mistakes_of("external_plugins"):
        load_plugins(config.external_plugins)
    model = model_path(config)
    tokenizer = load_tokenizer(config, model)
    found = configuration_of(model, config.trust_remote_code)
    check_vocabulary(tokenizer, found, config.tokenizer or model, model)
    check_whole(found, model, getattr(config, "backend", "fsdp"), scores=getattr(config, "SCORES", False))
    was_known = model == config.model and Path(model).is_dir()  # and so checked before anything started
    if isinstance(config, TrainConfig) and not was_known:
        check_vision_model(config, found)
        check_adapter(config, model)
    return model, tokenizer


@RayHelper.function(group="driver", execute="first")
def model_path(config: RunConfig) -> str:
    """The folder or hub name of the model, with rows for ``new_special_tokens``.

    One that a plugin builds, or that grows, is built once, and needs a folder that all see. A run that resumes takes
    the model that a plugin built for it before.
    """
    reuse = bool(getattr(config, "resume_from_checkpoint", None))
    return grown_model(config, resolve_model(config.model, output_dir=config.output_dir, seed=config.seed, reuse=reuse))
