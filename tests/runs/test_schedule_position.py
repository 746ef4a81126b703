"""Events of a saved run are found again in a schedule, whatever options requests have got since."""

from __future__ import annotations

import outgrow
from outgrow.runs.schedule_position import happened, mark


def test_a_mark_without_later_options_is_found_and_other_requests_are_not() -> None:
    schedule = outgrow.Schedule(
        [
            outgrow.At(step=2, grow=[outgrow.Widen("a", to=12, method="r2r")]),
            outgrow.At(step=2, grow=[outgrow.Widen("a", to=12, method="r2r", residual="fold")]),
            outgrow.At(step=5, grow=[outgrow.Deepen("b", count=12)]),
        ]
    )
    earlier = "step 2: (Widen(where='a', factor=None, by=None, to=12, method='r2r', residual='stream', fade=None),)"
    other = "step 5: (Deepen(after='b', count=1, method='auto', fade=None, layers=None),)"
    assert happened(schedule, {"done": [earlier, other]}) == [0]
    assert happened(schedule, {"done": [mark(event) for event in reversed(list(schedule))]}) == [2, 1, 0]
