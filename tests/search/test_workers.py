"""Several processes on one storage, killed at random moments: no trial is lost or counted twice."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outgrow.search.records import Record
from outgrow.search.search import read_search
from outgrow.search.storages import _cut_unfinished, load_study, open_storage
from tests.helpers.searches import TRIALS, Proxy, Workers, check_records, wait_for_another_trial

optuna = pytest.importorskip("optuna")
pytest.importorskip("fcntl")


@contextlib.contextmanager
def storage_of(kind: str, folder: Path) -> Iterator[str]:
    """A storage by its name: a journal file, an SQLite database, or a proxy of Optuna in front of such a database."""
    if kind == "journal":
        yield os.fspath(folder / "search.log")
    elif kind == "database":
        yield f"sqlite:///{folder}/search.db"
    else:
        pytest.importorskip("grpc")
        with Proxy(optuna.storages.RDBStorage(f"sqlite:///{folder}/search.db")) as url:
            yield url


def killed(kind: str, folder: Path, trials: int, kills: int, seed: int) -> list[Record]:
    """Run a search by two workers, of which one is killed and replaced now and then; returns all trials of Optuna.

    A kill waits until a trial has begun since the last one, and a random time more: it hits the growth, the training, the
    writing of the model or of the result, or the moment between two trials.
    """
    with storage_of(kind, folder) as storage:
        workers, generator, begun = Workers(storage, folder / "models", trials), random.Random(seed), 0
        watched = open_storage(storage)
        for _ in range(2):
            workers.start()
        for _ in range(kills):
            begun = wait_for_another_trial(watched, begun)
            time.sleep(generator.uniform(0, 0.4))
            workers.kill(generator.choice(workers.running))
            workers.start()
        assert workers.join(300) == [0] * 2
        result = read_search(storage)
    assert [record.slot for record in result.records] == list(range(trials))
    return [Record.of(trial) for trial in result.study.trials] if kind != "proxy" else records_in(folder)


def records_in(folder: Path) -> list[Record]:
    """All trials of the database behind a proxy that has ended."""
    return [Record.of(trial) for trial in load_study(open_storage(f"sqlite:///{folder}/search.db"), "killed").trials]


KINDS = ["journal", "database", "proxy"]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_are_killed(kind: str, tmp_path: Path) -> None:
    trials, kills = (TRIALS, 3) if kind == "journal" else (4, 1)
    check_records(killed(kind, tmp_path, trials, kills, seed=0), trials, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_are_killed_often(kind: str, tmp_path: Path, seed: int) -> None:
    records = killed(kind, tmp_path, trials=30, kills=20, seed=seed)
    check_records(records, 30, tmp_path)
    assert sum(record.lost for record in records) >= 5, "the kills have hardly hit running trials"


def test_an_unfinished_line_of_a_killed_worker_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for text, kept in ((b"", b""), (b"{}\n", b"{}\n"), (b'{}\n{"a":', b"{}\n"), (b'{"a"', b"")):
        path.write_bytes(text)
        _cut_unfinished(str(path))
        assert path.read_bytes() == kept
