"""Distillation from a teacher."""

from trainers import from_folder

__getattr__ = from_folder(__name__)
