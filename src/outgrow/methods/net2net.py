"""Net2WiderNet: a new unit j is a copy of an old unit g(j), whose column is shared out among its copies.

    Ū_j = W_g(j),   V̄_j = a_j V_g(j)   with Σ a over the copies of a unit equal to one.

With equal shares, copies have equal gradients forever: `noise` or a random split makes them differ. Under a norm that mixes
units, copies of all units are exact (the size is then a multiple of the old one). A folded residual (`modules/fold.py`) shares
units out as readers do; there units are copied in their order, and all copies made in one turn have the same random part, so
that the Fold stays a sum of a few ranges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Slot, Volume
from outgrow.errors import MethodError
from outgrow.methods.base import Draft, Method, Recipe, forced
from outgrow.wrong_arguments import usage


@usage("outgrow.Net2Net(split='random')")
@dataclass(frozen=True, kw_only=True)
class Net2Net(Method):
    """Copies of existing units that share the columns of their originals.

    mapping: "balanced" (the numbers of copies differ by at most one) or "random" (where copies of all units are not
    required). split: "equal" or "random".

    Example:
        >>> import torch, outgrow
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> growth = outgrow.widen(model, torch.randn(1, 4), "0", to=9, method=Net2Net(split="random"))
        >>> int((model[0].weight[8] == model[0].weight[:8]).all(1).sum())  # the new unit is a copy of one old one
        1
    """

    mapping: str = "balanced"
    split: str = "equal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mapping not in ("balanced", "random") or self.split not in ("equal", "random"):
            raise MethodError(
                f"mapping is 'balanced' or 'random', split 'equal' or 'random'; not {self.mapping!r}, {self.split!r}"
            )

    @property
    def name(self) -> str:
        return "net2net"

    @property
    def state(self) -> State:
        return State.COPY

    def draft(self, volume: Volume, verdict: Verdict, new: int, rng: np.random.Generator) -> Draft:
        if verdict.folded:
            return self._in_order(volume.count, new, rng)
        models = super().draft(volume, verdict, new, rng).models
        if self.mapping == "random" and not verdict.multiples:
            models = tuple(int(unit) for unit in rng.integers(volume.count, size=new))
        raw = np.ones(volume.count + new) if self.split == "equal" else rng.uniform(0.2, 1.0, size=volume.count + new)
        return Draft(new, models, _shares(models, volume.count, raw))

    def _in_order(self, count: int, new: int, rng: np.random.Generator) -> Draft:
        """Units copied in their order, with one part per turn."""
        turns = np.arange(count + new) // count
        parts = rng.uniform(0.2, 1.0, size=turns[-1] + 1) if self.split == "random" else np.ones(turns[-1] + 1)
        models = tuple(unit % count for unit in range(new))
        return Draft(new, models, _shares(models, count, parts[turns]))

    def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        shares = tuple(draft.extra.tolist())
        kept, given = shares[: volume.count], shares[volume.count :]
        if slot.role == "reads":
            ones = (1.0,) * draft.new
            return forced(slot, verdict, draft) or Recipe("copy", draft.models, signs=given, keep=kept, gradient=ones)
        return Recipe("copy", draft.models, signs=(1.0,) * draft.new, gradient=given, gradient_keep=kept)


def _shares(models: tuple[int, ...], count: int, parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of each unit, existing ones first: its part of the sum over the unit and its copies."""
    groups = np.concatenate([np.arange(count), np.array(models, dtype=np.int64)])
    shares: NDArray[np.float64] = parts / np.bincount(groups, weights=parts, minlength=count)[groups]
    return shares
