"""The paper's statements on filters (§5.4), measured on the filters of the VIZ runs: before the growth, after it, at the end.

A filter is a matrix (colour, place). cos is the cosine of two filters as vectors. The *pattern* of a filter is the first right
singular vector of that matrix, its orientation whatever its colours; the *colour* is the first left one.

    kept      mean cos of each old filter before the growth and at the end, and the same for filters that do not belong together
    pattern   mean |cos| of a new filter's patterns after the growth and at the end; colour likewise
    size      mean norm of new filters over that of old ones, at the end
    twins     mean cos of the two filters of a pair at the end (R2R's pairs begin equal), and that of filters of different pairs
    rough     share of a filter's energy in high spatial frequencies, at the end
    varied    mean 1 − |cos| of all pairs of filters at the end (`diversity.py`), without their high frequencies, and without
              filters that have faded to a thousandth of the others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.reading.curves import Estimate, student
from experiments.reading.diversity import Filters, diversity

Weights = np.ndarray


@dataclass(frozen=True)
class Changes:
    """One arm, means over seeds with intervals."""

    arm: str
    n: int
    kept: Estimate
    unrelated: Estimate
    pattern: Estimate
    colour: Estimate
    size: Estimate
    twins: Estimate
    others: Estimate
    rough_new: Estimate
    rough_old: Estimate
    varied: Estimate


def unit(vectors: Weights) -> Weights:
    norm = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.divide(vectors, norm, out=np.zeros_like(vectors), where=norm > 1e-12)


def cosines(one: Weights, other: Weights) -> Weights:
    """cos of each filter of one set with each of another."""
    return unit(one.reshape(len(one), -1)) @ unit(other.reshape(len(other), -1)).T


def parts(filters: Weights) -> tuple[Weights, Weights]:
    """Colours (n, 3) and patterns (n, places)."""
    left, _, right = np.linalg.svd(filters.reshape(len(filters), filters.shape[1], -1), full_matrices=False)
    return left[:, :, 0], right[:, 0, :]


def high_frequencies(filters: Weights) -> Weights:
    """Which spatial frequencies are above half of the highest one, in either direction."""
    across = np.abs(np.fft.fftfreq(filters.shape[-1])) > 0.25
    return across[:, None] | across[None, :]


def smooth(filters: Weights) -> Weights:
    return np.fft.ifft2(np.where(high_frequencies(filters), 0, np.fft.fft2(filters))).real


def rough(filters: Weights) -> float:
    """Mean share of energy at high spatial frequencies."""
    energy = np.abs(np.fft.fft2(filters)) ** 2
    high = high_frequencies(filters)
    total = energy.sum(axis=(1, 2, 3))
    return float(np.mean(energy[:, :, high].sum(axis=(1, 2)) / np.where(total > 0, total, 1)))


def of_seed(before: Weights, after: Weights, end: Weights) -> dict[str, float]:
    old, half = len(before), (len(end) - len(before)) // 2
    own, new_after, new_end = cosines(before, end[:old]), after[old:], end[old:]
    (colour_a, pattern_a), (colour_e, pattern_e) = parts(new_after), parts(new_end)
    among = cosines(new_end, new_end)
    twins = np.array([among[k, k + half] for k in range(half)])
    different = among[:half, half:][~np.eye(half, dtype=bool)]
    norms = np.linalg.norm(end.reshape(len(end), -1), axis=1)
    return {
        "kept": float(np.diag(own).mean()),
        "unrelated": float(own[~np.eye(old, dtype=bool)].mean()),
        "pattern": float(np.abs((pattern_a * pattern_e).sum(axis=1)).mean()),
        "colour": float(np.abs((colour_a * colour_e).sum(axis=1)).mean()),
        "size": float(norms[old:].mean() / norms[:old].mean()),
        "twins": float(twins.mean()),
        "others": float(different.mean()),
        "rough_new": rough(new_end),
        "rough_old": rough(end[:old]),
        "varied": diversity(smooth(end[norms > 1e-3 * np.median(norms)])),
    }


def within(key: str, one: Estimate) -> Estimate:
    """The interval of a cosine ends where cosines do."""
    return one if key == "size" else replace(one, low=max(one.low, -1.0), high=min(one.high, 1.0))


def changes(filters: Filters) -> dict[str, Changes]:
    """All arms that have filters of the three moments."""
    found = {}
    for arm in dict.fromkeys(name.split("/")[0] for name in filters):
        seeds = sorted({name.split("/")[1] for name in filters if name.startswith(arm + "/")}, key=int)
        rows: Sequence[dict[str, float]] = [
            of_seed(*(filters[f"{arm}/{seed}/{when}"] for when in ("before", "after", "end")))
            for seed in seeds
            if all(f"{arm}/{seed}/{when}" in filters for when in ("before", "after", "end"))
        ]
        if rows:
            found[arm] = Changes(arm, len(rows), **{key: within(key, student([row[key] for row in rows])) for key in rows[0]})
    return found
