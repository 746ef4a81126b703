"""Grow PyTorch networks without changing what they compute.

The public names come from `api.py`. It is imported when one of them is first used, so that `outgrow --help` does not
import torch.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outgrow.api import *

__all__ = [
    "R2R",
    "At",
    "Branch",
    "Comparison",
    "Deepen",
    "Family",
    "Fold",
    "GradMax",
    "Growth",
    "GrowthError",
    "Kernel",
    "MeanFill",
    "Method",
    "Net2Net",
    "NetMorph",
    "NewEntries",
    "North",
    "PActivation",
    "Pace",
    "Parallel",
    "RandomPad",
    "ResidualBlock",
    "Run",
    "Schedule",
    "Scores",
    "Search",
    "SearchResult",
    "Space",
    "Trial",
    "Upcycling",
    "When",
    "Widen",
    "branch",
    "cohorts",
    "compare",
    "deepen",
    "grow",
    "grow_checkpoint",
    "inspect_checkpoint",
    "kernel",
    "load",
    "places",
    "plan",
    "plateau",
    "reached",
    "register_method",
    "register_optimizer",
    "register_transform",
    "rule",
    "save",
    "scores",
    "search",
    "shard",
    "timeline",
    "trial",
    "upcycle",
    "volumes",
    "widen",
    "zero_init",
]

MODULES = (
    "dcp",
    "accelerate",
    "ray",
    "extending",
    "lightning",
    "recipes",
    "transformers",
)  # public; integrations need the library of their name
__path__.append(str(Path(__file__).with_name("former_names")))  # where e.g. `outgrow.blocks` is found


class Package(ModuleType):
    """A package whose public names can't be replaced by modules.

    Unpickling a model of version 0.1.0 imports the module `outgrow.plan`, which is now the name of a function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):  # the import system binds submodules
            super().__setattr__(name, value)

    def __reduce__(self) -> Any:  # as cloudpickle does for plain modules, in functions that Ray sends to other processes
        return importlib.import_module, (self.__name__,)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("outgrow.api"), name)
    if f"outgrow.{name}" in sys.modules or name in MODULES:
        return importlib.import_module(f"outgrow.{name}")  # waits for another thread that is importing it
    raise AttributeError(f"module 'outgrow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


sys.modules[__name__].__class__ = Package
