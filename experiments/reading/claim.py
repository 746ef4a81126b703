"""A claim of the paper, and whether it holds here."""

from __future__ import annotations

from dataclasses import dataclass

AGREES, DIFFERS, PARTLY, MISSING = "agrees", "differs", "in part", "not run"


@dataclass(frozen=True)
class Claim:
    place: str
    paper: str
    ours: str
    verdict: str
    why: str = ""
    results: str = ""  # the files that it is computed from
