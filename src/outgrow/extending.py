"""What methods from outside the package are written with. docs/extending.md explains it along examples.

outgrow.Method            the base class of a method; `outgrow.register_method` gives a subclass a name
State                     what new units are where they are written
Volume, Slot              the units that grow together, and each place in a parameter or buffer that belongs to them
Verdict                   what the operators behind the units demand of the readers
Draft, Recipe             what a method returns: choices per volume, and values per slot
free, zeros, typical, forced   the usual recipes
"""

from outgrow.methods.base import Draft, Init, Method, Recipe, forced, free, typical, zeros
from outgrow.states import State, Verdict
from outgrow.volumes import Slot, Volume

__all__ = [
    "Draft",
    "Init",
    "Method",
    "Recipe",
    "Slot",
    "State",
    "Verdict",
    "Volume",
    "forced",
    "free",
    "typical",
    "zeros",
]
