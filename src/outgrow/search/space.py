"""The space of a search: which growths a trial may sample, and how large a model may become.

The growths are found in the model itself: `outgrow.volumes` lists the units that can be widened exactly, `outgrow.places` the
modules that a new block can follow. A space selects among them by globs and kinds, and limits the result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from random import Random
from typing import Any

from torch import nn

from outgrow.analysis.volume_kinds import KINDS
from outgrow.errors import GrowthError, OptimizerError, Problem, SearchError
from outgrow.model.example import Example
from outgrow.requests import Branch, Deepen, Kernel, Widen
from outgrow.search.moves import Move
from outgrow.transforms.all_transforms import Transform, described
from outgrow.transforms.deepen.places import places
from outgrow.transforms.widen.choose_volumes import matches as selects
from outgrow.transforms.widen.list_volumes import volumes
from outgrow.wrong_arguments import usage

Globs = str | Sequence[str]
EXCEEDS = "the result exceeds the limits"
SHOWN = 8  # reasons in the error about a space in which nothing can grow


@usage("outgrow.Space(widen='*', factors=(1.5, 2), deepen='*', parameters=1_000_000)")
@dataclass(frozen=True)
class Space:
    """The growths that a search may sample, and the limits of the grown models.

    Args:
        widen: names or globs of the volumes that may be widened, as in `outgrow.Widen`; () for none.
        factors: by which a volume may be widened.
        kinds: only volumes of these kinds, such as "mlp" or "heads"; all kinds by default.
        deepen: names or globs of the modules that a new block may follow; () for none. "*" means the model's own blocks or, if
            it has none that can be copied, every place that `outgrow.places` lists.
        kernels: sizes to which kernels of convolutions may grow; none by default.
        branches: names or globs of modules that may get a branch beside them; none by default.
        moves: the largest number of growths in one trial.
        shrink: the probability that a trial goes back to an ancestor of its parent, and grows that one instead.
        parameters: the largest number of parameters.
        flops: the largest number of FLOPs of one forward pass on the example.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> for growth in Space(factors=(1.5, 2), deepen="1").growths(model, torch.zeros(1, 4)):
        ...     print(growth.summary)
        Widen '0' × 1.5
        Widen '0' × 2
        Deepen after '1' + 1
    """

    widen: Globs = "*"
    factors: Sequence[float] = (1.5, 2.0)
    kinds: Sequence[str] | None = None
    deepen: Globs = "*"
    kernels: Sequence[int] = ()
    branches: Globs = ()
    moves: int = 1
    shrink: float = 0.1
    parameters: int | None = None
    flops: int | None = None

    def __post_init__(self) -> None:
        for name in ("widen", "deepen", "branches"):
            found = getattr(self, name)
            if not isinstance(found, (str, list, tuple)) or not all(isinstance(glob, str) for glob in found):
                raise SearchError(f"{name}={found!r}: write a name or a glob such as 'layer1.*', a list of them, or ()")
            object.__setattr__(self, name, (found,) if isinstance(found, str) else tuple(found))
        for name in ("factors", "kernels", *(["kinds"] if self.kinds is not None else [])):
            found = getattr(self, name)
            if isinstance(found, str) or not isinstance(found, Sequence):
                raise SearchError(f"{name}={found!r}: write a list, e.g. {name}=({'1.5, 2' if name == 'factors' else '…,'})")
            object.__setattr__(self, name, tuple(found))
        if not all(isinstance(factor, Real) and not isinstance(factor, bool) and 1 < factor < 100 for factor in self.factors):
            raise SearchError(f"factors={self.factors!r}: write factors above 1, e.g. factors=(1.5, 2)")
        if unknown := [kind for kind in self.kinds or () if kind not in KINDS]:
            raise SearchError(f"kinds={self.kinds!r}: {unknown[0]!r} is none of {', '.join(map(repr, KINDS))}")
        if type(self.moves) is not int or self.moves < 1:
            raise SearchError(f"moves={self.moves!r}: write the largest number of growths in one trial, a whole number above 0")
        if not isinstance(self.shrink, Real) or not 0 <= self.shrink <= 1:
            raise SearchError(f"shrink={self.shrink!r}: write a probability, from 0 to 1")
        if not all(type(size) is int and size > 1 for size in self.kernels):
            raise SearchError(f"kernels={self.kernels!r}: write sizes, e.g. kernels=(5, 7)")
        for name in ("parameters", "flops"):
            limit = getattr(self, name)
            if limit is not None and (not isinstance(limit, Real) or isinstance(limit, bool) or not limit > 0):
                raise SearchError(f"{name}={limit!r}: write the largest number, or leave it out")

    def growths(self, model: nn.Module, example: Example) -> list[Transform]:
        """All growths of one step that the space and the model allow, apart from the limits."""
        return [growth for listed in self._transforms() for growth in listed(model, example)]

    def _transforms(self) -> list[Callable[[nn.Module, Example], Sequence[Transform]]]:
        """The functions that list growths, one per transform."""
        return [self._widenings, self._deepenings, self._kernels, self._branches]

    def _widenings(self, model: nn.Module, example: Example) -> Sequence[Transform]:
        if not self.widen or not self.factors:
            return ()
        chosen = [
            volume
            for volume in volumes(model, example)
            if volume.growable
            and (self.kinds is None or volume.kind in self.kinds)
            and any(selects(volume, glob) for glob in self.widen)
        ]
        return [Widen(volume.name, factor=float(factor)) for volume in chosen for factor in self.factors]

    def _deepenings(self, model: nn.Module, example: Example) -> Sequence[Transform]:
        if not self.deepen:
            return ()
        found = [place for place in places(model, example) if place.growable and matches(place.name, self.deepen)]
        if "*" in self.deepen and any(place.own for place in found):
            found = [place for place in found if place.own]
        return [Deepen(place.name, method="auto" if "r2r" in place.methods else place.methods[0]) for place in found]

    def _kernels(self, model: nn.Module, example: Example) -> Sequence[Transform]:
        convolutions = [(path, module) for path, module in model.named_modules() if hasattr(module, "kernel_size")]
        return [
            Kernel(path, size)
            for path, module in convolutions
            if isinstance(module, nn.modules.conv._ConvNd)
            for size in self.kernels
            if all(size > old for old in module.kernel_size)
        ]

    def _branches(self, model: nn.Module, example: Example) -> Sequence[Transform]:
        return [Branch(path) for path, _ in model.named_modules() if path and matches(path, self.branches)]

    def sample(self, model: nn.Module, example: Example, optimizers: Sequence[Any], random: Random) -> list[Move]:
        """Grow a model by one growth to `moves` of them, drawn at random; a growth that is refused is drawn again.

        The kind of transform is drawn first, then the place, so that models with many layers are not only widened. The list is
        empty if nothing fits the limits.
        """
        done: list[Move] = []
        for _ in range(random.randint(1, self.moves)):
            move = self._one(model, example, optimizers, random)
            if move is None:
                break
            done.append(move)
        return done

    def _one(self, model: nn.Module, example: Example, optimizers: Sequence[Any], random: Random) -> Move | None:
        transforms, refused = self._transforms(), None
        random.shuffle(transforms)
        for listed in transforms:
            growths = list(listed(model, example))
            while growths:
                move = Move(growths.pop(random.randrange(len(growths))), random.randrange(2**31))
                try:
                    if self.fits(model, example, move):
                        move.carry_out(model, example, optimizers)
                        return move
                except OptimizerError as error:
                    refused = error
                except GrowthError:  # what the listing can't foresee, e.g. a size that the model's code does not follow
                    continue
        if refused is not None:
            raise refused
        return None

    def fits(self, model: nn.Module, example: Example, move: Move) -> bool:
        """Whether the model is within the limits after a growth, which a copy goes through."""
        if self.parameters is None and self.flops is None:
            return True
        grown = move.carry_out(copy.deepcopy(model), example, check=False)
        limits = (self.parameters, grown.parameters[1]), (self.flops, grown.flops[1])
        return all(limit is None or size <= limit for limit, size in limits)

    def refuse_if_empty(self, model: nn.Module, example: Example, optimizers: Sequence[Any] = ()) -> None:
        """Raise SearchError, with reasons, if nothing in the model can grow within the space.

        model, optimizers: copies, of which one growth that is possible is carried out.
        """
        growths = self.growths(model, example)
        if not growths:
            raise SearchError("nothing can grow in this space", self._reasons(model, example))
        size = sum(parameter.numel() for parameter in model.parameters())
        if self.parameters is not None and size >= self.parameters:
            raise SearchError(f"the parent has {size:,} parameters, and the limit is {self.parameters:,}: raise parameters=")
        problems, refused = [], None
        for growth in growths:
            try:
                if self.fits(model, example, Move(growth)):
                    Move(growth).carry_out(model, example, optimizers)
                    return
                problems.append(Problem(described(growth), EXCEEDS))
            except OptimizerError as error:
                refused = error
            except GrowthError as error:
                problems.append(Problem(described(growth), str(error).partition("\n")[0]))
        if refused is not None:
            raise SearchError(f"nothing can grow in this space: {refused}") from refused
        if not any(problem.reason == EXCEEDS for problem in problems):
            raise SearchError("nothing can grow in this space", problems[:SHOWN])
        limits = f"parameters={self.parameters}, flops={self.flops}"
        raise SearchError(f"nothing can grow within the limits ({limits}): raise them", problems[:SHOWN])

    def _reasons(self, model: nn.Module, example: Example) -> list[Problem]:
        names = "widen", "factors", "kinds", "deepen", *(name for name in ("kernels", "branches") if getattr(self, name))
        asked = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        found = [Problem(volume.name, volume.reason) for volume in volumes(model, example) if not volume.growable]
        found += [Problem(place.name, place.reason) for place in places(model, example) if not place.growable]
        can = [volume.name for volume in volumes(model, example) if volume.growable]
        hint = f"volumes that can grow, but are not selected: {', '.join(can)}" if can else "outgrow.volumes lists the reasons"
        return [Problem("the space", asked, hint), *found[:SHOWN]]


def matches(name: str, globs: Globs) -> bool:
    return any(fnmatchcase(name, glob) for glob in ((globs,) if isinstance(globs, str) else globs))
