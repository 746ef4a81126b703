"""The growth record: the description of a model's growths in files of any kind, as JSON.

Files of `outgrow.save` hold it in their metadata, run files and checkpoints of other libraries as bytes in a tensor.
Its entries:

    model       the name of the model's class
    histories   plans, oldest first, by the path of the module that was grown ("" is the model itself)
    gates       unfinished fades of new modules, by path: steps made, and total steps
    drifts      unfinished faded widenings (see `weight_fades.pack_drifts`)

Each kind of file adds entries of its own beside these (shapes, aliases, checksums). `VERSION` counts changes of any file format
of outgrow. A file of a later version is refused before anything else in it is read. Files of 0.1.0 are of version 1, too:
entries that came after it are optional.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from outgrow.errors import CheckpointError
from outgrow.growth_plan.plan import Plan
from outgrow.history.growth_order import Histories
from outgrow.modules.gates import gates_of

VERSION = 1
EARLIER = "use an earlier copy of the file"
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class GrowthRecord:
    """The entries of a growth record. also: all entries of its JSON, including those that only one kind of file has."""

    model: str
    histories: Histories = field(default_factory=dict)
    gates: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    drifts: Sequence[Mapping[str, Any]] = ()
    also: Mapping[str, Any] = field(default_factory=dict)


def record_text(model: nn.Module, histories: Histories, drifts: Sequence[Mapping[str, Any]], **also: Any) -> str:
    """The growth record of a model as JSON. also: further entries for this kind of file.

    Example:
        >>> record_text(nn.Linear(2, 3), {}, [], shapes={"bias": [3]})
        '{"model":"Linear","histories":{},"gates":{},"drifts":[],"shapes":{"bias":[3]}}'
    """
    plans = {place: [plan.to_json() for plan in plans] for place, plans in histories.items()}
    gates = {place: [gate.done, gate.steps] for place, gate in gates_of(model).items()}
    about = {"model": type(model).__qualname__, "histories": plans, "gates": gates, "drifts": drifts, **also}
    return json.dumps(about, separators=(",", ":"))


def read_record(text: str | bytes, what: str, version: Any = None) -> GrowthRecord:
    """Read a growth record. what: the file's name in errors. version: of the file, if the record has no such entry.

    Raises CheckpointError if a later version of outgrow wrote it, or if it can't be read.

    Example:
        >>> read_record('{"model":"Linear","histories":{},"gates":{"0":[3,10]}}', "model.safetensors", version="1").gates
        {'0': (3, 10)}
    """
    try:
        about = json.loads(text)
        check_version(about["version"] if version is None else version, what)
        return GrowthRecord(
            str(about["model"]),
            {str(place): tuple(map(Plan.from_json, plans)) for place, plans in about["histories"].items()},
            {str(place): (int(done), int(steps)) for place, (done, steps) in about.get("gates", {}).items()},
            tuple(dict(fact) for fact in about.get("drifts", ())),
            about,
        )
    except UNREADABLE as error:
        raise unreadable(what, error) from error


def check_version(version: Any, what: str) -> None:
    """Raise CheckpointError if this outgrow does not read a file's version. what: the file's name in the error.

    Example:
        >>> check_version(2, "run.pt")
        Traceback (most recent call last):
            ...
        outgrow.errors.CheckpointError: run.pt has format version 2, and this outgrow reads up to 1: install a newer outgrow
    """
    if isinstance(version, bool) or not str(version).isdecimal():
        raise CheckpointError(f"{what} is damaged: its format version reads {version!r}: {EARLIER}")
    if int(version) > VERSION:
        raise CheckpointError(
            f"{what} has format version {version}, and this outgrow reads up to {VERSION}: install a newer outgrow"
        )


def unreadable(what: str, error: Exception) -> CheckpointError:
    """The error for a record that can't be read."""
    return CheckpointError(f"{what} is damaged: its growth history can't be read ({type(error).__name__}: {error}): {EARLIER}")
