"""Files that `torch.load(weights_only=True)` reads: plain values, tensors, and numpy's arrays; nothing that runs code.

A file that could be written but not be read back would take a good one's place: so what it holds is looked at before that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from outgrow.errors import CheckpointError
from outgrow.saving.atomic_write import Path


def without_numpy(tree: Any) -> Any:
    """The same with numpy's numbers as Python's: a schedule that calls np.cos makes such rates."""
    if isinstance(tree, np.generic):
        return tree.item()
    if type(tree) in (list, tuple):
        return type(tree)(without_numpy(item) for item in tree)
    return {key: without_numpy(value) for key, value in tree.items()} if type(tree) is dict else tree


def save_safely(state: Any, path: Path) -> None:
    """Write a file; CheckpointError if it holds what could not be read back."""
    torch.save(state, path)
    with safe_globals(_of_numpy()):
        strange = get_unsafe_globals_in_checkpoint(path)
    if strange:
        raise CheckpointError(
            f"nothing was written: it holds objects of {', '.join(sorted(strange))}, which can't be read back safely. Keep to "
            "numbers, words, lists, dicts, arrays and tensors in extra= and in the states of what also= names"
        )


def load_safely(path: Path) -> Any:
    with safe_globals(_of_numpy()):
        return torch.load(path, map_location="cpu", weights_only=True)


def _of_numpy() -> list[Any]:
    """What an array is rebuilt by."""
    core: Any = getattr(np, "_core", None) or np.core
    kinds = {type(np.dtype(kind)) for kind in "?bhilqBHILQefdFD"}
    return [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype, *kinds]
