"""`outgrow.register_method`: methods from outside the package, by name and as instances, and mistakes in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import MethodError, ScheduleError
from outgrow.extending import Draft, Method, Recipe, Slot, State, Verdict, Volume, free
from outgrow.methods.base import REGISTERED
from tests.helpers.echo_method import Echo

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double().eval()


def test_a_method_of_ones_own_is_exact_by_name_and_as_an_instance() -> None:
    outgrow.register_method("echo", Echo)
    for method, strength in (("echo", 1.0), (Echo(strength=0.5), 0.5)):
        model = net()
        before: Tensor = model(X)
        growth = outgrow.widen(model, X, "0", by=4, method=method)
        assert growth.plan.changes[0].method == "echo"
        torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
        old, new = model[3].weight[:, :8], model[3].weight[:, 8:]
        assert torch.equal(new[:, :2], -new[:, 2:])
        for column in new[:, :2].T:
            assert (old.T * strength == column).all(1).sum() == 1


def test_volumes_report_the_method_where_it_is_exact_and_auto_does_not_try_it() -> None:
    outgrow.register_method("echo", Echo)
    found = {volume.name: volume for volume in outgrow.volumes(net(), X)}
    assert found["0"].methods[-1] == "echo"
    assert outgrow.widen(net(), X, "0", by=4).plan.changes[0].method == "r2r"
    normed = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    assert "echo: the norm 1 takes its statistics over the units" in outgrow.volumes(normed, X)[0].reason
    with pytest.raises(MethodError, match="statistics over the units"):
        outgrow.widen(normed, X, "0", by=4, method="echo")


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_schedule_files_hold_a_registered_method_with_its_options(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"schedule{suffix}"
    grow = [outgrow.Widen("0", by=4, method=Echo(strength=0.5)), outgrow.Widen("1", by=2, method=Echo())]
    schedule = outgrow.Schedule([outgrow.At(step=3, grow=grow)])
    with pytest.raises(ScheduleError, match=r"a method without a name.*outgrow\.register_method\('…', Echo\)"):
        schedule.to_file(file)
    outgrow.register_method("echo", Echo)
    schedule.to_file(file)
    assert outgrow.Schedule.from_file(file) == schedule
    assert '"echo"' in file.read_text()


def test_schedule_files_name_what_is_wrong_with_a_method(tmp_path: Path) -> None:
    file = tmp_path / "schedule.toml"
    file.write_text('[[growth]]\nstep = 3\ngrow = [{ widen = "0", by = 4, method = "echo" }]\n')
    with pytest.raises(ScheduleError, match=r"there is no method 'echo'.*outgrow\.register_method"):
        outgrow.Schedule.from_file(file)
    outgrow.register_method("echo", Echo)
    assert outgrow.Schedule.from_file(file).events[0].grow[0] == outgrow.Widen("0", by=4, method="echo")
    file.write_text('[[growth]]\nstep = 3\ngrow = [{ widen = "0", by = 4, method = { name = "echo", strenth = 2.0 } }]\n')
    with pytest.raises(ScheduleError, match="did you mean 'strength'"):
        outgrow.Schedule.from_file(file)


def test_a_timeline_and_a_run_use_it_by_name() -> None:
    outgrow.register_method("echo", Echo)
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = [outgrow.At(step=1, grow=[outgrow.Widen("0", by=4, method="echo")])]
    assert outgrow.timeline(net(), X, outgrow.Schedule(schedule)).stages[-1].method == "echo"
    run = outgrow.Run(model, X, optimizer, schedule, quiet=True)
    model(X).sum().backward()
    optimizer.step()
    run.step()
    assert model[0].out_features == 12


def test_a_fade_is_refused_with_the_reason() -> None:
    outgrow.register_method("echo", Echo)
    with pytest.raises(MethodError, match="echo is exact without a fade"):
        outgrow.Widen("0", by=4, method="echo", fade=10)
    with pytest.raises(MethodError, match="echo can't be faded in"):
        outgrow.Widen("0", by=4, method=Echo(noise=0.1), fade=10)


@dataclass(frozen=True, kw_only=True)
class Needy(Echo):
    depth: int


@dataclass(frozen=True, kw_only=True)
class Unfinished(Method):
    state = State.ANY


@dataclass(frozen=True, kw_only=True)
class Renamed(Echo):
    @property
    def name(self) -> str:
        return "other"


@dataclass(frozen=True, kw_only=True)
class Stateless(Echo):
    state = "pairs"  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Stepless(Echo):
    step = 0


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("my echo", Echo, "write a word"),
        (3, Echo, "write a word"),
        ("r2r", Echo, "'r2r' is a method of outgrow's own"),
        ("auto", Echo, "'auto' is a method of outgrow's own"),
        ("echo", Echo(), r"is an instance: pass the class itself, register_method\('echo', Echo\)"),
        ("echo", nn.Linear, "derives from outgrow.Method"),
        ("echo", Unfinished, "does not define recipe"),
        ("echo", Needy, r"Needy\(\) raised TypeError(.|\n)*Give all its fields defaults"),
        ("echo", Renamed, "its name property says 'other'"),
        ("echo", Stateless, r"its state is 'pairs'; it must be one of State\.PAIR"),
        ("echo", Stepless, "its step is 0"),
    ],
)
def test_registrations_that_make_no_sense_are_refused(name: Any, method: Any, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        outgrow.register_method(name, method)
    assert name not in REGISTERED


def test_registering_another_under_the_same_name_needs_replace() -> None:
    outgrow.register_method("echo", Echo)
    outgrow.register_method("echo", Echo)  # registered again: nothing changes
    other = replace_class()
    with pytest.raises(MethodError, match=r"'echo' is registered already, as .*Echo"):
        outgrow.register_method("echo", other)
    outgrow.register_method("echo", other, replace=True)
    assert REGISTERED["echo"] is other


def replace_class() -> type[Method]:
    @dataclass(frozen=True, kw_only=True)
    class Louder(Echo):
        strength: float = 2.0

    return Louder


def echo(slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
    return Echo().recipe(slot, volume, verdict, draft)


MISTAKES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda *given: None, "returned NoneType: it must return a Recipe"),
    "fill": (lambda *given: replace(echo(*given), fill="cpoy"), "has fill='cpoy': write one of 'free', 'zero'"),
    "models": (lambda *given: Recipe("zero", (0,)), "has 1 models: there must be 4"),
    "range": (lambda *given: Recipe("zero", (0, 1, 2, 8)), "has 8 among its models: existing units are numbered from 0 to 7"),
    "draws": (lambda *given: Recipe("free", given[3].models), "has 0 draws: there must be 4"),
    "signs": (lambda *given: Recipe("copy", given[3].models, signs=(1.0,)), "has 1 signs: there must be 4"),
    "negative": (lambda *given: free(given[3], (-1, 0, 1, 2)), "has a draw of -1"),
    "words": (lambda *given: replace(echo(*given), signs=("+",) * 4), "they must be numbers"),
    "array": (lambda *given: replace(echo(*given), signs=np.ones(4)), "it must be a tuple"),
    "keep": (lambda *given: replace(echo(*given), keep=(1.0,)), "has 1 keep: there must be 8"),
    "fade": (lambda *given: replace(echo(*given), fade=-1), "has fade=-1"),
    "raises": (lambda *given: {}[given[0].tensor], "raised KeyError: '(0|1|3)\\.weight'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_method_returns_is_checked_and_the_model_stays(mistake: str) -> None:
    function, text = MISTAKES[mistake]

    @dataclass(frozen=True, kw_only=True)
    class Wrong(Echo):
        def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
            return function(slot, volume, verdict, draft)  # type: ignore[no-any-return]

    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MethodError, match=rf"method 'Wrong' \(.*Wrong\): recipe for (0|1|3)\.\w+, axis (0|1) \(\w+\) .*{text}"):
        outgrow.widen(model, X, "0", by=4, method=Wrong())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_reader_that_must_be_zero_is_demanded_of_the_method() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Careless(Method):
        state = State.ANY

        def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
            return free(draft)

    with pytest.raises(MethodError, match=r"3\.weight, axis 1 \(reads\) has fill='free', where only 'zero' keeps(.|\n)*forced"):
        outgrow.widen(net(), X, "0", by=4, method=Careless())


def test_a_method_that_is_not_exact_though_it_says_so_is_caught_by_the_check_of_outputs() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unsigned(Echo):
        def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
            return Recipe("copy", draft.models, signs=(1.0,) * draft.new)

    model = net()
    before = model(X)
    with pytest.raises(outgrow.GrowthError, match="differs from the old one"):
        outgrow.widen(model, X, "0", by=4, method=Unsigned())
    assert torch.equal(model(X), before)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "returned NoneType: it must return a Draft"),
        (Draft(3, (0, 1, 2)), "is for 3 new units; it must be for 4"),
        (Draft(4, (0, 1)), "has 2 models: there must be 4"),
        (Draft(4, (0, 1, 2, -1)), "has -1 among its models"),
    ],
)
def test_a_draft_is_checked(result: Any, text: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Echo):
        def draft(self, volume: Volume, verdict: Verdict, new: int, rng: np.random.Generator) -> Draft:
            return result  # type: ignore[no-any-return]

    with pytest.raises(MethodError, match=rf"method 'Wrong' \(.*Wrong\): draft for 0 {text}"):
        outgrow.widen(net(), X, "0", by=4, method=Wrong())
