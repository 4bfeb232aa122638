"""The parts of trainers: what your own trainer is built of. ``docs/own_trainer.md`` has a table of their methods.

    from trainers.parts import Generator, Policy, Rewarder

Nothing is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainers import from_folder

if TYPE_CHECKING:
    from trainers.parts.checks import check_before_start, check_completions
    from trainers.parts.completion_metrics import rollout_metrics
    from trainers.parts.frozen import Reference, Teacher
    from trainers.parts.generator import Generator
    from trainers.parts.inputs import load_model_and_tokenizer, read_prompts, read_rows
    from trainers.parts.policy import Critic, DefaultPolicy, Model, Policy, Trained
    from trainers.parts.rewarder import Rewarder, check_rewards

__all__ = [
    "Critic",
    "DefaultPolicy",
    "Generator",
    "Model",
    "Policy",
    "Reference",
    "Rewarder",
    "Teacher",
    "Trained",
    "check_before_start",
    "check_completions",
    "check_rewards",
    "load_model_and_tokenizer",
    "read_prompts",
    "read_rows",
    "rollout_metrics",
]
__getattr__ = from_folder(
    __name__, ("policy", "frozen", "generator", "rewarder", "checks", "inputs", "completion_metrics")
)
