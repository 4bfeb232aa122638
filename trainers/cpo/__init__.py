"""Preferences, learned without a reference: CPO, SimPO and ORPO."""

from trainers import from_folder

__getattr__ = from_folder(__name__)
