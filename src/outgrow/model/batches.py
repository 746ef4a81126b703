"""Batches that are read several times: the same ones each time, and without a trace in what draws them.

A DataLoader that shuffles takes its order from the global random state, or from a generator of its own; transforms of a dataset
use Python's and numpy's random numbers too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from outgrow.model.sandbox import random_state, seed_everything

HOLDERS = ((), ("sampler",), ("batch_sampler",), ("batch_sampler", "sampler"))  # of generators, from a DataLoader


@contextlib.contextmanager
def drawn_again(batches: Any, seed: int) -> Iterator[None]:
    """Read batches inside the context: each time from the same random state, which is restored afterwards.

    A generator of the DataLoader's own starts each time from where it is.
    """
    generators = _generators(batches)
    states = [generator.get_state() for generator in generators]
    with random_state():
        seed_everything(seed)
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _generators(batches: Any) -> list[torch.Generator]:
    """The generators of a DataLoader and its samplers."""
    found: dict[int, torch.Generator] = {}
    for path in HOLDERS:
        holder = batches
        for name in path:
            holder = getattr(holder, name, None)
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())
