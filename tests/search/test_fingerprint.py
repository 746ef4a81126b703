"""Fingerprints of a search's parent: what they tell apart, and what they do not depend on."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import SearchError
from outgrow.search.fingerprint import check_same, fingerprint
from tests.helpers import searches
from tests.helpers.searches import SPACE, inputs, sgd, small

optuna = pytest.importorskip("optuna")


def start(parent: nn.Module, **options: Any) -> Any:
    return outgrow.search(parent, inputs(), SPACE, searches.train, "error", optimizer=sgd, quiet=True, **options)


def relu() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(8, heads, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x)[0])


class Routed(nn.Module):
    """Which operators run depends on values of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out, self.gate = nn.Linear(4, 4), nn.Linear(4, 1), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.out(x.relu() if float(self.gate) > 0 else x.tanh())


@pytest.mark.parametrize("storage", ["a.log", "sqlite:///{}/a.db"])
def test_a_study_is_not_continued_with_a_parent_of_another_activation(storage: str, tmp_path: Path) -> None:
    place = storage.format(tmp_path) if "://" in storage else str(tmp_path / storage)
    parent = small()
    begun = start(parent, trials=2, storage=place)
    before = [(t.state, t.values, t.user_attrs) for t in begun.study.get_trials()], begun.study.user_attrs
    for trials in (2, 4):
        with pytest.raises(SearchError, match=r"(there aten\.tanh; here aten\.relu).*continue it with the parent"):
            start(relu(), trials=trials, storage=place)
    study = optuna.load_study(study_name="search", storage=begun.study._storage)
    assert ([(t.state, t.values, t.user_attrs) for t in study.get_trials()], study.user_attrs) == before
    again = start(small(), trials=4, storage=place)  # other weights, and the same computation
    assert len(again.records) == 4


def test_a_study_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    place = str(tmp_path / "a.log")
    begun = start(small(), trials=1, storage=place)
    facts = dict(begun.study.user_attrs["outgrow"])
    assert facts.pop("parent")
    begun.study.set_user_attr("outgrow", facts)
    found = start(relu(), trials=2, storage=place)
    assert len(found.records) == 2
    assert "parent" not in found.study.user_attrs["outgrow"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ELU(1.0)), nn.Sequential(nn.Linear(4, 4), nn.ELU(0.5))),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, 1e-5)), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, 1e-3))),
        (nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Sequential(nn.Linear(4, 4), nn.GELU("tanh"))),
    ],
)
def test_constants_in_the_code_are_told_apart(one: nn.Module, other: nn.Module) -> None:
    with pytest.raises(SearchError, match="numbers in its code differ"):
        check_same("s", fingerprint(one, inputs()), fingerprint(other, inputs()))


def test_numbers_of_heads_are_told_apart() -> None:
    x = torch.randn(2, 5, 8)
    with pytest.raises(SearchError, match="numbers in its code differ"):
        check_same("s", fingerprint(Attention(2), x), fingerprint(Attention(4), x))


def test_weights_modes_values_of_the_example_threads_and_copies_make_no_difference() -> None:
    first = fingerprint(Attention(2), torch.randn(2, 5, 8))
    model = Attention(2).train()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert fingerprint(model, torch.randn(2, 5, 8)) == first
    finally:
        torch.set_num_threads(threads)
    assert model.training
    assert fingerprint(copy.deepcopy(model), torch.full((2, 5, 8), 3.0)) == first
    torch.set_rng_state(state)
    assert json.loads(json.dumps(first)) == first


def test_other_examples_and_types_are_not_compared() -> None:
    first = fingerprint(Attention(2), torch.randn(2, 5, 8))
    check_same("s", first, fingerprint(Attention(4), torch.randn(3, 5, 8)))
    check_same("s", first, fingerprint(Attention(4).double(), torch.randn(2, 5, 8).double()))
    check_same("s", None, first)


def test_a_parent_whose_pass_depends_on_its_weights_has_none(tmp_path: Path) -> None:
    assert fingerprint(Routed(), inputs()) is None
    start(Routed(), trials=1, storage=str(tmp_path / "a.log"))
    assert len(start(Routed(), trials=2, storage=str(tmp_path / "a.log")).records) == 2


def test_it_is_the_same_in_other_processes_with_other_seeds_of_hashes() -> None:
    code = (
        "import json, torch; from tests.search.test_fingerprint import Attention, fingerprint;"
        "print(json.dumps(fingerprint(Attention(2), torch.randn(2, 5, 8))))"
    )
    mine = fingerprint(Attention(2), torch.randn(2, 5, 8))
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed}
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert json.loads(found.stdout) == mine
