"""Searches on database servers: workers, their connections and the proxy are killed, and no trial is lost or counted twice.

The environment variable OUTGROW_TEST_STORAGE names the servers: URLs, separated by spaces, of databases that may be filled with
studies, e.g. `postgresql://worker:PASSWORD@localhost/test mysql+pymysql://worker:PASSWORD@localhost/test`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outgrow.errors import SearchError
from outgrow.search.patience import release
from outgrow.search.records import Record
from outgrow.search.search import read_search
from outgrow.search.storages import load_study, open_storage
from tests.helpers.searches import Workers, check_records, wait_for_another_trial

optuna = pytest.importorskip("optuna")
pytest.importorskip("fcntl")

URLS = os.environ.get("OUTGROW_TEST_STORAGE", "").split()
needs_server = pytest.mark.skipif(not URLS, reason="OUTGROW_TEST_STORAGE names no database server")
each = pytest.mark.parametrize("url", URLS or [""], ids=[url.partition(":")[0] for url in URLS] or ["none"])


def killed(url: str, folder: Path, trials: int, kills: int, disturb: Any = None) -> list[Record]:
    """Run a search by two workers, of which one is killed and replaced now and then; returns all trials of Optuna."""
    study, generator, begun = f"killed-{uuid.uuid4().hex[:8]}", random.Random(0), 0
    watched = open_storage(url)
    workers = Workers(url, folder / "models", trials, study)
    for _ in range(2):
        workers.start()
    for number in range(kills):
        begun = wait_for_another_trial(watched, begun, study)
        time.sleep(generator.uniform(0, 0.4))
        workers.kill(generator.choice(workers.running))
        workers.start()
        if disturb is not None:
            disturb(number)
    assert workers.join(300) == [0] * 2
    result = read_search(url, study)
    assert [record.slot for record in result.records] == list(range(trials))
    records = [Record.of(trial) for trial in load_study(watched, study).trials]
    release(watched)
    return records


def drop_connections(url: str) -> None:
    """End all other connections of the database's user."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            others = "from pg_stat_activity where usename = current_user and pid <> pg_backend_pid()"
            connection.execute(sqlalchemy.text(f"select pg_terminate_backend(pid) {others}"))
        else:
            mine = connection.execute(sqlalchemy.text("select connection_id()")).scalar()
            listed = connection.execute(
                sqlalchemy.text(
                    "select id from information_schema.processlist where user = substring_index(current_user, '@', 1)"
                )
            )
            for (other,) in listed.all():
                if other != mine:
                    with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):  # it has ended
                        connection.execute(sqlalchemy.text(f"kill {int(other)}"))
    engine.dispose()


class ProxyProcess:
    """A proxy in a process of its own, until the end of the context."""

    def __init__(self, database: str) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self.port = probe.getsockname()[1]
        self.command = [sys.executable, "-m", "tests.helpers.proxy_server", database, str(self.port)]

    def __enter__(self) -> ProxyProcess:
        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL)
        return self

    def restart(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        time.sleep(1)
        self.__enter__()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def dropping(url: str, every: float) -> Iterator[list[int]]:
    """Drop all connections again and again."""
    end, count = threading.Event(), [0]

    def drop() -> None:
        while not end.wait(every):
            drop_connections(url)
            count[0] += 1

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        yield count
    finally:
        end.set()
        thread.join()


@needs_server
@each
def test_workers_on_a_server_that_are_killed(url: str, tmp_path: Path) -> None:
    check_records(killed(url, tmp_path, trials=8, kills=3), 8, tmp_path)


@needs_server
@pytest.mark.exhaustive
@each
def test_workers_on_a_server_that_are_killed_often(url: str, tmp_path: Path) -> None:
    records = killed(url, tmp_path, trials=30, kills=20)
    check_records(records, 30, tmp_path)
    assert any(record.lost for record in records), "the kills have hit no running trial"


@needs_server
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # psycopg's, of a connection that broke
@each
def test_connections_that_are_dropped_end_no_worker(url: str, tmp_path: Path) -> None:
    with dropping(url, 0.3) as dropped:
        records = killed(url, tmp_path, trials=20, kills=0)
    check_records(records, 20, tmp_path)
    assert dropped[0] > 2
    assert sum(record.lost and record.outcome != "duplicate" for record in records) <= 2  # a beginning was not acknowledged


@needs_server
@each
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_a_proxy_that_is_killed_and_started_again(url: str, kills: int, tmp_path: Path) -> None:
    with ProxyProcess(url) as proxy:
        check_records(
            killed(
                f"grpc://localhost:{proxy.port}", tmp_path, 6 + kills, kills, lambda n: proxy.restart() if n % 5 == 1 else None
            ),
            6 + kills,
            tmp_path,
        )


@needs_server
@each
def test_a_wrong_password_is_not_shown(url: str) -> None:
    from sqlalchemy.engine import make_url

    wrong = make_url(url).set(password="Wr0ng/Secret").render_as_string(hide_password=False)
    with pytest.raises(SearchError, match=r"the storage .*:\*\*\*@.* can't be reached") as caught:
        open_storage(wrong)
    assert "Secret" not in str(caught.value)
