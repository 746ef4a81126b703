"""Restore the order of batches when a Lightning run is resumed within an epoch.

Lightning restores the number of batches that are done, but neither the random state nor the shuffled order. Both follow from
the random state *before* the epoch's iterator was made: set it, make the iterator, skip the batches that are done, then set the
random state of the checkpoint.

    epoch:        state₀ → iter → batch 1 … batch n → stateₙ   (saved: state₀, n, stateₙ)
    resumed:      state₀ → iter → n batches, unused → stateₙ → batch n+1 …

Loaders with `state_dict` and `load_state_dict` are left to Lightning, which restores them within epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from outgrow.saving.run_state import random_states, set_random_states


class BatchPosition:
    """The position of a run among the batches of an epoch; the callback updates it."""

    def __init__(self, first: bool = True) -> None:
        self.seen = 0  # number of batches of this epoch that are done; 0 between epochs
        self.before = _states(None)  # random states before the iterator of this epoch was made
        self._made = first  # the iterator exists; Lightning makes that of the first epoch before training starts

    def epoch_starts(self, trainer: Any) -> None:
        """Note the random states; call this just before Lightning makes the iterator."""
        if not self._made:
            self.before = _states(trainer)
        self._made = False

    def epoch_ends(self) -> None:
        self.seen = 0

    def state(self, trainer: Any) -> dict[str, Any]:
        return {"seen": self.seen, "before": self.before, "now": _states(trainer)}

    def restore_without_iterator(self, state: Mapping[str, Any], trainer: Any) -> None:
        """Restore the position of a saved run whose epoch had no more batches."""
        self.seen, self.before = state["seen"], state["before"]
        _set_states(state["now"], trainer)

    def go_to(self, state: Mapping[str, Any], trainer: Any, ended: bool) -> None:
        """Restore the position of a saved run, as training starts. ended: Lightning counts the epoch of the save as done."""
        fetcher = trainer.fit_loop._data_fetcher
        self.seen = 0 if ended else state["seen"]
        self.before = state["before"] if self.seen else state["now"]
        if self.seen:
            if self.seen < trainer.num_training_batches and not _stateful(trainer):
                _set_states(self.before, trainer)
                _set_epoch(trainer)
                iter(fetcher)
                for _ in range(self.seen):
                    next(fetcher)
                fetcher.fetched -= self.seen  # Lightning adds this number itself
            _set_states(state["now"], trainer)
            self._made = False
        else:
            _set_states(state["now"], trainer)
            self._made = ended or not trainer.fit_loop.restarting  # otherwise Lightning repeats the end of the epoch
            if self._made:
                iter(fetcher)


def _states(trainer: Any) -> dict[str, Any]:
    """Random states of the process, and of the loaders' generators; None if the generators are in their initial state."""
    generators = None if trainer is None else [generator.get_state() for generator in _generators(trainer)]
    return {"process": random_states(), "generators": generators}


def _set_states(states: Mapping[str, Any], trainer: Any) -> None:
    set_random_states(states["process"])
    generators = list(_generators(trainer))
    if states["generators"] is None:
        for generator in generators:
            generator.manual_seed(generator.initial_seed())
    elif len(generators) == len(states["generators"]):
        for generator, state in zip(generators, states["generators"], strict=True):
            generator.set_state(state)


def _loaders(trainer: Any) -> list[Any]:
    return [loader for loader in tree_leaves(trainer.train_dataloader) if loader is not None]


def _samplers(trainer: Any) -> Iterator[Any]:
    """Loaders and the samplers that decide their order."""
    for loader in _loaders(trainer):
        batches = getattr(loader, "batch_sampler", None)
        yield from (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))


def _generators(trainer: Any) -> Iterator[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    for one in _samplers(trainer):
        generator = getattr(one, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    yield from found.values()


def _set_epoch(trainer: Any) -> None:
    """Set the epoch of samplers that shuffle by its number; Lightning does so only after the iterator is needed here."""
    for one in _samplers(trainer):
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(trainer.current_epoch)


def _stateful(trainer: Any) -> bool:
    return any(hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") for loader in _loaders(trainer))
