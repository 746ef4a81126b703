"""Which batches a Lightning run has seen, so that one that is resumed within an epoch sees the rest of them, in the same order.

Lightning restores how many batches of an epoch are done, but neither the random state nor the shuffled order. Both follow from
the random state *before* the epoch's iterator is made: set it, make the iterator, pass over what was seen, then set the state
of the checkpoint.

    epoch:        state₀ → iter → batch 1 … batch n → stateₙ   (saved: state₀, n, stateₙ)
    resumed:      state₀ → iter → n batches, unused → stateₙ → batch n+1 …

Loaders with a state of their own (`state_dict`, `load_state_dict`) are left to Lightning, which restores them within epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from outgrow.saving.run_state import random_states, set_random_states


class Feed:
    """Where a run is among the batches of an epoch; a callback tells it of each."""

    def __init__(self, first: bool = True) -> None:
        self.seen = 0  # batches of this epoch; none between epochs
        self.before = _states(None)  # random states before the iterator of this epoch was made
        self._made = first  # Lightning makes that of the very first epoch before training starts

    def epoch_starts(self, trainer: Any) -> None:
        """To be called where Lightning is about to make the iterator."""
        if not self._made:
            self.before = _states(trainer)
        self._made = False

    def epoch_ends(self) -> None:
        self.seen = 0

    def state(self, trainer: Any) -> dict[str, Any]:
        return {"seen": self.seen, "before": self.before, "now": _states(trainer)}

    def stand_at(self, state: Mapping[str, Any], trainer: Any) -> None:
        """Be where a saved run was, without any iterator: its epoch had no more batches."""
        self.seen, self.before = state["seen"], state["before"]
        _set_states(state["now"], trainer)

    def go_to(self, state: Mapping[str, Any], trainer: Any, ended: bool) -> None:
        """Be where a saved run was, as training starts. ended: Lightning takes the epoch in which it was saved as done."""
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
                fetcher.fetched -= self.seen  # Lightning adds them itself
            _set_states(state["now"], trainer)
            self._made = False
        else:
            _set_states(state["now"], trainer)
            self._made = ended or not trainer.fit_loop.restarting  # otherwise it goes through the end of an epoch once more
            if self._made:
                iter(fetcher)


def _states(trainer: Any) -> dict[str, Any]:
    """Random states: the process's, and those of the loaders' generators; None where these are as they were made."""
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
    """Loaders, and all that decides about their order."""
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
    """Samplers that shuffle by the number of the epoch are told it later than the iterator is needed here."""
    for one in _samplers(trainer):
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(trainer.current_epoch)


def _stateful(trainer: Any) -> bool:
    return any(hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") for loader in _loaders(trainer))
