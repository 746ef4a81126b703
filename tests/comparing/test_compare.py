"""The comparison is correct at a place: each of its rows is checked here by brute force, not by its own formulas."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from torch import Tensor, nn

import outgrow
from outgrow.analysis.analyse import dissect
from outgrow.analysis.slot_positions import irregular
from outgrow.analysis.unit_states import State
from outgrow.comparing.operators_between import Operator, unit_path
from outgrow.errors import SelectionError
from outgrow.exactness.propagate_states import judge
from tests.helpers.comparing_places import METHODS, WRITERS, Over, batch, conv_net, mlp, stage, transformer
from tests.helpers.judging import distance, outputs, random_states, state_of
from tests.helpers.network_programs import programs
from tests.helpers.random_growths import run
from tests.helpers.random_networks import Program, Step, build, inputs


def norm_written_out(x: Tensor) -> Tensor:
    off = x - x.mean(-1, keepdim=True)
    return off / torch.sqrt(off.square().mean(-1, keepdim=True) + 1e-5)


YES, NO = True, False
# name: activation, ψ(0) = 0, idempotent, alike, apart
ACTIVATIONS: dict[str, tuple[nn.Module, bool, bool | None, bool, bool]] = {
    "relu": (nn.ReLU(), YES, YES, YES, YES),
    "relu in place": (nn.ReLU(inplace=True), YES, YES, YES, YES),
    "relu6": (nn.ReLU6(), YES, YES, YES, YES),
    "gelu": (nn.GELU(), YES, NO, YES, YES),
    "tanh": (nn.Tanh(), YES, NO, YES, YES),
    "sigmoid": (nn.Sigmoid(), NO, NO, YES, YES),
    "leaky relu": (nn.LeakyReLU(), YES, NO, YES, YES),
    "threshold at zero": (nn.Threshold(0.0, 0.0), YES, YES, YES, YES),
    "threshold that gives one": (nn.Threshold(0.5, 1.0), NO, YES, YES, YES),
    "slope of its own": (nn.PReLU(6), YES, None, YES, YES),
    "batch norm": (nn.BatchNorm1d(6), YES, None, YES, YES),
    "layer norm": (nn.LayerNorm(6), YES, None, YES, NO),
    "softmax": (nn.Softmax(-1), NO, NO, YES, NO),
    "swish written out": (Over(lambda x: x * torch.sigmoid(x)), YES, NO, YES, YES),
    "clamp": (Over(lambda x: torch.clamp(x, 0)), YES, YES, YES, YES),
    "clamp elsewhere": (Over(lambda x: torch.clamp(x, 1)), NO, YES, YES, YES),
    "relu plus one": (Over(lambda x: x.relu() + 1), NO, NO, YES, YES),
    "exp minus one": (Over(lambda x: x.exp() - 1), YES, NO, YES, YES),
    "where": (Over(lambda x: torch.where(x > 0, x, torch.tensor(0.0))), YES, YES, YES, YES),
    "layer norm written out": (Over(norm_written_out), YES, NO, YES, NO),
    "running sum": (Over(lambda x: x.cumsum(-1)), YES, NO, NO, NO),
    "times the sum": (Over(lambda x: x * x.sum(-1, keepdim=True)), YES, NO, YES, NO),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_recognised_by_their_results(name: str) -> None:
    activation, zero, idempotent, alike, apart = ACTIVATIONS[name]
    model, x = mlp(activation).double(), batch(8, 3).double()
    (volume,) = (volume for volume in dissect(model, x).volumes if volume.name == "0")
    (operator,) = unit_path(model, x, volume).operators
    assert operator.tested
    assert (operator.zero, operator.idempotent, operator.alike, operator.apart) == (zero, idempotent, alike, apart)


def each_kind() -> list[Any]:
    """The names of all activations; those with the results of an earlier one are only compared by `make test-all`."""
    first = {activation[1:]: name for name, activation in reversed(ACTIVATIONS.items())}.values()
    return [name if name in first else pytest.param(name, marks=pytest.mark.exhaustive) for name in ACTIVATIONS]


@pytest.mark.parametrize("name", each_kind())
def test_a_condition_that_is_met_makes_the_method_exact_and_an_exact_method_is_so_on_other_inputs(name: str) -> None:
    model, x = mlp(ACTIVATIONS[name][0]).double(), batch(8, 3).double()
    comparison = outgrow.compare(model, x, "0")
    columns, (operator,) = comparison.widen, comparison.operators
    assert (operator.zero, operator.idempotent, operator.alike, operator.apart) == ACTIVATIONS[name][1:]
    for method, column in columns.items():
        assert bool(column.refused) != (column.preserving == "yes")
        assert column.unmet or column.preserving == "yes"
        grown = copy.deepcopy(model)
        if column.refused:
            with pytest.raises(outgrow.GrowthError):
                outgrow.widen(grown, x, "0", by=6, method=METHODS[method])
            continue
        outgrow.widen(grown, x, "0", by=6, method=METHODS[method], check=False)
        assert distance(outputs(model, x + 1, False), outputs(grown, x + 1, False)) < 1e-9
    assert bool(columns["r2r"].refused) == (not ACTIVATIONS[name][4])


def test_a_plain_network_agrees_with_the_papers_table() -> None:
    model = conv_net()
    comparison = outgrow.compare(model, batch(2, 1, 8, 8), "0")
    wide, deep = comparison.widen, outgrow.compare(model, batch(2, 1, 8, 8), "1").deepen
    assert [column.preserving for column in wide.values()] == ["yes"] * 4
    assert [column.unmet for column in wide.values()] == [()] * 4  # a ReLU is MCD and has a fixed point at zero
    assert "alike" in wide["r2r"].needs
    assert "alike" in wide["net2net"].needs
    assert "ψ(0) = 0" in wide[WRITERS].needs
    assert [wide[name].noise for name in ("r2r", "net2net", "netmorph")] == [False, True, False]
    assert (wide["r2r"].free, wide["r2r"].new) == (28, 56)  # half; 2 units × (9 + 1 to write, 2 × 9 to read)
    assert (wide["net2net"].free, wide["net2net"].new) == (0, 56)
    assert (wide["netmorph"].free, wide[WRITERS].free) == (20, 36)  # one of the two sides
    assert [bool(column.changed) for column in wide.values()] == [False, True, False, False]
    assert [column.amount for column in wide.values()] == ["even", "any", "any", "any"]
    assert comparison.ends_in is None
    assert deep["r2r"].residual == "brings one"
    assert deep["net2net"].residual == "none"
    assert (deep["r2r"].amount, deep["net2net"].amount) == ("2 at a time", "any")
    assert deep["net2net"].unmet == ()
    assert deep["net2net"].free == 0
    assert deep["r2r"].free == pytest.approx(deep["r2r"].new / 2, rel=0.02)
    assert not deep["r2r"].changed
    assert not deep["net2net"].changed


def test_everything_is_left_as_it_was() -> None:
    model, x = stage(), batch(4, 2, 6, 6)
    model.one.weight.grad = torch.ones_like(model.one.weight)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    before, dice, moments = state_of(model), random_states(), copy.deepcopy(optimizer.state_dict())
    example = x.clone()
    for where in ("one", "norm1"):
        outgrow.compare(model, x, where)
    assert state_of(model) == before
    assert random_states() == dice
    assert torch.equal(example, x)
    assert torch.equal(model.one.weight.grad, torch.ones_like(model.one.weight))
    after = optimizer.state_dict()
    assert after["param_groups"] == moments["param_groups"]
    for number, state in moments["state"].items():
        assert all(torch.equal(value, after["state"][number][key]) for key, value in state.items())
    optimizer.step()  # it is not mistaken for one that a growth has made stale


@functools.cache
def of_a_residual_stream() -> outgrow.Comparison:
    return outgrow.compare(stage(), batch(4, 2, 6, 6), "stem")


@functools.cache
def of_a_stream_under_layer_norms() -> outgrow.Comparison:
    return outgrow.compare(transformer(0.1), batch(2, 5, 3), "0")


def test_a_residual_stream() -> None:
    comparison = of_a_residual_stream()
    assert {operator.name for operator in comparison.operators} == {"batch_norm", "relu", "mean"}
    assert {column.preserving for column in comparison.widen.values()} == {"yes"}
    alone = {column.residual for column in comparison.widen.values()}
    assert alone == {"1 sum: all summands grow, or stem alone (residual='fold')"}
    inner = outgrow.compare(stage(), batch(4, 2, 6, 6), "one")
    assert inner.widen["r2r"].residual == "none here"


def test_a_stream_under_layer_norms() -> None:
    comparison = of_a_stream_under_layer_norms()
    norms = [operator for operator in comparison.operators if operator.name == "layer_norm"]
    assert [(norm.alike, norm.apart) for norm in norms] == [(True, False)]
    assert len(norms[0].places) == 5
    assert {name for name, column in comparison.widen.items() if not column.refused} == {"net2net"}
    column = comparison.widen["net2net"]
    assert column.instead == "as whole copies of all units"
    assert column.amount == "multiples of 4: whole copies"
    assert "norm" in comparison.widen["r2r"].refused
    assert (comparison.widen["r2r"].max_error, comparison.widen["r2r"].free) == (None, None)


def test_a_block_of_a_transformer() -> None:
    deep = outgrow.compare(transformer(), batch(2, 5, 3), "1").deepen
    assert (deep["r2r"].preserving, deep["r2r"].residual, deep["r2r"].amount) == ("yes", "brings one", "4 at a time")
    assert deep["r2r"].unmet == ()
    assert deep["r2r"].noise is False
    assert deep["net2net"].refused
    assert deep["netmorph"].refused
    dropping = outgrow.compare(transformer(0.5), batch(2, 5, 3), "1").deepen["r2r"]
    assert (dropping.preserving, dropping.chance) == ("in expectation", "drop")
    up = outgrow.compare(transformer(), batch(2, 5, 3), "1.up")
    assert [operator.name for operator in up.operators] == ["gelu"]
    assert {column.preserving for column in up.widen.values()} == {"yes"}


@pytest.mark.parametrize(
    ("act", "idempotent", "refused"),
    [
        (nn.ReLU(), True, False),
        (nn.GELU(), False, True),
        (nn.Tanh(), False, True),
        (Over(lambda x: torch.clamp(x, 0)), True, True),  # idempotent, but the new layer would end in a ReLU
        (Over(lambda x: x * torch.sigmoid(x)), False, True),
        (Over(lambda x: x.relu() + 1), False, True),
    ],
    ids=["relu", "gelu", "tanh", "clamp", "swish", "relu plus one"],
)
def test_net2net_deepens_behind_idempotent_activations(act: nn.Module, idempotent: bool, refused: bool) -> None:
    comparison = outgrow.compare(mlp(act), batch(8, 3), "1")
    assert not comparison.widen
    assert comparison.ends_in is not None
    assert comparison.ends_in.idempotent is idempotent
    column = comparison.deepen["net2net"]
    assert (column.unmet == ()) is idempotent
    assert bool(column.refused) is refused


def test_a_block_ends_in_the_activation_after_its_sum() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.f(x))

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Residual(), nn.Linear(4, 2))
    comparison = outgrow.compare(model, batch(8, 3), "2")
    assert comparison.ends_in == Operator("relu", ("",), True, True, True, True)
    assert comparison.deepen["r2r"].preserving == "yes"


COMPUTED = {"learned_queries", "computed_linear"}  # operators on weights do not lie between writers and readers
CONVOLVED_AFTER_SHUFFLE = (
    Step("pool", {"how": "max"}),
    Step("shuffle", {"out": 2, "up": True}),
    Step("depthwise", {"times": 1}),
)


def check_operators(program: Program) -> None:
    """Of any network: rules reason about operators, tests run them, and neither uses the other."""
    assume(not any(word in str(program) for word in COMPUTED))
    model, x = build(program).eval(), inputs(program, 3, 0)
    anatomy = dissect(model, x)
    for volume in (v for v in anatomy.volumes if not v.pinned and irregular(anatomy, v) is None):
        path = unit_path(model, x, volume)
        assert all(operator.tested for operator in path.operators)
        pairs, zeros = judge(anatomy, volume, State.PAIR), judge(anatomy, volume, State.ZERO)
        mixing = [operator for operator in path.operators if not (operator.alike and operator.apart)]
        assert bool(pairs.refusal) == bool(mixing) or "tied" in pairs.refusal
        if not zeros.refusal and set(zeros.readers.values()) == {"free"}:
            assert path.zero


@run(12)
@given(programs(4))
@example(Program("image", 4, CONVOLVED_AFTER_SHUFFLE, "flatten", 0))
def test_tests_of_operators_agree_with_what_the_rules_say(program: Program) -> None:
    check_operators(program)


@pytest.mark.exhaustive
@run(120)
@given(programs(4))
def test_tests_of_operators_agree_with_the_rules_in_many_more_networks(program: Program) -> None:
    check_operators(program)


def test_names() -> None:
    model, x = mlp(nn.ReLU()), batch(8, 3)
    with pytest.raises(SelectionError, match=r"no volume and no module is called 'conv'"):
        outgrow.compare(model, x, "conv")
    with pytest.raises(SelectionError, match=r"selects 3 volumes.*: name one of 0, 0#2, 2"):
        outgrow.compare(model, x, "*")
    with pytest.raises(SelectionError, match="where=3"):
        outgrow.compare(model, x, 3)  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="no volume and no module is called ''"):
        outgrow.compare(model, x, "")
    both, module, volume = (outgrow.compare(model, x, where) for where in ("0", "1", "0#2"))
    assert [(bool(c.widen), bool(c.deepen)) for c in (both, module, volume)] == [(True, True), (False, True), (True, False)]
    assert {column.refused for column in volume.widen.values()} == {"its size is set by the model's input (0)"}


def test_it_prints_tables_that_fit_and_returns_the_same_as_json() -> None:
    for comparison in (of_a_residual_stream(), of_a_stream_under_layer_norms()):
        text = str(comparison)
        assert max(map(len, text.splitlines())) <= 120
        assert repr(comparison) == text
        for row in ("function preserving", "requires noise", "residual connections", "degrees of freedom", "new channels"):
            assert any(line.startswith(row) for line in text.splitlines())
        flat = " ".join(text.split())
        for column in itertools.chain(comparison.widen.values(), comparison.deepen.values()):
            assert column.refused in flat
        data = json.loads(json.dumps(comparison.to_json()))
        assert data == comparison.to_json()
        assert data["widen"]["net2net"]["changed"] == list(comparison.widen["net2net"].changed)
        assert data["operators"][0]["name"] == comparison.operators[0].name


def test_models_of_half_precision() -> None:
    comparison = outgrow.compare(mlp(nn.ReLU()).half(), batch(16, 3).half(), "0")
    assert {column.preserving for column in comparison.widen.values()} == {"yes"}
    assert [comparison.widen[name].noise for name in ("r2r", "net2net", "netmorph")] == [False, True, False]
    assert comparison.deepen["r2r"].noise is False
    assert (comparison.deepen["r2r"].preserving, comparison.deepen["netmorph"].preserving) == ("yes", "yes")
