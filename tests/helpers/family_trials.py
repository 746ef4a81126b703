"""Try cells of the table of families: grow, compare, save, train a step, and read the saved models in another process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import outgrow
from outgrow.configuration.explain_differences import NOT_UPDATED
from tests.helpers.family_cases import Cell, Row
from tests.helpers.judging import distance
from tests.helpers.read_elsewhere import INPUTS, RESULTS, elsewhere, results, scores

ROOT = Path(__file__).parents[2]
WANTED = "wanted.safetensors"
EXACT = "exact"


@dataclass(frozen=True)
class Trial:
    """The verdict on a cell: `EXACT`, or what went wrong; `refusal` is the message where a growth or saving it is refused."""

    row: Row
    kind: str
    verdict: str
    refusal: str = ""

    @property
    def cell(self) -> Cell:
        return self.row.cells[self.kind]

    @property
    def unexpected(self) -> str:
        """How the verdict differs from what the table expects; empty if it does not."""
        part = self.cell.refused[0] if self.cell.refused else ""
        if part:
            return "" if self.refusal and part in self.refusal else f"expected: refused, {part!r}; found: {self.verdict}"
        return "" if self.verdict == EXACT else f"expected: exact; found: {self.verdict}"

    def __str__(self) -> str:
        return f"{self.row.name} {self.kind}"


def try_cells(cells: Sequence[tuple[Row, str]], folder: Path) -> list[Trial]:
    """Grow all cells here, then read what was saved in one other process."""
    trials = [_tried(row, kind, folder / f"{row.name} {kind}") for row, kind in cells]
    saved = [trial for trial in trials if trial.verdict == EXACT]
    failures = elsewhere("outputs_of_families", [(str(folder / str(trial)), trial.row.generates) for trial in saved])
    return [_judged(trial, folder / str(trial), failures) if trial in saved else trial for trial in trials]


def _tried(row: Row, kind: str, folder: Path) -> Trial:
    try:
        return _grown(row, kind, folder)
    except Exception as error:  # a cell of many: the others are tried too
        return Trial(row, kind, f"failed: {type(error).__name__}: {error}")


def _grown(row: Row, kind: str, folder: Path) -> Trial:
    """The verdict on a growth in memory; if it is exact and can be saved, the model and its outputs are in the folder."""
    cell, example, other = row.cells[kind], row.example(1, 2, 12), row.example(7, 3, 9)
    model: Any = row.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _train(model, optimizer, example, 1)
    before, state = results(copy.deepcopy(model), other, row.generates), _state(model)
    try:
        growth = outgrow.grow(model, example, *cell.requests, optimizer=optimizer)
    except outgrow.GrowthError as error:
        changed = "" if _state(model) == state else "; but the model has changed"
        return Trial(row, kind, f"refused: {error}{changed}", "" if changed else str(error))
    after = results(copy.deepcopy(model), other, row.generates)
    if difference := _difference(before, after, row.limit, ("outputs", "tokens")):
        return Trial(row, kind, difference)
    if cell.steps:
        _train(model, optimizer, example, cell.steps)
        before = after = results(copy.deepcopy(model), other, row.generates)
    elif NOT_UPDATED in str(growth):
        line = next(line for line in str(growth).splitlines() if NOT_UPDATED in line)
        return Trial(row, kind, line, line)
    model.save_pretrained(folder)
    save_file({name: value.contiguous() for name, value in other.items()}, folder / INPUTS)
    save_file({**before, "other outputs": after["other outputs"]}, folder / WANTED)
    return Trial(row, kind, _train(model, optimizer, example, 1) or EXACT)


def _train(model: Any, optimizer: torch.optim.Optimizer, example: dict[str, Tensor], steps: int) -> str:
    """Steps of an optimizer; returns what went wrong."""
    for _ in range(steps):
        optimizer.zero_grad()
        scores(model, example).square().mean().backward()
        bad = [name for name, p in model.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        if bad:
            return f"the gradient of {bad[0]} is not finite"
        optimizer.step()
    return ""


def _state(model: Any) -> Any:
    weights = {name: (tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()}
    return weights, model.config.to_dict()


def _difference(wanted: dict[str, Tensor], found: dict[str, Tensor], limit: float, names: Sequence[str]) -> str:
    for name in (name for name in names if name in wanted):
        if name == "tokens":
            if not torch.equal(wanted[name], found[name]):
                return "other tokens are generated with a cache"
        elif (error := distance(wanted[name], found[name])) > limit:
            return f"{name} differ by {error:.1e}"
    return ""


def _judged(trial: Trial, folder: Path, failures: dict[str, str]) -> Trial:
    problem = failures.get(str(folder), "")
    if not problem:
        wanted = load_file(folder / WANTED)
        problem = _difference(wanted, load_file(folder / RESULTS), trial.row.limit, list(wanted))
    return replace(trial, verdict=f"saved and loaded: {problem}") if problem else trial
