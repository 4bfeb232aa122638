"""The same program in several runtimes, call by call: ``rayhelper prove``."""

from rayhelper.prove.comparing import Difference
from rayhelper.prove.runs import prove, prove_class

__all__ = ["Difference", "prove", "prove_class"]
