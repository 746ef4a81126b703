"""Weights that are computed from parameters: each offered method is exact, without the check on outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import outgrow
from tests.helpers.judging import assert_same_function, shake
from tests.helpers.network_programs import computing, one_of
from tests.helpers.random_growths import EXHAUSTIVE, METHODS, ORDINARY, run
from tests.helpers.random_networks import Program, Step, build, inputs

NAMES = sorted(set(METHODS) - {"auto"})


def grow_each(model: nn.Module, x: Tensor, fresh: Tensor, method: str, factor: float, only: str = "") -> list[str]:
    """Grow each volume by itself, without the check, and compare with the ungrown model; returns the names of grown volumes."""
    grown = []
    for volume in outgrow.volumes(model, x):
        if volume.pinned or (only and volume.name != only):
            continue
        new = copy.deepcopy(model)
        try:
            outgrow.widen(new, x, volume.name, factor=factor, method=METHODS[method], check=False)
        except outgrow.GrowthError:
            continue
        assert_same_function(model, new, [x, fresh], modes=[False])
        grown.append(volume.name)
    return grown


any_case = given(computing(), one_of(*NAMES), one_of(1.5, 2.0))


@run(ORDINARY // 10)
@any_case
def test_any_network_with_computed_weights(program: Program, method: str, factor: float) -> None:
    grow_each(build(program), inputs(program, batch=3, seed=0), inputs(program, batch=4, seed=1), method, factor)


@pytest.mark.exhaustive
@run(EXHAUSTIVE // 10)
@any_case
def test_many_more_networks_with_computed_weights(program: Program, method: str, factor: float) -> None:
    grow_each(build(program), inputs(program, batch=3, seed=0), inputs(program, batch=4, seed=1), method, factor)


def network(stream: str, *steps: Step) -> Program:
    return Program(stream, 6, steps, "each", 1)


def queries(*steps: tuple[Any, ...], queries: int = 3, code: int = 12) -> Program:
    options = {"queries": queries, "code": code, "steps": steps, "out": 6, "features": False}
    return network("sequence", Step("learned_queries", options))


def weight(*steps: tuple[Any, ...], turned: bool = False, code: int = 5) -> Program:
    return network(
        "sequence", Step("computed_linear", {"out": 8, "code": code, "steps": steps, "bias": True, "turned": turned})
    )


PLAIN = ("r2r", "net2net", "netmorph", "netmorph writers", "mean")
NORM, LINEAR, BEND = ("norm", "layer"), ("linear", 8, True), ("activation", "gelu")
# for each network, the volume in question, and the methods by which it grows
CASES: dict[str, tuple[Program, str, set[str]]] = {
    "a norm before the layer that reads learned queries": (queries(NORM, LINEAR), "layers.0.queries", {"mean", "net2net"}),
    "a norm over a sum": (queries(("beside", "add all"), NORM, LINEAR), "layers.0.queries", {"mean", "net2net"}),
    "a hidden layer of a hypernetwork": (
        weight(LINEAR, BEND, LINEAR, code=3),
        "layers.0.made.steps.0",
        set(PLAIN),
    ),
    "a weight with a bias reads the keys": (
        queries(LINEAR, code=3),
        "layers.0.key",
        set(PLAIN),
    ),
    "a norm whose shift reads the keys": (queries(LINEAR, NORM, code=3), "layers.0.key", set()),
    "an activation that is not zero at zero": (queries(LINEAR, ("activation", "sigmoid"), code=3), "layers.0.key", set()),
    "a product of two computed weights": (
        weight(("pairwise", "multiply", 8)),
        "stem",
        set(PLAIN),
    ),
    "zero rows of a code, shifted along the other axis": (weight(LINEAR), "layers.0.made", set(PLAIN)),
}


@pytest.mark.parametrize("name", CASES)
def test_methods_that_are_offered_for_computed_weights(name: str) -> None:
    """Exactly those that are exact, judged by the ungrown model, without the check on outputs."""
    program, volume, methods = CASES[name]
    model, x, fresh = build(program), inputs(program, batch=3, seed=0), inputs(program, batch=4, seed=1)
    assert {method for method in PLAIN if grow_each(model, x, fresh, method, 2.0, only=volume)} == methods


class Decoder(nn.Module):
    """Learned queries after a layer norm attend to the input, as in Perceiver's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.norm = nn.Parameter(torch.randn(4, 16)), nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = nn.Linear(16, 24), nn.Linear(6, 24), nn.Linear(6, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.q(self.norm(self.latents)) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x))


def test_learned_queries_grow_whole_by_a_glob() -> None:
    model, x = shake(Decoder()).double(), torch.randn(2, 9, 6, dtype=torch.float64)
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, x, "*", factor=2, check=False)
    assert {change.volume: change.method for change in growth.plan.changes} == {"latents": "mean", "k": "r2r", "v": "r2r"}
    assert_same_function(old, model, [x, torch.randn(3, 5, 6, dtype=torch.float64)])


def test_a_run_of_learned_queries_grows_as_rehearsed() -> None:
    """Initially every shift is zero, and a dry run on these weights would pass where the growth itself does not."""
    model, x = Decoder(), torch.randn(2, 9, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = outgrow.Schedule([outgrow.At(step=3, grow=[outgrow.Widen("*", factor=2)])])
    run = outgrow.Run(model, x, optimizer, schedule, quiet=True)
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        run.step()
    assert model.latents.shape == (4, 32)
