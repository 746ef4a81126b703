"""How alike the filters of a layer are: two numbers for a set of filters, before a growth, just after it, and at the end.

A filter is taken as a vector less its own mean (a constant says nothing about a shape); cos is the cosine of two of them.

    diversity = mean over all pairs of 1 − |cos|                         0: all the same up to sign and size; 1: all orthogonal
    symmetry  = mean over new filters of the largest |cos| with another    1: each new filter has a twin

Equal filters are what R2R and Net2Net begin with; symmetry at the end shows whether training has parted them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.reading.result_files import FILTERS

WHEN = ("before", "after", "end")
Filters = dict[str, "np.ndarray"]


def read_filters(folder: Path) -> Filters:
    """Tensors (filters, 3, height, width) by "ARM/SEED/WHEN"; none where the file is not there."""
    path = folder / FILTERS
    if not path.exists():
        return {}
    from safetensors.numpy import load_file

    return {name: tensor.astype(np.float64) for name, tensor in load_file(path).items()}


def cosines(filters: np.ndarray) -> np.ndarray:
    """|cos| of each pair, with zeros on the diagonal; a filter that is constant is like none."""
    flat = filters.reshape(len(filters), -1).astype(np.float64)
    flat = flat - flat.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(flat, axis=1, keepdims=True)
    flat = np.divide(flat, norm, out=np.zeros_like(flat), where=norm > 1e-12)
    alike = np.abs(flat @ flat.T)
    np.fill_diagonal(alike, 0)
    return np.minimum(alike, 1)


def diversity(filters: np.ndarray) -> float:
    n = len(filters)
    return float(1 - cosines(filters).sum() / (n * (n - 1)))


def symmetry(filters: np.ndarray, new: int) -> float:
    """Of the filters from number `new` on."""
    return float(cosines(filters).max(axis=1)[new:].mean())


@dataclass(frozen=True)
class Look:
    """Means over seeds, and standard deviations; symmetry is None before the growth, where nothing is new."""

    arm: str
    when: str
    n: int
    filters: int
    diversity: float
    diversity_sd: float
    symmetry: float | None
    symmetry_sd: float | None


def ahead(one: Look, other: Look) -> bool:
    """Whether one set of filters is clearly more diverse: by twice both deviations, of more than two seeds."""
    return min(one.n, other.n) > 2 and one.diversity - other.diversity > 2 * (one.diversity_sd + other.diversity_sd)


def measure_all(filters: Filters) -> list[Look]:
    rows = []
    for arm in dict.fromkeys(name.split("/")[0] for name in filters):
        seeds = sorted({name.split("/")[1] for name in filters if name.startswith(arm + "/")}, key=int)
        for when in WHEN:
            sets = [filters[f"{arm}/{seed}/{when}"] for seed in seeds if f"{arm}/{seed}/{when}" in filters]
            olds = [len(filters[f"{arm}/{seed}/before"]) for seed in seeds if f"{arm}/{seed}/before" in filters]
            if not sets:
                continue
            spread = [diversity(one) for one in sets]
            twins = [symmetry(one, old) for one, old in zip(sets, olds, strict=True) if len(one) > old]
            rows.append(
                Look(
                    arm,
                    when,
                    len(sets),
                    len(sets[0]),
                    float(np.mean(spread)),
                    float(np.std(spread, ddof=1)) if len(sets) > 1 else 0.0,
                    float(np.mean(twins)) if twins else None,
                    float(np.std(twins, ddof=1)) if len(twins) > 1 else (0.0 if twins else None),
                )
            )
    return rows
