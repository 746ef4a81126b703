"""Non-dominated sorting and crowding distances of NSGA-II (Deb et al., 2002). All values are minimised.

a dominates b if a is nowhere larger and somewhere smaller. Front 0 is what nothing dominates, front 1 what only front 0
dominates, and so on. Inside a front, points with distant neighbours are preferred: the crowding distance of a point is the sum
over objectives of the distance between its two neighbours, relative to the range of the front; points at the ends have ∞.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Values = Sequence[float]


def dominates(one: Values, other: Values) -> bool:
    """Whether `one` is nowhere larger than `other`, and somewhere smaller.

    Example:
        >>> dominates((1, 2), (1, 3)), dominates((1, 2), (2, 1))
        (True, False)
    """
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(a < b for a, b in zip(one, other, strict=True))


def fronts(points: Sequence[Values]) -> list[list[int]]:
    """The numbers of the points of each front, the best front first.

    Example:
        >>> fronts([(1, 3), (2, 2), (3, 3), (3, 1)])
        [[0, 1, 3], [2]]
    """
    count = [sum(dominates(other, point) for other in points) for point in points]  # that dominate it
    result: list[list[int]] = []
    left = set(range(len(points)))
    while left:
        front = sorted(number for number in left if count[number] == 0)
        result.append(front)
        left -= set(front)
        for number in left:
            count[number] -= sum(dominates(points[better], points[number]) for better in front)
    return result


def crowding(points: Sequence[Values]) -> list[float]:
    """The crowding distance of each point of one front.

    Example:
        >>> crowding([(0, 4), (1, 1), (4, 0)])
        [inf, 2.0, inf]
    """
    distance = [0.0] * len(points)
    for axis in range(len(points[0]) if points else 0):
        order = sorted(range(len(points)), key=lambda number: points[number][axis])
        span = points[order[-1]][axis] - points[order[0]][axis]
        distance[order[0]] = distance[order[-1]] = math.inf
        for before, here, after in zip(order, order[1:], order[2:], strict=False):
            distance[here] += (points[after][axis] - points[before][axis]) / span if span else 0.0
    return distance


def ranking(points: Sequence[Values]) -> list[tuple[int, float]]:
    """The front of each point and minus its crowding distance: smaller is better, in this order.

    Example:
        >>> ranking([(1, 3), (2, 2), (3, 3), (3, 1)])
        [(0, -inf), (0, -2.0), (1, -inf), (0, -inf)]
    """
    result = [(0, 0.0)] * len(points)
    for rank, front in enumerate(fronts(points)):
        for number, distance in zip(front, crowding([points[number] for number in front]), strict=True):
            result[number] = rank, -distance
    return result
