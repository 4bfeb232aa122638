"""Reinforcement learning from groups of completions: GRPO and its family."""

from trainers import from_folder

__getattr__ = from_folder(__name__)
