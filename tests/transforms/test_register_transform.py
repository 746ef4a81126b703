"""`outgrow.register_transform`: transforms from outside the package, in growths, schedules, files and runs."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import GrowthError, ScheduleError
from outgrow.extending import Change, Insertion, Plan, Rescaling, Setting, Site
from outgrow.history.growths_on_model import history
from outgrow.transforms.all_transforms import REGISTERED, TABLE, kinds

IDS = torch.tensor([[1, 2, 3], [4, 0, 2]])


@dataclass(frozen=True)
class Vocabulary:
    """More rows for an embedding."""

    where: str
    by: int = 4

    def __post_init__(self) -> None:
        if self.by < 1:
            raise GrowthError(f"by={self.by}: write how many rows, a whole number above 0")


def plan_vocabulary(site: Site, request: Vocabulary) -> Plan:
    layer = site.model.get_submodule(request.where)
    if not isinstance(layer, nn.Embedding):
        raise GrowthError(f"{request.where} is no embedding")
    old, new = layer.num_embeddings, layer.num_embeddings + request.by
    at, draws = tuple(range(old, new)), tuple(range(request.by))
    rows = Insertion(f"{request.where}.weight", 0, old, at, (0,) * request.by, "free", draws, (1.0,) * request.by)
    setting = Setting(request.where, "num_embeddings", old, new)
    return Plan((Change(request.where, old, new, "drawn rows"),), (rows,), (setting,), site.seed)


@dataclass(frozen=True)
class Louder:
    """A layer's weight times a factor, which changes what the model computes."""

    where: str
    factor: float = 2.0


def plan_louder(site: Site, request: Louder) -> Plan:
    change = Change(request.where, 1, 1, "louder", exact=False)
    return Plan((change,), (Rescaling(f"{request.where}.weight", request.factor),), seed=site.seed)


@pytest.fixture(autouse=True)
def _registered() -> None:
    outgrow.register_transform(Vocabulary, plan_vocabulary)
    outgrow.register_transform(Louder, plan_louder)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def test_a_transform_of_ones_own_grows_model_average_and_optimizer() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(IDS).sum().backward()
    optimizer.step()
    average, before = copy.deepcopy(model), model(IDS)
    growth = outgrow.grow(model, IDS, Vocabulary("0"), optimizer=optimizer, average=average, seed=3)
    torch.testing.assert_close(model(IDS), before, rtol=0, atol=0)
    assert model[0].weight.shape == average[0].weight.shape == optimizer.state[model[0].weight]["exp_avg"].shape == (9, 6)
    assert model(torch.tensor([[8, 7, 6]])).shape == (1, 3, 3)
    assert growth.plan.changes == (Change("0", 5, 9, "drawn rows"),)
    assert growth.preserving
    assert model[0].weight[5:].std() > 0.1


def test_an_optimizer_that_was_not_passed_is_stopped() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(IDS).sum().backward()
        optimizer.step()
    outgrow.grow(model, IDS, Vocabulary("0"))
    optimizer.zero_grad()
    model(IDS).sum().backward()
    with pytest.raises(GrowthError, match=r"outgrow\.grow\("):
        optimizer.step()


def test_it_comes_after_other_transforms_by_the_names_that_there_are_then() -> None:
    model = net()
    weight = model[3].weight.detach().clone()
    transforms = Louder("3"), outgrow.Deepen("2"), Vocabulary("0"), outgrow.Widen("1", to=10)
    planned = outgrow.plan(model, IDS, *transforms)
    growth = outgrow.grow(model, IDS, *transforms)
    assert growth.plan == planned
    assert [change.method for change in growth.plan.changes] == ["r2r", "r2r", "drawn rows", "louder"]
    assert isinstance(model[3], outgrow.ResidualBlock)
    torch.testing.assert_close(model[4].weight[:, :8], 2 * weight)
    assert not growth.preserving


def test_schedules_are_written_to_files_and_read_again(tmp_path: Path) -> None:
    schedule = outgrow.Schedule([outgrow.At(step=2, grow=[Vocabulary("0", by=2), outgrow.Widen("1", by=2)])])
    for name in ("schedule.toml", "schedule.json"):
        schedule.to_file(tmp_path / name)
        assert outgrow.Schedule.from_file(tmp_path / name) == schedule
    assert '{ vocabulary = "0", by = 2 }' in (tmp_path / "schedule.toml").read_text()
    assert str(schedule) == "step 2: Vocabulary '0' by=2, Widen '1' by 2"
    shown = str(outgrow.timeline(net(), IDS, schedule))
    assert "0: 5 → 7" in shown
    assert "drawn rows" in shown


def trained(steps: range, run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        optimizer.zero_grad()
        (model(IDS) * (step + 1)).square().mean().backward()
        optimizer.step()
        run.step()


def made() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    events = [outgrow.At(step=2, grow=[Vocabulary("0")]), outgrow.At(step=5, grow=[Vocabulary("0", by=1), outgrow.Deepen("2")])]
    return outgrow.Run(model, IDS, optimizer, events, quiet=True), model, optimizer


def test_a_run_is_saved_and_resumed(tmp_path: Path) -> None:
    run, model, optimizer = made()
    trained(range(4), run, model, optimizer)
    run.save(tmp_path / "run.pt")
    trained(range(4, 7), run, model, optimizer)
    again, twin, other = made()
    again.load(tmp_path / "run.pt")
    trained(range(4, 7), again, twin, other)
    assert twin[0].weight.shape == (10, 6)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name


def test_files_of_grown_models_are_read_without_the_transform(tmp_path: Path) -> None:
    model = net()
    outgrow.grow(model, IDS, Vocabulary("0"))
    outgrow.save(model, tmp_path / "model.safetensors")
    REGISTERED.clear()
    again = net()
    outgrow.load(again, tmp_path / "model.safetensors")
    assert torch.equal(again[0].weight, model[0].weight)
    assert history(again) == history(model)


def test_what_is_not_registered_is_no_transform() -> None:
    REGISTERED.clear()
    with pytest.raises(GrowthError, match=r"Vocabulary.*is no transform"):
        outgrow.grow(net(), IDS, Vocabulary("0"))
    with pytest.raises(ScheduleError, match="is not a transform"):
        outgrow.At(step=1, grow=[Vocabulary("0")])
    entry = {"growth": [{"step": 1, "grow": [{"vocabulary": "0"}]}]}
    with pytest.raises(ScheduleError, match="one of the keys 'widen', 'deepen', 'kernel', 'branch'"):
        outgrow.Schedule.from_dict(entry)


def test_mistakes_in_files_name_the_registered_transforms() -> None:
    for grow, said in (
        ([{"vocabulry": "0"}], "did you mean 'vocabulary'"),
        ([{"vocabulary": "0", "bye": 3}], "did you mean 'by'"),
        ([{"vocabulary": "0", "by": 0}], "whole number above 0"),
        ([{"vocabulary": "0", "widen": "*"}], "it has widen and vocabulary"),
    ):
        with pytest.raises(ScheduleError, match=said):
            outgrow.Schedule.from_dict({"growth": [{"step": 1, "grow": grow}]})


@dataclass(frozen=True)
class Quieter:
    where: str


@dataclass(frozen=True)
class Fielded:
    where: str
    widen: int = 1


@dataclass
class Loose:
    where: str


@dataclass(frozen=True)
class Wider(outgrow.Widen):
    pass


CONFLICTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no class": ((Vocabulary("0"), plan_vocabulary), {}, "no dataclass"),
    "no dataclass": ((nn.Linear, plan_vocabulary), {}, "no dataclass"),
    "not frozen": ((Loose, plan_louder), {}, "frozen=True"),
    "no planner": ((Louder, "plan"), {}, "pass a function"),
    "own class": ((outgrow.Widen, plan_louder), {}, "outgrow's own"),
    "own name": ((Louder, plan_louder), {"name": "deepen"}, "outgrow's own"),
    "an option": ((Quieter, plan_louder), {"name": "fade"}, "is an option of"),
    "no word": ((Louder, plan_louder), {"name": "two words"}, "a word of letters"),
    "no field": ((Louder, plan_louder), {"place": "after"}, "is no field of Louder"),
    "a field": ((Fielded, plan_louder), {}, "is the name of a transform"),
    "taken": ((Louder, plan_louder), {"name": "vocabulary"}, "is registered already"),
    "twice": ((Louder, plan_louder), {"name": "loud"}, "one class is one transform"),
    "derived": ((Wider, plan_louder), {}, "one class is one transform"),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_conflicts_are_refused(case: str) -> None:
    arguments, options, said = CONFLICTS[case]
    before = dict(REGISTERED)
    with pytest.raises(GrowthError, match=said):
        outgrow.register_transform(*arguments, **options)
    assert before == REGISTERED


def test_a_registration_can_be_repeated_and_replaced() -> None:
    outgrow.register_transform(Vocabulary, plan_vocabulary)

    @dataclass(frozen=True)
    class Other:
        where: str

    outgrow.register_transform(Other, plan_louder, name="louder", replace=True)
    assert [kind.request for kind in kinds()[len(TABLE) :]] == [Vocabulary, Other]


WEIGHT = "0.weight"
WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, "no outgrow.extending.Plan"),
    "no change": (Plan((), ()), "names no changes"),
    "no tensor": (Plan((Change("0", 5, 6, "x"),), (Insertion("9.weight", 0, 5, (5,), (0,), "zero"),)), "no such tensor"),
    "size": (Plan((Change("0", 5, 6, "x"),), (Insertion(WEIGHT, 0, 4, (4,), (0,), "zero"),)), "expects size 4 along axis 0"),
    "position": (Plan((Change("0", 5, 6, "x"),), (Insertion(WEIGHT, 0, 5, (7,), (0,), "zero"),)), "do not lie in 6"),
    "sources": (Plan((Change("0", 5, 6, "x"),), (Insertion(WEIGHT, 0, 5, (5,), (), "zero"),)), "an old position for each"),
    "attribute": (Plan((Change("0", 5, 6, "x"),), (), (Setting("0", "rows", 5, 6),)), "no such attribute"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_plan_that_does_not_fit_is_refused_and_nothing_changes(case: str) -> None:
    plan, said = WRONG[case]
    outgrow.register_transform(Louder, lambda site, request: plan)
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GrowthError, match=said):
        outgrow.grow(model, IDS, outgrow.Widen("1", by=2), Louder("0"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not history(model)


def test_a_plan_that_is_not_exact_is_found_and_undone() -> None:
    outgrow.register_transform(Louder, lambda site, request: Plan((Change("1", 1, 1, "x"),), (Rescaling("1.weight", 2.0),)))
    model = net()
    before = model(IDS)
    with pytest.raises(GrowthError):
        outgrow.grow(model, IDS, Louder("1"))
    assert torch.equal(model(IDS), before)


def test_every_transform_of_the_table_has_a_public_class_and_call() -> None:
    for kind in TABLE:
        assert getattr(outgrow, kind.request.__name__) is kind.request
        parameters = inspect.signature(getattr(outgrow, kind.name)).parameters
        assert {kind.place, *kind.options} <= set(parameters), kind.name
    assert len({kind.order for kind in TABLE}) == len(TABLE)
