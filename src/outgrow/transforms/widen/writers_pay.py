"""Decide where the writers of a stream pay for its growth, instead of the ε of the norms that read it.

Both ways are exact (see `exactness/scale_equations.py`). A change of ε leaves existing values as they are, so it is the usual
way. Writers pay if no attribute holds the ε, if no configuration of the model's library expresses it (one ε for norms of
different sizes, or none at all), or if the library itself computes factors from the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from torch import nn

from outgrow.analysis.volumes import Anatomy
from outgrow.configuration.library_build import LibraryBuild, library_build, unsaved_buffers
from outgrow.exactness.scale_equations import Payment, simple_power
from outgrow.growth_plan.plan import Plan
from outgrow.model.example import Example
from outgrow.transforms.widen.make_plan import Choice


def payments(
    model: nn.Module, example: Example, anatomy: Anatomy, choices: Sequence[Choice], plan: Plan, forced: Sequence[str] = ()
) -> dict[str, Payment]:
    """For each volume whose writers should pay: the request for it. forced: volumes whose ε can't change."""
    concerned = [choice for choice in choices if choice.verdict.eps]
    if not concerned:
        return {}
    build = library_build(model, example, anatomy.reading.trace, plan)
    found = LibraryBuild() if build is None else build
    if found.epsilons and not found.scalars and not found.buffers:
        concerned = [choice for choice in concerned if choice.volume.name in forced]
    return {choice.volume.name: _payment(model, choice, found) for choice in concerned}


def plain_payment(model: nn.Module) -> Payment:
    """The request that writers pay, without factors of a library."""
    return Payment(tensors=tuple(sorted((name, Fraction(0), 1.0) for name in unsaved_buffers(model))))


def _payment(model: nn.Module, choice: Choice, build: LibraryBuild) -> Payment:
    """The request for one volume, with the library's factors as powers of its C/C′."""
    ratio = choice.volume.count / (choice.volume.count + choice.new)
    scalars = {index: power for index, pair in build.scalars.items() if (power := simple_power(*pair, ratio))}
    tensors = {tensor[0]: tensor for tensor in plain_payment(model).tensors}
    for name, (before, after) in build.buffers.items():
        power = simple_power(before, after, ratio)
        if power:
            tensors[name] = name, power, after / before
    return Payment(tuple(sorted(scalars.items())), tuple(sorted(tensors.values())))
