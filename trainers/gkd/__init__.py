"""Distillation from a teacher model: GKD."""

from trainers import from_folder

__getattr__ = from_folder(__name__)
