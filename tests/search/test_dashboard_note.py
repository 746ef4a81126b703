"""The family tree in the note of a study, in the form that optuna-dashboard reads."""

from __future__ import annotations

import pytest

from outgrow.search.dashboard_note import HEADING, LENGTH, note, write_note
from outgrow.search.objectives import Objectives
from outgrow.search.records import COMPLETE, FAIL, Record

optuna = pytest.importorskip("optuna")
ERROR = Objectives.of("error")


def read(study: optuna.Study) -> str:
    """As the dashboard reads it: all pieces, numbered from zero on, one after the other."""
    found = {key: value for key, value in study._storage.get_study_system_attrs(study._study_id).items() if "note_str:" in key}
    return "".join(found[f"dashboard:note_str:{number}"] for number in range(len(found)))


def chain(length: int) -> list[Record]:
    grown = [Record(n, n, COMPLETE, n - 1, (f"Widen 'layer{n}' × 2",), (1 / (n + 1),)) for n in range(1, length)]
    return [Record(0, 0, COMPLETE, values=(1.0,)), *grown]


def test_children_are_below_their_parents() -> None:
    text = note([*chain(3), Record(3, 3, FAIL, 0, ("Widen 'a' × 2",), outcome="raised")], ERROR)
    assert text.splitlines()[3:] == [
        "- 0  the parent: error 1",
        "  - 1  Widen 'layer1' × 2: error 0.5",
        "    - **2  Widen 'layer2' × 2: error 0.3333**",
        "  - 3  Widen 'a' × 2: raised",
    ]


def test_a_note_is_replaced_by_a_shorter_one_but_not_if_it_is_somebody_elses() -> None:
    study = optuna.create_study()
    long, short = note(chain(100), ERROR), note(chain(2), ERROR)
    assert len(long) > 2 * LENGTH
    for text in (long, short, long):
        write_note(study, text)
        assert read(study) == text
    assert study._storage.get_study_system_attrs(study._study_id)["dashboard:note_ver"] == 3
    other = optuna.create_study()
    other._storage.set_study_system_attr(other._study_id, "dashboard:note_str:0", "my own words")
    write_note(other, long)
    assert read(other) == "my own words"
    assert long.startswith(HEADING)
