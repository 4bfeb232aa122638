"""What GRPO asks of its environment and of its device groups before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rayhelper import ConfigError, DeviceGroups
from trainers.configuration.mistakes import mistakes_of
from trainers.grpo.config import GRPOConfig
from trainers.plugins import load_plugins
from trainers.rewards.functions import numbered, resolve_rewards
from trainers.rewards.models import model_name
from trainers.rollout.environments import Environment
from trainers.rollout.schedulers import environment_named, is_scheduler
from trainers.rollout.tool_calls import tool_call_parser
from trainers.rollout.tools import ToolEnvironment, resolve_tools, schemas


def environment_of(config: GRPOConfig, tokenizer: Any = None) -> Callable[[], Environment]:
    """What makes the environment of an episode. Raises ConfigError for one that cannot be made.

    ``tokenizer`` None: of a model that is not there yet; whether it fits the tools is not checked.
    """
    load_plugins(config.external_plugins)
    if config.tools:
        with mistakes_of("tools"):
            tools = resolve_tools(config.tools)
        with mistakes_of("tool_call_parser"):
            arguments = (config.tool_call_parser, tokenizer, schemas(tools), config.chat_template_kwargs)
            parse: Any = None if tokenizer is None else tool_call_parser(*arguments)
            return partial(ToolEnvironment, tools, parse)
    if config.reward_processes and is_scheduler(config.environment):
        raise ConfigError(
            "reward_processes is not supported with a scheduler of ms-swift. Reward functions get its rollout_infos "
            "only on the driver. Write reward_processes: 0."
        )
    with mistakes_of("environment"):
        return environment_named(config.environment, max_turns=config.turn_limit, tokenizer=tokenizer)


def check_sampled(config: GRPOConfig) -> None:
    """Raises ConfigError if dynamic_sample names a reward that is not there."""
    if not isinstance(config.dynamic_sample, str):
        return
    names = numbered(
        [*(name for _, name in resolve_rewards(config.functions)[0]), *map(model_name, config.reward_model)]
    )
    names += ["environment"] * config.is_rewarded_by_environment
    if config.dynamic_sample not in names:
        raise ConfigError(
            f"dynamic_sample compares the rewards {config.dynamic_sample!r}, and this run has none of that name "
            f"(known: {', '.join(names)}). Write one of them, or true for the weighted sum of all."
        )


def check_used(config: GRPOConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for a device group whose roles have nothing to do."""
    is_used = {
        "reference": config.beta > 0 and not config.is_own_reference,
        "teacher": config.teacher_model is not None,
        "reward": bool(config.reward_model),
    }
    for group in () if groups is None else groups.groups:
        if not any(is_used.get(role, True) for role in group.roles):
            raise ConfigError(
                f"device group {group.name!r} hosts {', '.join(group.roles)} alone, which this run does not use. Its "
                "devices would be idle. Remove the group, or give the key that a role needs. Role reference: beta and, "
                "with LoRA, ref_model. Role teacher: teacher_model. Role reward: reward_model."
            )
