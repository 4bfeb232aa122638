"""Reward models, trained on pairs of answers."""

from trainers import from_folder

__getattr__ = from_folder(__name__)
