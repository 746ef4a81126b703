"""Small networks that are grown through the public calls, with every number before and after and where it comes from.

What the plan says of a tensor is checked against its numbers here, and the outputs against each other, so that a picture drawn
from a specimen can't show what did not happen.
"""

from __future__ import annotations

import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from ink import Grid, Numbers
from torch import Tensor, nn

import outgrow
from outgrow.growth_plan.plan import Insertion, Plan, Rescaling, Rotation

FILLS = {"free": "drawn", "zero": "zero", "copy": "copied", "mean": "copied"}


def tenths(model: nn.Module, seed: int = 0) -> nn.Module:
    """All numbers as tenths in float64, none of them zero: short to write into a cell."""
    draw = np.random.RandomState(seed)
    model = model.double().eval()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            size = draw.randint(1, 10, size=tuple(tensor.shape)) / 10
            tensor.copy_(torch.from_numpy(size * draw.choice([-1, 1], size=size.shape)))
    for module in model.modules():  # scales and variances are positive
        for name in ("weight", "running_var"):
            scale = getattr(module, name, None)
            if scale is not None and scale.ndim == 1:
                scale.data.abs_()
    return model


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).randint(-9, 10, size=shape) / 10)


@dataclass(frozen=True)
class Specimen:
    """A model before and after a growth, and its outputs on the same example."""

    call: str
    old: nn.Module
    new: nn.Module
    plan: Plan
    outputs: tuple[Numbers, Numbers]

    def before(self, name: str) -> Grid:
        numbers = matrix(tensor_of(self.old, name))
        return Grid(numbers, np.where(numbers == 0, "zero", "kept"))

    def after(self, name: str) -> Grid:
        """A tensor of the grown model, every number with what the plan says of it."""
        was, now = tensor_of(self.old, name), tensor_of(self.new, self.plan.renamed(name))
        kinds = np.full(was.shape, "kept", dtype="<U7")
        places = [np.arange(size) for size in was.shape]
        for edit in self.plan.edits:
            if edit.tensor != self.plan.renamed(name):
                continue
            match edit:
                case Insertion():
                    for member, share in zip(edit.members, edit.keep, strict=bool(edit.keep)):
                        kinds[(slice(None),) * edit.axis + (member,)] = "kept" if share == 1 else "changed"
                    spots = [position - index for index, position in enumerate(edit.at)]
                    kinds = np.insert(kinds, spots, FILLS[edit.fill], axis=edit.axis)
                    places[edit.axis] = np.setdiff1d(np.arange(edit.new_size), edit.at)
                    if edit.fill == "copy":
                        shares = np.reshape(edit.signs, (-1, *[1] * (was.ndim - 1 - edit.axis)))
                        copies = np.take(was, edit.sources, edit.axis) * shares
                        assert np.allclose(np.take(now, edit.at, edit.axis), copies), f"the plan is wrong about {name}"
                case Rescaling() | Rotation():
                    kinds[kinds == "kept"] = "changed"
        stayed = (kinds == "kept")[np.ix_(*places)]
        assert np.array_equal(now[np.ix_(*places)][stayed], was[stayed]), f"the plan is wrong about {name}"
        assert np.array_equal(now == 0, kinds == "zero"), f"the plan is wrong about the zeros of {name}"
        return Grid(matrix(now), matrix(kinds))


def matrix(numbers: Numbers) -> Numbers:
    """Vectors as columns, kernels of a single channel as they are."""
    return numbers.reshape(numbers.shape[-2:]) if numbers.ndim > 1 else numbers[:, None]


def tensor_of(model: nn.Module, name: str) -> Numbers:
    found: Numbers = model.state_dict()[name].numpy().copy()
    return found


def taken(now: Numbers, source: Numbers) -> Grid:
    """A tensor of a copied block: zeros, and numbers (or their opposites) that its source holds."""
    assert np.isin(np.abs(now[now != 0]), np.abs(source)).all()
    return Grid(matrix(now), np.where(matrix(now) == 0, "zero", "copied"))


def grown(model: nn.Module, example: Tensor, verb: str, *args: Any, **options: Any) -> Specimen:
    """Call `outgrow.verb` on a copy of the model, and check that it kept its promise."""
    new = copy.deepcopy(model)
    growth = getattr(outgrow, verb)(new, example, *args, **options)
    with torch.no_grad():
        one, other = model(example), new(example)
    assert growth.preserving == bool(torch.allclose(one, other, rtol=0, atol=1e-10))
    said = ", ".join(["model", "x", *map(written, args), *(f"{key}={written(value)}" for key, value in options.items())])
    return Specimen(f"outgrow.{verb}({said})", model, new, growth.plan, (one.numpy(), other.numpy()))


def written(value: Any) -> str:
    """An argument as one would write it."""
    if not is_dataclass(value):
        return repr(value).replace("'", '"')
    usual = {item.name: MISSING if item.default is MISSING else item.default for item in fields(value)}
    given = [f"{name}={written(getattr(value, name))}" for name, old in usual.items() if getattr(value, name) != old]
    return f"outgrow.{type(value).__name__}({', '.join(given)})"
