"""Read a Lightning checkpoint; for other files, the error says what is wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from outgrow.errors import CheckpointError
from outgrow.saving.atomic_write import check_path


def read_checkpoint(path: Any, weights_only: bool, call: str) -> dict[str, Any]:
    """Read a checkpoint; CheckpointError if it is damaged, could run code, or is another file. call: an example of a call."""
    check_path(path, call)
    if os.path.isdir(path):
        raise CheckpointError(f"{path} is a folder: name the .ckpt file in it, e.g. {call}")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: there is no such file")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        unsafe = _unsafe_types(path)
        if weights_only and unsafe:
            raise CheckpointError(
                f"{path} holds objects of {', '.join(unsafe)}, which could run code when they are read. If you trust the file, "
                "use outgrow.lightning.load(module, path, weights_only=False); or allow types with "
                "torch.serialization.add_safe_globals"
            ) from error
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        raise CheckpointError(f"{path} is damaged, or not a checkpoint ({reason}): use an earlier copy of the file") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), Mapping):
        raise CheckpointError(f"{path} is not a Lightning checkpoint: it has no state_dict")
    return checkpoint


def _unsafe_types(path: Any) -> list[str]:
    """Types in a file that `weights_only=True` does not read; empty if the file can't be read at all."""
    try:
        return sorted(get_unsafe_globals_in_checkpoint(path))
    except Exception:
        return []
