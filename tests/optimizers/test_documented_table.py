"""The table of docs/results/optimizers.md agrees with the code."""

from __future__ import annotations

import json

import pytest

from benchmarks.carried import Result
from benchmarks.optimizers import END, PAGE, RESULTS, START, examined, row, setups, table
from outgrow.optimizers.known_classes import KNOWN, NO_COPIES, REFUSED
from outgrow.optimizers.state_rules import WORDS

RECORDED = {(one["library"], one["name"]): Result(**one) for one in json.loads(RESULTS.read_text())}
QUICK = [("torch", "AdamW"), ("timm", "lamb"), ("pytorch_optimizer", "accsgd"), ("pytorch_optimizer", "conda")]


def test_the_page_shows_the_recorded_results() -> None:
    shown = PAGE.read_text().partition(START)[2].partition(END)[0].strip()
    same_versions = table(list(RECORDED.values())).partition("Versions: ")
    assert shown.partition("Versions: ")[0] == same_versions[0]
    assert shown.partition("| library")[2] == same_versions[2].partition("| library")[2]


def test_everything_that_is_carried_was_seen_to_be_carried_rightly() -> None:
    for result in RECORDED.values():
        if row(result)[2] == "carried":
            assert result.new < 5, result
            assert result.block_new < 6, result
            assert result.ratio < 2, result  # existing entries do not leap; a norm may hold them back
    for words in KNOWN.values():
        assert set(words.values()) <= set(WORDS)
    assert not set(KNOWN) & set(REFUSED)
    assert set(NO_COPIES) <= set(KNOWN)


@pytest.mark.parametrize(
    ("library", "name"), [pytest.param(*key, marks=() if key in QUICK else pytest.mark.exhaustive) for key in RECORDED]
)
def test_what_is_recorded_is_seen_again(library: str, name: str) -> None:
    make = {(one, other): make for one, other, make in setups([library])}[library, name]
    found, recorded = row(examined(library, name, make)), row(RECORDED[library, name])
    assert found[2] == recorded[2]
    if found[2] == "carried":
        assert (found[3].split()[0], found[5]) == (recorded[3].split()[0], recorded[5])
    elif found[2] == "refused":
        assert found[3] == recorded[3]
