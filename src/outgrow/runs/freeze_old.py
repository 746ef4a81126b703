"""Grow and freeze: what the newest growth has added is trained, everything older is held (LLaMA Pro, arXiv:2401.02415).

Parameters without an entry of the newest growth, such as those of old blocks, are frozen by `requires_grad=False`: they get no
gradient, and optimizers skip parameters without one, so that neither momentum nor weight decay changes them. Parameters with
old and new entries are trained, and their old entries are held (`train="new"`, see `runs/cohort_rates.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from outgrow.errors import GrowthError, Problem
from outgrow.history.cohorts import cohorts
from outgrow.model.unwrap import bare

OLD = "old"


class Freezing:
    """Freezes the old parameters of a model, unless `freeze` is None; those that a user froze are left alone."""

    def __init__(self, model: nn.Module, freeze: str | None) -> None:
        if freeze not in (None, OLD):
            raise GrowthError(f"freeze={freeze!r}: write 'old' to train only what a growth adds, or leave it out")
        self.model, self.on = bare(model), freeze == OLD
        self.frozen: list[nn.Parameter] = []
        if self.on and _several_processes():
            reason = "DistributedDataParallel would wait for the gradients of parameters that are frozen later"
            raise GrowthError(
                "freeze='old' is for one process", [Problem("freeze=", reason, "write At(…, train='new') instead")]
            )

    def apply(self) -> bool:
        """Freeze what is older than the newest growth; returns whether there is one."""
        self.release()
        found = cohorts(self.model) if self.on else None
        if found is None or not found.count:
            return False
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and int(found[name].max()) < found.count:
                parameter.requires_grad_(False)
                parameter.grad = None
                self.frozen.append(parameter)
        return True

    def release(self) -> None:
        """Make all frozen parameters trainable again."""
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        self.frozen = []

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """A growth happens within: nothing is frozen meanwhile, so that new blocks are no copies of frozen ones."""
        self.release()
        try:
            yield
        finally:
            self.apply()


def _several_processes() -> bool:
    here = torch.distributed.is_available() and torch.distributed.is_initialized()
    return here and torch.distributed.get_world_size() > 1
