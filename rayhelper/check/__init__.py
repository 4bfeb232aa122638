"""Static findings about a decorated class: ``python -m rayhelper check module:Class``.

checker.py       loads the class and prints; the list of rules
source.py        a class as its source shows it; module.py: the file around it; accesses.py: what a method touches
flow.py          which processes run which method
decorators.py, calls.py, state.py, bodies.py    the rules
"""

from rayhelper.check.checker import check, findings
from rayhelper.check.module import Finding

__all__ = ["Finding", "check", "findings"]
