"""Static findings about a decorated class: ``rayhelper check module:Class``.

checker.py       loads the class and prints; the list of rules
reading/         a class as its source shows it: the file around it, its objects and parts, what a method touches
flow.py          which processes run which method; reaches.py, absences.py, givings.py: what rules ask of it
decorators.py, parts.py, calls.py, state.py, bodies.py    the rules
"""

from rayhelper.check.checker import check, findings
from rayhelper.check.reading.module import Finding

__all__ = ["Finding", "check", "findings"]
