"""The reasons why methods can't grow a volume, in short: methods with the same reason are grouped."""

from __future__ import annotations

import re

from outgrow.methods.all_methods import by_name


def grouped_reasons(text: str) -> str:
    """The reasons of several methods, as `outgrow.volumes` gives them, with each reason once.

    Example:
        >>> grouped_reasons("r2r: its units are mixed; netmorph(zero='writers'): its units are mixed; mean: it has no norm")
        "r2r, netmorph(zero='writers'): its units are mixed; mean: it has no norm"
    """
    names = "|".join(map(re.escape, by_name()))
    methods: dict[str, list[str]] = {}
    for part in re.split(rf"; (?=(?:{names})(?:\([^)]*\))?: )", text):
        found = re.match(rf"((?:{names})(?:\([^)]*\))?): (.*)", part, re.S)
        method, reason = found.groups() if found else ("", part)
        methods.setdefault(reason, []).append(method)
    return "; ".join(f"{', '.join(own)}: {reason}".removeprefix(": ") for reason, own in methods.items())
