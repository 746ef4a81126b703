"""URLs of databases: passwords are never shown, mistakes are named, and tables are made by one worker only."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from outgrow.cli.main import main
from outgrow.errors import MissingError, SearchError
from outgrow.search import databases
from outgrow.search.search import read_search
from outgrow.search.storages import open_storage
from outgrow.text.passwords import hide_passwords

optuna = pytest.importorskip("optuna")
exc = pytest.importorskip("sqlalchemy.exc")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:Secret@host/db",
        "postgresql://me:Sec/Secret@host/db",
        "postgresql://me:Sec@Secret@host/db",
        "postgresql://:Secret@host/db",
        "mysql+pymysql://me:Sec%40Secret@host:3306/db?charset=utf8mb4",
        "postgresql://host/db?user=me&password=Secret",
        "postgresql://host/db?sslpassword=Secret&x=1",
    ],
)
def test_passwords_are_hidden(url: str) -> None:
    hidden = hide_passwords(f"can't open '{url}' (reason)")
    assert "Secret" not in hidden
    assert "***" in hidden
    assert hidden.endswith("(reason)")


@pytest.mark.parametrize(
    "text", ["search.log", "sqlite:////a/b.db", "grpc://host:13000", "at 10:30 by me@home", "http://host:80/a"]
)
def test_other_texts_stay(text: str) -> None:
    assert hide_passwords(text) == text


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:Sec@ret@localhost:1/db",
        "postgresql://me:Sec@ret/Secret@localhost:1/db",
        "postgresql://me:Secret@localhost:Secret/db",
        "grpc://me:Secret@localhost:1",
        "nosuch://me:Secret@localhost/db",
        "nosuch://me:{Secret}@localhost/db",
        "mysql+nosuch://me:Secret@localhost/db",
    ],
)
def test_errors_hold_no_piece_of_a_password(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SearchError, match=r"can't be read: write|can't be reached") as caught:
        open_storage(url)
    assert "Secret" not in str(caught.value)
    assert "ret@" not in str(caught.value)
    assert main(["search", "report", "--storage", url]) == 2
    said = capsys.readouterr().err
    assert "Secret" not in said
    assert "ret@" not in said
    assert said.count("\n") == 1


def test_a_mistake_on_the_command_line_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["search", "report", "--storage", "a.log", "--storge", "postgresql://me:Secret@host/db"])
    assert "--storge postgresql://me:***@host/db" in capsys.readouterr().err


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("Failed to import DB access module") from ImportError("No module named 'pymysql'")

    monkeypatch.setattr(optuna.storages, "RDBStorage", refuse)
    with pytest.raises(
        MissingError, match=r"mysql\+pymysql://me:\*\*\*@host/db needs a driver.*pip install PyMySQL \(No module"
    ) as e:
        open_storage("mysql+pymysql://me:Secret@host/db")
    assert "Secret" not in str(e.value)


@pytest.mark.parametrize("version", ["v2.6.0.a", "v99.0.0.a"])
def test_tables_of_another_version_of_optuna(version: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    open_storage(url)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("update alembic_version set version_num = ?", (version,))
    connection.close()
    with pytest.raises(SearchError, match=r"was set up by another version of Optuna: .*(storage upgrade|pip install -U)"):
        open_storage(url)


def test_reading_creates_no_tables(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    sqlite3.connect(path).close()
    with pytest.raises(SearchError, match="the storage holds no study"):
        read_search(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        assert connection.execute("select count(*) from sqlite_master").fetchone() == (0,)
    connection.close()


def test_another_worker_that_creates_the_same_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    raised = []

    class Late(optuna.storages.RDBStorage):  # type: ignore[name-defined, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            if len(raised) < 2:
                raised.append(exc.IntegrityError("INSERT", {}, Exception("duplicate key")))
                raise raised[-1]
            super().__init__(*args, **options)

    monkeypatch.setattr(optuna.storages, "RDBStorage", Late)
    monkeypatch.setattr(databases.time, "sleep", lambda seconds: None)
    assert open_storage(f"sqlite:///{tmp_path}/a.db").get_all_studies() == []
    assert len(raised) == 2
