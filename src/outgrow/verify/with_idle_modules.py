"""Check a growth also with the modules that the example does not run, each in the place of one of its kind that runs.

Outputs are compared as for the model itself: what the model would compute if its data met other experts must stay, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from outgrow.errors import GrowthError
from outgrow.growth_plan.plan import Plan, renamed
from outgrow.model.example import Example
from outgrow.model.idle_modules import Understudies, taking_over
from outgrow.verify import outputs as verify

MOST = 4  # turns: a layer may have hundreds of experts, which are alike


@dataclass(frozen=True, eq=False)
class Turn:
    """What the model computed before a growth while the understudies of this number took over."""

    number: int
    base: verify.Outputs


def turns_of(model: nn.Module, example: Example, pairs: Understudies) -> list[Turn]:
    """Outputs to be kept, of turns in which the model runs."""
    turns: list[Turn] = []
    for number in range(min(MOST, max(map(len, pairs.values()), default=0))):
        try:
            with taking_over(model, pairs, number):
                turns.append(Turn(number, verify.before(model, example)))
        except GrowthError:  # it needs what the module that ran keeps as an attribute, say
            continue
    return turns


def check_turns(
    model: nn.Module, example: Example, turns: Sequence[Turn], pairs: Understudies, plans: Sequence[Plan], preserving: bool
) -> None:
    """Raise if a preserving growth moved the outputs of a turn; plans: what was done since, which may have moved names."""
    now = {renamed(path, plans): [renamed(name, plans) for name in names] for path, names in pairs.items()}
    for turn in turns:
        with taking_over(model, now, turn.number):
            verify.check(model, example, turn.base, preserving)
