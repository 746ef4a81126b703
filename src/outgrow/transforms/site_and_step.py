"""What a transform plans with, and what it returns.

A *site* is the model as a transform finds it, with all transforms before it in effect. A *step* is what one transform does: its
plans, and what is needed to carry them out but is no part of the record. Planning may run the model, and may try changes on it
within `site.trial()`, which takes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from outgrow.analysis.volumes import Anatomy
from outgrow.growth_plan.plan import Plan
from outgrow.methods.base import Init
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.requests import Skip


@dataclass(frozen=True, eq=False)
class Site:
    """The model that a transform is to change, and on what it runs.

    model: as it is when the transform begins. example: what it runs on. seed: for the values that the growth draws.
    """

    model: nn.Module
    example: Example
    seed: int
    read: Callable[[], Anatomy] = field(repr=False)
    journal: Journal = field(default_factory=Journal, repr=False)

    @cached_property
    def anatomy(self) -> Anatomy:
        """The model's volumes, found in a forward pass."""
        return self.read()

    @contextmanager
    def trial(self) -> Iterator[Journal]:
        """Changes noted in this journal are undone when the context ends, also if it ends by an error or an interrupt."""
        with trial(self.journal) as journal:
            yield journal


@contextmanager
def trial(outer: Journal) -> Iterator[Journal]:
    """A journal that is undone when the context ends. outer: undoes it too, should an interrupt come first."""
    journal = Journal()
    outer.note(journal.undo)
    try:
        yield journal
    finally:
        journal.undo()


@dataclass(frozen=True, eq=False)
class Step:
    """What one transform does: plans that are carried out together. Their inserts come first, then their edits.

    inits: how free values are drawn, by the name of the tensor. flops: of the model afterwards, where that is known.
    """

    plans: tuple[Plan, ...]
    inits: Mapping[str, Init] = field(default_factory=dict)
    skipped: tuple[Skip, ...] = ()
    flops: int | None = None
