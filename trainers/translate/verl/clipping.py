"""How far the ratio to the old policy may go, and over what the loss is averaged, in verl's keys."""

from __future__ import annotations

from typing import Any

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.names import ACTOR

UNREAD_CLIP = "it is read only where clip_ratio_low or clip_ratio_high is null. Their default is 0.2"


def clip_range(theirs: Theirs) -> tuple[tuple[Any, str], tuple[Any, str]]:
    """The lower and the upper range, each with the key that it comes from.

    The key of both ranges holds only where the range's own key is null: each has a default, 0.2.
    Source: ``compute_policy_loss_vanilla`` and actor.yaml.
    """
    both = f"{ACTOR}.clip_ratio"
    low, high = (both if theirs.take(f"{both}{side}") is None else f"{both}{side}" for side in ("_low", "_high"))
    return (theirs.take(low), low), (theirs.take(high), high)


def mean_of_tokens(theirs: Theirs, ours: Ours) -> None:
    """Says that the mean over tokens is another one there, but in verl's new workers."""
    name = "trainer.use_legacy_worker_impl"
    if theirs.take(f"{ACTOR}.loss_agg_mode") == "token-mean" and theirs.values.get(name) != "disable":
        ours.without["the mean over tokens"] = (
            f"{theirs.system} averages each micro-batch over its tokens, and then the micro-batches and GPUs. "
            "RayHelper averages all tokens of a step"
        )
