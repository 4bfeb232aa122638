"""Static findings about a decorated class: ``python -m rayhelper check module:Class``.

checker.py       loads the class and prints; the list of rules
source.py        a class as its source shows it; module.py: the file around it; accesses.py: what a method touches
objects.py       which objects there are: the class's own, its parts, and what attributes and parameters hold;
                 held.py: what a value holds; expressions.py, givings.py, names.py: how that is found out
reaches.py       what a method does with each object
flow.py          which processes run which method
decorators.py, calls.py, state.py, bodies.py, parts.py    the rules; absences.py: code that knows of None
"""

from rayhelper.check.checker import check, findings
from rayhelper.check.module import Finding

__all__ = ["Finding", "check", "findings"]
