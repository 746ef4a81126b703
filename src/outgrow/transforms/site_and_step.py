"""The input of a transform, a *site*, and its result, a *step*.

A site is the model at the beginning of a transform, with all earlier transforms in effect. A step contains the transform's
plans, and data that carrying them out needs but files do not record. Planning may run the model, and may try changes on it
within `site.trial()`, which undoes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from outgrow.analysis.volumes import Anatomy
from outgrow.apply.fills import Init
from outgrow.apply.learned_values import Learning
from outgrow.growth_plan.plan import Plan
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.requests import Skip
from outgrow.verify.compare_old_entries import NewOutputEntries


@dataclass(frozen=True, eq=False)
class Site:
    """The model that a transform plans to change, and its example.

    model: at the beginning of the transform. example: its inputs. seed: for the values that the growth draws.
    """

    model: nn.Module
    example: Example
    seed: int
    read: Callable[[], Anatomy] = field(repr=False)
    journal: Journal = field(default_factory=Journal, repr=False)

    @cached_property
    def anatomy(self) -> Anatomy:
        """The analysis of a forward pass, with the model's volumes."""
        return self.read()

    @contextmanager
    def trial(self) -> Iterator[Journal]:
        """A journal whose changes are undone when the context ends, also if it ends by an error or an interrupt."""
        with trial(self.journal) as journal:
            yield journal


@contextmanager
def trial(outer: Journal) -> Iterator[Journal]:
    """A journal that is undone when the context ends. outer: a journal that undoes it too, if an interrupt comes first."""
    journal = Journal()
    outer.note(journal.undo)
    try:
        yield journal
    finally:
        journal.undo()


@dataclass(frozen=True, eq=False)
class Step:
    """The result of one transform: plans that are carried out together. Their inserts come first, then their edits.

    inits: users' functions that draw values, by their names in the plans. learned: values that are computed from the model and
    from batches, when the step is carried out. flops: of the grown model, if they are known.
    new_entries: outputs of the model that gain entries. notes: lines for the report.
    """

    plans: tuple[Plan, ...]
    inits: Mapping[str, Init] = field(default_factory=dict)
    skipped: tuple[Skip, ...] = ()
    flops: int | None = None
    notes: tuple[str, ...] = ()
    new_entries: tuple[NewOutputEntries, ...] = ()
    learned: tuple[Learning, ...] = ()
