"""One frame for whatever gives a model the shapes of a checkpoint: all of it or nothing; what is around the model follows."""

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
    """Whatever fails within is undone by the journal. After it, wrappers are renewed, and what was compiled is forgotten.

    path: of a file that is loaded; what fails otherwise than by a CheckpointError is told as one that names it.
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
    finally:  # tensors that were put back have new gradient accumulators, too
        renew_around([model])
    forget_compiled()
