"""A model with its growths and the state of its optimizers in one file, without a run: for trials of a search.

The file is like those of `Run.save`: `outgrow.load(model, path)` reads the model in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from outgrow.model.unwrap import bare
from outgrow.saving.atomic_write import Path, place_for, write_whole
from outgrow.saving.checksums import sealed
from outgrow.saving.reshape_for_checkpoint import reshaping
from outgrow.saving.run_file import read_run, refuse_not_finite
from outgrow.saving.run_state import Parts, pack, random_states, restore, set_random_states
from outgrow.saving.torch_files import save_safely, without_numpy


def write_trained(path: Path, model: nn.Module, optimizers: Sequence[Any], extra: Any = None) -> None:
    """Write a model and its optimizers, completely or not at all; CheckpointError if the model holds NaN or infinity."""
    refuse_not_finite([model], path, "go back to a model from before training diverged")
    state = without_numpy({"outgrow": {"trained": True}, **pack(Parts(model, optimizers)), "extra": extra})
    write_whole(place_for(path, "write_trained('model.pt', model, [])"), lambda draft: save_safely(sealed(state), draft))


def read_trained(path: Path, model: nn.Module, optimizers: Sequence[Any]) -> Any:
    """Give a newly built model and its optimizers the shapes and values of a file; returns `extra`.

    Raises CheckpointError, and leaves everything as it was, if the file is damaged or does not fit. The random state stays.
    """
    state, before = read_run(path), random_states()
    try:
        with reshaping(bare(model), path) as journal:
            restore(Parts(model, optimizers), state, journal)
    finally:
        set_random_states(before)
    return state.get("extra")
