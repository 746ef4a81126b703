"""Packages that register operators, methods or optimizers, loaded for the command line.

In Python, a plugin is imported like any other package. A command line has no place for that import. Instead, a package names
the module to import under the entry points of the group "outgrow":

    [project.entry-points.outgrow]
    mylib = "mylib.growth"
"""

from __future__ import annotations

import sys

GROUP = "outgrow"


def load_plugins() -> None:
    """Import the plugins of installed packages. A plugin that fails is reported on stderr and skipped."""
    from importlib.metadata import entry_points

    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            point.load()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            print(f"outgrow: the plugin {point.name} ({point.value}) can't be loaded: {reason}", file=sys.stderr)
