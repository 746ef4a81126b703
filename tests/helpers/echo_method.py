"""`Echo`, the method of the plugin package tests/outside, without importing the package, which would register it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.outside.outside_growth.methods import Echo
else:
    _spec = importlib.util.spec_from_file_location(
        "tests.helpers.echo_source", Path(__file__).parents[1] / "outside" / "outside_growth" / "methods.py"
    )
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_spec.name] = _module  # dataclasses look their module up there
    _spec.loader.exec_module(_module)
    Echo = _module.Echo

__all__ = ["Echo"]
