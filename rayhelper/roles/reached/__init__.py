"""Which live objects with roles the code of a method reaches, and what it does with each of them.

    self.parts["judge"][0].score(x)       parts in containers, dataclasses, namespaces and plain objects
    for part in self.parts.values(): ...  under local names, in comprehensions, through properties and closures
    helper(self)                          in functions and methods of the user's project

An expression stands for the objects of the driver that it may have as its value. Each process builds the same ones. The
order of statements is not looked at, and branches are all taken: what is found may be more than what happens.
"""

from rayhelper.roles.reached.code import Reached
from rayhelper.roles.reached.values import is_module

__all__ = ["Reached", "is_module"]
