"""Whatever network and whatever request: a growth is refused and leaves no trace, or it is exact."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import outgrow
from outgrow.errors import VerifyError
from tests.helpers.judging import assert_learns, assert_same_function, names_and_kinds, random_states, state_of
from tests.helpers.network_programs import PLAIN, one_of, programs
from tests.helpers.random_growths import EXHAUSTIVE, METHODS, ORDINARY, run
from tests.helpers.random_networks import Network, Program, build, inputs


@dataclass(frozen=True)
class Request:
    """One growth: for each transform, which volume (None: all; else its number, modulo how many there are), size and method."""

    volumes: tuple[int | None, ...]
    factor: float
    by: int | None
    method: str
    seed: int
    fade: int | None = None

    def carry_out(self, model: nn.Module, example: Tensor) -> tuple[outgrow.Growth | None, outgrow.GrowthError | None]:
        """The growth, or its refusal; any other exception is a failure."""
        names = [volume.name for volume in outgrow.volumes(model, example)] if any(v is not None for v in self.volumes) else []
        transforms = []
        for volume in self.volumes:
            where = "*" if volume is None else names[volume % len(names)]
            size = {"factor": self.factor} if volume is None or self.by is None else {"by": self.by}
            transforms.append(outgrow.Widen(where, **size, method=METHODS[self.method], fade=self.fade))
        try:
            return outgrow.grow(model, example, *transforms, seed=self.seed), None
        except outgrow.GrowthError as refusal:
            return None, refusal


number = st.integers(0, 30)
wholes = st.just((None,))
some = st.one_of(wholes, wholes, st.tuples(number), st.tuples(number, number), st.tuples(number, st.none()))
requests = st.builds(
    Request,
    some,
    one_of(1.5, 2.0, 1.25),
    one_of(2, 1, 4, None),
    st.one_of(st.just("auto"), one_of(*METHODS)),
    st.integers(0, 9),
)


def examples_for(program: Program, old: Network) -> list[Tensor]:
    """Fresh inputs of another batch size, and of another image or sequence size where the old model takes them."""
    fresh = [inputs(program, batch=4, seed=1)]
    other = inputs(program, batch=2, seed=2, size=8)
    try:
        with torch.no_grad():
            copy.deepcopy(old).eval()(other)
    except RuntimeError:
        return fresh
    return [*fresh, other]


def check(program: Program, requested: list[Request], training: bool) -> list[outgrow.Growth]:
    """Grow by one request after the other; each is refused without a trace, or exact."""
    model, example = build(program).train(training), inputs(program, batch=3, seed=0)
    done = []
    for request in requested:
        old, before, dice = copy.deepcopy(model), state_of(model), random_states()
        names, parameters = names_and_kinds(model), sum(p.numel() for p in model.parameters())
        growth, refusal = request.carry_out(model, example)
        assert random_states() == dice
        if growth is None:
            assert not isinstance(refusal, VerifyError), f"only the last check caught it: {refusal}"
            assert state_of(model) == before
            continue
        assert growth.preserving
        assert names_and_kinds(model) == names
        assert growth.parameters == (parameters, sum(p.numel() for p in model.parameters()))
        assert growth.parameters[1] > parameters
        assert_same_function(old, model, examples_for(program, old))
        assert_learns(model, inputs(program, batch=4, seed=3))
        done.append(growth)
    return done


any_case = given(programs(), st.lists(requests, min_size=1, max_size=3), st.booleans())
PLAIN_REQUEST = Request((None,), 1.5, None, "auto", 0)


@run(ORDINARY)
@any_case
def test_any_growth_is_refused_without_a_trace_or_exact(program: Program, requested: list[Request], training: bool) -> None:
    check(program, requested, training)


@pytest.mark.exhaustive
@run(EXHAUSTIVE)
@any_case
def test_any_growth_of_many_more(program: Program, requested: list[Request], training: bool) -> None:
    check(program, requested, training)


def check_faded(program: Program, volumes: tuple[int | None, ...], factor: float, training: bool) -> None:
    check(program, [Request(volumes, factor, None, "auto", 0, fade=3), PLAIN_REQUEST], training)


any_faded = given(programs(), some, one_of(1.5, 2.0), st.booleans())


@run(ORDINARY // 4)
@any_faded
def test_any_faded_growth(program: Program, volumes: tuple[int | None, ...], factor: float, training: bool) -> None:
    check_faded(program, volumes, factor, training)


@pytest.mark.exhaustive
@run(EXHAUSTIVE // 10)
@any_faded
def test_many_more_faded_growths(program: Program, volumes: tuple[int | None, ...], factor: float, training: bool) -> None:
    check_faded(program, volumes, factor, training)


@pytest.mark.parametrize("cases", [ORDINARY // 10, pytest.param(EXHAUSTIVE // 20, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("family", PLAIN)
def test_plain_networks_are_never_refused(family: str, cases: int) -> None:
    @run(cases)
    @given(PLAIN[family])
    def every(program: Program) -> None:
        (growth,) = check(program, [PLAIN_REQUEST], training=False)
        before, after = growth.parameters
        assert after >= 1.4 * before

    every()
