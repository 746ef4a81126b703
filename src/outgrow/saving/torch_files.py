"""Files that `torch.load(weights_only=True)` can read: plain values, tensors and numpy arrays; nothing that runs code.

Check that the file can be read back before it replaces the previous one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from outgrow.errors import CheckpointError
from outgrow.saving.atomic_write import Path


def without_numpy(tree: Any) -> Any:
    """A copy of a tree with numpy scalars as Python numbers; a schedule that calls np.cos has such rates."""
    if isinstance(tree, np.generic):
        return tree.item()
    if type(tree) in (list, tuple):
        return type(tree)(without_numpy(item) for item in tree)
    return {key: without_numpy(value) for key, value in tree.items()} if type(tree) is dict else tree


def save_safely(state: Any, path: Path) -> None:
    """Write a file; CheckpointError if it holds objects that could not be read back."""
    torch.save(state, path)
    with safe_globals(_of_numpy()):
        unsafe = get_unsafe_globals_in_checkpoint(path)
    if unsafe:
        raise CheckpointError(
            f"nothing was written: the state holds objects of {', '.join(sorted(unsafe))}, which can't be read back safely. "
            "Use only numbers, strings, lists, dicts, arrays and tensors in extra= and in the states of objects in also="
        )


def load_safely(path: Path) -> Any:
    with safe_globals(_of_numpy()):
        return torch.load(path, map_location="cpu", weights_only=True)


def _of_numpy() -> list[Any]:
    """The functions and types from which torch.load rebuilds a numpy array."""
    core: Any = getattr(np, "_core", None) or np.core
    kinds = {type(np.dtype(kind)) for kind in "?bhilqBHILQefdFD"}
    return [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype, *kinds]
