"""Preference learning without a reference model: CPO, SimPO and ORPO."""

from trainers import from_folder

__getattr__ = from_folder(__name__)
