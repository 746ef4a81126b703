"""Models of trials that are still needed: all others are deleted, so that a study can be taken to another machine.

The next generation of a hill climb grows the best trial, or one of its ancestors; so does the present one, with the best trial
of those before it. Of a search that is done, the best trial alone is needed.
"""

from __future__ import annotations

from pathlib import Path

import outgrow
from outgrow.search.records import Record, ancestors, complete


def needed(records: list[Record], trials: int, children: int) -> list[Record]:
    """The trials whose models a search may read again."""
    done = [record for record in complete(records) if record.slot >= 0]
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
