"""For the API reference: what stands under "Example:" in a docstring is code, as under griffe's own "Examples:".

An extension of griffe, which reads the source for mkdocstrings without importing it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Rename the heading of examples before docstrings are read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
