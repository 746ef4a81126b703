"""Names for writing methods and transforms outside the package. docs/extending.md explains them with examples.

outgrow.Method            the base class of a method; `outgrow.register_method` gives a subclass a name
State                     how new units relate to others where they are written: pairs, copies, zeros …
Volume, Slot              the units that grow together, and each place in a parameter or buffer that belongs to them
Verdict                   what the operators after the units require of the weights that read them
Draft, Recipe             what a method returns: choices per volume, and values per slot
free, zeros, typical, forced   the usual recipes

Site                      the model and example that a transform plans for; `outgrow.register_transform` names a transform
Plan, Change              the result of its planner, and the line per volume in reports and tables
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
