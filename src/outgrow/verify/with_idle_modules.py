"""Check a growth also with idle modules, each in place of a peer that runs (see `model/idle_modules.py`).

Outputs are compared as for the model itself: they must also be preserved for data that reaches other experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from outgrow.errors import GrowthError
from outgrow.growth_plan.plan import Plan, renamed
from outgrow.model.example import Example
from outgrow.model.idle_modules import IdlePeers, peers_in_place
from outgrow.verify import outputs as verify

MOST_PEERS = 4  # passes: a layer may have hundreds of similar experts


@dataclass(frozen=True, eq=False)
class PeerOutputs:
    """The outputs before a growth, with the idle peers of this index in place."""

    index: int
    base: verify.Outputs


def outputs_with_peers(model: nn.Module, example: Example, pairs: IdlePeers) -> list[PeerOutputs]:
    """The outputs to preserve, for each index of idle peers with which the model runs."""
    expected: list[PeerOutputs] = []
    for index in range(min(MOST_PEERS, max(map(len, pairs.values()), default=0))):
        try:
            with peers_in_place(model, pairs, index):
                expected.append(PeerOutputs(index, verify.before(model, example)))
        except GrowthError:  # e.g. the code reads an attribute that only the running module sets
            continue
    return expected


def check_with_peers(
    model: nn.Module,
    example: Example,
    expected: Sequence[PeerOutputs],
    pairs: IdlePeers,
    plans: Sequence[Plan],
    preserving: bool,
) -> None:
    """Raise if a preserving growth changed one of these outputs; plans: carried out since, they may have renamed modules."""
    now = {renamed(path, plans): [renamed(name, plans) for name in names] for path, names in pairs.items()}
    for one in expected:
        with peers_in_place(model, now, one.index):
            verify.check(model, example, one.base, preserving)
