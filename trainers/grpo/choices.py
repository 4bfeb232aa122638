"""The loss and the advantage estimator that a configuration names, and which keys go with them. Imports no torch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

from rayhelper import ConfigError
from rayhelper.text import DID_YOU_MEAN, nearest
from trainers.losses.types import PolicyLossType
from trainers.plugins import ADVANTAGES, LOSSES, Registry, constants, named, parameters
from trainers.rewards import estimators

# The keys that name something registered: where, and what is there without plugins. The losses are written down,
# because importing them would import torch.
REGISTRIES: dict[str, tuple[Registry, tuple[str, ...]]] = {
    "loss_type": (LOSSES, get_args(PolicyLossType)),
    "advantage_estimator": (ADVANTAGES, estimators.BUNDLED),
}

DPPO = ("dppo_tv", "dppo_kl")
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "fipo")
# Keys that only some values of another key look at, and are refused with any other. Those of the keys above are the
# keyword-only parameters of what is bundled, as ``plugins.constants`` reads them.
READ_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "importance_sampling_level": ("loss_type", (*CLIPPED, "cispo", "sapo", "vespo")),
    "epsilon": ("loss_type", (*CLIPPED, "gmpo", "clip_cov", "cpgd", *DPPO)),
    "epsilon_high": ("loss_type", (*CLIPPED, "cispo", "gmpo", "clip_cov", "cpgd", *DPPO)),
    "delta": ("loss_type", (*CLIPPED, "clip_cov")),
    "dppo_ratio_cap": ("loss_type", DPPO),
    **{f"clip_cov_{name}": ("loss_type", ("clip_cov",)) for name in ("ratio", "lb", "ub")},
    **{f"kl_cov_{name}": ("loss_type", ("kl_cov",)) for name in ("ratio", "coef")},
    "real_tau": ("loss_type", ("real",)),
    "sapo_temperature_pos": ("loss_type", ("sapo",)),
    "sapo_temperature_neg": ("loss_type", ("sapo",)),
    **{f"vespo_{name}": ("loss_type", ("vespo",)) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    **{
        f"fipo_{name}": ("loss_type", ("fipo",))
        for name in ("decay_rate", "clip_range", "clip_high_only", "safety_threshold")
    },
    "reward_clip_range": ("advantage_estimator", ("rloo",)),
    "normalize_advantages": ("advantage_estimator", ("rloo",)),
    "multi_objective_aggregation": ("advantage_estimator", ("grpo",)),
    "pass_k": ("advantage_estimator", ("pass_at_k",)),
    "pass_threshold": ("advantage_estimator", ("pass_at_k",)),
    **{f"entropy_coef_{name}": ("use_adaptive_entropy", ("True",)) for name in ("min", "max", "delta")},
    "entropy_target": ("use_adaptive_entropy", ("True",)),
    "max_resample_times": ("dynamic_sample", ("True",)),
    **{f"ref_model_{name}": ("sync_ref_model", ("True",)) for name in ("mixup_alpha", "sync_steps")},
}

# Keys that are read for a loss before it is called: the ratios of its batch, and its selected tokens, are made so
GIVEN = ("importance_sampling_level", "real_tau", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio")


def is_known(config: Any, key: str, *, plugins_imported: bool) -> bool:
    """Whether the loss or the estimator that ``key`` names is bundled or registered.

    Raises ConfigError for one that is not, when no plugin is left to register it.
    """
    registry, bundled = REGISTRIES[key]
    name, arguments = named(getattr(config, key))
    known = list(dict.fromkeys((*bundled, *registry)))
    if not isinstance(name, str):
        raise ConfigError(
            f"{key} must be one of {', '.join(known)}, or {{name: ..., argument: value}}; got {getattr(config, key)!r}"
        )
    if name in bundled and arguments:
        raise ConfigError(
            f"{key}: {name} takes its arguments as separate keys. Write {', '.join(arguments)} beside {key}"
        )
    if name in known:
        return True
    if config.external_plugins and not plugins_imported:
        return False
    raise ConfigError(
        f"{key} must be one of {', '.join(known)}, got {name!r}.{nearest(name, known, DID_YOU_MEAN)} Register your own "
        f"with @register_{registry.kind}({name!r}) in a file of external_plugins."
    )


def check_read(config: Any) -> None:
    """Raises ConfigError for a key that is set and that nothing would look at.

    Keys of a loss or an estimator of a plugin are left to ``check_plugged``.
    """
    for name, (key, readers) in READ_BY.items():
        value = getattr(config, key)
        chosen = str(named(value)[0]) if key in REGISTRIES else str(bool(value))
        if key in REGISTRIES and chosen not in REGISTRIES[key][1]:
            continue
        if chosen not in readers:
            check_unset(config, name, f"{key}={chosen}", f" (it is read with {', '.join(readers).lower()})", key)


def check_unset(config: Any, name: str, unread_with: str, hint: str, key: str) -> None:
    """Raises ConfigError if a key that nothing looks at has another value than its default."""
    default = config.__dataclass_fields__[name].default
    if getattr(config, name) != default:
        raise ConfigError(
            f"{name} is {getattr(config, name)}, which has no effect with {unread_with}{hint}. Remove it, or set {key}."
        )


def check_real(config: Any) -> None:
    """Raises ConfigError for what changes single tokens, or divides a prompt's completions: real looks at neither."""
    for name, is_set in (
        ("rollout_importance_sampling_correction: false", config.rollout_correction is not None),
        ("off_policy_mask_threshold: null", config.off_policy_mask_threshold is not None),
        ("top_entropy_quantile: 1", config.top_entropy_quantile < 1),
    ):
        if is_set:
            raise ConfigError(f"loss_type: real classifies whole completions and weighs no tokens. Write {name}.")
    judges_tokens = named(config.advantage_estimator)[0] == "reinforce_plus_plus_token"
    if config.teacher_model is not None or judges_tokens:
        name = "advantage_estimator" if judges_tokens else "teacher_model"
        raise ConfigError(
            f"loss_type: real classifies whole completions, and {name} judges tokens. Remove one of the two."
        )
    if config.num_generations < 2:
        raise ConfigError("loss_type: real classifies the completions of a prompt: num_generations must be at least 2")


def check_plugged(config: Any) -> None:
    """Raises ConfigError for a loss or an estimator that nobody registered, for arguments that it does not take, and
    for keys that it does not read. Called before any process starts, when the plugins and all losses are imported."""
    for key, (registry, bundled) in REGISTRIES.items():
        is_known(config, key, plugins_imported=True)
        name, arguments = named(getattr(config, key))
        if name in bundled:
            continue
        function = registry[name].function
        taken = keys_of(function)
        if config.use_ray and function.__module__ == "__main__":
            raise ConfigError(
                f"{key}: {name} is registered by the script itself, which Ray's workers do not run. Register it in a "
                "separate file, and name the file in external_plugins."
            )
        for argument in arguments:
            if hasattr(config, argument):
                raise ConfigError(
                    f"{key}: {argument} is a key of the configuration. Write it as a separate key, not in {key}."
                )
        try:
            inspect.signature(function).bind(None, **constants(function, config, arguments))
        except TypeError as error:
            raise ConfigError(
                f"{key}: {name} cannot be called with {arguments or 'no arguments'}: {error}. Its arguments are its "
                f"keyword-only parameters ({', '.join(parameters(function)) or 'none'}), filled from keys of the "
                f"configuration or from {{name: {name}, argument: value}}."
            ) from None
        for unread, (reader, _) in READ_BY.items():
            if reader == key and unread not in taken and unread != "importance_sampling_level":
                check_unset(config, unread, f"{key}={name}", "", key)


def keys_of(function: Callable[..., Any]) -> set[str]:
    """The keys of a configuration that a loss or an estimator reads, by the names of its parameters."""
    keys: set[str] = set()
    for name, parameter in parameters(function).items():
        keys.add(name)
        if dataclasses.is_dataclass(shape := parameter.default):
            keys |= {f"{name}_{one.name}" for one in fields(shape)}
    return keys
