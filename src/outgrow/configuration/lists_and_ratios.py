"""New values of the fields of a configuration that describe sizes by lists (one item per stage) or by ratios.

    hidden_sizes [8, 16]        every item follows the size that it equals
    mlp_ratio r = hidden/width  r′ = r · (hidden′/hidden) / (width′/width)

A library computes a hidden size as int(width · ratio), so that a ratio is rounded up where it would give one unit less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RATIOS = ("mlp_ratio", "mlp_ratios", "expansion_ratio", "mlp_expansion_ratio")
GROWN = ((True, True), (True, False), (False, True))  # hidden units and width

Reached = Callable[[float], list[Any]]  # a size → the sizes that it may have after the growths


def new_lists(value: Any, reached: Reached) -> list[Any]:
    """The possible new values of a list of sizes; empty if none of its items has grown."""
    if type(value) not in (list, tuple) or not value or not all(type(item) is int for item in value):
        return []
    found = [type(value)(_pick(reached(item), pick, item) for item in value) for pick in (0, -1)]
    return [new for number, new in enumerate(found) if new != value and new not in found[:number]]


def _pick(sizes: Sequence[Any], index: int, otherwise: int) -> int:
    return int(sizes[index]) if sizes else otherwise


def new_ratios(name: str, value: Any, widths: Mapping[str, Any], reached: Reached) -> list[Any]:
    """The possible values of a ratio, or of a list with one ratio per stage, likeliest first; empty if nothing has grown.

    widths: the fields that are sizes.
    """
    ratios = list(value) if type(value) in (list, tuple) else [value]
    if name not in RATIOS or not ratios or not all(type(ratio) in (int, float) for ratio in ratios):
        return []
    found: list[Any] = []
    for stages in _stages(widths, len(ratios)):
        for grown in GROWN:
            new = [_new_ratio(ratio, width, grown, reached) for ratio, width in zip(ratios, stages, strict=True)]
            found.append(new[0] if ratios == [value] else type(value)(new))
    unique = [new for at, new in enumerate(found) if new not in found[:at]]
    return unique if unique != [value] else []


def _stages(widths: Mapping[str, Any], count: int) -> list[Sequence[int]]:
    """Possible widths of the stages: lists of that length, or one width for all."""
    lists = [value for value in widths.values() if type(value) in (list, tuple) and len(value) == count > 1]
    return lists or [[value] * count for value in dict.fromkeys(widths.values()) if type(value) is int]


def _new_ratio(ratio: float, width: int, grown: tuple[bool, bool], reached: Reached) -> float | int:
    """The ratio of hidden units to width after a growth of one of them or both."""
    hidden = int(width * ratio)
    new_hidden = _pick(reached(hidden) if grown[0] else (), 0, hidden)
    new_width = _pick(reached(width) if grown[1] else (), 0, width)
    if type(ratio) is int and new_hidden % new_width == 0:
        return new_hidden // new_width
    new = new_hidden / new_width
    return new if int(new_width * new) == new_hidden else math.nextafter(new, math.inf)
