"""The family tree of a search as the note of its study, which `optuna-dashboard` shows.

The dashboard draws the Pareto front and lists attributes of trials, but knows nothing of parents. Notes are Markdown, kept in
system attributes of a study in pieces of a limited length. A note of somebody else is never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outgrow.search.objectives import Objectives
from outgrow.search.records import Record, pareto_front
from outgrow.search.tree_svg import label, rows, shown_of, values
from outgrow.text.plurals import counted

VERSION, PIECE = "dashboard:note_ver", "dashboard:note_str:"  # names of attributes
LENGTH = 2045  # letters of one attribute that all databases can hold
HEADING = "## Family tree"


def note(records: Sequence[Record], objectives: Objectives) -> str:
    """The tree as Markdown: a nested list, with the trials that no other dominates in bold.

    Example:
        >>> grown = Record(1, 1, "COMPLETE", 0, ("Widen '0' × 2",), (0.25,))
        >>> print(note([Record(0, 0, "COMPLETE", values=(0.5,)), grown], Objectives.of("error")))
        ## Family tree
        Each trial has grown the model of the one above it; **bold**: no other trial is better in all objectives.
        <BLANKLINE>
        - 0  the parent: error 0.5
          - **1  Widen '0' × 2: error 0.25**
    """
    shown = shown_of(records, objectives)
    best = {record.number for record in pareto_front(records, objectives)}
    said = "Each trial has grown the model of the one above it; **bold**: no other trial is better in all objectives."
    lines = [HEADING, said, ""]
    for record, depth in rows(shown):
        text = f"{label(record)}: {values(record, objectives)}"
        lines.append(f"{'  ' * depth}- {f'**{text}**' if record.number in best else text}")
    left_out = len(records) - len(shown)
    return "\n".join([*lines, *(["", f"{counted(left_out, 'other trial')} not shown"] if left_out else [])])


def write_note(study: Any, text: str) -> None:
    """Make a text the study's note, unless it has a note of somebody else."""
    storage, identity = study._storage, study._study_id
    before = storage.get_study_system_attrs(identity)
    old = {key: value for key, value in before.items() if key.startswith(PIECE)}
    present = "".join(old[key] for key in sorted(old, key=lambda key: int(key.removeprefix(PIECE))))
    if present == text or (present and not present.startswith(HEADING)):
        return
    pieces = [text[start : start + LENGTH] for start in range(0, len(text), LENGTH)]
    for number in range(max(len(pieces), len(old))):
        storage.set_study_system_attr(identity, f"{PIECE}{number}", pieces[number] if number < len(pieces) else "")
    storage.set_study_system_attr(identity, VERSION, int(before.get(VERSION, 0)) + 1)
