"""Models of trials that are still needed: all others are deleted, so that a study can be taken to another machine.

The next generation of a hill climb grows the best trial, or one of its ancestors; so does the present one, with the best trial
of those before it. Of a search that is done, the best trial alone is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import outgrow


def ancestors(record: Any, records: Sequence[Any]) -> list[Any]:
    """The parent of a trial, its parent, and so on up to the first."""
    by_number, found = {one.number: one for one in records}, []
    while record.parent is not None:
        record = by_number[record.parent]
        found.append(record)
    return found


def needed(records: Sequence[Any], trials: int, children: int) -> list[Any]:
    """The trials whose models a search may read again. records: the trials that are done."""
    done = [record for record in records if record.state == "COMPLETE"]
    if not done:
        return []
    best = min(done, key=lambda record: (record.values[0], record.slot))
    if len(records) == trials:
        return [best]
    last = max(record.slot for record in done)
    first = max(1, last - (last - 1) % children)  # of the present generation, which `outgrow.search` continues
    before = [record for record in done if record.slot < first] or done
    parent = min(before, key=lambda record: (record.values[0], record.slot))
    return [best, parent, *ancestors(best, records), *ancestors(parent, records)]


def prune(result: outgrow.SearchResult, artifacts: Path, trials: int, children: int) -> None:
    """Delete the models that are not needed."""
    kept = {record.artifact for record in needed(result.records, trials, children)}
    for path in artifacts.iterdir():
        if path.name not in kept:
            path.unlink()
