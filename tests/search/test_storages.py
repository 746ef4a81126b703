"""Files that are no journals stay as they are, and a study belongs to one search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import outgrow
from outgrow.errors import SearchError
from outgrow.search.storages import FileLock, open_storage
from tests.helpers import searches
from tests.helpers.searches import SPACE, inputs, sgd, small

optuna = pytest.importorskip("optuna")


def start(**options: Any) -> Any:
    given: dict[str, Any] = {"optimizer": sgd, "trials": 2, "quiet": True, **options}
    return outgrow.search(small(), inputs(), SPACE, searches.train, "error", **given)


@pytest.mark.parametrize("text", ["my notes", "my notes\n", '{"lr": 0.1}', "\x00\x01"])
def test_a_file_that_is_no_journal_stays_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(SearchError, match="the file exists, and is no journal of Optuna"):
        start(storage=path)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["", '{"op', '{"op_code":0,"work'])
def test_a_journal_whose_first_line_is_unfinished_is_begun_again(text: str, tmp_path: Path) -> None:
    path = tmp_path / "search.log"
    path.write_text(text)
    assert len(start(storage=path).records) == 2


def test_a_damaged_journal_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "search.log"
    start(storage=path)
    path.write_text(path.read_text().replace("study_id", "study", 1))
    before = path.read_text()
    with pytest.raises(SearchError, match="no journal file of Optuna, or it is damaged"):
        open_storage(path)
    assert path.read_text() == before


@pytest.mark.parametrize("other", [{"seed": 1}, {"sampler": "random"}])
def test_a_study_that_was_begun_with_another_sampler_or_seed_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    start(storage=tmp_path / "a.log")
    (name,) = other
    with pytest.raises(
        SearchError, match=f"the study 'search' was begun with {name}=.*name another study, or continue it with"
    ):
        start(storage=tmp_path / "a.log", trials=4, **other)
    assert len(start(storage=tmp_path / "a.log", study="other", **other).records) == 2
    assert len(start(storage=tmp_path / "a.log", trials=4).records) == 4


def test_a_result_has_all_trials_of_the_study_and_none_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(tmp_path / "a.log")
    study = optuna.create_study(storage=storage, study_name="shared")
    for _ in range(3):
        study.add_trial(optuna.trial.create_trial(value=-1.0))
    options = {"storage": tmp_path / "a.log", "study": "shared"}
    assert [record.slot for record in start(**options, trials=5).records] == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""
    assert len(start(**options, trials=1).records) == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"storage": 3}, "storage is of type int: write a path"),
        ({"artifacts": 3}, "artifacts is of type int: pass a folder"),
        ({"minutes": float("nan")}, "minutes=nan: write a number of minutes above 0"),
        ({"minutes": -1}, "minutes=-1"),
    ],
)
def test_wrong_places_and_times(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SearchError, match=said):
        start(**options)


def test_a_journal_that_is_removed_meanwhile_ends_the_search_and_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "a.log"

    def remove(model: Any, optimizer: Any, trial: Any) -> dict[str, float]:
        path.unlink(missing_ok=True)
        return searches.train(model, optimizer, trial)

    with pytest.raises(SearchError, match=r"the storage can't be reached \(FileNotFoundError.*start the search again"):
        outgrow.search(small(), inputs(), SPACE, remove, "error", optimizer=sgd, storage=path, quiet=True)
    path.touch()
    lock = FileLock(str(path))  # another worker's
    assert lock.acquire()
    lock.release()
