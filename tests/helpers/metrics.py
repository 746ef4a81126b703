"""A metric for schedulers that wait for one."""

from __future__ import annotations


def metric(t: int) -> float:
    return [1.0, 0.8, 0.9, 0.9, 0.9][t % 5] - 0.001 * t
