"""A move of a trial: one growth with its seed, as data, so that a trial that was interrupted is repeated exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from outgrow.engine.grow import grow
from outgrow.engine.growth_report import Growth
from outgrow.model.example import Example
from outgrow.runs.schedule import At, Schedule
from outgrow.runs.schedule_files import from_dict, to_dict
from outgrow.transforms.all_transforms import Transform, described


@dataclass(frozen=True)
class Move:
    """A growth, and the seed of the values that it draws.

    Example:
        >>> from outgrow import Widen
        >>> Move(Widen("0", factor=1.5), seed=7).to_json()
        {'widen': '0', 'factor': 1.5, 'seed': 7}
        >>> Move.from_json({"widen": "0", "factor": 1.5, "seed": 7}) == Move(Widen("0", factor=1.5), seed=7)
        True
    """

    transform: Transform
    seed: int = 0

    def __str__(self) -> str:
        return described(self.transform)

    def carry_out(self, model: nn.Module, example: Example, optimizers: Sequence[Any] = (), check: bool = True) -> Growth:
        """Grow the model and its optimizers, exactly."""
        return grow(model, example, self.transform, optimizer=list(optimizers) or None, seed=self.seed, check=check)

    def to_json(self) -> dict[str, Any]:
        """The transform as in schedule files, and the seed."""
        (event,) = to_dict(Schedule([At(step=1, grow=[self.transform])]))["growth"]
        return {**event["grow"][0], "seed": self.seed}

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Move:
        entry = {name: value for name, value in facts.items() if name != "seed"}
        (event,) = from_dict({"growth": [{"step": 1, "grow": [entry]}]})
        return Move(event.grow[0], int(facts["seed"]))
