"""Models of trials in an artifact store: damaged ones are told apart from those of another search."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import outgrow
from outgrow.errors import SearchError
from tests.helpers import searches
from tests.helpers.searches import SPACE, inputs, sgd, small

pytest.importorskip("optuna")


def start(folder: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"optimizer": sgd, "storage": folder / "a.log", "quiet": True, "sampler": "random", **options}
    train = given.pop("train", searches.train)
    return outgrow.search(given.pop("parent", None) or small(), inputs(), SPACE, train, "error", **given)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"hello"])
def test_a_damaged_model_is_not_chosen_as_a_parent(damage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = start(tmp_path, trials=3)
    for record in first.records[1:]:
        path = tmp_path / "a.log-artifacts" / record.artifact
        path.write_bytes(damage(path.read_bytes()))
    more = start(tmp_path, trials=8)
    assert len(more.records) == 8
    assert not {1, 2} & {record.parent for record in more.records[3:]}
    assert "is damaged: the artifact" in capsys.readouterr().err
    with pytest.raises(SearchError, match=r"the model of trial 1 is damaged: the artifact .* can't be read; restore it"):
        more.load(1)


def test_a_damaged_model_of_the_only_trial_is_named(tmp_path: Path) -> None:
    first = start(tmp_path, trials=1)
    path = tmp_path / "a.log-artifacts" / first.records[0].artifact
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(SearchError, match=r"the model of trial 0 is damaged.*The study is as it was"):
        start(tmp_path, trials=3)
    path.write_bytes(whole)
    assert len(start(tmp_path, trials=3).front) >= 1


def test_a_function_that_makes_no_optimizer(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"optimizer= makes no optimizer of the model \(ZeroDivisionError: no rate\)"):
        start(tmp_path, optimizer=lambda model: (_ for _ in ()).throw(ZeroDivisionError("no rate")))
    assert not list(tmp_path.iterdir())


def test_a_model_that_training_has_rebuilt_ends_the_worker_and_no_later_one() -> None:
    def rebuild(model: Any, optimizer: Any, trial: Any) -> float:
        model.append(nn.Linear(1, 1))
        return 1.0

    def widen(model: Any, optimizer: Any, trial: Any) -> float:
        outgrow.widen(model, inputs(), "0", by=1, optimizer=optimizer)
        return 1.0

    def search(train: Any) -> Any:
        return outgrow.search(small(), inputs(), SPACE, train, "error", optimizer=sgd, trials=2, quiet=True)

    with pytest.raises(SearchError, match=r"train has changed the architecture of its model \(3\.bias, …\)"):
        search(rebuild)
    assert search(widen).records[0].state == "COMPLETE"


class Unreliable:
    """An artifact store in memory that can be out of reach."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.away = False

    def open_reader(self, name: str) -> io.BytesIO:
        if self.away:
            raise ConnectionError("no answer")
        return io.BytesIO(self.files[name])

    def write(self, name: str, content: Any) -> None:
        if self.away:
            raise ConnectionError("no answer")
        self.files[name] = content.read()


@pytest.mark.parametrize("begun", [0, 2])
def test_a_store_that_is_not_reached_ends_the_worker_and_no_trial(begun: int, tmp_path: Path) -> None:
    store = Unreliable()
    if begun:
        start(tmp_path, artifacts=store, trials=begun)
    store.away = True
    verb = "read from" if begun else "written to"
    with pytest.raises(
        SearchError, match=rf"can't be {verb} the Unreliable \(ConnectionError: no answer\): the study is as it was"
    ):
        start(tmp_path, artifacts=store, trials=4)
    store.away = False
    assert [record.state for record in start(tmp_path, artifacts=store, trials=4).records] == ["COMPLETE"] * 4


def test_a_worker_with_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, trials=3)
    with pytest.raises(
        SearchError, match=r"there is no artifact .* pass the artifacts= that the other workers of the study have"
    ):
        start(tmp_path, trials=6, artifacts=tmp_path / "elsewhere")
    assert capsys.readouterr().err == ""
    assert [record.state for record in start(tmp_path, trials=6).records] == ["COMPLETE"] * 6


def test_a_url_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"artifacts='s3://models' is no folder: pass an artifact store of Optuna"):
        start(tmp_path, artifacts="s3://models")
