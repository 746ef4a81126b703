"""The paper's comparison of R2R, Net2Net and NetMorph (its table 1), for one place in a model at hand.

The paper's table says what holds in general. Here every row is determined at the place itself: the operators there are tested,
and a copy of the model is grown by each method and measured. The model itself and the random state stay unchanged.
"""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.comparing.columns import Column, compared_volume, deepening, widening
from outgrow.comparing.ending_activation import ends_in
from outgrow.comparing.operators_between import Operator
from outgrow.comparing.symmetry_breaking import DEAD
from outgrow.errors import Problem, SelectionError
from outgrow.methods.base import Method
from outgrow.methods.net2net import Net2Net
from outgrow.methods.netmorph import NetMorph
from outgrow.methods.r2r import R2R
from outgrow.model.check_arguments import check_model
from outgrow.model.compiled import uncompiled
from outgrow.model.example import Example
from outgrow.model.module_calls import calls_of
from outgrow.model.sandbox import random_state
from outgrow.model.unwrap import bare
from outgrow.text.tables import plain_table
from outgrow.transforms.widen.choose_volumes import matches
from outgrow.wrong_arguments import usage

WIDTH = 118
WIDENING: tuple[Method, ...] = (R2R(), Net2Net(), NetMorph(), NetMorph(zero="writers"))
DEEPENING = ("r2r", "net2net", "netmorph")
TITLES = {"netmorph(zero='writers')": "netmorph, writers zero", "netmorph": "netmorph, readers zero"}


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`. `print(comparison)` shows it as tables.

    widen: a column for each method, if the place is a volume. deepen: a column for each method, if it is a module.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
        >>> column = compare(model, torch.randn(8, 3), "0").widen["r2r"]
        >>> column.preserving, column.noise, column.free, column.new, column.amount
        ('yes', False, 6, 12, 'even')
    """

    model: str
    where: str
    operators: tuple[Operator, ...] = ()  # between the volume's writers and readers
    ends_in: Operator | None = None  # the module's final activation
    widen: Mapping[str, Column] = field(default_factory=dict)
    deepen: Mapping[str, Column] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = []
        if self.widen:
            parts += _operators(f"on the path of {self.where}", self.operators)
            parts += _columns("widening", "new channels", self.widen, TITLES)
        if self.deepen:
            parts += _operators(f"{self.where} ends in", (self.ends_in,) if self.ends_in else ())
            parts += _columns("deepening", "new layers", self.deepen, {})
        return "\n\n".join(parts)

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data


@usage("outgrow.compare(model, example, 'layer1.0.conv1')")
@uncompiled()
def compare(model: nn.Module, example: Example, where: str) -> Comparison:
    """Compare R2R, Net2Net and NetMorph at one place of a model: the paper's table 1, determined by growing copies.

    Args:
        model: stays unchanged; copies of it are grown.
        example: a tensor, a tuple of arguments, or a dict of keyword arguments.
        where: the name of a volume (as in `outgrow.volumes`), of a module after which new blocks can be inserted (as in
            `outgrow.places`), or of both.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
        >>> comparison = compare(model, torch.randn(8, 3), "1")
        >>> comparison.deepen["net2net"].unmet, comparison.deepen["r2r"].preserving
        (('gelu',), 'yes')
    """
    model = bare(model)
    check_model(model)
    if not isinstance(where, str):
        raise SelectionError(f"where={where!r}: write the name of one volume or module")
    with random_state():
        anatomy = dissect(model, example)
        volume, is_module = _find(model, anatomy, where)
        result = Comparison(type(model).__qualname__, where)
        if volume is not None:
            place = compared_volume(model, example, anatomy, volume)
            wider = {method.name: widening(place, method) for method in WIDENING}
            result = replace(result, operators=place.path.operators, widen=wider)
        if is_module:
            last = _last(model, example, where)
            deeper = {method: deepening(model, example, where, method, last) for method in DEEPENING}
            result = replace(result, ends_in=last, deepen=deeper)
    return result


def _find(model: nn.Module, anatomy: Anatomy, where: str) -> tuple[Volume | None, bool]:
    """The volume of that name, if there is one, and whether there is a module of that name."""
    modules = [path for path, _ in model.named_modules() if path]
    found = [volume for volume in anatomy.volumes if volume.name == where]
    found = found or [volume for volume in anatomy.volumes if matches(volume, where)]
    if len(found) > 1:
        some = ", ".join(volume.name for volume in found[:8]) + (" …" if len(found) > 8 else "")
        raise SelectionError(f"{where!r} selects {len(found)} volumes, and one is compared at a time: name one of {some}")
    if not found and where not in modules:
        names = list(dict.fromkeys([*(volume.name for volume in anatomy.volumes), *modules]))
        near = ", ".join(difflib.get_close_matches(where.strip("*."), names, n=5, cutoff=0.2) or names[:5])
        way_out = "outgrow.volumes(model, example) and outgrow.places(model, example) list them all"
        problem = Problem("", f"similar names: {near}", way_out)
        raise SelectionError(f"no volume and no module is called {where!r}", [problem])
    return (found[0] if found else None), where in modules


def _last(model: nn.Module, example: Example, where: str) -> Operator | None:
    calls = calls_of(model, example, [where])[where]
    return ends_in(model.get_submodule(where), calls[0]) if calls else None


def _operators(title: str, operators: Sequence[Operator]) -> list[str]:
    shown = {True: "yes", False: "no", None: "–"}
    header = (title, "ψ(0) = 0", "ψ(ψ(x)) = ψ(x)", "units alike", "units apart")
    rows = [(str(o), shown[o.zero], shown[o.idempotent], shown[o.alike], shown[o.apart]) for o in operators]
    return [plain_table(header, rows or [("no activation", "–", "–", "–", "–")], WIDTH)]


def _columns(title: str, amount: str, columns: Mapping[str, Column], titles: Mapping[str, str]) -> list[str]:
    """A table with a column for each method, and the reasons of refusals below it."""
    reasons = list(dict.fromkeys(column.refused for column in columns.values() if column.refused))
    facts: dict[str, Callable[[Column], str]] = {
        "tried": lambda column: column.tried or "–",
        "activations": _needs,
        "function preserving": lambda column: _preserving(column, reasons),
        "requires noise": _noise,
        "residual connections": lambda column: column.residual or "–",
        "degrees of freedom": _freedom,
        "preserves existing parameters": _kept,
        amount: lambda column: column.amount or "–",
    }
    rows = [(label, *(fact(column) for column in columns.values())) for label, fact in facts.items()]
    notes = ["\n    ".join(textwrap.wrap(f"[{n}] {reason}", WIDTH - 4)) for n, reason in enumerate(reasons, 1)]
    return [
        plain_table((title, *(titles.get(name, name) for name in columns)), rows, WIDTH),
        *(["\n".join(notes)] if notes else []),
    ]


def _needs(column: Column) -> str:
    if column.unmet is None:
        return column.needs
    if not column.unmet:
        return f"{column.needs}: met"
    more = f" + {len(column.unmet) - 1} more" if len(column.unmet) > 1 else ""
    return f"{column.needs}: not met, {column.unmet[0]}{more}" + (f"; exact {column.instead}" if column.instead else "")


def _preserving(column: Column, reasons: Sequence[str]) -> str:
    if column.refused:
        return f"{column.preserving or 'refused'} [{reasons.index(column.refused) + 1}]"
    shown = "yes" if not column.chance else f"in expectation: {column.chance} is random"
    return f"{shown} (error {column.max_error:.1e}, limit {column.tolerance:.1e})"


def _noise(column: Column) -> str:
    shown = {None: column.parting or "–", True: "yes: new units stay equal", False: "no"}[column.noise]
    return "new units are dead: they get no gradient" if column.parting == DEAD else shown


def _freedom(column: Column) -> str:
    if column.free is None or not column.new:
        return "–"
    return f"{column.free:,} of {column.new:,} ({column.free / column.new:.0%})"


def _kept(column: Column) -> str:
    if column.refused:
        return "–"
    more = f" + {len(column.changed) - 1} more" if len(column.changed) > 1 else ""
    return f"no: {column.changed[0]}{more}" if column.changed else "yes"
