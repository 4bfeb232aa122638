"""Preferences, learned from completions that were judged each by itself."""

from trainers import from_folder

__getattr__ = from_folder(__name__)
