"""What there is to do follows from the stored trials: slots, attempts, and which of them count."""

from __future__ import annotations

import json

import pytest

from outgrow.search.records import COMPLETE, FAIL, RUNNING, WAITING, Book, Record, ancestors


def book(*records: Record, slots: int = 3, attempts: int = 2) -> Book:
    return Book(records, slots, attempts)


ROOT = Record(0, 0, COMPLETE)


def test_a_lost_trial_is_tried_again_but_not_forever() -> None:
    lost, again = Record(1, 1, FAIL), Record(2, 1, FAIL)
    assert book(ROOT, lost).missing() == [1, 2]
    assert book(ROOT, lost, Record(2, 1, WAITING)).missing() == [2]
    assert book(ROOT, lost, again, slots=2).missing() == []
    assert book(ROOT, lost, again, slots=2).finished
    assert book(ROOT, lost, Record(2, 1, FAIL, outcome="interrupted"), slots=2).missing() == [1]


@pytest.mark.parametrize("outcome", ["raised", "diverged"])
def test_a_trial_whose_training_failed_is_not_tried_again(outcome: str) -> None:
    found = book(ROOT, Record(1, 1, FAIL, outcome=outcome), slots=2)
    assert found.missing() == []
    assert found.finished
    assert found.settled()[1].outcome == outcome


def test_of_two_attempts_at_the_same_slot_the_first_counts() -> None:
    first, second = Record(1, 1, RUNNING), Record(2, 1, WAITING)
    both = book(ROOT, first, second, slots=2)
    assert both.superfluous(second)
    assert not both.superfluous(first)
    assert not book(ROOT, Record(1, 1, FAIL), second).superfluous(second)
    assert book(ROOT, Record(1, 1, FAIL, outcome="raised"), second).superfluous(second)


def test_all_wait_for_the_first_trial() -> None:
    waiting = [Record(number, number, WAITING) for number in range(3)]
    assert [record.slot for record in book(*waiting).waiting()] == [0]
    assert [record.slot for record in book(Record(0, 0, RUNNING), *waiting[1:]).waiting()] == []
    assert [record.slot for record in book(ROOT, *waiting[1:]).waiting()] == [1, 2]
    assert book(Record(0, 0, FAIL, outcome="raised"), *waiting[1:]).failed_root() is not None
    assert book(Record(0, 0, FAIL, outcome="raised"), Record(9, 0, COMPLETE)).failed_root() is None


def test_ancestors_and_plain_data() -> None:
    chain = [ROOT, Record(1, 1, COMPLETE, parent=0), Record(2, 2, COMPLETE, parent=1, growth=("Widen '0' × 2",), values=(1.0,))]
    assert [record.number for record in ancestors(chain[2], chain)] == [1, 0]
    assert [Record.from_json(record.to_json()) for record in chain] == chain
    odd = Record(3, 3, COMPLETE, metrics={"error": 0.5, "ratio": float("nan")})
    assert json.loads(json.dumps(odd.to_json(), allow_nan=False))["metrics"] == {"error": 0.5, "ratio": None}
