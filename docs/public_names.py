"""For the API reference: public names before files, and examples as code.

Where a public name is also the name of a file, `outgrow.grow` is the function. What stands under "Example:" in a docstring is
read as griffe reads "Examples:", as code. An extension of griffe, which reads the source for mkdocstrings without importing it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class PublicNames(griffe.Extension):
    """Replace a submodule by the function or class of the same name that the package exports."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_package(self, *, pkg: griffe.Module, loader: Any, **kwargs: Any) -> None:
        for name in map(str, pkg.exports or ()):
            module = pkg.members.get(name)
            if isinstance(module, griffe.Module):
                found = defined(pkg, name)
                others = {key: member for key, member in module.members.items() if member is not found}
                found.members.update(others)  # what else the file defines is still found by its path
                pkg.set_member(name, found)


def defined(package: griffe.Module, name: str) -> griffe.Object | griffe.Alias:
    """What `api.py` imports by this name."""
    imported = package.members["api"].members[name]
    found: Any = package
    for part in imported.target_path.split(".")[1:]:
        found = found.members[part]
    return found
