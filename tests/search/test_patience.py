"""A storage that can't be reached for a while ends no search, and one that stays away leaves the study as it is."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outgrow
from outgrow.errors import SearchError
from outgrow.search import patience, worker
from outgrow.search.patience import Patient
from outgrow.search.storage_errors import UnreachableError, is_refused, passes, said
from tests.helpers import searches
from tests.helpers.searches import SPACE, Proxy, inputs, sgd, small

optuna = pytest.importorskip("optuna")
exc = pytest.importorskip("sqlalchemy.exc")


def of_database(
    number: Any, text: str = "x", kind: Any = exc.OperationalError, state: str | None = None, gone: bool = False
) -> Any:
    """An error as SQLAlchemy raises it, within Optuna's."""
    original = type("DriverError", (Exception,), {"sqlstate": state})(*([number] if number is not None else []), text)
    outer = optuna.exceptions.StorageInternalError("An exception is raised during the commit.")
    outer.__cause__ = kind("SELECT 1", {"a": "Secret"}, original, connection_invalidated=gone)
    return outer


@pytest.mark.parametrize(
    ("error", "passing", "text"),
    [
        (of_database(2013, "Lost connection"), True, "DriverError: Lost connection"),
        (of_database(1213, "Deadlock found"), True, "DriverError: Deadlock found"),
        (of_database(1142, "INSERT command denied"), False, "DriverError: INSERT command denied"),
        (of_database(None, "terminating connection\nDETAIL: x", state="57P01"), True, "DriverError: terminating connection"),
        (of_database(None, "permission denied", exc.ProgrammingError, "42501"), False, "DriverError: permission denied"),
        (of_database(None, "too long", exc.DataError, "22001"), False, "DriverError: too long"),
        (of_database(None, "closed", exc.InterfaceError, gone=True), True, "DriverError: closed"),
        (
            exc.OperationalError("x", {}, sqlite3.OperationalError("database is locked")),
            True,
            "OperationalError: database is locked",
        ),
        (exc.OperationalError("x", {}, sqlite3.OperationalError("no such table")), False, "OperationalError: no such table"),
        (ValueError("train"), False, "ValueError: train"),
    ],
)
def test_errors_that_pass(error: Exception, passing: bool, text: str) -> None:
    assert (passes(error), said(error)) == (passing, text)
    assert is_refused(error) == (not passing and not isinstance(error, ValueError))


def storage(failures: int) -> Any:
    """A storage whose first calls fail."""
    left = [failures]

    def get_trial(number: int) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise of_database(2006, "gone away")
        return number

    return Patient(SimpleNamespace(get_trial=get_trial, refuse=lambda: (_ for _ in ()).throw(of_database(1142))))


def test_a_call_is_repeated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(patience, "FIRST", 0.01)
    found = storage(3)
    assert found.get_trial(7) == 7
    assert found.outages == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "the storage can't be reached (DriverError: gone away): trying again for 5 minutes",
        "the storage is back after 0 seconds",
    ]
    assert storage(1).get_trial(7) == 7  # a dropped connection is not worth a word
    assert capsys.readouterr().err == ""
    with pytest.raises(optuna.exceptions.StorageInternalError):
        found.refuse()


def test_a_storage_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST", 0.01)
    monkeypatch.setattr(patience, "MOST", 0.05)
    with pytest.raises(UnreachableError, match=r"gone away\): the study is as it was; start the same command again"):
        storage(1000).get_trial(7)


def start(url: str, folder: Path, train: Any = searches.train, trials: int = 4) -> Any:
    options = {"optimizer": sgd, "quiet": True, "artifacts": folder / "models", "lease": 0.5}
    return outgrow.search(small(), inputs(), SPACE, train, "error", storage=url, trials=trials, **options)


def test_a_proxy_that_is_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("grpc")
    database = optuna.storages.get_storage(f"sqlite:///{tmp_path}/a.db")
    first, again = Proxy(database), []

    def train(model: Any, optimizer: Any, trial: Any) -> dict[str, float]:
        if trial.user_attrs["slot"] == 2 and not again:
            first.__exit__()
            again.append(Proxy(database, first.port))
            again[0].__enter__()
        return searches.train(model, optimizer, trial)

    with first as url:
        result = start(url, tmp_path, train)
        again[0].__exit__()
    assert [record.state for record in result.records] == ["COMPLETE"] * 4
    assert len(database.get_all_trials(result.study._study_id)) == 4


def test_a_proxy_that_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc")
    monkeypatch.setattr(patience, "MOST", 0.5)
    database = optuna.storages.get_storage(f"sqlite:///{tmp_path}/a.db")
    first = Proxy(database)

    def train(model: Any, optimizer: Any, trial: Any) -> dict[str, float]:
        if trial.user_attrs["slot"] == 2:
            first.__exit__()
        return searches.train(model, optimizer, trial)

    with first as url, pytest.raises(SearchError, match="start the same command again when the storage is back"):
        start(url, tmp_path, train)
    (study,) = database.get_all_studies()
    states = [trial.state.name for trial in database.get_all_trials(study._study_id)]
    assert states == ["COMPLETE", "COMPLETE", "RUNNING", "WAITING"]
    with Proxy(database) as url:
        result = start(url, tmp_path)
    assert [record.state for record in result.records] == ["COMPLETE"] * 4


def test_a_result_that_was_stored_though_the_connection_broke(tmp_path: Path) -> None:
    """The call is repeated, and refused since the trial has ended: by this worker itself."""

    class Twice(optuna.storages.InMemoryStorage):  # type: ignore[name-defined, misc]
        def set_trial_state_values(self, trial_id: int, state: Any, values: Any = None) -> bool:
            super().set_trial_state_values(trial_id, state, values)
            return bool(super().set_trial_state_values(trial_id, state, values)) or state.name == "RUNNING"

    result = start(Twice(), tmp_path)  # type: ignore[arg-type]
    assert [record.state for record in result.records] == ["COMPLETE"] * 4
    assert len(result.study.trials) == 4


def test_reasons_hold_no_password_and_are_not_too_long_for_a_database(tmp_path: Path) -> None:
    def train(model: Any, optimizer: Any, trial: Any) -> float:
        if trial.user_attrs["slot"]:
            raise RuntimeError("no data in postgresql://me:Secret@host/db: " + "x" * 100_000)
        return 1.0

    result = start(f"sqlite:///{tmp_path}/a.db", tmp_path, train, trials=2)
    error = result.records[1].error
    assert "postgresql://me:***@host/db" in error
    assert len(error) == worker.LONGEST
    result.report(tmp_path / "report.html")
    assert "Secret" not in (tmp_path / "report.html").read_text(encoding="utf-8")
