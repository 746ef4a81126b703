"""A search: exact inheritance, continued studies, samplers, storages and failures."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import SearchError
from outgrow.search import storages
from outgrow.search.records import COMPLETE
from outgrow.search.search import read_search
from tests.helpers import searches
from tests.helpers.searches import SPACE, inputs, sgd, small

optuna = pytest.importorskip("optuna")
OTHER = inputs(seed=5, count=9)  # not the example


def start(**options: Any) -> Any:
    """A small search with the defaults of these tests."""
    given: dict[str, Any] = {"example": inputs(), "space": SPACE, "train": searches.train, "optimizer": sgd}
    given |= {"objectives": ["error", "parameters"], "trials": 5, "quiet": True, **options}
    return outgrow.search(given.pop("parent", None) or small(), **given)


class Watching:
    """A training function that keeps the model and the optimizer as they are before training."""

    def __init__(self) -> None:
        self.before: dict[int, tuple[nn.Module, list[torch.Tensor]]] = {}

    def __call__(self, model: nn.Module, optimizer: Any, trial: Any) -> dict[str, float]:
        state = [optimizer.state[p].get("momentum_buffer", torch.zeros(0)).clone() for p in model.parameters()]
        self.before[trial.number] = copy.deepcopy(model), state
        return searches.train(model, optimizer, trial)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Watching, Path]:
    watching, folder = Watching(), tmp_path_factory.mktemp("search")
    result = start(train=watching, storage=folder / "search.log", study="watched", trials=8, population=4)
    return result, watching, folder


def test_a_child_computes_what_its_parent_does_before_it_is_trained(found: tuple[Any, Watching, Path]) -> None:
    result, watching, _ = found
    assert [record.slot for record in result.records] == list(range(8))
    assert {record.parent for record in result.records[1:]} > {0}
    for record in result.records[1:]:
        child, _ = watching.before[record.number]
        parent = result.load(record.parent)
        assert record.growth
        assert sum(p.numel() for p in child.parameters()) > sum(p.numel() for p in parent.parameters())
        torch.testing.assert_close(child(OTHER), parent(OTHER), rtol=1e-4, atol=1e-5)
        assert record.parameters == sum(p.numel() for p in child.parameters()) == record.values[1]


def test_the_state_of_the_optimizer_is_inherited(found: tuple[Any, Watching, Path]) -> None:
    result, watching, _ = found
    for record in result.records[1:]:
        if not all(summary.startswith("Widen '0'") for summary in record.growth):
            continue
        _, state = watching.before[record.number]
        model, optimizer = result.load_with_optimizer(record.parent)
        for new, parameter in zip(state, model.parameters(), strict=True):
            old = optimizer.state[parameter]["momentum_buffer"]
            assert old.abs().sum() > 0
            assert torch.equal(new[tuple(slice(size) for size in old.shape)], old)
        return
    pytest.fail("no trial has widened the first layer alone")


def test_the_model_of_a_trial_can_be_loaded_without_the_search(found: tuple[Any, Watching, Path]) -> None:
    result, _, folder = found
    best = result.best
    model = outgrow.load(small(), folder / "search.log-artifacts" / best.artifact)
    assert torch.equal(model(OTHER), result.load(best)(OTHER))
    state = torch.get_rng_state()
    result.load(best)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_study_is_plain_optuna(found: tuple[Any, Watching, Path]) -> None:
    result, _, folder = found
    backend = optuna.storages.journal.JournalFileBackend(os.fspath(folder / "search.log"))
    study = optuna.load_study(storage=optuna.storages.JournalStorage(backend), study_name="watched")
    assert study.metric_names == ["error", "parameters"]
    assert {trial.state.name for trial in study.trials} == {COMPLETE}
    for trial in study.trials:
        json.dumps(trial.user_attrs)
        assert {"slot", "growth", "parameters", "flops", "metrics", "seed", "artifact"} <= set(trial.user_attrs)
    assert {tuple(trial.values) for trial in study.best_trials} == {record.values for record in result.front}
    again = read_search(folder / "search.log")
    assert again.to_json() == result.to_json()
    with pytest.raises(SearchError, match="read from a storage alone"):
        again.load()


def facts(result: Any) -> list[Any]:
    return [(one.slot, one.parent, one.growth, one.values, one.shrunk_from) for one in result.records]


@pytest.mark.parametrize("sampler", ["evolution", pytest.param("hill", marks=pytest.mark.exhaustive)])
def test_a_continued_search_is_the_one_that_was_not_interrupted(sampler: str, tmp_path: Path) -> None:
    parent = small()
    whole = start(parent=parent, sampler=sampler, population=3, trials=5)
    for count in (2, 3, 5):  # as if in three processes, the first two of which end early
        split = start(parent=copy.deepcopy(parent), sampler=sampler, population=3, trials=count, storage=tmp_path / "a.log")
    assert facts(split) == facts(whole)
    for record in whole.records:
        assert torch.equal(whole.load(record.number)(OTHER), split.load(record.number)(OTHER))
    other = start(parent=parent, sampler=sampler, population=3, trials=5, seed=1)
    assert facts(other) != facts(whole)


def test_hill_climbing_grows_the_best_and_trains_it_on() -> None:
    result = start(sampler="hill", population=2, trials=7, objectives="error", space=outgrow.Space(deepen=(), shrink=0.0))
    for record in result.records[1:]:
        first = record.slot - (record.slot - 1) % 2
        best = min(result.records[:first], key=lambda one: one.values)
        assert record.parent == best.number
        assert bool(record.growth) == (record.slot != first)


def test_a_search_goes_back_to_ancestors() -> None:
    result = start(space=outgrow.Space(factors=(1.5,), deepen=(), shrink=1.0), sampler="random", trials=7)
    back = [record for record in result.records if record.shrunk_from is not None]
    assert back
    for record in back:
        line = {record.shrunk_from: 0}
        above = next(one for one in result.records if one.number == record.shrunk_from)
        while above.parent is not None:
            above = next(one for one in result.records if one.number == above.parent)
            line[above.number] = 0
        assert record.parent in line
        assert record.parent != record.shrunk_from
    for record in result.records[1:]:  # whatever is no child of the first trial would have had an ancestor to go back to
        assert record.shrunk_from is not None or record.parent == 0


def test_nothing_left_to_grow_within_the_limits_is_trained_on() -> None:
    result = start(space=outgrow.Space(factors=(1.5,), deepen=(), shrink=0.0, parameters=40), trials=6)
    assert max(record.parameters for record in result.records) <= 40
    assert len(result.records) == 6
    assert any(not record.growth for record in result.records[1:])


@pytest.mark.parametrize("kind", ["database", "proxy", "object"])
def test_storages(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        storage: Any = optuna.storages.InMemoryStorage()
        if kind == "database":
            storage = f"sqlite:///{tmp_path}/search.db"
        if kind == "proxy":
            pytest.importorskip("grpc")
            backend = optuna.storages.journal.JournalFileBackend(os.fspath(tmp_path / "behind.log"))
            storage = stack.enter_context(searches.Proxy(optuna.storages.JournalStorage(backend)))
        parent = small()
        wanted = start(parent=parent, trials=3)
        kept = start(parent=parent, trials=2, storage=storage, artifacts=tmp_path / "models")
        kept = start(parent=parent, trials=3, storage=storage, artifacts=tmp_path / "models")
        assert facts(kept) == facts(wanted)
        assert len(list((tmp_path / "models").iterdir())) == 3


def test_hyperparameters_of_training_are_optunas() -> None:
    def train(model: nn.Module, optimizer: Any, trial: Any) -> float:
        optimizer.param_groups[0]["lr"] = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        return searches.train(model, optimizer, trial)["error"]

    results = [start(train=train, objectives="error", trials=3, parent=parent) for parent in [small()] * 2]
    rates = [[trial.params["lr"] for trial in result.study.trials] for result in results]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == 3


def test_a_study_of_the_users_own_keeps_its_sampler() -> None:
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), directions=["minimize", "minimize"])
    result = start(study=study, trials=2)
    assert result.study is study
    assert isinstance(study.sampler, optuna.samplers.TPESampler)
    with pytest.raises(SearchError, match=r"has the objectives error .*and the search error .maximize."):
        start(study=study, objectives={"error": "max", "parameters": "min"})


def test_the_parent_and_the_random_state_stay_as_they_are() -> None:
    parent = small()
    state = torch.get_rng_state()
    before = copy.deepcopy(parent.state_dict())
    start(parent=parent, trials=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in parent.state_dict().items())


def failing(number: int, how: str) -> Any:
    """A training function that fails in one trial."""

    def train(model: Any, optimizer: Any, trial: Any) -> dict[str, float]:
        metrics = searches.train(model, optimizer, trial)
        if trial.user_attrs["slot"] == number:
            if how == "raises":
                raise ZeroDivisionError("no batches")
            if how == "weights":
                with torch.no_grad():
                    model[0].weight.fill_(float("inf"))
            return {"error": float("nan")} if how == "nan" else metrics
        return metrics

    return train


@pytest.mark.parametrize(
    ("how", "outcome", "said"),
    [
        ("raises", "raised", "ZeroDivisionError: no batches"),
        ("nan", "diverged", "error is nan"),
        ("weights", "diverged", "not finite"),
    ],
)
def test_a_trial_whose_training_fails(how: str, outcome: str, said: str, tmp_path: Path) -> None:
    result = start(train=failing(1, how), trials=3, storage=tmp_path / "a.log", quiet=False)
    assert [record.state for record in result.records] == [COMPLETE, "FAIL", COMPLETE]
    failed = result.records[1]
    assert failed.outcome == outcome
    assert said in failed.error
    assert all(record.parent != failed.number for record in result.records)
    with pytest.raises(SearchError, match="has no model"):
        result.load(1)


def wider() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"train": lambda model, optimizer, trial: {"eror": 1.0}}, "train returned eror, but not 'error'"),
        ({"train": lambda model, optimizer, trial: None}, "train returned None: it has to return a dict"),
        ({"parent": wider()}, r"the model of trial 0 does not fit this search[^~]*name another study"),
        ({"optimizer": lambda model: torch.optim.Adam(model.parameters())}, "optimizer 0 is of type Adam"),
    ],
)
def test_a_worker_with_another_version_of_the_search_leaves_its_trials_to_others(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    parent = small()
    start(parent=parent, trials=1, storage=tmp_path / "a.log")
    for _ in range(6):  # more often than a trial is tried
        with pytest.raises(SearchError, match=said):
            start(**{"parent": parent, "trials": 3, "storage": tmp_path / "a.log", **other})
    result = start(parent=parent, trials=3, storage=tmp_path / "a.log")
    assert [record.state for record in result.records] == [COMPLETE] * 3
    assert facts(result)[1:] != []
    assert [record.values for record in result.records] == [one.values for one in start(parent=parent, trials=3).records]


def test_errors_name_the_line_of_the_users_code(tmp_path: Path) -> None:
    def train(model: Any, optimizer: Any, trial: Any) -> dict[str, float]:
        if trial.user_attrs["slot"]:
            model[0](torch.zeros(1, 99))  # raised inside of torch
        return searches.train(model, optimizer or sgd(model), trial)

    failed = start(train=train, trials=2).records[1]
    assert "RuntimeError: " in failed.error
    assert f"{Path(__file__).name}, line " in failed.error
    with pytest.raises(SearchError, match=r"'NoneType' object .*the search has no optimizer="):
        start(optimizer=None)


def test_a_parent_whose_own_training_fails(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"training of the parent itself, failed.*ZeroDivisionError: no batches"):
        start(train=failing(0, "raises"), storage=tmp_path / "a.log", trials=3)
    mended = start(storage=tmp_path / "a.log", trials=3)
    assert [record.state for record in mended.records] == [COMPLETE] * 3


def test_an_interrupted_trial_is_taken_up_again(tmp_path: Path) -> None:
    parent, stopped = small(), []

    def train(model: Any, optimizer: Any, trial: Any) -> dict[str, float]:
        if trial.user_attrs["slot"] == 2 and not stopped:
            stopped.append((trial.user_attrs["parent"], trial.user_attrs["moves"]))
            raise KeyboardInterrupt
        return searches.train(model, optimizer, trial)

    with pytest.raises(KeyboardInterrupt):
        start(parent=parent, train=train, storage=tmp_path / "a.log", trials=4)
    result = start(parent=parent, train=train, storage=tmp_path / "a.log", trials=4)
    whole = start(parent=parent, trials=4)
    assert [record.values for record in result.records] == [record.values for record in whole.records]
    trials = result.study.trials
    assert [trial.state.name for trial in trials if trial.user_attrs["slot"] == 2] == ["FAIL", "COMPLETE"]
    assert (trials[4].user_attrs["parent"], trials[4].user_attrs["moves"]) == stopped[0]
    assert trials[4].user_attrs["retry_of"] == 2


def test_an_artifact_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = start(storage=tmp_path / "a.log", trials=3, sampler="random")
    models = tmp_path / "a.log-artifacts"
    (models / first.records[1].artifact).unlink()
    (models / first.records[2].artifact).rename(models / "elsewhere")
    more = start(storage=tmp_path / "a.log", trials=6, sampler="random", quiet=False)
    assert len(more.records) == 6
    assert "is gone: there is no artifact" in capsys.readouterr().err
    assert not {1, 2} & {record.parent for record in more.records[3:]}
    with pytest.raises(SearchError, match=r"the model of trial 1 is gone.*The study is as it was"):
        more.load(1)
    for path in models.iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(SearchError, match="is gone"):
        start(storage=tmp_path / "a.log", trials=7, sampler="random")
    for record in more.records:
        if (tmp_path / record.artifact).exists():
            (tmp_path / record.artifact).rename(models / record.artifact)
    last = start(storage=tmp_path / "a.log", trials=7, sampler="random")
    assert [record.state for record in last.records] == [COMPLETE] * 7


@pytest.mark.parametrize("storage", ["sqlite:////nowhere/search.db", "nowhere/search.log", "grpc://localhost:1", "nosuch://x"])
def test_a_storage_that_is_not_reachable(storage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storages, "WAIT", 0.2)
    with pytest.raises(SearchError, match=r"the storage .* can't be reached"):
        start(storage=storage, artifacts=tmp_path)


def test_storages_that_hold_no_search(tmp_path: Path) -> None:
    for name in (os.fspath(tmp_path / "a.log"), f"sqlite:///{tmp_path}/a.db"):
        with pytest.raises(SearchError, match="there is no file"):
            read_search(name)
    assert not list(tmp_path.iterdir())
    storages.open_storage(f"sqlite:///{tmp_path}/a.db")
    with pytest.raises(SearchError, match="holds no study"):
        read_search(f"sqlite:///{tmp_path}/a.db")
    (tmp_path / "a.log").write_text("something else\n")
    with pytest.raises(SearchError, match="the file exists, and is no journal of Optuna"):
        start(storage=tmp_path / "a.log")
    assert (tmp_path / "a.log").read_text() == "something else\n"
    start(storage=tmp_path / "b.log", trials=1)
    lines = (tmp_path / "b.log").read_text().splitlines(keepends=True)
    (tmp_path / "b.log").write_text("".join([*lines[:3], "something else\n", *lines[3:]]))
    with pytest.raises(SearchError, match="no journal file of Optuna, or it is damaged"):
        read_search(tmp_path / "b.log")


def test_a_storage_that_goes_away(tmp_path: Path) -> None:
    parent, (folder, away) = small(), (tmp_path / "here", tmp_path / "away")
    folder.mkdir()

    def train(model: Any, optimizer: Any, trial: Any) -> dict[str, float]:
        if trial.user_attrs["slot"] == 1 and folder.exists() and not away.exists():
            folder.rename(away)
        return searches.train(model, optimizer, trial)

    options = {"parent": parent, "train": train, "trials": 3, "artifacts": tmp_path / "models"}
    with pytest.raises(SearchError, match=r"the storage can't be reached .*start the search again when the storage is back"):
        start(storage=folder / "a.log", **options)
    shutil.copytree(away, folder)
    result = start(storage=folder / "a.log", lease=0.5, **options)
    assert [record.state for record in result.records] == [COMPLETE] * 3
    assert result.records[1].values == start(parent=parent, trials=2).records[1].values  # taken up again as it was begun


def test_nothing_is_created_for_a_space_in_which_nothing_can_grow(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="nothing can grow"):
        start(space=outgrow.Space(widen="9", deepen=()), storage=tmp_path / "a.log")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampler": "climb"}, "sampler='climb': write one of 'evolution', 'hill', 'random'"),
        ({"trials": 0}, "trials=0"),
        ({"train": 3}, "train is of type int"),
        ({"train": lambda model: 1.0}, r"train can't be called with a model, an optimizer and a trial .*write def train"),
        ({"parent": "model"}, "parent is of type str"),
        ({"space": {}}, "space is of type dict"),
        ({"optimizer": sgd(small())}, "pass a function that makes one"),
        ({"study": 3}, "study=3: write a name"),
        ({"study": ""}, "study='': write a name"),
        ({"storage": optuna.storages.InMemoryStorage()}, "pass artifacts="),
        ({"seed": 1.5}, "seed=1.5"),
        ({"lease": 0}, "lease=0"),
        ({"lease": "long"}, "lease='long'"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SearchError, match=said):
        start(**options)
