"""Network Morphism's widening: of the two new factors in V W = V W + A U, one is zero.

zero="readers": U free, A = 0: exact wherever units are only read by weights. zero="writers": U = 0, A free: exact where the
path maps zero to zero; where zeros would never learn, or would jump at the first step (see `exactness/stuck_at_zero.py`), it is
used only if requested explicitly. The other side must not be zero, or neither gets a gradient: scales start at typical values.
"""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Slot, Volume
from outgrow.errors import MethodError
from outgrow.methods.base import Draft, Method, Recipe, forced, free, typical, zeros
from outgrow.wrong_arguments import usage


@usage("outgrow.NetMorph(zero='readers')")
@dataclass(frozen=True, kw_only=True)
class NetMorph(Method):
    """New units with zero columns in readers, or with zero rows in writers (`zero`).

    Example:
        >>> import torch, outgrow
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> growth = outgrow.widen(model, torch.randn(1, 4), "0", to=9, method=NetMorph(zero="readers"))
        >>> model[2].weight[:, 8].tolist()
        [0.0, 0.0]
    """

    zero: str = "readers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero not in ("readers", "writers"):
            raise MethodError(f"zero is 'readers' or 'writers', not {self.zero!r}")

    @property
    def name(self) -> str:
        return "netmorph" if self.zero == "readers" else "netmorph(zero='writers')"

    @property
    def state(self) -> State:
        return State.ANY if self.zero == "readers" else State.ZERO

    def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        if slot.role == "reads":
            return forced(slot, verdict, draft) or free(draft)
        if self.zero == "writers" and (slot.role == "writes" or slot.shift):
            return zeros(draft)
        if self.init == "copy":
            return Recipe("copy", draft.models, signs=(1.0,) * draft.new)
        if slot.role == "scales" and slot.vector:
            return typical(slot, draft)
        return free(draft)


@usage("outgrow.RandomPad(init='he')")
@dataclass(frozen=True, kw_only=True)
class RandomPad(Method):
    """The paper's baseline: all new values are drawn. It does not preserve the function.

    Example:
        >>> import torch, outgrow
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> outgrow.widen(model, torch.randn(1, 4), "0", to=9, method=RandomPad()).preserving
        False
    """

    @property
    def name(self) -> str:
        return "random"

    @property
    def state(self) -> State:
        return State.ANY

    @property
    def exact(self) -> bool:
        return False

    def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        if slot.role == "scales" and slot.vector:
            return typical(slot, draft)
        return free(draft)
