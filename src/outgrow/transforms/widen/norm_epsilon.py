"""Find the attribute in which a norm keeps its ε, which has to change with the number of units (ε′ = ε·C/C′)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import nn

from outgrow.analysis.unit_states import MoveEps


@dataclass(frozen=True)
class EpsAttribute:
    """The attribute of a module that holds an ε. value: None stands for torch's default."""

    module: str
    name: str
    value: float | None


def find_eps(model: nn.Module, move: MoveEps) -> EpsAttribute | None:
    """The attribute that holds a norm's ε, on the module that ran or on one above it; None if there is none."""
    path = move.module
    while True:
        module = model.get_submodule(path)
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            return EpsAttribute(path, "eps", None)
        for name, value in vars(module).items():
            if isinstance(value, float) and np.isclose(value, move.eps, rtol=1e-6, atol=0.0):
                return EpsAttribute(path, name, value)
        if not path:
            return None
        path = path.rpartition(".")[0]


def no_eps(move: MoveEps) -> str:
    """The reason against a method where no attribute holds the ε."""
    return (
        f"the norm in {move.module or 'the model'} keeps its ε = {move.eps:g} in no attribute that could be changed; "
        f"self.eps = {move.eps:g}, read in its forward pass, would be one"
    )


def missing_eps(model: nn.Module, moves: Iterable[MoveEps]) -> str:
    """The reason against a method that has to change these ε; empty if an attribute holds each of them."""
    return next((no_eps(move) for move in moves if find_eps(model, move) is None), "")
