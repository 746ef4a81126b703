"""The report of a growth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from outgrow.analysis.volumes import Volume
from outgrow.growth_plan.plan import Plan
from outgrow.history.cohorts import Cohorts, cohorts
from outgrow.modules.fade_warnings import fading
from outgrow.modules.gates import gates_of
from outgrow.requests import Skip
from outgrow.text.plurals import counted
from outgrow.verify.compare_old_entries import NewOutputEntries


def remarks(model: nn.Module, untrained: str) -> list[str]:
    """Remarks for a report: a mode that was not compared, and unfinished fades."""
    found = [fading(gates_of(model).values())]
    if untrained:
        found.append(
            f"train mode was not compared, since the model does not run there on the example ({untrained:.200}): if it is the "
            "example, give one with more samples"
        )
    return [remark for remark in found if remark]


UNIT = "one unit of "


def unit_notes(volumes: Sequence[Volume], plans: Iterable[Plan]) -> list[str]:
    """Notes on volumes that grow and whose unit is more than a head or a feature, one per kind of unit."""
    grown = {change.volume for plan in plans for change in plan.changes}
    alike: dict[str, list[str]] = {}
    for volume in volumes:
        if volume.unit and volume.name in grown:
            alike.setdefault(volume.unit, []).append(volume.name)
    more = {unit: f" (and {len(names) - 1} more)" if len(names) > 1 else "" for unit, names in alike.items()}
    return [f"{UNIT}{names[0]}{more[unit]} is {unit}" for unit, names in alike.items()]


@dataclass(eq=False)
class Growth:
    """The report of a growth. `print(growth)` shows it as a table.

    max_error: the largest change of an output on the example, relative to the largest output. tolerance: its limit if the
    method is exact. It is a constant, 32 units in the last place of the largest output (3.8e-06 in float32). Only if the error
    exceeds that, the network's own sensitivity is measured: the limit is then ten times the change of its outputs when every
    weight changes by one unit in the last place, if that is larger.

    Example:
        >>> import torch, outgrow
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> growth = outgrow.widen(model, torch.zeros(1, 4), "0", to=12)
        >>> growth.parameters, growth.preserving, growth.max_error <= growth.tolerance
        ((58, 86), True, True)
    """

    model: nn.Module = field(repr=False)
    plan: Plan = field(repr=False)
    max_error: float
    tolerance: float
    skipped: tuple[Skip, ...]
    parameters: tuple[int, int]
    flops: tuple[int, int]
    seconds: float
    preserving: bool = True
    stochastic: bool = False
    notes: tuple[str, ...] = ()
    gains: tuple[NewOutputEntries, ...] = field(default=(), repr=False)  # entries that the model's outputs gain

    @property
    def cohorts(self) -> Cohorts:
        """The growth that each entry of the model's parameters came with, for the present model."""
        return cohorts(self.model)

    @property
    def new_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of new blocks, by name, right after the growth: to train only these, freeze all others."""
        blocks = tuple(f"{path}." for path in self.plan.new_blocks)
        return {name: parameter for name, parameter in self.model.named_parameters() if name.startswith(blocks)}

    def __str__(self) -> str:
        lines = [str(self.plan), ""]
        for what, (before, after) in (("parameters", self.parameters), ("FLOPs", self.flops)):
            lines.append(f"{what}: {before:,} → {after:,} (× {after / max(before, 1):.2f})")
        if not self.preserving:
            lines.append(f"error: {self.max_error:.1e} of the largest output: this method does NOT preserve the function")
        elif self.tolerance:
            lines.append(f"error: {self.max_error:.1e} of the largest output (limit for rounding: {self.tolerance:.1e})")
        else:
            lines.append("error: not checked")
        if self.stochastic:
            lines.append("dropout is active in training: there the function is kept in expectation, exactly with dropout off")
        lines.extend(self.notes)
        if self.skipped:
            lines.append(f"left unchanged: {counted(len(self.skipped), 'volume')}")
            lines.extend(f"  {skip}" for skip in self.skipped)
        return "\n".join(lines)

    __repr__ = __str__
