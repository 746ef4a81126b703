"""A context for giving a model the shapes of a checkpoint: completely or not at all, and wrappers of the model follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from outgrow.distributed.ddp import check_renewable, renew_around, wrappers_around
from outgrow.errors import CheckpointError
from outgrow.model.compiled import forget_compiled
from outgrow.model.journal import Journal
from outgrow.saving.atomic_write import Path


@contextlib.contextmanager
def reshaping(model: nn.Module, path: Path | None = None) -> Iterator[Journal]:
    """Undo everything if the block fails. Afterwards, renew wrappers and reset compiled code.

    path: of the file that is loaded; other errors are raised as a CheckpointError with this path.
    """
    check_renewable(wrappers_around([model]))
    try:
        with Journal() as journal:
            try:
                yield journal
            except CheckpointError:
                raise
            except Exception as error:
                if path is None:
                    raise
                raise CheckpointError(f"{path} can't be loaded into this model: {type(error).__name__}: {error}") from error
    finally:  # restored tensors have new gradient accumulators, too
        renew_around([model])
    forget_compiled()
