"""Batches that are read several times are the same, and reading them leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import outgrow
from outgrow.model.batches import drawn_again

NUMBERS = list(range(8))


def jittered(rows: list[int]) -> list[float]:
    return [row + random.random() + float(np.random.rand()) for row in rows]


def own() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Any]] = {
    "global": lambda: DataLoader(NUMBERS, 2, shuffle=True),
    "own generator": lambda: DataLoader(NUMBERS, 2, shuffle=True, generator=own()),
    "sampler": lambda: DataLoader(NUMBERS, 2, sampler=RandomSampler(NUMBERS, generator=own())),
    "transforms": lambda: DataLoader(NUMBERS, 2, collate_fn=jittered),
}


def state(loader: Any) -> list[Any]:
    holders = [loader, loader.sampler]
    own = [holder.generator.get_state().tolist() for holder in holders if getattr(holder, "generator", None) is not None]
    return [*own, torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_the_same_each_time_and_random_states_stay(name: str) -> None:
    loader = LOADERS[name]()
    before = state(loader)
    read = []
    for _ in range(2):
        with drawn_again(loader, 0):
            read.append([torch.as_tensor(batch).tolist() for batch in loader])
    assert read[0] == read[1]
    assert state(loader) == before


def test_a_learned_init_draws_nothing_when_it_is_made() -> None:
    before = torch.get_rng_state()
    outgrow.GradMax(DataLoader(NUMBERS, 2, shuffle=True), lambda model, batch: torch.zeros(()))
    assert torch.equal(before, torch.get_rng_state())
