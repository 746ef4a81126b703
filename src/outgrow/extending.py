"""What methods and transforms from outside the package are written with. docs/extending.md explains it along examples.

outgrow.Method            the base class of a method; `outgrow.register_method` gives a subclass a name
State                     what new units are where they are written
Volume, Slot              the units that grow together, and each place in a parameter or buffer that belongs to them
Verdict                   what the operators behind the units demand of the readers
Draft, Recipe             what a method returns: choices per volume, and values per slot
free, zeros, typical, forced   the usual recipes

Site                      what a transform plans with; `outgrow.register_transform` gives one a name
Plan, Change              what its planner returns, and what reports and tables show of it
Insertion, Rescaling      edits of a tensor: new entries along an axis, a factor for all entries
Setting                   an attribute of a module that changes
Insert, Start             a new module, and the values that it starts from
"""

from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Slot, Volume
from outgrow.growth_plan.module_starts import Start
from outgrow.growth_plan.plan import Change, Insert, Insertion, Plan, Rescaling, Setting
from outgrow.methods.base import Draft, Init, Method, Recipe, forced, free, typical, zeros
from outgrow.transforms.site_and_step import Site

__all__ = [
    "Change",
    "Draft",
    "Init",
    "Insert",
    "Insertion",
    "Method",
    "Plan",
    "Recipe",
    "Rescaling",
    "Setting",
    "Site",
    "Slot",
    "Start",
    "State",
    "Verdict",
    "Volume",
    "forced",
    "free",
    "typical",
    "zeros",
]
